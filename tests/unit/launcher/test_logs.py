"""All data in the files reaches the sinks, in order and once."""

from __future__ import annotations

import os
import queue
import re
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import WAIT_TIMEOUT
from unirun.launcher import logs
from unirun.launcher.logs import MAX_LINE, LogFollower, _File


@pytest.fixture
def follower() -> Iterator[LogFollower]:
    made = LogFollower()
    yield made
    if made._thread.is_alive():
        made.finish(WAIT_TIMEOUT)


class Seen:
    """A sink that tests can wait for."""

    def __init__(self) -> None:
        self.parts: queue.Queue[bytes] = queue.Queue()
        self.data = b""

    def __call__(self, data: bytes) -> None:
        self.parts.put(data)

    def until(self, enough: Callable[[bytes], bool]) -> bytes:
        while not enough(self.data):
            self.data += self.parts.get(timeout=WAIT_TIMEOUT)
        return self.data

    def all(self) -> bytes:
        while not self.parts.empty():
            self.data += self.parts.get()
        return self.data


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "stdout.log"
    path.touch()
    return path


def test_a_log_follower_passes_on_existing_and_new_data(follower: LogFollower, log: Path) -> None:
    log.write_bytes(b"one\n")
    seen = Seen()
    follower.follow(log, seen)
    assert seen.until(lambda data: data == b"one\n")
    with log.open("ab", buffering=0) as file:
        file.write(b"two\nthree\n")
        assert seen.until(lambda data: data == b"one\ntwo\nthree\n")


def test_a_log_follower_keeps_an_incomplete_line(follower: LogFollower, log: Path) -> None:
    seen, marker = Seen(), Seen()
    other = log.with_name("other.log")
    other.touch()
    follower.follow(log, seen)
    follower.follow(other, marker)
    with log.open("ab", buffering=0) as file:
        file.write(b"whole\nhal")
        assert seen.until(lambda data: data == b"whole\n")
        other.write_bytes(b"now\n")
        marker.until(bool)
        assert seen.all() == b"whole\n"
        file.write(b"f\n")
        assert seen.until(lambda data: data == b"whole\nhalf\n")


def test_a_log_follower_ends_an_incomplete_last_line(follower: LogFollower, log: Path) -> None:
    log.write_bytes(b"whole\ncut o")
    seen = Seen()
    follower.follow(log, seen)
    assert follower.finish(WAIT_TIMEOUT)
    assert seen.all() == b"whole\ncut o\n"


def test_a_log_follower_passes_on_a_very_long_line_in_parts(follower: LogFollower, log: Path) -> None:
    line = b"x" * (10 << 20) + b"\n"
    log.write_bytes(b"before\n" + line + b"after\n")
    seen = Seen()
    follower.follow(log, seen)
    data = seen.until(lambda data: data.endswith(b"after\n"))
    assert data == b"before\n" + line + b"after\n"


def test_a_log_follower_passes_on_a_long_incomplete_line(follower: LogFollower, log: Path) -> None:
    log.write_bytes(b"x" * (MAX_LINE + 1))
    seen = Seen()
    follower.follow(log, seen)
    assert seen.until(lambda data: len(data) == MAX_LINE + 1)
    assert follower.finish(WAIT_TIMEOUT)
    assert len(seen.all()) == MAX_LINE + 1


def test_a_log_follower_passes_on_undecodable_bytes(follower: LogFollower, log: Path) -> None:
    raw = bytes(b for b in range(256) if b != 10) + b"\n"
    log.write_bytes(raw)
    seen = Seen()
    follower.follow(log, seen)
    assert seen.until(lambda data: data.endswith(b"\n")) == raw


