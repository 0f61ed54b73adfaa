"""One master's hand on the context: each write is done once or not at all, and only as long as it leads."""

from __future__ import annotations

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.effort import examples
from tests.unit.failover.context.context_stores import RUN, contexts, term, until_done
from tests.unit.failover.context.faulty_store import Fault, FaultyStore
from tests.unit.failover.context.states import kept, many
from tests.unit.failover.job import Job
from tests.unit.failover.random_walk import RandomWalk
from unirun.errors import Fenced, OutcomeUnknown, StoreAway, StoreError, StoreRefused
from unirun.failover import context as store_module
from unirun.failover.context import MAX_BYTES, MAX_OPERATIONS, load
from unirun.failover.state import Exit, Failure
from unirun.rendezvous.election import crashes_key
from unirun.rendezvous.store.protocol import MAX_CHANGES, MAX_SIZE, Put, ValueIs
from unirun.values import WorkerId


class TestANewContext:
    def test_a_new_context_can_be_loaded(self, store: FaultyStore, job: Job) -> None:
        assert load(store, RUN) is None
        contexts(store).create(job.state)
        assert load(store, RUN) == kept(job.state)

    def test_a_new_context_replaces_one_of_the_same_id_as_a_whole(self, store: FaultyStore, job: Job) -> None:
        old = many(600, 1)
        first = contexts(store)
        first.create(old)
        for number, failed in enumerate(range(40)):
            old = old.with_failures(
                Failure(WorkerId("role0", failed, 0), 0, "n", float(number), Exit(code=1))
            )
        first.write(old)
        assert load(store, RUN) == kept(old)
        contexts(store, deposing=1).create(job.state)
        assert load(store, RUN) == kept(job.state)
        assert len(store.get_prefix(f"jobs/{RUN}/context/").items) == 2

    def test_a_new_context_leaves_nothing_of_the_job_before_of_its_id(
        self, store: FaultyStore, job: Job
    ) -> None:
        contexts(store, run_id="run").create(job.state)
        alone = {
            item.key.replace("jobs/run/", f"jobs/{RUN}/") for item in store.get_prefix("jobs/run/").items
        }
        first = contexts(store)
        first.create(job.state)
        first.save_state("actor", 0, "saved")
        first.commit_version("policy", 1)
        first.mark_silent(["n0"])
        store.txn([], [Put(crashes_key(RUN), "[]")])
        contexts(store, deposing=1).create(job.state)
        assert {item.key for item in store.get_prefix(f"jobs/{RUN}/").items} == alone

    def test_a_new_context_touches_no_job_whose_id_begins_alike(self, store: FaultyStore, job: Job) -> None:
        other = Job({"actor": 2}).running()
        contexts(store, run_id="run10").create(other.state)
        before = store.get_prefix("jobs/run10/").items
        assert before
        contexts(store, run_id="run1").create(job.state)
        contexts(store, run_id="run1", deposing=1).create(job.state)
        assert store.get_prefix("jobs/run10/").items == before
        assert load(store, "run10") == kept(other.state)

    def test_a_new_context_is_not_there_before_it_is_whole(
        self, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store_module, "MAX_BYTES", 300)
        contexts(store).create(many(600, 1))
        writer = contexts(store, deposing=1)
        found: list[bool] = []
        store.interfere = lambda: found.append(load(store, RUN) is not None)
        writer.create(many(5000, 700))
        assert len(found) > 2
        assert found == [True, *[False] * (len(found) - 1)], "the first write deletes the old one"
        assert load(store, RUN) is not None

    def test_a_new_context_that_is_begun_and_not_finished_is_begun_anew(
        self, store: FaultyStore, job: Job
    ) -> None:
        store.faults.extend([None, "away"])
        with pytest.raises(StoreAway):
            contexts(store).create(job.state)
        assert load(store, RUN) is None
        contexts(store, deposing=1).create(job.state)
        assert load(store, RUN) == kept(job.state)


