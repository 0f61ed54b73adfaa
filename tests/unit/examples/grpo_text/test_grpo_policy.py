"""The policy's steps: alone, and as several ranks that add up their gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from grpo import Groups, Lesson, group_advantages
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from progress import Progress, plot
from recipe import Recipe, learning_rate, recipe_of
from tokenizer import encode, pad_left, pad_right
from torch import Tensor

from tests.waiting import WAIT_TIMEOUT

if TYPE_CHECKING:
    from llama import answer_log_probs, make_model, sample
    from policy import Policy
    from transformers import LlamaForCausalLM

QUESTIONS, ANSWERS = ["1+2=", "9-8+7=", "3+4=", "5-6="], ["3", "8", "7", "-1"]


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    """Imported when a test needs it: transformers takes seconds, which every process that collects tests would spend."""
    global Policy, answer_log_probs, make_model, sample
    from llama import answer_log_probs, make_model, sample
    from policy import Policy


def alone(vector: Tensor) -> None:
    """Add up nothing, as one rank does without others."""


def policy(model: LlamaForCausalLM, add_up: Callable[[Tensor], object] = alone) -> Policy:
    return Policy(model, gradient_norm=1.0, add_up=add_up)


def small() -> LlamaForCausalLM:
    return make_model(seed=0, width=16)


def test_warming_up_makes_the_right_answers_likelier() -> None:
    learner = policy(small())
    prompts, answers = pad_left(QUESTIONS), pad_right(ANSWERS, 4)
    losses = [learner.warm_up(prompts, answers, rate=1e-2) for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]
    tokens, _ = sample(learner.model, prompts, 4, None)
    assert torch.equal(tokens, answers)


def lesson_for(model: LlamaForCausalLM, wanted: int) -> Lesson:
    """Answers of one token each; the one that is ``wanted`` gets the reward."""
    prompts = pad_left(QUESTIONS)
    tokens, log_probs = sample(model, prompts.repeat_interleave(16, 0), 1, torch.Generator().manual_seed(0))
    groups = Groups(prompts, tokens.reshape(4, 16, 1), log_probs.reshape(4, 16, 1))
    return Lesson.of(groups, groups.log_probs, group_advantages((groups.tokens[..., 0] == wanted).float()))


def test_grpo_makes_rewarded_answers_likelier_and_its_loss_falls() -> None:
    learner = policy(small())
    (wanted,) = encode("7")
    probe = torch.full((4, 1), wanted)
    lesson = lesson_for(learner.model, wanted)
    with torch.no_grad():
        before = answer_log_probs(learner.model, pad_left(QUESTIONS), probe).mean()
    losses = [learner.improve(lesson, 1e-3, clip=0.2, kl_weight=0.01) for _ in range(5)]
    with torch.no_grad():
        after = answer_log_probs(learner.model, pad_left(QUESTIONS), probe).mean()
    assert losses == sorted(losses, reverse=True)
    assert after > before


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_ranks_with_unequal_shares_take_the_step_that_one_rank_would_take(cut: int) -> None:
    together = policy(small())
    prompts, answers = pad_left(QUESTIONS), pad_right(ANSWERS, 4)
    loss = together.warm_up(prompts, answers, rate=1e-2)

    add_up = Adder(2)
    ranks = [policy(small(), add_up) for _ in range(2)]
    shares = [(prompts[:cut], answers[:cut]), (prompts[cut:], answers[cut:])]
    losses: list[float] = [0.0, 0.0]

    def step(rank: int) -> None:
        losses[rank] = ranks[rank].warm_up(*shares[rank], rate=1e-2)

    other = threading.Thread(target=step, args=(1,))
    other.start()
    step(0)
    other.join(WAIT_TIMEOUT)

    assert losses == [pytest.approx(loss)] * 2
    for name, weight in together.weights().items():
        torch.testing.assert_close(ranks[0].weights()[name], weight)
        assert torch.equal(ranks[0].weights()[name], ranks[1].weights()[name])


class Adder:
    """An all-reduce for threads."""

    def __init__(self, ranks: int) -> None:
        self._vectors: list[Tensor] = []
        self._lock = threading.Lock()
        self._all_here = threading.Barrier(ranks, timeout=WAIT_TIMEOUT)

    def __call__(self, vector: Tensor) -> None:
        with self._lock:
            self._vectors.append(vector.clone())
        self._all_here.wait()
        vector.copy_(self._vectors[0] + self._vectors[1])


def test_a_step_without_any_answers_changes_nothing() -> None:
    learner = policy(small())
    before = learner.weights()
    assert learner.warm_up(pad_left([]), pad_right([], 4), rate=1e-2) == 0.0
    assert learner.updates == 0
    assert all(torch.equal(before[name], value) for name, value in learner.weights().items())


def test_a_policy_that_loads_the_state_of_another_goes_on_like_it() -> None:
    first, second = policy(small()), policy(make_model(seed=1, width=16))
    prompts, answers = pad_left(QUESTIONS), pad_right(ANSWERS, 4)
    first.warm_up(prompts, answers, rate=1e-2)
    second.load(first.state())
    for learner in (first, second):
        learner.warm_up(prompts, answers, rate=1e-2)
    assert first.updates == second.updates == 2
    assert all(torch.equal(first.weights()[name], value) for name, value in second.weights().items())


def test_the_weights_of_a_policy_are_a_copy() -> None:
    learner = policy(small())
    weights = learner.weights()
    learner.warm_up(pad_left(QUESTIONS), pad_right(ANSWERS, 4), rate=1e-2)
    assert not torch.equal(weights["lm_head.weight"], learner.weights()["lm_head.weight"])


@given(steps=st.integers(1, 300), peak=st.floats(1e-5, 1.0))
def test_the_learning_rate_is_positive_never_above_its_peak_and_falls_after_the_ramp(
    steps: int, peak: float
) -> None:
    rates = [learning_rate(step, steps, peak) for step in range(steps)]
    assert all(0.0 < rate <= peak for rate in rates)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_recipe_takes_what_a_job_says_and_keeps_its_defaults_otherwise() -> None:
    assert recipe_of(OmegaConf.create({"steps": 3})) == Recipe(steps=3)


@pytest.mark.parametrize("wrong", [{"step": 3}, {"steps": "many"}])
def test_a_recipe_refuses_what_it_does_not_know(wrong: dict[str, Any]) -> None:
    with pytest.raises(OmegaConfBaseException, match="step"):
        recipe_of(OmegaConf.create(wrong))


@pytest.mark.leaves
def test_progress_is_told_in_points_and_drawn(tmp_path: Any) -> None:
    progress = Progress(warm=0.4)
    assert "40.0%" in progress.line()
    progress.rewards += [0.3, 0.5]
    progress.accuracy.append((2, 0.6))
    assert progress.gain == pytest.approx(20.0)
    assert "step   2  reward 0.50  held-out accuracy  60.0%" in progress.line()
    assert progress.conclusion().endswith("60.0% after GRPO: +20.0 points")
    plot(progress, 400, tmp_path / "made" / "accuracy.png")
    assert (tmp_path / "made" / "accuracy.png").stat().st_size > 1000
