"""What a person sees while a job runs: workers' lines with their prefix, a live line, short notes."""

from __future__ import annotations

import os
import sys
import threading
from string import Template
from typing import BinaryIO

from unirun.spec import JobSpec, LogSpec

_COLOURS = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)


def shown(log: LogSpec, local_rank: int, stream: int) -> bool:
    """Whether the console shows `stream` (1 stdout, 2 stderr) of a local rank, by ``-r``, ``-t`` and filter."""
    if log.local_ranks_filter is not None and local_rank not in log.local_ranks_filter:
        return False
    return bool(_bits(log.tee, local_rank) & stream) or not _bits(log.redirects, local_rank) & stream


def _bits(text: str, local_rank: int) -> int:
    if ":" not in text:
        return int(text)
    return {int(a): int(b) for a, b in (item.split(":") for item in text.split(","))}.get(local_rank, 0)


class Prefixer:
    """Gives each worker the prefix of its lines: ``[actor:2]`` in the colour of its role."""

    def __init__(self, spec: JobSpec, colour: bool, template: str | None) -> None:
        self._roles = {role.name: n for n, role in enumerate(spec.roles)}
        self._alone = sum(role.count for role in spec.roles) == 1 and template is None
        self._colour = colour
        self._template = template

    def __call__(self, role: str, rank: int, local_rank: int) -> bytes:
        """The prefix; empty when the job has one worker only."""
        if self._alone:
            return b""
        text = f"[{role}:{rank}] "
        if self._template is not None:
            values = {"role_name": role, "rank": rank, "local_rank": local_rank}
            text = Template(self._template).safe_substitute(values)
        if self._colour:
            text = f"\x1b[{_COLOURS[self._roles[role] % len(_COLOURS)]}m{text}\x1b[0m"
        return text.encode()


class Console:
    """Writes to stdout and stderr from several threads; keeps the live line below what is written.

    A reader that went away (``| head``) ends the output, not the job.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._live_possible = sys.stderr.isatty() and not quiet
        self._lock = threading.Lock()
        self._live = ""
        self._closed: set[int] = set()
        self.colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def lines(self, stream: int, prefix: bytes, data: bytes) -> None:
        """Whole lines of one worker."""
        if prefix:
            body = data.removesuffix(b"\n")
            data = prefix + body.replace(b"\n", b"\n" + prefix) + b"\n"
        elif not data.endswith(b"\n"):
            data += b"\n"
        self._write(sys.stdout.buffer if stream == 1 else sys.stderr.buffer, data)

    def note(self, text: str) -> None:
        """A line of unirun's own, left out when quiet."""
        if not self._quiet:
            self.error(text)

    def error(self, text: str) -> None:
        """Lines of unirun's own that are always shown."""
        self._write(sys.stderr.buffer, "".join(f"unirun: {t}\n" for t in text.splitlines()).encode())

    def live(self, text: str) -> None:
        """Replace the live line; shown on a terminal only."""
        if self._live_possible:
            with self._lock:
                self._live = text
                self._raw(sys.stderr.buffer, b"\r\x1b[2K" + text.encode())

    def _write(self, file: BinaryIO, data: bytes) -> None:
        with self._lock:
            if self._live:
                self._raw(sys.stderr.buffer, b"\r\x1b[2K")
            self._raw(file, data)
            if self._live:
                self._raw(sys.stderr.buffer, self._live.encode())

    def _raw(self, file: BinaryIO, data: bytes) -> None:
        number = file.fileno()
        if number in self._closed:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(number, view) :]
        except OSError:
            self._closed.add(number)
