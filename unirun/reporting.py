"""What the processes of a job say of themselves: lines on their stderr, which is their log in the job's directory.

Reporting never raises. A full disk or a closed stderr loses the line, not the process that has something to say.
"""

from __future__ import annotations

import contextlib
import sys
import traceback


def report(text: object) -> None:
    """Write `text` and a newline to stderr, at once."""
    # In a worker stderr may be an object of the user's, which may raise anything.
    with contextlib.suppress(Exception):
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)


def report_error(error: BaseException) -> None:
    """Write the traceback of `error` to stderr."""
    report("".join(traceback.format_exception(error)).rstrip("\n"))


def flush() -> None:
    """Write what stderr still holds, before a process ends without the interpreter's clean-up."""
    with contextlib.suppress(Exception):
        if sys.stderr is not None:
            sys.stderr.flush()
