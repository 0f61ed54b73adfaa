"""`Attempts`: the functions that one trainer calls in its workers, one after the other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unirun.errors import EncodingError, InvocationTimeout, TrainingFailed, UnirunError, WorkerLost
from unirun.roles import InvocationRef, RoleGroup, wait
from unirun.train.arguments import name_of
from unirun.train.losses import LostWorker, Repeats, is_loss
from unirun.train.unsendable import unsendable
from unirun.train.worker import Attempt, Program
from unirun.train.workers import Workers
from unirun.wire.reporting import report

RECOVERY_TIMEOUT = 120.0
"""Seconds in which lost workers must be back."""

INTERRUPT_POLL_INTERVAL = 0.5
"""Seconds between two looks whether this thread was interrupted."""

UNWIND_TIMEOUT = 10.0
"""Seconds in which a function that was interrupted must have ended, before its process is killed."""


class Attempts:
    """An attempt is one call of a function in the workers: of a run's, or of `execute`'s."""

    def __init__(self, workers: Workers, now: Callable[[], float] = time.monotonic) -> None:
        self.workers, self._now = workers, now
        self._last = self._generation = self._spoilt = 0
        self._open: dict[int, tuple[Attempt, InvocationRef[Any]]] = {}
        self._ending = threading.Lock()
        self._hook: Program | None = None
        self._kind: Program | None = None
        self._prepared: dict[int, int] = {}
        self._called: tuple[int, ...] = ()

    def prepare_with(self, hook: Program | None, kind: Program | None) -> None:
        """Call `hook` in each process, also in one that comes in the place of another, and make the object ``kind()``
        in each rank, again in all of them when one has come in the place of another."""
        self._hook, self._kind, self._prepared = hook, kind, {}

    def ready(self, *, idle: bool = True) -> RoleGroup:
        """All workers, prepared; if `idle`, once nothing runs in them. What was interrupted and does not end is killed.

        Raises `TrainingFailed`, `WorkerLost`, `InvocationTimeout`, and what the hook and the class raise.
        """
        deadline, repeats = self._now() + RECOVERY_TIMEOUT, Repeats()
        while left := self._running():
            if not idle:
                break
            # They were not interrupted, so they have their time.
            wait(left, timeout=INTERRUPT_POLL_INTERVAL)
        while True:
            self.workers.wait_until_whole(RECOVERY_TIMEOUT)
            group, self._called = self.workers.group, self.workers.incarnations
            try:
                # Losses until now are told here: they are none of what begins.
                (group.idle if idle else group.describe).options(timeout=UNWIND_TIMEOUT).call()
                repeats = self._prepared_after(group, repeats, deadline)
                if not repeats.failure:
                    return group
            except WorkerLost:
                if self._now() >= deadline:
                    raise
            except InvocationTimeout as error:
                if self._now() >= deadline:
                    raise
                for who in error.missing if idle else ():
                    report(f"unirun: {who} does not end what it runs, and is killed")
                    group[int(who.rpartition(":")[2])].kill.call_async()

    def _prepared_after(self, group: RoleGroup, repeats: Repeats, deadline: float) -> Repeats:
        """Prepare the workers. Returns `repeats` with one more failure when a worker was lost, else without any. Raises
        `TrainingFailed` when they would be lost each time, and after the deadline."""
        try:
            self._prepare(group)
        except WorkerLost as error:
            if not is_loss(error):
                raise
            loss = self.loss(error)
            repeats = repeats.after(loss.kind, progress=False)
            if repeats.hopeless or self._now() >= deadline:
                parts = (("the initialization hook", self._hook), ("the class", self._kind))
                what = " or ".join(f"{name} {name_of(each)}" for name, each in parts if each is not None)
                raise TrainingFailed(
                    f"{loss}, {repeats.count} times in a row, in {what}",
                    f"see unirun logs {self.workers.name} for its output",
                ) from error
            return repeats
        return Repeats()

    def loss(self, error: WorkerLost) -> LostWorker:
        """The end of the worker that was called and lost."""
        return self.workers.loss(error, self._called)

    def _prepare(self, group: RoleGroup) -> None:
        """Call the hook and make the object, where that has not been done."""
        incarnations = dict(enumerate(self.workers.incarnations))
        fresh = [rank for rank, each in incarnations.items() if self._prepared.get(rank) != each]
        if fresh and (self._hook is not None or self._kind is not None):
            turn = self.next()
            # All ranks make the object, as its constructor may need the others.
            together = self._kind is not None or len(fresh) == len(incarnations)
            called = [group] if together else [group[rank] for rank in fresh]
            self._finish(
                turn,
                [
                    each.prepare.call_async(turn, self._hook, self._kind, fresh, alone=not together)
                    for each in called
                ],
            )
        self._prepared = incarnations

    def next(self) -> Attempt:
        """Another attempt."""
        generation = self.workers.generation
        if generation != self._generation:
            self._generation, self._spoilt = generation, 0
        self._last += 1
        return Attempt(self._last, generation, self._spoilt)

    def end(self, turn: Attempt, reason: str) -> None:
        """Interrupt what still runs of an attempt that has failed, and do not wait for it."""
        with self._ending:
            self._spoilt += 1
        if not self.workers.lives:
            return
        # There may be fewer ranks than the attempt had.
        for worker in self.workers.group:
            worker.interrupt.call_async(turn.attempt, reason)

    def execute(self, function: Program, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call a function in all ranks. It is interrupted in the others when one fails, and by Ctrl-C."""
        group, turn = self.ready(idle=False), self.next()
        (results,) = self._told(turn, [_called(group, turn, function, args, kwargs)])
        return list(results)

    def execute_single(
        self, rank: int, function: Program, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a function in one rank."""
        worker, turn = self.ready(idle=False)[rank], self.next()
        return self._told(turn, [_called(worker, turn, function, args, kwargs, alone=True)])[0]

    def execute_async(
        self, function: Program, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> InvocationRef[list[Any]]:
        """Call a function in all ranks, and do not wait for it."""
        group, turn = self.ready(idle=False), self.next()
        ref = _called(group, turn, function, args, kwargs)
        self._open[turn.attempt] = turn, ref
        ref.add_done_callback(lambda ref: self._over(turn, ref))
        return ref

    def _over(self, turn: Attempt, ref: InvocationRef[Any]) -> None:
        """Handle the end of a call of `execute_async`, which its callback and `_running` may both find, once."""
        with self._ending:
            known = self._open.pop(turn.attempt, None)
        error = ref.exception()
        if known is not None and error is not None:
            # The workers may have ended.
            with contextlib.suppress(UnirunError):
                self.end(turn, f"another rank has failed: {type(error).__name__}")

    def _running(self) -> list[InvocationRef[Any]]:
        """The calls of `execute_async` that are not over."""
        for turn, ref in [*self._open.values()]:
            if ref.done():
                self._over(turn, ref)
        return [ref for _, ref in self._open.values()]

    def _told(self, turn: Attempt, refs: Sequence[InvocationRef[Any]]) -> list[Any]:
        """Finish as `_finish` does; the error of a lost worker says how its process ended."""
        try:
            return self._finish(turn, refs)
        except WorkerLost as error:
            if not is_loss(error):
                raise
            raise WorkerLost(
                str(self.loss(error)), f"see unirun logs {self.workers.name}", worker=error.worker
            ) from error

    def _finish(self, turn: Attempt, refs: Sequence[InvocationRef[Any]]) -> list[Any]:
        """The results of all of `refs`, or the first error. Ctrl-C ends this also when another thread has received the
        signal."""
        left = [*refs]
        try:
            while left:
                done, left = wait(left, timeout=INTERRUPT_POLL_INTERVAL)
                for ref in done:
                    ref.result()
        except BaseException as error:
            self.end(turn, f"the call has ended: {type(error).__name__}")
            raise
        return [ref.result() for ref in refs]


def _called(
    workers: Any,
    turn: Attempt,
    function: Program,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    alone: bool = False,
) -> InvocationRef[Any]:
    """Begin to call a function in workers. Raises `EncodingError`, which names what cannot be sent."""
    try:
        ref: InvocationRef[Any] = workers.execute.call_async(turn, function, args, kwargs, alone=alone)
    except EncodingError as error:
        named = {f"the function {name_of(function)}": function, "args": args, "kwargs": kwargs}
        raise unsendable(named, error) from error
    return ref
