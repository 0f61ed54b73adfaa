"""The job's state as documents: nothing that counts is lost, and nothing foreign is taken."""

from __future__ import annotations

import contextlib
import json
import zlib
from base64 import b64encode
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.effort import examples
from tests.unit.failover.job import TERM, Job
from tests.unit.failover.persistence.documents import Documents, applied, kept, written
from tests.unit.failover.random_walk import RandomWalk
from unirun.errors import StoreRefused
from unirun.failover.draft import Event, JoinTimedOut, ViewDue
from unirun.failover.persistence import context as documents
from unirun.failover.persistence.context import SCHEMA, changed_documents, restore, unpacked, urgent
from unirun.failover.state import JobState
from unirun.failover.takeover import resume
from unirun.values import WorkerId
from unirun.wire.messages import Stop
from unirun.wire.reports import (
    FromWorker,
    Join,
    Metrics,
    Serving,
    StoreEnded,
    StoreOpened,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)

seeds = st.integers(0, 2**32)


@examples(40)
@given(seeds)
def test_what_is_written_at_once_gives_the_state_back(seed: int) -> None:
    for state in RandomWalk(seed).states(40):
        assert restore(written(state)) == kept(state)


@examples(40)
@given(seeds)
def test_what_is_written_step_by_step_is_what_is_written_at_once(seed: int) -> None:
    states = RandomWalk(seed).states(120)
    documents = written(states[0])
    for before, after in pairwise(states):
        documents = applied(documents, changed_documents(before, after))
        assert documents == written(after)


@examples(40)
@given(seeds, st.data())
def test_steps_may_be_left_out(seed: int, data: st.DataObject) -> None:
    states = RandomWalk(seed).states(120)
    chosen = sorted(data.draw(st.sets(st.integers(1, len(states) - 1), max_size=10)))
    documents, before = written(states[0]), states[0]
    for number in chosen:
        documents = applied(documents, changed_documents(before, states[number]))
        before = states[number]
    assert restore(documents) == kept(before)


@examples(25)
@given(seeds)
def test_a_step_that_is_not_urgent_may_be_lost_without_a_decision_or_an_end(seed: int) -> None:
    """The next master derives everything from the store, and from nothing else."""

    def decided(state: JobState) -> object:
        resumed, _ = resume(restore(written(state)), 0.0)
        roles = {
            role.name: (
                role.phase in ("starting", "running", "reforming") or role.phase,
                (role.generation, role.opened, role.restarts),
                [(w.incarnation, w.live, w.exit, w.recoverable) for w in role.workers]
                if role.kind == "trainer"
                else [(w.incarnation, w.live, w.exit) for w in role.workers],
            )
            for role in resumed.roles.values()
        }
        return (
            resumed.phase,
            resumed.placement,
            resumed.verdict,
            resumed.failures,
            resumed.asked_to_stop,
            roles,
        )

    states = RandomWalk(seed).states(120)
    all_decided = [decided(state) for state in states]
    assert any(urgent(before, after) for before, after in pairwise(states))
    for (before, after), (old, new) in zip(pairwise(states), pairwise(all_decided), strict=True):
        assert urgent(before, after) == (old != new)


def test_the_term_of_another_master_is_written_but_is_no_decision() -> None:
    before = Job({"actor": 1}).running().state
    after = replace(before, epoch=2)
    assert not urgent(before, after)
    assert list(changed_documents(before, after)) == ["job"]
    assert restore(written(after)).epoch == 2


def happens(job: Job, *events: Event) -> bool:
    """Return True if what `events` change is urgent."""
    before = job.state
    return urgent(before, job.on(*events).state)


class TestUrgent:
    def test_urgent_is_that_a_job_is_launched(self) -> None:
        assert happens(Job({"actor": 1}), Join("n0", 1, "h", {"actor": "h:1"}))

    def test_urgent_is_not_that_a_node_of_several_has_come(self) -> None:
        job = Job({"actor": 2}, nodes=("n0", "n1"))
        assert not happens(job, Join("n0", 1, "h", {"actor": "h:1"}))
        assert happens(job, Join("n1", 1, "h", {"actor": "h:2"}))

    def test_urgent_is_not_how_far_workers_are(self) -> None:
        job = Job({"actor": 1}).launched()
        assert not happens(
            job, WorkerStarted(WorkerId("actor", 0, 0), 7), WorkerRunning(WorkerId("actor", 0, 0), 0)
        )
        assert job.phases() == {"actor": "running"}
        assert not happens(job, FromWorker(WorkerId("actor", 0, 0), Metrics({"loss": 1.0}, 1.0)), ViewDue())

    @pytest.mark.parametrize("code", [0, 1])
    def test_urgent_is_every_end_of_a_worker(self, code: int) -> None:
        job = Job({"actor": 2}, restarts={"actor": 1}).running()
        assert happens(job, WorkerExited(WorkerId("actor", 0, 0), 1.0, code, None))

    def test_urgent_is_every_end_of_a_worker_that_was_told_to(self) -> None:
        job = Job({"actor": 3}, restarts={"actor": 1}).running().exits("actor", 0, 1)
        assert happens(job, WorkerExited(WorkerId("actor", 1, 0), 1.0, None, TERM, "order", TERM))

    def test_urgent_is_a_generation_that_is_decided_and_the_store_of_it(self) -> None:
        job = Job({"actor": 2}, kinds={"actor": "workload"}, restarts={"actor": 1}, stores_open=False)
        job.running().on(*(FromWorker(WorkerId("actor", rank, 0), Serving({}, True)) for rank in range(2)))
        assert job.phases() == {"actor": "running"}
        assert happens(job, StoreEnded("actor", 0, 1.0, "gone"))
        assert happens(job, StoreOpened("actor", 1))

    def test_urgent_is_the_wish_to_stop_and_the_second_one(self) -> None:
        job = Job({"actor": 1, "rollout": 1}, primary=("actor",)).running().exits("actor", 0)
        assert happens(job, Stop(TERM, "one"))
        assert happens(Job({"actor": 1}), JoinTimedOut())

    def test_urgent_is_not_what_changes_nothing(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 1}).running().exits("actor", 0, 1)
        before = job.state
        assert not urgent(before, job.exits("actor", 0, 1, incarnation=0).state)
        assert not urgent(before, replace(before))


