"""Files between the command and other hosts: its copy of what nodes write, and ``--sync``.

The hosts are in the file ``hosts.json`` of the command's directory until everything is here. The command copies while
it follows the job; after ``--detach`` a process of its own does (``python -m unirun.launcher.hosts.copying RUN_ID``),
which holds the directory's lock. When neither lives, whoever wants to read the copy starts that process again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import secrets
import select
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from msgspec import convert, to_builtins

from unirun import atomic
from unirun.errors import Fault, FrameError, JobError, RendezvousError, UsageError, WireError
from unirun.failover.silence import SILENCE_TIMEOUT
from unirun.launcher.environment import carried
from unirun.launcher.hostlist import Host
from unirun.launcher.hosts.connection import (
    OPTIONS,
    RemoteNode,
    explain,
    for_any_shell,
    is_local,
    not_started,
    reach,
)
from unirun.launcher.hosts.feed import GROWING, OF_ALL_HOSTS, REPLACED
from unirun.launcher.hosts.lobby import refusal
from unirun.launcher.process import ignore_signals
from unirun.observe.jobdir import HOSTS, JobDir, job_at, open_log
from unirun.observe.ownership import make_private
from unirun.observe.status import ENDED, read_summary
from unirun.wire.aio import Stream
from unirun.wire.messages import Chunk, Current, Dismissed, Resume
from unirun.wire.reporting import gave_up, report
from unirun.wire.reports import Message

# The command's copy of what nodes on other hosts write: the files of a job's directory, as `feed` sends them.

HOST_RETRY_INTERVAL = 1.0
"""Seconds between two attempts to reach a host again."""

HOST_CONNECT_TIMEOUT = 15.0
"""Seconds that an attempt may take."""


def offsets_here(job: JobDir, node: str) -> dict[str, int]:
    """The number of bytes of each file of `node` that are in `job`; of files that several nodes may have written, it is
    not known."""
    logs = job.logs.resolve()
    own = {path for path in logs.rglob("*") if is_regular(path)} - {*logs.glob(OF_ALL_HOSTS)}
    files = {str(Path("logs", path.relative_to(logs))): path for path in own}
    files |= {path.name: path for path in job.path.glob("agent.*.log")}
    if job.head is not None and job.head.node == node:
        files |= {name: job.path / name for name in GROWING}
    return {name: path.stat().st_size for name, path in files.items() if path.exists()}


def is_regular(path: Path) -> bool:
    """Return True if `path` is a regular file, and not a link to one."""
    return path.is_file() and not path.is_symlink()


def write(folder: Path, node: str, chunk: Chunk, offset: int) -> None:
    """Write what `node` sends into the job's directory `folder`: all of a file, or what follows after `offset`; a log
    may begin again.

    Raises `FrameError` for a file that a node has no business to write, and for a gap; OSError.
    """
    name = PurePosixPath(chunk.path)
    agent_log = len(name.parts) == 1 and name.match("agent.*.log")
    log = len(name.parts) > 1 and name.parts[0] == "logs"
    known = chunk.path in REPLACED if chunk.whole else chunk.path in GROWING or agent_log or log
    if not known or ".." in name.parts or "\0" in chunk.path:
        raise FrameError(f"{node} sends a file called {chunk.path!a:.80}")
    if chunk.whole:
        atomic.replace(folder / name, chunk.data)
        return
    again = log and chunk.offset == 0 < offset
    if chunk.offset != offset and not again:
        raise FrameError(f"{node} sends {chunk.path!a:.80} from {chunk.offset} on, not {offset}")
    # Other users may be able to write where logs lie, below --log-dir. Each host has the part of the event
    # log that its own masters have written, so all parts are appended.
    base, below = (folder / "logs", name.relative_to("logs")) if log else (folder, name)
    make_private(base)
    with os.fdopen(open_log(base, Path(below)), "ab") as file:
        if again:
            file.truncate(0)
        file.write(chunk.data)


HOST_POLL_INTERVAL = 1.0
"""Seconds between two looks whether hosts have joined the job."""

FINAL_COPY_TIMEOUT = 30.0
"""Seconds after the job's end, and after the latest part of a file, in which hosts that do not answer are tried."""

CATCH_UP_TIMEOUT = 15.0
"""Seconds to wait until the copy has what hosts had written."""


