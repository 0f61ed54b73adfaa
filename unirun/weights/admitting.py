"""Admissions: in each producer those that it has and asks for, in the consumer's rank 0 the gate that gives them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from types import TracebackType

import msgspec

from unirun.errors import FrameError, PeerLost, QueueTimeout
from unirun.roles.transport.protocol import Parcel, Reply
from unirun.values import WorkerId
from unirun.weights.gate import Admitted, Bound, Counts, Enter, GateState
from unirun.weights.sources import PeerConnection

# Admissions of a producer: permissions to make one item each, used by `put` or given back.

_blocks: ContextVar[tuple[Admission, ...]] = ContextVar("unirun_admissions", default=())
"""The admissions in whose blocks the code of this thread or task is, the innermost last."""


class Admission:
    """Permission to make one item of a queue, which `Queue.admit` returns. The next `put` uses it.

    As a context manager it is used by a `put` in its block. Without a `put` there it is given back at the end of the
    block, also after an exception. Without a block it is used by a `put` of the thread or task that has admitted it.
    """

    def __init__(self, end: Callable[[Admission], None] | None = None, holder: object = None) -> None:
        """`end` is called with it when it is given back; None for a queue without a bound. `holder` is the thread or
        task that has asked for it."""
        self._end, self.holder = end, holder
        self.in_block = False
        # Without a block, and used by an item that may be another one's.
        self.lent = False

    def reject(self) -> None:
        """Give it back, as no item will be put for it. Does nothing when it was used or given back before; without a
        block, an item that was put in another thread or task is taken to be another one's."""
        if self._end is not None:
            self._end(self)

    def __enter__(self) -> Admission:
        self.in_block = True
        _blocks.set((*_blocks.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _blocks.set(tuple(each for each in _blocks.get() if each is not self))
        self.reject()
        self.in_block = False


def holder() -> object:
    """The task or the thread that runs this."""
    with suppress(RuntimeError):
        if task := asyncio.current_task():
            return task
    return threading.get_ident()


class Admissions:
    """The admissions of one producer. Thread-safe.

    Each of them ends with one event: its item is put, it is given back, or its block ends. When it is not known whose
    item was put, the admission that it used may be another one's. So whichever order these events have, no admission is
    left when all have come.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        """`changed` is called when an admission was used or given back."""
        self._changed = changed
        self._lock = threading.Lock()
        self._made = 0
        # Admissions without an item, the oldest first.
        self._open: dict[Admission, None] = {}
        # Admissions of open blocks that were used by a put whose block is not known.
        self._taken: list[Admission] = []

    def counts(self) -> tuple[int, int]:
        """Admissions without an item, and items that were put."""
        with self._lock:
            return len(self._open), self._made

    def admit(self, by: object = None) -> Admission:
        """Add an admission, for the thread or task `by`, or else this one."""
        made = Admission(self._reject, by or holder())
        with self._lock:
            self._open[made] = None
        return made

    def put(self) -> None:
        """Count an item that was put. It uses the admission of the innermost block, else the oldest of this thread or
        task, else the oldest one without a block, else the oldest one, if there is any."""
        mine, me = _blocks.get(), holder()
        with self._lock:
            used = next((each for each in reversed(mine) if each in self._open), None) or self._loose(me)
            if used is None:
                used = self._loose() or next(iter(self._open), None)
                if used is not None and used.in_block:
                    self._taken.append(used)
                elif used is not None:
                    used.lent = True
            if used is not None:
                del self._open[used]
            self._made += 1
        self._changed()

    def _loose(self, of: object = None) -> Admission | None:
        """The oldest admission without a block, or of these the oldest one of that thread or task."""
        found = (each for each in self._open if not each.in_block and of in (None, each.holder))
        return next(found, None)

    def _reject(self, admission: Admission) -> None:
        with self._lock:
            if admission in self._taken:
                self._taken.remove(admission)
                return
            ended: Admission | None = admission
            if admission.lent:
                # No item was put for it, so that which has used it was another one's.
                admission.lent, ended = False, self._loose()
            if ended is None or ended not in self._open:
                return
            del self._open[ended]
            if ended.in_block and self._taken:
                # The item may be that of this block, made in a thread that does not know it. The block of which the
                # admission was taken has it back, and gives it back if it does not need it.
                self._open = {self._taken.pop(0): None, **self._open}
                return
        self._changed()

    def close(self, kept: int) -> None:
        """Note that the producer puts no more, and that all but `kept` of its items are gone."""
        with self._lock:
            self._made = kept
            self._open.clear()
            self._taken.clear()
        self._changed()


async def settled(future: Future[None], seconds: float) -> bool:
    """Wait in an event loop; False if the future has no result in so many seconds. It stays as it is when the task is
    cancelled."""
    done, _ = await asyncio.wait({asyncio.wrap_future(future)}, timeout=seconds)
    return bool(done)


# The requests of a producer to the gate. Threads and tasks wait in one line, and one request asks for all of them.

GATE_RETRY_INTERVAL = 1.0
"""Seconds after which a gate is looked for again that could not be reached."""


Reach = Callable[[PeerConnection | None, bool], PeerConnection | None]
"""The connection to the gate that is there now: the one that is given, or another one, which is made if the second
argument is True; None if there is none. Raises `PeerLost` when the gate has ended for good."""


class _Waiter:
    """A thread or a task that waits for an admission. `news`: it has got one, or has to look."""

    def __init__(self) -> None:
        self.news: Future[None] = Future()
        self.holder = holder()
        self.admission: Admission | None = None

    def wake(self) -> None:
        if not self.news.done():
            self.news.set_result(None)


_admitted = msgspec.json.Decoder(Admitted)


class Entrance:
    """The way of one producer to the gate. Thread-safe.

    Those that wait also connect and send: whenever something has happened, the first one of them is woken. Where none
    waits, a thread connects if there is something to tell.
    """

    def __init__(
        self,
        queue: str,
        me: WorkerId,
        admissions: Admissions,
        counts: Callable[[], Counts],
        reach: Reach,
        consumer: str,
    ) -> None:
        self._queue, self._me, self._consumer = queue, me, consumer
        self._admissions, self._counts, self._reach = admissions, counts, reach
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._line: PeerConnection | None = None
        # In the order in which they have come.
        self._waiters: dict[_Waiter, None] = {}
        self._number = 0
        self._unanswered: set[int] = set()
        self._untold = self._telling = False

    def admit(self, deadline: float) -> Admission:
        """Wait for an admission. Raises `QueueTimeout`, `PeerLost`."""
        waiter = self._joined()
        try:
            while True:
                seconds = self._seconds(deadline, self.tell())
                with suppress(TimeoutError):
                    waiter.news.result(seconds)
                if found := self._looked(waiter):
                    return found
        except BaseException:
            self._leave(waiter)
            raise

    async def admit_async(self, deadline: float) -> Admission:
        """As `admit`, in an event loop."""
        waiter = self._joined()
        try:
            while True:
                await settled(waiter.news, self._seconds(deadline, await self._told(waiter)))
                if found := self._looked(waiter):
                    return found
        except BaseException:
            self._leave(waiter)
            raise

    def _joined(self) -> _Waiter:
        waiter = _Waiter()
        with self._lock:
            self._waiters[waiter] = None
            self._untold = True
        return waiter

    async def _told(self, waiter: _Waiter) -> bool:
        """As `tell`. The first one that waits connects, in a thread, as that may take seconds."""
        line = self._reach(self._line, False)
        if line is not None and line is self._line:
            return self.tell(connect=False)
        with self._lock:
            first = next(iter(self._waiters), None)
        return first is waiter and await asyncio.to_thread(self.tell)

    def _seconds(self, deadline: float, reached: bool) -> float:
        """The time to wait when the gate was `reached`, or not. Raises `QueueTimeout`."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._held_back()
        return left if reached else min(left, GATE_RETRY_INTERVAL)

    def _looked(self, waiter: _Waiter) -> Admission | None:
        with self._lock:
            if waiter.admission is None and waiter.news.done():
                waiter.news = Future()
            return waiter.admission

    def _leave(self, waiter: _Waiter) -> None:
        """Note that it waits no longer. An admission that has come meanwhile is given back."""
        with self._lock:
            self._waiters.pop(waiter, None)
            self._untold = True
        if waiter.admission is not None:
            waiter.admission.reject()
        self.tell(connect=False)
        # It may have been the one that had to look.
        self.wake()

    def wake(self) -> None:
        """Let the first one that waits look at the connection; without one, a thread if the gate does not know all."""
        with self._lock:
            first = next(iter(self._waiters), None)
            if first is not None:
                first.wake()
            if first is not None or self._telling or not self._untold:
                return
            self._telling = True
        try:
            threading.Thread(target=self._tell_alone, name="unirun-entrance", daemon=True).start()
        except RuntimeError:
            # No more threads can be started: it is told with the next news.
            self._telling = False

    def _tell_alone(self) -> None:
        # First, so that news which come meanwhile are looked at, too.
        self._telling = False
        # A gate that cannot be reached is looked for again when the job has changed.
        with suppress(PeerLost):
            self.tell()

    def _held_back(self) -> QueueTimeout:
        problem = f"no item of queue {self._queue!r} may be made until {self._consumer} has trained on more"
        remedy = "does it call advance(version) after each batch? else wait longer"
        if still_open := self._admissions.counts()[0]:
            problem += f"; this process has {still_open} admissions for which it has put nothing"
            remedy = "put an item for each, or give them back: with queue.admit(): …"
        return QueueTimeout(problem, remedy, queue=self._queue)

    def changed(self) -> None:
        """The counts have changed. Called in any thread."""
        with self._lock:
            self._untold = True
        if not self.tell(connect=False):
            self.wake()

    def tell(self, *, connect: bool = True) -> bool:
        """Tell the gate what it does not know; False if it cannot be reached. Raises `PeerLost` if it connects."""
        while self._sending.acquire(blocking=connect):
            try:
                if connect:
                    self._line = self._reach(self._line, True)
                line = self._line
                if line is None or line.lost:
                    return False
                request = self._request()
                if request is not None:
                    self._send(line, request)
            finally:
                self._sending.release()
            if not self._has_more():
                return True
        # Another thread sends it.
        return True

    def close(self) -> None:
        """End the connection. The next one that waits makes another."""
        if self._line is not None:
            self._line.close()

    def _has_more(self) -> bool:
        """Return True if there is something to tell, and at most one request is on its way. The first of two is
        answered as soon as the second comes, and then the next one can be sent."""
        return self._untold and len(self._unanswered) < 2

    def _request(self) -> Enter | None:
        with self._lock:
            if not self._has_more():
                return None
            self._untold = False
            self._number += 1
            unanswered, wants = tuple(self._unanswered), len(self._waiters)
            self._unanswered.add(self._number)
            return Enter(self._queue, self._me, self._number, unanswered, self._counts(), wants)

    def _send(self, line: PeerConnection, request: Enter) -> None:
        try:
            answer = line.ask(request)
        except PeerLost as error:
            answer = Future()
            answer.set_exception(error)
        answer.add_done_callback(partial(self._answered, request))

    def _answered(self, request: Enter, answer: Future[Parcel]) -> None:
        """Called in a thread of the transport, or in the one that has sent the request."""
        lost = isinstance(answer.exception(), PeerLost)
        count = 0 if lost else _admitted.decode(answer.result().head).count
        with self._lock:
            self._unanswered.discard(request.number)
            admitted = [*self._waiters][:count]
            for waiter in admitted:
                del self._waiters[waiter]
                waiter.admission = self._admissions.admit(waiter.holder)
            # The gate counts those that nobody waits for until it is told, and has forgotten those that wait.
            self._untold |= lost or len(admitted) < count or (count > 0 and bool(self._waiters))
        for waiter in admitted:
            waiter.wake()
        if lost:
            self.wake()
        else:
            self.tell(connect=False)


# The gate: `GateState`, and the replies to those that wait.


class Gate:
    """Lets producers begin. It is in rank 0 of the consumer, which knows the version. `handle` is called in a thread of
    the transport."""

    def __init__(self, gone: Callable[[WorkerId], bool]) -> None:
        """`gone`: the worker has ended."""
        self._gone = gone
        self._lock = threading.Lock()
        self._state = GateState()
        self._replies: dict[WorkerId, Reply] = {}

    def open(self, bound: Bound, version: int, there: Callable[[], frozenset[WorkerId]]) -> None:
        """Let producers begin, once those that are `there` have told their counts. `version` weights were trained
        before."""
        if self._state.bound is None:
            self._change(lambda state: state.opened(bound, version, there()))

    def counted(self, who: WorkerId, counts: Counts) -> None:
        """A producer has told its counts."""
        self._change(lambda state: state if self._gone(who) else state.counted(who, counts))

    def advance(self, version: int) -> None:
        """These weights are trained now."""
        self._change(lambda state: state.advanced(version))

    def keep(self, count: int) -> None:
        """Consumers have so many more items that wait for their batch, or fewer."""
        self._change(lambda state: state.kept(count))

    def look(self) -> None:
        """Producers may be gone."""
        self._change(lambda state: state.lost(self._gone))

    def handle(self, request: Enter, reply: Reply) -> None:
        """Answer when the producer may begin; at once when it does not want to."""
        who = request.producer
        with self._lock:
            superseded: Reply | None = reply
            # A request that comes after the news of its sender's end would count for ever.
            if not self._gone(who):
                before = self._state
                self._state = before.asked(request)
                if self._state is not before:
                    superseded = self._replies.pop(who, None)
                    self._replies[who] = reply
        if superseded is not None:
            superseded(_answer(0))
        self._change(lambda state: state)

    def _change(self, event: Callable[[GateState], GateState]) -> None:
        with self._lock:
            self._state, admitted = event(self._state).admit()
            waiting = self._state.waiting
            replies = [
                (self._replies.pop(who), admitted.get(who, 0))
                for who in [*self._replies]
                if who not in waiting
            ]
        for reply, count in replies:
            reply(_answer(count))


def _answer(count: int) -> Parcel:
    return Parcel(msgspec.json.encode(Admitted(count)))


def counts_of(head: bytes) -> Counts:
    """The counts in the answer of a producer. Raises `FrameError` for anything else."""
    try:
        return _counts.decode(head)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"these are no counts of a queue: {error}") from error


_counts = msgspec.json.Decoder(Counts)
