"""A real spawner without imports, controlled as by its agent."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.effort import examples
from tests.integration.invariants import stale_pidfds
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import ConnectionLost
from unirun.launcher import spawner as spawner_module
from unirun.launcher.preloaded import PreloadedModules
from unirun.launcher.process import BOOT
from unirun.wire.blocking import BlockingStream
from unirun.wire.frames import encode, encode_frame
from unirun.wire.reports import (
    Forked,
    Kill,
    Message,
    Notice,
    OpenStore,
    Reaped,
    Spawn,
    SpawnerReady,
    SpawnFailed,
    StoreEnded,
    StoreOpened,
)

M = TypeVar("M")
DESCRIPTORS = 250
"""The workers' limit of descriptors."""


class Spawner:
    """The agent's end of the stream."""

    def __init__(
        self, folder: Path, *modules: str, pass_fds: tuple[int, ...] = (), under: tuple[str, ...] = ()
    ) -> None:
        self.folder = folder
        ours, theirs = socket.socketpair()
        listeners = ",".join(map(str, pass_fds))
        about = [str(theirs.fileno()), str(os.getpid()), str(DESCRIPTORS), listeners]
        command = [*under, sys.executable, "-u", BOOT, "spawner", *about, *modules]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno(), *pass_fds], stderr=subprocess.PIPE, start_new_session=True
        )
        theirs.close()
        self.stream = BlockingStream(ours)

    def next(self, kind: type[M]) -> M:
        message = self.stream.receive(WAIT_TIMEOUT)
        assert isinstance(message, kind), message
        return message

    def until(self, kind: type[M]) -> M:
        while not isinstance(message := self.stream.receive(WAIT_TIMEOUT), kind):
            continue
        return message

    def send(self, *messages: Message) -> None:
        """Send all at once, so that they arrive together."""
        self.stream.socket.sendall(b"".join(encode_frame(encode(message)) for message in messages))

    def program(self, number: int, *command: str, **more: object) -> Spawn:
        fields: dict[str, object] = {
            "title": f"actor:{number}",
            "kind": "program",
            "target": command[0],
            "args": command[1:],
            "fresh": True,
            "env": {"PATH": os.environ["PATH"], "ROLE_NAME": "actor", "RANK": str(number)},
            "cwd": str(self.folder),
            "logs": str(self.folder),
            "folder": str(number),
            **more,
        }
        return Spawn(number, **fields)  # type: ignore[arg-type]

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def close(self) -> int:
        self.stream.close()
        code = self.process.wait(WAIT_TIMEOUT)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture
def port() -> Iterator[int]:
    """The descriptor of a listening socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.fileno()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Spawner]]:
    started: list[Spawner] = []

    def make(*modules: str, **more: tuple[Any, ...]) -> Spawner:
        started.append(Spawner(tmp_path, *modules, **more))
        return started[-1]

    yield make
    for spawner in started:
        if spawner.process.returncode is None:
            pid = spawner.process.pid
            assert eventually(lambda pid=pid: not stale_pidfds(pid)), "nothing is kept of what has ended"  # type: ignore[misc]
            spawner.process.kill()
            spawner.close()


@pytest.fixture
def spawner(start: Callable[..., Spawner]) -> Spawner:
    made = start()
    made.next(SpawnerReady)
    return made


def gone(pid: int) -> bool:
    """Return True if the process does not exist or is a zombie, which may be reaped between two checks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.starts_processes
def test_a_spawner_runs_a_program_and_reports_its_exit(spawner: Spawner) -> None:
    spawner.send(spawner.program(1, "sh", "-c", "echo out; echo err >&2; exit 7"))
    assert spawner.next(Forked).id == 1
    end = spawner.next(Reaped)
    assert (end.id, end.code, end.signal) == (1, 7, None)
    assert (spawner.folder / "1" / "stdout.log").read_text() == "out\n"
    assert (spawner.folder / "1" / "stderr.log").read_text() == "err\n"


