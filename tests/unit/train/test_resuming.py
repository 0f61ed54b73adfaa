"""Trials that a killed driver has left are tried again, and no others."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from tests.waiting import WAIT_TIMEOUT
from unirun.train.trainer import DRIVER, _life, resume, this_process

optuna.logging.set_verbosity(optuna.logging.WARNING)

DEAD = [*this_process()[:2], "a process that had this pid before"]


def objective(trial: optuna.Trial) -> float:
    trial.set_user_attr(DRIVER, this_process())
    return trial.suggest_float("x", 0.0, 9.0)


def left(study: optuna.Study, driver: list[Any] | None = DEAD) -> dict[str, Any]:
    """The parameters of a trial that is running for ever."""
    trial = study.ask()
    if driver is not None:
        trial.set_user_attr(DRIVER, driver)
    trial.suggest_float("x", 0.0, 9.0)
    return trial.params


def states(study: optuna.Study) -> list[TrialState]:
    return [trial.state for trial in study.trials]


def test_parameters_that_a_killed_driver_has_left_are_the_next_to_be_tried() -> None:
    study = optuna.create_study()
    parameters = left(study)
    assert resume(study, 3) == 3
    assert states(study) == [TrialState.FAIL, TrialState.WAITING]
    study.optimize(objective, n_trials=1)
    assert study.best_params == parameters
    assert resume(study, 3) == 2
    assert states(study) == [TrialState.FAIL, TrialState.COMPLETE]


def test_parameters_are_not_lost_by_the_death_of_a_second_driver_before_it_has_read_them() -> None:
    study = optuna.create_study()
    parameters = left(study)
    resume(study, 3)
    study.ask()
    resume(study, 3)
    assert states(study) == [TrialState.FAIL, TrialState.FAIL, TrialState.WAITING]
    study.optimize(objective, n_trials=1)
    assert study.best_params == parameters


class Killed(BaseException):
    """The process of the driver has ended."""


class KilledAfter(optuna.Study):
    """A study that one driver changes so many times before it is killed."""

    left = 0

    def enqueue_trial(self, *args: Any, **how: Any) -> None:
        self._lives()
        super().enqueue_trial(*args, **how)

    def tell(self, *args: Any, **how: Any) -> Any:
        self._lives()
        return super().tell(*args, **how)

    def _lives(self) -> None:
        if not self.left:
            raise Killed
        self.left -= 1


@pytest.mark.parametrize("changes", range(5))
def test_no_parameters_are_lost_when_a_driver_is_killed_while_it_resumes_those_of_another(
    changes: int,
) -> None:
    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=storage)
    parameters = [left(study)["x"] for _ in range(2)]
    killed = KilledAfter(study.study_name, storage)
    killed.left = changes
    with contextlib.suppress(Killed):
        resume(killed, 9)
    resume(study, 9)
    study.optimize(objective, n_trials=5)
    tried = [trial.params["x"] for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert {*parameters} <= {*tried}
    assert TrialState.RUNNING not in states(study)


def test_trials_of_drivers_that_live_or_are_elsewhere_stay_as_they_are() -> None:
    pid, place, life = this_process()
    study = optuna.create_study()
    for driver in ([pid, place, life], [pid, "elsewhere", "0"], None):
        left(study, driver)
    assert resume(study, 9) == 9
    assert states(study) == [TrialState.RUNNING] * 3


def test_a_trial_without_a_driver_was_left_when_all_drivers_of_the_study_have_ended() -> None:
    study = optuna.create_study()
    study.enqueue_trial({"x": 5.0})
    study.ask()
    resume(study, 1)
    assert states(study) == [TrialState.RUNNING]
    left(study)
    resume(study, 1)
    assert states(study)[:2] == [TrialState.FAIL] * 2
    study.optimize(objective, n_trials=1)
    assert study.best_params == {"x": 5.0}


def test_left_to_do_are_all_trials_but_those_that_are_complete_or_pruned() -> None:
    study = optuna.create_study()
    for state, value in ((TrialState.COMPLETE, 1.0), (TrialState.PRUNED, None), (TrialState.FAIL, None)):
        study.tell(study.ask(), value, state=state)
    study.enqueue_trial({"x": 1.0})
    assert resume(study, 5) == 3
    assert resume(study, 1) == 0


def test_threads_do_not_try_the_same_parameters_twice(tmp_path: Path) -> None:
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db")
    parameters = [left(study) for _ in range(6)]
    assert resume(study, 6) == 6
    together = threading.Barrier(2)

    def meets(trial: optuna.Trial) -> float:
        together.wait(WAIT_TIMEOUT)
        return objective(trial)

    study.optimize(meets, n_trials=6, n_jobs=2)
    assert states(study) == [TrialState.FAIL] * 6 + [TrialState.COMPLETE] * 6
    assert [trial.params for trial in study.trials[6:]] == parameters


def test_a_process_lives_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert this_process() == this_process()
    assert len({_life(os.getpid()), _life(1), ""}) == 3
    assert _life(2**22 + 1) == ""
    monkeypatch.setattr(Path, "read_text", lambda self: "1 (a) name) Z 1 2")
    assert _life(1) == ""
