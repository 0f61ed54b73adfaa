"""The files of a node's directory are sent as they grow, and written on the command's side."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, takewhile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.waiting import WAIT_TIMEOUT
from unirun import atomic
from unirun.errors import FrameError
from unirun.failover.silence import HEARTBEAT_INTERVAL
from unirun.launcher.hostlist import Host
from unirun.launcher.hosts import copying as mirror
from unirun.launcher.hosts import feed as feeding
from unirun.launcher.hosts.connection import RemoteNode
from unirun.launcher.hosts.copying import Mirror, record_hosts, write
from unirun.launcher.hosts.feed import FILE_POLL_INTERVAL, MAX_CHUNK_BYTES, feed, news
from unirun.observe.jobdir import JobDir
from unirun.wire.blocking import BlockingStream
from unirun.wire.frames import decode
from unirun.wire.messages import Chunk, Current


def sent(job: JobDir, offsets: dict[str, int]) -> list[Chunk]:
    """The chunks that a node whose agent has ended sends after `offsets`."""
    here, there = socket.socketpair()
    for end in (here, there):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    with BlockingStream(here) as node, BlockingStream(there) as command:
        feed(job, node, dict(offsets))
        chunks = []
        while not isinstance(message := command.receive(WAIT_TIMEOUT), Current):
            assert isinstance(message, Chunk)
            chunks.append(message)
    return chunks


def taken(chunks: list[Chunk], folder: Path, offsets: dict[str, int]) -> None:
    """Write what was sent, as `Mirror` does."""
    for chunk in chunks:
        write(folder, "h1", chunk, offsets.get(chunk.path, 0))
        if not chunk.whole:
            offsets[chunk.path] = chunk.offset + len(chunk.data)


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    """The directory of a node."""
    made = JobDir(tmp_path / "node" / "mine")
    made.path.mkdir(parents=True)
    (made.path / "logs" / "actor" / "0" / "0").mkdir(parents=True)
    return made


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The directory that the command keeps."""
    (tmp_path / "copy").mkdir()
    return tmp_path / "copy"


LOG = "logs/actor/0/0/stdout.log"


def test_files_are_copied_and_after_a_reconnect_only_what_is_new(job: JobDir, copy: Path) -> None:
    text = b"x" * (MAX_CHUNK_BYTES + 5)
    (job.path / LOG).write_bytes(text)
    (job.path / "agent.h1.log").write_bytes(b"")
    (job.path / "state.json").write_bytes(b"{}")
    (job.path / "token").write_bytes(b"secret")
    offsets: dict[str, int] = {}
    taken(sent(job, offsets), copy, offsets)
    assert (copy / LOG).read_bytes() == text
    assert (copy / "state.json").read_bytes() == b"{}"
    assert not (copy / "token").exists()
    with (job.path / LOG).open("ab") as file:
        file.write(b"more")
    again = sent(job, offsets)
    assert sum(len(chunk.data) for chunk in again if chunk.path == LOG) == len(b"more")
    taken(again, copy, offsets)
    assert (copy / LOG).read_bytes() == text + b"more"


