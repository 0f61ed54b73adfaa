"""The copy of a job's files that the command keeps when all of the job is on other hosts.

The hosts are in the file ``hosts.json`` of the command's directory until everything is here. The command copies while
it follows the job; after ``--detach`` a process of its own does (``python -m unirun.launcher.hosts.copying RUN_ID``),
which holds the directory's lock. When neither lives, whoever wants to read the copy starts that process again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from msgspec import convert, to_builtins

from unirun.errors import JobError
from unirun.launcher.hosts.connection import Remote
from unirun.launcher.hosts.hostlist import Host
from unirun.launcher.hosts.mirror import Mirror
from unirun.launcher.process import ignore_signals
from unirun.observe.jobdir import HOSTS, JobDir, job_at
from unirun.observe.status import ENDED, read_summary
from unirun.wire.reporting import report

LOOK = 1.0
"""Seconds between two looks whether hosts have joined the job."""

REST = 30.0
"""Seconds after the job's end in which hosts that do not answer are tried."""

CURRENT = 15.0
"""Seconds to wait until the copy has what hosts had written."""


def record_hosts(job: JobDir, hosts: Sequence[Host]) -> None:
    """Note that the files of `hosts` are to be copied to `job`, besides those that are noted. Raises OSError."""
    every = {host.name: host for host in (*recorded_hosts(job), *hosts)}
    job.write_json(HOSTS, {"hosts": to_builtins(tuple(every.values()))})


def recorded_hosts(job: JobDir) -> tuple[Host, ...]:
    """The hosts of which files may not be here yet."""
    try:
        return convert(job.read_json(HOSTS)["hosts"], tuple[Host, ...])
    except (JobError, KeyError, ValueError):
        return ()


class Copy:
    """Copies the files of all recorded hosts to `job`, also of those that are recorded meanwhile.

    `remotes` are connections that exist already. `came` is told of each host that joins, `complete` of each whose agent
    has ended and whose files are here, `silent` whether one is silent (`Mirror`).
    """

    def __init__(
        self,
        job: JobDir,
        remotes: Mapping[str, Remote],
        note: Callable[[str], None],
        came: Callable[[str], None] = lambda _: None,
        complete: Callable[[str], None] = lambda _: None,
        silent: Callable[[str, bool], None] = lambda *_: None,
    ) -> None:
        self._job, self._remotes, self._note = job, remotes, note
        self._came, self._complete, self._silent = came, complete, silent
        self._mirrors: dict[str, Mirror] = {}

    async def run(self) -> None:
        """Copy until all agents have ended and all files are here. Then no host is recorded any more."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                for host in recorded_hosts(self._job):
                    if host.name not in self._mirrors:
                        tasks.add(self._begin(host))
                pending = [task for task in tasks if not task.done()]
                if not pending:
                    break
                await asyncio.wait(pending, timeout=LOOK, return_when=asyncio.ALL_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        (self._job.path / HOSTS).unlink(missing_ok=True)

    async def current(self) -> None:
        """Wait until what all hosts had written is here."""
        await asyncio.gather(*(mirror.current.wait() for mirror in self._mirrors.values()))

    def _begin(self, host: Host) -> asyncio.Task[None]:
        remote = self._remotes.get(host.name)
        mirror = self._mirrors[host.name] = Mirror(self._job, host, remote, self._note, self._silent)
        self._came(host.name)

        async def copy() -> None:
            await mirror.run()
            self._complete(host.name)

        return asyncio.create_task(copy())


def copy_on(job: JobDir, lock: int) -> None:
    """Go on copying when this process has ended. The new process gets the `lock`."""
    os.close(_start(job, lock))


def make_current(job: JobDir) -> None:
    """Let the copy have what the hosts have written, if nobody copies. Hosts that do not answer are not waited for."""
    if not recorded_hosts(job) or job.alive():
        return
    told = _start(job)
    try:
        select.select([told], [], [], CURRENT)
    finally:
        os.close(told)


def _start(job: JobDir, lock: int | None = None) -> int:
    """Start the copying process. Returns a pipe that it closes when the copy is current."""
    ours, theirs = os.pipe()
    handles = [theirs] if lock is None else [theirs, lock]
    command = [sys.executable, "-P", "-m", "unirun.launcher.hosts.copying", job.run_id, *map(str, handles)]
    with open(job.path / "copy.log", "ab") as log:
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=handles,
            start_new_session=True,
        )
    os.close(theirs)
    return ours


def main(run_id: str, told: int, lock: int | None = None) -> int:
    """Copy until everything is here, or the job has ended and its hosts do not answer. Returns the exit code."""
    ignore_signals()
    job = job_at(run_id)
    if lock is None:
        lock = os.open(job.lock, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Another one was faster.
            return 0
    asyncio.run(_copy_all(job, told))
    return 0


async def _copy_all(job: JobDir, told: int) -> None:
    copy = Copy(job, {}, report)
    copying = asyncio.create_task(copy.run())
    current = asyncio.create_task(copy.current())
    current.add_done_callback(lambda _: os.close(told))
    while not copying.done():
        ended = _has_ended(job)
        await asyncio.wait([copying], timeout=REST if ended else LOOK)
        if ended:
            break
    for task in (copying, current):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _has_ended(job: JobDir) -> bool:
    with contextlib.suppress(JobError):
        return read_summary(job).phase in ENDED
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
