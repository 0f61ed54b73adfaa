"""`InvocationRef`: a call that was made, and its results as they come."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from unirun.errors import EncodingError, InvocationTimeout, UsageError, WorkerLost
from unirun.reporting import report_error
from unirun.roles.calls.codec import load
from unirun.roles.calls.dispatcher import outcome_of
from unirun.roles.calls.envelope import INTERRUPTED, OK
from unirun.roles.calls.remote import load_error
from unirun.roles.transport.protocol import Parcel, Wait

R = TypeVar("R")

_STATE = threading.RLock()
"""Of all refs, held for a few instructions: one for each would take longer to make than to use. What interrupts a
thread here, a signal or a finalizer, may use other refs."""


class InvocationRef(Generic[R]):
    """The result of a call that may not be there yet, like a future. All methods may be used from any thread.

    ``ref.workers`` names the workers that were called (``actor:2``), in the order of the results. ``ref.sharding``
    tells how each argument, by position or name, was given to them: ``replicate``, ``item``, or ``shard`` with the
    sizes of the parts. In a coroutine, ``await ref`` gives the result.
    """

    __slots__ = (
        "__weakref__",
        "_bad",
        "_bare",
        "_deliver",
        "_failure",
        "_gate",
        "_loaded",
        "_making",
        "_outcomes",
        "_over",
        "_post",
        "_value",
        "_wait",
        "_wakes",
        "_why",
        "method",
        "sharding",
        "workers",
    )

    def __init__(
        self,
        method: str,
        workers: tuple[str, ...],
        *,
        bare: bool,
        post: Callable[[Any], Any] | None,
        sharding: Mapping[int | str, str],
        deliver: Callable[[Callable[[], None]], None] = lambda callback: callback(),
    ) -> None:
        """`deliver` calls a user's callback, in a thread where it may wait for other calls."""
        self.method, self.workers, self.sharding = method, workers, sharding
        self._bare, self._post = bare, post
        # Held until the call is over, by whoever waits first: it is the cheapest wait that Python has.
        self._gate: threading.Lock | None = None
        self._outcomes: dict[int, Parcel | BaseException] = {}
        self._bad = 0
        self._why: Callable[[], BaseException] | None = None
        self._over = False
        # What users have sent is unpickled in the thread that asks, once, and without holding up who brings answers.
        self._making = threading.Lock()
        self._failure: BaseException | None = None
        self._loaded: dict[int, Any] = {}
        self._value: tuple[Any] | None = None
        self._wait: Wait | None = None
        self._wakes: list[Callable[[InvocationRef[R]], None]] = []
        self._deliver = deliver

    def done(self) -> bool:
        """Whether `result` would return or raise without waiting."""
        return self._over

    def result(self, timeout: float | None = None) -> R:
        """Wait for the results in rank order, or the bare result of one worker, after the method's `post_func`.

        Raises what the method raised, with `RemoteTraceback` as its ``__cause__``; `WorkerLost` when a worker died;
        `EncodingError` for a result that cannot be unpickled here; `InvocationTimeout` at the call's deadline, or after
        `timeout` seconds. In the last case the call goes on, and `result` may be called again.
        """
        if timeout is None and (wait := self._wait) is not None:
            self._wait = None
            wait()
        if not self._over and not self._pass(timeout):
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
        with _STATE:
            if self._over:
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
        with _STATE:
            if not self._over:
                self._wakes.append(lambda ref: self._deliver(partial(_call_back, callback, ref)))
                return
        callback(self)

    def wake_with(self, wake: Callable[[InvocationRef[R]], None]) -> None:
        """Call `wake` once it is done, in the thread that brings the answer: it must not wait for anything."""
        with _STATE:
            if not self._over:
                self._wakes.append(wake)
                return
        wake(self)

    def forget_wake(self, wake: Callable[[InvocationRef[R]], None]) -> None:
        """Undo `wake_with`."""
        with _STATE:
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
        state = "done" if self._over else f"{len(self._outcomes)} of {len(self.workers)} answered"
        return f"<{self.method} on {', '.join(self.workers)}: {state}>"

    def _decide(self) -> None:
        """What `result` returns or raises from now on."""
        try:
            if self._why is not None:
                self._failure = self._why()
            else:
                results = [self._load(index) for index in range(len(self.workers))]
                value = results[0] if self._bare else results
                self._value = (value if self._post is None else self._post(value),)
        except Exception as error:  # noqa: BLE001 - it is raised, now and whenever it is asked for
            self._failure = error
        self._why = None
        self._outcomes.clear()
        self._loaded.clear()

    def _load(self, index: int) -> Any:
        """The result of one worker, unpickled once: what is in its memory has one owner."""
        if index not in self._loaded:
            outcome = self._outcomes[index]
            if isinstance(outcome, BaseException):
                raise outcome
            try:
                self._loaded[index] = load(outcome_of(outcome)[1], outcome.buffers)
            except Exception as error:
                problem = (
                    f"the result of {self.method} from {self.workers[index]} cannot be unpickled: {error}"
                )
                raise EncodingError(problem, "are its classes known here?") from error
        return self._loaded[index]

    def wait_with(self, wait: Wait) -> None:
        """Let the thread that asks for the result do `wait` first: it is what brings the answer.

        For the caller's side of unirun only, like what follows.
        """
        self._wait = wait

    def settle(self, index: int, outcome: Parcel | BaseException) -> None:
        """An answer, or the lack of one."""
        with _STATE:
            if not self._over:
                self._outcomes[index] = outcome
                self._bad += isinstance(outcome, BaseException) or outcome.head[:1] != OK

    def has(self, index: int) -> bool:
        """Whether there is an outcome for this worker."""
        return index in self._outcomes

    @property
    def settled(self) -> bool:
        """Whether there is an outcome for every worker."""
        return len(self._outcomes) == len(self.workers)

    @property
    def interrupted(self) -> bool:
        """Whether a worker was lost, or an error is the consequence of a loss."""
        return any(
            isinstance(o, WorkerLost) or (isinstance(o, Parcel) and o.head[:1] == INTERRUPTED)
            for o in list(self._outcomes.values())
        )

    @property
    def failed(self) -> bool:
        """Whether any outcome is an error."""
        return self._bad > 0

    def start_again(self) -> None:
        """Forget all outcomes: the call is made once more."""
        with _STATE:
            self._outcomes.clear()
            self._loaded.clear()
            self._bad = 0

    def finish(self) -> None:
        """No more outcomes are awaited: what is there decides."""
        self._end(self._error if self.failed else None)

    def expire(self, seconds: float) -> None:
        """The deadline has come."""
        self._end(lambda: self._timeout(f"within its deadline of {seconds:g} s"))

    def _end(self, failure: Callable[[], BaseException] | None) -> None:
        with _STATE:
            if self._over:
                return
            self._why, self._over, self._wait = failure, True, None
            wakes, self._wakes = self._wakes, []
        if self._gate is not None:
            self._gate.release()
        for wake in wakes:
            wake(self)

    def _error(self) -> BaseException:
        """The root cause: a loss before what follows from one, else the first error that came."""
        ranked: list[tuple[int, BaseException]] = []
        for outcome in self._outcomes.values():
            if isinstance(outcome, WorkerLost):
                ranked.append((0, outcome))
            elif isinstance(outcome, BaseException):
                ranked.append((1, outcome))
            elif outcome.head[:1] != OK:
                kind, body = outcome_of(outcome)
                ranked.append((2 if kind == INTERRUPTED else 1, load_error(body, outcome.buffers)))
        return min(ranked, key=lambda pair: pair[0])[1]

    def _timeout(self, when: str) -> InvocationTimeout:
        outcomes = dict(self._outcomes)
        answered = {index for index, outcome in outcomes.items() if isinstance(outcome, Parcel)}
        missing = tuple(who for index, who in enumerate(self.workers) if index not in answered)
        results = {}
        for index, outcome in sorted(outcomes.items()):
            if isinstance(outcome, Parcel) and outcome.head[:1] == OK:
                with contextlib.suppress(EncodingError):
                    results[self.workers[index]] = self._load(index)
        return InvocationTimeout(
            f"{self.method} was not answered {when} by {', '.join(missing) or 'nobody'}",
            "give the method a longer timeout, or see what the workers do: unirun logs",
            missing=missing,
            results=results,
        )


def wait(
    refs: Iterable[InvocationRef[Any]], num_returns: int = 1, timeout: float | None = None
) -> tuple[list[InvocationRef[Any]], list[InvocationRef[Any]]]:
    """Wait until at least `num_returns` of `refs` are done, or `timeout` seconds have passed (None: no limit).

    Returns two lists, the refs that are done and those that are not, each in the order of `refs`. A ref whose call has
    failed is done. Raises `UsageError` if `num_returns` is negative or larger than the number of refs.
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


def _call_back(callback: Callable[[InvocationRef[R]], None], ref: InvocationRef[R]) -> None:
    try:
        callback(ref)
    except Exception as error:  # noqa: BLE001 - a user's callback
        # Like concurrent.futures: one callback must not keep others from being called.
        report_error(error)


def _clamped(seconds: float) -> float:
    """What Python's locks take."""
    return min(max(seconds, 0.0), threading.TIMEOUT_MAX)
