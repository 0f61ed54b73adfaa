"""The job's state as a text: nothing that counts is lost, and nothing foreign is taken."""

from __future__ import annotations

import contextlib
import copy
import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.effort import examples
from tests.unit.failover.context.states import kept
from tests.unit.failover.job import TERM, Job
from tests.unit.failover.random_walk import RandomWalk
from unirun.errors import StoreRefused
from unirun.failover import context
from unirun.failover.context import SCHEMA, decode, encode, urgent
from unirun.failover.draft import Due, Event
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
def test_what_is_encoded_gives_the_state_back(seed: int) -> None:
    for state in RandomWalk(seed).states(40):
        assert decode(encode(state)) == kept(state)


@examples(25)
@given(seeds)
def test_a_step_that_is_not_urgent_may_be_lost_without_a_decision_or_an_end(seed: int) -> None:
    """The next master derives everything from the store, and from nothing else."""

    def decided(state: JobState) -> object:
        resumed, _ = resume(decode(encode(state)), 0.0)
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
            resumed.commits,
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
    assert decode(encode(after)).epoch == 2


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
        assert not happens(job, FromWorker(WorkerId("actor", 0, 0), Metrics({"loss": 1.0}, 1.0)), Due.VIEW)

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
        assert happens(Job({"actor": 1}), Due.JOIN)

    def test_urgent_is_not_what_changes_nothing(self) -> None:
        job = Job({"actor": 1}, restarts={"actor": 1}).running().exits("actor", 0, 1)
        before = job.state
        assert not urgent(before, job.exits("actor", 0, 1, incarnation=0).state)
        assert not urgent(before, replace(before))


def test_text_that_is_no_unicode_is_kept() -> None:
    state = replace(Job({"actor": 1}).running().state, cause="a half of a character: \udc80")
    assert decode(encode(state)) == kept(state)


def test_metrics_are_not_kept_and_change_nothing() -> None:
    job = Job({"actor": 2}).running()
    before = encode(job.state)
    job.on(FromWorker(WorkerId("actor", 1, 0), Metrics({"loss": 1.0}, 1.0)))
    assert job.state.roles["actor"].workers[1].metrics
    assert encode(job.state) == before


def text_of(document: Any) -> str:
    return b64encode(zlib.compress(json.dumps(document).encode())).decode()


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The JSON of a context, as plain values."""
    job = Job({"actor": 2, "rollout": 1}, restarts={"actor": 40}).running()
    for _ in range(3):
        job.exits("actor", 0, 1).exits("actor", 1, by=TERM, asked=TERM)
    found: dict[str, Any] = json.loads(zlib.decompress(b64decode(encode(job.state))))
    assert decode(text_of(found)) == kept(job.state)
    return found


class TestAContextThatIsRefused:
    def test_a_context_of_another_schema_is_refused(self, document: dict[str, Any]) -> None:
        with pytest.raises(StoreRefused, match=f"has schema {SCHEMA + 1}, this unirun writes {SCHEMA}"):
            decode(text_of({**document, "schema": SCHEMA + 1}))

    @pytest.mark.parametrize("field", ["spec", "placement", "roles", "started", "logs"])
    def test_a_context_without_a_field_is_refused(self, document: dict[str, Any], field: str) -> None:
        less = {name: value for name, value in document["state"].items() if name != field}
        with pytest.raises(StoreRefused, match="not whole or not unirun's"):
            decode(text_of({**document, "state": less}))

    def test_a_context_with_more_fields_is_refused(self, document: dict[str, Any]) -> None:
        with pytest.raises(StoreRefused, match="not whole or not unirun's"):
            decode(text_of({**document, "state": {**document["state"], "more": 1}}))

    @pytest.mark.parametrize("other", [[], {}, 7, None, "x", {"a": [1, 2]}])
    def test_a_context_of_something_else_is_refused(self, document: dict[str, Any], other: Any) -> None:
        for damaged in (other, {**document, "state": other}):
            with pytest.raises(StoreRefused):
                decode(text_of(damaged))
        for name in document["state"]:
            if other != document["state"][name]:
                changed = {**document["state"], name: other}
                with contextlib.suppress(StoreRefused):
                    decode(text_of({**document, "state": changed}))

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            (lambda state: state["roles"]["actor"]["workers"].pop(), "placement"),
            (lambda state: state["roles"]["actor"]["workers"].reverse(), "ranks"),
            (lambda state: state["placement"]["assignments"].reverse(), "placement"),
            (lambda state: state["placement"]["assignments"].clear(), "placement"),
        ],
    )
    def test_a_context_whose_parts_do_not_fit_is_refused(
        self, document: dict[str, Any], change: Callable[[Any], object], what: str
    ) -> None:
        damaged = copy.deepcopy(document)
        change(damaged["state"])
        with pytest.raises(StoreRefused, match=f"its {what} are not whole"):
            decode(text_of(damaged))

    def test_a_context_that_is_cut_is_refused(self, document: dict[str, Any]) -> None:
        text = text_of(document)
        for end in range(0, len(text), 40):
            with pytest.raises(StoreRefused):
                decode(text[:end])

    def test_a_context_in_brackets_without_end_is_refused(self) -> None:
        deep = b64encode(zlib.compress(b"[" * 1_000_000)).decode()
        with pytest.raises(StoreRefused):
            decode(deep)

    @given(st.binary(max_size=200), st.booleans())
    def test_no_other_bytes_end_in_an_unknown_error(self, data: bytes, compressed: bool) -> None:
        with pytest.raises(StoreRefused):
            decode(b64encode(zlib.compress(data) if compressed else data).decode())

    @given(st.text())
    def test_no_other_text_ends_in_an_unknown_error(self, text: str) -> None:
        with pytest.raises(StoreRefused):
            decode(text)

    def test_a_small_text_does_not_become_any_number_of_bytes(
        self, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A process that may write to a shared store could fill the memory of the next master."""
        size = len(json.dumps(document).encode())
        monkeypatch.setattr(context, "MAX_PLAIN_BYTES", size)
        assert decode(text_of(document))
        monkeypatch.setattr(context, "MAX_PLAIN_BYTES", size - 1)
        with pytest.raises(StoreRefused, match="its text are not whole"):
            decode(text_of(document))
