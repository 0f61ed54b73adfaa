"""Find the job's master for an agent, and start a candidate when there is no master.

Several agents may start candidates at once: one is elected in the store, and the others exit. `candidacy` decides when.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Protocol

from msgspec.structs import replace

from unirun.errors import RendezvousError, WireError
from unirun.launcher.process import process_has_ended
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.election import Leader
from unirun.rendezvous.masters import MasterGone, Masters, appointed
from unirun.values import Value
from unirun.wire.address import TcpAddress
from unirun.wire.aio import Stream
from unirun.wire.credentials import Credentials, load_credentials
from unirun.wire.messages import AgentTask
from unirun.wire.reporting import report

# Decide when an agent starts a candidate for master: the agents of a job take turns, so that few of them do.

TURN_DELAY = 0.5
"""Seconds in which the number of agents that have had their turn doubles. A candidate leads after 0.4 s, by which time
one or two have started; of 1 000 agents the last has its turn after 5 s."""

DELAY = 1.0
MAX_DELAY = 4.0
"""Initial and maximum back-off in seconds between two candidates of one agent."""

PER_NODE_DELAY = 0.25
"""Minimum back-off in seconds for each node of the job, for masters that fail on every node."""

CANDIDATE_START_TIMEOUT = 5.0
"""Seconds in which a live candidate should become leader. Until then its agent starts no other."""


class CandidateAttempts(Value):
    """The candidates that one agent has started since a master last led for long: their number, the time of the last
    one (``time.monotonic``), and whether it is still starting up."""

    number: int = 0
    started: float = -math.inf
    coming_up: bool = False


def turns(nodes: Sequence[str], epoch: int) -> dict[str, float]:
    """Seconds that the agent of each node waits before it starts a successor to the leader of term `epoch`.

    The order of `nodes` differs between terms and is the same for all agents; the first does not wait.
    """
    order = sorted(nodes, key=lambda node: _place(node, epoch))
    return {node: TURN_DELAY * math.log2(place + 1) for place, node in enumerate(order)}


def start_at(vacant: float, wait: float, attempts: CandidateAttempts, nodes: int) -> float:
    """The time at which an agent starts a candidate, unless there is a leader by then.

    `vacant` is the time since which there is no leader, `wait` the agent's turn (`turns`), `nodes` the number of nodes.
    """
    if not attempts.number:
        return vacant + wait
    # A job may train for hours without a master: the power of its attempts is no float then.
    delay = max(DELAY * min(2 ** (attempts.number - 1), MAX_DELAY / DELAY), PER_NODE_DELAY * nodes)
    pause = CANDIDATE_START_TIMEOUT if attempts.coming_up else delay
    return max(vacant + wait, attempts.started + pause)


def _place(node: str, epoch: int) -> bytes:
    return blake2b(f"{epoch} {node}".encode(), digest_size=8).digest()


MASTER_RETRY_INTERVAL = 0.1
"""Seconds after which an unresponsive master is tried again."""

CANDIDATE_POLL_INTERVAL = 0.25
"""Seconds between two checks of a candidate that was started here."""

CANDIDACY_DELAY = 2.0
"""Seconds to wait for the job's first master, or for one that is not known to be dead, before starting a candidate."""

RENEWAL_DELAY = 1.0
"""Seconds in which a master whose lease has expired may renew it, before another one is started."""

BACKOFF_RESET_SECONDS = 10.0
"""Seconds of leadership after which the next candidate is started without delay. Masters that end sooner make the
back-off grow."""


class _Master(subprocess.Popen[bytes]):
    """A process that may outlive this one, so that no ResourceWarning is due."""

    def __del__(self) -> None:
        """Do nothing."""


class Following(Protocol):
    """The agent's search for the job's masters, one after another."""

    @property
    def pids(self) -> set[int]:
        """Pids of the masters that were started here, which should outlive the agent."""
        ...

    async def next(self, known: int, patience: float) -> tuple[int, Stream]:
        """Return the present master's term, `known` or later, and a stream to it.

        Raises `RendezvousError` when the job's first master (`known` is 0) does not appear within `patience` seconds;
        there is no limit for later ones.
        """
        ...

    async def again(self, epoch: int, timeout: float) -> tuple[int, Stream]:
        """Another stream to the master, of the term `epoch` or a later one, within twice `timeout` seconds. Raises
        `RendezvousError`, `WireError`."""
        ...

    async def another(self, epoch: int) -> None:
        """Wait until there is a term after `epoch`, even if its master is gone already."""
        ...

    def close(self) -> None:
        """Stop watching. Masters that were started here continue."""
        ...


