"""The invariants of all jobs: `Invariants` watches those of one home and looks at what they leave."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.waiting import eventually
from unirun.atomic import PARTIAL

LOOK_INTERVAL = 0.5
"""Seconds between two looks at the descriptors of processes."""

BUSY_LOAD = 4.0
"""The load for each processor from which on a wait may run out, and a process may end slowly, for no other reason."""

KEPT_LOOKS = 4
"""Looks in a row after which a descriptor counts as kept: a busy process takes a moment to close it."""

MAX_DESCRIPTORS = 64
"""Descriptors that a process of unirun may have, and `EACH_BELOW` more for each process that was at once below it."""

EACH_BELOW = 4

GAVE_UP = re.compile(r"unirun: gave up waiting for .*")
"""A wait that ran into its time-out (`unirun.wire.reporting.gave_up`)."""

OF_A_JOB = re.compile(r"/(agent\.[^/]*\.sock|master\.\d+\.sock|calls/[^/]*)$")
"""Sockets that stay in the directory of a job, as a dead master's does: a client that connects to one finds no listener."""

OF_A_KILLED_MASTER = re.compile(r"/\.(state|summary)\.json\.[0-9a-f]{8}" + re.escape(PARTIAL) + "$")
"""Temporary names that the next master removes when they are old (`unirun.atomic`)."""

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_SECONDS = 10.0
"""Seconds after which shared memory that no process uses counts as left."""


class Descriptor(NamedTuple):
    """A pidfd that a process of this title has, of a process whose exit was collected."""

    title: str
    pid: int
    number: int
    inode: int


class Invariants(threading.Thread):
    """Looks at the processes of unirun, `commands` and all below them, from `start` to `close`."""

    def __init__(self, commands: Callable[[], Iterable[int]]) -> None:
        super().__init__(name="invariants", daemon=True)
        self._commands = commands
        self._over = threading.Event()
        self._looks: Counter[Descriptor] = Counter()
        self._most: Counter[int] = Counter()
        self._above: Counter[int] = Counter()
        self._shared = shared_memory()
        self.wrong: set[str] = set()

    def run(self) -> None:
        while not self._over.wait(LOOK_INTERVAL):
            self._look()

    def close(self) -> None:
        """End the looking."""
        self._over.set()
        self.join()

    def _look(self) -> None:
        stale: set[Descriptor] = set()
        for root in self._commands():
            for pid in family(root):
                with contextlib.suppress(OSError):
                    stale |= self._of_process(pid)
        self._looks = Counter({each: 1 + self._looks[each] for each in stale})
        self.wrong |= {
            f"{each.title} keeps a pidfd of an ended process"
            for each, looks in self._looks.items()
            if looks >= KEPT_LOOKS
        }

    def _of_process(self, pid: int) -> set[Descriptor]:
        title = Path(f"/proc/{pid}/comm").read_text().strip()
        if not title.startswith("unirun"):
            return set()
        numbers = os.listdir(f"/proc/{pid}/fd")
        self._most[pid] = max(self._most[pid], len([*family(pid)]))
        bound = MAX_DESCRIPTORS + EACH_BELOW * self._most[pid]
        # A fork has those of its parent for a moment.
        self._above[pid] = self._above[pid] + 1 if len(numbers) > bound else 0
        if self._above[pid] >= KEPT_LOOKS:
            self.wrong.add(f"{title} has more than {bound} descriptors: {kinds(pid)}")
        return {Descriptor(title, pid, number, inode) for number, inode in stale_pidfds(pid).items()}

    def broken(self, home: Path, outputs: Iterable[str]) -> Iterator[str]:
        """The invariants that processes, files below `home`, shared memory and `outputs` of commands do not keep."""
        yield from files_left(home)
        if os.getloadavg()[0] < BUSY_LOAD * (os.cpu_count() or 1):
            yield from sorted(self.wrong)
            yield from waits_given_up(home, outputs)
        # Other processes of this machine make some too, and remove it when they end.
        deadline = time.monotonic() + SHARED_MEMORY_SECONDS
        while left := {name for name in shared_memory() - self._shared if not in_use(name)}:
            if time.monotonic() > deadline:
                yield from (f"shared memory is left: {name}" for name in sorted(left))
                return
            time.sleep(LOOK_INTERVAL)


