"""Lost ranks and changes of the number of ranks, in histories: each sample of an epoch is used once.

A history is what the job has trained on as far as it counts: what came after the last checkpoint is lost with a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.train.data.datasets import NumberStream, as_processes, in_files, numbers, stored
from unirun.train.data import Consumed
from unirun.train.data.loader import Shard

LENGTHS = (3, 0, 1, 4, 0, 0, 2, 5, 0)


class Histories(RuleBasedStateMachine):
    """Ranks take items or batches, not always equally many; checkpoints are stored; the job begins anew from the last."""

    kind = "indexed"

    def __init__(self) -> None:
        super().__init__()
        self.saved = Consumed()
        self.kept: list[tuple[int, int]] = []
        self.history: list[tuple[int, int]] = []

    @initialize(
        size=st.integers(0, 24),
        batch=st.integers(0, 4),
        workers=st.integers(0, 3),
        shuffle=st.booleans(),
        block=st.integers(1, 8),
        world=st.integers(1, 5),
    )
    def begin(self, size: int, batch: int, workers: int, shuffle: bool, block: int, world: int) -> None:
        self.dataset: Any = self.dataset_of(size)
        self.samples = sum(LENGTHS) if self.kind == "files" else size
        self.batch, self.block = batch, block
        self.workers = workers if self.kind != "indexed" else 0
        self.shuffle = shuffle and self.kind != "streamed"
        self.lose(world)

    def dataset_of(self, size: int) -> Any:
        if self.kind == "files":
            return in_files(LENGTHS, "histories")
        return NumberStream(size) if self.kind == "streamed" else [*range(size)]

    @rule(world=st.integers(1, 5))
    def lose(self, world: int) -> None:
        """A rank is lost: any number of ranks go on from the last checkpoint."""
        self.history = [*self.kept]
        self.shards = [
            Shard(
                "train",
                self.dataset,
                rank,
                world,
                shuffle=self.shuffle,
                seed=3,
                block=self.block,
                consumed=self.saved,
            )
            for rank in range(world)
        ]
        self.loops = [self.loop(shard) for shard in self.shards]
        self.ended = [False] * world

    def loop(self, shard: Shard) -> Iterator[Any]:
        if self.workers and self.batch:
            return as_processes(shard, self.workers, self.batch)
        of = shard.to_torch(self.batch) if self.batch else shard
        return self.promised(of) if self.kind == "indexed" else iter(of)

    def promised(self, of: Any) -> Iterator[Any]:
        """A loop that has as many items or batches as its length says, at its beginning and while it goes on."""
        length, found = len(of), 0
        for got in of:
            assert len(of) == length
            found += 1
            yield got
        assert found == length

    @rule(steps=st.integers(1, 3))
    def go_on_in_step(self, steps: int) -> None:
        for _ in range(steps):
            for rank in range(len(self.shards)):
                self.take(rank)

    @rule(rank=st.integers(0, 4), steps=st.integers(1, 4))
    def go_on_alone(self, rank: int, steps: int) -> None:
        for _ in range(steps):
            self.take(rank % len(self.shards))

    def take(self, rank: int) -> None:
        shard = self.shards[rank]
        got = next(self.loops[rank], None)
        self.ended[rank] = got is None
        if got is not None:
            self.history += [(shard.progress.epoch, number) for number in numbers(got)]

    @precondition(lambda self: all(self.ended))
    @rule()
    def begin_the_next_epoch(self) -> None:
        epoch = self.shards[0].progress.epoch
        assert sorted(number for at, number in self.history if at == epoch) == [*range(self.samples)]
        self.loops = [self.loop(shard) for shard in self.shards]
        self.ended = [False] * len(self.shards)

    @rule(rank=st.integers(0, 4))
    def leave_a_loop_and_begin_it_again(self, rank: int) -> None:
        rank %= len(self.shards)
        if not self.ended[rank]:
            self.loops[rank] = self.loop(self.shards[rank])
            self.take(rank)

    @rule()
    def checkpoint(self) -> None:
        self.saved, self.kept = stored(self.shards), [*self.history]

    @rule(world=st.integers(1, 5))
    def change_the_number_of_ranks(self, world: int) -> None:
        self.checkpoint()
        self.lose(world)

    @invariant()
    def no_sample_is_used_twice_in_an_epoch(self) -> None:
        assert len({*self.history}) == len(self.history)


class Streamed(Histories):
    kind = "streamed"


class InFiles(Histories):
    kind = "files"


TestIndexed, TestStreamed, TestInFiles = Histories.TestCase, Streamed.TestCase, InFiles.TestCase
TestIndexed.settings = TestStreamed.settings = TestInFiles.settings = settings(stateful_step_count=25)


@given(
    size=st.integers(0, 30),
    batch=st.integers(1, 5),
    shuffle=st.booleans(),
    changes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), max_size=12),
)
def test_a_new_number_of_ranks_after_any_step_leaves_as_few_steps_as_possible(
    size: int, batch: int, shuffle: bool, changes: list[tuple[int, int]]
) -> None:
    """Each change is a number of ranks, and a number of steps that they take together."""
    consumed, seen = Consumed(), list[int]()
    for world, steps in [*changes, (2, size + 1)]:
        shards = [
            Shard("train", range(size), rank, world, shuffle=shuffle, consumed=consumed)
            for rank in range(world)
        ]
        loaders = [shard.to_torch(batch) for shard in shards]
        left = size - len(seen)
        assert len(loaders[0]) == -(-left // (world * batch))
        for loader in loaders:
            for _, got in zip(range(min(steps, len(loader))), loader, strict=False):
                seen += numbers(got)
        consumed = stored(shards)
        assert consumed == Consumed(samples=len(seen))
    assert sorted(seen) == [*range(size)]
