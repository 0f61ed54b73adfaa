"""The job's state as documents: nothing that counts is lost, little is written, and nothing foreign is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.master.job import KILL, TERM, Job
from unirun.collocation import Assignment, Placement
from unirun.errors import StoreRefused
from unirun.failover import Exit, Failure
from unirun.master import WorkerPhase, new_job, step
from unirun.master.context import SCHEMA, changes, observations, observed, restore, urgent
from unirun.master.events import AgentLost, Event, JoinTimedOut, ViewDue
from unirun.master.resuming import resume
from unirun.master.state import JOB_ENDS, JobState, Owner
from unirun.spec import Entry, JobSpec, RoleSpec
from unirun.wire.messages import OpenStore, Stop
from unirun.wire.reports import (
    Join,
    Notice,
    WorkerError,
    WorkerExited,
    WorkerFormed,
    WorkerMetrics,
    WorkerRunning,
    WorkerServing,
    WorkerStarted,
)
from unirun.wire.spawning import StoreEnded, StoreOpened

MOST = 256_000
"""Bytes of one document."""

Documents = dict[str, str]


def kept(state: JobState) -> JobState:
    """What the documents hold of `state`: all but what agents tell again."""
    roles = {
        name: replace(
            role,
            workers=tuple(
                replace(w, pid=None, addresses={}, recoverable=None, metrics={}) for w in role.workers
            ),
        )
        for name, role in state.roles.items()
    }
    return replace(state, roles=roles, view_due=False, away=frozenset())


def applied(documents: Documents, news: dict[str, str | None]) -> Documents:
    together = {**documents, **news}
    return {name: text for name, text in together.items() if text is not None}


def written(state: JobState) -> Documents:
    return applied({}, changes(None, state))


class Walk:
    """A job to which anything happens that can."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.job = Job(
            {"actor": 3, "trainer": 1, "reward": 2},
            kinds={"actor": "workload", "trainer": "trainer"},
            restarts={"actor": 30, "trainer": 2, "reward": 20},
            primary=("trainer",),
            nodes=("n0", "n1"),
            stores_open=False,
        )
        owner = self.rng.choice([None, Owner("host", 7, 99)])
        self.job.state = replace(self.job.state, uid="0a1b", owner=owner)
        self.stores: list[StoreOpened] = []

    def states(self, steps: int) -> list[JobState]:
        """The states one after another, from the first."""
        found = [self.job.state]
        for node in ("n0", "n1"):
            endpoints = dict.fromkeys(self.job.state.roles, f"{node}:1")
            found.append(self.do(Join(node, 1, node, endpoints)))
        while self.job.state.phase not in JOB_ENDS and len(found) < steps:
            found.append(self.do(self.event()))
        return found

    def do(self, event: Event) -> JobState:
        self.job.on(event)
        self.stores += [StoreOpened(o.role, o.generation) for o in self.job.orders(OpenStore)]
        return self.job.state

    def event(self) -> Event:
        rng, state = self.rng, self.job.state
        role = rng.choice(list(state.roles.values()))
        worker = rng.choice(role.workers)
        who = role.name, worker.rank, worker.incarnation
        if rng.random() < 0.02:
            return rng.choice([Stop(TERM, "enough", rng.choice([None, 1.0])), AgentLost("n1", "gone")])
        if self.stores and rng.random() < 0.3:
            return self.stores.pop(0)
        told: list[Event] = [ViewDue(), Notice("n0", "hm"), StoreEnded(role.name, role.generation, 1.0, "x")]
        if worker.live:
            told += 4 * [WorkerStarted(worker.node, *who, 100), WorkerRunning(*who, role.opened)]
            told += 4 * [WorkerServing(*who, {"socket": "a"}, True), WorkerFormed(*who, role.opened)]
            told += [WorkerMetrics(*who, {"loss": 0.5}, 1.0), self.exit(who), self.exit(who)]
        return rng.choice(told)

    def exit(self, who: tuple[str, int, int]) -> WorkerExited:
        rng = self.rng
        error = rng.choice([None, WorkerError("ValueError: ü\udcff\x00", "Traceback …\n", 5.0)])
        code, by = rng.choice([(0, None), (1, None), (None, KILL), (None, TERM)])
        stopping = self.job.state.roles[who[0]].phase in ("stopping", "restarting")
        if stopping:
            return WorkerExited(*who, 6.0, None, TERM, "order", TERM)
        return WorkerExited(*who, 6.0, code, by, "own", None, error, "a note", "the end")


