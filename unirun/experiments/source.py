"""`TrajectorySource`: the trajectories of the steps of an asynchronous trial, as the master knows them."""

from __future__ import annotations

from typing import Any

from unirun.experiments.buffer import BUFFER_RANK, TakenFile, TakeOrder, staleness
from unirun.experiments.config import GserverManager
from unirun.roles import wait

LOOK_INTERVAL = 1.0
"""Seconds in which a master that waits for trajectories hears at the latest whether there are more."""


class TrajectorySource:
    """Says which trajectories a step trains on: those that were accepted first. Makes versions of the weights known, so
    that others are made. One is for one attempt; it goes on after what was written in `file` before."""

    def __init__(self, group: Any, attempt: int, file: TakenFile, manager: GserverManager, step: int) -> None:
        """Find the trajectories that were accepted, and which step has taken which. So many steps are done. Have the
        worker with the buffer take more."""
        self._group, self._attempt, self._file = group, attempt, file
        self._count, self._eta = manager.train_batch_size, manager.max_head_offpolicyness
        self._order, self._ages = TakeOrder.of(file.read()), dict[str, int]()
        self._next, self._counts = 0, (0, 0)
        self._looking: tuple[int, Any] | None = None
        self.look()
        self._counted = self._counts
        # Versions up to this one may have been seen.
        self._begun = self._written = max(step, self._order.begun)
        old = [each for taken in self._order.taken.values() for each in taken.old]
        self._keeper.release.call(attempt, old, dropped=True)
        # The last step that was begun may not have been trained.
        version = max(step, self._begun - 1)
        kept = len(self._order.waiting) + (self._begun - version) * self._count
        self._keeper.receive.call(attempt, version, kept)
        if len({*group.published.call(attempt)}) > 1:
            # A worker was started again, or lost before it had published what others have. The steps that are made
            # again need not give the same weights to the bit, and a version is of one state.
            group.withdraw.call(attempt)
        self.publish(step)

    @property
    def _keeper(self) -> Any:
        """The worker that has the buffer."""
        return self._group[BUFFER_RANK]

    @property
    def waiting(self) -> int:
        """The number of trajectories that no step has taken."""
        return len(self._order.waiting)

    @property
    def news(self) -> Any:
        """A call that ends when there are more trajectories, or after a moment; `look` takes its result."""
        if self._looking is None:
            ref = self._keeper.accepted.call_async(self._attempt, self._next, LOOK_INTERVAL)
            self._looking = self._next, ref
        return self._looking[1]

    def look(self) -> bool:
        """Learn which trajectories have come. Returns True if some have."""
        if self._looking is not None and self._looking[1].done():
            number, ref = self._looking
            self._looking = None
        else:
            number, ref = self._next, self._keeper.accepted.call_async(self._attempt, self._next, 0.0)
        found = ref.result()
        if number != self._next:
            # Another call was faster. The next one tells what has come since then.
            return False
        self._next, some, self._counts = found
        self._order = self._order.arrived((meta.ids[0], version) for version, meta in some)
        self._ages |= {meta.ids[0]: version for version, meta in some}
        return bool(some)

    def wait(self) -> bool:
        """Wait for more trajectories, but not for long. Returns True if some have come."""
        wait([self.news])
        return self.look()

    def ids(self, step: int) -> tuple[str, ...] | None:
        """The trajectories of a step, which are those that it has taken before; None while there are too few."""
        self._order, taken = self._order.take(step, self._count, self._eta)
        return taken.ids if taken is not None else None

    def begin(self, step: int, waited: float) -> dict[str, float]:
        """The steps before this one have ended: write down what it takes, before it changes anything. Returns figures;
        training has waited so many seconds for it."""
        taken = self._order.taken[step]
        if step >= self._written:
            self._file.write(taken)
            self._written = step + 1
            if taken.old:
                self._keeper.release.call(self._attempt, taken.old, dropped=True)
        self.look()
        ages = staleness(taken, self._ages)
        accepted, rejected = (now - before for now, before in zip(self._counts, self._counted, strict=True))
        self._counted = self._counts
        return {
            "trajectories/waited": waited,
            "trajectories/waiting": float(self.waiting),
            "trajectories/accepted": float(accepted),
            "trajectories/rejected": float(rejected),
            "trajectories/too_old": float(len(taken.old)),
            # All ages: `unirun status` shows the last figure of each name.
            **{f"trajectories/staleness_{age}": float(ages.get(age, 0)) for age in range(self._eta + 1)},
        }

    def publish(self, step: int) -> None:
        """Publish the weights after so many steps, unless they are those of a step that is made again, after which
        others were seen. What all workers have published stays."""
        if step >= self._begun:
            self._group.publish.call(self._attempt, step)

    def release(self, step: int) -> None:
        """Drop the trajectories of the steps before this one, as no checkpoint goes back to them."""
        self._order, ids = self._order.released(step)
        for each in ids:
            self._ages.pop(each, None)
        if ids:
            self._keeper.release.call(self._attempt, ids, dropped=False)
            # Only now: those that the buffer has, and no step has taken, wait for one.
            self._file.cut(step)
