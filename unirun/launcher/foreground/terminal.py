"""What is printed for people, and what may be written to a terminal.

Text that workers, stores and other users' jobs have written is made printable here, and all that the commands say goes
through here. Output of workers alone is shown as it is, with its colours, as torchrun does.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from typing import TextIO
from unicodedata import category

_DUMB = ("dumb", "unknown")


def say(line: str = "") -> None:
    """Print one line to stdout."""
    print(printable(line))


def warn(text: str) -> None:
    """Print lines to stderr, each as ``unirun: …``."""
    for line in printable_lines(text):
        print(f"unirun: {line}", file=sys.stderr)


def prepare_streams() -> None:
    """Make stdout and stderr take every character, whatever their encoding is.

    A standard stream that is closed (``>&-``) becomes ``/dev/null``: else the next file that is opened gets its number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if not _is_open(number):
            _to_null(number)
        stream = getattr(sys, name)
        if stream is None:
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115 - lives as long as the process
            setattr(sys, name, stream)
        if number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Drop what stdout still holds: nobody can take it, and the interpreter would try again at its end."""
    _to_null(sys.stdout.fileno())


def may_read() -> bool:
    """Whether a worker may read this process's stdin: in the background it would take what is typed at the shell."""
    return not os.isatty(0) or in_foreground(0)


def drop_input() -> None:
    """Leave stdin to the worker that has it: who writes to it shall notice that worker's end, not this process's."""
    _to_null(0)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _to_null(number: int) -> None:
    """Make the descriptor `number` one of ``/dev/null``."""
    null = os.open(os.devnull, os.O_RDWR)
    if null == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(null, number)
        os.close(null)


def is_screen(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that knows escape sequences."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in _DUMB


def in_colour(stream: TextIO) -> bool:
    """Whether to colour what is written to `stream`; NO_COLOR says no (https://no-color.org)."""
    return is_screen(stream) and not os.environ.get("NO_COLOR")


def is_pipe(stream: TextIO) -> bool:
    """Whether another program reads `stream`; it may well write to the same terminal, as ``| tee log`` does."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def one_file(one: TextIO, other: TextIO) -> bool:
    """Whether what is written to both comes to one place, as with ``2>&1``."""
    try:
        return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (OSError, ValueError):
        return False


def in_foreground(number: int) -> bool:
    """Whether this process may draw on the terminal with this descriptor; a shell's background jobs may not."""
    try:
        return os.tcgetpgrp(number) == os.getpgrp()
    except OSError:
        # Not this session's terminal, so no shell shares it.
        return True


def columns(number: int) -> int:
    """How wide the terminal with this descriptor is now."""
    try:
        return os.get_terminal_size(number).columns or 80
    except OSError:
        return 80


def printable(text: str, *, keep: str = "") -> str:
    """`text` on one line: each character that is neither visible nor a blank as Python escapes it (``\\x1b``).

    For text that workers, stores and other users' jobs have written. A terminal obeys control characters; others
    change the direction of writing; half of a surrogate pair cannot be written at all. Those in `keep` stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c in keep or c.isprintable() or category(c) == "Zs" else _escaped(c) for c in text)


def printable_lines(text: str) -> list[str]:
    """The lines of `text`, each of them printable; tabs stay."""
    return [printable(line, keep="\t") for line in text.splitlines()]


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
