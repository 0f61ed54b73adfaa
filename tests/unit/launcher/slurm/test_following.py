"""A batch job is followed through outages of Slurm, and cancelled when the user asks for that."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.effort import seeds
from unirun.errors import RendezvousError
from unirun.launcher.logs import LogFollower
from unirun.launcher.slurm import submit
from unirun.launcher.slurm.submit import LAST_LOOK, Follower
from unirun.observe.batchjob import SLURM_COMMAND_TIMEOUT, SLURM_OUTAGE_TIMEOUT, BatchState
from unirun.observe.jobdir import JobDir

LATE = SLURM_COMMAND_TIMEOUT + LAST_LOOK + 1.0
"""Seconds after which a command has looked again."""


class Cluster:
    """Slurm, a batch job in it and the user, in simulated time: outages, the end of the job, and signals."""

    def __init__(self, rng: random.Random) -> None:
        self.now, self.asked = 1000.0, 1000.0
        self.outages: list[tuple[float, float]] = []
        at = self.now
        for _ in range(rng.randrange(5)):
            begin = at + rng.choice((60.0, 600.0, 3000.0))
            at = begin + rng.choice(
                (20.0, 400.0, SLURM_OUTAGE_TIMEOUT - 2 * LATE, SLURM_OUTAGE_TIMEOUT + 4 * LATE)
            )
            self.outages.append((begin, at))
        self.end = at + rng.choice((1.0, 100.0, 1000.0))
        self.signals = sorted(rng.uniform(self.now, self.end - 1.0) for _ in range(rng.randrange(5)))
        self.cancelled: list[tuple[float, bool]] = []
        self.sent: list[signal.Signals] = []

    def clock(self) -> float:
        return self.now

    def state(self, batch: str) -> BatchState:
        assert self.now - self.asked <= LATE
        self.asked = self.now
        if any(begin <= self.now < end for begin, end in self.outages):
            self.now += SLURM_COMMAND_TIMEOUT
            raise RendezvousError("scontrol has not answered")
        return BatchState("RUNNING" if self.now < self.end else "COMPLETED", code=0)

    def cancel(self, batch: str, *, now: bool = False) -> None:
        self.cancelled.append((self.now, now))


class Woken(threading.Event):
    """The event that a signal sets."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster

    def wait(self, timeout: float | None = None) -> bool:
        cluster = self._cluster
        assert timeout is not None
        cluster.now += timeout
        while cluster.signals and cluster.signals[0] <= cluster.now:
            cluster.now = max(cluster.signals.pop(0), cluster.now - timeout)
            cluster.sent.append(signal.SIGINT)
        return False


@pytest.mark.parametrize("seed", seeds(100))
def test_a_batch_job_is_followed_to_its_end_or_until_slurm_is_away_for_long(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(random.Random(seed))
    signals = [*cluster.signals]
    monkeypatch.setattr(submit, "time", SimpleNamespace(monotonic=cluster.clock))
    monkeypatch.setattr(submit, "batch_state", cluster.state)
    monkeypatch.setattr(submit, "cancel", cluster.cancel)
    follower = Follower(JobDir(tmp_path), "12", quiet=True)
    follower._signals, follower._woken = cluster.sent, Woken(cluster)
    long = [begin for begin, end in cluster.outages if end - begin > SLURM_OUTAGE_TIMEOUT]
    logs = LogFollower()
    try:
        state = follower._to_its_end(logs)
    except RendezvousError:
        assert long
        assert -LATE <= cluster.now - long[0] - SLURM_OUTAGE_TIMEOUT <= 2 * LATE
    else:
        assert not long
        assert state.state == "COMPLETED"
        assert cluster.now - cluster.end <= LATE
    finally:
        logs.finish()
    heard = [each for each in signals if each < cluster.now - LATE]
    assert min(len(heard), 1) <= len(cluster.cancelled) <= 2
    if len(heard) > 1:
        assert [now for _, now in cluster.cancelled][-1]
    for when, now in cluster.cancelled:
        assert len([each for each in signals if each <= when]) > now


def test_output_of_a_batch_job_is_shown_whole_when_a_pipe_takes_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = b""

    def write(handle: int, data: bytes) -> int:
        nonlocal shown
        assert handle == 1
        shown += data[:3]
        return len(data[:3])

    monkeypatch.setattr(submit, "os", SimpleNamespace(write=write))
    Follower(JobDir(tmp_path), "12", quiet=True)._show(b"a line of output\n")
    assert shown == b"a line of output\n"
