"""`Call`: one invocation of a `Method`, from its start until its results are taken; and counts of calls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from unirun.errors import EncodingError, InvocationTimeout, UsageError, WireError, WorkerLost
from unirun.observe.spans import TraceSpan
from unirun.roles.calls.codec import INTERRUPTED, OK, load, load_error, outcome_of
from unirun.roles.calls.policy import Invocation
from unirun.roles.transport.protocol import Parcel, Scheduler, Wait
from unirun.values import WorkerId
from unirun.wire.progress import page
from unirun.wire.reporting import report_error
from unirun.wire.reports import LATENCY_BOUNDS, CallCount, Calls, bounded, merged

STATE = threading.RLock()
"""Guards the outcomes of all calls, for a few instructions each time: a lock for each call would take longer to make
than to use. Reentrant, as a signal handler or a finalizer that interrupts a thread here may use other calls."""


@dataclass(eq=False, slots=True)
class Method:
    """A method of some ranks of a role: what is the same in each of its calls.

    When it `chooses`, each call goes to one of `ranks`, else to all; `turns` has for each rank when it was chosen last,
    as a count. `joint`: its calls are for all of several `ranks`, or for all ranks of a role that may have several.
    `timeout` is in seconds. `wire` is the name in bytes. `deliver` runs a user's callback in a thread where it may wait
    for other calls, and prints its errors.
    """

    role: str
    name: str
    options: Invocation
    ranks: Sequence[int]
    chooses: bool
    joint: bool
    timeout: float
    wire: bytes
    count: Count
    turns: dict[int, int]
    deliver: Callable[[Callable[[], None]], None]


class Call:
    """The parcels for each rank, and their outcomes: a worker's answer, or the error because of which there
    is none.

    For the caller:

    - `parcels`: one for all ranks, or one for each.
    - `generation`: the one of the role in which all workers of a joint call run it, -1 until the first part is sent. A
      new attempt has a new `seq` and perhaps a later generation.
    - `sent_to`: for each rank the worker to which its part was sent.
    - `unreported`: a worker whose loss this call reports instead of being sent.
    - `patience`: the seconds for which the calling thread will do nothing but wait for the only part. None once that
      was sent.
    - `fetch`: what the thread that asks for the result calls first; it brings the answer.
    - `failing`: whether an error has come, and the call ends soon. `over`: it has ended.
    """

    # Defaults, of which most calls change few.
    seq, generation, attempt = 0, -1, 0
    unreported = ""
    patience: float | None = None
    over = failing = False
    fetch: Wait | None = None
    _bad = 0
    _failure: BaseException | None = None
    _value: tuple[Any] | None = None
    _why: Callable[[], BaseException] | None = None
    # Held until the call is over, by whoever waits first: it is the cheapest wait that Python has.
    _gate: threading.Lock | None = None

    def __init__(
        self,
        prepared: Method,
        ranks: Sequence[int],
        parcels: Sequence[Parcel] = (),
        sharding: Mapping[int | str, str] | None = None,
        began: float = 0.0,
    ) -> None:
        """`began` is on the clock of the caller's scheduler."""
        self.prepared, self.ranks, self.parcels, self.began = prepared, ranks, parcels, began
        self.sharding: Mapping[int | str, str] = sharding or {}
        self.retries = prepared.options.retries
        self.sent_to: list[WorkerId | None] = [None] * len(ranks)
        self._outcomes: dict[int, Parcel | BaseException] = {}
        self._loaded: dict[int, Any] = {}
        self._wakes: list[Callable[[Any], None]] = []
        # Results are unpickled once, in the thread that asks first, and not in the one that brings answers.
        self._making = threading.Lock()

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.prepared.name

    @property
    def joint(self) -> bool:
        """True if all workers run it in one generation of their role."""
        return self.prepared.joint

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers that were called (``actor:2``), in the order of the results."""
        return tuple(map(self.worker, range(len(self.ranks))))

    def worker(self, index: int) -> str:
        """The name of one of them."""
        return f"{self.prepared.role}:{self.ranks[index]}"

    def parcel(self, index: int) -> Parcel | None:
        """The parcel for the worker at `index`; None when the call is over."""
        parcels = self.parcels
        return parcels[index if len(parcels) > 1 else 0] if parcels else None

    def settle(self, index: int, outcome: Parcel | BaseException) -> None:
        """Take the outcome of one worker."""
        with STATE:
            if not self.over:
                self._outcomes[index] = outcome
                self._bad += isinstance(outcome, BaseException) or outcome.head[:1] != OK

    def has(self, index: int) -> bool:
        """Return True if there is an outcome of this worker."""
        return index in self._outcomes

    @property
    def settled(self) -> bool:
        """True if there is an outcome of every worker."""
        return len(self._outcomes) == len(self.ranks)

    @property
    def failed(self) -> bool:
        """True if any outcome is an error."""
        return self._bad > 0

    @property
    def lost(self) -> bool:
        """True if a worker was lost, so that this attempt of a joint call cannot succeed."""
        return self.failed and any(isinstance(o, WorkerLost) for o in list(self._outcomes.values()))

    @property
    def interrupted(self) -> bool:
        """True if a worker was lost, or an error is the consequence of a loss."""
        return any(
            isinstance(o, WorkerLost) or (isinstance(o, Parcel) and o.head[:1] == INTERRUPTED)
            for o in list(self._outcomes.values())
        )

    @property
    def remedy(self) -> str:
        """The remedy for the loss of a worker."""
        options = self.prepared.options
        if options.idempotent:
            return f"retries={options.retries} is used up; unirun events tells why workers are lost"
        return "mark the method idempotent=True to have it called again"

    def start_again(self) -> None:
        """Begin another attempt, without any outcome."""
        self.attempt += 1
        self.retries -= 1
        self.failing, self.generation = False, -1
        self.sent_to = [None] * len(self.ranks)
        with STATE:
            self._outcomes.clear()
            self._loaded.clear()
            self._bad = 0

    def finish(self) -> bool:
        """End the call: the outcomes that are there decide. Returns False if it was over."""
        return self._end(self._error if self.failed else None)

    def expire(self) -> bool:
        """End the call at its deadline. Returns False if it was over."""
        return self._end(lambda: self._timeout(f"within its deadline of {self.prepared.timeout:g} s"))

    def _end(self, failure: Callable[[], BaseException] | None) -> bool:
        with STATE:
            if self.over:
                return False
            self._why, self.over, self.fetch = failure, True, None
            wakes, self._wakes = self._wakes, []
        # A ref that the user keeps holds the results, and not what was sent.
        self.parcels = ()
        if self._gate is not None:
            self._gate.release()
        for wake in wakes:
            wake(self)
        return True

    def _decide(self) -> None:
        """Make what `result` returns or raises from now on."""
        options = self.prepared.options
        try:
            if self._why is not None:
                self._failure = self._why()
            else:
                results = [self._load(index) for index in range(len(self.ranks))]
                value = results[0] if options.one else results
                self._value = (value if options.post_func is None else options.post_func(value),)
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
                self._loaded[index] = load(outcome_of(outcome.head)[1], outcome.buffers)
            except Exception as error:
                problem = (
                    f"the result of {self.method} from {self.worker(index)} cannot be unpickled: {error}"
                )
                raise EncodingError(problem, "are its classes known here?") from error
        return self._loaded[index]

    def _error(self) -> BaseException:
        """The root cause: a loss before what follows from one, else the first error that came."""
        ranked: list[tuple[int, BaseException]] = []
        for index, outcome in self._outcomes.items():
            if isinstance(outcome, WorkerLost):
                ranked.append((0, outcome))
            elif isinstance(outcome, BaseException):
                ranked.append((1, outcome))
            elif outcome.head[:1] != OK:
                kind, body = outcome_of(outcome.head)
                error = load_error(body, outcome.buffers)
                if kind == INTERRUPTED and isinstance(error, RuntimeError):
                    error = self._interruption(index, error)
                ranked.append((2 if kind == INTERRUPTED else 1, error))
        return min(ranked, key=lambda pair: pair[0])[1]

    def _interruption(self, index: int, error: RuntimeError) -> WorkerLost:
        """The error for torch's `error` in a collective, which follows from a loss outside of this call."""
        interrupted = WorkerLost(
            f"{self.method} was interrupted in {self.worker(index)}: its role forms another generation, as another of "
            "its ranks, or its rendezvous store, was lost",
            self.remedy,
            worker=self.worker(index),
        )
        interrupted.__cause__ = error
        return interrupted

    def _timeout(self, when: str) -> InvocationTimeout:
        outcomes = dict(self._outcomes)
        answers = {i: o for i, o in sorted(outcomes.items()) if isinstance(o, Parcel)}
        missing = tuple(who for index, who in enumerate(self.workers) if index not in answers)
        results = {}
        for index, answer in answers.items():
            if answer.head[:1] == OK:
                with contextlib.suppress(EncodingError):
                    results[self.worker(index)] = self._load(index)
        return InvocationTimeout(
            f"{self.method} was not answered {when} by {', '.join(missing) or 'nobody'}",
            "give the method a longer timeout, or see what the workers do: unirun logs",
            missing=missing,
            results=results,
        )


