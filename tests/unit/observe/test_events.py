"""The event log keeps every event whole, or loses it, but never a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from unirun.errors import JobError
from unirun.observe import EventLog, read_events


def test_events_come_back_in_order_with_their_time(tmp_path: Path) -> None:
    times = iter([1.5, 2.5])
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: next(times))
    log.write("exit", "actor:0 ended: exit code 1", role="actor")
    log.write("decision", "line one\nline two ä")
    assert list(read_events(tmp_path / "events.jsonl")) == [
        {"time": 1.5, "kind": "exit", "text": "actor:0 ended: exit code 1", "role": "actor"},
        {"time": 2.5, "kind": "decision", "text": "line one\nline two ä"},
    ]
    log.close()


def test_an_event_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("a", "1")
    assert [event["text"] for event in read_events(tmp_path / "events.jsonl")] == ["1"]
    log.close()


def test_a_later_run_adds_to_what_is_there(tmp_path: Path) -> None:
    for text in ("1", "2"):
        log = EventLog(tmp_path / "events.jsonl")
        log.write("a", text)
        log.close()
    assert [event["text"] for event in read_events(tmp_path / "events.jsonl")] == ["1", "2"]


def test_a_line_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"text": "1"}\n{"text": "2", "k{"text": "3"}\n{"text": "4"}\n{"text": "5')
    assert [event["text"] for event in read_events(path)] == ["1", "4"]


def test_a_full_disk_costs_the_event_only() -> None:
    log = EventLog(Path("/dev/full"))
    log.write("a", "lost")
    log.close()


def test_a_place_that_cannot_be_written_or_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the event log .* cannot be written: No such file"):
        EventLog(tmp_path / "nowhere" / "events.jsonl")
    with pytest.raises(JobError, match="no events can be read from"):
        list(read_events(tmp_path / "nowhere"))
