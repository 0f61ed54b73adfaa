"""The losses of asynchronous training, and what `DecoupledGRPO` makes of trajectories."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirun.experiments.algorithms import (
    TOKENS,
    DecoupledGRPO,
    decoupled_ppo_loss,
    group_advantages,
    logprobs_of,
)
from unirun.experiments.graph import MicroBatchSpec
from unirun.experiments.models.api import Generated, Model
from unirun.experiments.models.backends import TrainBackend, causal_lm
from unirun.experiments.orders import dispatch
from unirun.experiments.sample import SequenceSample, balanced

from .models.test_stage import CONFIG, SPEC, place


def trajectories(*rewards: tuple[float, ...]) -> SequenceSample:
    """Groups of sequences with a prompt of two tokens."""
    lengths = [[4 + at for at, _ in enumerate(group)] for group in rewards]
    total = [torch.arange(size) % 7 for group in lengths for size in group]
    masks = [torch.arange(len(each)) < 2 for each in total]
    data = {
        TOKENS: torch.cat(total),
        "prompt_mask": torch.cat(masks),
        "packed_logprobs": torch.cat([torch.where(mask, 0.0, -1.0) for mask in masks]),
        "rewards": torch.tensor([reward for group in rewards for reward in group]),
    }
    per_token = dict.fromkeys((TOKENS, "prompt_mask", "packed_logprobs"), lengths)
    ones = [[1] * len(group) for group in rewards]
    return SequenceSample.packed(
        data, {**per_token, "rewards": ones}, [f"p{at}" for at, _ in enumerate(rewards)]
    )


def model() -> Model:
    stage = causal_lm(place(), config=CONFIG)
    return TrainBackend(lr=0.05).initialize(Model(place(), stage, None), SPEC)


def test_the_advantages_of_a_group_have_mean_0_and_deviation_1_and_those_of_equal_rewards_are_0() -> None:
    found = group_advantages(torch.tensor([0.0, 1.0, 2.0, 5.0, 5.0]), [3, 2])
    assert found[:3].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert found[:3].std(unbiased=False).item() == pytest.approx(1.0, abs=1e-3)
    assert found[3:].tolist() == [0.0, 0.0]
    assert group_advantages(torch.tensor([0.0, 1.0]), [2], scaled=False).tolist() == [-0.5, 0.5]


def test_with_the_policy_that_made_the_tokens_the_decoupled_loss_is_that_of_ppo() -> None:
    now = torch.tensor([-0.5, -2.0, -1.0, -1.0])
    before, gains = torch.full((4,), -1.0), torch.tensor([1.0, 1.0, -1.0, 0.0])
    found = decoupled_ppo_loss(now, before, before, gains, clip=0.2)
    assert found.tolist() == pytest.approx([-1.2, -math.exp(-1.0), 1.0, 0.0])


def test_the_loss_is_weighted_by_the_ratio_to_the_policy_that_made_the_tokens_and_cut_above_the_cap() -> None:
    now = torch.tensor([-1.0, -1.0], requires_grad=True)
    proximal, behaviour = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -4.0])
    found = decoupled_ppo_loss(now, proximal, behaviour, torch.ones(2), cap=5.0)
    assert found.tolist() == pytest.approx([-math.exp(0.5), 0.0])
    found.sum().backward()
    assert now.grad is not None
    # Near the proximal policy, which is not clipped.
    assert now.grad.tolist() == pytest.approx([-math.exp(0.5), 0.0])


def test_logarithms_are_those_of_a_forward_pass_at_a_temperature() -> None:
    sample = trajectories((0.0, 1.0))
    logits = torch.randn(sample.total(TOKENS), 7, generator=torch.Generator().manual_seed(0))
    found = logprobs_of(logits, sample, 0.5).split(sample.lengths(TOKENS))
    for each, out, tokens in zip(
        found, logits.split(sample.lengths(TOKENS)), sample.sequences(TOKENS), strict=True
    ):
        assert each[0] == 0.0
        wanted = (out[:-1] / 0.5).log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]]
        assert torch.allclose(each[1:], wanted)


def test_groups_without_variance_are_refused_unless_they_are_wanted() -> None:
    assert DecoupledGRPO().accepts(trajectories((0.0, 1.0)))
    assert not DecoupledGRPO().accepts(trajectories((1.0, 1.0)))
    assert DecoupledGRPO(drop_equal=False).accepts(trajectories((1.0, 1.0)))


def test_a_step_with_fewer_groups_than_parts_has_the_figures_of_those_that_there_are() -> None:
    figures = DecoupledGRPO(minibatches=3).train_step(model(), trajectories((0.0, 1.0)), MicroBatchSpec())
    assert figures["ratio"] == figures["ratio_max"] == pytest.approx(1.0)


class Skips:
    """An engine that has skipped one more step after each part."""

    skipped = 0

    def train_batch(self, *batch: object) -> dict[str, float]:
        """The count of all steps so far."""
        self.skipped += 1
        return {"skipped_steps": float(self.skipped), "lr": 0.5}


def test_steps_that_were_skipped_are_counted_once() -> None:
    engine: Any = Skips()
    policy = Model(place(), torch.nn.Identity(), None, engine)
    sample = trajectories((0.0, 1.0), (2.0, 1.0), (0.0, 3.0))
    for before in (0.0, 3.0):
        figures = DecoupledGRPO(minibatches=3).train_step(policy, sample, MicroBatchSpec())
        assert (figures["skipped_steps"], figures["lr"]) == (before + 3.0, 0.5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_nothing_is_clipped_as_long_as_the_policy_is_the_one_that_has_made_the_tokens(
    temperature: float,
) -> None:
    policy, interface = model(), DecoupledGRPO(clip=1e-4, temperature=temperature)
    sample = trajectories((0.0, 1.0), (2.0, 1.0))
    made = interface.inference(policy, sample, MicroBatchSpec())
    assert made is not None
    for more in (made, made.remap({"packed_logprobs": "proximal_logprobs"}).update(made)):
        found = DecoupledGRPO(clip=1e-4, temperature=temperature).train_step(
            model(), sample.update(more), MicroBatchSpec()
        )
        assert (found["clipped"], found["ratio"], found["ratio_max"]) == (
            0.0,
            *[pytest.approx(1.0, abs=1e-5)] * 2,
        )


class Digits:
    """A token is a digit; 0 ends."""

    eos_token_id = 0

    def decode(self, tokens: list[int]) -> str:
        """Text."""
        return "".join(map(str, tokens))


def score(row: dict[str, str], text: str) -> float:
    """1 for the answer of the row."""
    return float(text == row["answer"])


class Answers:
    """An engine whose answers are given."""

    def __init__(self, *answers: tuple[list[int], bool]) -> None:
        self._made = Generated(
            [[torch.tensor(tokens)] for tokens, _ in answers],
            [[torch.zeros(len(tokens))] for tokens, _ in answers],
            [[ended] for _, ended in answers],
        )

    def generate(self, *request: object, stop: set[int], seed: int) -> Generated:
        """All of them."""
        assert stop == {0}
        return self._made


@pytest.mark.parametrize("ends", [0, [0], (0,)])
def test_held_out_answers_are_scored_by_a_function_and_those_that_have_not_ended_are_empty(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tokenizer has one token that ends, or several.
    monkeypatch.setattr(Digits, "eos_token_id", ends)
    prompts = SequenceSample.of(
        {"packed_prompts": [torch.tensor([3])] * 3}, ["a", "b", "c"], row=[{"answer": "12"}] * 3
    )
    engine: Any = Answers(([1, 2, 0], True), ([1, 2], False), ([5, 0], True))
    policy = Model(place(), torch.nn.Identity(), Digits(), engine)
    interface = DecoupledGRPO(reward=f"{__name__}:score", max_new_tokens=3)
    assert interface.evaluate(policy, prompts) == {"reward": 1.0, "tokens": 7.0, "count": 3.0}


def test_a_step_makes_the_better_sequence_of_a_group_likelier() -> None:
    policy, interface = model(), DecoupledGRPO(minibatches=2)
    sample = trajectories((0.0, 1.0), (0.0, 0.5, 1.0))
    spec = MicroBatchSpec()

    def logprobs() -> SequenceSample:
        found = interface.inference(policy, sample, spec)
        assert found is not None
        return found

    before = logprobs()
    remapped = before.remap({"packed_logprobs": "proximal_logprobs"})
    figures = interface.train_step(policy, sample.update(remapped), spec)
    assert figures["reward"] == pytest.approx(0.5)
    assert figures["ratio_max"] >= figures["ratio"] > 0.0

    def sums(found: SequenceSample) -> list[float]:
        masks = sample["prompt_mask"].split(sample.lengths(TOKENS))
        return [
            float(each[~mask].sum())
            for each, mask in zip(found.sequences("packed_logprobs"), masks, strict=True)
        ]

    gained = [after - now for after, now in zip(sums(logprobs()), sums(before), strict=True)]
    assert gained[1] > gained[0]


@given(st.integers(1, 4), st.lists(st.integers(1, 1000), min_size=4, max_size=24), st.booleans())
def test_no_part_of_a_step_is_empty_in_all_ranks(ranks: int, sizes: list[int], equal: bool) -> None:
    """There are as many parts as the checks allow. A rank whose groups are long has fewer groups than parts."""
    parts = -(-len(sizes) // ranks)
    of_ranks = [
        balanced([sizes[at] for at in places], parts) for places in dispatch(sizes, ranks, equal=equal)
    ]
    assert all(any(each) for each in zip(*of_ranks, strict=True))
