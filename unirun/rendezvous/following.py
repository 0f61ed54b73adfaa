"""Waits for the end of a job from another process, also when its master changes."""

from __future__ import annotations

import time

from unirun.errors import RendezvousError, StoreError, WireError
from unirun.observe.jobdir import JobDir
from unirun.observe.status import ENDED, JobStatus, read_status, read_summary
from unirun.rendezvous.masters import call_master
from unirun.wire.blocking import BlockingStream
from unirun.wire.messages import Attach, Ended, Message, Stop

LOOK_AGAIN = 0.05
"""Seconds between two looks for a master while there is none."""

CHECK = 3.0
"""Seconds between two looks for another master while there is one, which may hang."""


def follow_to_end(job: JobDir, stop: Stop | None = None, timeout: float | None = None) -> JobStatus:
    """Wait until `job` has ended or is lost; first send it `stop`, if that is given.

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
                while not isinstance(hear(master, job, now.epoch, deadline), Ended):
                    continue
        except (StoreError, WireError, RendezvousError):
            # This master is gone, or time is over; the job's end is in its status, or another leads in a moment.
            time.sleep(LOOK_AGAIN)
        if deadline is not None and time.monotonic() >= deadline and read_summary(job).phase not in ENDED:
            raise TimeoutError(f"job {job.run_id} has not ended within {timeout:g} s")
    return read_status(job)


def hear(master: BlockingStream, job: JobDir, epoch: int, deadline: float | None) -> Message:
    """The next message of the master of term `epoch`. Raises `WireError` when that has ended, `RendezvousError` when
    another master has written the status since, or at the deadline."""
    while True:
        left = _left(deadline)
        try:
            return master.receive(CHECK if left is None else min(left, CHECK))
        except RendezvousError:
            if read_status(job).epoch != epoch or _left(deadline) == 0.0:
                raise


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
