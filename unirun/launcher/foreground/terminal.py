"""Prepare a command's streams and signals, print messages safely, and inspect terminals.

All messages of the commands are printed by this module, which escapes unprintable characters, as texts may come from
workers, stores and other users' jobs. Only the output of workers is shown unchanged, with its colours, as by torchrun.
"""

from __future__ import annotations

import codecs
import io
import locale
import os
import signal
import stat
import sys
from typing import TextIO

from unirun.spec.read import printable

_DUMB = ("dumb", "unknown")

IN_ASCII = "unirun.in_ascii"
"""An error handler of `codecs`: the drawing characters of tables and graphs in ASCII, any other one escaped."""

_DRAWN = {
    "·": ".",
    "×": "x",
    "─": "-",
    "│": "|",
    "├": "|",
    "└": "`",
    "…": "...",
    "±": "+-",
    "µ": "u",
    "→": "->",
    "⇢": "->",
    "⟵": "<-",
    "⟷": "<->",
}


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end]
    return "".join(_DRAWN.get(c) or c.encode("unicode_escape").decode() for c in found), error.end


codecs.register_error(IN_ASCII, _in_ascii)


def say(line: str = "") -> None:
    """Print one line to stdout."""
    print(printable(line))


def warn(text: str) -> None:
    """Print lines to stderr, each as ``unirun: …``."""
    for line in printable_lines(text):
        print(f"unirun: {line}", file=sys.stderr)


def prepare_streams() -> None:
    """Make stdout and stderr replace characters that their encoding lacks (`IN_ASCII`).

    A closed standard stream (``>&-``) becomes ``/dev/null``: otherwise the next opened file would get its descriptor.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if not _is_open(number):
            _to_null(number)
        stream = getattr(sys, name)
        if stream is None:
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115 - lives as long as the process
            setattr(sys, name, stream)
        if number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="ascii" if _is_ascii_locale() else None, errors=IN_ASCII)


def _is_ascii_locale() -> bool:
    """Return True if the locale is ``C``, in which Python writes UTF-8 all the same unless it is told an encoding."""
    told = os.environ.keys() & {"PYTHONUTF8", "PYTHONIOENCODING"}
    return not told and codecs.lookup(locale.getencoding()).name == "ascii"


def outlast_user_signals() -> None:
    """Let SIGUSR1 and SIGUSR2, which a batch system may send to all processes of a job, do nothing instead of killing.

    A signal that is ignored already stays so: thus one that the user's shell ignores can be told from others.
    """
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(signum) is signal.SIG_DFL:
            signal.signal(signum, lambda *_: None)


def drop_output() -> None:
    """Discard buffered output that cannot be written, so that the interpreter does not try again at exit."""
    _to_null(sys.stdout.fileno())


def may_read() -> bool:
    """Return True if a worker may read this process's stdin: a background job must not take the shell's input."""
    return not os.isatty(0) or in_foreground(0)


def drop_input() -> None:
    """Close this process's copy of stdin, so that its writer notices the end of the worker that reads it."""
    _to_null(0)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _to_null(number: int) -> None:
    """Point the descriptor `number` to ``/dev/null``."""
    null = os.open(os.devnull, os.O_RDWR)
    if null == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(null, number)
        os.close(null)


def is_screen(stream: TextIO) -> bool:
    """Return True if `stream` is a terminal that supports escape sequences."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in _DUMB


def in_colour(stream: TextIO) -> bool:
    """Return True if output to `stream` is to be coloured; not with NO_COLOR (https://no-color.org)."""
    return is_screen(stream) and not os.environ.get("NO_COLOR")


def is_pipe(stream: TextIO) -> bool:
    """Return True if another program reads `stream`, which may write to the same terminal, as ``| tee log`` does."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def one_file(one: TextIO, other: TextIO) -> bool:
    """Return True if both streams are the same file, as with ``2>&1``."""
    try:
        return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (OSError, ValueError):
        return False


def in_foreground(number: int) -> bool:
    """Return True if this process is in the foreground of the terminal with this descriptor, and so may draw on it."""
    try:
        return os.tcgetpgrp(number) == os.getpgrp()
    except OSError:
        # Not this session's terminal, so no shell shares it.
        return True


def columns(number: int) -> int:
    """Present width of the terminal with this descriptor, by default 80."""
    try:
        return os.get_terminal_size(number).columns or 80
    except OSError:
        return 80


def printable_lines(text: str) -> list[str]:
    """The lines of `text`, escaped by `printable`; tabs are kept."""
    return [printable(line, keep="\t") for line in text.splitlines()]