seeds = st.integers(0, 2**32)


@settings(deadline=None, max_examples=40)
@given(seeds)
def test_what_is_written_at_once_gives_the_state_back(seed: int) -> None:
    for state in Walk(seed).states(40):
        assert restore(written(state)) == kept(state)


@settings(deadline=None, max_examples=40)
@given(seeds)
def test_what_is_written_step_by_step_is_what_is_written_at_once(seed: int) -> None:
    states = Walk(seed).states(120)
    documents = written(states[0])
    for before, after in pairwise(states):
        documents = applied(documents, changes(before, after))
        assert documents == written(after)


@settings(deadline=None, max_examples=40)
@given(seeds, st.data())
def test_steps_may_be_left_out(seed: int, data: st.DataObject) -> None:
    states = Walk(seed).states(120)
    chosen = sorted(data.draw(st.sets(st.integers(1, len(states) - 1), max_size=10)))
    documents, before = written(states[0]), states[0]
    for number in chosen:
        documents = applied(documents, changes(before, states[number]))
        before = states[number]
    assert restore(documents) == kept(before)


@settings(deadline=None, max_examples=25)
@given(seeds)
def test_a_step_that_is_not_urgent_may_be_lost_without_a_decision_or_an_end(seed: int) -> None:
    """Whoever comes in this master's place has all that follows from nothing else than the store."""

    def decided(state: JobState) -> object:
        resumed, _ = resume(restore(written(state)), 0.0)
        roles = {
            role.name: (
                role.phase in ("starting", "running", "reforming") or role.phase,
                (role.generation, role.opened, role.restarts),
                [(w.incarnation, w.live, w.exit) for w in role.workers],
            )
            for role in resumed.roles.values()
        }
        return resumed.phase, resumed.verdict, resumed.failures, resumed.asked_to_stop, roles

    states = Walk(seed).states(120)
    all_decided = [decided(state) for state in states]
    assert any(urgent(before, after) for before, after in pairwise(states))
    for (before, after), (old, new) in zip(pairwise(states), pairwise(all_decided), strict=True):
        assert urgent(before, after) == (old != new)


def happens(job: Job, *events: Event) -> bool:
    """Whether what `events` change is urgent."""
    before = job.state
    return urgent(before, job.on(*events).state)


class TestUrgent:
    def test_is_that_a_job_is_launched(self) -> None:
        assert happens(Job({"actor": 1}), Join("n0", 1, "h", {"actor": "h:1"}))

    def test_is_not_that_a_node_of_several_has_come(self) -> None:
        job = Job({"actor": 2}, nodes=("n0", "n1"))
        assert not happens(job, Join("n0", 1, "h", {"actor": "h:1"}))
        assert happens(job, Join("n1", 1, "h", {"actor": "h:2"}))

    def test_is_not_how_far_workers_are(self) -> None:
        job = Job({"actor": 1}).launched()
        assert not happens(job, WorkerStarted("n0", "actor", 0, 0, 7), WorkerRunning("actor", 0, 0, 0))
        assert job.phases() == {"actor": "running"}
        assert not happens(job, WorkerMetrics("actor", 0, 0, {"loss": 1.0}, 1.0), ViewDue())

    @pytest.mark.parametrize("code", [0, 1])
    def test_is_every_end_of_a_worker(self, code: int) -> None:
        job = Job({"actor": 2}, restarts={"actor": 1}).running()
        assert happens(job, WorkerExited("actor", 0, 0, 1.0, code, None))

    def test_is_every_end_of_a_worker_that_was_told_to(self) -> None:
        job = Job({"actor": 3}, restarts={"actor": 1}).running().exits("actor", 0, 1)
        assert happens(job, WorkerExited("actor", 1, 0, 1.0, None, TERM, "order", TERM))

    def test_is_a_generation_that_is_decided_and_the_store_of_it(self) -> None:
        job = Job({"actor": 2}, kinds={"actor": "workload"}, restarts={"actor": 1}, stores_open=False)
        job.running().on(*(WorkerServing("actor", rank, 0, {}, True) for rank in range(2)))
        assert job.phases() == {"actor": "running"}
        assert happens(job, StoreEnded("actor", 0, 1.0, "gone"))
        assert happens(job, StoreOpened("actor", 1))

    def test_is_the_wish_to_stop_and_the_second_one(self) -> None:
        job = Job({"actor": 1, "rollout": 1}, primary=("actor",)).running().exits("actor", 0)
        assert happens(job, Stop(TERM, "one"))
        assert happens(Job({"actor": 1}), JoinTimedOut())

    def test_is_not_what_changes_nothing(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 1}).running().exits("actor", 0, 1)
        before = job.state
        assert not urgent(before, job.exits("actor", 0, 1, incarnation=0).state)
        assert not urgent(before, replace(before))