@pytest.mark.starts_processes
def test_a_spawned_program_has_the_agents_original_limit_of_descriptors(spawner: Spawner) -> None:
    spawner.send(spawner.program(1, "sh", "-c", "ulimit -Sn; ulimit -Hn"))
    spawner.until(Reaped)
    soft, hard = (spawner.folder / "1" / "stdout.log").read_text().split()
    assert soft == str(DESCRIPTORS)
    assert hard == str(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


@pytest.mark.starts_processes
def test_a_spawned_worker_reads_the_given_stdin_and_the_next_one_continues(
    start: Callable[..., Spawner],
) -> None:
    theirs, ours = os.pipe()
    spawner = start(pass_fds=(theirs,))
    os.close(theirs)
    spawner.next(SpawnerReady)
    os.write(ours, b"one\ntwo\n")
    os.close(ours)
    spawner.send(spawner.program(1, "sh", "-c", "read line; echo $line; ls /proc/self/fd", stdin=theirs))
    spawner.until(Reaped)
    assert (spawner.folder / "1" / "stdout.log").read_text().split() == ["one", "0", "1", "2", "3"]
    spawner.send(spawner.program(2, "cat"), spawner.program(3, "cat", stdin=theirs))
    spawner.until(Reaped)
    spawner.until(Reaped)
    assert [(spawner.folder / n / "stdout.log").read_text() for n in "23"] == ["", "two\n"]


@pytest.mark.starts_processes
def test_a_signal_right_after_a_spawn_request_is_not_lost(spawner: Spawner) -> None:
    """The child may not have set its group and handlers yet, and the spawner ignores SIGTERM."""
    for number in range(1, 41):
        signum = int((signal.SIGTERM, signal.SIGKILL)[number % 2])
        spawner.send(spawner.program(number, "sleep", "100"), Kill(number, signum))
        spawner.next(Forked)
        end = spawner.next(Reaped)
        assert (end.id, end.signal) == (number, signum)


@pytest.mark.starts_processes
def test_a_spawned_child_has_the_default_signal_handlers(spawner: Spawner) -> None:
    code = (
        "import signal; print([int(signal.getsignal(s)) for s in (1, 3, 15)], signal.pthread_sigmask(0, []))"
    )
    spawner.send(spawner.program(1, sys.executable, "-c", code))
    spawner.next(Forked)
    assert spawner.next(Reaped).code == 0
    assert (spawner.folder / "1" / "stdout.log").read_text() == "[0, 0, 0] set()\n"


@pytest.mark.starts_processes
def test_a_spawner_kills_a_workers_group_before_it_reports_the_exit(spawner: Spawner) -> None:
    spawner.send(spawner.program(1, "sh", "-c", "sleep 100 & echo $!; exit 0"))
    spawner.next(Forked)
    spawner.until(Reaped)
    assert gone(int((spawner.folder / "1" / "stdout.log").read_text()))


@pytest.mark.starts_processes
def test_a_spawner_collects_what_its_workers_have_left_while_they_run(spawner: Spawner) -> None:
    os.mkfifo(spawner.folder / "go")
    # Read and write, so that a line waits for a reader that opens it late.
    go = os.open(spawner.folder / "go", os.O_RDWR)
    orphans = "for n in 1 2 3; do (setsid sh -c 'read line' < go &) ; done; exec sleep 60"
    spawner.send(spawner.program(1, "sh", "-c", orphans))
    worker = spawner.next(Forked).pid
    assert eventually(lambda: len(spawner.children()) == 4), "they are adopted"
    os.write(go, b"\n\n\n")
    assert eventually(lambda: spawner.children() == [worker]), "no zombie is left"
    os.close(go)
    spawner.send(Kill(1, signal.SIGKILL))
    assert spawner.next(Reaped).signal == signal.SIGKILL


@pytest.mark.starts_processes
def test_a_spawner_leaves_no_process_when_the_agent_is_gone(spawner: Spawner) -> None:
    spawner.send(spawner.program(1, "sleep", "100"), spawner.program(2, "setsid", "sleep", "100"))
    pids = [spawner.next(Forked).pid, spawner.next(Forked).pid]
    assert spawner.close() == 0
    assert all(gone(pid) for pid in pids)


@pytest.mark.starts_processes
def test_a_spawner_whose_agent_has_died_exits_before_it_imports() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-u", BOOT, "spawner", str(theirs.fileno())]
        done = subprocess.run(
            [*command, str(os.getppid()), "250", "", "no_such_module"],
            pass_fds=[theirs.fileno()],
            timeout=WAIT_TIMEOUT,
            check=False,
        )
        assert done.returncode == 128 + signal.SIGKILL
        theirs.close()
        assert ours.recv(1) == b""


@pytest.mark.starts_processes
def test_a_spawner_reports_a_process_that_cannot_be_started(spawner: Spawner) -> None:
    (spawner.folder / "blocked").touch()
    spawner.send(
        spawner.program(1, "true", folder="blocked/1"),
        spawner.program(2, "no-such-program"),
        spawner.program(3, "true", cwd=str(spawner.folder / "nowhere")),
    )
    failed = spawner.next(SpawnFailed)
    assert (failed.id, failed.time > 0) == (1, True)
    assert "its log cannot be written" in failed.reason
    ends = {end.id: end.code for end in (spawner.until(Reaped), spawner.until(Reaped))}
    assert ends == {2: 127, 3: 126}
    assert "no-such-program cannot be executed" in (spawner.folder / "2" / "stderr.log").read_text()
    assert "could not be set up" in (spawner.folder / "3" / "stderr.log").read_text()


@pytest.mark.starts_processes
def test_a_spawner_names_a_module_that_cannot_be_imported(start: Callable[..., Spawner]) -> None:
    spawner = start("json", "no_such_module")
    failed = spawner.next(SpawnFailed)
    assert failed.id == 0
    assert "cannot import no_such_module: ModuleNotFoundError" in failed.reason
    with pytest.raises(ConnectionLost):
        spawner.stream.receive(WAIT_TIMEOUT)
    assert spawner.close() == 1


@pytest.mark.starts_processes
def test_a_spawners_new_store_replaces_the_old_one_and_its_end_is_reported(
    start: Callable[..., Spawner], port: int
) -> None:
    """The store is reported as soon as it is forked, so its imports do not matter here."""
    spawner = start(pass_fds=(port,))
    spawner.next(SpawnerReady)
    spawner.send(OpenStore("actor", 3, port))
    assert spawner.next(StoreOpened) == StoreOpened("actor", 3)
    first = spawner.children()
    spawner.send(OpenStore("actor", 4, port))
    assert spawner.next(StoreOpened) == StoreOpened("actor", 4)
    second = spawner.children()
    assert len(first) == len(second) == 1
    assert first != second
    # A store that ends while the order for the next one waits is not reported: nobody needs it any more.
    spawner.process.send_signal(signal.SIGSTOP)
    spawner.send(OpenStore("actor", 5, port))
    handle = os.pidfd_open(second[0])
    os.kill(second[0], signal.SIGKILL)
    assert select.select([handle], [], [], WAIT_TIMEOUT)[0], "it has ended"
    os.close(handle)
    spawner.process.send_signal(signal.SIGCONT)
    assert spawner.next(StoreOpened) == StoreOpened("actor", 5)
    third = spawner.children()
    os.kill(third[0], signal.SIGKILL)
    end = spawner.next(StoreEnded)
    assert (end.role, end.generation, end.reason) == ("actor", 5, "its process was killed")


@pytest.mark.starts_processes
def test_a_spawner_without_descriptors_opens_no_store_and_goes_on(
    start: Callable[..., Spawner], port: int
) -> None:
    spawner = start(pass_fds=(port,))
    spawner.next(SpawnerReady)
    # It serves once it has answered.
    spawner.send(OpenStore("other", 1, port))
    spawner.next(StoreOpened)
    others = spawner.children()
    pid = spawner.process.pid
    (_, most), free = resource.prlimit(pid, resource.RLIMIT_NOFILE), max(files_of(pid)) + 1
    holes = {*range(free)} - {*map(int, os.listdir(f"/proc/{pid}/fd"))}
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE, (min({free, *holes}), most))
    spawner.send(OpenStore("actor", 3, port))
    end = spawner.next(StoreEnded)
    assert (end.generation, end.reason) == (3, "no process can be watched: Too many open files")
    assert spawner.children() == others
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    spawner.send(OpenStore("actor", 4, port))
    assert spawner.next(StoreOpened) == StoreOpened("actor", 4)


