"""`InvocationRef`: a call that was made, and its results as they come."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from unirun.errors import InvocationTimeout, UsageError, WorkerLost
from unirun.roles.calls.codec import load
from unirun.roles.calls.dispatcher import outcome_of
from unirun.roles.calls.envelope import INTERRUPTED, OK
from unirun.roles.calls.remote import load_error
from unirun.roles.transport.protocol import Parcel, Wait

R = TypeVar("R")


class InvocationRef(Generic[R]):
    """The results of a call that may still be on their way. All methods may be used from any thread.

    `workers` names who was called, in the order of the results; `sharding` says for each argument, by position
    or name, what was done: ``replicate``, ``item`` or ``shard`` with the sizes of the parts.
    """

    def __init__(
        self,
        method: str,
        workers: tuple[str, ...],
        *,
        bare: bool,
        post: Callable[[Any], Any] | None,
        sharding: Mapping[int | str, str],
    ) -> None:
        self.method, self.workers, self.sharding = method, workers, dict(sharding)
        self._bare, self._post = bare, post
        self._lock = threading.Lock()
        # Held until the call is over: waiting for it is the cheapest wait that Python has.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._outcomes: dict[int, Parcel | BaseException] = {}
        self._bad = 0
        self._failure: BaseException | None = None
        self._over = False
        self._value: tuple[Any] | None = None
        self._wait: Wait | None = None
        self._callbacks: list[Callable[[InvocationRef[R]], None]] = []

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._over

    def result(self, timeout: float | None = None) -> R:
        """The results in rank order, or the bare result of one worker, after `post_func`.

        Raises what the method raised, with `RemoteTraceback` as its cause; `WorkerLost` when a worker died;
        `InvocationTimeout` at the call's own deadline, or after `timeout` seconds, and then the call goes on.
        """
        if timeout is None and (wait := self._wait) is not None:
            self._wait = None
            wait()
        if not self._gate.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            raise self._timeout(f"within {timeout:g} s")
        self._gate.release()
        if self._failure is not None:
            raise self._failure
        with self._lock:
            if self._value is None:
                self._value = (self._make(),)
        value: R = self._value[0]
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` would raise; None when it would return."""
        try:
            self.result(timeout)
        except BaseException as error:  # noqa: BLE001 - it is what was asked for
            return error
        return None

    def add_done_callback(self, callback: Callable[[InvocationRef[R]], None]) -> None:
        """Call `callback` with this ref once it is done; at once when it is. It may be called in another thread."""
        with self._lock:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, R]:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not over.done():
                over.set_result(None)

        def wake(_: InvocationRef[R]) -> None:
            loop.call_soon_threadsafe(finish)

        self.add_done_callback(wake)
        yield from over
        return self.result()

    def __repr__(self) -> str:
        state = "done" if self._over else f"{len(self._outcomes)} of {len(self.workers)} answered"
        return f"<{self.method} on {', '.join(self.workers)}: {state}>"

    def _make(self) -> Any:
        """Unpickle the answers: in the thread that wants them, not in the one that must go on reading."""
        results = [self._loaded(index) for index in range(len(self.workers))]
        self._outcomes.clear()
        value = results[0] if self._bare else results
        return value if self._post is None else self._post(value)

    def _loaded(self, index: int) -> Any:
        outcome = self._outcomes[index]
        if isinstance(outcome, BaseException):
            raise outcome
        return load(outcome_of(outcome)[1], outcome.buffers)

    def wait_with(self, wait: Wait) -> None:
        """Let the thread that asks for the result do `wait` first: it is what brings the answer.

        For the caller's side of unirun only, like what follows.
        """
        self._wait = wait

    def settle(self, index: int, outcome: Parcel | BaseException) -> None:
        """An answer, or the lack of one."""
        with self._lock:
            if not self._over:
                self._outcomes[index] = outcome
                self._bad += isinstance(outcome, BaseException) or outcome.head[:1] != OK

    @property
    def settled(self) -> bool:
        """Whether there is an outcome for every worker."""
        return len(self._outcomes) == len(self.workers)

    @property
    def interrupted(self) -> bool:
        """Whether a worker was lost, or an error is the consequence of a loss."""
        return any(
            isinstance(o, WorkerLost) or (isinstance(o, Parcel) and o.head[:1] == INTERRUPTED)
            for o in self._outcomes.values()
        )

    @property
    def failed(self) -> bool:
        """Whether any outcome is an error."""
        return self._bad > 0

    def start_again(self) -> None:
        """Forget all outcomes: the call is made once more."""
        with self._lock:
            self._outcomes.clear()
            self._bad = 0

    def finish(self) -> None:
        """No more outcomes are awaited: what is there decides."""
        if self.failed:
            self._end(self._error())
        else:
            self._end(None)

    def expire(self, seconds: float) -> None:
        """The deadline has come."""
        self._end(self._timeout(f"within its deadline of {seconds:g} s"))

    def _end(self, failure: BaseException | None) -> None:
        with self._lock:
            if self._over:
                return
            self._failure, self._over = failure, True
            callbacks, self._callbacks = self._callbacks, []
        self._gate.release()
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # noqa: BLE001 - a user's callback
                # Like concurrent.futures: one callback must not keep others from being called.
                traceback.print_exc()

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
                ranked.append((2 if kind == INTERRUPTED else 1, load_error(body)))
        return min(ranked, key=lambda pair: pair[0])[1]

    def _timeout(self, when: str) -> InvocationTimeout:
        finished = {
            i: o for i, o in list(self._outcomes.items()) if isinstance(o, Parcel) and o.head[:1] == OK
        }
        missing = tuple(who for index, who in enumerate(self.workers) if index not in self._outcomes)
        return InvocationTimeout(
            f"{self.method} was not answered {when} by {', '.join(missing) or 'nobody'}",
            "give the method a longer timeout, or see what the workers do: unirun logs",
            missing=missing,
            results={
                self.workers[i]: load(outcome_of(outcome)[1], outcome.buffers)
                for i, outcome in finished.items()
            },
        )


def wait(
    refs: Iterable[InvocationRef[Any]], num_returns: int = 1, timeout: float | None = None
) -> tuple[list[InvocationRef[Any]], list[InvocationRef[Any]]]:
    """Wait until `num_returns` of `refs` are done, or `timeout` seconds are over.

    Returns those that are done and those that are not, each in the order of `refs`. A ref that failed is done.
    """
    every: Sequence[InvocationRef[Any]] = list(refs)
    if not 0 <= num_returns <= len(every):
        raise UsageError(f"wait(num_returns={num_returns}) of {len(every)} refs", "give a number up to that")
    news = threading.Condition()

    def wake(_: InvocationRef[Any]) -> None:
        with news:
            news.notify_all()

    for ref in every:
        ref.add_done_callback(wake)
    deadline = None if timeout is None else time.monotonic() + timeout
    with news:
        while sum(ref.done() for ref in every) < num_returns:
            if not news.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0)):
                break
    done = [ref for ref in every if ref.done()]
    return done, [ref for ref in every if ref not in done]