def many(ranks: int, nodes: int, roles: int = 1, cpus: tuple[int, ...] | None = None) -> JobState:
    """A job whose ranks are spread over its nodes."""
    each = ranks // roles
    names = [f"role{number}" for number in range(roles)]
    spec = JobSpec(
        "job", "job-1", tuple(RoleSpec(n, each, Entry("script", "a.py")) for n in names), tuple(names)
    )
    places = tuple(
        Assignment(name, rank, f"node-{rank % nodes:05}.cluster.example", rank // nodes, 0, ("0", "1"), cpus)
        for name in names
        for rank in range(each)
    )
    return new_job(spec, Placement(places, ""), started=1.0, logs="/logs")


def joined(state: JobState) -> JobState:
    for number, node in enumerate(state.placement.nodes):
        endpoints = dict.fromkeys(state.roles, f"[2001:db8::{number:x}]:54321")
        state, _ = step(state, Join(node, number, node, endpoints), 2.0)
    return state


def largest(news: dict[str, str | None]) -> int:
    return max(len((text or "").encode()) for text in news.values())


@pytest.fixture(scope="module")
def big() -> JobState:
    """10 000 ranks on 1 250 nodes, all ordered."""
    return joined(many(10_000, 1250))


class TestTenThousandRanks:
    def test_are_in_documents_of_moderate_size(self, big: JobState) -> None:
        assert largest(changes(None, big)) < MOST
        assert largest(observations(None, big)) < MOST
        assert restore(written(big)) == kept(big)

    def test_change_few_documents_with_each_event(self, big: JobState) -> None:
        node = big.placement.nodes[77]
        events: list[tuple[Event, int]] = [
            (WorkerStarted(node, "role0", 77, 0, 5), 1),
            (WorkerRunning("role0", 77, 0, 0), 1),
            (WorkerExited("role0", 77, 0, 3.0, 0, None), 1),
            (WorkerExited("role0", 5_000, 0, 3.0, 1, None, note="x"), 4),  # ranks, failures, roles, job
        ]
        state = big
        for event, most in events:
            after, _ = step(state, event, 4.0)
            news = changes(state, after)
            assert len(news) <= most, event
            assert largest(news) < MOST
            state = after
        assert changes(state, state) == {}

    def test_that_are_bound_to_many_processors_are_in_small_documents_too(self) -> None:
        state = many(1000, 10, cpus=tuple(range(384)))
        assert largest(changes(None, state)) < MOST
        assert restore(written(state)) == kept(state)

    def test_of_many_roles_have_small_documents_of_nodes(self) -> None:
        state = joined(many(600, 3, roles=200))
        assert largest(changes(None, state)) < MOST
        assert restore(written(state)) == kept(state)


def test_a_block_of_failures_is_small_whatever_they_say() -> None:
    job = Job({"actor": 1}, restarts={"actor": 20}).running()
    flood = "é\x00\n😀" * 50_000
    for _ in range(16):
        job.exits("actor", 0, 1, error=WorkerError(flood, flood, job.now), note=flood)
    assert len(job.state.failures) == 16
    assert largest(changes(None, job.state)) < 256 * 1024
    assert restore(written(job.state)) == kept(job.state)


def test_failures_that_are_forgotten_leave_no_document_behind() -> None:
    state = Job({"actor": 1}).running().state
    documents = written(state)
    for number in range(700):
        failure = Failure("actor", 0, number, 0, "n0", float(number), Exit(code=1))
        after = state.with_failures(failure)
        news = changes(state, after)
        assert len([name for name, text in news.items() if text is not None]) <= 2
        documents, state = applied(documents, news), after
        blocks = [name for name in documents if name.startswith("failures/")]
        assert len(blocks) <= 256 // 8 + 1
    assert [failure.incarnation for failure in restore(documents).failures] == list(range(444, 700))
    assert restore(documents) == kept(state)


def test_many_failures_at_once_may_follow_few() -> None:
    state = Job({"actor": 1}).running().state
    documents = written(state)
    for size in (3, 300, 1, 600, 8):
        more = [Failure("actor", 0, n, 0, "n0", 1.0, Exit(code=1)) for n in range(size)]
        after = state.with_failures(*more)
        documents, state = applied(documents, changes(state, after)), after
        assert restore(documents) == kept(state)
        assert len([name for name in documents if name.startswith("failures/")]) <= 33


class TestWhatWasSeen:
    def test_is_told_to_readers(self) -> None:
        job = Job({"actor": 2}, kinds={"actor": "workload"}).running()
        job.on(WorkerServing("actor", 1, 0, {"socket": "a:1"}, True))
        seen = applied({}, observations(None, job.state))
        workers = observed(restore(written(job.state)), seen).roles["actor"].workers
        assert [w.pid for w in workers] == [1, 2]
        assert [dict(w.addresses) for w in workers] == [{}, {"socket": "a:1"}]

    def test_of_a_worker_that_has_a_successor_is_not(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 1}).running()
        seen = applied({}, observations(None, job.state))
        job.exits("actor", 0, 1)
        (worker,) = observed(restore(written(job.state)), seen).roles["actor"].workers
        assert (worker.incarnation, worker.pid, worker.phase) == (1, None, WorkerPhase.STARTING)

    def test_may_be_there_for_the_first_workers_only(self) -> None:
        state = replace(many(600, 1), uid="x")
        seen = applied({}, observations(None, state))
        assert sorted(seen) == ["seen/0", "seen/1", "seen/2"]
        del seen["seen/2"]
        assert observed(state, seen) == state
        assert observed(state, {}) == state

    def test_is_written_anew_only_where_it_has_changed(self, big: JobState) -> None:
        after, _ = step(big, WorkerStarted(big.placement.nodes[600], "role0", 600, 0, 5), 3.0)
        assert sorted(observations(big, after)) == ["seen/2"]


