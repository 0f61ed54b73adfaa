"""The way to whoever leads a job, which may be another process every time."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

from unirun.errors import ConnectionLost, RendezvousError, StoreError, WireError
from unirun.observe.jobdir import JobDir
from unirun.observe.status import ENDED, JobStatus, read_status, read_summary
from unirun.rendezvous.election import Leader, Seat, SeatWatch, job_prefix, leader_of
from unirun.rendezvous.store.url import open_store
from unirun.wire.address import Address, UnixAddress
from unirun.wire.aio import Stream, connect
from unirun.wire.blocking import BlockingStream
from unirun.wire.credentials import Credentials, load_credentials
from unirun.wire.messages import Appointed, Attach, Dismissed, Ended, Stop
from unirun.wire.reports import Message, Notice

MASTER_CONNECT_TIMEOUT = 3.0
"""Seconds in which a master must answer."""

BUSY_TIMEOUT = 2.0
_BUSY_RETRY_INTERVAL = 0.1
"""Seconds for which connecting to a master on the head is tried again while it does not accept, and between
two attempts."""


HEAD_RETRY_INTERVAL = 0.1
"""Seconds between two attempts to reach a master at the head's address, where no news can be waited for."""


class MasterGone(RendezvousError):
    """The process that the store calls the leader is not there any more."""


class Vacant(RendezvousError):
    """The agent at the head's address says that it follows no master."""


class Masters:
    """The master that leads a job (`seat`), kept up to date by a watch, and streams to it. For event loops.

    On a host without the store, masters are at one address whatever their term; the seat has term 0 then.
    """

    def __init__(self, job: JobDir) -> None:
        self._job, self._credentials = job, load_credentials(job.path)
        self._watch: SeatWatch | None = None
        self._changed = asyncio.Event()
        self._head = job.head
        self.seat = Seat(Leader(0, self._head, 0), known=True) if self._head is not None else Seat()

    async def news(self, timeout: float | None = None, *, eager: bool = True) -> None:
        """Wait until `seat` is another, for at most `timeout` seconds (None: no limit); `eager` as in `SeatWatch`."""
        if self._head is not None:
            # There is nothing to watch: the stream of a master that is replaced ends.
            await asyncio.sleep(math.inf if timeout is None else max(timeout, HEAD_RETRY_INTERVAL))
            return
        if self._watch is None:
            loop = asyncio.get_running_loop()

            def tell(seat: Seat) -> None:
                # The loop may have ended.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._tell, seat)

            self._watch = SeatWatch(
                lambda: open_store(self._job.store_url), job_prefix(self._job.run_id), tell
            )
        self._watch.hurry(eager)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        self._changed.clear()

    def doubt(self) -> None:
        """Read anew who leads, as the master does not answer."""
        if self._watch is not None:
            self._watch.doubt()

    def _tell(self, seat: Seat) -> None:
        self.seat = seat
        self._changed.set()

    async def reach(self, leader: Leader, timeout: float = MASTER_CONNECT_TIMEOUT) -> Stream:
        """A stream to `leader`, which has said that it leads. Raises `MasterGone` when that is surely not so any more,
        `RendezvousError` or `WireError` when it does not answer within `timeout` seconds, or speak within as many."""
        try:
            epoch, stream = await appointed(leader.address, self._credentials, timeout)
        except RendezvousError as error:
            if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
                raise MasterGone(str(error)) from error
            raise
        if epoch < leader.epoch:
            await stream.close()
            raise WireError(f"what listens at {leader.address} does not lead in term {leader.epoch}")
        return stream

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None


async def appointed(
    address: Address, credentials: Credentials, timeout: float = MASTER_CONNECT_TIMEOUT
) -> tuple[int, Stream]:
    """The term of the master that listens at `address`, and a stream to it. It must answer within `timeout` seconds,
    and speak within as many. Raises `RendezvousError`, of which `Vacant` is one, `WireError`.
    """
    stream = await connect(address, credentials, timeout=timeout)
    try:
        async with asyncio.timeout(timeout):
            first = await stream.receive()
        if isinstance(first, Dismissed):
            raise Vacant(first.problem, first.remedy)
        if not isinstance(first, Appointed):
            raise WireError(f"what listens at {address} is no master")
    except BaseException as error:
        await stream.close()
        if isinstance(error, TimeoutError):
            raise WireError(f"the master at {address} does not say anything") from error
        raise
    return first.epoch, stream


def _check(first: Message, leader: Leader) -> None:
    if isinstance(first, Dismissed):
        raise ConnectionLost(first.problem)
    if not isinstance(first, Appointed) or first.epoch < leader.epoch:
        raise WireError(f"what listens at {leader.address} does not lead in term {leader.epoch}")


