"""A trial takes free workers, feeds the study's pruner, and gives them back. The sets run functions in this thread."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optuna
import pytest
from optuna.trial import FixedTrial, TrialState

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import TrainingFailed, UsageError
from unirun.train import Trainer, trainer
from unirun.train.checkpoints import CheckpointStrategy
from unirun.train.trainer import Trainable, this_process

Reports = Iterator[dict[str, Any]]

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Run:
    """The rounds of a function, which yields its reports; two ranks make each."""

    def __init__(self, function: Callable[[Mapping[str, Any]], Reports], config: Mapping[str, Any]) -> None:
        self.reports, self.best, self.closed = enumerate(function(config), 1), None, False

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for number, report in self.reports:
            self.best = report.pop("checkpoint", None)
            yield [{**report, "_training_iteration": number}, {"loss": -1.0}]

    def close(self) -> None:
        self.closed = True


class Set:
    """A trainer whose functions run in the thread that takes its reports."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.given: list[Any] = []
        self.shut_down = 0

    def run_iterator(self, function: Any, config: Mapping[str, Any], **others: Any) -> Run:
        self.runs.append(Run(function, config))
        self.given.append(others)
        return self.runs[-1]

    def shutdown(self) -> None:
        self.shut_down += 1


def made(
    sets: list[Any], function: Any, config: Any = None, metric: str = "loss", mode: str = "min", **how: Any
) -> Trainable:
    strategy = CheckpointStrategy()
    return Trainable(
        sets, function, config or {}, metric, mode, how.get("dataset"), strategy, how.get("wait", 0)
    )


def falls(config: Mapping[str, Any]) -> Reports:
    """The loss falls from `start` in three reports."""
    for step in range(3):
        yield {"loss": config.get("start", 1.0) / 2**step, "pid": 7, "note": "-", "val": {"f1": 0.5 + step}}


def fixed(parameters: dict[str, Any]) -> optuna.Trial:
    """A trial without a study. Optuna has no type for what it has in common with one of a study."""
    return FixedTrial(parameters)  # type: ignore[return-value]


def space(trial: optuna.Trial) -> dict[str, float]:
    return {"start": trial.suggest_float("start", 0.0, 9.0)}


def study_of(*starts: float, **how: Any) -> optuna.Study:
    study = optuna.create_study(**how)
    for start in starts:
        study.enqueue_trial({"start": start})
    return study


class TestATrial:
    def test_its_value_is_the_last_report_and_each_goes_to_the_pruner(self) -> None:
        study = optuna.create_study()
        study.optimize(made([Set()], falls), n_trials=1)
        (trial,) = study.trials
        assert (trial.state, trial.value) == (TrialState.COMPLETE, 0.25)
        assert trial.intermediate_values == {1: 1.0, 2: 0.5, 3: 0.25}

    def test_its_attributes_are_the_ranks_the_checkpoint_and_the_driver(self) -> None:
        def saves(config: Mapping[str, Any]) -> Reports:
            yield {"loss": 1.0, "checkpoint": "/runs/1"}
            yield {"loss": 1.0, "checkpoint": "/runs/2"}

        study = optuna.create_study()
        study.optimize(made([Set()], saves), n_trials=1)
        assert study.trials[0].user_attrs == {
            "ranks": 2,
            "checkpoint": "/runs/2",
            "driver": this_process(),
        }

    def test_a_pruned_one_ends_its_run_and_gives_its_workers_back(self) -> None:
        workers = Set()
        study = study_of(8.0, 1.0, pruner=optuna.pruners.ThresholdPruner(upper=3.0))
        study.optimize(made([workers], falls, space), n_trials=2)
        assert [trial.state for trial in study.trials] == [TrialState.PRUNED, TrialState.COMPLETE]
        assert study.trials[0].intermediate_values == {1: 8.0}
        assert [run.closed for run in workers.runs] == [True, True]
        assert workers.shut_down == 0

    def test_values_of_config_may_be_functions_of_the_trial(self) -> None:
        seen: list[Mapping[str, Any]] = []

        def function(config: Mapping[str, Any]) -> Reports:
            seen.append(config)
            return falls(config)

        config = {"start": lambda trial: trial.suggest_float("start", 2.0, 2.0), "kind": dict, "epochs": 3}
        assert made([Set()], function, config)(fixed({"start": 2.0})) == 0.5
        assert seen == [{"start": 2.0, "kind": dict, "epochs": 3}]

    def test_it_is_tried_without_a_study(self) -> None:
        assert made([Set()], falls, space)(fixed({"start": 4.0})) == 1.0

    def test_the_dataset_and_the_strategy_go_to_the_run(self) -> None:
        workers = Set()
        made([workers], falls, dataset=[1, 2])(fixed({}))
        assert workers.given[0]["dataset"] == [1, 2]
        assert isinstance(workers.given[0]["checkpoint_strategy"], CheckpointStrategy)

    def test_a_metric_in_nested_dicts_has_both_names(self) -> None:
        study = optuna.create_study(direction="maximize")
        study.optimize(made([Set()], falls, metric="val/f1", mode="max"), n_trials=1)
        assert study.best_value == 2.5

    @pytest.mark.parametrize("metric", ["accuracy", "note"])
    def test_a_metric_that_is_missing_or_no_number_is_an_error_that_names_those_there_are(
        self, metric: str
    ) -> None:
        workers = Set()
        study, problem = optuna.create_study(), f"no number '{metric}'; its numbers are: loss, pid, val/f1;"
        with pytest.raises(UsageError, match=problem):
            study.optimize(made([workers], falls, metric=metric), n_trials=1)
        assert study.trials[0].state == TrialState.FAIL
        assert workers.runs[0].closed

    def test_a_function_without_a_report_is_an_error(self) -> None:
        with pytest.raises(UsageError, match=r"reported nothing; call train.report\(loss=…\)"):
            made([Set()], lambda config: iter(()))(fixed({}))

    def test_a_study_in_the_other_direction_is_an_error(self) -> None:
        study = optuna.create_study(direction="maximize")
        with pytest.raises(UsageError, match=r"the study is to maximize, and mode is 'min'; .*'minimize'"):
            study.optimize(made([Set()], falls), n_trials=1)


