"""The requirements of the machine, and numbers that one process at a time may use."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

BASE = Path("/run/unirun-testbed")
"""Everything of a test bed lies here: short paths, outside of the directories that each host has for itself."""

DEADLINE = 120.0


class Unavailable(Exception):
    """This machine cannot have a test bed; the text says why."""


@cache
def why_not() -> str | None:
    """The reason why this machine has no test bed, or None."""
    if os.geteuid() != 0:
        return "a test bed needs root"
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "--uts", "--ipc", "mount", "-t", "tmpfs", "tmpfs", "/tmp"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        return f"a test bed needs namespaces: {tried.stderr.strip()}"
    return None


def require(*programs: str) -> None:
    """Raises `Unavailable` unless this machine can have a test bed; `RuntimeError` when only programs are missing, as
    `make test` installs them."""
    if reason := why_not():
        raise Unavailable(reason)
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        raise RuntimeError(f"not installed: {', '.join(missing)}; run make .venv/.system")


def run(*argv: object, stdin: str | None = None) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        [str(each) for each in argv],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(map(str, argv))}: exit code {done.returncode}: {done.stderr}{done.stdout}"
        )
    return done.stdout


def wait_until(look: Callable[[], object], what: str, within: float = DEADLINE) -> None:
    """Return as soon as `look()` is true; `TimeoutError` after `within` seconds."""
    deadline = time.monotonic() + within
    while not look():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within:g} s: {what}")
        time.sleep(0.005)


class Number:
    """The first number that no other live process has for `kind`, and its folder.

    The lock goes with its process, so what a killed process has left is found by whoever gets its number next: `clean` is
    called with every number that is free and has a folder.
    """

    def __init__(self, kind: str, numbers: Iterable[int], clean: Callable[[int, Path], None]) -> None:
        BASE.mkdir(mode=0o755, exist_ok=True)
        self._clean = clean
        self._lock: int | None = None
        for number in numbers:
            folder = BASE / f"{kind}{number}"
            if self._lock is not None and not folder.exists():
                continue
            lock = os.open(f"{folder}.lock", os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            if folder.exists():
                clean(number, folder)
            if self._lock is None:
                self._lock, self.value, self.folder = lock, number, folder
            else:
                os.close(lock)
        if self._lock is None:
            raise RuntimeError(f"all numbers for {kind} are in use")
        self.folder.mkdir(mode=0o755)

    def give_back(self) -> None:
        """Remove everything that belongs to the number."""
        if self._lock is not None:
            self._clean(self.value, self.folder)
            os.close(self._lock)
            self._lock = None
