"""The side of the jobs: find a warm process that fits, start one, borrow a spawner, and leave one behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from unirun import atomic
from unirun.errors import JobError, UnirunError
from unirun.launcher.environment import FRESH, for_workers
from unirun.launcher.orders import Orders
from unirun.launcher.process import BOOT, readable
from unirun.launcher.warm.key import DESCRIPTION, SOCKET, Description, peer_of, state_of, unlike
from unirun.observe.jobdir import JobDir, temporary
from unirun.observe.ownership import exposure, make_private
from unirun.spec.job import JobSpec
from unirun.values import Value
from unirun.wire.address import unix_address
from unirun.wire.blocking import BlockingStream
from unirun.wire.frames import from_json
from unirun.wire.messages import AgentTask, Dismissed
from unirun.wire.reports import Borrow

LOG = "log"
"""The output of a warm process, in its folder, which the process keeps locked while it lives."""

VARIABLE = "UNIRUN_WARM"
"""1: the first job leaves a warm process for the next ones; 0: jobs start cold."""

BORROW_TIMEOUT = 2.0
"""Seconds that a job waits for the answer, which normally takes some hundredths."""

PADDING = "-" * 200
"""An argument that reserves room for the command lines that workers show in ``ps``."""


class Warm(Value):
    """A warm process of this user."""

    folder: Path
    description: Description


def run_root() -> Path:
    """The directory of this user's warm processes, which need not exist. Raises `JobError` when it is not safe."""
    given = os.environ.get("UNIRUN_RUN_DIR")
    base = os.environ.get("XDG_RUNTIME_DIR")
    if given:
        root = Path(given)
    else:
        root = Path(base, "unirun") if base and os.path.isdir(base) else temporary("warm processes")
    try:
        exposed = exposure(root)
    except OSError as error:
        raise JobError(f"{root} cannot be used: {error.strerror}", "set UNIRUN_RUN_DIR") from error
    if exposed is not None:
        raise JobError(
            f"{root} is not safe: {exposed.problem}", f"{exposed.remedy}; UNIRUN_RUN_DIR says where"
        )
    return root / "warm"


def running() -> list[Warm]:
    """The warm processes that are ready, the oldest first. Removes the folders of dead ones. Raises `JobError`."""
    found = []
    for folder in _folders():
        with contextlib.suppress(OSError, UnirunError):
            found.append(Warm(folder, from_json(Description, (folder / DESCRIPTION).read_text())))
    return sorted(found, key=lambda warm: warm.description.began)


def some_start() -> bool:
    """Return True if a warm process is starting. Raises `JobError`."""
    return not all((folder / DESCRIPTION).exists() for folder in _folders())


def abandon_starting() -> int:
    """Remove the folders of warm processes that are starting, so that they exit after their imports. Returns their
    number. Raises `JobError`."""
    starting = [folder for folder in _folders() if not (folder / DESCRIPTION).exists()]
    for folder in starting:
        shutil.rmtree(folder, ignore_errors=True)
    return len(starting)