def children(pid: int) -> list[int]:
    """The children of a process; none of one that is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for child in children(pid):
        yield from family(child)


def kinds(pid: int) -> Counter[str]:
    """The number of descriptors of a process by what they are."""
    found: Counter[str] = Counter()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/{pid}/fd/{number}").partition(":[")[0]] += 1
    return found


def stale_pidfds(pid: int) -> dict[int, int]:
    """The pidfds of a process for processes whose exits were collected, with their inodes; none of one that is gone."""
    found = {}
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                link, about = f"/proc/{pid}/fd/{number}", Path(f"/proc/{pid}/fdinfo/{number}")
                if "pidfd" in os.readlink(link) and re.search(
                    r"^Pid:\s+-1$", about.read_text(), re.MULTILINE
                ):
                    found[int(number)] = os.stat(link).st_ino
    return found


def shared_memory() -> set[str]:
    """The names in shared memory that are this user's, but for semaphores of multiprocessing, which other tests make."""
    found = set()
    for entry in os.scandir(SHARED_MEMORY):
        if entry.name.startswith("sem.mp-"):
            continue
        with contextlib.suppress(OSError):
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                found.add(entry.name)
    return found


def in_use(name: str) -> bool:
    """Return True if a process has mapped the shared memory, or has it open, or if it is gone."""
    path = SHARED_MEMORY / name
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if str(path) in Path(f"/proc/{pid}/maps").read_text():
                return True
            if any(os.readlink(each) == str(path) for each in Path(f"/proc/{pid}/fd").iterdir()):
                return True
    return not path.exists()


def files_left(home: Path) -> Iterator[str]:
    """Files below `home` that are temporary, sockets, or open to other users though they are secrets or a job's."""
    tokens = [path for path in home.rglob("token") if path.is_file()]
    secrets = {path.read_bytes() for path in tokens} | {b"PRIVATE KEY"}
    jobs = {path.parent for path in tokens}
    for path in (home, *sorted(home.rglob("*"))) if home.exists() else ():
        try:
            info = path.lstat()
        except FileNotFoundError:
            # SQLite removes files beside its own when the last process has closed it.
            continue
        if stat.S_ISDIR(info.st_mode) and info.st_mode & 0o077 and jobs & {path, *path.parents}:
            yield f"directory {path} has mode {stat.S_IMODE(info.st_mode):o}"
        if path.name.endswith((PARTIAL, ".new")) and not OF_A_KILLED_MASTER.search(str(path)):
            yield f"temporary name {path}"
        if stat.S_ISSOCK(info.st_mode) and not OF_A_JOB.search(str(path)):
            yield f"socket {path}"
        if stat.S_ISREG(info.st_mode) and info.st_mode & 0o077:
            content = path.read_bytes()
            if any(secret in content for secret in secrets):
                yield f"{path} has a secret, and mode {stat.S_IMODE(info.st_mode):o}"


def waits_given_up(home: Path, outputs: Iterable[str]) -> list[str]:
    """The waits that ran into their time-outs, from all logs below `home` and from what commands said."""
    texts = [*outputs, *(path.read_text(errors="replace") for path in home.rglob("*.log") if path.is_file())]
    return [found for text in texts for found in GAVE_UP.findall(text)]


@contextlib.contextmanager
def no_thread_left() -> Iterator[None]:
    """Fail when a thread of this process that began in the block does not end with it."""
    before = set(threading.enumerate())
    yield
    try:
        eventually(lambda: not set(threading.enumerate()) - before)
    except AssertionError:
        raise AssertionError(f"threads are left: {set(threading.enumerate()) - before}") from None
