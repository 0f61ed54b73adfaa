"""The tables of phases: no other change passes a draft, every row happens, and the documentation has them."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import Job
from tests.unit.failover.phase_rows import EVERY_ROW, HISTORIES, Row, name_of, recorded, row
from unirun.errors import IllegalTransition
from unirun.failover.draft import JobDraft
from unirun.failover.phases import JOB_CHANGES, ROLE_CHANGES, WORKER_CHANGES, PhaseEvent
from unirun.failover.state import JobPhase, JobState, Ranks, RolePhase, RoleState, WorkerPhase, WorkerState
from unirun.wire.messages import RoleChanged

ROOT = Path(__file__).parents[3]

EVENTS = (None, *PhaseEvent)


@pytest.mark.parametrize(("used", "history"), HISTORIES.items(), ids=map(name_of, HISTORIES))
def test_a_row_that_few_histories_use_is_used_by_one(used: Row, history: Callable[[], object]) -> None:
    with recorded() as rows:
        history()
    assert used in EVERY_ROW
    assert rows[used]


def test_no_row_stands_twice() -> None:
    rows = [
        row(before, event, then)
        for phases, event, then, _ in (*JOB_CHANGES, *ROLE_CHANGES, *WORKER_CHANGES)
        for before in phases
    ]
    assert len(rows) == len(EVERY_ROW)
    assert {event for _, event, _, _ in (*JOB_CHANGES, *ROLE_CHANGES, *WORKER_CHANGES)} == {*PhaseEvent}


def test_the_functions_of_the_table_are_those_that_put_with_its_events() -> None:
    told: dict[str, set[str]] = {}
    for _, event, _, function in (*JOB_CHANGES, *ROLE_CHANGES, *WORKER_CHANGES):
        told.setdefault(event.name, set()).update(function.split(", "))
    found: dict[str, set[str]] = {}
    for path in (ROOT / "unirun/failover").glob("*.py"):
        functions = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
        for each in functions:
            for node in ast.walk(each):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "PhaseEvent":
                    found.setdefault(node.attr, set()).add(f"{path.stem}.{each.name}")
    assert found == told


def test_the_tables_are_in_the_documentation() -> None:
    page = runpy.run_path(str(ROOT / "docs/phases.py"))["page"]()
    assert (ROOT / "docs/phases.md").read_text() == page, "make docs writes it"


class TestPut:
    """Every change of a phase is a row, or raises."""

    def check(self, job: JobState, change: Row, *new: JobState | RoleState | WorkerState) -> None:
        """Put `new` things, of which each is the same change, alone or as a part of the whole."""
        for each in new:
            draft = JobDraft(job, 1.0)
            put = partial(draft.put_worker, "actor") if isinstance(each, WorkerState) else draft.put
            if change in EVERY_ROW or change[1] is change[3]:
                put(each, change[2])  # type: ignore[arg-type]
                assert draft.state is not job
            else:
                with pytest.raises(
                    IllegalTransition, match=f"is {change[1]}, and must not become {change[3]}"
                ):
                    put(each, change[2])  # type: ignore[arg-type]
                assert draft.state is job

    @pytest.mark.parametrize("before", JobPhase)
    def test_of_a_job(self, before: JobPhase) -> None:
        job = replace(Job({"actor": 2}).state, phase=before)
        for event in EVENTS:
            for then in JobPhase:
                self.check(job, row(before, event, then), replace(job, phase=then))

    @pytest.mark.parametrize("before", RolePhase)
    def test_of_a_role(self, before: RolePhase) -> None:
        job = Job({"actor": 2, "critic": 1}).state
        job = job.with_role(replace(job.roles["actor"], phase=before))
        for event in EVENTS:
            for then in RolePhase:
                after = replace(job.roles["actor"], phase=then)
                self.check(job, row(before, event, then), after, job.with_role(after))

    @pytest.mark.parametrize("before", WorkerPhase)
    def test_of_a_worker(self, before: WorkerPhase) -> None:
        job = Job({"actor": 3}).state
        role = job.roles["actor"]
        role = role.with_worker(replace(role.workers[1], phase=before))
        job = job.with_role(role)
        for event in EVENTS:
            for then in WorkerPhase:
                after = replace(role.workers[1], phase=then)
                whole = role.with_worker(after)
                self.check(job, row(before, event, then), after, whole, job.with_role(whole))

    def test_of_a_worker_that_its_role_did_not_have(self) -> None:
        role = Job({"actor": 2}).state.roles["actor"]
        for phase in WorkerPhase:
            more = replace(role.workers[0], rank=2, phase=phase)
            grown = replace(role, workers=Ranks((*role.workers, more)))
            draft = JobDraft(Job({"actor": 2}).state, 1.0)
            if phase is WorkerPhase.WAITING:
                draft.put(grown)
            else:
                with pytest.raises(
                    IllegalTransition, match=f"^actor:2 is waiting, and must not become {phase}"
                ):
                    draft.put(grown)

    def test_tells_who_and_why(self) -> None:
        draft = JobDraft(Job({"actor": 2}).state, 1.0)
        running = replace(draft.role("actor"), phase=RolePhase.RUNNING)
        why = "actor is waiting, and must not become running: every rank is up"
        with pytest.raises(IllegalTransition, match=f"^{why}$"):
            draft.put(running, PhaseEvent.ALL_UP)
        with pytest.raises(IllegalTransition, match="^the job is launching, .* stopped: for no reason$"):
            draft.put(replace(draft.state, phase=JobPhase.STOPPED))
        serves = replace(draft.role("actor").workers[1], phase=WorkerPhase.SERVING)
        with pytest.raises(IllegalTransition, match="^actor:1 is waiting, and must not become serving: "):
            draft.put_worker("actor", serves, PhaseEvent.RUNS)


def test_the_state_of_a_draft_changes_by_put_alone() -> None:
    draft = JobDraft(Job({"actor": 2}).state, 1.0)
    with pytest.raises(AttributeError):
        draft.state = draft.state  # type: ignore[misc]


def test_watchers_are_told_once_of_a_role_that_has_changed_twice() -> None:
    job = Job({"actor": 1}).launched()
    job.all_run("actor")
    assert job.told(RoleChanged) == [RoleChanged("actor", "running", 0, 1, 1)]
