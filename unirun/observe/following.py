"""Waiting for a job's end from outside, through the deaths of its masters."""

from __future__ import annotations

import time

from unirun.errors import RendezvousError, StoreError, WireError
from unirun.observe.status import ENDED, JobStatus, read_status
from unirun.rendezvous.jobdir import JobDir
from unirun.rendezvous.masters import call_master
from unirun.wire.messages import Attach, Ended, Stop

LOOK_AGAIN = 0.05
"""Seconds between two looks for a master, as long as there is none."""


def follow_to_end(job: JobDir, stop: Stop | None = None, timeout: float | None = None) -> JobStatus:
    """Wait until `job` has ended, or is lost; first tell it to `stop`, if that is given.

    Raises `TimeoutError` after `timeout` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    told = False
    while (status := read_status(job)).phase not in ENDED:
        try:
            with call_master(job) as master:
                # Asked twice, it would end at once; and a master that has died may not have written that it was asked.
                heard = told and read_status(job).phase == "stopping"
                master.send(Attach() if stop is None or heard else stop)
                told = True
                while not isinstance(master.receive(_left(deadline)), Ended):
                    continue
        except (StoreError, WireError, RendezvousError):
            # This master is gone, or time is over; the job's end is in its status, or another leads in a moment.
            time.sleep(LOOK_AGAIN)
        if deadline is not None and time.monotonic() >= deadline and read_status(job).phase not in ENDED:
            raise TimeoutError(f"job {job.run_id} has not ended within {timeout:g} s")
    return status


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