class TestAWrite:
    def test_a_write_is_one_transaction(self, store: FaultyStore, job: Job) -> None:
        hand, before = contexts(store), job.state
        hand.create(before)
        store.written.clear()
        hand.write(job.exits("actor", 0).state)
        ((puts, deletes),) = store.written
        name = "jobs/job-1/context/state"
        assert puts == ["jobs/job-1/head", f"{name}/2/0", name, "index/job-1"]
        assert deletes == [f"{name}/1/"]
        assert load(store, RUN) == kept(job.state)

    def test_a_write_of_the_jobs_phase_has_the_line_that_ls_reads(self, store: FaultyStore, job: Job) -> None:
        hand, before = contexts(store), job.state
        hand.create(before)
        line = store.get("index/job-1")
        assert line is not None
        assert json.loads(line.value)["phase"] == "running"
        for rank in range(4):
            job.exits("actor", rank)
        hand.write(job.state)
        line = store.get("index/job-1")
        assert line is not None
        assert (json.loads(line.value)["phase"], json.loads(line.value)["code"]) == ("succeeded", 0)

    def test_a_write_of_nothing_is_none(self, store: FaultyStore, job: Job) -> None:
        hand = contexts(store)
        hand.create(job.state)
        asked = store.asked
        hand.write(job.state)
        assert store.asked == asked

    def test_a_write_never_is_more_than_a_store_takes(self, store: FaultyStore) -> None:
        assert MAX_OPERATIONS + 4 < MAX_CHANGES, "the head, the index, and what is deleted besides"
        assert MAX_BYTES < MAX_SIZE
        text = "é" * MAX_BYTES
        hand = contexts(store)
        store.written.clear()
        hand.save_state("actor", 0, text)
        assert len(store.written) == 4
        assert hand.load_state("actor", 0) == text


class TestAStoreThatFails:
    @pytest.mark.parametrize("fault", ["away", "lost"])
    def test_a_failing_store_without_having_done_it_is_asked_again(
        self, store: FaultyStore, job: Job, fault: Fault
    ) -> None:
        hand, before = contexts(store), job.state
        hand.create(before)
        after = job.exits("actor", 0).state
        store.faults.extend([fault] * 3)
        until_done(lambda: hand.write(after))
        assert load(store, RUN) == kept(after)

    def test_a_failing_store_after_having_done_it_is_not_asked_again(
        self, store: FaultyStore, job: Job
    ) -> None:
        hand, before = contexts(store), job.state
        hand.create(before)
        store.faults.append("done")
        asked = store.asked
        hand.write(job.exits("actor", 0).state)
        assert store.asked == asked + 1, "it has looked before it would write again"

    def test_a_failing_store_that_does_it_when_it_was_made_again_has_done_it_once(
        self, store: FaultyStore, job: Job
    ) -> None:
        """A write that arrives late is older than the content of the store."""
        hand, before = contexts(store), job.state
        hand.create(before)
        after = job.exits("actor", 0).state
        last = job.exits("actor", 1).state
        store.faults.extend([None, "late"])
        hand.write(after)
        hand.write(before)
        hand.write(last)
        assert load(store, RUN) == kept(last)

    def test_a_failing_store_and_cannot_say_whether_it_has_done_it_is_asked_later(
        self, store: FaultyStore, job: Job
    ) -> None:
        hand, before = contexts(store), job.state
        hand.create(before)
        after = job.exits("actor", 0).state
        store.written.clear()
        store.faults.append("done")
        store.reads.extend([None, "away"])
        with pytest.raises(StoreAway):
            hand.write(after)
        assert len(store.written) == 1
        until_done(lambda: hand.write(after))
        assert load(store, RUN) == kept(after)

    def test_a_failing_store_twice_raises_and_the_same_call_goes_on(
        self, store: FaultyStore, job: Job
    ) -> None:
        hand, before = contexts(store), job.state
        hand.create(before)
        after = job.exits("actor", 0).state
        store.faults.extend(["lost", "done"])
        with pytest.raises(OutcomeUnknown):
            hand.write(after)
        hand.write(after)
        assert load(store, RUN) == kept(after)

    @examples(60)
    @given(
        st.integers(0, 2**32),
        st.lists(st.sampled_from([None, "away", "done", "lost", "late"]), max_size=40),
        st.lists(st.sampled_from([None, "away"]), max_size=40),
        st.sampled_from([200, 1000, MAX_BYTES]),
    )
    def test_a_failing_store_in_any_way_ends_with_what_was_to_be_written(
        self, seed: int, faults: list[Fault | None], reads: list[Fault | None], size: int
    ) -> None:
        states = RandomWalk(seed).states(30)
        store = FaultyStore()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store_module, "MAX_BYTES", size)
            hand = contexts(store)
            hand.create(states[0])
            store.faults.extend(faults)
            store.reads.extend(reads)
            for state in states:
                until_done(partial(hand.write, state), 100)
        store.reads.clear()
        assert load(store, RUN) == kept(states[-1])

    def test_a_failing_store_as_no_store_takes_such_a_write_is_not_asked_for_it_again(
        self, store: FaultyStore, job: Job
    ) -> None:
        hand, before = contexts(store), job.state
        hand.create(before)

        def refuse() -> None:
            raise ValueError("it is no key")

        store.interfere = refuse
        with pytest.raises(ValueError, match="it is no key"):
            hand.commit_version("weights", 7)
        store.interfere = lambda: None
        after = job.exits("actor", 0).state
        hand.write(after)
        assert load(store, RUN) == kept(after)
        assert hand.version("weights") is None


