"""An agent's contact with a master on another host: heartbeats, the fence, and the witness on the head."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from unirun.errors import RendezvousError, UnirunError, WireError
from unirun.failover.silence import (
    FENCE_TIMEOUT,
    HEARTBEAT_INTERVAL,
    KERNEL_KILL_DELAY,
    SILENCE_POLL_INTERVAL,
    UNMARKED_SECONDS,
)
from unirun.launcher.process import readable
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.election import is_marked, job_prefix, latest_epoch
from unirun.rendezvous.store.protocol import Store, clock
from unirun.rendezvous.store.url import open_store
from unirun.wire.address import TcpAddress
from unirun.wire.aio import Stream, StreamServer, connect
from unirun.wire.credentials import Credentials, load_credentials
from unirun.wire.messages import Dismissed, Heartbeat
from unirun.wire.reporting import lacks_threads, report
from unirun.wire.reports import Knock

T = TypeVar("T")


async def looked(look: Callable[[], T]) -> T | None:
    """Return what `look` finds, which may take long; None where no thread can be started. A worker may have used up all
    processes of its user, which is no reason to end the others."""
    try:
        return await asyncio.to_thread(look)
    except RuntimeError as error:
        if not lacks_threads(error):
            raise
        return None


# The time when an agent must kill its workers as its node may have been given up (`unirun.failover.silence`).


class Fence:
    """Until when the workers may run: `until`. Times are seconds of `clock`; there is no I/O.

    Each renewal counts from the moment at which what proves it was begun. So it does not matter when the agent comes
    to read an answer: one that was stopped and continues finds its time over, whatever waits in its sockets.
    """

    def __init__(self) -> None:
        self.until = math.inf
        self._sent: deque[float] = deque()

    def joins(self, now: float) -> None:
        """A stream to a master begins. Before the first one there are no workers."""
        self._sent.clear()
        self.until = min(self.until, now + FENCE_TIMEOUT)

    def beats(self, now: float) -> None:
        """A beat is sent."""
        self._sent.append(now)

    def answered(self, now: float, age: float) -> None:
        """The master has answered the oldest beat: no other one had a node `age` seconds before it."""
        if self._sent:
            self._renew(self._sent.popleft() - age + FENCE_TIMEOUT, now)

    def let_in(self, began: float, now: float) -> None:
        """A process of the job on the head, the only host where masters can run, has let this node in. The
        node began to connect at `began`."""
        self._renew(began + FENCE_TIMEOUT, now)

    def unmarked(self, began: float, now: float) -> None:
        """The store has no mark of this node; it was read from `began` on."""
        self._renew(began + UNMARKED_SECONDS, now)

    def quiet_for(self, now: float) -> float:
        """Seconds since the beginning of what has proved last that the node is not given up."""
        return now - (self.until - FENCE_TIMEOUT) if self.until < math.inf else 0.0

    def over(self, now: float) -> bool:
        """Return True if the workers must not run any more. That is for good."""
        return now >= self.until

    def _renew(self, until: float, now: float) -> None:
        if not self.over(now):
            self.until = max(self.until, until)


class KillTimer:
    """A timer of the kernel that kills this process, also one that is stopped or whose interpreter is busy.

    Its spawners then end all workers, as after any death of an agent. Where the whole host was stopped they do that in
    the moment in which it goes on, before the agent itself could have looked at the time.
    """

    def __init__(self) -> None:
        self._libc = _library()
        self._timer = ctypes.c_void_p()
        event = _EVENT.pack(0, signal.SIGKILL, _BY_SIGNAL)
        self._check(self._libc.timer_create(time.CLOCK_BOOTTIME, event, ctypes.byref(self._timer)))

    def set(self, at: float) -> None:
        """Kill at this time of `clock` instead of that which was set before; 0 for never."""
        when = _TIMES.pack(0, 0, int(at), int(at % 1 * 1e9))
        self._check(self._libc.timer_settime(self._timer, _ABSOLUTE, when, None))

    def close(self) -> None:
        """Remove the timer."""
        self._check(self._libc.timer_delete(self._timer))

    def _check(self, result: int) -> None:
        if result != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


_BY_SIGNAL = 0
_ABSOLUTE = 1

_EVENT = struct.Struct("Pii48x")
"""``struct sigevent``: the value, the signal, and how it is told."""

_TIMES = struct.Struct("4l")
"""``struct itimerspec``: the interval, then the first time, each in seconds and nanoseconds."""


def _library() -> ctypes.CDLL:
    """The C library that has the timers: libc, or before glibc 2.34 a library of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)


MASTER_RECEIVE_TIMEOUT = 2.0
"""Seconds without a message after which the agent connects anew. TCP repeats what is lost at growing intervals, so the
old stream may be silent for as long again as the cable was out."""

RECONNECT_TIMEOUT = 0.5
"""Seconds that an attempt has, and between the beginnings of two. After each three it has twice as long, as the master
may be busy, but at most `MAX_RECONNECT_FACTOR` times as long."""

MAX_RECONNECT_FACTOR = 8