class TestDocumentsThatAreRefused:
    @pytest.fixture
    def documents(self) -> Documents:
        job = Job({"actor": 2, "rollout": 1}, restarts={"actor": 40}).running()
        for _ in range(20):
            job.exits("actor", 0, 1).exits("actor", 1, by=TERM, asked=TERM)
        return written(job.state)

    def test_refused_documents_are_those_of_another_schema(self, documents: Documents) -> None:
        documents["job"] = json.dumps({**json.loads(documents["job"]), "schema": SCHEMA + 1})
        with pytest.raises(StoreRefused, match=f"has schema {SCHEMA + 1}, this unirun writes {SCHEMA}"):
            restore(documents)

    @pytest.mark.parametrize(
        "name",
        [
            "job",
            "spec/0",
            "inventory/0",
            "nodes/0",
            "placement/rollout/0",
            "ranks/actor/0",
            "failures/0",
            "failures/1",
            "failures/2",
        ],
    )
    def test_refused_documents_are_those_of_which_one_is_missing(
        self, documents: Documents, name: str
    ) -> None:
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
    def test_refused_documents_are_those_of_which_one_is_something_else(
        self, documents: Documents, damage: Callable[[str], str]
    ) -> None:
        for name, text in documents.items():
            with pytest.raises(StoreRefused):
                restore({**documents, name: damage(text)})
        assert restore(documents)

    def test_refused_documents_are_those_with_names_of_somebody_else(self, documents: Documents) -> None:
        for name in ("failures/x", "ranks/actor/", "ranks/actor/-1", "spec/0/1", "nodes/7", "calls/actor/2"):
            with pytest.raises(StoreRefused):
                restore({**documents, name: documents["ranks/actor/0"]})

    @pytest.mark.parametrize(
        ("name", "from_", "to", "what"),
        [
            ("job", '"ranks/actor":[100,2,0]', '"ranks/actor":[100,3,0]', "ranks/actor"),
            ("job", '"ranks/actor":[100,2,0]', '"ranks/actor":[100,1,0]', "ranks/actor"),
            ("placement/rollout/0", '"rank":0', '"rank":1', "placement"),
            ("placement/actor/0", '"rank":1', '"rank":2', "placement"),
            ("ranks/actor/0", '"rank":1', '"rank":2', "ranks"),
        ],
    )
    def test_refused_documents_are_those_that_do_not_fit_each_other(
        self, documents: Documents, name: str, from_: str, to: str, what: str
    ) -> None:
        assert documents[name].count(from_) == 1
        documents[name] = documents[name].replace(from_, to)
        with pytest.raises(StoreRefused, match=f"its {what} are not whole"):
            restore(documents)

    def test_refused_documents_are_those_with_a_gap(self, documents: Documents) -> None:
        documents["failures/3"] = documents.pop("failures/2")
        with pytest.raises(StoreRefused, match="not whole or not unirun's"):
            restore(documents)

    @given(st.dictionaries(st.sampled_from(["job", "spec/0", "ranks/actor/0"]), st.text()))
    def test_refused_documents_are_all_that_are_none(self, documents: Documents) -> None:
        with pytest.raises(StoreRefused):
            restore(documents)


def test_a_small_document_does_not_become_any_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may write to a shared store could fill the memory of the next master."""
    monkeypatch.setattr(documents, "WHOLE", 1000)
    for blanks, allowed in ((998, True), (999, False), (1_000_000, False)):
        bomb = b64encode(zlib.compress(b"[" + b" " * blanks + b"]", 9)).decode()
        if allowed:
            assert unpacked("spec", {"spec/0": bomb}) == []
        else:
            with pytest.raises(ValueError, match="its spec are not whole"):
                unpacked("spec", {"spec/0": bomb})


@given(st.binary(max_size=200), st.booleans())
def test_no_compressed_document_ends_in_an_unknown_error(data: bytes, compressed: bool) -> None:
    text = b64encode(zlib.compress(data) if compressed else data).decode()
    with contextlib.suppress(ValueError, zlib.error, RecursionError):
        unpacked("spec", {"spec/0": text})
