"""A batch job is followed through outages of Slurm, and cancelled when the user asks for that."""

from __future__ import annotations

import random
import re
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.effort import seeds
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import RendezvousError
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
        self.code = rng.choice((0, 1, 7))
        self.cancelled: list[tuple[float, bool]] = []
        self.sent: list[signal.Signals] = []
        # The times at which the command gets signals: they may come while it asks Slurm.
        self.got: list[float] = []
        self.woken: threading.Event | None = None
        self._rng = rng

    def clock(self) -> float:
        return self.now

    def state(self, batch: str) -> BatchState:
        assert self.now - self.asked <= LATE
        self.asked = self.now
        away = any(begin <= self.now < end for begin, end in self.outages)
        state = BatchState("RUNNING" if self.now < self.end else "COMPLETED", code=self.code)
        self.now += SLURM_COMMAND_TIMEOUT if away else self._rng.choice((0.0, 0.0, 0.5))
        while self.signals and self.signals[0] <= self.now:
            self.get(self.now)
        if away:
            raise RendezvousError("scontrol has not answered")
        return state

    def get(self, when: float) -> None:
        """The command gets the next signal."""
        self.signals.pop(0)
        self.got.append(when)
        self.sent.append(signal.SIGINT)
        assert self.woken is not None
        self.woken.set()

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
        if not self.is_set():
            until = cluster.now + timeout
            cluster.now = min([*cluster.signals[:1], until])
            if cluster.now < until:
                cluster.get(cluster.now)
        return self.is_set()


@pytest.mark.parametrize("seed", seeds(100))
def test_a_batch_job_is_followed_to_its_end_or_until_slurm_is_away_for_long(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(random.Random(seed))
    signals, handler = [*cluster.signals], signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(submit, "time", SimpleNamespace(monotonic=cluster.clock))
    monkeypatch.setattr(submit, "batch_state", cluster.state)
    monkeypatch.setattr(submit, "cancel", cluster.cancel)
    follower = Follower(JobDir(tmp_path), "12", quiet=True)
    follower._signals, follower._woken = cluster.sent, Woken(cluster)
    cluster.woken = follower._woken
    long = [begin for begin, end in cluster.outages if end - begin > SLURM_OUTAGE_TIMEOUT]
    try:
        code = follower.run()
        assert signal.getsignal(signal.SIGINT) is handler
    except RendezvousError:
        assert long
        assert -LATE <= cluster.now - long[0] - SLURM_OUTAGE_TIMEOUT <= 2 * LATE
    else:
        assert not long
        assert cluster.now - cluster.end <= LATE
        # A job that has succeeded all the same has not failed.
        assert code == (128 + signal.SIGINT if cluster.got and cluster.code else cluster.code)
    heard = [each for each in signals if each < cluster.now - LATE]
    assert min(len(heard), 1) <= len(cluster.cancelled) <= len(cluster.got)
    if len(heard) > 1:
        assert [now for _, now in cluster.cancelled][-1]
    for when, now in cluster.cancelled:
        assert len([each for each in signals if each <= when]) > now
        assert when in cluster.got, "it does not wait for the next look"


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


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("TERM TERM", "TERM"),
        ("TERM INT", "TERM INT"),
        ("INT TERM INT", "INT INT"),
        ("INT INT INT", "INT INT INT"),
    ],
)
def test_only_an_interrupt_after_a_signal_hurries(sent: str, kept: str, tmp_path: Path) -> None:
    """Slurm and supervisors send SIGTERM several times."""
    follower = Follower(JobDir(tmp_path), "12", quiet=True)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with follower._catching():
        for name in sent.split():
            follower._woken.clear()
            count = len(follower._signals)
            signal.raise_signal(signal.Signals[f"SIG{name}"])
            assert follower._woken.is_set() == (len(follower._signals) > count)
    assert follower._signals == [signal.Signals[f"SIG{name}"] for name in kept.split()]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_each_interrupt_asks_slurm_again_that_has_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    follower = Follower(JobDir(tmp_path), "12", quiet=True)

    def state(_: str) -> BatchState:
        return BatchState("RUNNING" if len(asked) < 3 else "CANCELLED", code=1)

    def cancel(_: str, *, now: bool) -> None:
        asked.append(now)
        signal.raise_signal(signal.SIGINT)
        if len(asked) < 3:
            raise RendezvousError("scancel has not answered")

    monkeypatch.setattr(submit, "batch_state", state)
    monkeypatch.setattr(submit, "cancel", cancel)
    follower._signals = [signal.SIGINT]
    follower._woken.set()
    deadline = threading.Timer(WAIT_TIMEOUT, asked.extend, [[False] * 3])
    deadline.start()
    assert follower.run() == 128 + signal.SIGINT
    deadline.cancel()
    assert asked == [False, True, True]


def test_each_news_of_a_batch_job_is_told_once_and_its_output_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "job.out"
    running = BatchState("RUNNING", nodes="n[1-2]", output=str(output))
    states: list[BatchState | None] = [
        BatchState("PENDING", reason="Resources"),
        BatchState("PENDING", reason="Priority"),
        *(None, None),
        *(running, running),
        BatchState("COMPLETED", nodes="n[1-2]", output=str(output), code=0),
    ]

    def state(batch: str) -> BatchState:
        assert batch == "12"
        found = states.pop(0)
        if found is None:
            raise RendezvousError("scontrol has not answered")
        if len(states) == 1:
            output.write_text("a line of the job\n")
        return found

    monkeypatch.setattr(submit, "batch_state", state)
    follower = Follower(JobDir(tmp_path), "12", quiet=False)
    monkeypatch.setattr(follower, "_woken", SimpleNamespace(wait=lambda _: None, clear=lambda: None))
    assert follower.run() == 0
    told = capfd.readouterr()
    assert told.out == "a line of the job\n"
    assert re.findall(r"unirun: (Slurm job 12: \w+|scontrol has not answered; trying again)", told.err) == [
        "Slurm job 12: PENDING",
        "scontrol has not answered; trying again",
        "Slurm job 12: RUNNING",
        "Slurm job 12: COMPLETED",
    ]


def test_slurm_is_asked_to_end_a_job_and_to_kill_all_its_processes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(submit, "ask_slurm", lambda *words: asked.append(words))
    follower = Follower(JobDir(tmp_path), "12", quiet=True)
    follower._signals = [signal.SIGTERM]
    follower._cancel(now=False)
    follower._signals = [signal.SIGTERM, signal.SIGINT]
    follower._cancel(now=True)
    assert asked == [("scancel", "12"), ("scancel", "--signal=KILL", "--full", "12")]
    assert capfd.readouterr().err.splitlines() == [
        "unirun: SIGTERM: cancelling Slurm job 12",
        "unirun: SIGINT: killing Slurm job 12",
    ]


@pytest.mark.parametrize(("ends_at", "told"), [(2.0, True), (4.0, False)])
def test_the_end_of_a_batch_job_is_waited_for_so_many_seconds(
    monkeypatch: pytest.MonkeyPatch, ends_at: float, told: bool
) -> None:
    now = [100.0]

    def state(batch: str) -> BatchState:
        assert batch == "12"
        return BatchState("RUNNING" if now[0] < 100.0 + ends_at else "COMPLETED")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(submit, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(submit, "batch_state", state)
    with (
        nullcontext() if told else pytest.raises(TimeoutError, match="Slurm job 12 has not ended within 3 s")
    ):
        assert submit.wait_for_end("12", 3.0).state == "COMPLETED"
    assert now[0] == 100.0 + min(ends_at, 3.0)
