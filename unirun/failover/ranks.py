"""The workers of a role as a frozen sequence, of which a changed copy is cheap.

A role may have ten thousand ranks, and each of them tells several things while the job starts. A tuple would be copied
as a whole each time, and counted as a whole to see how far the role is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from operator import is_not
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from unirun.failover.state import Standing, WorkerState

T = TypeVar("T")

BLOCK = 100
"""Workers in one block: to replace one worker copies its block and the tuple of blocks."""


class Ranks(Sequence["WorkerState"]):
    """Workers in rank order. `standings` has how many of them have each `WorkerState.standing`."""

    __slots__ = ("_blocks", "_size", "standings")

    def __init__(self, workers: Iterable[WorkerState] = ()) -> None:
        every = tuple(workers)
        self._size = len(every)
        self._blocks = tuple(every[at : at + BLOCK] for at in range(0, len(every), BLOCK))
        self.standings: Mapping[Standing, int] = Counter(worker.standing for worker in every)

    def with_one(self, rank: int, worker: WorkerState) -> Ranks:
        """The same with another worker at `rank`."""
        at, within = divmod(rank, BLOCK)
        block = self._blocks[at]
        before, after = block[within].standing, worker.standing
        changed = Ranks.__new__(Ranks)
        changed._size = self._size
        changed._blocks = (
            *self._blocks[:at],
            (*block[:within], worker, *block[within + 1 :]),
            *self._blocks[at + 1 :],
        )
        changed.standings = self.standings
        if before != after:
            counts = dict(self.standings)
            counts[after] = counts.get(after, 0) + 1
            counts[before] -= 1
            if not counts[before]:
                del counts[before]
            changed.standings = counts
        return changed

    def since(self, before: Ranks) -> Iterator[tuple[WorkerState | None, WorkerState]]:
        """Each worker that differs from the one in `before`, with that one, None if there was none."""
        for old, new in _that_differ(before._blocks, self._blocks):
            yield from _that_differ(old or (), new)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[WorkerState]:
        return chain.from_iterable(self._blocks)

    @overload
    def __getitem__(self, rank: int) -> WorkerState: ...

    @overload
    def __getitem__(self, rank: slice) -> tuple[WorkerState, ...]: ...

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return tuple(self[at] for at in range(*rank.indices(self._size)))
        if not -self._size <= rank < self._size:
            raise IndexError(f"there is no rank {rank} among {self._size}")
        at, within = divmod(rank % self._size, BLOCK)
        return self._blocks[at][within]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranks) and self._blocks == other._blocks

    def __hash__(self) -> int:
        return hash(self._blocks)

    def __repr__(self) -> str:
        return f"Ranks({tuple(self)})"


def _that_differ(before: Sequence[T], after: Sequence[T]) -> Iterator[tuple[T | None, T]]:
    """Each item of `after` that is another object than the one in its place in `before`, with that one."""
    yield from compress(zip(before, after, strict=False), map(is_not, before, after))
    for more in after[len(before) :]:
        yield None, more
