"""The learning rate over the steps of a training."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import UsageError
from unirun.experiments.models.api import FinetuneSpec
from unirun.experiments.models.backends import TrainBackend, rate

totals = st.integers(1, 200)
shares = st.floats(0.0, 1.0)
shapes = st.sampled_from(["constant", "linear", "cosine"])


class TestRate:
    @given(totals, shapes, shares, shares)
    def test_it_is_between_0_and_1(self, total: int, shape: str, warmup: float, least: float) -> None:
        assert all(0.0 <= rate(step, total, shape, warmup, least) <= 1.0 + 1e-12 for step in range(total + 3))

    @given(totals, shapes, shares, shares)
    def test_it_rises_in_equal_parts_and_then_does_not_rise_any_more(
        self, total: int, shape: str, warmup: float, least: float
    ) -> None:
        rising = int(warmup * total)
        found = [rate(step, total, shape, warmup, least) for step in range(total + 1)]
        assert found[:rising] == [pytest.approx((step + 1) / rising) for step in range(rising)]
        assert all(
            after <= before + 1e-12
            for before, after in zip(found[rising:], found[rising + 1 :], strict=False)
        )

    @given(totals.filter(lambda total: total > 1), st.sampled_from(["linear", "cosine"]), shares)
    def test_it_ends_at_the_least_share_and_stays_there(self, total: int, shape: str, least: float) -> None:
        assert rate(0, total, shape, 0.0, least) == pytest.approx(1.0)
        for step in (total, total + 1, 10 * total):
            assert rate(step, total, shape, 0.0, least) == pytest.approx(least)

    @given(totals, shares)
    def test_it_is_constant_after_it_has_risen(self, total: int, least: float) -> None:
        assert {rate(step, total, "constant", 0.5, least) for step in range(total // 2, total)} == {1.0}

    def test_half_way_it_is_half_way(self) -> None:
        for shape in ("linear", "cosine"):
            assert rate(50, 100, shape, 0.0, 0.0) == pytest.approx(0.5)
            assert rate(60, 100, shape, 0.2, 0.1) == pytest.approx(0.55)
        assert rate(25, 100, "linear", 0.0, 0.0) == pytest.approx(0.75)
        assert rate(25, 100, "cosine", 0.0, 0.0) == pytest.approx(0.5 + math.sqrt(0.125))

    def test_with_nothing_but_rising_it_ends_at_1(self) -> None:
        assert [rate(step, 4, "cosine", 1.0, 0.0) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]

    def test_without_any_steps_it_is_1(self) -> None:
        assert rate(0, 0, "cosine", 0.5, 0.0) == 1.0


class TestStepsInAll:
    @pytest.mark.parametrize(
        ("spec", "steps"),
        [(FinetuneSpec(3, 64, 64), 3), (FinetuneSpec(3, 127, 64), 3), (FinetuneSpec(2, 130, 13), 20)],
    )
    def test_what_does_not_fill_a_batch_is_left_out(self, spec: FinetuneSpec, steps: int) -> None:
        assert spec.total_train_steps == steps


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"optimizer": "adamw"}, "it is one of adam, sgd"),
        ({"schedule": "step"}, "it is constant, linear or cosine"),
    ],
)
def test_other_optimizers_and_schedules_are_refused(wrong: dict[str, str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        TrainBackend(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "problem"), [({"betas": (2.0, 3.0)}, "Invalid beta"), ({"momentum": 0.9}, "momentum")]
)
def test_options_that_the_optimizer_does_not_take_are_refused_before_there_is_a_network(
    options: dict[str, object], problem: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        TrainBackend(options=options)