def test_a_log_follower_of_many_written_files_loses_nothing(follower: LogFollower, tmp_path: Path) -> None:
    count, lines = 12, 3000
    sinks = []
    for number in range(count):
        path = tmp_path / f"{number}.log"
        path.touch()
        sinks.append(Seen())
        follower.follow(path, sinks[-1])

    def write(number: int) -> None:
        with (tmp_path / f"{number}.log").open("ab", buffering=0) as file:
            for line in range(lines):
                file.write(f"{number} {line}\n".encode())

    writers = [threading.Thread(target=write, args=(number,)) for number in range(count)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert follower.finish(WAIT_TIMEOUT)
    for number, seen in enumerate(sinks):
        assert seen.all() == b"".join(f"{number} {line}\n".encode() for line in range(lines))


def test_an_overflow_of_the_inotify_queue_loses_no_line(follower: LogFollower, tmp_path: Path) -> None:
    """While one sink blocks, two files that change in turn fill the kernel's queue; events of a fourth are dropped."""
    files = [tmp_path / f"{name}.log" for name in "abcd"]
    blocked, release, last = threading.Event(), threading.Event(), Seen()

    def block(_: bytes) -> None:
        blocked.set()
        release.wait(WAIT_TIMEOUT)

    sinks: list[Callable[[bytes], None]] = [block, Seen(), Seen(), last]
    for path, sink in zip(files, sinks, strict=True):
        path.touch()
        follower.follow(path, sink)
    files[3].write_bytes(b"followed\n")
    last.until(bool)
    files[0].write_bytes(b"now\n")
    assert blocked.wait(WAIT_TIMEOUT)
    room = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    with files[1].open("ab", buffering=0) as one, files[2].open("ab", buffering=0) as two:
        for _ in range(room // 2 + 10):
            one.write(b".")
            two.write(b".")
    with files[3].open("ab") as file:
        file.write(b"not lost\n")
    release.set()
    assert last.until(lambda data: data == b"followed\nnot lost\n")


def test_a_log_file_without_an_inotify_watch_is_polled(
    follower: LogFollower, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoWatches:
        @staticmethod
        def inotify_add_watch(*_: object) -> int:
            return -1

    monkeypatch.setattr(logs, "_libc", NoWatches)
    log.write_bytes(b"one\n")
    seen = Seen()
    follower.follow(log, seen)
    assert seen.until(lambda data: data == b"one\n")
    with log.open("ab") as file:
        file.write(b"two\n")
    assert follower.finish(WAIT_TIMEOUT)
    assert seen.all() == b"one\ntwo\n"


def test_a_log_follower_waits_for_a_blocked_sink_until_its_timeout(log: Path) -> None:
    follower = LogFollower()
    release = threading.Event()

    def block(_: bytes) -> None:
        release.wait(WAIT_TIMEOUT)

    log.write_bytes(b"one\n")
    follower.follow(log, block)
    assert follower.finish(0.05) is False
    release.set()
    assert follower.finish(WAIT_TIMEOUT) is True


def test_a_log_follower_leaks_no_descriptor(log: Path) -> None:
    def open_ones() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    before = open_ones()
    for _ in range(5):
        follower = LogFollower()
        follower.follow(log, lambda _: None)
        assert follower.finish(WAIT_TIMEOUT)
    assert open_ones() == before


def test_a_log_follower_may_have_more_files_than_descriptors(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    follower, seen = LogFollower(), Seen()
    paths = [tmp_path / f"{number}.log" for number in range(100)]
    for path in paths:
        path.write_bytes(b"one\n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, hard))
    try:
        for path in paths:
            follower.follow(path, seen)
        seen.until(lambda data: len(data) == 400)
        for path in paths:
            with path.open("ab") as file:
                file.write(b"two\n")
        assert follower.finish(WAIT_TIMEOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sorted(seen.all().splitlines()) == [b"one"] * 100 + [b"two"] * 100


def test_a_log_follower_passes_on_a_prompt_to_a_sink_that_takes_parts(
    follower: LogFollower, log: Path
) -> None:
    seen = Seen()
    follower.follow(log, seen, parts=True)
    with log.open("ab", buffering=0) as file:
        file.write(b"name? ")
        seen.until(lambda data: data == b"name? ")
        file.write(b"cut o")
        assert follower.finish(WAIT_TIMEOUT)
    assert seen.all() == b"name? cut o"


def test_a_log_follower_reports_a_deleted_file_at_the_end(follower: LogFollower, log: Path) -> None:
    log.write_bytes(b"one\n")
    seen = Seen()
    follower.follow(log, seen)
    seen.until(bool)
    log.rename(log.with_name("old.log"))
    log.write_bytes(b"of somebody else\n")
    assert follower.finish(WAIT_TIMEOUT)
    assert seen.all() == f"one\nunirun: {log} cannot be read: another file has taken its place\n".encode()


@given(st.lists(st.text("ab\r\n", min_size=1, max_size=4), max_size=8))
def test_however_a_file_grows_its_lines_come_whole_and_at_once(parts: list[str]) -> None:
    """A carriage return may be the first half of a line end, so one at the end waits for what follows."""
    with tempfile.TemporaryDirectory() as folder:
        path, told = Path(folder, "stdout.log"), list[bytes]()
        path.touch()
        file = _File(path, told.append, parts=False, start=0)
        written = b""
        for part in parts:
            written += part.encode()
            path.write_bytes(written)
            file.read()
            ends = [found.end() for found in re.finditer(rb"\r\n|\n|\r(?!$)", written)]
            assert b"".join(told) == written[: max(ends, default=0)]
        file.close()
        assert b"".join(told).removesuffix(b"\n") == written.removesuffix(b"\n")