HEAD_CONNECT_TIMEOUT = 3.0
"""Seconds in which a process on the head must let this node in: the agent there needs half a second to see that no
master does, and handshakes take longer on a busy host."""

STORE_READ_TIMEOUT = 0.9
"""Seconds in which the store must answer: a member of etcd on a dead host takes a third."""

TERM_CHECK_INTERVAL = 5.0
"""Seconds after which the store is asked again who leads, before a process on the master's host is started. Another
master that leads since the latest answer waits longer for this node (`unirun.failover.takeover.REJOIN_TIMEOUT`)."""


class Contact:
    """Keeps the contact of the agent of `node` with masters, and with those on other hosts by heartbeats.

    `again` connects anew to the master of a term, within so many seconds. `expire` is called when the agent must
    kill its workers at once; an agent that cannot do that is killed by the kernel, and its workers with it.
    """

    def __init__(
        self,
        job: JobDir,
        node: str,
        again: Callable[[int, float], Awaitable[tuple[int, Stream]]],
        expire: Callable[[], None],
    ) -> None:
        self._job, self._node = job, node
        self._again, self._expire = again, expire
        self._store: Store | None = None
        self._fence = Fence()
        self._timer: KillTimer | None = None
        self._heard = self._led = self._read = 0.0

    def begin(self, stream: Stream) -> tuple[Coroutine[Any, Any, None], ...]:
        """A stream to a master begins, with `Join`. Returns what has to run from now on."""
        self._led = clock()
        if not stream.remote:
            return ()
        self._heard = time.monotonic()
        self._read = 0.0
        self._fence.joins(clock())
        first = self._timer is None
        self._timer = self._timer or KillTimer()
        self._set_timer()
        return (self._watch(), self._look_for_signs()) if first else ()

    def close(self) -> None:
        """The workers have ended."""
        if self._timer is not None:
            self._timer.close()
            self._timer = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.set(self._fence.until + KERNEL_KILL_DELAY)

    def heard(self) -> None:
        """The master has said something."""
        self._heard = time.monotonic()

    def answered(self, beat: Heartbeat) -> None:
        """The master has answered a beat."""
        self._fence.answered(clock(), beat.age)
        self._read = beat.at
        self._set_timer()

    async def keep(self, epoch: int, stream: Stream) -> tuple[int, Stream]:
        """Send beats. Returns another stream to the master, and its term, `epoch` or a later one, when `stream` is
        silent; never for a master on this host."""
        if not stream.remote:
            await asyncio.get_running_loop().create_future()
        beating = asyncio.ensure_future(self._beat(stream))
        number = 0
        try:
            while True:
                began = time.monotonic()
                if began - self._heard >= MASTER_RECEIVE_TIMEOUT:
                    try:
                        factor = min(2 ** (number // 3), MAX_RECONNECT_FACTOR)
                        return await self._again(epoch, RECONNECT_TIMEOUT * factor)
                    except (RendezvousError, WireError):
                        number += 1
                else:
                    number = 0
                await asyncio.sleep(
                    max(began + RECONNECT_TIMEOUT, self._heard + MASTER_RECEIVE_TIMEOUT) - time.monotonic()
                )
        finally:
            beating.cancel()

    async def leads(self, epoch: int) -> bool:
        """Return False if the master of term `epoch`, on this host, has been replaced.

        Orders wait in the socket of an agent that is stopped. Meanwhile their master may have died, and the next one
        may have given the node up. While the store cannot be read nobody is elected.
        """
        began = clock()
        if began - self._led < TERM_CHECK_INTERVAL:
            return True
        # Also a store that cannot be opened any more, as that of a directory which was deleted.
        with contextlib.suppress(UnirunError):
            latest = await looked(self._latest_epoch)
            if latest is not None:
                if latest != epoch:
                    return False
                self._led = began
        return True

    async def _beat(self, stream: Stream) -> None:
        while True:
            self._fence.beats(clock())
            stream.send(Heartbeat(self._read))
            await asyncio.sleep(HEARTBEAT_INTERVAL)

    async def _watch(self) -> None:
        """Wait until the fence is over."""
        while (left := self._fence.until - clock()) > 0:
            await asyncio.sleep(min(left, SILENCE_POLL_INTERVAL))
        self._expire()

    async def _look_for_signs(self) -> None:
        """While the master does not answer, look for other signs that the node has not been given up."""
        head, credentials = self._job.head, load_credentials(self._job.path)
        while True:
            await asyncio.sleep(SILENCE_POLL_INTERVAL)
            if self._fence.quiet_for(clock()) < MASTER_RECEIVE_TIMEOUT:
                continue
            began = clock()
            if head is not None:
                # The store is on the head, and so is every master.
                if await _lets_in(head, credentials):
                    self._fence.let_in(began, clock())
            else:
                # Also a store that cannot be opened any more, as one whose password is gone.
                with contextlib.suppress(UnirunError):
                    if await looked(self._is_marked) is False:
                        self._fence.unmarked(began, clock())
            self._set_timer()

    def _is_marked(self) -> bool:
        self._store = self._store or open_store(self._job.store_url, timeout=STORE_READ_TIMEOUT)
        return is_marked(self._store, self._job.run_id, self._node)

    def _latest_epoch(self) -> int:
        # Not kept open: only the last process that closes SQLite's file removes those that are beside it.
        with contextlib.closing(open_store(self._job.store_url, timeout=STORE_READ_TIMEOUT)) as store:
            return latest_epoch(store, job_prefix(self._job.run_id))


async def _lets_in(head: TcpAddress, credentials: Credentials) -> bool:
    """Return True if a process of the job at `head` lets this node in: both have proved the token, and over
    TLS their nodes. The process is a master, or the agent there, which tells the masters
    (`unirun.launcher.contact`); so no master gives this node up now."""
    try:
        stream = await connect(head, credentials, timeout=HEAD_CONNECT_TIMEOUT)
    except (RendezvousError, WireError):
        return False
    stream.abort()
    return True


# The agent on the head accepts other nodes while no master does, so that they know that they are not given up.
#
# Where the store is a file on the head, other nodes know of the job by the head's address alone. A master there that is
# stopped, or dead with its successor on the way, does not answer. A connection that a kernel at that address accepts
# proves nothing: it may be that of another machine. The agent on the head holds the same listening socket. When
# connections wait there, it lets them prove the token, as a master would, tells the master which nodes have come
# (`Knock`), and closes them. Where it follows no master at all, it says so first: a master that is busy or stopped is
# waited for much longer than one that cannot be started.

BACKLOG_POLL_INTERVAL = 0.1
"""Seconds between two looks at the listener."""

BACKLOG_POLLS = 5
"""Looks. No master accepts connections when one waits at each look and is as old as all of them take."""

MIN_WAITING_FRACTION = 0.8
"""Fraction of that time that is enough: the first bytes of a peer may come a little later."""

ACCEPT_SECONDS = 1.0
"""Seconds for which the agent then accepts connections."""

_LAST_ACK = 8 + 12 * 4
"""Offset of ``tcpi_last_ack_recv`` in ``struct tcp_info``: 8 bytes, and 12 numbers of 4."""


class Witness:
    """Watches `listener`. `tell` gets each node that has proved the token, before it can know that it has been let in;
    `led` says whether this agent follows a master; `refused` is as for `StreamServer`."""

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        tell: Callable[[Knock], None],
        led: Callable[[], bool],
        refused: Callable[[str, int], None],
    ) -> None:
        self._listener, self._credentials = listener, credentials
        listener.setblocking(False)
        self._tell, self._led, self._refused = tell, led, refused
        # The addresses from which the token was proved.
        self._origins: set[str] = set()

    async def watch(self) -> None:
        """Let nodes in whenever no master does. An error in that, such as a lack of descriptors, ends nothing
        else."""
        while True:
            await _comes(self._listener)
            if (found := await self._old()) is None:
                continue
            try:
                await self._let_in(*found)
            except (OSError, UnirunError) as error:
                found[0].close()
                report(f"unirun-agent: no node could be let in: {error}")
                await asyncio.sleep(ACCEPT_SECONDS)

    async def _old(self) -> tuple[socket.socket, Any] | None:
        """Accept a connection that has waited too long. Returns it with its address; None when there is none.

        When many peers connect, one waits at each look although a master accepts. Then the accepted connection is
        young: it is closed, and its peer connects again.
        """
        began = time.monotonic()
        for _ in range(BACKLOG_POLLS):
            await asyncio.sleep(BACKLOG_POLL_INTERVAL)
            if not readable(self._listener, 0.0):
                return None
        try:
            sock, place = self._listener.accept()
        except OSError:
            # Another process has been faster, or the peer has gone.
            return None
        if _age(sock) >= (time.monotonic() - began) * MIN_WAITING_FRACTION:
            return sock, place
        sock.close()
        return None

    async def _let_in(self, first: socket.socket, place: Any) -> None:
        server = StreamServer(
            self._listener.dup(),
            self._credentials,
            self._send_away,
            self._refused,
            known=self._origins.__contains__,
            proved=self._knocked,
        )
        server.take(first, place)
        try:
            await asyncio.sleep(ACCEPT_SECONDS)
        finally:
            server.close()
        await server.closed()

    async def _send_away(self, stream: Stream) -> None:
        if not self._led():
            stream.send(Dismissed("the job has no master now", "see master.log of the job"))
        await stream.close()

    def _knocked(self, stream: Stream) -> None:
        self._origins.add(stream.origin)
        self._tell(Knock(stream.peer, stream.origin))


async def _comes(listener: socket.socket) -> None:
    """Wait until a connection is there to be accepted, by this process or another."""
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(listener, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(listener)


def _age(sock: socket.socket) -> float:
    """Seconds since the peer last sent anything, which it does as soon as it is connected (tcpi_last_ack_recv,
    tcp(7))."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK + 4)
    return int.from_bytes(info[_LAST_ACK:], sys.byteorder) / 1000
