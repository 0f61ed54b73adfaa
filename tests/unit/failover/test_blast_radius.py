"""The reports of workers about their calls: kept through restarts and masters, shown as edges, and told of when one fails."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.effort import examples
from tests.unit.failover.job import KILL, Job
from unirun.collocation import parse_fake
from unirun.collocation.graph import Edge
from unirun.errors import IllegalTransition
from unirun.failover.context import decode, encode, urgent
from unirun.failover.state import JobState
from unirun.failover.status_views import status_of
from unirun.failover.takeover import resume
from unirun.observe.status import JobStatus
from unirun.values import WorkerId
from unirun.wire.reports import CallCount, Calls, FromWorker, HeldWorker, Join, Serving, WorkerRunning

TRAIN = CallCount("actor", "train", 20, 4000, 400, 0.2, ((0, 1),))


def calls(*counts: CallCount, incarnation: int = 0) -> FromWorker:
    return FromWorker(WorkerId("trainer", 0, incarnation), Calls(counts))


def job() -> Job:
    """Two actors and a trainer, all up."""
    found = Job(
        {"actor": 2, "trainer": 1, "logger": 1},
        kinds={"actor": "workload", "trainer": "trainer"},
        restarts={"actor": 3, "trainer": 3, "logger": 3},
        primary=("trainer",),
    ).running()
    for role, rank in (("actor", 0), ("actor", 1), ("trainer", 0)):
        found.on(FromWorker(WorkerId(role, rank, 0), Serving({"socket": f"{role}{rank}"}, True)))
    return found


def seen(state: JobState) -> list[tuple[str, str, str, int, float]]:
    status = status_of(state, {}, {})
    assert JobStatus.from_json(status.to_json()) == status
    return [(each.source, each.target, each.method, each.calls, each.weight) for each in status.calls]


class TestCalls:
    def test_calls_are_edges_of_the_job_as_it_stands(self) -> None:
        assert seen(job().state) == []
        assert seen(job().on(calls(TRAIN)).state) == [("trainer", "actor", "train", 20, 440.0)]

    def test_calls_that_come_later_hold_those_that_came_before(self) -> None:
        twice = replace(TRAIN, calls=40, bytes=8000, returned=800)
        assert seen(job().on(calls(TRAIN), calls(twice)).state) == [("trainer", "actor", "train", 40, 440.0)]

    def test_calls_of_a_worker_that_was_started_again_are_added_to_those_before(self) -> None:
        found = job().on(calls(TRAIN)).exits("trainer", 0, by=KILL).on(calls(TRAIN, incarnation=1))
        assert [each[3] for each in seen(found.state)] == [40]

    def test_calls_that_a_worker_tells_of_as_its_last_word_count(self) -> None:
        found = (
            job()
            .exits("logger", 0)
            .on(FromWorker(WorkerId("logger", 0, 0), Calls((replace(TRAIN, method="note"),))))
        )
        assert [each[:3] for each in seen(found.state)] == [("logger", "actor", "note")]

    def test_calls_of_an_incarnation_that_is_gone_do_not_count(self) -> None:
        found = job().exits("trainer", 0, by=KILL).on(calls(TRAIN))
        assert seen(found.state) == []

    def test_calls_that_cannot_be_are_left_out(self) -> None:
        wrong = (
            replace(TRAIN, role="nobody"),
            replace(TRAIN, ranks=((0, 2),)),
            replace(TRAIN, calls=10**400),
        )
        assert seen(job().on(calls(*wrong)).state) == []

    def test_calls_of_a_role_that_there_is_not_are_refused(self) -> None:
        with pytest.raises(IllegalTransition, match="nobody"):
            job().on(FromWorker(WorkerId("nobody", 0, 0), Calls((TRAIN,))))

    @pytest.mark.parametrize("rank", [-1, 1])
    def test_calls_of_a_rank_that_there_is_not_are_nobodys(self, rank: int) -> None:
        assert seen(job().on(FromWorker(WorkerId("trainer", rank, 0), Calls((TRAIN,)))).state) == []

    def test_calls_wait_for_nothing(self) -> None:
        before = job().state
        assert not urgent(before, job().on(calls(TRAIN)).state)


class TestTheStore:
    def test_the_store_has_what_was_called_for_who_comes_next(self) -> None:
        state = job().on(calls(TRAIN)).exits("trainer", 0, by=KILL).on(calls(TRAIN, incarnation=1)).state
        again, _ = resume(decode(encode(state)), 200.0)
        assert seen(again) == seen(state)

    @examples(20)
    @given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    def test_the_store_loses_no_call_through_restarts_and_masters(self, reports: list[int]) -> None:
        """Each incarnation of the logger reports once; after each the master is another one."""
        found = job()
        for incarnation, steps in enumerate(reports):
            count = replace(TRAIN, calls=2 * steps)
            found.on(FromWorker(WorkerId("logger", 0, incarnation), Calls((count,))))
            if incarnation < 3 and incarnation + 1 < len(reports):
                found.exits("logger", 0, by=KILL)
            found.state = replace(decode(encode(found.state)), agents=found.state.agents)
        assert [each[3] for each in seen(found.state)] == [2 * sum(reports[:4])]


def test_an_agent_tells_a_new_master_what_its_workers_have_called() -> None:
    state, _ = resume(job().state, 200.0)
    held = (
        *(
            HeldWorker(WorkerId("actor", rank, 0), rank + 1, True, serving=True, recoverable=True)
            for rank in range(2)
        ),
        HeldWorker(WorkerId("trainer", 0, 0), 3, True, serving=True, recoverable=True, calls=(TRAIN,)),
        HeldWorker(WorkerId("logger", 0, 0), 4, True),
    )
    found = job()
    found.state = state
    found.on(Join("n0", 1, "n0", dict.fromkeys(state.roles, "127.0.0.1:1"), held))
    assert [each[:3] for each in seen(found.state)] == [("trainer", "actor", "train")]


class TestAFailure:
    def test_a_failure_tells_who_waits_for_it_as_far_as_edges_are_known(self) -> None:
        found = job().exits("actor", 1, by=KILL)
        assert "affected: trainer:0 waits for actor:1 (trainer → actor)" in found.records

    def test_a_failure_goes_by_what_was_seen_rather_than_by_what_may_be(self) -> None:
        """Without edges in the spec a trainer may call everybody; this one waits for nobody."""
        found = job().on(calls(replace(TRAIN, asynchronous=True))).exits("actor", 1, by=KILL)
        assert "trainer:0 what it sends to actor:1 is lost (trainer ⇢ actor: train)" in found.records
        assert "waits for" not in found.records

    def test_a_failure_tells_who_was_seen_to_call_it(self) -> None:
        found = job().on(
            FromWorker(WorkerId("logger", 0, 0), Calls((replace(TRAIN, method="note", asynchronous=True),)))
        )
        found.exits("actor", 0, by=KILL)
        assert "trainer:0 waits for actor:0 (trainer → actor)" in found.records
        assert "logger:0 what it sends to actor:0 is lost (logger ⇢ actor: note)" in found.records

    def test_a_failure_that_starts_a_whole_role_again_is_felt_by_who_calls_any_of_it(self) -> None:
        found = Job(
            {"actor": 2, "trainer": 1},
            kinds={"trainer": "trainer"},
            restarts={"actor": 1},
            primary=("trainer",),
        ).running()
        found.on(calls(replace(TRAIN, ranks=((1, 1),)))).exits("actor", 0, 1)
        assert "affected: trainer:0 waits for actor:0-1 (trainer → actor: train)" in found.records

    def test_a_failure_that_follows_at_once_is_not_told_again(self) -> None:
        """Of ten thousand that die together each would name nearly the same."""
        found = job().exits("actor", 0, by=KILL)
        assert "affected" in found.records
        assert "affected" not in found.exits("actor", 1, by=KILL).records

    def test_a_failure_that_nobody_feels_is_told_alone(self) -> None:
        found = job().exits("logger", 0, by=KILL).on(WorkerRunning(WorkerId("actor", 0, 0), 0))
        assert "affected" not in found.records

    def test_a_failure_is_handled_though_a_role_has_fewer_ranks_than_its_edges_were_checked_for(self) -> None:
        """one_to_one from 4 ranks to 3 is a fault of a spec, and this one is of 4 to 2:4."""
        found = Job(
            {"actor": 4, "rollout": 4},
            restarts={"actor": 1},
            least={"rollout": 2},
            inventory=parse_fake("fake:devices=7"),
        )
        edges = (Edge("actor", "rollout", kind="one_to_one"),)
        found.state = replace(found.state, spec=replace(found.state.spec, edges=edges))
        assert found.state.sizes == {"actor": 4, "rollout": 3}
        found.running().exits("actor", 3, by=KILL)
        assert found.state.roles["actor"].restarts == 1