def _folders() -> list[Path]:
    """Folders of live warm processes. Removes those of dead ones."""
    root, alive = run_root(), []
    # `start` renames a folder from its hidden name once it is locked.
    for folder in root.glob("[!.]*") if root.is_dir() else ():
        if is_alive(folder):
            alive.append(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return alive


def is_alive(folder: Path) -> bool:
    """Return True if a warm process holds the lock of this folder."""
    try:
        with (folder / LOG).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # The folder has just been removed.
        return False
    return False


class WarmMatch(Value):
    """The warm process that fits `want`, or the reasons `against` the nearest one."""

    want: Borrow
    warm: Warm | None
    against: tuple[str, ...] = ()


def choose(want: Borrow) -> WarmMatch:
    """Choose the warm process that fits and has the most modules. None with ``UNIRUN_WARM=0``."""
    if os.environ.get(VARIABLE) == "0":
        return WarmMatch(want, None, (f"{VARIABLE}=0",))
    try:
        there = running()
    except JobError as error:
        return WarmMatch(want, None, (str(error),))
    if not there:
        return WarmMatch(want, None, ("no warm process runs (unirun warm)",))
    state, nearest = state_of(), None
    for warm in sorted(there, key=lambda each: -len(each.description.modules)):
        why = unlike(warm.description, want, state)
        if not why:
            return WarmMatch(want, warm)
        if nearest is None or len(why) < len(nearest):
            nearest = [f"process {warm.description.pid} differs: {why[0]}", *why[1:]]
    return WarmMatch(want, None, tuple(nearest or ()))


class Borrowed:
    """A spawner that is not a child of this process, with the part of `subprocess.Popen` that an agent uses."""

    def __init__(self, stream: socket.socket, handle: int, told: int) -> None:
        self.socket, self._handle, self._told = stream, handle, told

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signum)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code, negative for a signal, which the guard sends after clean-up. Raises
        `subprocess.TimeoutExpired`."""
        # If the guard has died, wait for the spawner itself.
        deadline = None if timeout is None else time.monotonic() + timeout
        for waited in (self._told, self._handle):
            if not readable(waited, None if deadline is None else deadline - time.monotonic()):
                raise subprocess.TimeoutExpired("spawner", timeout or 0.0)
            if waited == self._told and (code := os.read(self._told, 16)):
                return int(code)
        return -signal.SIGKILL

    def close(self) -> None:
        """Close the handles."""
        os.close(self._handle)
        os.close(self._told)


def borrow(warm: Warm, want: Borrow) -> Borrowed | str:
    """Borrow a spawner with the output and the `inherited` descriptors of this process. Returns it or the reason."""
    told, tells = os.pipe()
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(BORROW_TIMEOUT)
        with unix_address(warm.folder / SOCKET) as address:
            sock.connect(address)
        if peer_of(sock) != (warm.description.pid, os.getuid()):
            raise ConnectionRefusedError("another process has its socket")
        socket.send_fds(sock, [b"?"], [1, tells, *want.inherited])
        stream = BlockingStream(sock)
        stream.send(want)
        answer, handles, _, _ = socket.recv_fds(sock, 1, 1)
        if answer == b"y" and handles:
            sock.settimeout(None)
            return Borrowed(sock, handles[0], told)
        reply = stream.receive(BORROW_TIMEOUT) if answer == b"n" else None
        why = reply.problem if isinstance(reply, Dismissed) else "it has ended meanwhile"
        if answer == b"y":
            why = "this process has too many open files"
    except (OSError, UnirunError) as error:
        why = f"it does not answer: {error}"
    finally:
        os.close(tells)
    os.close(told)
    sock.close()
    return f"the warm process {warm.description.pid} declines: {why}"


def start(env: Mapping[str, str], modules: Sequence[str], idle: float, until: int = 0) -> Path:
    """Start a warm process that is not a child of this one. It ends after `idle` seconds, or with the process `until`.

    Returns its folder, which has a description when it is ready. Raises `JobError`.
    """
    root = run_root()
    folder = root / secrets.token_hex(4)
    try:
        make_private(root)
        # Others see it when it is locked.
        with atomic.directory(folder) as draft:
            log = os.open(draft / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            fcntl.flock(log, fcntl.LOCK_EX)
    except OSError as error:
        raise JobError(f"{folder} cannot be made: {error.strerror}", "set UNIRUN_RUN_DIR") from error
    # Check again: another user may have created it in the meantime.
    run_root()
    command = [sys.executable, "-u", BOOT, "warm", str(folder), str(idle), str(until), PADDING, *modules]
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        finally:
            os._exit(0)
    os.close(log)
    os.waitpid(pid, 0)
    return folder


# The warm processes that a job uses, and those that it leaves behind with ``UNIRUN_WARM=1``.

WARM_IDLE_TIMEOUT = 1800.0
"""Seconds without a job after which a warm process ends."""

MAX_LEFT_PROCESSES = 4
"""Maximum number of warm processes left by a user's jobs; each has 200 MB."""


def choices(job: JobDir, spec: JobSpec) -> list[WarmMatch]:
    """For each forking spawner of a job, the warm process that lends it, or why none does."""
    orders = Orders(job, AgentTask(spec, "", (), os.getcwd(), spec.master_addr), for_workers(os.environ))
    return [choose(orders.spawner_request(key)) for key in orders.spawners if key != FRESH]


def starts(choice: WarmMatch) -> str:
    """Describe how a spawner starts."""
    if choice.warm is not None:
        return f"start: warm, from process {choice.warm.description.pid}"
    return f"start: cold: {'; '.join(choice.against)}"


def leaves_behind() -> bool:
    """Return True if jobs should leave warm processes behind."""
    return os.environ.get(VARIABLE) == "1"


def leave_behind(found: list[WarmMatch]) -> None:
    """Start the warm processes that were missing, if enabled. Raises `JobError`."""
    if not leaves_behind() or some_start():
        # Of many jobs that start together, only one does it.
        return
    for choice in found:
        if choice.warm is None and len(running()) < MAX_LEFT_PROCESSES:
            start(choice.want.env, choice.want.modules, WARM_IDLE_TIMEOUT)
