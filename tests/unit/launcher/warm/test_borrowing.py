"""Finding warm processes, and borrowing from one that fails."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from tests.waiting import WAIT_TIMEOUT
from unirun import atomic
from unirun.errors import JobError
from unirun.launcher.orders import spawner_request
from unirun.launcher.warm import borrowing
from unirun.launcher.warm.borrowing import (
    Borrowed,
    Warm,
    WarmMatch,
    borrow,
    choose,
    leave_behind,
    run_root,
    running,
    some_start,
)
from unirun.launcher.warm.key import DESCRIPTION, SOCKET, Description, state_of
from unirun.wire.blocking import BlockingStream
from unirun.wire.messages import Dismissed
from unirun.wire.reports import Borrow

NOBODY = 65534

WANT = spawner_request({"HOME": "/h"}, ("torch",), "/")


def described(**other: object) -> Description:
    """The description of this process, which fits `WANT`."""
    return replace(
        Description(
            pid=os.getpid(),
            began=1.0,
            idle=1.0,
            modules=("torch",),
            path=(),
            imported={"torch": "/torch/__init__.py"},
            names=("X", "Y"),
            variables={"HOME": "/h"},
            state=state_of(),
        ),
        **other,
    )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of warm processes."""
    monkeypatch.setenv("UNIRUN_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("UNIRUN_WARM", raising=False)
    (tmp_path / "run" / "warm").mkdir(0o700, parents=True)
    (tmp_path / "run").chmod(0o700)
    return tmp_path / "run" / "warm"


@pytest.fixture
def lives(root: Path) -> Iterator[Callable[..., Path]]:
    """Creates the folder of a live warm process."""
    with contextlib.ExitStack() as stack:

        def live(name: str, description: Description | None) -> Path:
            folder = root / name
            folder.mkdir()
            log = stack.enter_context((folder / "log").open("w"))
            fcntl.flock(log, fcntl.LOCK_EX)
            if description is not None:
                (folder / DESCRIPTION).write_text(json.dumps(to_builtins(description)))
            return folder

        yield live


class TestTheDirectory:
    def test_the_warm_directory_is_in_that_of_the_login_session(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("UNIRUN_RUN_DIR", raising=False)
        tmp_path.chmod(0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        assert run_root() == tmp_path / "unirun" / "warm"

    def test_a_warm_directory_that_others_may_write_is_refused(self, root: Path) -> None:
        root.parent.chmod(0o777)
        with pytest.raises(JobError, match="may be written by all users"):
            run_root()
        assert choose(WANT).warm is None
        assert "not safe" in choose(WANT).against[0]

    @pytest.mark.skipif(os.getuid() != 0, reason="only root may give a directory away")
    def test_a_warm_directory_of_another_user_is_refused(self, root: Path) -> None:
        os.chown(root.parent, NOBODY, NOBODY)
        with pytest.raises(JobError, match="belongs to user"):
            run_root()
        assert choose(WANT).warm is None

    @pytest.mark.starts_processes
    @pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
    def test_an_unreadable_warm_directory_is_refused(self, root: Path) -> None:
        """For a process that cannot read its own state, as it has changed its user."""
        script = "import os; from unirun.launcher.warm.borrowing import *; "
        script += "from unirun.launcher.orders import spawner_request; "
        script += "os.setresuid(65534, 65534, 65534); print(choose(spawner_request({}, (), '/')).against)"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert "cannot be used: Permission denied" in done.stdout


class TestThoseThatRun:
    def test_warm_processes_are_listed_the_oldest_first(self, lives: Callable[..., Path]) -> None:
        young, old = lives("a", described(began=2.0)), lives("b", described(began=1.0))
        assert [warm.folder for warm in running()] == [old, young]
        assert not some_start()

    def test_warm_processes_that_are_not_ready_are_not_listed(self, lives: Callable[..., Path]) -> None:
        folder = lives("a", None)
        assert running() == []
        assert some_start()
        assert folder.exists()

    def test_folders_of_dead_warm_processes_are_removed(self, root: Path, lives: Callable[..., Path]) -> None:
        alive = lives("a", described())
        for name, files in {
            "dead": (DESCRIPTION, "log"),
            "half removed": (DESCRIPTION,),
            "empty": (),
        }.items():
            (root / name).mkdir()
            for file in files:
                (root / name / file).touch()
        assert [warm.folder for warm in running()] == [alive]
        assert [*root.iterdir()] == [alive]

    def test_a_warm_folder_that_is_being_created_is_neither_listed_nor_removed(self, root: Path) -> None:
        """Folders of dead processes are removed; this one has no process yet."""
        (root / ".draft").mkdir()
        assert (running(), some_start()) == ([], False)
        assert (root / ".draft").exists()

    def test_others_that_look_at_any_moment_of_a_start_remove_nothing(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They look before each line of it."""
        looks = 0

        def look(frame: FrameType, event: str, _: object) -> Any:
            nonlocal looks
            if frame.f_code.co_filename not in (borrowing.__file__, atomic.__file__):
                return None
            looks += 1
            assert running() == []
            return look

        def fork() -> int:
            assert some_start()
            return -1

        monkeypatch.setattr(os, "fork", fork)
        monkeypatch.setattr(os, "waitpid", lambda pid, options: (pid, 0))
        before = sys.gettrace()
        sys.settrace(look)
        try:
            borrowing.start({}, (), 1.0)
        finally:
            sys.settrace(before)
        assert looks > 10

    def test_a_warm_process_with_an_unknown_description_is_not_listed(
        self, lives: Callable[..., Path]
    ) -> None:
        (lives("a", None) / DESCRIPTION).write_text('{"version": 7}')
        (lives("b", None) / DESCRIPTION).write_text("no JSON")
        assert running() == []
        assert choose(WANT).against == ("no warm process runs (unirun warm)",)


@pytest.mark.parametrize("there", range(borrowing.MAX_LEFT_PROCESSES + 1))
def test_jobs_leave_what_was_missing_up_to_a_number(
    there: int, lives: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIRUN_WARM", "1")
    for number in range(there):
        lives(f"old{number}", described())
    started: list[Path] = []

    def start(env: object, modules: object, idle: float) -> None:
        started.append(lives(f"new{len(started)}", described()))

    monkeypatch.setattr(borrowing, "start", start)
    fits = WarmMatch(WANT, Warm(Path("/"), described()))
    leave_behind([WarmMatch(WANT, None), fits, *[WarmMatch(WANT, None)] * 5])
    assert len(started) == min(borrowing.MAX_LEFT_PROCESSES - there, 6)


class TestOfSeveral:
    def test_of_fitting_warm_processes_the_one_with_the_most_modules_is_chosen(
        self, lives: Callable[..., Path]
    ) -> None:
        lives("a", described())
        most = lives("b", described(modules=("torch", "journal")))
        want = replace(WANT, modules=("torch", "journal"))
        choice = choose(want)
        assert choice.warm is not None
        assert choice.warm.folder == most
        assert choose(WANT).warm is not None

    def test_without_a_fitting_warm_process_the_difference_of_the_nearest_is_given(
        self, lives: Callable[..., Path]
    ) -> None:
        lives("a", described(variables={"HOME": "/h", "X": "1", "Y": "1"}))
        lives("b", described(variables={"HOME": "/h", "X": "1"}))
        assert choose(WANT).against == (f"process {os.getpid()} differs: X is not set, there '1'",)

    def test_no_warm_process_is_chosen_with_unirun_warm_0(
        self, lives: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lives("a", described())
        monkeypatch.setenv("UNIRUN_WARM", "0")
        assert choose(WANT).against == ("UNIRUN_WARM=0",)


def accept(listener: socket.socket) -> tuple[socket.socket, list[int], object]:
    connection, _ = listener.accept()
    _, handles, _, _ = socket.recv_fds(connection, 1, 10)
    return connection, handles, BlockingStream(connection).receive(WAIT_TIMEOUT)


@pytest.fixture
def listener(lives: Callable[..., Path]) -> Iterator[tuple[Warm, socket.socket]]:
    """A warm process that does not respond."""
    folder = lives("stub", described())
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / SOCKET))
        sock.listen(1)
        yield Warm(folder, described()), sock


class TestAJobThatBorrows:
    @pytest.fixture(autouse=True)
    def little_patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(borrowing, "BORROW_TIMEOUT", 0.3)

    def test_a_declined_borrower_gets_the_reason(self, listener: tuple[Warm, socket.socket]) -> None:
        warm, sock = listener

        def decline() -> None:
            connection, handles, wanted = accept(sock)
            for handle in handles:
                os.close(handle)
            assert isinstance(wanted, Borrow)
            assert wanted == WANT
            connection.sendall(b"n")
            BlockingStream(connection).send(Dismissed("of the weather"))
            connection.close()

        thread = threading.Thread(target=decline)
        thread.start()
        assert borrow(warm, WANT) == f"the warm process {os.getpid()} declines: of the weather"
        thread.join()

    def test_a_borrower_without_a_free_descriptor_starts_cold(
        self, listener: tuple[Warm, socket.socket]
    ) -> None:
        warm, sock = listener
        limits, ends = resource.getrlimit(resource.RLIMIT_NOFILE), list[bytes]()

        def lend() -> None:
            connection, handles, _ = accept(sock)
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(handles), limits[1]))
            socket.send_fds(connection, [b"y"], handles[:1])
            connection.settimeout(10.0)
            ends.append(connection.recv(1))
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            connection.close()
            for handle in handles:
                os.close(handle)

        thread = threading.Thread(target=lend)
        thread.start()
        try:
            told = borrow(warm, WANT)
        finally:
            thread.join(WAIT_TIMEOUT)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert told == f"the warm process {os.getpid()} declines: this process has too many open files"
        assert ends == [b""], "the spawner that it lends sees that nobody has it"

    @pytest.mark.parametrize("after", ["accept", "request", "half an answer"])
    def test_a_borrower_starts_cold_when_the_warm_process_ends(
        self, listener: tuple[Warm, socket.socket], after: str
    ) -> None:
        warm, sock = listener

        def end() -> None:
            if after == "accept":
                sock.accept()[0].close()
                return
            connection, handles, _ = accept(sock)
            if after == "half an answer":
                connection.sendall(b"n")
            for handle in handles:
                os.close(handle)
            connection.close()

        thread = threading.Thread(target=end)
        thread.start()
        assert isinstance(borrow(warm, WANT), str)
        thread.join()

    @pytest.mark.parametrize("answer", [b"", b"n", b"nonsense"])
    def test_a_borrower_waits_until_its_timeout(
        self, listener: tuple[Warm, socket.socket], answer: bytes
    ) -> None:
        warm, sock = listener
        over = threading.Event()

        def be_slow() -> None:
            connection, handles, _ = accept(sock)
            connection.sendall(answer)
            over.wait(WAIT_TIMEOUT)
            for handle in handles:
                os.close(handle)
            connection.close()

        thread = threading.Thread(target=be_slow)
        thread.start()
        told = borrow(warm, WANT)
        over.set()
        thread.join()
        assert isinstance(told, str)

    def test_a_borrower_starts_cold_when_the_warm_process_does_not_accept(
        self, listener: tuple[Warm, socket.socket]
    ) -> None:
        """As a stopped process does; then also with a full queue."""
        warm, _ = listener
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                assert "it does not answer" in str(borrow(warm, WANT))
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    waiting.connect(str(warm.folder / SOCKET))

    def test_a_borrower_starts_cold_when_the_warm_process_does_not_listen(
        self, lives: Callable[..., Path]
    ) -> None:
        assert "it does not answer" in str(borrow(Warm(lives("a", None), described()), WANT))

    def test_a_borrower_sends_nothing_to_another_process_at_the_socket(
        self, listener: tuple[Warm, socket.socket]
    ) -> None:
        warm, sock = listener
        told = borrow(replace(warm, description=described(pid=1)), WANT)
        assert "another process has its socket" in str(told)
        connection, _ = sock.accept()
        with connection:
            assert connection.recv(1) == b""

    def test_a_borrower_leaks_no_descriptor(self, listener: tuple[Warm, socket.socket]) -> None:
        warm, _ = listener
        before = len(os.listdir("/proc/self/fd"))
        borrow(warm, WANT)
        assert len(os.listdir("/proc/self/fd")) == before


class TestABorrowedSpawner:
    @pytest.fixture
    def spawner(self) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(["sleep", "60"]) as process:
            yield process
            process.kill()

    @pytest.fixture
    def tells(self, spawner: subprocess.Popen[bytes]) -> Iterator[tuple[Borrowed, int]]:
        """The spawner, and the descriptor of its guard."""
        told, tells = os.pipe()
        ours, theirs = socket.socketpair()
        borrowed = Borrowed(ours, os.pidfd_open(spawner.pid), told)
        with ours, theirs:
            yield borrowed, tells
        borrowed.close()

    @pytest.mark.starts_processes
    def test_a_borrowed_spawner_has_ended_when_its_guard_reports_it(
        self, tells: tuple[Borrowed, int]
    ) -> None:
        borrowed, guard = tells
        os.write(guard, b"7")
        os.close(guard)
        assert borrowed.wait(WAIT_TIMEOUT) == 7

    @pytest.mark.starts_processes
    @pytest.mark.parametrize("code", [0, -9, 255])
    def test_a_borrowed_spawner_has_the_reported_exit_code(
        self, tells: tuple[Borrowed, int], code: int
    ) -> None:
        borrowed, guard = tells

        def report() -> None:
            os.write(guard, str(code).encode())
            os.close(guard)

        threading.Timer(0.05, report).start()
        assert borrowed.wait() == code

    @pytest.mark.starts_processes
    def test_a_borrowed_spawner_is_waited_for_without_its_guard(
        self, tells: tuple[Borrowed, int], spawner: subprocess.Popen[bytes]
    ) -> None:
        borrowed, guard = tells
        os.close(guard)
        with pytest.raises(subprocess.TimeoutExpired):
            borrowed.wait(0.05)
        borrowed.kill()
        assert borrowed.wait(WAIT_TIMEOUT) == -signal.SIGKILL
        spawner.wait()
        borrowed.kill()

    @pytest.mark.starts_processes
    def test_waiting_for_a_borrowed_spawner_times_out(self, tells: tuple[Borrowed, int]) -> None:
        borrowed, guard = tells
        began = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            borrowed.wait(0.1)
        assert 0.1 <= time.monotonic() - began < WAIT_TIMEOUT
        os.close(guard)

    @pytest.mark.parametrize("after", [0.0, 1.5, 3.0, None])
    def test_both_waits_for_a_borrowed_spawner_have_one_time_out(
        self, after: float | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The guard is gone `after` some seconds, or not at all; the spawner lives."""
        now = 100.0
        told, tells = os.pipe()
        os.close(tells)

        def readable(handle: int, seconds: float) -> bool:
            nonlocal now
            ready = handle == told and after is not None and now + seconds >= 100.0 + after
            now = 100.0 + after if ready and after is not None else now + max(seconds, 0.0)
            return ready

        monkeypatch.setattr(borrowing, "time", SimpleNamespace(monotonic=lambda: now))
        monkeypatch.setattr(borrowing, "readable", readable)
        ours, theirs = socket.socketpair()
        borrowed = Borrowed(ours, os.pidfd_open(os.getpid()), told)
        with ours, theirs, contextlib.closing(borrowed), pytest.raises(subprocess.TimeoutExpired):
            borrowed.wait(2.0)
        assert now == 102.0

    @pytest.mark.starts_processes
    def test_a_borrowed_spawner_may_have_a_descriptor_above_1024(
        self, spawner: subprocess.Popen[bytes]
    ) -> None:
        """`select` is limited to descriptors below 1024; the agent of a large job has more."""
        told, tells = os.pipe()
        high = fcntl.fcntl(told, fcntl.F_DUPFD_CLOEXEC, 1500)
        os.close(told)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            borrowed = Borrowed(ours, os.pidfd_open(spawner.pid), high)
            os.write(tells, b"3")
            os.close(tells)
            assert borrowed.wait(WAIT_TIMEOUT) == 3
            borrowed.close()