LOCK_RETRY_INTERVAL = 0.01
"""Seconds between two attempts to take the lock of a directory that another process looks at."""


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


class Mirror:
    """Copies the files of all recorded hosts to `job`, also of those that are recorded meanwhile, each over one ssh
    connection after another.

    `remotes` are connections that exist already, on which all files are sent; other hosts are asked for what is not
    here. `note` is told when a connection is lost and when it is back. `came` is told of each host that joins,
    `complete` of each whose agent has ended and whose files are here. `silent` is called with the node, and True when
    the connection to it is lost, or has brought nothing for `SILENCE_TIMEOUT` seconds; False when it is back.
    """

    def __init__(
        self,
        job: JobDir,
        remotes: Mapping[str, RemoteNode],
        note: Callable[[str], None],
        came: Callable[[str], None] = lambda _: None,
        complete: Callable[[str], None] = lambda _: None,
        silent: Callable[[str, bool], None] = lambda *_: None,
    ) -> None:
        self._job, self._remotes, self._note = job, remotes, note
        self._came, self._complete, self._silent = came, complete, silent
        self.latest = 0.0
        """The time of the event loop at which the latest part of a file came."""
        # Set when all that a node had written when it was asked is here, or when it does not answer.
        self._current: dict[str, asyncio.Event] = {}

    async def run(self) -> None:
        """Copy until all agents have ended and all files are here. Then no host is recorded any more. An unexpected
        error in the copy of one host is raised when the others are done."""
        tasks: set[asyncio.Task[None]] = set()
        if not self._remotes:
            # Another process has copied until now. What several nodes may have written begins anew.
            of_masters = GROWING if self._job.head is None else ()
            for path in (*(self._job.path / name for name in of_masters), *self._job.logs.glob(OF_ALL_HOSTS)):
                path.unlink(missing_ok=True)
        try:
            while True:
                for host in recorded_hosts(self._job):
                    if host.name not in self._current:
                        tasks.add(self._begin(host))
                pending = [task for task in tasks if not task.done()]
                if not pending:
                    break
                await asyncio.wait(pending, timeout=HOST_POLL_INTERVAL, return_when=asyncio.ALL_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            task.result()
        (self._job.path / HOSTS).unlink(missing_ok=True)

    async def current(self) -> None:
        """Wait until what all hosts had written is here."""
        await asyncio.gather(*(event.wait() for event in self._current.values()))

    def _begin(self, host: Host) -> asyncio.Task[None]:
        remote = self._remotes.get(host.name)
        offsets = {} if remote is not None else offsets_here(self._job, host.name)
        self._current[host.name] = asyncio.Event()
        self._came(host.name)
        return asyncio.create_task(self._copy(host, remote, offsets))

    async def _copy(self, host: Host, remote: RemoteNode | None, offsets: dict[str, int]) -> None:
        """Copy what follows after `offsets` until the node's agent has ended and everything is here."""
        node = host.name
        remote = remote or await self._again(host, offsets)
        while not await self._copied(node, remote.stream, offsets):
            self._note(f"the connection to {node} is lost; no rank depends on it")
            self._silent(node, True)
            await remote.close()
            remote = await self._again(host, offsets)
            self._silent(node, False)
            self._note(f"the connection to {node} is back")
        self._current[node].set()
        await remote.close()
        self._complete(node)

    async def _copied(self, node: str, stream: Stream, offsets: dict[str, int]) -> bool:
        """Take what comes. False when the connection was lost first."""
        try:
            while True:
                match message := await self._next(node, stream):
                    case Chunk(path):
                        write(self._job.path, node, message, offset := offsets.get(path, 0))
                        self.latest = asyncio.get_running_loop().time()
                        if not message.whole:
                            offsets[path] = offset + len(message.data)
                    case Current(over):
                        self._current[node].set()
                        if over:
                            return True
                    case Dismissed(problem):
                        self._note(f"{node}: {problem}")
                        return True
        except (FrameError, OSError) as error:
            self._note(f"{node}: {error}; its files are not copied any more, and stay there")
            return True
        except WireError:
            return False

    async def _next(self, node: str, stream: Stream) -> Message:
        """Return the next message. After `SILENCE_TIMEOUT` seconds without one the node counts as silent until one
        comes; ssh's keep-alive ends the wait for a host that is lost."""
        try:
            async with asyncio.timeout(SILENCE_TIMEOUT):
                return await stream.receive()
        except TimeoutError:
            self._silent(node, True)
        message = await stream.receive()
        self._silent(node, False)
        return message

    async def _again(self, host: Host, offsets: dict[str, int]) -> RemoteNode:
        """Connect, and ask for the rest."""
        while True:
            try:
                async with asyncio.timeout(HOST_CONNECT_TIMEOUT):
                    remote = await reach(host)
            except (RendezvousError, TimeoutError):
                self._current[host.name].set()
                await asyncio.sleep(HOST_RETRY_INTERVAL)
                continue
            remote.stream.send(Resume(self._job.run_id, host.name, offsets, carried(os.environ)))
            return remote


def copy_on(job: JobDir, lock: int) -> None:
    """Go on copying when this process has ended. The new process gets the `lock`."""
    if (told := _start(job, lock)) is not None:
        os.close(told)


def make_current(job: JobDir) -> None:
    """Let the copy have what the hosts have written, if nobody copies. Hosts that do not answer are not waited for."""
    if not recorded_hosts(job) or job.alive():
        return
    if (told := _start(job)) is None:
        return
    try:
        if not select.select([told], [], [], CATCH_UP_TIMEOUT)[0]:
            gave_up("the copy of what its hosts have written", CATCH_UP_TIMEOUT)
    finally:
        os.close(told)


def _start(job: JobDir, lock: int | None = None) -> int | None:
    """Start the copying process. Returns a pipe that it closes when the copy is current. None, after a
    warning, if it cannot be started: the job runs without it, and the next process that reads the copy tries again."""
    try:
        with open(job.path / "copy.log", "ab") as log:
            ours, theirs = os.pipe()
            handles = [theirs] if lock is None else [theirs, lock]
            command = [
                sys.executable,
                "-P",
                "-m",
                "unirun.launcher.hosts.copying",
                job.run_id,
                *map(str, handles),
            ]
            try:
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=handles,
                    start_new_session=True,
                )
            except OSError:
                os.close(ours)
                raise
            finally:
                os.close(theirs)
    except OSError as error:
        report(f"unirun: the copy of what its hosts have written is not current: {error.strerror}")
        return None
    return ours


