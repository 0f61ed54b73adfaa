"""Searches for hyperparameters with real workers: trials side by side, a driver that is killed, and Ray Tune."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import optuna
import pytest
from optuna.trial import TrialState

from tests.integration.harness import Script, Unirun
from unirun import train
from unirun.train import Trainer

pytestmark = pytest.mark.usefixtures("warm_functions")

SEARCH = """
    import sys, time
    import optuna
    from unirun import train

    def function(config):
        if config["hang"]:
            print("it hangs", flush=True)
            time.sleep(600)
        for _ in range(3):
            train.report(loss=config["x"])

    def config(trial):
        x = trial.suggest_float("x", 0.0, 1.0)
        return {"x": x, "hang": sys.argv[1:] == ["hang"] and trial.number >= 2}

    study = optuna.create_study(study_name="s", storage="sqlite:///study.db", load_if_exists=True)
    with train.Trainer(1, "none") as trainer, trainer.to_trainable(function, config, max_concurrent=2) as trainable:
        study.optimize(trainable, n_trials=trainable.resume(study, 6), n_jobs=2)
"""


@pytest.mark.chaos
def test_trials_run_side_by_side_on_warm_workers_with_devices_of_their_own(
    home: Unirun, tmp_path: Path
) -> None:
    """
    1. Two trials of two ranks run at the same time, on two of four devices each.
    2. Two go on until they are pruned, which keeps the workers.
    3. The workers of all trials end with the trainer.
    """
    together = threading.Barrier(2)

    def config(trial: optuna.Trial) -> dict[str, Any]:
        if trial.number < 2:
            together.wait(60)
        return {"x": trial.suggest_float("x", 0.0, 9.0), "file": f"{tmp_path}/{trial.number}"}

    def function(config: dict[str, Any]) -> None:
        with open(f"{config['file']}.{train.world_rank()}", "w") as file:
            file.write(f"{os.environ['CUDA_VISIBLE_DEVICES']} {os.getpid()}")
        steps = 0
        while steps < 3 or config["x"] > 1:
            train.report(loss=config["x"] + 1 / (steps + 1))
            steps += 1

    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=3.0))
    for x in (0.0, 0.5, 8.0, 9.0, 0.5, 0.0):
        study.enqueue_trial({"x": x})
    trainer = Trainer(2, "none", use_gpu=True, placement="fake:devices=4")
    try:
        trainable = trainer.to_trainable(function, config)
        assert trainable.max_concurrent == 2
        study.optimize(trainable, n_trials=6, n_jobs=2)
    finally:
        trainer.shutdown()
    home.assert_nothing_left()

    states = [trial.state for trial in study.trials]
    assert states == [TrialState.COMPLETE] * 2 + [TrialState.PRUNED] * 2 + [TrialState.COMPLETE] * 2
    assert study.trials[0].intermediate_values == pytest.approx({1: 1.0, 2: 0.5, 3: 1 / 3})
    assert study.best_value == pytest.approx(1 / 3)
    assert all(trial.user_attrs["ranks"] == 2 for trial in study.trials)
    pids = defaultdict(set)
    for file in tmp_path.glob("?.[01]"):
        devices, pid = file.read_text().split()
        pids[devices].add(pid)
    assert {devices: len(found) for devices, found in pids.items()} == {"0,1": 2, "2,3": 2}


@pytest.mark.chaos
def test_a_search_whose_driver_was_killed_goes_on_and_loses_no_parameters(
    home: Unirun, script: Script
) -> None:
    """
    1. Two of six trials are complete, and two run, when the driver is killed. No worker is left.
    2. The same script finishes the study, with the parameters of those two.
    """
    program = [sys.executable, str(script(SEARCH, "search.py"))]
    driver = home.start_program([*program, "hang"])
    driver.lines("it hangs", 2)
    driver.signal(signal.SIGKILL)
    driver.end()
    home.assert_nothing_left()
    again = home.start_program(program).end()
    assert again.code == 0, again.err
    study = optuna.load_study(study_name="s", storage=f"sqlite:///{home.root}/study.db")
    done = [trial.params for trial in study.trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    lost = [trial.params for trial in study.trials if trial.state == TrialState.FAIL]
    assert (len(done), len(lost), len(study.trials)) == (6, 2, 8)
    assert all(parameters in done for parameters in lost)


def test_ray_tune_gets_the_reports_of_workers_that_end_with_the_trial(
    home: Unirun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. A copy in another process, as Ray Tune makes it, runs one trial to its end.
    2. In the next trial Ray Tune stops the thread in a report.
    """
    heard: list[dict[str, Any]] = []

    def report(metrics: dict[str, Any]) -> None:
        heard.append(metrics)
        if metrics["loss"] == 8.0:
            sys.exit(0)

    tune: Any = ModuleType("ray.tune")
    tune.report = report
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.tune", tune)

    def function(config: dict[str, float]) -> None:
        for step in range(int(config["steps"])):
            train.report(loss=config["x"] + step)

    trainable = Trainer(1, "none").to_trainable(function, {"x": 0.0, "steps": 2})
    copy = cloudpickle.loads(cloudpickle.dumps(trainable))
    assert copy({"x": 3.0}) is None
    assert [(each["loss"], each["_training_iteration"]) for each in heard] == [(3.0, 1), (4.0, 2)]
    home.assert_nothing_left()
    with pytest.raises(SystemExit):
        copy({"x": 6.0, "steps": 10_000_000})
    assert [each["loss"] for each in heard[2:]] == [6.0, 7.0, 8.0]
    home.assert_nothing_left()
