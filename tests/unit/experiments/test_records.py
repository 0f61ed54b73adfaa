"""The records that a trial writes of itself, and the saved models that are evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from unirun.experiments.recovery import CHECKPOINTS, EVALUATIONS, SAVES, STEPS, Recovery, SavedModels


@pytest.fixture
def recovery(tmp_path: Path) -> Recovery:
    return Recovery(tmp_path)


class TestRecords:
    def test_lines_are_read_in_their_order(self, recovery: Recovery) -> None:
        for step in (1, 2):
            recovery.record(STEPS, {"step": step, "loss": 0.5})
        assert recovery.records(STEPS) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.5}]
        assert recovery.records(EVALUATIONS) == []

    def test_a_line_that_was_cut_is_left_out(self, recovery: Recovery, tmp_path: Path) -> None:
        recovery.record(STEPS, {"step": 1})
        with (tmp_path / STEPS).open("a") as file:
            file.write('{"step": 2, "lo')
        assert recovery.records(STEPS) == [{"step": 1}]

    def test_figures_that_are_not_finite_are_null_which_every_reader_of_json_knows(
        self, recovery: Recovery, tmp_path: Path
    ) -> None:
        recovery.record(STEPS, {"step": 1, "loss": math.nan, "norm": math.inf, "lr": 0.5})
        with (tmp_path / STEPS).open("a") as file:
            file.write('{"step": 2, "loss": NaN}\n')
        recovery.drop_after(2)
        text = (tmp_path / STEPS).read_text()
        assert text == '{"step": 1, "loss": null, "norm": null, "lr": 0.5}\n{"step": 2, "loss": null}\n'
        found = recovery.record_of(STEPS, 1)
        assert math.isnan(found.pop("loss"))
        assert math.isnan(found.pop("norm"))
        assert found == {"lr": 0.5}

    def test_steps_that_are_made_again_are_dropped(self, recovery: Recovery) -> None:
        for step in range(1, 5):
            recovery.record(STEPS, {"step": step})
            recovery.record(SAVES, {"save": f"step{step:06}"})
        recovery.record(EVALUATIONS, {"step": 4})
        recovery.drop_after(2)
        recovery.record(STEPS, {"step": 3})
        assert [line["step"] for line in recovery.records(STEPS)] == [1, 2, 3]
        assert recovery.records(EVALUATIONS) == []
        assert recovery.records(SAVES) == [{"save": "step000001"}, {"save": "step000002"}]

    def test_models_that_are_saved_again_are_dropped(self, recovery: Recovery, tmp_path: Path) -> None:
        for role in ("actor", "critic"):
            for name in ("step000002", "step000003", "step1000000", "step000003.mine", "notes"):
                (tmp_path / CHECKPOINTS / role / name).mkdir(parents=True)
        recovery.drop_after(2)
        for role in ("actor", "critic"):
            there = sorted(path.name for path in (tmp_path / CHECKPOINTS / role).iterdir())
            assert there == ["notes", "step000002", "step000003.mine"]
        assert not (tmp_path / SAVES).exists()

    def test_the_figures_of_a_step_are_found(self, recovery: Recovery) -> None:
        assert recovery.record_of(EVALUATIONS, 2) == {}
        for step in (1, 2):
            recovery.record(EVALUATIONS, {"step": step, "right": 0.1 * step})
        assert recovery.record_of(EVALUATIONS, 2) == {"right": 0.2}
        assert recovery.record_of(EVALUATIONS, 3) == {}

    def test_what_was_cut_does_not_spoil_what_follows_when_the_trial_goes_on(
        self, recovery: Recovery, tmp_path: Path
    ) -> None:
        (tmp_path / STEPS).write_text('{"step": 1}\n{"step": 2, "lo')
        recovery.drop_after(1)
        recovery.record(STEPS, {"step": 2})
        assert [line["step"] for line in recovery.records(STEPS)] == [1, 2]

    def test_what_a_run_before_has_left_is_set_aside(self, recovery: Recovery, tmp_path: Path) -> None:
        for number in (1, 2):
            recovery.record(STEPS, {"step": number})
            (tmp_path / CHECKPOINTS / "actor" / f"step{number}").mkdir(parents=True)
            recovery.set_aside()
            assert recovery.records(STEPS) == []
            assert not (tmp_path / CHECKPOINTS).exists()
            folder = tmp_path / "earlier" / str(number)
            assert Recovery(folder).records(STEPS) == [{"step": number}]
            assert (folder / CHECKPOINTS / "actor" / f"step{number}").is_dir()
        recovery.set_aside()
        assert len([*(tmp_path / "earlier").iterdir()]) == 2

    @pytest.mark.parametrize(
        "end", [lambda recovery: recovery.set_aside(), lambda recovery: recovery.drop_after(1)]
    )
    def test_models_that_killed_workers_were_saving_are_removed(
        self, recovery: Recovery, tmp_path: Path, end: Callable[[Recovery], None]
    ) -> None:
        draft = tmp_path / CHECKPOINTS / "actor" / ".step000001.partial"
        for folder in (draft, draft.with_name("step000001")):
            folder.mkdir(parents=True)
            (folder / "model.safetensors").touch()
        end(recovery)
        assert [path.parent.name for path in tmp_path.rglob("model.safetensors")] == ["step000001"]

    @pytest.mark.parametrize("there", [["2"], ["1", "7"], ["3", "10"], ["notes"]])
    def test_a_run_that_is_set_aside_has_a_number_above_all_that_are_left(
        self, recovery: Recovery, tmp_path: Path, there: list[str]
    ) -> None:
        for name in there:
            (tmp_path / "earlier" / name).mkdir(parents=True)
        numbers = [int(name) for name in there if name.isdecimal()]
        recovery.record(STEPS, {"step": 1})
        recovery.set_aside()
        folder = tmp_path / "earlier" / str(max(numbers, default=0) + 1)
        assert Recovery(folder).records(STEPS) == [{"step": 1}]


class Evaluator:
    """A role that evaluates when the test says so."""

    def __init__(self) -> None:
        self.evaluate = self
        self.asked: dict[str, Future[dict[str, float]]] = {}

    def call_async(self, path: str) -> Future[dict[str, float]]:
        return self.asked.setdefault(Path(path).name, Future())


class TestSavedModels:
    @pytest.fixture
    def saves(self, tmp_path: Path) -> Path:
        folder = tmp_path / "checkpoints" / "actor"
        folder.mkdir(parents=True)
        return folder

    def test_each_save_is_evaluated_once_and_in_order(self, recovery: Recovery, saves: Path) -> None:
        evaluator: Any = Evaluator()
        told: list[tuple[int, Any]] = []
        models = SavedModels(recovery, saves, evaluator, lambda *each: told.append(each))
        for step in (2, 1):
            (saves / f"step{step:06}").mkdir()
        for name in (".step000003.partial", "step000001.mine", "steps"):
            (saves / name).mkdir()
        models.follow(to_end=False)
        models.follow(to_end=False)
        assert [*evaluator.asked] == ["step000001"]
        assert recovery.records(SAVES) == []
        evaluator.asked["step000001"].set_result({"loss": 1.0})
        models.follow(to_end=False)
        assert [*evaluator.asked] == ["step000001", "step000002"]
        evaluator.asked["step000002"].set_result({"loss": 2.0})
        models.follow(to_end=False)
        assert recovery.records(SAVES) == [
            {"save": "step000001", "loss": 1.0},
            {"save": "step000002", "loss": 2.0},
        ]
        assert told == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]

    def test_at_the_end_all_are_waited_for(self, recovery: Recovery, saves: Path) -> None:
        evaluator: Any = Evaluator()
        (saves / "step000001").mkdir()
        evaluator.call_async("step000001").set_result({"loss": 1.0})
        SavedModels(recovery, saves, evaluator, lambda *_: None).follow(to_end=True)
        assert recovery.records(SAVES) == [{"save": "step000001", "loss": 1.0}]

    def test_a_master_that_begins_anew_asks_for_the_rest(self, recovery: Recovery, saves: Path) -> None:
        evaluator: Any = Evaluator()
        recovery.record(SAVES, {"save": "step000001", "loss": 1.0})
        for step in (1, 2):
            (saves / f"step{step:06}").mkdir()
        SavedModels(recovery, saves, evaluator, lambda *_: None).follow(to_end=False)
        assert [*evaluator.asked] == ["step000002"]

    def test_without_an_evaluator_nothing_is_asked(self, recovery: Recovery, saves: Path) -> None:
        (saves / "step000001").mkdir()
        SavedModels(recovery, saves, None, lambda *_: None).follow(to_end=True)
        assert recovery.records(SAVES) == []
