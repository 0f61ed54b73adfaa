"""A forked child of the spawner sets itself up and becomes a worker or a rendezvous store."""

from __future__ import annotations

import functools
import importlib
import io
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from unirun.launcher import worker
from unirun.launcher.environment import INTERPRETER, counts_at_import
from unirun.launcher.preloaded import PreloadedModules
from unirun.launcher.process import BOOT, set_title
from unirun.observe.jobdir import open_log
from unirun.rendezvous.endpoints import GENERATION_KEY
from unirun.values import natural
from unirun.wire.reporting import report
from unirun.wire.reports import Spawn

# State that a forked worker reinitialises: stdin, multiprocessing keys, random generators, torch settings.


def renew() -> None:
    """Reinitialise the fork, once it has the worker's descriptors, directory and environment."""
    _renew_stdin()
    _renew_multiprocessing()
    # `random` reseeds itself after a fork.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    main: Any = threading.main_thread()
    main._set_native_id()


def _renew_stdin() -> None:
    """Create ``sys.stdin`` as the interpreter does: the spawner's was created for another descriptor 0."""
    old = sys.__stdin__
    if not isinstance(old, io.TextIOWrapper):
        return
    raw = io.FileIO(0, closefd=False)
    raw.name = "<stdin>"
    fresh = io.TextIOWrapper(
        io.BufferedReader(raw),
        encoding=old.encoding,
        errors=old.errors,
        newline="\n",
        write_through=old.write_through,
    )
    fresh.mode = "r"  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = fresh  # type: ignore[misc]


def _renew_multiprocessing() -> None:
    """Reset the values that `multiprocessing` computes at import."""
    multiprocessing.current_process().authkey = os.urandom(32)
    process: Any = multiprocessing.process
    process.ORIGINAL_DIR = os.getcwd()


def end_groups_when_idle() -> None:
    """Let ``destroy_process_group`` wait until the threads of process groups are idle.

    torch joins them with the GIL held when the last reference to a gloo group is dropped, which a DDP module may have.
    One of them may need the GIL then, to release the context of a backward pass with its last operation: both would
    wait for ever.
    """
    from torch import distributed
    from torch.distributed import distributed_c10d

    destroy = distributed_c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_when_idle(*args: Any, **kwargs: Any) -> Any:
        worker.wait_for_threads()
        return destroy(*args, **kwargs)

    for module in (distributed, distributed_c10d):
        setattr(module, destroy.__name__, destroy_when_idle)


def renew_torch(start: Mapping[str, str]) -> None:
    """Apply the environment variables that torch read at import, in the spawner.

    `start` is the worker's initial environment. Variables that its code has set since, before it imported torch, are
    applied where possible; the others are reported.
    """
    import torch

    env = os.environ
    threads = (env.get("MKL_NUM_THREADS") or env.get("OMP_NUM_THREADS", "")).split(",")[0]
    if number := natural(threads):
        # MKL uses at most as many threads as there are processors.
        torch.set_num_threads(min(number, len(os.sched_getaffinity(0))))
    if "TORCH_LOGS" in env:
        importlib.import_module("torch._logging")._init_logs()
    if torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]
        end_groups_when_idle()
    late = sorted(
        name
        for name in {*env, *start}
        if env.get(name) != start.get(name) and counts_at_import(name) and name not in _TAKEN
    )
    if late:
        names = ", ".join(late)
        report(
            f"unirun: {names}: set after this process had loaded torch, so without effect; "
            "start with --env NAME=VALUE, or with --start-method exec"
        )


_TAKEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""The variables read at import that `renew_torch` applies."""


SETUP_FAILED = 126
"""Exit code of a worker whose process could not be set up; the reason is in its stderr."""

HELD_SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
"""Blocked from the fork until the child has its own handlers: the spawner's would drop them."""


def open_logs(request: Spawn) -> tuple[int, int]:
    """Create and open the log files of a worker, with their directories. Returns their descriptors, for stdout and
    stderr. Workers write to files, not pipes, so no reader can block them. Raises OSError."""
    base, folder = Path(request.logs), Path(request.folder)
    stdout = open_log(base, folder / "stdout.log")
    try:
        return stdout, open_log(base, folder / "stderr.log")
    except OSError:
        os.close(stdout)
        raise


Task = Callable[[], None]
"""The task of a forked child; it returns or raises SystemExit when the process should end."""


def run_worker(request: Spawn, logs: tuple[int, int], descriptors: int, modules: PreloadedModules) -> None:
    """Set the process up with its `logs`, then run the user's code, in this process or in a fresh interpreter."""
    try:
        _set_up(request, logs, descriptors)
    except OSError as error:
        _give_up(request, error)
    if request.kind == "program":
        _execute([request.target, *request.args], request)
    if request.fresh:
        command = [request.env.get(INTERPRETER, sys.executable), "-u", BOOT, "worker"]
        _execute([*command, request.kind, request.target, *request.args], request)
    renew()
    modules.in_fork(partial(renew_torch, request.env))
    worker.run(request.kind, request.target, request.args)


def run_store(role: str, generation: int, handle: int) -> None:
    """Serve a TCPStore on the listening socket `handle`, with the `generation` in it, until the spawner kills this
    process, as it opens the store of the next generation."""
    set_title(f"store:{role}")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.socket(fileno=handle)
    address, port = listener.getsockname()[:2]
    listener.detach()
    # It also connects to itself. In a job of several hosts nobody listens on loopback.
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=handle)
    store.set(GENERATION_KEY, str(generation))
    signal.pause()
    del store


def _set_up(request: Spawn, logs: tuple[int, int], descriptors: int) -> None:
    set_title(request.title)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stdin = os.open(os.devnull, os.O_RDONLY) if request.stdin is None else request.stdin
    for source, target in ((stdin, 0), (logs[0], 1), (logs[1], 2)):
        os.dup2(source, target)
        os.close(source)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    if request.cpus is not None:
        os.sched_setaffinity(0, request.cpus)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)


def _execute(command: list[str], request: Spawn) -> NoReturn:
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores these; programs expect the kernel's defaults.
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, request.env)
    except OSError as error:
        report(f"unirun: {command[0]} cannot be executed: {error.strerror}")
        os._exit(127 if isinstance(error, FileNotFoundError) else SETUP_FAILED)


def _give_up(request: Spawn, error: OSError) -> NoReturn:
    """Report the error on the worker's stderr, to which ``sys.stderr`` already writes, and exit."""
    report(f"unirun: {request.title} could not be set up: {error}")
    os._exit(SETUP_FAILED)
