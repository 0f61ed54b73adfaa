"""The times at which an experiment saves, checkpoints and evaluates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.experiments.config import UNITS, ExperimentSaveEvalControl, Since, done, passed

maybe = st.none() | st.integers(1, 9)
counts = st.integers(0, 9)


class TestFrequencies:
    @given(st.tuples(maybe, maybe, maybe), st.tuples(counts, counts, counts))
    def test_it_is_time_when_any_of_them_has_come(
        self, limits: tuple[int | None, ...], so_far: tuple[int, ...]
    ) -> None:
        control = ExperimentSaveEvalControl(1, *limits)
        since = {"save": dict(zip(UNITS, so_far, strict=True))}
        assert (control.due(since) == ["save"]) == any(
            limit is not None and number >= limit for limit, number in zip(limits, so_far, strict=True)
        )

    def test_without_any_it_is_never_time(self) -> None:
        assert ExperimentSaveEvalControl().due(passed({}, epochs=10**9, steps=10**9, secs=1e9)) == []

    @given(st.lists(st.tuples(counts, counts, counts)))
    def test_what_has_passed_adds_up(self, parts: list[tuple[int, int, int]]) -> None:
        since: Since = passed({})
        for part in parts:
            since = passed(since, **dict(zip(UNITS, part, strict=True)))
        sums = {unit: sum(part[at] for part in parts) for at, unit in enumerate(UNITS)}
        assert since == {"save": sums, "ckpt": sums, "eval": sums}

    def test_each_thing_has_its_own(self) -> None:
        control = ExperimentSaveEvalControl(save_freq_steps=3, ckpt_freq_secs=1.5, eval_freq_epochs=1)
        since = passed({}, steps=1, secs=2.0)
        assert control.due(since) == ["ckpt"]
        assert control.due(passed(since, steps=2)) == ["save", "ckpt"]
        assert control.due(passed(since, epochs=1, steps=2)) == ["save", "ckpt", "eval"]

    def test_what_is_done_begins_anew_and_the_others_go_on(self) -> None:
        control = ExperimentSaveEvalControl(save_freq_steps=2, ckpt_freq_steps=3)
        found = []
        since: Since = {}
        for _ in range(6):
            since = passed(since, steps=1)
            found.append(control.due(since))
            since = done(since, found[-1])
        assert found == [[], ["save"], ["ckpt"], ["save"], [], ["save", "ckpt"]]


class TestTheEnd:
    @pytest.mark.parametrize(
        ("control", "over"),
        [
            ({"total_train_epochs": 2}, False),
            ({"total_train_epochs": 1}, True),
            ({"total_train_epochs": 2, "benchmark_steps": 4}, False),
            ({"total_train_epochs": 2, "benchmark_steps": 3}, True),
            ({"total_train_epochs": 2, "benchmark_n_seqs": 25}, False),
            ({"total_train_epochs": 2, "benchmark_n_seqs": 24}, True),
        ],
    )
    def test_it_comes_after_epochs_steps_or_samples(self, control: dict[str, int], over: bool) -> None:
        """After one epoch and three steps of eight samples."""
        assert ExperimentSaveEvalControl(**control).is_over(1, 3, 8) is over


class TestNumbers:
    def test_those_that_are_right(self) -> None:
        right = ExperimentSaveEvalControl(3, 1, 2, 0.5, 1, 1, 60, None, 10**9, 1e-3, 7)
        assert right.faults() == ExperimentSaveEvalControl().faults() == []

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("total_train_epochs", 0),
            ("total_train_epochs", None),
            ("save_freq_steps", -1),
            ("ckpt_freq_epochs", 1.0),
            ("eval_freq_steps", True),
            ("benchmark_steps", "3"),
            ("benchmark_n_seqs", 0),
            ("save_freq_secs", 0.0),
            ("ckpt_freq_secs", float("nan")),
            ("eval_freq_secs", "1"),
        ],
    )
    def test_those_that_are_none_are_named(self, name: str, value: Any) -> None:
        (fault,) = ExperimentSaveEvalControl(**{name: value}).faults()
        assert fault.where == f"exp_ctrl.{name}"
        kind = "a number of seconds" if name.endswith("secs") else "a whole number"
        assert fault.problem == f"{value!r} is not {kind} above 0"
        # An experiment has a length.
        assert fault.remedy == ("" if name == "total_train_epochs" else "None: never")

    def test_all_of_them_are_told(self) -> None:
        wrong = ExperimentSaveEvalControl(save_freq_steps=0, eval_freq_secs=-1.0)
        assert [fault.where for fault in wrong.faults()] == [
            "exp_ctrl.save_freq_steps",
            "exp_ctrl.eval_freq_secs",
        ]
