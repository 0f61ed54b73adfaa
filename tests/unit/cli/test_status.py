"""The keys of ``unirun top``, and the words of ``unirun status``."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import sys
import termios
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cli.in_process import run_cli
from unirun.cli import status
from unirun.cli.status import Followed, _keys, pressed
from unirun.errors import JobError
from unirun.observe.events import EventLog
from unirun.observe.status import JobStatus, write_status
from unirun.observe.top import ORDERS, Look, TopView
from unirun.rendezvous.creation import create_job
from unirun.wire.handshake import new_token

KEYS = {
    b"s": "order",
    b"/": "filter",
    b"\x1b[A": "up",
    b"k": "up",
    b"\x1b[B": "down",
    b"j": "down",
    b"\r": "detail",
    b"\n": "detail",
    b"\t": "job",
    b"x": "",
}


@given(st.lists(st.tuples(st.sampled_from([*KEYS]), st.integers(0, 4)), max_size=30), st.integers(1, 3))
def test_each_key_changes_what_it_stands_for_and_another_job_is_shown_from_its_first_rank(
    keys: list[tuple[bytes, int]], count: int
) -> None:
    jobs = tuple(f"job-{number}" for number in range(count))
    view = TopView(jobs=jobs)
    order, row, detail, job, text = 0, 0, False, 0, ""
    for number, (key, rows) in enumerate(keys):
        # Ranks come and go between two keys.
        view = pressed(view, key, lambda number=number: str(number), rows)
        match KEYS[key]:
            case "order":
                order = (order + 1) % len(ORDERS)
            case "filter":
                text, row = str(number), 0
            case "up":
                row = max(min(row, max(rows - 1, 0)) - 1, 0)
            case "down":
                row = min(row + 1, max(rows - 1, 0))
            case "detail":
                detail = not detail
            case "job":
                job, row, detail = (job + 1) % count, 0, False
        assert view == TopView(ORDERS[order], text, row, detail, job, jobs)


@pytest.mark.parametrize(
    "raised", [None, KeyboardInterrupt(), JobError("the job is gone")], ids=["q", "ctrl-c", "gone"]
)
def test_the_terminal_is_as_it_was_however_top_ends(
    raised: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        before = termios.tcgetattr(slave)
        with contextlib.suppress(JobError), _keys() as keys:
            assert termios.tcgetattr(keys) != before
            if raised is not None:
                raise raised
        assert termios.tcgetattr(slave) == before
    os.close(master)


def test_keys_that_are_pressed_at_once_all_count_and_put_off_no_frame(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    views: list[TopView] = []
    waits: list[float] = []

    class Watched(Followed):
        def look(self, choice: TopView) -> Look:
            views.append(choice)
            return super().look(choice)

    def ready(keys: list[int], *rest: Any) -> Any:
        waits.append(rest[-1])
        return keys, [], []

    reading, writing = os.pipe()
    os.write(writing, b"s/abc\r\x1b[Bs\rq")
    os.close(writing)
    monkeypatch.setattr(status, "_keys", lambda: contextlib.nullcontext(reading))
    monkeypatch.setattr(select, "select", ready)
    job, lock = create_job("job-1", new_token())
    os.close(lock)
    write_status(job, JobStatus("job-1", "job", "failed", "", 1.0, 2.0, 1, ()))
    status._show_live([Watched(job)], TopView(jobs=("job-1",)), 1.0)
    os.close(reading)
    assert views[-1] == TopView(ORDERS[2], "abc", detail=True, jobs=("job-1",))
    assert set(waits) == {0, 1.0}


@pytest.mark.parametrize(("columns", "ends"), [("", "the end\n"), ("60", "…\n")])
def test_a_program_that_reads_a_frame_gets_whole_lines_unless_it_says_how_long(
    columns: str, ends: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    job, lock = create_job("job-1", new_token())
    os.close(lock)
    write_status(job, JobStatus("job-1", "job", "failed", f"{'x' * 200} the end", 1.0, 2.0, 1, ()))
    assert run_cli("top", "job-1", "--once") == 0
    (reason,) = (each for each in capsys.readouterr().out.splitlines(True) if each.startswith("reason: "))
    assert reason.endswith(ends)


def test_a_terminal_that_cannot_be_drawn_on_gets_one_frame(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, lock = create_job("job-1", new_token())
    os.close(lock)
    write_status(job, JobStatus("job-1", "job", "failed", "", 1.0, 2.0, 1, ()))
    master, slave = pty.openpty()

    def waits(*_: Any) -> None:
        raise AssertionError("it waits for a key")

    monkeypatch.setattr(select, "select", waits)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with os.fdopen(slave) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        assert run_cli("top", "job-1") == 0
    os.close(master)
    assert capsys.readouterr().out.startswith("job-1: failed, exit code 1")


def test_a_job_that_has_taken_the_id_is_shown_without_the_events_of_the_one_before() -> None:
    shown = []
    followed = None
    for words in (("of the first", "and another"), ("of the second",)):
        job, lock = create_job("job-1", new_token())
        os.close(lock)
        write_status(job, JobStatus("job-1", "job", "failed", "", 1.0, 2.0, 1, ()))
        with contextlib.closing(EventLog(job.events)) as log:
            for text in words:
                log.write("end", text)
        followed = followed or Followed(job)
        shown.append([event.text for event in followed.look(TopView()).events])
    assert shown == [["of the first", "and another"], ["of the second"]]


def test_the_latest_events_are_kept_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "EVENTS_KEPT", 3)
    job, lock = create_job("job-1", new_token())
    os.close(lock)
    write_status(job, JobStatus("job-1", "job", "failed", "", 1.0, 2.0, 1, ()))
    followed, shown = Followed(job), []
    with contextlib.closing(EventLog(job.events)) as log:
        for number in range(8):
            log.write("end", str(number))
            if number % 2:
                shown.append("".join(event.text for event in followed.look(TopView()).events))
    assert shown == ["01", "123", "345", "567"]


def test_a_node_that_was_drained_is_not_said_to_be_lost(capsys: pytest.CaptureFixture[str]) -> None:
    job, lock = create_job("job-1", new_token())
    os.close(lock)
    ended = JobStatus("job-1", "job", "failed", "", 1.0, 2.0, 1, (), lost=("n1",), left=("n2", "n3"))
    write_status(job, ended)
    assert run_cli("status", "job-1") == 0
    assert "\nnodes: n1 lost; n2, n3 drained\n" in capsys.readouterr().out
