"""Log lines of the processes of a job, on their stderr, which is their log file in the job's directory.

Reporting never raises: a full disk or a closed stderr loses the line, not the process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from unirun.errors import RemoteTraceback, UnirunError

NO_THREAD = "no thread can be started: the limit of this user's processes is reached; see ulimit -u"


def lacks_threads(error: BaseException) -> bool:
    """Return True if Python could not start a thread: `NO_THREAD` says it better than a traceback."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def report(text: object) -> None:
    """Write `text` and a newline to stderr, and flush."""
    # In a worker, user code may have replaced stderr by an object that raises anything.
    with contextlib.suppress(Exception):
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)


def gave_up(wait: str, seconds: float) -> None:
    """Report that a `wait` for what always comes soon has run into its time-out, and that the process goes on."""
    report(f"unirun: gave up waiting for {wait} after {seconds:g} s")


def report_error(error: BaseException) -> None:
    """Write the traceback of `error` to stderr."""
    report("".join(traceback.format_exception(error)).rstrip("\n"))


E = TypeVar("E", bound=BaseException)

_PACKAGE = Path(__file__).parents[1]
_BETWEEN = tuple(
    f"{_PACKAGE / room}{os.sep}" for room in ("experiments", "launcher", "roles", "train", "wire")
)
"""The folders of code that stands between functions of users, in calls and runs."""


def folded(error: E) -> E:
    """`error`, without the frames of unirun in its traceback and in those of the errors that have led to it.

    Those at the end stay where they may say what is wrong: if the error is none that unirun raises on purpose, and none
    that was raised in another process.
    """
    each: BaseException | None = error
    seen = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        raised_here = not isinstance(each.__cause__, RemoteTraceback)
        each.__traceback__ = _without_ours(
            each.__traceback__, to_the_end=not (raised_here and not isinstance(each, UnirunError))
        )
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return error


def _without_ours(trace: TracebackType | None, *, to_the_end: bool) -> TracebackType | None:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    ours = [frame.tb_frame.f_code.co_filename.startswith(_BETWEEN) for frame in frames]
    last = len(frames)
    while not to_the_end and last and ours[last - 1]:
        last -= 1
    found: TracebackType | None = None
    for number, frame in reversed([*enumerate(frames)]):
        if number >= last or not ours[number]:
            found = TracebackType(found, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return found


def noted(error: E) -> E:
    """`error`, with a note on what to do where a rank reads from a terminal that it does not have."""
    kind, words = type(error).__name__, ""
    if kind == "EOFError" and str(error) == "EOF when reading a line":
        words = "{rank} has no terminal: read it before the ranks start and pass it on, or run: unirun --stdin {rank} …"
    elif kind == "BdbQuit":
        words = (
            "{rank} has no terminal for breakpoint(): write unirun.breakpoint() in its place, or debug it as it runs "
            "with: unirun debug JOB {rank}"
        )
    if words and _reads_nothing():
        rank = f"{os.environ.get('ROLE_NAME', 'worker')}:{os.environ.get('RANK', '0')}"
        note = words.format(rank=rank)
        if f"unirun: {note}" not in getattr(error, "__notes__", ()):
            error.add_note(f"unirun: {note}")
    return error


def _reads_nothing() -> bool:
    """Return True if stdin is ``/dev/null``, as that of workers."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(0), os.stat(os.devnull))
    return True


def flush() -> None:
    """Flush stderr, before a process ends without the interpreter's clean-up."""
    with contextlib.suppress(Exception):
        if sys.stderr is not None:
            sys.stderr.flush()
