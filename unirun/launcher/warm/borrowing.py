"""The side of the jobs: find a warm process that fits, start one, and borrow a spawner."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from unirun.errors import JobError, UnirunError
from unirun.launcher.process import BOOT
from unirun.launcher.warm.likeness import (
    DESCRIPTION,
    SOCKET,
    Description,
    differences,
    peer_of,
    state_of,
    unlike,
)
from unirun.observe.jobdir import temporary
from unirun.observe.ownership import exposure, make_private
from unirun.values import Value
from unirun.wire.address import unix_address
from unirun.wire.blocking import BlockingStream
from unirun.wire.frames import from_json
from unirun.wire.reports import Borrow, Declined

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


def spawner_request(
    env: Mapping[str, str],
    modules: Sequence[str],
    cwd: str,
    descriptors: int = 0,
    inherited: Sequence[int] = (),
) -> Borrow:
    """The parameters of a spawner as this process would start it."""
    umask = next(
        line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("Umask")
    )
    return Borrow(
        executable=sys.executable,
        unirun=str(Path(__file__).parents[2]),
        cwd=cwd,
        modules=tuple(modules),
        env=dict(env),
        umask=int(umask, 8),
        descriptors=descriptors,
        inherited=tuple(inherited),
        state={},
    )


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
    nearest: list[str] | None = None
    for warm in sorted(there, key=lambda each: -len(each.description.modules)):
        why = reasons_against(warm, want)
        if not why:
            return WarmMatch(want, warm)
        if nearest is None or len(why) < len(nearest):
            nearest = [f"process {warm.description.pid} differs: {why[0]}", *why[1:]]
    return WarmMatch(want, None, tuple(nearest or ()))


def reasons_against(warm: Warm, want: Borrow) -> list[str]:
    """The reasons why `warm` cannot lend `want`, as far as this process can see."""
    try:
        there = state_of(warm.description.pid)
        # State that Yama hides is compared by the warm process.
        here = {name: value for name, value in state_of().items() if name in there}
    except OSError as error:
        return [f"it cannot be looked at: {error.strerror}"]
    return [*unlike(warm.description, want), *differences(here, there)]


class Borrowed:
    """A spawner that is not a child of this process, with the part of `subprocess.Popen` that an agent uses."""

    def __init__(self, stream: socket.socket, handle: int, told: int) -> None:
        self.socket, self._handle, self._told = stream, handle, told

    def kill(self) -> None:
        """SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code, negative for a signal, which the guard sends after clean-up. Raises
        `subprocess.TimeoutExpired`."""
        # If the guard has died, wait for the spawner itself.
        deadline = None if timeout is None else time.monotonic() + timeout
        for waited in (self._told, self._handle):
            # Not select(), which is limited to descriptors below 1024.
            poll = select.poll()
            poll.register(waited, select.POLLIN)
            if not poll.poll(None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1000):
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
        stream.send(replace(want, state=state_of()))
        answer, handles, _, _ = socket.recv_fds(sock, 1, 1)
        if answer == b"y":
            sock.settimeout(None)
            return Borrowed(sock, handles[0], told)
        reply = stream.receive(BORROW_TIMEOUT) if answer else None
        why = reply.reason if isinstance(reply, Declined) else "it has ended meanwhile"
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
    # Hidden until it is locked.
    draft = folder.with_name(f".{folder.name}")
    try:
        make_private(draft)
        log = os.open(draft / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        fcntl.flock(log, fcntl.LOCK_EX)
        draft.rename(folder)
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