@pytest.mark.parametrize("text", ["a longer one than the first", "short", ""])
def test_a_log_that_was_replaced_is_copied_as_a_whole(job: JobDir, copy: Path, text: str) -> None:
    """The stacks of a worker, for example; also if the connection was lost meanwhile."""
    stacks = "logs/actor/0/0/stacks.txt"
    messages, offsets = news(job, {}), dict[str, int]()
    with open(job.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for content in ("the first one", text, "while it is connected", text):
            atomic.replace(job.path / stacks, content)
            taken([each for each in takewhile(bool, messages) if isinstance(each, Chunk)], copy, offsets)
            assert (copy / stacks).read_text() == content
    atomic.replace(job.path / stacks, "after a reconnect")
    taken(sent(job, offsets), copy, offsets)
    assert (copy / stacks).read_text() == "after a reconnect"


def test_a_log_that_cannot_be_read_keeps_no_other_from_being_copied(job: JobDir) -> None:
    # A read at its begin fails for every user.
    (job.path / "logs" / "0").symlink_to("/proc/self/mem")
    (job.path / LOG).write_bytes(b"a line")
    assert [(chunk.path, chunk.data) for chunk in sent(job, {})] == [(LOG, b"a line")]


def test_pipes_and_sockets_among_the_logs_are_left_out(job: JobDir) -> None:
    """A pipe would hold up all files, and a socket end the process that sends them."""
    (job.path / LOG).write_bytes(b"a line")
    folder = (job.path / LOG).parent
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket"))
        assert [(chunk.path, chunk.data) for chunk in sent(job, {})] == [(LOG, b"a line")]


def test_a_host_says_again_and_again_that_all_was_sent_while_its_agent_lives(job: JobDir) -> None:
    here, there = socket.socketpair()
    with BlockingStream(here) as node, BlockingStream(there) as command, ThreadPoolExecutor() as pool:
        with open(job.lock, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            feeding = pool.submit(feed, job, node, {})
            assert [command.receive(WAIT_TIMEOUT) for _ in range(3)] == [Current()] * 3
        feeding.result(WAIT_TIMEOUT)
        assert command.receive(WAIT_TIMEOUT) == Current(over=True)


def test_that_all_was_sent_is_said_once_in_each_heartbeat_interval(job: JobDir) -> None:
    now, said = 1000.0, list[float]()
    with open(job.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        messages = news(job, {}, lambda: now)
        while now < 1010.0:
            message = next(messages)
            if isinstance(message, Current):
                said.append(now)
            elif message is None:
                now += FILE_POLL_INTERVAL
    pauses = [later - earlier for earlier, later in pairwise(said)]
    assert all(0.0 <= each - HEARTBEAT_INTERVAL <= FILE_POLL_INTERVAL + 1e-6 for each in pauses)
    assert len(said) >= 9


@pytest.mark.starts_processes
def test_a_host_that_sends_nothing_is_silent_until_it_sends_again(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "SILENCE_TIMEOUT", 0.05)

    async def play() -> None:
        pipe = asyncio.subprocess.PIPE
        # It sends what it is sent.
        process = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe, stderr=pipe)
        remote = RemoteNode(Host("h1", "h1"), process)
        told: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
        notes: list[str] = []
        record_hosts(job, [remote.host])
        copying = asyncio.create_task(
            Mirror(job, {"h1": remote}, notes.append, silent=lambda *news: told.put_nowait(news)).run()
        )
        async with asyncio.timeout(WAIT_TIMEOUT):
            assert await told.get() == ("h1", True)
            remote.stream.send(Current())
            assert await told.get() == ("h1", False)
            assert await told.get() == ("h1", True)
            remote.stream.send(Current(over=True))
            await copying
        assert not notes

    asyncio.run(play())


def test_event_logs_of_masters_on_two_hosts_follow_each_other(job: JobDir, copy: Path) -> None:
    (job.path / "events.jsonl").write_bytes(b"first\n")
    taken(sent(job, {}), copy, {})
    (job.path / "events.jsonl").write_bytes(b"second\n")
    taken(sent(job, {}), copy, {})
    assert (copy / "events.jsonl").read_bytes() == b"first\nsecond\n"


def test_a_gap_in_a_file_is_refused(copy: Path) -> None:
    with pytest.raises(FrameError, match="from 3 on, not 0"):
        write(copy, "h1", Chunk("events.jsonl", 3, b""), 0)


def test_data_that_is_not_base64_is_refused() -> None:
    with pytest.raises(FrameError, match="no Chunk"):
        decode({"type": "Chunk", "path": LOG, "offset": 0, "data": "*"})


NAMES = st.sampled_from(
    ["..", ".", "", "token", "tls", "logs", "state.json", "agent.h1.log", "/", "x", "~", "\0"]
)


@given(parts=st.lists(NAMES, max_size=4), whole=st.booleans())
@example(parts=["logs", "\0"], whole=False)
def test_a_node_writes_logs_and_known_files_only(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], whole: bool
) -> None:
    folder = tmp_path_factory.mktemp("copy")
    inside = folder / "job"
    (inside / "logs").mkdir(parents=True)
    try:
        write(inside, "h1", Chunk("/".join(parts), 0, b"x", whole=whole), 0)
    except FrameError:
        assert not [path for path in folder.rglob("*") if path.is_file()]
        return
    for path in (path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(inside)
        assert name.parts[0] == "logs" or str(name) in ("state.json", "agent.h1.log")


def test_copied_logs_follow_no_link_and_are_private(copy: Path, tmp_path: Path) -> None:
    """Logs may lie below --log-dir, where other users may write."""
    before = os.umask(0)
    try:
        write(copy, "h1", Chunk(LOG, 0, b"said"), 0)
    finally:
        os.umask(before)
    made = [copy / LOG, *(each for each in (copy / LOG).parents if copy in each.parents)]
    assert {stat.S_IMODE(each.stat().st_mode) & 0o077 for each in made} == {0}
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (copy / LOG).unlink()
    (copy / LOG).symlink_to(victim)
    with pytest.raises(OSError, match=r"symbolic links"):
        write(copy, "h1", Chunk(LOG, 0, b"said"), 0)
    (copy / LOG).unlink()
    (copy / LOG).parent.rmdir()
    (copy / LOG).parent.symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        write(copy, "h1", Chunk(LOG, 0, b"said"), 0)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "stdout.log").exists()


def test_no_log_is_replaced_as_a_whole(copy: Path) -> None:
    with pytest.raises(FrameError, match="sends a file called"):
        write(copy, "h1", Chunk(LOG, 0, b"", whole=True), 0)


def test_a_message_is_sent_whole_when_the_pipe_to_ssh_takes_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = b""

    def write(handle: int, data: bytes) -> int:
        nonlocal sent
        assert handle == 1
        sent += data[:3]
        return len(data[:3])

    monkeypatch.setattr(feeding, "os", SimpleNamespace(write=write))
    feeding._Stdio(0, 1).sendall(b"all of a message")
    assert sent == b"all of a message"
