"""An asynchronous trial of which a process is killed every ten seconds, for two minutes: each kind of them in turn."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.documents import ROOT
from tests.waiting import eventually
from unirun.experiments.buffer import Buffer

from .harness import START_TIMEOUT, Running, Unirun
from .test_trials import TRIALS

BATCH, ETA, STEPS = 4, 2, 60
SECONDS, KILLS = 10.0, 12
ENDED = -1
REWARD = "reward process"
VICTIMS = (
    "generation_server:0",
    REWARD,
    "rollout_worker:0",
    "model_worker:1",
    "trainer:0",
    "model_worker:0",
    REWARD,
    "generation_server:1",
)
SETTINGS = (
    f"steps={STEPS}",
    f"batch={BATCH}",
    f"eta={ETA}",
    "group=4",
    "updates=2",
    "samples=400",
    "ckpt_freq_steps=2",
    # The policy stays as it is, so that groups have different rewards to the end.
    "lr=1e-6",
)


def begun(unirun: Unirun, *more: str, env: Mapping[str, str] | None = None) -> tuple[Running, Path]:
    """A trial that has made its first steps, and the file of its notes."""
    noted = unirun.root / "noted"
    paths = f"{ROOT / 'examples'}:{TRIALS}"
    trial = ("-e", "noted-grpo", "-f", "first", "--module", "noted_grpo")
    job = unirun.start(
        "experiment",
        "start",
        *trial,
        *SETTINGS,
        *more,
        env={**(env or {}), "PYTHONPATH": paths, "NOTED": str(noted)},
    )
    return job, noted


def kill_in_turn(unirun: Unirun, job: Running) -> Counter[str]:
    """Kill one process every ten seconds. Returns how many of each kind."""
    killed = Counter[str]()
    for victim in itertools.islice(itertools.cycle(VICTIMS), KILLS):
        time.sleep(SECONDS)
        pid = eventually(partial(victim_of, unirun, job, victim), victim, START_TIMEOUT)
        if pid == ENDED:
            break
        os.kill(pid, signal.SIGKILL)
        killed[victim] += 1
    return killed


def victim_of(unirun: Unirun, job: Running, victim: str) -> int | None:
    """The process to kill, if there is one now; `ENDED` when the job has ended. A worker that has all trajectories up to
    the end computes no more rewards."""
    return ENDED if job.popen.poll() is not None else process_of(unirun, victim)


def process_of(unirun: Unirun, victim: str) -> int | None:
    """The process of a worker, or one that computes rewards for it, if there is one now."""
    pid = unirun.workers()["rollout_worker:0" if victim == REWARD else victim]["pid"]
    if pid is None or victim != REWARD:
        return int(pid) if pid else None
    try:
        return next(rewarding(psutil.Process(int(pid))), None)
    except psutil.NoSuchProcess:
        return None


def rewarding(worker: psutil.Process) -> Iterator[int]:
    """The processes of a worker that compute rewards."""
    for child in worker.children():
        if "unirun.rollout.rewards" in child.cmdline():
            yield child.pid


def check(root: Path, noted: Path) -> None:
    """Each accepted trajectory was trained on once, in the history that counts, or was too old, or waits."""
    notes = [json.loads(line) for line in noted.read_text().splitlines()]
    parts: dict[tuple[int, int], set[frozenset[str]]] = {}
    for line in notes:
        if "step" in line:
            parts.setdefault((line["step"], line["rank"]), set()).add(frozenset(line["ids"]))
    assert all(len(some) == 1 for some in parts.values()), "a step that is made again has the same"
    steps: dict[int, list[str]] = {}
    for (step, _), (ids,) in parts.items():
        steps.setdefault(step, []).extend(ids)
    assert sorted(steps) == [*range(STEPS)]
    assert all(len(ids) == BATCH for ids in steps.values())
    used = {each for ids in steps.values() for each in ids}
    assert len(used) == STEPS * BATCH
    accepted = [each for line in notes for each in line.get("accepted", ())]
    assert len({*accepted}) == len(accepted)
    figures = [json.loads(line) for line in (root / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in figures] == [*range(1, STEPS + 1)]
    too_old = sum(line["trajectories/too_old"] for line in figures)
    waiting = {meta.ids[0] for _, meta in Buffer(root / "recover/buffer").since(0)[1]} - used
    assert len({*accepted} - used - waiting) == too_old
    ages = (key for line in figures for key, value in line.items() if "staleness" in key and value)
    assert max(int(key.rpartition("_")[2]) for key in ages) <= ETA


@pytest.mark.chaos
@pytest.mark.usefixtures("warm_models")
@pytest.mark.timeout(900)
def test_whatever_is_killed_every_ten_seconds_nothing_accepted_is_lost_or_used_twice(unirun: Unirun) -> None:
    job, noted = begun(unirun)
    job.lines(r"step 2: (.*)", within=200)
    killed = kill_in_turn(unirun, job)
    result = job.end(within=600)
    assert result.code == 0, result.err
    assert {*VICTIMS} <= {*killed}
    check(unirun.home / "experiments/noted-grpo/first", noted)
