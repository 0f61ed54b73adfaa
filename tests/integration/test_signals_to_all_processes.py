"""Batch systems, service managers and closing terminals signal every process of a job, in any order, and more than once."""

from __future__ import annotations

import contextlib
import os
import random
import signal

import pytest

from tests.waiting import eventually

from .harness import START_TIMEOUT, Script, Unirun

SAVES = """
    import os, signal, time
    import torch.distributed as dist
    asked = []
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        signal.signal(getattr(signal, name), lambda number, _: asked.append(number))
    dist.init_process_group("gloo")
    print("up", flush=True)
    while not asked:
        time.sleep(0.01)
    print("asked", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    # A new group meets in the rendezvous store.
    dist.barrier(dist.new_group([0, 1]))
    print("saved", flush=True)
"""

TOLD = """
    import os, signal, sys, time
    told = []
    for name in ("SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), lambda number, _: os.write(1, f"got {signal.Signals(number).name}\\n".encode()))
    print("up", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
"""


CREW = """
    import os, time, unirun

    class Actor(unirun.BaseWorkload):
        def setup(self):
            print("up", flush=True)

        def teardown(self):
            print("asked", flush=True)
            while not os.path.exists("go"):
                time.sleep(0.01)
            print("saved", flush=True)

    class Lead(unirun.BaseTrainer):
        def init(self):
            pass

        def fit(self):
            while True:
                time.sleep(60)
"""


def signal_all(unirun: Unirun, signum: signal.Signals, seed: int) -> set[int]:
    """Send `signum` to every process of the job, in an order that `seed` gives. Returns the pids."""
    pids = sorted(unirun.processes())
    random.Random(seed).shuffle(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
    return set(pids)


@pytest.mark.parametrize(
    ("signum", "times"),
    [(signal.SIGTERM, 3), (signal.SIGHUP, 2), (signal.SIGINT, 1)],
    ids=lambda each: getattr(each, "name", None),
)
def test_workers_have_the_grace_period_when_every_process_gets_the_signal(
    unirun: Unirun, script: Script, signum: signal.Signals, times: int
) -> None:
    job = unirun.start("--nproc-per-node", 2, "--shutdown-timeout", 600, script(SAVES))
    job.lines("up$", 2)
    before = set()
    for seed in range(times):
        before = signal_all(unirun, signum, seed)
        job.lines(f"{signum.name}: stopping", seed + 1)
    job.lines("asked$", 2)
    assert unirun.processes().keys() == before
    (unirun.root / "go").touch()
    result = job.end(START_TIMEOUT)
    assert (result.code, result.lines.count("saved")) == (128 + signum, 2), result.err
    assert unirun.status()["phase"] == "stopped"
    assert "killed" not in result.err


def test_workloads_have_the_grace_period_for_their_teardown(unirun: Unirun, script: Script) -> None:
    job = unirun.start("--roles", "actor=2@crew:Actor", "--trainer", f"{script(CREW, 'crew.py').stem}:Lead")
    job.lines("up$", 2)
    eventually(lambda: unirun.status()["roles"][0]["phase"] == "running", "the role runs", START_TIMEOUT)
    for seed in range(2):
        signal_all(unirun, signal.SIGTERM, seed)
        job.lines("SIGTERM: stopping", seed + 1)
    job.lines("asked$", 2)
    (unirun.root / "go").touch()
    result = job.end(START_TIMEOUT)
    assert (result.code, result.lines.count("saved")) == (143, 2), result.err


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2], ids=lambda each: each.name)
def test_a_job_goes_on_when_every_process_gets_a_users_signal(
    unirun: Unirun, script: Script, signum: signal.Signals
) -> None:
    job = unirun.start("--nproc-per-node", 2, script(TOLD))
    job.lines("up$", 2)
    before = signal_all(unirun, signum, 1)
    job.lines(f"got {signum.name}$", 2)
    assert unirun.processes().keys() == before
    (unirun.root / "go").touch()
    result = job.end(START_TIMEOUT)
    assert (result.code, result.err.count("signal")) == (0, 0), result.err
