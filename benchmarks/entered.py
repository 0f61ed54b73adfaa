"""The files of unirun that the processes of a job enter between two marks.

A job that is started with the variables of an `Entered` loads `benchmarks/hook/sitecustomize.py` in each of its
processes. Any process that has inherited them can set the marks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import unirun

HOOK = Path(__file__).with_name("hook")
VARIABLE = "BENCHMARK_ENTERED"
"""The environment variable that makes a process record, as in `HOOK`."""

MARK_TIMEOUT = 60.0
"""Seconds in which another process must set the mark."""

PACKAGE = Path(unirun.__file__).parent


@dataclass(frozen=True, slots=True)
class Entered:
    """A record in `folder`."""

    folder: Path

    @classmethod
    def new(cls, folder: Path) -> Entered:
        """An empty record, without a mark."""
        (folder / "mark").write_bytes(b"\0")
        (folder / "entered").touch()
        return cls(folder)

    @classmethod
    def inherited(cls) -> Entered:
        """The record of the process that has started this one."""
        return cls(Path(os.environ[VARIABLE].partition(os.pathsep)[0]))

    def variables(self, package: Path = PACKAGE) -> dict[str, str]:
        """The environment variables that make a process record the files of `package`."""
        path = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(path), VARIABLE: f"{self.folder}{os.pathsep}{package}"}

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Record until the end of the block, in all processes."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Record from now on, in all processes."""
        self._set(b"\1")

    def await_begin(self) -> None:
        """Wait until another process has begun. Raises TimeoutError."""
        self._await(b"\1")

    def await_end(self) -> None:
        """Wait until another process has ended the record. Raises TimeoutError."""
        self._await(b"\0")

    def _await(self, mark: bytes) -> None:
        deadline = time.monotonic() + MARK_TIMEOUT
        while (self.folder / "mark").read_bytes() != mark:
            if time.monotonic() > deadline:
                raise TimeoutError("no other process has set the mark")
            time.sleep(0.001)

    def end(self) -> None:
        """End the record."""
        self._set(b"\0")

    def _set(self, mark: bytes) -> None:
        # Written over: a file that is cut off is no longer mapped by those who read it.
        with (self.folder / "mark").open("r+b") as file:
            file.write(mark)

    def files(self, pids: Collection[int]) -> list[str]:
        """The files that some of these processes have entered, below the package."""
        lines = (line.split(" ", 1) for line in (self.folder / "entered").read_text().splitlines())
        return sorted({path for pid, path in lines if int(pid) in pids})