def span_of(
    caller: str,
    to: Method,
    sent: Sequence[WorkerId | None],
    seq: int,
    failed: bool,
    ended: int,
    seconds: float,
) -> TraceSpan:
    """The span of a call that took so many seconds; `sent` are the workers to which it went."""
    workers = tuple(f"{each.role}:{each.rank}" for each in sent if each is not None)
    began = ended - int(seconds * 1e9)
    return TraceSpan("call", f"{to.role}.{to.name}", began, ended, caller, seq, workers, failed)


# `InvocationRef`: a call that was made, and its results as they come.

R = TypeVar("R")


class InvocationRef(Call, Generic[R]):
    """The result of a call that may not be there yet, like a future. All methods may be used from any thread.

    ::

        ref = self.RG_ROLLOUT.generate.call_async(prompts)
        self.RG_ACTOR.update(samples)  # meanwhile
        answers = ref.result()

    ``ref.workers`` names the workers that were called (``actor:2``), in the order of the results. ``ref.sharding``
    tells how each argument, by position or name, was given to them: ``replicate``, ``item``, or ``shard`` with the
    sizes of the parts. In a coroutine, ``await ref`` gives the result.
    """

    _send_instead = "call result() first, and send that"

    def done(self) -> bool:
        """Return True if `result` would return or raise without waiting."""
        return self.over

    def result(self, timeout: float | None = None) -> R:
        """Wait for the results in rank order, or the bare result of one worker, after the method's `post_func`.

        Raises what the method raised, with `RemoteTraceback` as its ``__cause__``; `WorkerLost` when a worker died;
        `EncodingError` for a result that cannot be unpickled here; `InvocationTimeout` at the call's deadline, or after
        `timeout` seconds. In the last case the call goes on, and `result` may be called again.
        """
        with page().idle():
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
        try:
            callback(self)
        except Exception as error:  # noqa: BLE001 - as in that thread
            report_error(error)

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
        with page().awaiting(loop):
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
        with page().idle(), news:
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


