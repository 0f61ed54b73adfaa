"""The bootstrap of a worker: says hello to the agent, runs the user's code as ``__main__``, reports its error.

Two ways in: `run_forked`, in a child of a spawner that has imported torch already, and ``python -m
unirun.launcher.worker KIND TARGET [ARG…]`` in a fresh interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import importlib.machinery
import io
import json
import os
import random
import runpy
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import NoReturn

from unirun.errors import UnirunError
from unirun.failover import is_lasting
from unirun.reporting import report, report_error
from unirun.wire.blocking import BlockingStream
from unirun.wire.link import open_link
from unirun.wire.reports import WorkerError
from unirun.wire.spawning import Spawn

MAX_MESSAGE = 1 << 16
MAX_TRACEBACK = 1 << 18
"""Characters of an exception that are reported; the error file and the log have all of it."""


def run_forked(request: Spawn) -> NoReturn:
    """Run in a forked child, after making it as good as a new process."""
    _renew_streams()
    _renew_randomness()
    _renew_torch()
    run_to_end(request.kind, request.target, request.args)


def run_to_end(kind: str, target: str, args: tuple[str, ...]) -> NoReturn:
    """Run the user's code, then end this process with its exit code."""
    code = 0
    try:
        run(kind, target, args)
    except SystemExit as leave:
        code = _exit_code(leave)
    _leave(code)


def _exit_code(leave: SystemExit) -> int:
    """The code of ``sys.exit(x)``, as the interpreter takes it."""
    if leave.code is None or isinstance(leave.code, int):
        return int(leave.code or 0)
    report(leave.code)
    return 1


def _leave(code: int) -> NoReturn:
    """End as the interpreter does (threads, exit handlers, open files), but without taking modules apart.

    That last part would copy, page by page, all the memory that is shared with the spawner, a second of work for
    nothing, and it is where a script without ``destroy_process_group`` aborts ("terminate called without an
    active exception"). `multiprocessing` ends its forked children in the same way.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException as error:  # noqa: BLE001 - an exit handler must not keep the process alive
        report_error(error)
        code = code or 1
    _close_files()
    os._exit(code & 0xFF)


def _close_files() -> None:
    """Write what the script's files still hold. The spawner's own objects are frozen, so they are not found."""
    standard = (sys.stdin, sys.stdout, sys.stderr)
    found = [o for o in gc.get_objects() if issubclass(type(o), io.IOBase) and o not in standard]
    # A wrapper comes before what it wraps: text, then Python's own classes (gzip), then buffers.
    order: dict[type, int] = {io.TextIOWrapper: 0, io.BufferedWriter: 2, io.BufferedRandom: 2, io.FileIO: 3}
    for file in sorted(found, key=lambda file: order.get(type(file), 1)):
        with contextlib.suppress(Exception):
            file.close()
    for stream in standard[1:]:
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def run(kind: str, target: str, args: tuple[str, ...]) -> None:
    """Run the user's code; raises SystemExit with its code. An uncaught exception is shown and reported."""
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable()
    try:
        link = open_link(os.environ)
    except UnirunError as error:
        report(f"unirun: this worker cannot reach its agent: {error}")
        raise SystemExit(1) from error
    try:
        if kind == "module":
            _run_module(target, args)
        elif kind in ("workload", "trainer"):
            _run_module("unirun.roles", (kind, target))
        else:
            _run_script(target, args)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever ended the script is reported, then it ends
        _report(link, error, lasting=_is_lasting(kind, error))
        sys.excepthook(type(error), error, error.__traceback__)
        # As Python does for an interrupt that nobody caught.
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None
    _flush(link)


def _run_script(path: str, args: tuple[str, ...]) -> None:
    if Path(path).is_dir() or path.endswith((".zip", ".pyz")):
        sys.argv = [path, *args]
        runpy.run_path(path, run_name="__main__")
        return
    full = os.path.abspath(path)
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=full,
        __builtins__=__builtins__,
        __annotations__={},
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", full),
    )
    sys.modules["__main__"] = main
    sys.argv = [path, *args]
    sys.path.insert(0, str(Path(path).resolve().parent))
    code = compile(Path(path).read_bytes(), full, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 - to run the user's script is what a worker is for


def _run_module(name: str, args: tuple[str, ...]) -> None:
    sys.path.insert(0, os.getcwd())
    sys.argv = [name, *args]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _is_lasting(kind: str, error: BaseException) -> bool:
    """Whether `error` would come again in a worker that is started anew.

    A script has been at work from its first line on: only one that could not be begun is as wrong the next time.
    """
    error.__traceback__ = _without_bootstrap(error.__traceback__)
    begun = error.__traceback__ is not None
    return is_lasting(error) and (kind in ("workload", "trainer") or not begun)


def _report(link: BlockingStream, error: BaseException, *, lasting: bool = False) -> None:
    """Tell the agent, and write torch's error file unless ``@record`` has done so."""
    error.__traceback__ = _without_bootstrap(error.__traceback__)
    message = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SyntaxError):
        # Python puts the place before the words; a report that shows one line needs the words.
        message = f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    now = time.time()
    with contextlib.suppress(UnirunError):
        link.send(WorkerError(message[:MAX_MESSAGE], trace[-MAX_TRACEBACK:], now, lasting))
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": trace, "timestamp": str(int(now))}
        text = json.dumps({"message": {"message": message, "extraInfo": extra}})
        # One that is there already is `@record`'s, or a link that another user has put where he may write.
        with contextlib.suppress(OSError), open(path, "x", opener=_private) as file:
            file.write(text)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _without_bootstrap(trace: types.TracebackType | None) -> types.TracebackType | None:
    ours = {
        __file__,
        runpy.__file__,
        "<frozen runpy>",
        *map(str, Path(__file__).parents[1].glob("roles/*.py")),
    }
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _flush(link: BlockingStream) -> None:
    """What is still buffered must reach the log; a disk that is full is the worker's error, not a silence."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            _report(link, error)
            os._exit(1)


def _renew_streams() -> None:
    """Streams as under ``python -u``: what is printed is in the log, even when the process is killed in mid-line."""
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as the process
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115 - likewise
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))


def _renew_randomness() -> None:
    """A fork would share the spawner's random state with its siblings. What is not imported yet will seed itself."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _renew_torch() -> None:
    """Read again what torch has read from the spawner's environment when it was imported."""
    if "torch" not in sys.modules:
        return
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if threads.isdigit() and int(threads) > 0:
        torch.set_num_threads(int(threads))
    if "TORCH_LOGS" in os.environ:
        importlib.import_module("torch._logging")._init_logs()
    if torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]


if __name__ == "__main__":
    run_to_end(sys.argv[1], sys.argv[2], tuple(sys.argv[3:]))