def call_master(job: JobDir) -> BlockingStream:
    """A stream to the master of `job`. Raises `RendezvousError` when there is none now, `StoreError`, `WireError`.

    It has said that it leads, and written before how the job stands. As long as the store is away it is looked for in
    the job's directory, so that a job can be stopped then too.
    """
    credentials = load_credentials(job.path)
    if job.head is not None:
        return _led_from(job.head, credentials)
    try:
        store = open_store(job.store_url)
        try:
            leader = leader_of(store, job_prefix(job.run_id))
        finally:
            store.close()
    except StoreError:
        master = _listening(job, credentials)
        if master is None:
            raise
        return master
    if leader is None:
        raise RendezvousError(f"job {job.run_id} has no master now", "try again in a moment")
    return _led(leader, credentials)


def _led_from(head: Address, credentials: Credentials) -> BlockingStream:
    """A stream to the master on the head. While it is too busy to accept, or its successor is on the way, the agent
    there lets this process in and closes the stream: it is tried again for `BUSY_TIMEOUT` seconds."""
    deadline = time.monotonic() + BUSY_TIMEOUT
    while True:
        try:
            return _led(Leader(0, head, 0), credentials)
        except ConnectionLost:
            if time.monotonic() > deadline:
                raise
        time.sleep(_BUSY_RETRY_INTERVAL)


def _led(leader: Leader, credentials: Credentials) -> BlockingStream:
    """A stream to `leader`, which has said that it leads."""
    master, first = _call(leader.address, credentials)
    try:
        _check(first, leader)
    except BaseException:
        master.close()
        raise
    return master


def _listening(job: JobDir, credentials: Credentials) -> BlockingStream | None:
    """A stream to the master that listens in the job's directory; of several, to that of the latest term."""
    found: dict[int, BlockingStream] = {}
    for path in job.master_sockets():
        try:
            stream, first = _call(UnixAddress.here(path), credentials)
        except (RendezvousError, WireError):
            # It has died and left its socket.
            continue
        if isinstance(first, Appointed):
            found[first.epoch] = stream
        else:
            stream.close()
    latest = found.pop(max(found)) if found else None
    for stream in found.values():
        stream.close()
    return latest


def _call(address: Address, credentials: Credentials) -> tuple[BlockingStream, Message]:
    """A stream to who listens at `address`, and its first word: one that is closed before it was read takes with it
    what was sent on it."""
    stream = BlockingStream.connect(address, credentials, timeout=MASTER_CONNECT_TIMEOUT)
    try:
        return stream, stream.receive(MASTER_CONNECT_TIMEOUT)
    except BaseException:
        stream.close()
        raise


# Waits for the end of a job from another process, also when its master changes.

MASTER_POLL_INTERVAL = 0.05
"""Seconds between two looks for a master while there is none."""

SUCCESSOR_POLL_INTERVAL = 3.0
"""Seconds between two looks for another master while there is one, which may hang."""


def follow_to_end(
    job: JobDir,
    stop: Stop | None = None,
    timeout: float | None = None,
    tell: Callable[[Notice], object] = lambda _: None,
) -> JobStatus:
    """Wait until `job` has ended or is lost; first send it `stop`, if that is given. `tell` is called with what the
    master has to say meanwhile.

    Raises `TimeoutError` after `timeout` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    told = False
    while read_summary(job).phase not in ENDED:
        try:
            with call_master(job) as master:
                now = read_status(job)
                # Asked twice, it would end at once; and a master that has died may not have written that it was asked.
                heard = told and now.phase == "stopping"
                master.send(Attach() if stop is None or heard else stop)
                told = True
                while not isinstance(message := hear(master, job, now.epoch, deadline), Ended):
                    if isinstance(message, Notice):
                        tell(message)
        except (StoreError, WireError, RendezvousError):
            # This master is gone, or time is over; the job's end is in its status, or another leads in a moment.
            time.sleep(MASTER_POLL_INTERVAL)
        if deadline is not None and time.monotonic() >= deadline and read_summary(job).phase not in ENDED:
            raise TimeoutError(f"job {job.run_id} has not ended within {timeout:g} s")
    return read_status(job)


def hear(master: BlockingStream, job: JobDir, epoch: int, deadline: float | None) -> Message:
    """The next message of the master of term `epoch`. Raises `WireError` when that has ended, `RendezvousError` when
    another master has written the status since, or at the deadline."""
    while True:
        left = _left(deadline)
        try:
            return master.receive(
                SUCCESSOR_POLL_INTERVAL if left is None else min(left, SUCCESSOR_POLL_INTERVAL)
            )
        except RendezvousError:
            if read_status(job).epoch != epoch or _left(deadline) == 0.0:
                raise


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
