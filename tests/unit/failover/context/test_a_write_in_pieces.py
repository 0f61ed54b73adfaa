"""A write that is too large for one transaction is seen whole or not at all, wherever its master dies."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.unit.failover.context.context_stores import RUN, contexts
from tests.unit.failover.context.faulty_store import Fault, FaultyStore
from tests.unit.failover.context.states import kept, many
from unirun.errors import StoreError
from unirun.failover import context as store_module
from unirun.failover.context import encode, load
from unirun.failover.state import JobState, Ranks, WorkerPhase
from unirun.wire.reports import Join


class Died(Exception):
    """The master, in mid-write."""


class TestAWriteInPieces:
    """A change that is too large for one transaction is written as a whole or not at all, whenever the master dies."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_module, "MAX_BYTES", 300)

    @pytest.fixture
    def states(self) -> tuple[JobState, JobState]:
        """A state and the next one, which takes another number of pieces."""
        before = many(200, 30)
        role = before.roles["role0"]
        workers = Ranks(replace(worker, phase=WorkerPhase.STARTING) for worker in role.workers)
        agents = {node: Join(node, 1, node, {"role0": "10.0.0.1:1"}) for node in before.placement.nodes}
        after = replace(before, agents=agents, asked_to_stop=True)
        return before, after.with_role(replace(role, workers=workers))

    def test_a_write_in_pieces_is_one_for_who_reads(
        self, store: FaultyStore, states: tuple[JobState, JobState]
    ) -> None:
        before, after = states
        hand = contexts(store)
        hand.create(before)
        seen: list[JobState | None] = []
        store.interfere = lambda: seen.append(load(store, RUN))
        hand.write(after)
        assert len(seen) > 4
        assert seen == [kept(before)] * len(seen)
        assert load(store, RUN) == kept(after)
        assert len(names(store)) == 1 + len(seen), "nothing is left over"

    def test_a_write_in_pieces_is_done_or_not_when_the_master_dies_at_any_moment(
        self, states: tuple[JobState, JobState]
    ) -> None:
        before, after = states
        outcomes = []
        for last in itertools.count():
            store = FaultyStore()
            first = contexts(store)
            first.create(before)
            if not dies_after(store, last, lambda first=first: first.write(after)):  # type: ignore[misc]
                break
            store.interfere = lambda: None
            found = load(store, RUN)
            assert found in (kept(before), kept(after))
            outcomes.append(found == kept(after))
            contexts(store, deposing=1).write(before)
            assert load(store, RUN) == kept(before)
        assert outcomes == sorted(outcomes), "once it is there it stays"
        assert outcomes.count(False) > 4

    def test_a_write_in_pieces_that_a_master_has_left_is_gone_with_the_next_but_one(
        self, store: FaultyStore, states: tuple[JobState, JobState]
    ) -> None:
        before, after = states
        first = contexts(store)
        first.create(before)
        assert dies_after(store, 4, lambda: first.write(after))
        store.interfere = lambda: None
        second = contexts(store, deposing=1)
        short = replace(before, asked_to_stop=True)
        for state in (short, before, short):
            second.write(state)
            assert load(store, RUN) == kept(state)
        assert len(names(store)) == 1 + len(store_module._pieces(encode(short)))

    @pytest.mark.parametrize("fault", ["away", "lost", "done"])
    def test_a_write_in_pieces_that_failed_anywhere_is_not_mixed_with_another(
        self, states: tuple[JobState, JobState], fault: Fault
    ) -> None:
        before, after = states
        last = replace(after, asked_to_stop=False)
        failed = 0
        for count in range(20):
            store = FaultyStore()
            hand = contexts(store)
            hand.create(before)
            store.faults.extend([*[None] * count, fault])
            store.reads.extend([None, "away"])
            try:
                hand.write(after)
            except StoreError:
                failed += 1
            store.faults.clear()
            store.reads.clear()
            seen: list[JobState | None] = []
            store.interfere = lambda store=store, seen=seen: seen.append(load(store, RUN))  # type: ignore[misc]
            hand.write(last)
            assert all(state in (kept(before), kept(after)) for state in seen)
            assert load(store, RUN) == kept(last)
        assert failed > 4


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
