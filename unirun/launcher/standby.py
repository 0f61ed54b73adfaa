"""The agent's care that its job has a master: it follows who leads, and starts another master when nobody does.

Several agents may start one at once: the store lets one of them lead, and the others end. `candidacy` says when.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Sequence

from msgspec.structs import replace

from unirun.errors import RendezvousError, WireError
from unirun.launcher.candidacy import Attempts, start_at, turns
from unirun.rendezvous import JobDir
from unirun.rendezvous.masters import MasterGone, Masters
from unirun.reporting import report
from unirun.wire import Token
from unirun.wire.aio import Stream

AGAIN = 0.1
"""Seconds after which a master that did not answer is tried again."""

LOOK = 0.25
"""Seconds between two looks whether a candidate that was started here still comes up."""

PATIENCE = 2.0
"""Seconds in which the job's first master, or one that is not known to be dead, may appear by itself."""

STEADY = 10.0
"""Seconds after which a master has led, so that the next one is started without delay. Masters that end sooner, one
after the other, are started ever later."""


class _Master(subprocess.Popen[bytes]):
    """A process that may outlive this one, so no warning is due when it is still running then."""

    def __del__(self) -> None:
        """Leave it alone."""


class Standby:
    """Of the agent of `node`, one of `nodes`. `lock` is the job's lock, which every master holds."""

    def __init__(self, job: JobDir, token: Token, lock: int, node: str, nodes: Sequence[str]) -> None:
        self._job, self._lock = job, lock
        self._node, self._nodes = node, tuple(nodes)
        self._masters = Masters(job, token)
        self._started: list[_Master] = []
        self._attempts = Attempts()
        # The latest candidate, and the latest term when it was started.
        self._candidate: _Master | None = None
        self._epoch_before = 0
        self._followed_since = math.inf

    @property
    def pids(self) -> set[int]:
        """The masters that were started here, which shall outlive the agent."""
        return {popen.pid for popen in self._started}

    async def next(self, known: int, patience: float) -> tuple[int, Stream]:
        """The term of the master that leads now, none before `known`, and a stream to it.

        Starts one when nobody leads. Raises `RendezvousError` when the job has had no master at all (`known` is 0)
        for `patience` seconds; later ones are waited for as long as it takes.
        """
        began = time.monotonic()
        if began >= self._followed_since + STEADY:
            self._attempts = Attempts()
        trouble = "nobody leads"
        # The term whose master is known to be dead, and since when.
        dead, dead_since = 0, began
        while known or time.monotonic() < began + patience:
            seat, pause = self._masters.seat, LOOK
            if seat.leader is not None and seat.leader.epoch >= known and seat.leader.epoch != dead:
                try:
                    stream = await self._masters.reach(seat.leader)
                except MasterGone as gone:
                    dead, dead_since = gone.epoch, time.monotonic()
                    continue
                except (RendezvousError, WireError) as error:
                    trouble, pause = str(error), AGAIN
                else:
                    self._followed_since = time.monotonic()
                    return seat.leader.epoch, stream
            elif seat.trouble:
                # The store is away, and no candidate could be elected.
                trouble = seat.trouble
            elif seat.leader is not None and seat.leader.epoch == dead:
                pause = self._start_in_turn(dead_since, dead)
            elif seat.known:
                pause = self._start_in_turn(max(began + PATIENCE, seat.since), 0)
            await self._masters.news(pause if known else min(pause, patience))
        raise RendezvousError(f"the job has no master after {patience:g} s: {trouble}")

    async def another(self, epoch: int) -> None:
        """Return when there has been a term after `epoch`, whether or not its master leads still."""
        while True:
            seat, pause = self._masters.seat, None
            if seat.epoch > epoch:
                return
            if seat.known and seat.leader is None and not seat.trouble:
                # It hangs: it has not kept its lease. Until another leads there is no use in leaving it.
                pause = self._start_in_turn(seat.since + PATIENCE, 0)
            await self._masters.news(pause, eager=False)

    def close(self) -> None:
        """Stop watching. Masters that were started here go on."""
        self._masters.close()

    def _start_in_turn(self, vacant: float, deposing: int) -> float:
        """Start a candidate if it is this agent's turn. Returns in how many seconds to ask again, at most `LOOK`."""
        now = time.monotonic()
        self._started = [popen for popen in self._started if popen.poll() is None]
        epoch = self._masters.seat.epoch
        coming_up = self._candidate in self._started and epoch == self._epoch_before
        self._attempts = replace(self._attempts, coming_up=coming_up)
        wait = turns(self._nodes, epoch)[self._node]
        at = start_at(vacant, wait, self._attempts, len(self._nodes))
        if now >= at:
            self._start(deposing)
        return min(max(at - now, 0.01), LOOK)

    def _start(self, deposing: int) -> None:
        """Start a master that takes the place of the one of the term `deposing`."""
        self._attempts = Attempts(self._attempts.number + 1, time.monotonic(), coming_up=True)
        self._epoch_before = self._masters.seat.epoch
        try:
            self._candidate = self._popen(deposing)
        except OSError as error:
            # No process or no descriptor left: the workers go on, and it is tried again.
            self._candidate = None
            report(f"unirun-agent: no master can be started: {error}")
        else:
            self._started.append(self._candidate)

    def _popen(self, deposing: int) -> _Master:
        command = [sys.executable, "-P", "-m", "unirun.master", str(self._job.path), str(deposing)]
        with open(self._job.master_log, "ab") as log:
            return _Master(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._lock],
                start_new_session=True,
            )
