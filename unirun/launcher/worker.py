"""The bootstrap of a worker: connects to the agent, runs the user's code as ``__main__``, reports its error.

Entered by `run` in a fork of a spawner, where torch is already imported, or by `main` in a fresh interpreter. Both
return to the interpreter, which ends the process as after any script.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import errno
import faulthandler
import importlib.machinery
import io
import json
import os
import pkgutil
import runpy
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

from unirun import atomic
from unirun.errors import UnirunError, UsageError
from unirun.launcher.process import set_command_line, set_title
from unirun.launcher.requests import await_requests
from unirun.launcher.sampler import answer_for_stacks, watch_myself
from unirun.launcher.tracing import trace_myself
from unirun.wire.blocking import BlockingStream, open_link
from unirun.wire.reporting import folded, noted, report, report_error
from unirun.wire.reports import WorkerError

# The test for permanent errors, which a restart of the worker would raise again.

_PERMANENT = (ImportError, SyntaxError, NotImplementedError, UsageError)
_TRANSIENT = (OSError, MemoryError, RuntimeError)


def is_permanent(error: BaseException) -> bool:
    """Return True if `error` is in the code or its installation: a module that is not there, text that is no
    Python, a method that is missing, a wrong use of unirun.

    Conservative: what may have come from outside (files, network, devices: `OSError`, `RuntimeError`, `MemoryError`)
    may pass, and so may what was raised because of it.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, _TRANSIENT) and not isinstance(cause, _PERMANENT):
            return False
        seen.add(id(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return isinstance(error, _PERMANENT)


# A worker's stdout and stderr, which are log files: a full disk loses output, and ends no worker.

_FULL = (errno.ENOSPC, errno.EDQUOT)


class LogFile(io.FileIO):
    """A log file whose writes succeed when the disk is full. Lost bytes are counted, and noted when there is room."""

    lost = 0

    def write(self, data: Any) -> int:
        """Write, or lose it. Raises OSError for other reasons than a full disk."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            if self.lost:
                super().write(f"\n[unirun: the disk was full, {self.lost} bytes are lost]\n".encode())
                self.lost = 0
            # A disk that becomes full takes a part first.
            while left and (written := super().write(left)):
                left = left[written:]
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self.lost += len(left)
        return size


def outlast_full_disks() -> None:
    """Let ``sys.stdout`` and ``sys.stderr`` write to their descriptors as a `LogFile`, and be unbuffered as under
    ``python -u``."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        if not isinstance(old, io.TextIOWrapper):
            # The user's site packages have replaced it.
            continue
        old.flush()
        raw = LogFile(number, "wb", closefd=False)
        raw.name = old.name
        fresh = io.TextIOWrapper(
            raw,
            encoding=old.encoding,
            errors=old.errors,
            newline="\n",
            line_buffering=old.line_buffering,
            write_through=True,
        )
        fresh.mode = "w"  # type: ignore[misc]
        setattr(sys, name, fresh)
        setattr(sys, f"__{name}__", fresh)


MAX_MESSAGE = 1 << 16
MAX_TRACEBACK = 1 << 18
"""Limits in characters of a reported exception; the error file and the log have all of it."""

THREADS_IDLE_TIMEOUT = 0.2
"""Maximum seconds that a worker waits at exit for the threads of its process groups."""


def main(argv: list[str]) -> None:
    """Run the worker KIND TARGET ARG… in a fresh interpreter."""
    kind, target, *args = argv
    run(kind, target, tuple(args))


def run(kind: str, target: str, args: tuple[str, ...]) -> None:
    """Run the user's code; raises SystemExit with its code. An uncaught exception is printed and reported."""
    outlast_full_disks()
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable()
    try:
        link = open_link(os.environ)
    except UnirunError as error:
        report(f"unirun: this worker cannot reach its agent: {error}")
        raise SystemExit(1) from error
    # After the exit handlers of the user's code.
    atexit.register(wait_for_threads)
    answer_for_stacks()
    watch_myself(os.environ)
    trace_myself(os.environ)
    await_requests(os.environ)
    owner = os.getpid()
    title = f"{os.environ['UNIRUN_ROLE']}:{os.environ['UNIRUN_RANK']}"
    set_title(title)
    set_command_line(" ".join(["unirun", title, target, *args]))
    # As started by torchrun.
    what = ("-m", target) if kind == "module" else (target,)
    sys.orig_argv[:] = [sys.executable, "-u", *what, *args]
    try:
        if kind == "module":
            _run_module(target, args)
        elif kind in ("workload", "trainer", "function"):
            _run_module("unirun.roles", (kind, target, *args))
        else:
            _run_script(target, args)
        _leave_as_told()
        return
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever ended the script is reported, then it ends
        uncaught = error
    uncaught.__traceback__ = _without_bootstrap(uncaught.__traceback__)
    permanent = _is_permanent(kind, uncaught)
    folded(noted(uncaught))
    if os.getpid() == owner:
        _report(link, uncaught, permanent=permanent)
    _show(uncaught)
    if isinstance(uncaught, KeyboardInterrupt):
        # The interpreter then ends by SIGINT, and would print it again.
        sys.excepthook = _show_nothing
        raise uncaught
    raise SystemExit(1)


def _leave_as_told() -> None:
    """Raise SystemExit with 143 if the script has ended because `unirun.should_stop` said so."""
    module = sys.modules.get("unirun.roles.stopping")
    if module is not None and module.has_stopped():
        raise SystemExit(module.TOLD)


def _run_script(path: str, args: tuple[str, ...]) -> None:
    main = _new_main()
    sys.argv = [path, *args]
    if pkgutil.get_importer(path) is not None:
        # A directory or a zip file, whatever its name.
        _find_modules_in(os.path.abspath(path))
        _, spec, code = runpy._get_main_module_details()  # type: ignore[attr-defined]
        runpy._run_code(code, main.__dict__, None, "__main__", spec)  # type: ignore[attr-defined]
        return
    full = os.path.abspath(path)
    _find_modules_in(str(Path(path).resolve().parent))
    # Read once: it may be a pipe.
    source = Path(path).read_bytes()
    code = pkgutil.read_code(io.BytesIO(source))
    loader = (
        importlib.machinery.SourceFileLoader if code is None else importlib.machinery.SourcelessFileLoader
    )
    main.__dict__.update(__file__=full, __cached__=None, __loader__=loader("__main__", full))
    if code is None:
        code = compile(source, full, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 - to run the user's script is what a worker is for


def _run_module(name: str, args: tuple[str, ...]) -> None:
    main = _new_main()
    _find_modules_in(os.getcwd())
    sys.argv = ["-m", *args]
    _, spec, code = runpy._get_module_details(name)  # type: ignore[attr-defined]
    sys.argv[0] = spec.origin
    runpy._run_code(code, main.__dict__, None, "__main__", spec)  # type: ignore[attr-defined]


def _new_main() -> types.ModuleType:
    """Create the module in which the user's code runs, also for `multiprocessing`, whose children look it up."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = main
    return main


def _find_modules_in(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def wait_for_threads(limit: float = THREADS_IDLE_TIMEOUT) -> None:
    """Wait until the threads of process groups are idle, as PyTorch does not.

    A gloo thread takes the GIL to release the tensors of a finished operation. If the interpreter exits meanwhile, C++
    aborts the process (pytorch/pytorch#190489): up to a third of the ranks that do not destroy their groups, on a busy
    host.
    """
    if "torch" not in sys.modules:
        return
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        # Releases the GIL: a thread that waits for it runs, or is seen as running.
        time.sleep(0.001)
        if not _other_threads_run():
            return


def _other_threads_run() -> bool:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            if state == "R" and int(thread.name) != threading.get_native_id():
                return True
    return False


def _show(error: BaseException) -> None:
    """Print an uncaught exception as the interpreter does."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.last_exc = error  # type: ignore[attr-defined,unused-ignore]
    if not hasattr(sys, "excepthook"):
        report("sys.excepthook is missing")
        report_error(error)
        return
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as failed:  # noqa: BLE001 - a hook is the user's and may raise anything
        report("Error in sys.excepthook:")
        report_error(failed.with_traceback(_without_bootstrap(failed.__traceback__)))
        report("\nOriginal exception was:")
        report_error(error)


def _show_nothing(*_: object) -> None:
    pass


def _is_permanent(kind: str, error: BaseException) -> bool:
    """Return True if a restarted worker would raise `error` again.

    A script may have side effects from its first line on, so its error is permanent only if it could not be started.
    """
    begun = error.__traceback__ is not None
    return is_permanent(error) and (kind in ("workload", "trainer") or not begun)


def _report(link: BlockingStream, error: BaseException, *, permanent: bool) -> None:
    """Report to the agent, and write torch's error file unless ``@record`` has done so."""
    message = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SyntaxError):
        # Python prints the location before the message; a one-line report needs the message.
        message = f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    now = time.time()
    with contextlib.suppress(UnirunError):
        link.send(WorkerError(message[:MAX_MESSAGE], trace[-MAX_TRACEBACK:], now, permanent))
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": trace, "timestamp": str(int(now))}
        text = json.dumps({"message": {"message": message, "extraInfo": extra}})
        # An existing file is `@record`'s.
        with contextlib.suppress(OSError):
            if not os.path.lexists(path):
                atomic.replace(Path(path), text)


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
