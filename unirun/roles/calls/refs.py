"""`InvocationRef`: a call that was made, and its results as they come."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from unirun.errors import InvocationTimeout, UsageError
from unirun.roles.calls.open_call import STATE, OpenCall

R = TypeVar("R")


class InvocationRef(OpenCall, Generic[R]):
    """The result of a call that may not be there yet, like a future. All methods may be used from any thread.

    ::

        ref = self.RG_ROLLOUT.generate.call_async(prompts)
        self.RG_ACTOR.update(samples)  # meanwhile
        answers = ref.result()

    ``ref.workers`` names the workers that were called (``actor:2``), in the order of the results. ``ref.sharding``
    tells how each argument, by position or name, was given to them: ``replicate``, ``item``, or ``shard`` with the
    sizes of the parts. In a coroutine, ``await ref`` gives the result.
    """

    def done(self) -> bool:
        """Return True if `result` would return or raise without waiting."""
        return self.over

    def result(self, timeout: float | None = None) -> R:
        """Wait for the results in rank order, or the bare result of one worker, after the method's `post_func`.

        Raises what the method raised, with `RemoteTraceback` as its ``__cause__``; `WorkerLost` when a worker died;
        `EncodingError` for a result that cannot be unpickled here; `InvocationTimeout` at the call's deadline, or after
        `timeout` seconds. In the last case the call goes on, and `result` may be called again.
        """
        if timeout is None and (fetch := self.fetch) is not None:
            self.fetch = None
            fetch()
        if not self.over and not self._pass(timeout):
            with self._making:
                raise self._timeout(f"within {timeout:g} s")
        with self._making:
            if self._failure is None and self._value is None:
                self._decide()
        if self._failure is not None:
            raise self._failure
        assert self._value is not None
        value: R = self._value[0]
        return value

    def _pass(self, timeout: float | None) -> bool:
        """Wait until the call is over. Whether it is."""
        with STATE:
            if self.over:
                return True
            if self._gate is None:
                self._gate = threading.Lock()
                self._gate.acquire()
            gate = self._gate
        if not gate.acquire(timeout=-1 if timeout is None else _clamped(timeout)):
            return False
        gate.release()
        return True

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the exception that `result` would raise; None if it would return.

        After `timeout` seconds it returns an `InvocationTimeout`, and the call goes on.
        """
        try:
            self.result(timeout)
        except BaseException as error:
            if error is self._failure or isinstance(error, InvocationTimeout):
                return error
            raise
        return None

    def add_done_callback(self, callback: Callable[[InvocationRef[R]], None]) -> None:
        """Call ``callback(ref)`` when the call is done: in this thread and at once if it is done already, else in a
        thread that runs all callbacks of this process, one at a time.

        The callback may make other calls and wait for them. An exception that it raises is printed and goes no further.
        """
        with STATE:
            if not self.over:
                self._wakes.append(lambda ref: self.prepared.deliver(partial(callback, ref)))
                return
        callback(self)

    def wake_with(self, wake: Callable[[InvocationRef[R]], None]) -> None:
        """Call `wake` once it is done, in the thread that brings the answer: it must not wait for anything."""
        with STATE:
            if not self.over:
                self._wakes.append(wake)
                return
        wake(self)

    def forget_wake(self, wake: Callable[[InvocationRef[R]], None]) -> None:
        """Undo `wake_with`."""
        with STATE:
            self._wakes = [each for each in self._wakes if each is not wake]

    def __await__(self) -> Generator[Any, None, R]:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not over.done():
                over.set_result(None)

        def wake(_: InvocationRef[R]) -> None:
            # The loop may have been closed meanwhile; then nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finish)

        self.wake_with(wake)
        yield from over
        return self.result()

    def __repr__(self) -> str:
        state = "done" if self.over else f"{len(self._outcomes)} of {len(self.ranks)} answered"
        return f"<{self.method} on {', '.join(self.workers)}: {state}>"


def wait(
    refs: Iterable[InvocationRef[Any]], num_returns: int = 1, timeout: float | None = None
) -> tuple[list[InvocationRef[Any]], list[InvocationRef[Any]]]:
    """Wait until at least `num_returns` of `refs` are done, or `timeout` seconds have passed (None: no limit).

    Returns two lists, the refs that are done and those that are not, each in the order of `refs`. A ref whose call has
    failed is done. Raises `UsageError` if `num_returns` is negative or larger than the number of refs::

        done, left = unirun.wait([worker.generate.call_async(p) for worker in self.RG_ROLLOUT], num_returns=2)
    """
    every: Sequence[InvocationRef[Any]] = list(refs)
    if not 0 <= num_returns <= len(every):
        raise UsageError(f"wait(num_returns={num_returns}) of {len(every)} refs", "give a number up to that")
    news = threading.Condition()

    def wake(_: InvocationRef[Any]) -> None:
        with news:
            news.notify_all()

    for ref in every:
        ref.wake_with(wake)
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        with news:
            while sum(ref.done() for ref in every) < num_returns:
                if not news.wait(None if deadline is None else _clamped(deadline - time.monotonic())):
                    break
    finally:
        for ref in every:
            ref.forget_wake(wake)
    done = {id(ref) for ref in every if ref.done()}
    return [ref for ref in every if id(ref) in done], [ref for ref in every if id(ref) not in done]


def _clamped(seconds: float) -> float:
    """The time-out, cut to the most that Python's locks take."""
    return min(max(seconds, 0.0), threading.TIMEOUT_MAX)
