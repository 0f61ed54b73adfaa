"""The job behind a trainer: its store, who else sees it, and masters that are killed while a function runs."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unirun as package
from tests.effort import variants
from tests.integration.harness import Unirun, command_in, gone, home_of
from tests.integration.masters import Masters
from tests.integration.warm import Warm, WarmUnirun
from unirun import train
from unirun.errors import UsageError
from unirun.train import Trainer

pytestmark = pytest.mark.usefixtures("warm_functions")

STEPS = 9


def step_by_step(config: dict[str, Any]) -> tuple[int, int]:
    """Saves and reports each step. Before some, all ranks wait for a file; at the end, rank 1 is killed once."""
    state = train.load_checkpoint()
    first: int = state["step"] + 1 if state else 0
    total = torch.zeros(1)
    for step in range(first, STEPS):
        while step in config["wait"] and not Path(config["folder"], str(step)).exists():
            time.sleep(0.005)
        dist.all_reduce(total)
        train.save_checkpoint(step=step)
        train.report(step=step)
        killed = Path(config["folder"], "killed")
        if step == STEPS - 1 and config["kill"] and train.world_rank() == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return first, os.getpid()


@pytest.fixture(scope="module", params=variants("etcd", "sqlite"))
def home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, warm: Warm
) -> Iterator[Unirun]:
    """For one trainer, whose job is in a file or in etcd."""
    if request.param == "etcd":
        # It must not begin as a process of this home.
        request.getfixturevalue("etcd")
    with home_of(WarmUnirun(tmp_path_factory.mktemp(request.param), warm)) as command:
        yield command


@pytest.fixture(scope="module")
def store(request: pytest.FixtureRequest, home: Unirun) -> str:
    if not home.root.name.startswith("etcd"):
        return ""
    url: str = request.getfixturevalue("etcd").url(prefix=f"/{home.root.name}/")
    return url


@pytest.fixture(scope="module")
def trainer(home: Unirun, store: str) -> Iterator[Trainer]:
    with Trainer(2, store=store, max_failures=1) as made:
        made.start()
        yield made


def test_a_job_is_seen_and_called_from_elsewhere(
    home: Unirun, trainer: Trainer, store: str, tmp_path: Path
) -> None:
    pids = trainer.run(os.getpid)
    name = str(trainer).split()[1].rstrip(":")
    with package.attach(name) as job:
        assert job.status().phase == "running"
        assert [each["pid"] for each in job["worker"].describe()] == pids
    assert f"job {name}: running" in home("status", name).out
    if store:
        # From a host that has only the store.
        found = json.loads(Unirun(tmp_path)("status", name, "--store", store, "--json").out)
        assert (found["phase"], [each["name"] for each in found["roles"]]) == ("running", ["worker"])
    # Who has been there has taken nothing along.
    assert trainer.run(os.getpid) == pids


def test_a_run_loses_no_report_and_no_attempt_when_masters_are_killed(
    home: Unirun, trainer: Trainer, tmp_path: Path
) -> None:
    """
    1. A function runs on two ranks.
    2. Two masters are killed, one after the other: while ranks compute, and while they wait until another one leads.
    3. Every report arrives once, and in the first attempt; the workers are the same processes.
    4. A worker is killed: the trainer hears of it from the third master, and the run goes on.
    """
    before = trainer.execute(os.getpid)
    masters = Masters(home)
    masters.next()
    config: dict[str, Any] = {"folder": str(tmp_path), "wait": [3, 6], "kill": False}
    steps = []
    run = trainer.run_iterator(step_by_step, config=config)
    for results in run:
        steps.append(results[0]["step"])
        if len(steps) in config["wait"]:
            masters.kill()
            if len(steps) == 6:
                masters.next()
            (tmp_path / str(len(steps))).touch()
    assert steps == [*range(STEPS)]
    assert run.get_final_results() == [(0, pid) for pid in before]
    assert masters.epoch == 3
    assert masters.restarts() == {"worker": 0}
    masters.close()

    config |= {"wait": [], "kill": True}
    rounds = [results[0]["step"] for results in trainer.run_iterator(step_by_step, config=config)]
    assert rounds == [*range(STEPS)]
    after = trainer.execute(os.getpid)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False]


def test_a_trainer_that_is_shut_down_leaves_a_job_that_has_succeeded(home: Unirun, trainer: Trainer) -> None:
    pids = trainer.execute(os.getpid)
    trainer.shutdown()
    assert all(gone(pid, 5) for pid in pids)
    assert (home.status()["phase"], home.status()["code"]) == ("succeeded", 0)
    assert "its trainer was shut down" in home.status()["reason"]


def test_a_run_keeps_the_workers_of_a_trainer_that_nobody_else_holds(tmp_path: Path, warm: Warm) -> None:
    def function() -> str:
        for _ in range(3):
            train.report(pid=os.getpid())
        return "done"

    with home_of(WarmUnirun(tmp_path, warm)):
        run = Trainer(backend="none").run_iterator(function)
        pids = [results[0]["pid"] for results in run]
        assert run.get_final_results() == ["done"]
        assert len(pids) == 3
        del run
        gc.collect()
        assert gone(pids[0], 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"store": "mysql://localhost"}, "mysql"),
        ({"placement": {"hots": "h1"}}, "hots"),
        ({"placement": "h1:none"}, "h1:none"),
        ({"placement": "fake:knots=2"}, "knots"),
    ],
)
def test_places_and_stores_that_nobody_knows_are_told_before_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    with command_in(tmp_path) as command:
        monkeypatch.setenv("UNIRUN_HOME", str(command.home))
        with pytest.raises(UsageError, match=message):
            Trainer(**arguments).start()
