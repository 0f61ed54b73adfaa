"""``unirun logs``: the last lines of a file are found from its end, and a crafted job holds nobody up."""

from __future__ import annotations

import io
import json
import os
import resource
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.cli.in_process import run_cli
from tests.unit.failover.job import Job
from tests.unit.observe.ending_job import ending
from unirun.cli import logs
from unirun.cli.logs import start_of_last
from unirun.dashboard.reading import log_files
from unirun.failover.status_views import status_of
from unirun.observe.jobdir import JobDir
from unirun.observe.status import read_status, write_status
from unirun.rendezvous.creation import create_job
from unirun.values import WorkerId
from unirun.wire.handshake import new_token

TEXTS = st.lists(st.sampled_from([b"\r\n", b"\n", b"\r", b"a", b"bc"]), max_size=40).map(b"".join)


@given(TEXTS, st.integers(0, 10), st.integers(1, 5))
def test_the_last_lines_begin_where_they_do_in_the_whole_text(text: bytes, count: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "BLOCK", block)
        start = start_of_last(io.BytesIO(text), count)
    lines = text.splitlines(keepends=True)
    assert text[start:] == b"".join(lines[max(len(lines) - count, 0) :])


@given(TEXTS, st.none() | st.integers(0, 10), st.integers(1, 5))
def test_lines_are_shown_whatever_is_read_at_once(text: bytes, count: int | None, piece: int) -> None:
    shown: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "PIECE", piece)
        patch.setattr(logs, "_put", shown.append)
        logs._show(io.BytesIO(text), b"[a:0] ", count)
    lines = text.splitlines()
    expected = lines if count is None else lines[max(len(lines) - count, 0) :]
    assert b"".join(shown) == b"".join(b"[a:0] " + line + b"\n" for line in expected)


@pytest.fixture
def job() -> JobDir:
    """A job of two actors that has ended, as far as its files say."""
    found, lock = create_job("run-1", new_token())
    os.close(lock)
    write_status(found, status_of(Job({"actor": 2}).state, {}, {}, epoch=1, trouble=""))
    return found


def edit(job: JobDir, old: str, new: str) -> None:
    text = job.state.read_text()
    assert old in text
    job.state.write_text(text.replace(old, new))


def test_all_incarnations_are_those_that_have_logs(
    job: JobDir, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    for incarnation in (10, 0, 7):
        folder = job.worker_logs(WorkerId("actor", 1, incarnation))
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(f"{incarnation}\n")
    (job.worker_logs(WorkerId("actor", 1, 0)).parent / "9" / "deeper").mkdir(parents=True)
    edit(job, '"incarnation":0', '"incarnation":1000000000000')
    assert run_cli("logs", job.run_id, "--all") == 0
    assert capfdbinary.readouterr().out == b"[actor:1] 0\n[actor:1] 7\n[actor:1] 10\n"


def test_a_log_and_its_copy_are_shown_once(job: JobDir, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Hosts that share the home directory: the command's copy is beside what the nodes have written."""
    node, lock = create_job(job.run_id, new_token(), uid=job.uid, node="n1")
    os.close(lock)
    for directory, ranks in ((job, (0,)), (node, (0, 1))):
        for rank in ranks:
            folder = directory.worker_logs(WorkerId("actor", rank, 0))
            folder.mkdir(parents=True)
            (folder / "stdout.log").write_text(f"{rank}\n")
    assert run_cli("logs", job.run_id) == 0
    assert capfdbinary.readouterr().out == b"[actor:0] 0\n[actor:1] 1\n"
    write_status(job, replace(read_status(job), phase="succeeded", ended=2.0, code=0))
    assert run_cli("logs", "-f", job.run_id) == 0
    assert sorted(capfdbinary.readouterr().out.splitlines()) == [b"[actor:0] 0", b"[actor:1] 1"]
    assert [each.size for each in log_files(job, read_status(job), "actor", 0)] == [2]


def test_a_large_log_takes_no_memory(job: JobDir, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    folder = job.worker_logs(WorkerId("actor", 0, 0))
    folder.mkdir(parents=True)
    with open(folder / "stdout.log", "wb") as file:
        # Sparse, so that the disk holds little of it.
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\nbefore\nlast\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert run_cli("logs", job.run_id, "-n", "1") == 0
    assert capfdbinary.readouterr().out == b"[actor:0] last\n"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.parametrize(
    "name", ["state.json", "summary.json", "events.jsonl", "uid", "store", "lock", "token"]
)
@pytest.mark.parametrize("command", ["ls", "status", "logs", "events", "stop"])
def test_a_fifo_in_the_place_of_a_file_holds_nobody_up(job: JobDir, name: str, command: str) -> None:
    path = job.path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert run_cli(command, *([] if command == "ls" else [job.run_id])) in (0, 1, 2, 3, 4)


@pytest.mark.parametrize("depth", [500, 900, 990, 5000, 200_000])
def test_an_event_that_is_nested_deeply_is_no_traceback(job: JobDir, depth: int) -> None:
    event = {"id": "1", "time": 1.0, "kind": "x", "text": "y", "schema": 1}
    nested = "[" * depth + "]" * depth
    with job.events.open("a") as file:
        file.write(json.dumps(event)[:-1] + f', "details": {{"a": {nested}}}}}\n{nested}\n')
    assert run_cli("events", job.run_id) in (0, 2)


def test_a_command_that_can_start_no_thread_says_so(
    job: JobDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    assert run_cli("logs", job.run_id, "-f") == 1
    assert (
        "no thread can be started: the limit of this user's processes is reached" in capsys.readouterr().err
    )


@pytest.mark.parametrize("moment", range(5))
def test_all_is_shown_of_a_job_that_ends_while_its_logs_are_looked_for(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A rank that has written just before the end is not missed."""
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    job, lock = create_job("run-1", new_token())
    write_status(job, status_of(Job({"actor": 2}).state, {}, {}, epoch=1, trouble=""))
    running = read_status(job)

    def end() -> None:
        folder = job.worker_logs(WorkerId("actor", 1, 0))
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text("last\n")
        write_status(job, replace(running, phase="succeeded", ended=2.0, code=0))
        os.close(lock)

    logs._follow(ending(job, moment, end), None, ["stdout.log"], None)
    assert capfdbinary.readouterr().out == b"[actor:1] last\n"
