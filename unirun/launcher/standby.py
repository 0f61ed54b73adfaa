"""The agent's care that its job has a master: it finds whoever leads, and starts another when nobody does.

Any number of agents may start one at once: the store lets one of them lead, and the others end.
"""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time

from unirun.errors import RendezvousError, StoreError, WireError
from unirun.rendezvous import JobDir
from unirun.rendezvous.masters import MasterGone, Masters
from unirun.reporting import report
from unirun.wire import Token
from unirun.wire.aio import Stream

LOOK_AGAIN = 0.03
"""Seconds between two looks for a master, as long as there is none."""

CHECK = 3.0
"""Seconds between two looks for another master, as long as there is one."""

PATIENCE = 2.0
"""Seconds in which the job's first master, or one that is not known to be dead, may appear by itself."""

DELAY = 1.0
MAX_DELAY = 4.0
"""Seconds between two attempts to start a master, at first and at most."""

STEADY = 10.0
"""Seconds after which a master has led, so that the next one is started without delay. Masters that end sooner, one
after the other, are started ever later."""


class Standby:
    """Of one agent. `lock` is the job's lock, which every master holds."""

    def __init__(self, job: JobDir, token: Token, lock: int) -> None:
        self._job, self._lock = job, lock
        self._masters = Masters(job, token)
        self._started: list[subprocess.Popen[bytes]] = []
        self._not_before = 0.0
        self._delay = DELAY
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
            self._delay = DELAY
        trouble = "nobody leads"
        while known or time.monotonic() < began + patience:
            try:
                leader = await self._masters.leader()
                if leader is not None and leader.epoch >= known:
                    stream = await self._masters.reach(leader)
                    self._followed_since = time.monotonic()
                    return leader.epoch, stream
                if time.monotonic() > began + PATIENCE:
                    self._start(0)
            except MasterGone as gone:
                self._start(gone.epoch)
            except (StoreError, RendezvousError, WireError) as error:
                trouble = str(error)
            await asyncio.sleep(LOOK_AGAIN)
        raise RendezvousError(f"the job has no master after {patience:g} s: {trouble}")

    async def another(self, epoch: int) -> None:
        """Return when the master of the term `epoch` does not lead any more."""
        while True:
            await asyncio.sleep(CHECK)
            try:
                leader = await self._masters.leader()
            except StoreError:
                # The store is away: who leads goes on leading.
                continue
            if leader is not None and leader.epoch > epoch:
                return
            if leader is None:
                # It hangs: it has not kept its lease. Until another leads there is no use in leaving it.
                self._start(0)

    def close(self) -> None:
        """Close the store. Masters that were started here go on."""
        self._masters.close()

    def _start(self, deposing: int) -> None:
        """Start a master that takes the place of the one of the term `deposing`, unless that was just tried."""
        now = time.monotonic()
        if now < self._not_before:
            return
        self._not_before = now + self._delay
        self._delay = min(2 * self._delay, MAX_DELAY)
        self._started = [popen for popen in self._started if popen.poll() is None]
        try:
            self._started.append(self._popen(deposing))
        except OSError as error:
            # No process or no descriptor left: the workers go on, and it is tried again.
            report(f"unirun-agent: no master can be started: {error}")

    def _popen(self, deposing: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "unirun.master", str(self._job.path), str(deposing)]
        with open(self._job.master_log, "ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._lock],
                start_new_session=True,
            )