class TestAMasterWhoseTermIsOver:
    def test_a_deposed_master_writes_no_more(self, store: FaultyStore, job: Job) -> None:
        first, before = contexts(store), job.state
        first.create(before)
        second = contexts(store, deposing=1)
        after = job.exits("actor", 0).state
        with pytest.raises(Fenced, match="the term 1 of job job-1 is over"):
            first.write(after)
        with pytest.raises(Fenced):
            first.write(replace(before, asked_to_stop=True))
        assert load(store, RUN) == kept(before)
        second.write(after)

    @pytest.mark.parametrize("faults", [["lost", "lost"], ["away"]])
    def test_a_deposed_master_learns_it_though_its_write_was_on_the_way(
        self, store: FaultyStore, job: Job, faults: list[Fault]
    ) -> None:
        first, before = contexts(store), job.state
        first.create(before)
        store.faults.extend(faults)
        after = job.exits("actor", 0).state
        with pytest.raises(StoreError):
            first.write(after)
        second = contexts(store, deposing=1)
        with pytest.raises(Fenced):
            until_done(lambda: first.write(after))
        assert load(store, RUN) == kept(before)
        second.write(after)

    def test_a_deposed_master_whose_write_was_done_before_has_done_it_and_writes_no_more(
        self, store: FaultyStore, job: Job
    ) -> None:
        first, before = contexts(store), job.state
        first.create(before)
        after = job.exits("actor", 0).state
        store.faults.append("done")
        store.reads.extend([None, "away"])
        with pytest.raises(StoreAway):
            first.write(after)
        term(store, deposing=1)
        with pytest.raises(Fenced):
            until_done(lambda: first.write(after))
        assert load(store, RUN) == kept(after), "the next master has found it"

    def test_a_deposed_master_of_which_a_write_arrives_late_has_written_nothing(
        self, store: FaultyStore, job: Job
    ) -> None:
        """One that was given up, and made again."""
        hand, before = contexts(store), job.state
        hand.create(before)
        after = job.exits("actor", 0).state
        late = [Put("jobs/job-1/context/state", "late")]
        head = store.get("jobs/job-1/head")
        assert head is not None
        hand.write(after)
        assert not store.txn([ValueIs(head.key, head.value)], late).succeeded
        assert load(store, RUN) == kept(after)


@pytest.mark.parametrize("head", ["", "[]", "7", "[1, 2]", "[1, 1]"])
def test_a_context_of_somebody_else_is_refused(store: FaultyStore, head: str) -> None:
    name = "jobs/job-1/context/state"
    store.txn([], [Put(name, head), Put(f"{name}/1/0", "no context")])
    with pytest.raises(StoreRefused):
        load(store, RUN)