def main(run_id: str, told: int, lock: int | None = None) -> int:
    """Copy until everything is here, or the job has ended and its hosts do not answer. Returns the exit code."""
    ignore_signals()
    job = job_at(run_id)
    if lock is None:
        lock = os.open(job.lock, os.O_RDONLY)
        if not _takes(job, lock):
            # Another one was faster.
            return 0
    asyncio.run(_copy_all(job, told))
    return 0


def _takes(job: JobDir, lock: int) -> bool:
    """Take the lock of the job's directory. False if another process holds it, for longer than the moment in which one
    looks whether it is held."""
    deadline = time.monotonic() + CATCH_UP_TIMEOUT
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if job.is_locked():
                return False
        time.sleep(LOCK_RETRY_INTERVAL)
    return False


async def _copy_all(job: JobDir, told: int) -> None:
    copy = Mirror(job, {}, report)
    copying = asyncio.create_task(copy.run())
    current = asyncio.create_task(copy.current())
    current.add_done_callback(lambda _: os.close(told))
    loop = asyncio.get_running_loop()
    end = math.inf
    while not copying.done() and loop.time() < max(end, copy.latest + FINAL_COPY_TIMEOUT):
        await asyncio.wait([copying], timeout=HOST_POLL_INTERVAL)
        if end == math.inf and _has_ended(job):
            end = loop.time() + FINAL_COPY_TIMEOUT
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


# ``--sync``: the working tree, sent to hosts that do not share it, by tar over ssh.
#
# What git ignores is left out; outside of a repository, what Python and tools keep for themselves. Submodules and other
# repositories in the tree come along. A host on which the tree is the same directory, by a network file system, is left
# alone. Files that are on a host only stay there.

