"""The event log keeps every event whole, or loses it, but never a job; and it tells what led to what."""

from __future__ import annotations

import contextlib
import json
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import JobError
from unirun.observe.events import EventLog, EventReader, LoggedEvent, covers, read_events, story


def test_events_come_back_in_order_with_their_time_cause_and_details(tmp_path: Path) -> None:
    times = iter([1.5, 2.5])
    log = EventLog(tmp_path / "events.jsonl", 3, clock=lambda: next(times))
    log.write("exit", "actor:0 ended: exit code 1", id="3-1", about=("actor:0",), code=1)
    log.write("decision", "line one\nline two ä", id="3-2", cause="3-1")
    assert list(read_events(tmp_path / "events.jsonl")) == [
        LoggedEvent("3-1", 1.5, "exit", "actor:0 ended: exit code 1", "", ("actor:0",), {"code": 1}),
        LoggedEvent("3-2", 2.5, "decision", "line one\nline two ä", "3-1"),
    ]
    log.close()


def test_a_line_of_the_log_has_the_documented_fields(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", 1, clock=lambda: 1.25)
    log.write("order", "n0 starts actor:0", cause="1-1", about=("actor:0", "n0"))
    log.close()
    assert json.loads((tmp_path / "events.jsonl").read_text()) == {
        "schema": 1,
        "id": "1.1",
        "time": 1.25,
        "kind": "order",
        "text": "n0 starts actor:0",
        "cause": "1-1",
        "about": ["actor:0", "n0"],
        "details": {},
    }


def test_an_event_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("a", "1")
    assert [event.text for event in read_events(tmp_path / "events.jsonl")] == ["1"]
    log.close()


def test_a_later_run_adds_to_what_is_there(tmp_path: Path) -> None:
    for epoch, text in enumerate(("1", "2")):
        log = EventLog(tmp_path / "events.jsonl", epoch)
        log.write("a", text)
        log.close()
    assert [(e.id, e.text) for e in read_events(tmp_path / "events.jsonl")] == [("0.1", "1"), ("1.1", "2")]


def test_a_line_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = '{"id": "%s", "time": 1.0, "kind": "a", "text": "x"}'
    path.write_text(f"{line % 1}\n{line[:30]}{line % 3}\n{line % 4}\n{line[:20]}")
    assert [event.id for event in read_events(path)] == ["1", "4"]


@pytest.mark.parametrize(
    "line",
    [
        '{"time": 1.0, "kind": "a", "text": "of another unirun"}',
        '{"id": "1-1", "time": 1.0, "kind": "a", "text": "of another unirun", "schema": 2}',
    ],
)
def test_a_line_of_another_version_is_an_error_that_shows_it(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(JobError, match="of another unirun.*use the version of unirun that has run the job"):
        list(read_events(path))


def test_a_full_disk_costs_the_event_only() -> None:
    log = EventLog(Path("/dev/full"))
    log.write("a", "lost")
    log.close()


def test_a_place_that_cannot_be_written_or_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the event log .* cannot be written: No such file"):
        EventLog(tmp_path / "nowhere" / "events.jsonl")
    with pytest.raises(JobError, match="no events can be read from"):
        list(read_events(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("subject", "who", "covered"),
    [
        ("actor:2", "actor:2", True),
        ("actor:2", "actor:22", False),
        ("actor:0-3", "actor:2", True),
        ("actor:0-3", "actor:4", False),
        ("actor:0,2-3,7", "actor:3", True),
        ("actor:0,2-3,7", "actor:1", False),
        ("actor:0,2-3,7", "actor:x", False),
        ("actor", "actor:2", True),
        ("actor:2", "actor", True),
        ("actors", "actor", False),
        ("n0", "n0", True),
        ("n0", "actor:0", False),
    ],
)
def test_what_concerns_a_role_or_several_ranks_concerns_each(subject: str, who: str, covered: bool) -> None:
    assert covers(subject, who) == covered


def event(number: int, cause: int | None, *about: str) -> LoggedEvent:
    return LoggedEvent(str(number), float(number), "a", "x", "" if cause is None else str(cause), about)


def test_a_story_has_the_causes_of_what_concerns_the_worker_and_nothing_else() -> None:
    events = [
        event(0, None, "n1"),
        event(1, 0, "actor"),
        event(2, 0, "rollout"),
        event(3, 1, "actor:2"),
        event(4, None, "actor:1"),
        event(5, 9, "actor:2"),
    ]
    assert [each.id for each in story(events, "actor:2")] == ["0", "1", "3", "5"]
    assert [each.id for each in story(events, "rollout:0")] == ["0", "2"]
    assert story(events, "critic") == []


@given(st.lists(st.none() | st.integers(0, 9), max_size=10))
def test_a_story_ends_even_when_causes_form_a_circle(causes: list[int | None]) -> None:
    events = [event(n, cause, "actor") for n, cause in enumerate(causes)]
    assert story(events, "actor:0") == events


@pytest.mark.parametrize("number", ["9" * 5000, "\u00b2"])
def test_a_rank_that_is_no_number_is_none_of_a_role(number: str) -> None:
    assert not covers("actor:0-3", f"actor:{number}")
    assert not covers(f"actor:{number}", "actor:0")
    assert not covers(f"actor:0-{number}", "actor:0")
    assert not covers(f"actor:{number}-3", "actor:0")
    assert covers(f"actor:{number},0", "actor:0")


@given(st.lists(st.text(max_size=5), max_size=6), st.data())
def test_a_log_that_is_read_while_it_is_written_gives_each_event_once(
    texts: list[str], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "events.jsonl")
        reader, found = EventReader(path), []
        assert reader.read() == []
        with contextlib.closing(EventLog(path, clock=lambda: 1.0)) as log:
            events = [log.write("end", text) for text in texts]
        whole = path.read_bytes()
        path.write_bytes(b"")
        cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
        for begin, end in pairwise((0, *cuts, len(whole))):
            with path.open("ab") as file:
                file.write(whole[begin:end])
            found += reader.read()
    assert found == events