def files_of(pid: int) -> dict[int, str]:
    """The files behind the descriptors of a process, without its standard streams."""
    found = {}
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found[int(handle.name)] = os.readlink(handle)
    return {handle: link for handle, link in found.items() if handle > 2}


def eventually(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT_TIMEOUT
    # It may be true for a moment only.
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.001)
    return found


@pytest.mark.starts_processes
def test_spawned_processes_have_no_descriptor_of_the_spawner_or_each_other(
    start: Callable[..., Spawner], tmp_path: Path
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.create_server(("127.0.0.1", 0)) as another,
        socket.socket(socket.AF_UNIX) as agent,
    ):
        spawner = start(pass_fds=(port.fileno(), another.fileno()))
        spawner.next(SpawnerReady)
        agent.bind(str(tmp_path / "agent.sock"))
        agent.listen()
        (tmp_path / "token").write_text("00" * 32)
        (tmp_path / "token").chmod(0o600)
        spawner.send(spawner.program(1, "sleep", "100"))
        spawner.next(Forked)
        spawner.send(OpenStore("critic", 0, another.fileno()))
        spawner.next(StoreOpened)
        spawner.send(OpenStore("actor", 0, port.fileno()))
        spawner.next(StoreOpened)
        store = spawner.children()[-1]
        assert eventually(lambda: files_of(store).keys() == {port.fileno()}), files_of(store)
        # A worker that was forked waits for the first word of its agent.
        env = {"UNIRUN_SOCKET": str(tmp_path / "agent.sock"), "ROLE_NAME": "actor", "RANK": "2"}
        spawner.send(spawner.program(2, "none.py", kind="script", fresh=False, env=env))
        worker = spawner.next(Forked).pid
        of_the_spawner = {*files_of(spawner.process.pid).values()}

        def has_its_link_alone() -> bool:
            files = [*files_of(worker).values()]
            return len(files) == 1 and files[0].startswith("socket:") and files[0] not in of_the_spawner

        assert eventually(has_its_link_alone), (files_of(worker), of_the_spawner)