# Counts of the calls that this process makes, from which the job's graph is learned (`collocation.graph.learn`).
#
# A report has the totals since the process started, so it may be lost or arrive twice.

FIRST, SELDOM = 1.0, 60.0
"""Seconds from a call to the report of it: the first time, and at most; they double each time. So the graph is known
soon, and the reports of ten thousand callers do not load the master."""


class Count:
    """The calls of one method of a role. Answers come in several threads."""

    __slots__ = (
        "_bytes",
        "_calls",
        "_latencies",
        "_lock",
        "_news",
        "_ranks",
        "_returned",
        "_seconds",
        "split",
        "what",
    )

    def __init__(self, what: tuple[str, str, bool], news: Callable[[], None]) -> None:
        self.what = what
        """The role, the method, and whether the call is asynchronous."""
        self.split = False
        """True if the workers of one call got different arguments."""
        self._news = news
        self._lock = threading.Lock()
        self._calls = self._bytes = self._returned = 0
        self._seconds = 0.0
        self._latencies = [0] * (len(LATENCY_BOUNDS) + 1)
        self._ranks: set[int] = set()

    def add(self, rank: int, sent: int, returned: int, seconds: float) -> None:
        """Add a call that was answered: bytes sent and returned, and the seconds from its start to the answer."""
        with self._lock:
            self._calls += 1
            self._bytes += sent
            self._returned += returned
            self._seconds += seconds
            self._latencies[bisect_left(LATENCY_BOUNDS, seconds)] += 1
            self._ranks.add(rank)
        self._news()

    def value(self) -> CallCount:
        """The totals so far."""
        role, method, asynchronous = self.what
        with self._lock:
            return CallCount(
                role=role,
                method=method,
                calls=self._calls,
                bytes=self._bytes,
                returned=self._returned,
                seconds=self._seconds,
                ranks=merged((rank, rank) for rank in self._ranks),
                asynchronous=asynchronous,
                split=self.split,
                latencies=tuple(self._latencies),
            )


class CallBook:
    """The counts of one process."""

    def __init__(self, scheduler: Scheduler, tell: Callable[[Calls], None]) -> None:
        """`tell` may raise `WireError`, and is called in the thread of `scheduler` or of `report`."""
        self._scheduler, self._tell = scheduler, tell
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._counts: dict[tuple[str, str, bool], Count] = {}
        self._delay = FIRST
        self._due = False

    def count(self, role: str, method: str, *, asynchronous: bool) -> Count:
        """The count of one method."""
        what = role, method, asynchronous
        with self._lock:
            if what not in self._counts:
                self._counts[what] = Count(what, self._news)
            return self._counts[what]

    def report(self) -> None:
        """Report all counts, if any has changed."""
        # One report at a time: the last one must have the highest totals.
        with self._telling:
            if not self._due:
                return
            self._due = False
            with self._lock:
                # Methods with two underscores are unirun's own.
                mine = [count for what, count in self._counts.items() if not what[1].startswith("__")]
            counts = [each for count in mine if (each := count.value()).calls]
            # Without its agent this process ends, too.
            with contextlib.suppress(WireError):
                self._tell(Calls(bounded(counts)))

    def _news(self) -> None:
        if not self._due:
            self._due = True
            self._scheduler.at(self._scheduler.now() + self._delay, self._in_time)

    def _in_time(self) -> None:
        self._delay = min(2 * self._delay, SELDOM)
        self.report()
