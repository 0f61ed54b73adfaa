"""Advantages, divergence and loss."""

from __future__ import annotations

import math

import pytest
import torch
from grpo import Groups, Lesson, answer_means, divergence, group_advantages, teaches, token_losses
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

seeds = st.integers(0, 2**31 - 1)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(seed=seeds, scale=st.floats(0.1, 10.0), shift=st.floats(-5.0, 5.0))
def test_advantages_have_mean_0_and_deviation_1_whatever_the_scale_of_rewards(
    seed: int, scale: float, shift: float
) -> None:
    advantages = group_advantages(scale * drawn(seed, 3, 8) + shift)
    torch.testing.assert_close(advantages.mean(-1), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(
        advantages.std(-1, correction=0), torch.ones(3, dtype=torch.float64), atol=0.02, rtol=0.0
    )


@given(seed=seeds)
def test_a_better_answer_of_a_group_has_a_larger_advantage(seed: int) -> None:
    rewards = drawn(seed, 1, 6)
    assert torch.equal(group_advantages(rewards).argsort(-1), rewards.argsort(-1))


@given(seed=seeds)
def test_groups_do_not_see_each_other(seed: int) -> None:
    rewards = drawn(seed, 4, 8)
    torch.testing.assert_close(group_advantages(rewards)[1:2], group_advantages(rewards[1:2]))


def test_a_group_of_equal_rewards_has_no_advantages_and_teaches_nothing() -> None:
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    assert group_advantages(rewards)[:2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert teaches(rewards).tolist() == [False, False, True]


@given(seed=seeds)
def test_the_divergence_is_never_negative_and_0_where_both_agree(seed: int) -> None:
    log_probs, reference = drawn(seed, 2, 100)
    assert (divergence(log_probs, reference) >= 0.0).all()
    assert not divergence(log_probs, log_probs).any()


@given(seed=seeds)
def test_the_divergence_is_the_kl_divergence_on_average_over_the_policy(seed: int) -> None:
    policy, reference = drawn(seed, 2, 10).log_softmax(-1)
    mean = (policy.exp() * divergence(policy, reference)).sum()
    exact = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum")
    torch.testing.assert_close(mean, exact)


def loss_of(log_probs: Tensor, old: Tensor, reference: Tensor, advantages: Tensor, kl: float = 0.0) -> Tensor:
    return token_losses(log_probs, old, reference, advantages, clip=0.2, kl_weight=kl)


@given(seed=seeds)
def test_under_the_policy_that_drew_the_answers_the_gradient_is_the_policy_gradient(seed: int) -> None:
    log_probs = drawn(seed, 5, 3).requires_grad_()
    advantages = drawn(seed + 1, 5)
    (gradient,) = torch.autograd.grad(
        loss_of(log_probs, log_probs.detach(), log_probs.detach(), advantages, kl=1.0).sum(), log_probs
    )
    torch.testing.assert_close(gradient, -advantages.unsqueeze(-1).expand(5, 3))


@pytest.mark.parametrize(
    ("ratio", "advantage", "learns"),
    [
        pytest.param(1.5, 1.0, False, id="a good token that is much likelier by now"),
        pytest.param(0.5, -1.0, False, id="a bad token that is much rarer by now"),
        pytest.param(1.5, -1.0, True, id="a bad token that became likelier"),
        pytest.param(0.5, 1.0, True, id="a good token that became rarer"),
        pytest.param(1.1, 1.0, True, id="a good token within the clip"),
    ],
)
def test_the_clip_stops_only_what_has_gone_far_enough(ratio: float, advantage: float, learns: bool) -> None:
    log_probs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    zero = torch.zeros(1, 1)
    (gradient,) = torch.autograd.grad(loss_of(log_probs, zero, zero, torch.tensor([advantage])), log_probs)
    assert bool(gradient.any()) == learns


@given(seed=seeds)
def test_the_divergence_pulls_towards_the_reference(seed: int) -> None:
    log_probs, reference = drawn(seed, 2, 4, 3)
    log_probs.requires_grad_()
    loss = loss_of(log_probs, log_probs.detach(), reference, torch.zeros(4, dtype=torch.float64), kl=0.5)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    assert torch.equal(-gradient > 0, reference > log_probs)


def test_the_mean_over_an_answer_leaves_out_what_comes_after_it() -> None:
    values = torch.tensor([[1.0, 3.0, 100.0], [2.0, 4.0, 6.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    assert answer_means(values, mask).tolist() == [2.0, 4.0]


def groups(count: int) -> Groups:
    numbers = torch.arange(count)
    tokens = numbers.reshape(-1, 1, 1) + torch.zeros(count, 3, 2, dtype=torch.long)
    return Groups(numbers.unsqueeze(-1), tokens, tokens.float())


@given(count=st.integers(0, 9), cut=st.integers(0, 9))
def test_groups_that_are_cut_and_joined_are_as_before(count: int, cut: int) -> None:
    whole = groups(count)
    joined = Groups.joined([whole[:cut], whole[cut:]])
    assert len(joined) == count
    assert torch.equal(joined.prompts, whole.prompts)
    assert torch.equal(joined.tokens, whole.tokens)
    assert torch.equal(joined.log_probs, whole.log_probs)


def test_a_mask_picks_groups() -> None:
    assert groups(3)[torch.tensor([True, False, True])].prompts.tolist() == [[0], [2]]


@given(count=st.integers(0, 9), parts=st.integers(1, 5), seed=seeds)
def test_the_parts_of_a_lesson_have_each_answer_once_with_what_belongs_to_it(
    count: int, parts: int, seed: int
) -> None:
    whole = groups(count)
    lesson = Lesson.of(whole, 2.0 * whole.log_probs, whole.log_probs[..., 0])
    found = lesson.parts(parts, torch.Generator().manual_seed(seed))
    assert len(found) == parts
    assert sorted(torch.cat([part.advantages for part in found]).tolist()) == sorted(
        lesson.advantages.tolist()
    )
    for part in found:
        assert torch.equal(part.prompts[:, 0].float(), part.advantages)
        assert torch.equal(part.tokens[:, 0].float(), part.advantages)
        assert torch.equal(part.reference_log_probs, 2.0 * part.old_log_probs)