class TestSets:
    def test_trials_at_a_time_have_different_ones_and_the_next_trial_a_warm_one(self) -> None:
        together = threading.Barrier(2)

        def meets(config: Mapping[str, Any]) -> Reports:
            together.wait(WAIT_TIMEOUT)
            yield {"loss": 0.0}

        sets = [Set(), Set(), Set()]
        trainable = made(sets, meets, wait=10)
        assert trainable.max_concurrent == 3
        optuna.create_study().optimize(trainable, n_trials=6, n_jobs=2)
        assert [len(each.runs) for each in sets[:2]] == [3, 3]
        assert sets[2].runs == []

    def test_a_trial_without_a_free_one_waits_until_another_ends(self) -> None:
        begun, end = threading.Event(), threading.Event()

        def waits(config: Mapping[str, Any]) -> Reports:
            begun.set()
            end.wait(WAIT_TIMEOUT)
            yield {"loss": 0.0}

        workers = Set()
        trainable = made([workers], waits, wait=10)
        threads = [threading.Thread(target=trainable, args=(fixed({}),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert begun.wait(WAIT_TIMEOUT)
        assert len(workers.runs) == 1
        end.set()
        for thread in threads:
            thread.join(WAIT_TIMEOUT)
        assert len(workers.runs) == 2

    def test_the_wait_for_one_has_a_deadline(self) -> None:
        trainable = made([Set()], falls)

        def nested(config: Mapping[str, Any]) -> Reports:
            trainable(fixed({}))
            yield {}

        trainable._function = nested
        with pytest.raises(
            TrainingFailed, match="no workers were free within 0 s; max_concurrent is 1; pass"
        ):
            trainable(fixed({}))

    def test_one_whose_training_failed_starts_anew(self) -> None:
        def fails(config: Mapping[str, Any]) -> Reports:
            raise TrainingFailed("the workers have ended")
            yield {}

        workers = Set()
        study = optuna.create_study()
        study.optimize(made([workers], fails), n_trials=2, catch=(TrainingFailed,))
        assert (len(workers.runs), workers.shut_down) == (2, 2)

    def test_one_whose_function_raises_stays_warm(self) -> None:
        workers = Set()
        with pytest.raises(ZeroDivisionError):
            made([workers], lambda config: 1 // 0)(fixed({}))
        assert workers.shut_down == 0

    def test_closing_ends_all_but_the_first_and_those_of_trials_that_run(self) -> None:
        sets = [Set(), Set(), Set()]
        first: object = sets[0]
        with made(sets, falls) as trainable:
            busy = trainable._free.get_nowait()
            assert busy is first
            trainable.close()
            assert [each.shut_down for each in sets] == [0, 1, 1]
            trainable._free.put(busy)
        assert [each.shut_down for each in sets] == [0, 2, 2]
        assert trainable(fixed({})) == 0.25
        assert len(sets[0].runs) == 1

    def test_they_end_with_the_trainer(self) -> None:
        trainer, sets = Trainer(1, "none"), [Set(), Set()]
        trainable = made(sets, falls)
        trainer._trainables.add(trainable)
        trainer.shutdown()
        assert [each.shut_down for each in sets] == [0, 1]


class TestRayTune:
    def test_functions_of_a_trial_are_refused_unless_ray_tune_has_chosen(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "ray.tune", object())
        trainer = Trainer(1, "none")
        with pytest.raises(
            UsageError, match="start is a function of a trial of Optuna; put it into param_sp"
        ):
            trainer.to_trainable(falls, {"start": lambda trial: 1.0, "epochs": 3})({"epochs": 1})
        with pytest.raises(UsageError, match="config is a function"):
            trainer.to_trainable(falls, space)({"start": 1.0})

    def test_it_must_be_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ray.tune", None)
        with pytest.raises(UsageError, match=r"no Ray Tune: .*; run: pip install 'ray\[tune\]'"):
            Trainer(1, "none").to_trainable(falls)({})


def test_optuna_is_imported_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    spec = importlib.util.find_spec(trainer.__name__)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_trainable_has_the_name_of_its_function() -> None:
    trainable = Trainer(1, "none").to_trainable(falls, max_concurrent=2)
    assert (trainable.__name__, trainable.max_concurrent) == ("falls", 2)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"mode": "best"}, "mode='best'; it is 'min' or 'max'"),
        ({"max_concurrent": 0}, "max_concurrent=0; give a number from 1 on"),
        ({"max_concurrent": 1.5}, "max_concurrent=1.5"),
        ({"config": 3}, "config is a int; give a dict, or a function of the trial"),
        ({"train_func": dict}, "is no function; give a function of nothing, or of config"),
    ],
)
def test_wrong_arguments_are_told_at_once(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Trainer(1, "none").to_trainable(**{"train_func": falls, **given})