@pytest.mark.starts_processes
def test_a_spawner_kills_a_workers_group_before_its_pid_can_be_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 7"], {}, setsid=True)
    killed: list[int] = []

    def kill_family(group: int, members: Collection[int]) -> None:
        killed.append(group)
        assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG), "its pid is free"

    monkeypatch.setattr(spawner_module, "kill_family", kill_family)
    ours, theirs = socket.socketpair()
    with ours, BlockingStream(theirs) as agent:
        spawner = spawner_module.Spawner(BlockingStream(ours), DESCRIPTORS, {}, PreloadedModules())
        known = spawner_module._Child(1, pid, os.pidfd_open(pid), "none:0", ("none", str(pid), ""))
        spawner._children[1] = known
        spawner._selector.register(known.handle, selectors.EVENT_READ, known)
        spawner._reap(known)
        spawner._selector.close()
        assert isinstance(end := agent.receive(WAIT_TIMEOUT), Reaped)
        assert (end.id, end.code, end.signal) == (1, 7, None)
    assert killed == [pid]
    with pytest.raises(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


@pytest.mark.starts_processes
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root becomes another user")
@pytest.mark.parametrize("script", ["echo up; exec sleep 100", "sleep 100 & echo up; wait"])
def test_a_spawner_says_that_it_cannot_end_a_program_of_another_user(
    start: Callable[..., Spawner], script: str
) -> None:
    """With children and without. The spawner has no right to signal other users, as it has when it is not root."""
    spawner = start(under=("setpriv", "--bounding-set=-kill"))
    spawner.next(SpawnerReady)
    spawner.send(spawner.program(1, "setpriv", "--reuid=65534", "sh", "-c", script))
    pid = spawner.next(Forked).pid
    try:
        log = spawner.folder / "1" / "stdout.log"
        assert eventually(lambda: log.read_text() == "up\n")
        spawner.send(Kill(1, int(signal.SIGKILL)))
        assert spawner.next(Notice).text == "runs as another user and cannot be signalled; stop it yourself"
    finally:
        os.killpg(pid, signal.SIGKILL)
    assert spawner.next(Reaped).signal == signal.SIGKILL


@pytest.mark.starts_processes
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root becomes another user")
def test_a_spawner_goes_on_when_a_program_of_another_user_leaves_a_process(
    start: Callable[..., Spawner],
) -> None:
    spawner = start(under=("setpriv", "--bounding-set=-kill"))
    spawner.next(SpawnerReady)
    script = "setsid sleep 100 & echo $!"
    spawner.send(spawner.program(1, "setpriv", "--reuid=65534", "sh", "-c", script))
    assert spawner.until(Reaped).code == 0
    left = int((spawner.folder / "1" / "stdout.log").read_text())
    try:
        spawner.send(spawner.program(2, "true"))
        assert spawner.until(Reaped).code == 0
    finally:
        os.kill(left, signal.SIGKILL)


@pytest.mark.starts_processes
def test_a_spawner_does_not_fork_after_a_module_has_started_threads(
    start: Callable[..., Spawner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "harmless.py").touch()
    (tmp_path / "computes.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spawner = start("harmless", "computes")
    spawner.next(SpawnerReady)
    assert spawner.next(Notice).text.startswith("computes has started 1 thread, which a fork would lack")
    env = {"PATH": os.environ["PATH"], "PYTHON_EXEC": "echo"}
    spawner.send(spawner.program(1, "train.py", kind="script", fresh=False, env=env))
    assert spawner.until(Reaped).code == 0
    assert (tmp_path / "1" / "stdout.log").read_text() == f"-u {BOOT} worker script train.py\n"


@pytest.mark.starts_processes
def test_a_forked_worker_keeps_the_open_files_of_a_preloaded_module(
    start: Callable[..., Spawner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    entries = tmp_path / "entries"
    (tmp_path / "journal.py").write_text(f"FILE = open({str(entries)!r}, 'wb')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spawner = start("journal", pass_fds=(port,))
    spawner.next(SpawnerReady)
    spawner.send(OpenStore("actor", 0, port))
    spawner.next(StoreOpened)
    store = spawner.children()[-1]
    kept = {port, next(n for n, link in files_of(spawner.process.pid).items() if link == str(entries))}
    assert eventually(lambda: files_of(store).keys() == kept), files_of(store)


@pytest.mark.starts_processes
def test_collections_look_for_garbage_in_a_user_s_module_and_not_in_torch(tmp_path: Path) -> None:
    for name in ("torch", "mine"):
        text = f"import gc; CELLS = [[] for _ in range(100_000)]; print({name!r}, gc.isenabled())"
        (tmp_path / f"{name}.py").write_text(text)
    code = """
import gc
from unirun.launcher.preloaded import PreloadedModules
modules = PreloadedModules()
for name in ("torch", "mine"):
    modules.load(name)
    print(gc.get_freeze_count() // 100_000)
print(gc.isenabled())
"""
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["torch", "False", "1", "mine", "True", "1", "True"]


# Any number of workers, that leave processes behind, beside a reference of what must live.

LEAVES = {
    "nothing": "",
    "a child": "sleep 100 & echo $! > LEFT",
    "a child in another session": "setsid sleep 100 & echo $! > LEFT",
    "an orphan": "(setsid sleep 100 & echo $! > LEFT)",
    "an orphan that ends": "(true &)",
    "an orphan without marks": "(env -i setsid sleep 100 & echo $! > LEFT)",
}
"""Commands of a worker before it waits for its end, by what it leaves."""


class Running:
    """A worker, and the process that it has left."""

    def __init__(self, number: int, pid: int, leaves: str, end: int, left: int | None) -> None:
        self.number, self.pid, self.leaves, self.left = number, pid, leaves, left
        self._end = end

    def exit(self, code: int) -> None:
        os.write(self._end, b"%d\n" % code)

    def close(self) -> None:
        os.close(self._end)


class Spawners(RuleBasedStateMachine):
    """An agent that starts and ends workers. The reference: which of them run, and what each has left."""

    workers: Bundle[Running] = Bundle("workers")

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.spawner = Spawner(Path(self._folder.name))
        self.spawner.next(SpawnerReady)
        (self.spawner.folder / "blocked").touch()
        self.numbers = 0
        self.running: dict[int, Running] = {}
        self.unmarked: list[int] = []
        self.told: list[Message] = []
        # It serves once it has answered.
        self.spawn_without_a_log()
        self.own = len(files_of(self.spawner.process.pid))

    def teardown(self) -> None:
        """All that any worker has started ends with the agent."""
        left = [each.left for each in self.running.values() if each.left is not None]
        pids = [*(each.pid for each in self.running.values()), *left, *self.unmarked]
        try:
            assert self.spawner.close() == 0
            assert [pid for pid in pids if not gone(pid)] == []
        finally:
            for each in self.running.values():
                each.close()
            self._folder.cleanup()

    def about(self, number: int, kind: type[M]) -> M:
        """The next message of this kind about a worker. Those of others may come before."""
        while True:
            for message in self.told:
                if isinstance(message, kind) and getattr(message, "id", 0) == number:
                    self.told.remove(message)
                    return message
            message = self.spawner.stream.receive(WAIT_TIMEOUT)
            if not isinstance(message, Notice):
                self.told.append(message)

    def request(self, leaves: str, **more: object) -> Spawn:
        self.numbers += 1
        end, left = (self.spawner.folder / f"{name}{self.numbers}" for name in ("end", "left"))
        os.mkfifo(end)
        script = f"{LEAVES[leaves].replace('LEFT', str(left))}\nread code < {end}; exit $code"
        env = {
            "PATH": os.environ["PATH"],
            "UNIRUN_JOB": "job",
            "UNIRUN_ROLE": "actor",
            "UNIRUN_RANK": str(self.numbers),
            "UNIRUN_INCARNATION": "0",
        }
        return self.spawner.program(self.numbers, "sh", "-c", script, env=env, **more)

    @rule(target=workers, leaves=st.sampled_from([*LEAVES]))
    def spawn(self, leaves: str) -> Running:
        request = self.request(leaves)
        self.spawner.send(request)
        pid, left = self.about(request.id, Forked).pid, None
        if "LEFT" in LEAVES[leaves]:
            file = self.spawner.folder / f"left{request.id}"
            assert eventually(lambda: file.exists() and file.read_text().endswith("\n"))
            left = int(file.read_text())
            # In its own session and program, where it is to be.
            assert eventually(lambda: Path(f"/proc/{left}/comm").read_text() == "sleep\n")
        end = os.open(self.spawner.folder / f"end{request.id}", os.O_RDWR)
        self.running[request.id] = Running(request.id, pid, leaves, end, left)
        return self.running[request.id]

    @rule()
    def spawn_without_a_log(self) -> None:
        """It fails, and leaves nothing."""
        request = self.request("nothing", folder="blocked/1")
        self.spawner.send(request)
        assert "its log cannot be written" in self.about(request.id, SpawnFailed).reason

    @rule(worker=consumes(workers), code=st.integers(0, 255))
    def end(self, worker: Running, code: int) -> None:
        """A worker ends by itself."""
        worker.exit(code)
        self.ended(worker, code, None)

    @rule(worker=consumes(workers), signum=st.sampled_from([signal.SIGTERM, signal.SIGKILL]))
    def kill(self, worker: Running, signum: int) -> None:
        """A worker is killed. One that has ended before is not there to be killed."""
        self.spawner.send(Kill(worker.number, signum), Kill(self.numbers + 1, signum))
        self.ended(worker, None, signum)

    @rule(worker=consumes(workers), code=st.integers(0, 255))
    def end_and_kill(self, worker: Running, code: int) -> None:
        """The order to kill comes when a worker ends: it has one end, which is told once."""
        worker.exit(code)
        self.spawner.send(Kill(worker.number, signal.SIGKILL))
        end = self.ended(worker)
        assert (end.code, end.signal) in ((code, None), (None, signal.SIGKILL))

    @rule(signum=st.sampled_from([signal.SIGTERM, signal.SIGKILL]))
    def spawn_and_kill(self, signum: int) -> None:
        """Both orders arrive together."""
        request = self.request("nothing")
        self.spawner.send(request, Kill(request.id, signum))
        self.about(request.id, Forked)
        assert self.about(request.id, Reaped).signal == signum

    def ended(self, worker: Running, *expected: int | None) -> Reaped:
        """The report of the end of a worker. By then what it has left is gone, if it has a mark."""
        found = self.about(worker.number, Reaped)
        assert not expected or (found.code, found.signal) == expected
        if worker.leaves == "an orphan without marks":
            assert worker.left is not None
            self.unmarked.append(worker.left)
        else:
            assert worker.left is None or gone(worker.left)
        assert gone(worker.pid)
        del self.running[worker.number]
        worker.close()
        return found

    @invariant()
    def nothing_else_is_there(self) -> None:
        """No other child, also no zombie; no descriptor but one for each worker; and nothing is told twice."""
        adopted = {each.left for each in self.running.values() if each.left and "an orphan" in each.leaves}
        there = {each.pid for each in self.running.values()} | adopted | {*self.unmarked}
        assert eventually(lambda: {*self.spawner.children()} == there), (self.spawner.children(), there)
        files = self.own + len(self.running)
        assert eventually(lambda: len(files_of(self.spawner.process.pid)) == files)
        if select.select([self.spawner.stream.socket], [], [], 0)[0]:
            self.told += [each for each in self.spawner.stream.drain() if not isinstance(each, Notice)]
        assert self.told == []


TestSpawners = pytest.mark.starts_processes(Spawners.TestCase)
TestSpawners.settings = settings(examples(16, shrunk=False), stateful_step_count=15)