class HeadFollower:
    """Follows the masters on another host, where all of them listen at the address `head`."""

    def __init__(self, head: TcpAddress, credentials: Credentials) -> None:
        self._head, self._credentials = head, credentials

    @property
    def pids(self) -> set[int]:
        """None: masters run on another host."""
        return set()

    async def next(self, known: int, patience: float) -> tuple[int, Stream]:
        """See `Following`."""
        began = time.monotonic()
        while True:
            try:
                epoch, stream = await appointed(self._head, self._credentials)
                if epoch >= known:
                    return epoch, stream
                await stream.close()
                trouble = f"the master of term {epoch} is over"
            except (RendezvousError, WireError) as error:
                trouble = str(error)
            if not known and time.monotonic() > began + patience:
                raise RendezvousError(f"the job has no master after {patience:g} s: {trouble}")
            await asyncio.sleep(MASTER_RETRY_INTERVAL)

    async def again(self, epoch: int, timeout: float) -> tuple[int, Stream]:
        """See `Following`."""
        found, stream = await appointed(self._head, self._credentials, timeout)
        if found < epoch:
            await stream.close()
            raise WireError(f"the master of term {found} is over")
        return found, stream

    async def another(self, epoch: int) -> None:
        """Wait for ever: the stream of a master that is replaced ends."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """There is nothing to stop."""


def following(job: JobDir, lock: int, task: AgentTask, tcp: socket.socket | None) -> Following:
    """The search of the agent with this `task` for masters; `lock` and `tcp` are as for `Standby`."""
    head = job.head
    if head is not None:
        return HeadFollower(head, load_credentials(job.path))
    return Standby(job, lock, task.node, task.nodes, tcp)


class Standby:
    """Follows the masters for the agent of `node`, one of `nodes`. `lock` is the job's lock, which every master
    inherits; so is `tcp`, the socket on which masters on this host listen for the agents of others."""

    def __init__(
        self, job: JobDir, lock: int, node: str, nodes: Sequence[str], tcp: socket.socket | None = None
    ) -> None:
        self._job, self._lock, self._tcp = job, lock, tcp
        self._takes_lock = False
        self._node, self._nodes = node, tuple(nodes)
        self._masters = Masters(job)
        self._started: list[_Master] = []
        self._attempts = CandidateAttempts()
        # The latest candidate, and the latest term when it was started.
        self._candidate: _Master | None = None
        self._epoch_before = 0
        self._followed_since = math.inf

    @property
    def pids(self) -> set[int]:
        """Pids of the masters that were started here, which should outlive the agent."""
        return {popen.pid for popen in self._started}

    async def next(self, known: int, patience: float) -> tuple[int, Stream]:
        """Return the present master's term, `known` or later, and a stream to it.

        Starts a candidate when there is no master. Raises `RendezvousError` when the job's first master (`known` is 0)
        does not appear within `patience` seconds; there is no limit for later ones.
        """
        began = time.monotonic()
        if began >= self._followed_since + BACKOFF_RESET_SECONDS:
            self._attempts = CandidateAttempts()
        trouble = "nobody leads"
        # The latest term whose master is known to be dead, and since when.
        dead, dead_since = 0, began
        while known or time.monotonic() < began + patience:
            seat, pause = self._masters.seat, CANDIDATE_POLL_INTERVAL
            if seat.leader is not None and seat.leader.epoch >= known and seat.leader.epoch != dead:
                if self._has_ended(seat.leader):
                    dead, dead_since = seat.leader.epoch, time.monotonic()
                    continue
                try:
                    stream = await self._masters.reach(seat.leader)
                except MasterGone:
                    dead, dead_since = seat.leader.epoch, time.monotonic()
                    continue
                except (RendezvousError, WireError) as error:
                    trouble, pause = str(error), MASTER_RETRY_INTERVAL
                else:
                    self._followed_since = time.monotonic()
                    return seat.leader.epoch, stream
            elif seat.trouble:
                # The store is away, so no candidate could be elected.
                trouble = seat.trouble
            elif seat.leader is not None and seat.leader.epoch == dead:
                pause = self._start_in_turn(dead_since, dead)
            elif seat.known:
                pause = self._start_in_turn(max(began + CANDIDACY_DELAY, seat.since), 0)
            await self._masters.news(pause if known else min(pause, patience))
        raise RendezvousError(f"the job has no master after {patience:g} s: {trouble}")

    async def again(self, epoch: int, timeout: float) -> tuple[int, Stream]:
        """See `Following`."""
        leader = self._masters.seat.leader
        if leader is None or leader.epoch != epoch:
            raise RendezvousError(f"nobody leads in term {epoch} any more")
        try:
            return epoch, await self._masters.reach(leader, timeout)
        except (RendezvousError, WireError):
            self._masters.doubt()
            raise

    async def another(self, epoch: int) -> None:
        """Wait until there is a term after `epoch`, even if its master is gone already."""
        while True:
            seat, pause = self._masters.seat, None
            if seat.epoch > epoch:
                return
            if seat.known and seat.leader is None and not seat.trouble:
                # The master hangs: its lease has expired. It is followed until there is another.
                pause = self._start_in_turn(seat.since + RENEWAL_DELAY, 0)
            await self._masters.news(pause, eager=False)

    def close(self) -> None:
        """Stop watching. Masters that were started here continue."""
        self._masters.close()

    def _has_ended(self, leader: Leader) -> bool:
        """Return True if `leader` was a process of this node and has ended. Where masters listen on a socket that this
        agent holds, connections are accepted all the same."""
        return (
            isinstance(leader.address, TcpAddress)
            and leader.address.node == self._node
            and process_has_ended(leader.pid)
        )

    def _start_in_turn(self, vacant: float, deposing: int) -> float:
        """Start a candidate if it is this agent's turn. Returns the seconds until the next check, at most
        `CANDIDATE_POLL_INTERVAL`."""
        now = time.monotonic()
        self._started = [popen for popen in self._started if popen.poll() is None]
        epoch = self._masters.seat.epoch
        coming_up = self._candidate in self._started and epoch == self._epoch_before
        self._attempts = replace(self._attempts, coming_up=coming_up)
        wait = turns(self._nodes, epoch)[self._node]
        at = start_at(vacant, wait, self._attempts, len(self._nodes))
        if now >= at:
            self._start(deposing)
        return min(max(at - now, 0.01), CANDIDATE_POLL_INTERVAL)

    def _start(self, deposing: int) -> None:
        """Start a candidate that deposes the master of the term `deposing`."""
        self._attempts = CandidateAttempts(self._attempts.number + 1, time.monotonic(), coming_up=True)
        self._epoch_before = self._masters.seat.epoch
        try:
            self._candidate = self._popen(deposing)
        except OSError as error:
            # Out of processes or descriptors: workers continue, and the start is repeated.
            self._candidate = None
            report(f"unirun-agent: no master can be started: {error}")
        else:
            self._started.append(self._candidate)

    def _take_lock(self) -> None:
        """Have the job's lock as soon as no other process has it. The agent of a made-up node that has come later has
        not inherited it; those that have may still be ending."""

        def take() -> None:
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX)

        if not self._takes_lock:
            # Where no thread can be started, the next candidate tries again.
            with suppress(RuntimeError):
                threading.Thread(target=take, name="unirun-lock", daemon=True).start()
                self._takes_lock = True

    def _popen(self, deposing: int) -> _Master:
        self._take_lock()
        tcp = [] if self._tcp is None else [self._tcp.fileno()]
        command = [sys.executable, "-P", "-m", "unirun.launcher.master", str(self._job.path), str(deposing)]
        with open(self._job.master_log, "ab") as log:
            return _Master(
                [*command, *map(str, tcp)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._lock, *tcp],
                start_new_session=True,
            )
