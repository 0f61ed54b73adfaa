"""A write that is too large for one transaction is seen whole or not at all, wherever its master dies."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.unit.failover.persistence.context_stores import RUN, contexts
from tests.unit.failover.persistence.documents import kept, many
from tests.unit.failover.persistence.faulty_store import FaultyStore
from unirun.errors import StoreAway
from unirun.failover.persistence import context as context_module
from unirun.failover.persistence import context_store as store_module
from unirun.failover.persistence.context import changed_documents
from unirun.failover.persistence.context_store import load
from unirun.failover.state import Exit, Failure, JobState, Ranks, WorkerPhase
from unirun.values import WorkerId
from unirun.wire.reports import Join


class Died(Exception):
    """The master, in mid-write."""


class TestAWriteInPieces:
    """A change that is too large for one transaction is written as a whole or not at all, whenever the master dies."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_module, "MAX_OPERATIONS", 2)
        for name in ("_NODES", "BLOCK"):
            monkeypatch.setattr(context_module, name, getattr(context_module, name) // 10)

    @pytest.fixture
    def states(self) -> tuple[JobState, JobState]:
        """A state and the next one, which differs in many documents, of which some go away."""
        before = many(200, 30)
        for number in range(30):
            before = before.with_failures(
                Failure(WorkerId("role0", number, 0), 0, "n", float(number), Exit(code=1))
            )
        role = before.roles["role0"]
        workers = Ranks(replace(worker, phase=WorkerPhase.STARTING) for worker in role.workers)
        agents = {node: Join(node, 1, node, {"role0": "10.0.0.1:1"}) for node in before.placement.nodes}
        after = replace(before, agents=agents, asked_to_stop=True, failures=(), forgotten=30)
        return before, after.with_role(replace(role, workers=workers))

    def test_a_write_in_pieces_is_one_for_who_reads(
        self, store: FaultyStore, states: tuple[JobState, JobState]
    ) -> None:
        before, after = states
        hand = contexts(store)
        hand.create(before)
        seen: list[JobState | None] = []
        store.interfere = lambda: seen.append(load(store, RUN))
        hand.write(before, after)
        assert len(seen) > 8
        turn = seen.index(kept(after))
        assert seen == [seen[0]] * turn + [seen[turn]] * (len(seen) - turn)
        assert seen[0] == kept(before)
        assert load(store, RUN) == kept(after)
        assert set(names(store)) == {f"context/{name}" for name in changed_documents(None, after)}, (
            "nothing is left over"
        )

    def test_a_write_in_pieces_is_done_or_not_when_the_master_dies_at_any_moment(
        self, states: tuple[JobState, JobState]
    ) -> None:
        before, after = states
        outcomes = []
        for last in itertools.count():
            store = FaultyStore()
            first = contexts(store)
            first.create(before)
            if not dies_after(store, last, lambda first=first: first.write(before, after)):  # type: ignore[misc]
                break
            store.interfere = lambda: None
            found = contexts(store, deposing=1).take_over()
            assert found in (kept(before), kept(after))
            outcomes.append(found == kept(after))
            assert load(store, RUN) == found
            assert not [name for name in names(store) if "staged" in name or "committed" in name]
        assert outcomes == sorted(outcomes), "once it is there it stays"
        assert outcomes.count(True) > 4 < outcomes.count(False)

    def test_a_write_in_pieces_that_is_taken_over_may_be_so_again_and_again(
        self, store: FaultyStore, states: tuple[JobState, JobState]
    ) -> None:
        before, after = states
        first = contexts(store)
        first.create(before)
        commit = next(n for n in itertools.count() if commits(states, n))
        assert dies_after(store, commit, lambda: first.write(before, after))
        for term in itertools.count(1):
            store.interfere = lambda: None
            second = contexts(store, deposing=term)
            if not dies_after(store, 1, second.take_over):
                break
            assert load(store, RUN) == kept(after)
        assert term > 3
        assert load(store, RUN) == kept(after)

    def test_a_write_in_pieces_that_failed_is_finished_before_another(
        self, store: FaultyStore, states: tuple[JobState, JobState]
    ) -> None:
        """Else what was committed would hide what is written later."""
        before, after = states
        hand = contexts(store)
        hand.create(before)
        commit = next(n for n in itertools.count() if commits(states, n))
        store.faults.extend([*[None] * commit, "away"])
        with pytest.raises(StoreAway):
            hand.write(before, after)
        hand.write(before, before)
        assert load(store, RUN) == kept(after)
        last = replace(after, asked_to_stop=False)
        hand.write(after, last)
        assert load(store, RUN) == kept(last)


def names(store: FaultyStore) -> list[str]:
    prefix = f"jobs/{RUN}/"
    return [item.key.removeprefix(prefix) for item in store.get_prefix(f"{prefix}context/").items]


def dies_after(store: FaultyStore, last: int, do: Callable[[], object]) -> bool:
    """Return True if `do` makes more than `last` transactions: there it ends."""
    left = last

    def count() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Died

    store.interfere = count
    try:
        do()
    except Died:
        return True
    return False


def commits(states: tuple[JobState, JobState], count: int) -> bool:
    """Return True if a write is there after so many transactions."""
    before, after = states
    store = FaultyStore()
    hand = contexts(store)
    hand.create(before)
    dies_after(store, count, lambda: hand.write(before, after))
    return load(store, RUN) == kept(after)