LEFT_OUT = frozenset(
    (".git", ".venv", "venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "node_modules")
)
"""Directories that are not sent from a tree without git."""

TIMEOUT = 600.0
"""Seconds in which every host must have taken the tree."""

GIT_TIMEOUT = 60.0
"""Seconds in which git must answer, of a large tree on a slow file system, too."""


def tree_of(folder: Path) -> Path:
    """The top of the git repository that `folder` is in; without one, the folder."""
    done = _git(folder, "rev-parse", "--show-toplevel")
    return Path(os.fsdecode(done.rstrip(b"\n"))) if done is not None else folder


def files_of(top: Path) -> list[str]:
    """The files below `top` that are sent, by their relative names, sorted."""
    listed = _git(top, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if listed is not None:
        names = {os.fsdecode(name).rstrip("/") for name in listed.split(b"\0") if name}
        # A file that was deleted is still in git's index.
        names = {name for name in names if os.path.lexists(top / name)}
        # Of another repository in this one, a submodule for example, git lists the directory only.
        others = {name for name in names if not (top / name).is_symlink() and (top / name / ".git").exists()}
        return sorted(
            (names - others) | {f"{name}/{file}" for name in others for file in files_of(top / name)}
        )
    return sorted(_walk(top))


def directories_in(top: Path, paths: Iterable[str]) -> list[str]:
    """Those of `paths` that are directories below `top`, by their relative names, sorted."""
    real = {Path(os.path.realpath(path)) for path in paths if os.path.isdir(path)}
    return sorted(str(path.relative_to(top)) for path in real if path.is_relative_to(top) and path != top)


async def send_tree(hosts: Sequence[Host], folder: Path, needed: Iterable[str] = ()) -> None:
    """Send the tree that `folder` is in to every one of `hosts` at once, with the directories of `needed`, also those
    without files. Raises `RendezvousError` with all that fail, `UsageError` when there is nothing to send."""
    top = tree_of(folder)
    names = files_of(top)
    if not names:
        raise UsageError(f"--sync: {top} has no files", "call unirun in the directory of your code")
    names += directories_in(top, needed)
    mark = top / f".unirun-sync-{secrets.token_hex(8)}"
    unfit: list[Fault] = []

    async def one(host: Host, packed: Path) -> None:
        try:
            async with asyncio.timeout(TIMEOUT):
                await _send(host, top, mark, packed)
        except TimeoutError:
            unfit.append(Fault(host.name, f"the tree was not taken within {TIMEOUT:g} s"))
        except RendezvousError as error:
            unfit.append(Fault(host.name, error.problem, error.remedy))

    with tempfile.NamedTemporaryFile(prefix="unirun-sync-") as packed:
        await asyncio.to_thread(pack, top, names, packed.file)
        mark.touch()
        try:
            await asyncio.gather(*(one(host, Path(packed.name)) for host in hosts if not is_local(host)))
        finally:
            mark.unlink(missing_ok=True)
    if unfit:
        raise refusal(unfit)


def pack(top: Path, names: Sequence[str], out: IO[bytes]) -> None:
    """Write a compressed tar of the files and directories `names` below `top`, without those that are gone."""
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as tar:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                tar.add(top / name, arcname=name, recursive=False)
    out.flush()


async def _send(host: Host, top: Path, mark: Path, packed: Path) -> None:
    where = shlex.quote(str(top))
    script = (
        f"if test -e {shlex.quote(str(mark))}; then cat >/dev/null; "
        f"else mkdir -p {where} && tar -xzf - -C {where}; fi"
    )
    with packed.open("rb") as source:
        try:
            process = await asyncio.create_subprocess_exec(
                *("ssh", *OPTIONS, host.target, for_any_shell(["sh", "-c", script])),
                stdin=source,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise not_started("ssh", error) from error
    try:
        _, said = await process.communicate()
    except BaseException:
        process.kill()
        raise
    if process.returncode != 0:
        raise explain(host, process.returncode, said.decode(errors="replace"))


def _git(folder: Path, *words: str) -> bytes | None:
    """The output of git; None when there is no repository, or no git. Raises `UsageError` when it takes too long:
    without it what git ignores would be sent, too."""
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=GIT_TIMEOUT)
    except OSError:
        return None
    except subprocess.TimeoutExpired as error:
        problem = f"--sync: git has not answered within {GIT_TIMEOUT:g} s"
        raise UsageError(problem, f"try: {shlex.join(command)}") from error
    return done.stdout if done.returncode == 0 else None


def _walk(top: Path) -> Iterator[str]:
    for folder, below, names in os.walk(top):
        below[:] = sorted(name for name in below if name not in LEFT_OUT)
        # A link to a directory is not entered.
        for name in (*names, *(name for name in below if Path(folder, name).is_symlink())):
            if not name.endswith(".pyc"):
                yield str(Path(folder, name).relative_to(top))