class TestDocumentsThatAreRefused:
    @pytest.fixture
    def documents(self) -> Documents:
        job = Job({"actor": 2, "rollout": 1}, restarts={"actor": 40}).running()
        for _ in range(20):
            job.exits("actor", 0, 1).exits("actor", 1, by=TERM, asked=TERM)
        return written(job.state)

    def test_are_those_of_another_schema(self, documents: Documents) -> None:
        documents["job"] = json.dumps({**json.loads(documents["job"]), "schema": SCHEMA + 1})
        with pytest.raises(StoreRefused, match=f"has schema {SCHEMA + 1}, this unirun writes {SCHEMA}"):
            restore(documents)

    @pytest.mark.parametrize(
        "name",
        ["job", "spec/0", "placement/0", "roles", "ranks/0", "failures/0", "failures/1", "failures/2"],
    )
    def test_are_those_of_which_one_is_missing(self, documents: Documents, name: str) -> None:
        if name == "failures/2":
            documents["failures/3"] = documents.pop(name)
        else:
            del documents[name]
        with pytest.raises(StoreRefused, match="not whole or not unirun's"):
            restore(documents)

    @pytest.mark.parametrize(
        "damage",
        [
            lambda text: text[: len(text) // 2],
            lambda text: "",
            lambda text: "[]",
            lambda text: "{}",
            lambda text: "7",
            lambda text: "null",
            lambda text: '"x"',
            lambda text: '{"a": [1, 2]}',
            lambda text: "[" * 100_000,
        ],
    )
    def test_are_those_of_which_one_is_something_else(
        self, documents: Documents, damage: Callable[[str], str]
    ) -> None:
        for name, text in documents.items():
            if name == "nodes/0" and damage(text) in ("[]", "{}"):
                continue  # nobody may be there
            with pytest.raises(StoreRefused):
                restore({**documents, name: damage(text)})
        assert restore(documents)

    def test_are_those_with_names_of_somebody_else(self, documents: Documents) -> None:
        for name in ("failures/x", "ranks/", "ranks/-1", "spec/0/1", "nodes/7"):
            with pytest.raises(StoreRefused):
                restore({**documents, name: documents["ranks/0"]})

    @given(st.dictionaries(st.sampled_from(["job", "roles", "spec/0", "ranks/0"]), st.text()))
    def test_are_all_that_are_none(self, documents: Documents) -> None:
        with pytest.raises(StoreRefused):
            restore(documents)
