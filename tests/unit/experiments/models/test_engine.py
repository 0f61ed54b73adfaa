"""Steps whose loss or gradients are not finite change nothing."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from unirun.errors import TrainingFailed, UsageError
from unirun.experiments import GenerationConfig, MicroBatchSpec, Model, SequenceSample
from unirun.experiments.models.api import PipelinableEngine
from unirun.experiments.models.backends import TrainBackend, causal_lm

from .test_stage import CONFIG, SPEC, place, tokens


def engine(dtype: str = "float32", **how: Any) -> PipelinableEngine:
    stage = causal_lm(place(), config=CONFIG, dtype=dtype)
    schedule: dict[str, Any] = {"lr": 0.1, "schedule": "linear", "updates": 10}
    return TrainBackend(**schedule, **how).initialize(Model(place(), stage, None), SPEC).running()


def step(engine: PipelinableEngine, factor: float = 1.0, *, gradients: float = 1.0) -> dict[str, float]:
    """A step whose loss is multiplied by `factor`, and whose gradients by `gradients`."""

    def loss(outputs: torch.Tensor, part: SequenceSample) -> tuple[torch.Tensor, dict[str, float]]:
        outputs.register_hook(lambda gradient: gradient * gradients)
        return outputs.float().square().mean() * factor, {}

    return engine.train_batch(tokens(), "tokens", MicroBatchSpec(2), loss, lambda part: float(len(part)))


def same(one: Any, other: Any) -> bool:
    """Return True if two states are equal to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"factor": math.nan}, r"the loss is not finite \(nan\) in rank 0 of actor@0"),
        ({"factor": math.inf}, r"the loss is not finite \(inf\) in rank 0 of actor@0"),
        ({"gradients": math.nan}, r"the gradient norm is not finite \(nan\) in rank 0 of actor@0"),
        ({"gradients": math.inf}, r"the gradient norm is not finite \((nan|inf)\) in rank 0 of actor@0"),
    ],
)
class TestNotFinite:
    def test_it_is_an_error_and_nothing_has_changed(self, wrong: dict[str, float], told: str) -> None:
        trained = engine()
        step(trained)
        before = copied(trained.state())
        with pytest.raises(TrainingFailed, match=f"{told}; error_if_nonfinite=False"):
            step(trained, **wrong)
        assert same(trained.state(), before)

    def test_or_it_is_skipped_and_counted_and_the_schedule_waits(
        self, wrong: dict[str, float], told: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        skipping, other = engine(error_if_nonfinite=False), engine(error_if_nonfinite=False)
        assert step(skipping)["skipped_steps"] == 0.0
        step(other)
        found = step(skipping, **wrong)
        assert found["skipped_steps"] == 1.0
        assert not (math.isfinite(found["loss"]) and math.isfinite(found["grad_norm"]))
        assert same(skipping.state(), {**other.state(), "skipped": 1})
        last = step(skipping)
        assert {**step(other), "skipped_steps": 1.0} == last
        assert "is not finite" in capfd.readouterr().err


@pytest.mark.parametrize("kept", [*itertools.product([False, True], repeat=3)])
def test_parameters_that_were_kept_are_there_again_whatever_was_dropped_before(
    kept: tuple[bool, ...],
) -> None:
    trained = engine()
    for keep in kept:
        before = copied(trained.tensors())
        trained.offload(keep=keep)
        trained.fetch()
        assert {name: each.shape for name, each in trained.tensors().items()} == {
            name: each.shape for name, each in before.items()
        }
        for name, tensor in trained.tensors().items():
            if not keep:
                # The values come from another model.
                tensor.copy_(before[name])
            assert torch.equal(tensor, before[name])
        step(trained)


def test_only_steps_of_training_draw_for_dropout() -> None:
    stage = causal_lm(place(), config={**CONFIG, "attention_dropout": 0.5})
    trained = TrainBackend(lr=0.0).initialize(Model(place(), stage, None), SPEC).running()
    how = GenerationConfig(max_new_tokens=3, greedy=True)
    for _ in range(2):
        assert len({step(trained)["loss"] for _ in range(4)}) > 1
        found = [trained.forward(tokens(), "tokens", MicroBatchSpec()) for _ in range(2)]
        assert found[0] is not None
        assert found[1] is not None
        assert torch.equal(found[0], found[1])
        step(trained)
        made = [trained.generate(tokens(), "tokens", MicroBatchSpec(), how, seed=1) for _ in range(2)]
        assert made[0] is not None
        assert made[1] is not None
        assert [each[0].tolist() for each in made[0].logprobs] == [
            each[0].tolist() for each in made[1].logprobs
        ]
        step(trained)


def test_a_network_is_trained_in_float64() -> None:
    trained = engine("float64")
    assert 0.0 < step(trained)["grad_norm"] < math.inf
    assert {each.dtype for each in trained.state()["tensors"].values()} == {torch.float64}


def test_the_count_of_skipped_steps_is_in_a_checkpoint() -> None:
    one, other = engine(error_if_nonfinite=False), engine(error_if_nonfinite=False)
    step(one)
    step(one, math.nan)
    other.load_state(copied(one.state()))
    assert step(other)["skipped_steps"] == 1.0


def test_figures_of_micro_batches_are_means_or_what_their_reduction_says() -> None:
    def loss(outputs: torch.Tensor, part: SequenceSample) -> tuple[torch.Tensor, dict[str, float]]:
        length = float(part.total("tokens"))
        return outputs.float().square().sum(), dict.fromkeys(("mean", "sum", "max", "min"), length)

    def train(**more: Any) -> dict[str, float]:
        weight = lambda part: float(part.total("tokens"))  # noqa: E731 - one line says it
        return engine().train_batch(tokens(), "tokens", MicroBatchSpec(2), loss, weight, **more)

    kinds = ("mean", "sum", "max", "min")
    found = train(reductions={kind: kind for kind in kinds})
    # Two micro-batches with 3 and 2 tokens.
    assert {kind: found[kind] for kind in kinds} == {"mean": 1.0, "sum": 5.0, "max": 3.0, "min": 2.0}
    assert {kind: train()[kind] for kind in kinds} == dict.fromkeys(kinds, 1.0)
    with pytest.raises(
        UsageError, match="the reduction of 'sum' is 'total'; it is one of mean, sum, max, min"
    ):
        train(reductions={"sum": "total"})


class Plain:
    """The same network, trained by torch alone: a step for all sequences, with the rate of its number."""

    def __init__(self, total: int, warmup: float, clip: float) -> None:
        self.stage = causal_lm(place(), config=CONFIG)
        self._optimizer = torch.optim.SGD(self.stage.parameters(), lr=1.0, momentum=0.9)
        self._total, self._rising, self._clip = total, int(warmup * total), clip

    def step(self, number: int) -> float:
        """One step. Returns its rate."""
        self.stage.train()
        rising, falling = (number + 1) / max(self._rising, 1), self._total - self._rising
        fallen = 1.0 - min((number - self._rising) / falling, 1.0) if falling else 1.0
        found = 0.1 * (rising if number < self._rising else fallen)
        self._optimizer.param_groups[0]["lr"] = found
        self._optimizer.zero_grad()
        rows = tokens().sequences("tokens")
        outputs = [self.stage(row[None]).float()[0] for row in rows]
        loss = torch.stack([each.square().mean(-1).sum() for each in outputs]).sum()
        (loss / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(self.stage.parameters(), self._clip or math.inf)
        self._optimizer.step()
        return found


@examples(30)
@given(
    steps=st.integers(1, 6),
    cuts=st.sets(st.integers(1, 5)),
    warmup=st.sampled_from([0.0, 0.4, 1.0]),
    clip=st.sampled_from([0.0, 0.05]),
    parts=st.integers(1, 2),
)
def test_steps_are_those_of_torch_alone_however_often_an_engine_goes_on_from_a_checkpoint(
    steps: int, cuts: set[int], warmup: float, clip: float, parts: int
) -> None:
    def made() -> PipelinableEngine:
        backend = TrainBackend(0.1, "sgd", {"momentum": 0.9}, "linear", warmup, 0.0, clip, updates=5)
        return backend.initialize(Model(place(), causal_lm(place(), config=CONFIG), None), SPEC).running()

    def loss(outputs: torch.Tensor, part: SequenceSample) -> tuple[torch.Tensor, dict[str, float]]:
        return outputs.float().square().mean(-1).sum(), {}

    trained, plain = made(), Plain(5, warmup, clip)
    for number in range(steps):
        if number in cuts:
            state = copied(trained.state())
            trained = made()
            trained.load_state(state)
        figures = trained.train_batch(
            tokens(), "tokens", MicroBatchSpec(parts), loss, lambda part: float(len(part))
        )
        assert figures["lr"] == pytest.approx(plain.step(number))
        for name, tensor in plain.stage.named(plain.stage.state_dict()).items():
            torch.testing.assert_close(trained.tensors()[name], tensor, rtol=1e-4, atol=1e-5)
