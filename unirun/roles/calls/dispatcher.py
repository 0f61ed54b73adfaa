"""The serving end: runs each call at most once, in the main thread or in another one, and keeps the result until it is
acked."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from unirun.errors import ChannelError, EncodingError, FrameError, UnirunError, WorkerLost
from unirun.observe.spans import TraceSpan, spans
from unirun.roles.calls.codec import (
    ACK,
    DESCRIBE,
    ERROR,
    GIVE_UP,
    INTERRUPTED,
    OK,
    OPEN_RPC,
    VISITOR,
    Request,
    decode_giving_up,
    decode_request,
    dump,
    dump_error,
    encode_refusal,
    load,
)
from unirun.roles.calls.policy import Invocation
from unirun.roles.calls.sending import unsendable
from unirun.roles.transport.protocol import Inbox, Parcel, Reply, await_end, own
from unirun.values import WorkerId
from unirun.wire.progress import page
from unirun.wire.reporting import report_error

VISITOR_RESULTS_TTL = 3600.0
"""Seconds after its last request for which the results are kept that a visitor has not acked. It may be gone."""

_ACK, _GIVE_UP = ACK.decode(), GIVE_UP.decode()


@dataclass(eq=False, slots=True)
class _IncomingCall:
    """One call, from its arrival until its result is acked."""

    request: Request
    buffers: tuple[memoryview, ...]
    replies: list[Reply]
    outcome: Parcel | None = None
    given_up: bool = False
    lost: bool = False


@dataclass(eq=False, slots=True)
class _CallerState:
    """The state that is kept for the process of a calling rank; `incarnation` is the latest that has called."""

    incarnation: int
    heard: float
    runs: dict[int, _IncomingCall] = field(default_factory=dict)


class Generations(Protocol):
    """The generations of the process group that this process is in."""

    @property
    def generation(self) -> int:
        """The present one."""

    def catch_up(self, generation: int) -> None:
        """Form the group of `generation`, or a later one, if that has not been done. In the main thread."""

    def explain(self, error: BaseException) -> bool:
        """Return True if a call in this process has failed with `error` because the group has ended. Waits for the
        news."""

    def guard(self, call: Callable[[], Any]) -> Any:
        """Run a call in the serving thread. It may be interrupted, and then raises an error that `explain` explains."""

    def kept_away(self, by: Callable[[], bool]) -> None:
        """Note that the serving thread runs a call that was given up, as long as `by` returns True."""


class Dispatcher:
    """Serves the methods of one object in this process."""

    def __init__(
        self,
        target: Any,
        me: WorkerId,
        methods: Mapping[str, Invocation],
        generations: Generations | None = None,
        inbox: Inbox | None = None,
        open_rpc: Callable[[], Any] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Before a call is run, `generations` catches up with the call's generation, in the serving thread.

        `inbox` is the queue of the serving thread; a transport has one that suits it. `open_rpc` answers `OPEN_RPC`, in
        a thread of its own.
        """
        self._generations = generations
        self._open_rpc, self._now = open_rpc, now
        self._target, self._me, self._methods = target, str(me), dict(methods)
        self._coroutines = {n for n in methods if inspect.iscoroutinefunction(getattr(type(target), n))}
        self._lock = threading.Lock()
        self._callers: dict[tuple[str, int], _CallerState] = {}
        self._inbox = queue.SimpleQueue() if inbox is None else inbox
        # What the serving thread runs.
        self._running: _IncomingCall | None = None
        self._first: list[Callable[[], None]] = []
        self._stopped = self._closed = False
        self._disturbed = 0
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._spans = spans()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looping: threading.Thread | None = None

    def handle(self, parcel: Parcel, reply: Reply) -> None:
        """Take a request from a transport. A request that came before is not run again and gets the same answer."""
        try:
            request = decode_request(parcel.head)
            given_up = decode_giving_up(request.body) if request.method == _GIVE_UP else None
        except FrameError as error:
            reply(self._error(error))
            return
        with self._lock:
            caller = self._caller(request.caller)
            if caller.incarnation > request.caller.incarnation:
                # Its caller has died meanwhile, and a later incarnation has called.
                return
            for seq in request.acks:
                caller.runs.pop(seq, None)
            if given_up is not None and (other := caller.runs.get(given_up[0])) is not None:
                other.lost = other.lost or given_up[1]
                self._give_up([other])
            known = caller.runs.get(request.seq)
            if known is not None and known.outcome is None:
                known.replies.append(reply)
                return
            if known is None and request.method not in (_ACK, _GIVE_UP):
                run = caller.runs[request.seq] = _IncomingCall(request, parcel.buffers, [reply])
        if request.method in (_ACK, _GIVE_UP):
            reply(_NONE)
        elif known is not None and known.outcome is not None:
            reply(known.outcome)
        else:
            self._route(run)

    def _caller(self, address: WorkerId) -> _CallerState:
        """The state of a calling rank; what was kept for an earlier incarnation is dropped."""
        role, rank, incarnation = address
        caller = self._callers.get((role, rank))
        now = self._now()
        if caller is None or caller.incarnation < incarnation:
            if role.startswith(VISITOR):
                self._forget_visitors(now)
            if caller is not None:
                self._give_up(caller.runs.values())
            caller = self._callers[role, rank] = _CallerState(incarnation, now)
        caller.heard = now
        return caller

    def _give_up(self, runs: Iterable[_IncomingCall]) -> None:
        """Mark calls as given up. They run to their ends; but if the serving thread idles in one while the process
        group is to be formed, the agent gets a report."""
        for run in runs:
            run.given_up = True
        self._look_at_running()

    def _look_at_running(self) -> None:
        if self._generations is not None and self._runs_for_nobody():
            self._generations.kept_away(self._runs_for_nobody)

    def _runs_for_nobody(self) -> bool:
        run = self._running
        return run is not None and run.given_up

    def _forget_visitors(self, now: float) -> None:
        """Drop what is kept for visitors that have left without a word."""
        for key, caller in list(self._callers.items()):
            silent = key[0].startswith(VISITOR) and now - caller.heard > VISITOR_RESULTS_TTL
            if silent and all(run.outcome is not None for run in caller.runs.values()):
                del self._callers[key]

    def _route(self, run: _IncomingCall) -> None:
        name = run.request.method
        if self._stopped:
            self._turn_away(run)
        elif name == DESCRIBE:
            self._answer(run, lambda: self._methods)
        elif name == OPEN_RPC and self._open_rpc is not None:
            # In a thread, as the main thread may be busy with a long call.
            self._submit(OPEN_RPC, 1, run, partial(self._answer, run, self._open_rpc))
        elif (options := self._methods.get(name)) is None:
            there = ", ".join(sorted(self._methods)) or "none"
            problem = f"{self._me} has no method {name!r}; its methods are: {there}"
            self._finish(run, self._error(AttributeError(problem)))
        elif name in self._coroutines:
            asyncio.run_coroutine_threadsafe(self._run_async(run), self._event_loop())
        elif options.concurrency > 1:
            self._submit(name, options.concurrency, run, partial(self._run_beside, run))
        else:
            self._inbox.put(run)

    def _submit(self, name: str, threads: int, run: _IncomingCall, work: Callable[[], None]) -> None:
        try:
            self._pool(name, threads).submit(work)
        except RuntimeError:
            if not self._closed:
                raise
            # This process is ending: the caller's wait for the answer fails with WorkerLost.

    def _turn_away(self, run: _IncomingCall) -> None:
        problem = f"{self._me} does not take calls any more"
        self._finish(run, self._error(WorkerLost(problem, "it was told to stop", worker=self._me)))

    def _answer(self, run: _IncomingCall, answer: Callable[[], Any]) -> None:
        """Answer a request to the process, not to the target."""
        try:
            outcome = self._encoded(answer(), run.request.method)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            outcome = self._error(error)
        self._finish(run, outcome)

    def serve(self) -> None:
        """Run calls in this thread, one at a time, until `stop`.

        Exceptions of a method that are not `Exception`, like SystemExit, are raised here, and a `ChannelError` if
        nobody can connect to this process any more.
        """
        # Before the first call, too, this worker has nothing to do.
        with page().idle():
            while not self._stopped:
                self._serve_one()

    def _serve_one(self) -> None:
        """Wait for the next call, and run it."""
        run = self._inbox.get()
        if isinstance(run, ChannelError):
            raise run
        while self._first:
            self._first.pop(0)()
        if run is not None and not self._stopped:
            if self._generations is not None:
                self._generations.catch_up(run.request.generation)
            self._running = run
            self._look_at_running()
            try:
                with page().call():
                    self._run(run)
            finally:
                self._running = None

    def run_first(self, action: Callable[[], None]) -> None:
        """Run `action` in the serving thread before the next call. Calls that run now and fail are `INTERRUPTED`."""
        self._disturbed += 1
        self._first.append(action)
        self._inbox.put(None)

    def stop(self) -> None:
        """Make `serve` return after the current call."""
        self._stopped = True
        self._inbox.put(None)

    def close(self) -> None:
        """End the other threads. Calls that run there are not waited for."""
        self._closed = True
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            await_end(self._looping)
            if self._looping is not None and not self._looping.is_alive():
                self._loop.close()

    def _refused(self, run: _IncomingCall) -> bool:
        """Refuse a joint call that was made for an earlier generation, or has lost another worker: not all of its
        workers will run it."""
        if self._generations is None or not run.request.joint:
            return False
        generation = self._generations.generation
        if run.request.generation >= generation and not run.lost:
            return False
        self._finish(run, Parcel(encode_refusal(generation)))
        return True

    def _run(self, run: _IncomingCall) -> None:
        """Run a call. SystemExit and its like are raised: they end this program."""
        if self._refused(run):
            return
        before = self._disturbed
        began = time.time_ns()
        try:
            args, kwargs = self._arguments(run)
            call = partial(getattr(self._target, run.request.method), *args, **kwargs)
            result = self._guarded(run, call)
            # Free the arguments before the answer is sent, so that the caller can use their memory again.
            del args, kwargs, call
            outcome = self._encoded(result, run.request.method)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            outcome = self._error(error, disturbed=self._disturbed != before or self._explained(error))
            # The frames of the exception hold the arguments of the call.
            error.__traceback__ = None
        self._trace(run, began, time.time_ns())
        # The job may end at once when a caller has its last answer.
        self._finish(run, outcome)

    def _trace(self, run: _IncomingCall, began: int, ended: int) -> None:
        """Keep the span of a call that was made, if spans are on; the answer does not wait until it is written."""
        if self._spans.on:
            request = run.request
            self._spans.keep(partial(_span, request.method, request.caller, request.seq, began, ended))

    def _guarded(self, run: _IncomingCall, call: Callable[[], Any]) -> Any:
        if self._generations is None or run is not self._running:
            return call()
        return self._generations.guard(call)

    def _explained(self, error: BaseException) -> bool:
        """Return True if the end of the group explains `error`; False while that is unknown, as at exit."""
        try:
            return self._generations is not None and self._generations.explain(error)
        except Exception as other:  # noqa: BLE001 - the caller has to get the first one
            report_error(other)
            return False

    def _run_beside(self, run: _IncomingCall) -> None:
        """The same in a thread of a pool, from which an exception cannot end the program."""
        try:
            self._run(run)
        except BaseException as leave:  # noqa: BLE001 - it ends the program, not the thread
            self.leave(leave)

    def leave(self, leave: BaseException) -> None:
        """Raise `leave` in the serving thread, which ends the program. Called in any thread."""

        def raise_it() -> None:
            raise leave

        self.run_first(raise_it)

    async def _run_async(self, run: _IncomingCall) -> None:
        if self._refused(run):
            return
        before = self._disturbed
        began = time.time_ns()
        try:
            args, kwargs = self._arguments(run)
            outcome = self._encoded(
                await getattr(self._target, run.request.method)(*args, **kwargs), run.request.method
            )
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the caller gets it
            explained = await asyncio.to_thread(self._explained, error)
            outcome = self._error(error, disturbed=self._disturbed != before or explained)
        except BaseException as leave:  # noqa: BLE001 - it ends the program, not the task
            self.leave(leave)
            return
        self._trace(run, began, time.time_ns())
        self._finish(run, outcome)

    def _arguments(self, run: _IncomingCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        buffers, run.buffers = run.buffers, ()
        try:
            args, kwargs = load(run.request.body, buffers)
        except Exception as error:
            problem = f"the arguments of {run.request.method} cannot be unpickled in {self._me}: {error}"
            raise EncodingError(problem, "are their classes known to the workload's process?") from error
        return args, kwargs

    def _encoded(self, result: Any, method: str) -> Parcel:
        if result is None:
            return _NONE
        what = f"the result of `{method}` in {self._me}"
        try:
            head, buffers = dump(result, what)
        except EncodingError as error:
            raise unsendable({what: result}, error, error.remedy) from None
        return own(Parcel(OK + head, buffers))

    def _error(self, error: BaseException, *, disturbed: bool = False) -> Parcel:
        head, buffers = dump_error(error, self._me)
        return own(Parcel((INTERRUPTED if disturbed else ERROR) + head, buffers))

    def _finish(self, run: _IncomingCall, outcome: Parcel) -> None:
        with self._lock:
            run.outcome, replies = outcome, run.replies
            run.replies = []
        for reply in replies:
            try:
                reply(outcome)
            except UnirunError as error:
                # Nothing was sent. A caller that asks again gets this error, too.
                run.outcome = outcome = self._error(error)
                reply(outcome)

    def _pool(self, name: str, size: int) -> ThreadPoolExecutor:
        if name not in self._pools:
            self._pools[name] = ThreadPoolExecutor(size, thread_name_prefix=f"unirun-{name}")
        return self._pools[name]

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._looping = threading.Thread(target=self._loop.run_forever, name="unirun-async", daemon=True)
            self._looping.start()
        return self._loop


def _span(method: str, caller: WorkerId, seq: int, began: int, ended: int) -> TraceSpan:
    """The span of a call that was run."""
    return TraceSpan("run", method, began, ended, str(WorkerId(*caller)), seq)


_NONE = Parcel(OK + dump(None, "None")[0])
