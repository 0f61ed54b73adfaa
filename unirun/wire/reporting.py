"""Log lines of the processes of a job, on their stderr, which is their log file in the job's directory.

Reporting never raises: a full disk or a closed stderr loses the line, not the process.
"""

from __future__ import annotations

import contextlib
import sys
import traceback

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


def flush() -> None:
    """Flush stderr, before a process ends without the interpreter's clean-up."""
    with contextlib.suppress(Exception):
        if sys.stderr is not None:
            sys.stderr.flush()
