"""Frames of ``unirun top``: they fit a terminal, and have rates, edges, decisions and one rank in detail."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from unirun.observe.events import LoggedEvent
from unirun.observe.status import CallStatus, JobStatus, RoleStatus, WorkerStatus
from unirun.observe.top import ORDERS, Look, Meters, TopView, _newest, chosen, frame, queued, staleness


def worker(rank: int, **more: object) -> WorkerStatus:
    return WorkerStatus(rank, "running", "n0", 0, 100 + rank, "", **more)  # type: ignore[arg-type]


def look(at: float, *, ranks: int = 3, cpu: float = 1.0, step: int = 10, calls: int = 100) -> Look:
    workers = tuple(worker(n, memory=(n + 1) * 10**9, cpu=cpu, step=step + n) for n in range(ranks))
    weights = {"policy/version": 5.0, "samples/items": 7.0}
    rollout = worker(0, metrics={"policy/version": 3.0}, gpu=(40.0, 2 * 10**9), ready=False, why="it loads")
    roles = (
        RoleStatus("actor", "running", 0, 1, 3, (worker(0, metrics=weights), *workers[1:])),
        RoleStatus("rollout", "starting", 0, 0, 3, (rollout,)),
    )
    call = CallStatus("trainer", "actor", "update", "call", "both", False, 0.0, calls, 0, 0, calls / 100)
    status = JobStatus("job-1", "job", "running", "", 0.0, None, None, roles, epoch=1, calls=(call,))
    events = (
        LoggedEvent("1-1", 1.0, "started", "actor:1 has process 5", about=("actor:1",)),
        LoggedEvent("1-2", 2.0, "decision", "actor:1 ended; restart 1 of 3", about=("actor:1",)),
    )
    return Look(at, status, events, ("the last line",))


PLAIN = TopView()


def texts(now: Look, choice: TopView = PLAIN, meters: Meters | None = None) -> list[str]:
    return [line.text for line in frame(now, meters or Meters(), choice)]


@given(
    st.integers(1, 300),
    st.integers(20, 200),
    st.integers(6, 80),
    st.integers(0, 400),
    st.booleans(),
    st.sampled_from(ORDERS),
)
def test_a_frame_fits_the_terminal(
    ranks: int, width: int, height: int, row: int, detail: bool, order: str
) -> None:
    choice = TopView(order=order, row=row, detail=detail)  # type: ignore[arg-type]
    lines = frame(look(10.0, ranks=ranks), Meters(), choice, width, height)
    assert len(lines) <= height
    assert all(len(line.text) <= width for line in lines)
    if not detail and height > 12:
        assert sum(line.style == "chosen" for line in lines) == 1


def test_a_job_has_its_roles_with_staleness_and_queue_its_edges_and_its_decisions() -> None:
    found = texts(look(10.0))
    assert found[0].startswith("job-1: running, 10 s; master term 1")
    assert "actor running, 3 of 3 up, generation 0, restarts 1 of 3, staleness 0, queue 7" in found
    assert "rollout starting, 0 of 1 up, generation 0, restarts 0 of 3, staleness 2" in found
    assert any(line.startswith("trainer → actor update") and "10.00" in line for line in found)
    assert "     8 s ago  decision: actor:1 ended; restart 1 of 3" in found
    assert len([line for line in found if line.startswith(("actor:", "rollout:"))]) == 4


def test_a_role_without_a_limit_in_practice_may_have_any_number_of_restarts() -> None:
    assert RoleStatus("worker", "running", 0, 2, 3, ()).used == "2 of 3"
    assert RoleStatus("worker", "running", 0, 2, 1_000_000, ()).used == "2 of any number"


@pytest.mark.parametrize(
    ("memory", "shown"), [(999, "999"), (999_499, "999K"), (999_600, "1M"), (999_600_000, "1G")]
)
def test_a_size_has_three_digits_and_the_unit_that_fits(memory: int, shown: str) -> None:
    now = look(10.0)
    (role, *_) = now.status.roles
    role = replace(role, workers=(worker(0, memory=memory),))
    (row,) = (
        text
        for text in texts(replace(now, status=replace(now.status, roles=(role,))))
        if text.startswith("actor:0")
    )
    assert row.split()[4] == shown


def test_rates_are_those_between_the_last_two_changes() -> None:
    meters = Meters()
    for each in (
        look(10.0),
        look(11.0),
        look(15.0, cpu=3.5, step=20, calls=150),
        look(16.0, cpu=3.5, step=20, calls=150),
    ):
        meters.update(each)
    found = texts(look(16.0, cpu=3.5, step=20, calls=150), meters=meters)
    row = next(line for line in found if line.startswith("actor:1 ")).split()
    assert row == ["actor:1", "running", "n0", "0", "50", "2G", "21", "2"]
    assert next(line for line in found if line.startswith("trainer")).split()[-3:] == ["10", "10.00", "10.00"]


def test_ranks_are_sorted_and_filtered() -> None:
    status = look(1.0).status

    def names(choice: TopView) -> list[str]:
        return [f"{role.name}:{each.rank}" for role, each in chosen(status, choice)]

    assert names(TopView(order="memory"))[:2] == ["actor:2", "actor:1"]
    assert names(TopView(filter="rollout")) == ["rollout:0"]


def test_a_rank_in_detail_has_its_events_its_metrics_and_the_end_of_its_log() -> None:
    found = texts(look(1.0), TopView(row=1, detail=True))
    assert "decision: actor:1 ended; restart 1 of 3" in found
    assert "the last line" in found
    assert "it loads" in texts(look(1.0), TopView(filter="rollout", detail=True))
    assert "no rank fits the filter" in texts(look(1.0), TopView(filter="critic", detail=True))


def test_below_any_number_of_ranks_stand_the_keys_and_what_is_not_shown() -> None:
    for ranks in range(1, 40):
        lines = [line.text for line in frame(look(10.0, ranks=ranks), Meters(), PLAIN, 80, 24)]
        assert lines[-1].startswith("q quit")
        rows = [line for line in lines if line.startswith(("actor:", "rollout:"))]
        told = [line for line in lines if line.startswith(f"… {ranks + 1} ranks, 1 to {len(rows)} are shown")]
        assert len(told) == (len(rows) < ranks + 1)


NUMBERS = st.lists(st.none() | st.integers(0, 9), min_size=1, max_size=4)


@given(st.lists(NUMBERS, min_size=1, max_size=3), NUMBERS)
def test_a_role_is_as_far_behind_as_its_slowest_rank_and_holds_what_all_of_its_ranks_hold(
    versions: list[list[int | None]], items: list[int | None]
) -> None:
    def of(name: str, values: Sequence[int | None]) -> RoleStatus:
        workers = tuple(worker(rank, metrics={name: value}) for rank, value in enumerate(values))
        return RoleStatus("role", "running", 0, 0, 0, workers)

    roles = tuple(of("policy/version", each) for each in versions)
    status = replace(look(1.0).status, roles=roles)
    told = [value for each in versions for value in each if value is not None]
    for role, each in zip(roles, versions, strict=True):
        own = [value for value in each if value is not None]
        assert staleness(role, _newest(status)) == (max(told) - min(own) if own else None)
    held = [value for value in items if value is not None]
    assert queued(of("samples/items", items)) == (sum(held) if held else None)


def test_rates_follow_each_change_from_the_first_step_on() -> None:
    meters = Meters()
    for at, step in ((10.0, 0), (12.0, 4), (12.0, 4), (13.0, 5)):
        meters.update(look(at, step=step))
    assert meters.of("step actor:1 0") == (1.0,)
    assert meters.of("cpu actor:1 0") is None, "it has not changed"


def test_lines_have_the_styles_of_what_they_say() -> None:
    now = look(10.0)
    failed = replace(
        now, status=replace(now.status, phase="failed", reason="actor:1 failed", sick=("n0 is sick",))
    )
    styles = {line.text: line.style for line in frame(failed, Meters(), PLAIN)}
    titles = [style for text, style in styles.items() if text.startswith("job-1: ")]
    assert titles == ["bad"]
    assert styles["reason: actor:1 failed"] == "bad"
    assert styles["n0 is sick"] == "slow"
    running = frame(now, Meters(), PLAIN)
    assert running[0].style == "title"
    (calls,) = [line for line in running if line.text.startswith("CALLS ")]
    assert (calls.text.split(), calls.style) == (["CALLS", "CALLS/S", "MEAN", "MS", "NOW", "MS"], "head")
    detail = frame(now, Meters(), TopView(detail=True))
    assert "head" in [line.style for line in detail]


def test_a_rank_without_a_step_shows_none() -> None:
    (row,) = [line for line in texts(look(10.0)) if line.startswith("rollout:0")]
    assert "-1" not in row.split()
