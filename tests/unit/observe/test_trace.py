"""The trace of a job: lives, calls joined by flows, and clocks of nodes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.waiting import eventually
from unirun.observe import trace
from unirun.observe.events import LoggedEvent
from unirun.observe.spans import SPANS, Spans, TraceSpan, read_spans
from unirun.observe.trace import MASTER, MetricRow, Offset, offsets, trace_events
from unirun.values import WorkerId

S = 1_000_000_000
NODES = {"trainer:0": "n0", "actor:0": "n1"}


def event(number: int, at: float, kind: str, text: str, *about: str) -> LoggedEvent:
    return LoggedEvent(f"1-{number}", at, kind, text, "", about)


EVENTS = [
    event(1, 100.0, "start", "the job starts", "actor", "trainer"),
    event(2, 100.0, "order", "n1 starts actor:0 in generation 0", "actor:0", "n1"),
    event(3, 100.0, "order", "n0 starts trainer:0 in generation 0", "trainer:0", "n0"),
    event(4, 101.5, "spawner", "n1: torch is imported after 1.25 s", "n1"),
    event(5, 102.0, "running", "role actor: every rank runs", "actor"),
    event(6, 105.0, "decision", "actor:0 ended; restart 1 of 3", "actor:0"),
    event(7, 110.0, "exit", "actor:0 ended: exit code 0", "actor:0"),
]


def spans(ahead: float = 0.0) -> dict[WorkerId, list[TraceSpan]]:
    """A call from the trainer to the actor, whose clock is `ahead` by so many seconds."""
    ahead_ns = int(ahead * S)
    call = TraceSpan("call", "actor.update", 103 * S, 104 * S, "trainer:0", 7, ("actor:0",))
    run = TraceSpan(
        "run", "update", 103 * S + S // 10 + ahead_ns, 104 * S - S // 10 + ahead_ns, "trainer:0", 7
    )
    return {WorkerId("trainer", 0, 0): [call], WorkerId("actor", 0, 0): [run]}


def rows(ahead: float = 0.0) -> list[dict[str, Any]]:
    version = MetricRow(103.5 + ahead, "actor", 0, {"policy/version": 3.0})
    return list(trace_events(EVENTS, [version], spans(ahead), NODES))


def test_a_call_and_its_run_are_there_once_and_joined_by_a_flow() -> None:
    found = rows()
    (call,) = [each for each in found if each.get("cat") == "call"]
    (run,) = [each for each in found if each.get("cat") == "run"]
    assert (call["name"], call["ts"], call["dur"]) == ("actor.update", 3e6, 1e6)
    assert (run["name"], run["ts"], run["dur"]) == ("update", 3.1e6, 0.8e6)
    begin, end = [each for each in found if each.get("cat") == "flow"]
    assert (begin["ph"], end["ph"], begin["id"]) == ("s", "f", end["id"])
    assert (begin["pid"], end["pid"]) == (call["pid"], run["pid"])


def test_the_import_the_start_of_a_role_a_process_and_a_version_are_there() -> None:
    lengths = {each["name"]: (each["ts"], each["dur"]) for each in rows() if each["ph"] == "X"}
    assert lengths["import torch on n1"] == (0.25e6, 1.25e6)
    assert lengths["start of actor"] == (0.0, 2e6)
    assert lengths["process"] == (0.0, 10e6)
    names = [each["name"] for each in rows() if each["ph"] == "i" and each["pid"] == MASTER]
    assert "decision" in names
    assert [each["args"] for each in rows() if each["ph"] == "C"] == [{"version": 3.0}]


def test_all_of_it_is_json_with_what_the_format_wants() -> None:
    for row in rows():
        assert json.loads(json.dumps(row)) == row
        assert {"ph", "pid", "name"} <= row.keys()
        assert row["ph"] == "M" or row["ts"] >= 0
        assert row["ph"] != "X" or row["dur"] >= 0


def test_each_row_of_a_trace_is_what_its_viewers_take() -> None:
    """The Trace Event Format: M names, X lasts, i is a moment, C a number, s and f the ends of a flow."""
    found = [
        *EVENTS[:2],
        event(3, 101.0, "started", "actor:0 has process 7", "actor:0"),
        event(6, 105.0, "decision", "actor:0 ended; restart 1 of 3", "actor:0"),
        event(7, 110.0, "exit", "actor:0 ended: exit code 0", "actor:0"),
    ]
    all_reduce = TraceSpan("collective", "all_reduce", 103 * S, 104 * S)
    run = TraceSpan("run", "update", 104 * S, 105 * S, "trainer:0", 7, failed=True)
    rank = {WorkerId("actor", 0, 0): [all_reduce, run]}
    version = MetricRow(103.5, "actor", 0, {"policy/version": 3.0, "loss": 1.0})
    rows = [*trace_events(found, [version], rank, {"actor:0": "n1"})]
    master, actor = MASTER, MASTER + 1
    life = {"pid": actor, "tid": trace.LIFE}
    decision = {"text": "actor:0 ended; restart 1 of 3", "cause": "", "id": "1-6"}
    assert [row for row in rows if row["ph"] == "M"] == [
        {"ph": "M", "name": "process_name", "pid": master, "tid": 0, "args": {"name": "master"}},
        {"ph": "M", "name": "process_name", "pid": actor, "tid": 0, "args": {"name": "actor:0"}},
        {
            "ph": "M",
            "name": "process_labels",
            "pid": actor,
            "tid": 0,
            "args": {"labels": "on n1, clock +0 ms ± 5e+03 ms"},
        },
        *(
            {"ph": "M", "name": "thread_name", "pid": actor, "tid": track, "args": {"name": name}}
            for track, name in (
                (trace.LIFE, "life"),
                (trace.CALLS, "calls"),
                (trace.RUNS, "runs"),
                (trace.COLLECTIVES, "collectives"),
            )
        ),
    ]
    decided = {"pid": master, "tid": 1, "ts": 5e6, "cat": "decision", "ph": "i", "s": "p", "name": "decision"}
    assert {**decided, "args": decision} in rows
    assert [row for row in rows if row["pid"] == actor and row["ph"] != "M"] == [
        {
            **life,
            "ts": 1e6,
            "ph": "i",
            "s": "t",
            "name": "started",
            "args": {"text": "actor:0 has process 7"},
        },
        {
            **life,
            "ts": 0.0,
            "dur": 10e6,
            "ph": "X",
            "cat": "life",
            "name": "process",
            "args": {"end": "actor:0 ended: exit code 0"},
        },
        {**life, "ts": 3.5e6, "ph": "i", "s": "t", "cat": "weights", "name": "policy/version 3"},
        {**life, "ts": 3.5e6, "ph": "C", "name": "policy/version", "args": {"version": 3.0}},
        {
            "pid": actor,
            "tid": trace.COLLECTIVES,
            "ts": 3e6,
            "dur": 1e6,
            "ph": "X",
            "cat": "collective",
            "name": "all_reduce",
            "args": {"caller": "", "seq": 0, "workers": [], "failed": False},
        },
        {
            "pid": actor,
            "tid": trace.RUNS,
            "ts": 4e6,
            "dur": 1e6,
            "ph": "X",
            "cat": "run",
            "name": "update",
            "args": {"caller": "trainer:0", "seq": 7, "workers": [], "failed": True},
        },
        {
            "pid": actor,
            "tid": trace.RUNS,
            "ts": 4e6,
            "ph": "f",
            "bp": "e",
            "cat": "flow",
            "name": "update",
            "id": "trainer:0 7 actor:0",
        },
    ]


def test_the_start_of_a_role_lasts_until_it_runs_and_is_told_with_its_cause() -> None:
    started = {"text": "role actor: every rank runs", "cause": "", "id": "1-5"}
    (row,) = [each for each in rows() if each["name"] == "start of actor"]
    assert row == {
        "pid": MASTER,
        "tid": 3,
        "ts": 0.0,
        "dur": 2e6,
        "ph": "X",
        "cat": "running",
        "name": "start of actor",
        "args": started,
    }


class TestClocks:
    def test_where_bounds_contradict_each_other_it_is_between_them(self) -> None:
        """A worker began 3 s before its order, and ended 5 s after its exit was noticed."""
        rank = [TraceSpan("life", "x", 97 * S, 115 * S)]
        assert offsets(EVENTS, {WorkerId("actor", 0, 0): rank}, NODES)["n1"].seconds == 1.0

    def test_a_clock_that_may_be_right_is_left_as_it_is(self) -> None:
        assert offsets(EVENTS, spans(), NODES)["n1"].seconds == 0.0

    @pytest.mark.parametrize("ahead", [60.0, -60.0])
    def test_one_that_is_surely_wrong_is_put_right_within_the_life_of_a_worker(self, ahead: float) -> None:
        found = offsets(EVENTS, spans(ahead), NODES)["n1"]
        assert abs(found.seconds - ahead) <= (found.within or 0.0)
        (run,) = [each for each in rows(ahead) if each.get("cat") == "run"]
        assert 0.0 <= run["ts"] <= 10e6
        assert any("clock" in str(each["args"]) for each in rows(ahead) if each["name"] == "process_labels")

    @given(st.permutations([0.0, 1.0, 3.0]), st.floats(-60.0, 60.0))
    def test_what_is_known_of_it_does_not_depend_on_the_order_of_spans(
        self, begins: list[float], ahead: float
    ) -> None:
        """A span is written when it ends, and those of threads overlap."""

        def found(begins: Sequence[float]) -> Offset:
            rank = [
                TraceSpan("life", "x", int((103 + begin + ahead) * S), int((106 - begin + ahead) * S))
                for begin in begins
            ]
            return offsets(EVENTS, {WorkerId("actor", 0, 0): rank}, NODES)["n1"]

        assert found(begins) == found(sorted(begins))
        assert abs(found(begins).seconds - ahead) <= (found(begins).within or 0.0)

    def test_without_an_end_it_is_not_known_how_wrong_it_is(self) -> None:
        assert offsets(EVENTS[:-1], spans(), NODES)["n1"] == Offset(0.0, None)


RANKS = st.sampled_from(["actor:0", "actor:1"])


@given(st.lists(st.tuples(RANKS, st.sampled_from(["order", "exit", "ready"])), max_size=12))
def test_each_process_of_a_rank_has_one_life_that_ends_with_its_exit(steps: list[tuple[str, str]]) -> None:
    nodes = {"actor:0": "n0", "actor:1": "n1"}
    lives: list[tuple[str, float, float]] = []
    since: dict[str, float] = {}
    found: list[LoggedEvent] = []
    for number, (who, kind) in enumerate(steps):
        text = f"n0 starts {who}" if kind == "order" else kind
        found.append(event(number, float(number), kind, text, who))
        if kind == "order":
            since[who] = float(number)
        elif kind == "exit" and who in since:
            lives.append((who, since.pop(who), float(number)))
    lives += [(who, begin, len(steps) - 1.0) for who, begin in since.items()]
    numbers = {MASTER + 1 + index: who for index, who in enumerate(nodes)}
    shown = [
        (numbers[row["pid"]], row["ts"] / 1e6, (row["ts"] + row["dur"]) / 1e6)
        for row in trace_events(found, [], {}, nodes)
        if row.get("cat") == "life"
    ]
    assert sorted(shown) == sorted(lives)


class TestSpans:
    def test_spans_come_back_and_a_line_that_is_not_whole_is_left_out(self, tmp_path: Path) -> None:
        writer = Spans({"UNIRUN_TRACE": "1", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})
        assert writer.on
        writer.write("call", "actor.update", 5, caller="trainer:0", seq=1, workers=("actor:0",))
        writer.close()
        with (tmp_path / SPANS).open("ab") as file:
            file.write(b'{"kind": "call"')
        (span,) = read_spans(tmp_path / SPANS)
        assert (span.name, span.began, span.workers) == ("actor.update", 5, ("actor:0",))
        os.close(writer._handle)

    def test_spans_are_in_the_file_soon_and_those_of_many_threads_once(self, tmp_path: Path) -> None:
        writer = Spans({"UNIRUN_TRACE": "1", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})

        def write(thread: int) -> None:
            for number in range(1000):
                writer.write("run", "update", 5, seq=1000 * thread + number)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        # Nothing is closed: this is what a worker that is killed has written.
        eventually(lambda: sum(1 for _ in read_spans(tmp_path / SPANS)) == 4000)
        assert sorted(each.seq for each in read_spans(tmp_path / SPANS)) == list(range(4000))
        writer.close()
        os.close(writer._handle)

    def test_a_span_that_cannot_be_made_ends_the_trace_and_is_told(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        writer = Spans({"UNIRUN_TRACE": "1", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})

        def fails() -> TraceSpan:
            raise ValueError("a name that cannot be written")

        writer.keep(fails)
        said = list[str]()

        def was_told() -> bool:
            said.append(capfd.readouterr().err)
            return "not traced any more" in (text := "".join(said)) and "ValueError" in text

        eventually(was_told)
        assert not writer.on
        writer.close()
        os.close(writer._handle)

    def test_its_thread_looks_for_spans_too_and_goes_on_without_a_look_that_fails(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        writer = Spans({"UNIRUN_TRACE": "1", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})
        threads = threading.active_count()

        def fails(last: bool) -> None:
            raise RuntimeError("no recorder")

        def finds(last: bool) -> None:
            writer.write("collective", "last" if last else "all_reduce", 5)

        writer.also(fails)
        writer.also(finds)
        eventually(lambda: len([*read_spans(tmp_path / SPANS)]) >= 2)
        assert threading.active_count() == threads
        writer.close()
        names = [each.name for each in read_spans(tmp_path / SPANS)]
        assert (names[-1], set(names)) == ("last", {"all_reduce", "last"})
        assert capfd.readouterr().err.count("some of this worker is not traced any more") == 1
        os.close(writer._handle)

    def test_without_the_variable_nothing_is_written(self, tmp_path: Path) -> None:
        writer = Spans({"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})
        assert not writer.on
        for _ in range(1000):
            writer.write("call", "actor.update", 5)
        assert list(tmp_path.iterdir()) == []
        assert list(read_spans(tmp_path / SPANS)) == []


LIFE = st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9))


@given(st.lists(LIFE, min_size=1, max_size=4), st.floats(-60.0, 60.0))
def test_bounds_of_a_clock_hold_for_each_worker_of_a_rank(
    lives: list[tuple[int, int, int]], ahead: float
) -> None:
    """Each is ordered, works a while later, and its exit is noticed a while after that."""
    at = 0.0
    events: list[LoggedEvent] = []
    found: dict[WorkerId, list[TraceSpan]] = {}
    for incarnation, (before, work, after) in enumerate(lives):
        events.append(LoggedEvent(f"1.{len(events)}", at, "order", "n1 starts it", about=("actor:0",)))
        began, ended = at + before, at + before + work
        at = ended + after
        events.append(LoggedEvent(f"1.{len(events)}", at, "exit", "it has ended", about=("actor:0",)))
        life = TraceSpan("life", "x", int((100 + began + ahead) * S), int((100 + ended + ahead) * S))
        found[WorkerId("actor", 0, incarnation)] = [life]
    shifted = [replace(event, time=event.time + 100) for event in events]
    offset = offsets(shifted, found, {"actor:0": "n1"})["n1"]
    assert abs(offset.seconds - ahead) <= (offset.within or 0.0) + 1e-6


@given(
    st.lists(st.tuples(st.sampled_from(["start", "restart", "running"]), st.sampled_from("ab")), max_size=8)
)
def test_a_start_of_a_role_ends_when_it_runs_and_only_then(history: list[tuple[str, str]]) -> None:
    events = [event(at, float(at), kind, kind, role) for at, (kind, role) in enumerate(history)]
    begun: dict[str, tuple[int, str]] = {}
    wanted = []
    for at, (kind, role) in enumerate(history):
        if kind != "running":
            begun.setdefault(role, (at, kind))
        elif role in begun:
            first, how = begun.pop(role)
            wanted.append((f"{how} of {role}", first * 1e6, (at - first) * 1e6))
    found = [row for row in trace_events(events, [], {}, {}) if row["ph"] == "X"]
    assert [(row["name"], row["ts"], row["dur"]) for row in found] == wanted
