"""`TrainingIterator`: one run of a function on the workers, as the driver follows it; `Attempts` to call one.

An attempt is one call of the function in all ranks. When a worker is lost, or the number of ranks changes, the next
attempt goes on from the last checkpoint. Reports are taken one round after the other (`lockstep`); a checkpoint that
belongs to a round is committed before the round is handed out.
"""

from __future__ import annotations

import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from unirun.errors import (
    CheckpointDamaged,
    EncodingError,
    InvocationTimeout,
    TrainingFailed,
    UnirunError,
    UsageError,
    WorkerLost,
)
from unirun.roles import InvocationRef, RoleGroup, wait
from unirun.roles.calls.sending import named_arguments, unsendable
from unirun.train.arguments import hold, mark_finished, name_of, release
from unirun.train.callbacks import Callbacks
from unirun.train.callbacks.base import numbers
from unirun.train.checkpoints import Info, skipped
from unirun.train.lockstep import Lockstep, Round
from unirun.train.losses import Repeats, is_loss, kind_of
from unirun.train.task import Attempt, Program, Result, RunTask
from unirun.train.workers import Workers
from unirun.wire.reporting import folded, report

# `Attempts`: the functions that one trainer calls in its workers, one after the other.

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
        while left := self._running():
            if not idle:
                break
            # They were not interrupted, so they have their time.
            wait(left, timeout=INTERRUPT_POLL_INTERVAL)
        deadline, repeats = self._now() + RECOVERY_TIMEOUT, Repeats()
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
            repeats = repeats.after(kind_of(loss), progress=False)
            if repeats.hopeless or self._now() >= deadline:
                parts = (("the initialization hook", self._hook), ("the class", self._kind))
                what = " or ".join(f"{name} {name_of(each)}" for name, each in parts if each is not None)
                raise TrainingFailed(
                    f"{loss}, {repeats.count} times in a row, in {what}",
                    f"see unirun logs {self.workers.name} for its output",
                ) from error
            return repeats
        return Repeats()

    def loss(self, error: WorkerLost) -> str:
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
            try:
                self._finish(
                    turn,
                    lambda: [
                        each.prepare.call_async(turn, self._hook, self._kind, fresh, alone=not together)
                        for each in called
                    ],
                )
            except EncodingError as error:
                named = {"the initialization hook": self._hook, "the class": self._kind}
                raise unsendable(named, error) from None
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
        (results,) = self._told(turn, lambda: [_called(group, turn, function, args, kwargs)])
        return list(results)

    def execute_single(
        self, rank: int, function: Program, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a function in one rank."""
        worker, turn = self.ready(idle=False)[rank], self.next()
        return self._told(turn, lambda: [_called(worker, turn, function, args, kwargs, alone=True)])[0]

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

    def _told(self, turn: Attempt, begin: Callable[[], Sequence[InvocationRef[Any]]]) -> list[Any]:
        """Finish as `_finish` does; the error of a lost worker says how its process ended."""
        try:
            return self._finish(turn, begin)
        except WorkerLost as error:
            if not is_loss(error):
                raise
            raise WorkerLost(
                self.loss(error), f"see unirun logs {self.workers.name}", worker=error.worker
            ) from error
        except Exception as error:  # noqa: BLE001 - the same is raised
            raise folded(error)  # noqa: B904

    def _finish(self, turn: Attempt, begin: Callable[[], Sequence[InvocationRef[Any]]]) -> list[Any]:
        """Begin calls, and return the results of all, or raise the first error. Ctrl-C ends them also when another
        thread has received the signal, and when it comes before `begin` has returned."""
        refs: Sequence[InvocationRef[Any]] = ()
        try:
            refs = left = [*begin()]
            while left:
                done, left = wait(left, timeout=INTERRUPT_POLL_INTERVAL)
                for ref in done:
                    ref.result()
            return [ref.result() for ref in refs]
        except BaseException as error:
            if refs or not isinstance(error, Exception):
                self.end(turn, f"the call has ended: {type(error).__name__}")
            raise


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
        name = name_of(function)
        named = {f"the function {name}": function, **named_arguments(name, args, kwargs)}
        raise unsendable(named, error) from None
    return ref


ALL = -1
"""In place of a rank."""

RUN_CLOSE_TIMEOUT = 5.0
"""Seconds that `close` waits for the thread that iterates."""


class TrainingIterator:
    """The rounds of reports of one run: each a list with the metrics of each rank. It ends with the function.

    ::

        it = trainer.run_iterator(train_func)
        for results in it:
            print(results[0]["loss"])
        values = it.get_final_results()

    Raises what the function raises, with the traceback of its worker, and `TrainingFailed`. A loop that is left early
    ends the run once the trainer is used for something else, or the iterator is closed.
    """

    def __init__(
        self,
        attempts: Attempts,
        task: RunTask,
        callbacks: Callbacks,
        decode: Callable[[Any], Any],
        *,
        checkpoint: str | dict[str, Any] | None,
        logdir: str,
        max_failures: int,
        retry: tuple[type[Exception], ...],
        elastic: bool,
        grow_every: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`task` goes on from `checkpoint`. A run survives `max_failures` losses of workers, -1: any number; an
        exception of one of the types `retry` counts as a loss. `grow_every`: seconds between two attempts of an
        `elastic` run to have more ranks."""
        self._attempts, self._workers, self._task = attempts, attempts.workers, task
        self._callbacks, self._decode, self._now = callbacks, decode, now
        self._checkpoint, self._logdir = checkpoint, logdir
        self._max_failures, self._retry = max_failures, retry
        self._elastic, self._grow_every = elastic, grow_every
        self._failures, self._iteration = 0, 0
        self._repeats, self._reached = Repeats(), (0, 0)
        self._grown = now()
        self._held: Round | None = None
        self._last: dict[str, Any] = {}
        self._history: list[dict[str, float]] = []
        self._error: BaseException | None = None
        self._results: list[Any] | None = None
        self._of_callback: Exception | None = None
        self._finished = self._dropped = self._start_verified = False
        self._iterating = threading.RLock()
        self._closed = False
        self.checkpoints: list[Info] = []
        """The checkpoints of this run that are kept."""
        self._lock = hold(self.url)
        self._rounds: Generator[list[dict[str, Any]], None, None] = self._run()

    def __iter__(self) -> TrainingIterator:
        return self

    def __next__(self) -> list[dict[str, Any]]:
        with self._iterating:
            try:
                return next(self._rounds)
            except StopIteration:
                if not self._finished:
                    self._check_open()
                raise
            except Exception as error:  # noqa: BLE001 - the same is raised
                raise folded(error)  # noqa: B904

    def is_finished(self) -> bool:
        """Return True if the function has returned in all ranks."""
        return self._finished

    def get_final_results(self, force: bool = False) -> list[Any]:
        """The values that the function has returned, in rank order. With `force`, the reports that are left
        are taken first.

        Raises `UsageError` when the run is not finished, and `TrainingFailed` when it has failed before.
        """
        if force:
            for _ in self:
                continue
        if self._results is None:
            if self._error is not None:
                raise TrainingFailed(f"the run has failed: {self._error!r}") from self._error
            raise UsageError("the run is not finished", "iterate to its end, or pass force=True")
        return list(self._results)

    def get_returns(self) -> list[Any]:
        """`get_final_results`, as RaySGD spells it."""
        return self.get_final_results()

    @property
    def latest(self) -> Info | None:
        """The last checkpoint that was committed in this run."""
        return self.checkpoints[-1] if self.checkpoints else None

    @property
    def best(self) -> str | None:
        """The path or URL of the best checkpoint of those that are kept; None without one."""
        found = self._task.strategy.best(self.checkpoints)
        return found.path if found is not None else None

    @property
    def url(self) -> str:
        """The directory of the run."""
        return self._task.url.removesuffix("/checkpoints")

    @property
    def result(self) -> Result:
        """Its outcome until now."""
        return Result(self.url, self._last, self._history, self.checkpoints, self.best, self._error)

    def close(self) -> None:
        """End the run. If another thread iterates at this moment, that raises `TrainingFailed`."""
        self._closed = True
        if not self._iterating.acquire(timeout=RUN_CLOSE_TIMEOUT):
            return
        try:
            # A callback of the run may call this.
            if inspect.getgeneratorstate(self._rounds) != inspect.GEN_RUNNING:
                self._rounds.close()
                # It may not have begun.
                release(self._lock)
        finally:
            self._iterating.release()

    def leave(self) -> None:
        """End the run if it was not iterated to its end, unless another thread iterates at this moment.

        Raises `UsageError` when a callback of the run calls this.
        """
        if self._iterating.acquire(blocking=False):
            try:
                if inspect.getgeneratorstate(self._rounds) == inspect.GEN_RUNNING:
                    raise UsageError(
                        "a callback uses the trainer whose run it follows", "use it after the run"
                    )
                self.close()
            finally:
                self._iterating.release()

    def _run(self) -> Generator[list[dict[str, Any]], None, None]:
        error: BaseException | None = None
        self._workers.error = ""
        try:
            self._callbacks.start(self._logdir, self._task.config)
            while self._results is None:
                failed = yield from self._attempt()
                if failed is not None:
                    self._count(*failed)
            self._finished = True
            mark_finished(self.url)
        except GeneratorExit:
            raise
        except Exception as raised:
            error = raised
            if self._closed:
                error = _closed()
                raise error from raised
            raise
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._error = error
            if error is not None:
                self._workers.error = type(error).__name__
            try:
                self._callbacks.finish(error)
            finally:
                release(self._lock)

    def _count(self, cause: Exception, world: int) -> None:
        """Count the failure of an attempt of `world` ranks, and wait until all ranks are there again. Raises its
        `cause` when it is one too many."""
        self._check_open()
        lost, most = is_loss(cause), self._max_failures
        if lost and self._elastic:
            # A role that has become larger or smaller has started again as a whole: that is no failure.
            self._workers.wait_until_whole(RECOVERY_TIMEOUT)
            if self._workers.world_size != world:
                report(f"unirun: {self._workers.world_size} ranks go on, {world} were there before")
                return
        self._failures += 1
        what = cause.problem if isinstance(cause, UnirunError) else repr(cause)
        kind = what
        if lost and isinstance(cause, WorkerLost):
            what = self._attempts.loss(cause)
            kind = kind_of(what)
        self._repeats = self._repeats.after(kind, progress=self._progressed())
        if self._repeats.hopeless and self._has_saved():
            self._repeats = self._repeats.after(kind, progress=True)
        problem = ""
        if 0 <= most < self._failures:
            problem = f"that is failure {self._failures}, and max_failures is {most}"
        elif self._repeats.hopeless:
            problem = (
                f"{self._repeats.count} times in a row in {name_of(self._task.function)}, without a report "
                "or a checkpoint between"
            )
        if problem:
            if not lost:
                cause.add_note(f"unirun: {problem}")
                raise cause
            raise TrainingFailed(
                f"{what}; {problem}",
                f"see unirun logs {self._workers.name} for their output"
                + ", or allow more" * (not self._repeats.hopeless),
            ) from cause
        limit = f" of {most}" if most >= 0 else ""
        report(f"unirun: failure {self._failures}{limit}: {what}; the run goes on")

    def _progressed(self) -> bool:
        """Return True if there was a report or a checkpoint since the last call, as far as is known here."""
        before, self._reached = self._reached, (self._iteration, self.latest.number if self.latest else 0)
        return self._reached != before

    def _has_saved(self) -> bool:
        """Return True if the attempt that has failed has saved a checkpoint that no report has mentioned.
        False if that cannot be learned: then the failure at hand is the error of the run."""
        with contextlib.suppress(UnirunError, OSError):
            self._where(self._attempts.ready())
        return self._progressed()

    def _attempt(self) -> Generator[list[dict[str, Any]], None, tuple[Exception, int] | None]:
        """Run the function once in all ranks. When that has to be repeated, returns the cause and the number of
        ranks."""
        group = self._attempts.ready()
        try:
            resume, number = self._where(group)
            yield from self._given_up(resume)
            order = replace(self._task, number=number, kept=self.checkpoints, resume=resume)
            turn = self._attempts.next()
            run: InvocationRef[Any] | None = None
            try:
                try:
                    run = group.run.call_async(turn, order)
                except EncodingError as error:
                    raise unsendable(self._sent(), error) from None
                yield from self._follow(group, run, turn.attempt)
                self._results = [self._decode(each) for each in run.result()]
            except BaseException as error:
                # Ctrl-C may come before the call has returned, and after workers have begun.
                if run is not None or not isinstance(error, Exception):
                    self._attempts.end(turn, f"the run has ended: {type(error).__name__}")
                raise
        except Exception as error:
            retried = is_loss(error) or isinstance(error, self._retry)
            if not retried or error is self._of_callback:
                raise
            return error, len(group)
        return None

    def _sent(self) -> dict[str, Any]:
        """The objects that are sent to the workers, by the names that users know."""
        task = self._task
        return {
            f"the function {name_of(task.function)}": task.function,
            "config": task.config,
            "dataset": task.datasets.get(None, task.datasets),
            "checkpoint": self._checkpoint,
            "checkpoint_strategy": task.strategy,
        }

    def _where(self, group: RoleGroup) -> tuple[Any, int]:
        """The checkpoint that the attempt goes on from, and the number of its first new one."""
        url = self._task.url
        group[0].clear(url)
        infos, number = group[0].checkpoints(url, None)
        while infos and not self._verified(group, url, infos[-1].number):
            infos, number = group[0].checkpoints(url, infos[-1].number)
        self.checkpoints = infos
        if infos:
            return infos[-1].number, number
        start = self._checkpoint
        if isinstance(start, str):
            url, _, name = start.rstrip("/").rpartition("/")
            if not self._start_verified:
                group.verify(url, int(name))
                self._start_verified = True
            return (url, int(name)), number
        return start, number

    def _verified(self, group: RoleGroup, url: str, number: int) -> bool:
        """Return True if a checkpoint is as it was written: the ranks share the work, before any of them uses it."""
        try:
            group.verify(url, number)
        except CheckpointDamaged as error:
            report(skipped(error))
            return False
        return True

    def _given_up(self, resume: Any) -> Iterator[list[dict[str, Any]]]:
        """Hand out the round that was complete when the attempt before was lost, if its checkpoint counts."""
        held, self._held = self._held, None
        if held is not None and held[0] is not None and resume == held[1]:
            yield self._handed_out(held[0])

    def _follow(
        self, group: RoleGroup, run: InvocationRef[Any], attempt: int
    ) -> Iterator[list[dict[str, Any]]]:
        """Take the reports of all ranks, until all have finished."""
        news: queue.SimpleQueue[tuple[int, InvocationRef[Any]]] = queue.SimpleQueue()
        ranks = range(len(group))

        def ask(number: int) -> None:
            for rank in ranks:
                group[rank].take.call_async(attempt, number).wake_with(partial(heard, rank))

        def heard(rank: int, ref: InvocationRef[Any]) -> None:
            news.put((rank, ref))

        run.wake_with(partial(heard, ALL))
        lockstep, number = Lockstep(len(group)), 1
        ask(number)
        while True:
            self._check_open()
            try:
                # Not for ever, as a wait that has no end hides Ctrl-C from a thread that another one interrupts.
                rank, ref = news.get(timeout=INTERRUPT_POLL_INTERVAL)
            except queue.Empty:
                continue
            if rank == ALL:
                # It has failed, or all ranks have finished and said so.
                ref.result()
                continue
            said = ref.result()
            if isinstance(said, str):
                # Another rank has the cause, and the run raises it.
                run.result()
                raise TrainingFailed(f"rank {rank} has stopped: {said}")
            whole = lockstep.hear(rank, said)
            if whole is None:
                continue
            results, pending = whole
            if results is not None:
                number += 1
                ask(number)
            if lockstep.dropped and not self._dropped:
                self._dropped = True
                report(f"unirun: {lockstep.dropped}")
            if pending is not None:
                self._held = whole
                self._keep(group, run, attempt, pending)
                self._held = None
            if results is None:
                return
            yield self._handed_out(results)
            self._grow(pending)

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()

    def _keep(self, group: RoleGroup, run: InvocationRef[Any], attempt: int, number: int) -> None:
        """Have a checkpoint committed. A rank that was lost may not have written its part: then that ends."""
        commit: InvocationRef[list[Info] | None] = group[0].commit.call_async(attempt, number)
        while not commit.done():
            self._check_open()
            if run.done() and isinstance(run.exception(), WorkerLost):
                run.result()
            wait([commit] if run.done() else [commit, run], timeout=INTERRUPT_POLL_INTERVAL)
        if commit.exception() is not None and run.done():
            # A rank that has failed has not written its part.
            run.result()
        infos = commit.result()
        if infos is None:
            # Rank 0 is being stopped, and the run has the cause.
            run.result()
            raise TrainingFailed(f"checkpoint {number} was given up, as the attempt has ended")
        self.checkpoints = infos or self.checkpoints

    def _handed_out(self, results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A round, numbered, after the callbacks have had it."""
        self._iteration += 1
        found = [{**each, "_training_iteration": self._iteration} for each in results]
        self._last = found[0]
        self._history.append(numbers(found[0]))
        try:
            self._callbacks.handle(found)
        except Exception as error:
            self._of_callback = error
            raise
        return found

    def _grow(self, committed: int | None) -> None:
        """Have more ranks now and then, right after a checkpoint, when that costs nothing."""
        due = self._now() >= self._grown + self._grow_every
        if self._elastic and committed is not None and due:
            self._grown = self._now()
            self._workers.grow()


def _closed() -> TrainingFailed:
    return TrainingFailed("the run was closed, or the trainer was shut down, while it went on")
