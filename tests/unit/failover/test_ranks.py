"""The workers of a role: a sequence that counts them, and tells what has changed in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from unirun.failover.state import BLOCK, Exit, Ranks, WorkerPhase, WorkerState

PHASES = (WorkerPhase.STARTING, WorkerPhase.RUNNING, WorkerPhase.EXITED)


def many(count: int) -> tuple[WorkerState, ...]:
    return tuple(WorkerState(rank, "n0") for rank in range(count))


def counted(workers: Iterable[WorkerState]) -> Counter[object]:
    return Counter(worker.count_key for worker in workers)


@given(
    st.integers(1, 3 * BLOCK),
    st.lists(st.tuples(st.integers(0, 3 * BLOCK), st.sampled_from(PHASES), st.integers(0, 2)), max_size=20),
)
def test_a_changed_copy_is_what_a_changed_tuple_is_and_is_counted_as_one(
    size: int, news: list[tuple[int, WorkerPhase, int]]
) -> None:
    plain = list(many(size))
    first = ranks = Ranks(plain)
    for rank, phase, generation in news:
        end = Exit(code=generation) if phase is WorkerPhase.EXITED else None
        plain[rank % size] = replace(plain[rank % size], phase=phase, generation=generation, exit=end)
        ranks = ranks.with_one(rank % size, plain[rank % size])
        assert tuple(ranks) == tuple(plain)
        assert ranks == Ranks(plain)
        assert ranks.counts == counted(plain)
    assert tuple(first) == many(size), "a changed copy has changed what it was made of"
    changed = {now.rank: (was, now) for was, now in ranks.since(first)}
    assert changed == {n: (first[n], now) for n, now in enumerate(plain) if now is not first[n]}


@given(st.integers(0, 2 * BLOCK + 1), st.slices(2 * BLOCK + 1))
def test_it_is_read_as_a_tuple_is(size: int, part: slice) -> None:
    plain, ranks = many(size), Ranks(many(size))
    assert len(ranks) == size
    assert repr(ranks) == f"Ranks({plain})"
    assert ranks[part] == plain[part]
    assert [ranks[n] for n in range(-size, size)] == [plain[n] for n in range(-size, size)]
    for beyond in (size, -size - 1):
        with pytest.raises(IndexError):
            ranks[beyond]


def test_workers_that_were_not_there_before_are_told_as_new_and_those_that_are_gone_are_not_told() -> None:
    few, more = Ranks(many(BLOCK - 1)), Ranks(many(BLOCK + 2))
    assert list(Ranks().since(more)) == []
    assert [now.rank for was, now in more.since(few) if was is None] == [BLOCK - 1, BLOCK, BLOCK + 1]
