"""The mathematics of the PPO example: advantages, loss, minibatches and the buffer of experience."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ppo import OBSERVATION, ActorCritic, Trajectories, gae, minibatches, ppo_loss
from torch import Tensor
from torch.distributions import Categorical

seeds = st.integers(0, 2**31 - 1)
fractions = st.floats(0.0, 1.0)


def random_steps(seed: int, steps: int, envs: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rewards, values, next values, terminated, done: ``[steps, envs]`` float64; some episodes time out."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values, next_values = torch.randn(3, steps, envs, generator=generator, dtype=torch.float64)
    terminated, truncated = (torch.rand(2, steps, envs, generator=generator) < 0.15).double()
    return rewards, values, next_values, terminated, torch.maximum(terminated, truncated)


def loss_of(
    logits: Tensor,
    values: Tensor,
    actions: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    targets: Tensor,
    value_weight: float = 0.0,
    entropy_weight: float = 0.0,
) -> Tensor:
    """The loss with a clip of 0.2 and, unless told otherwise, the policy term alone."""
    return ppo_loss(
        logits,
        values,
        actions,
        old_log_probs,
        advantages,
        targets,
        clip=0.2,
        value_weight=value_weight,
        entropy_weight=entropy_weight,
    )


@given(seed=seeds, steps=st.integers(1, 12), envs=st.integers(1, 4), gamma=fractions, lam=fractions)
def test_an_advantage_is_the_discounted_sum_of_the_residuals_to_the_end_of_its_episode(
    seed: int, steps: int, envs: int, gamma: float, lam: float
) -> None:
    rewards, values, next_values, terminated, done = random_steps(seed, steps, envs)

    advantages = gae(rewards, values, next_values, terminated, done, gamma=gamma, lam=lam)

    residuals = rewards + gamma * (1 - terminated) * next_values - values
    for env in range(envs):
        for start in range(steps):
            expected, weight = 0.0, 1.0
            for t in range(start, steps):
                expected += weight * residuals[t, env].item()
                weight *= gamma * lam
                if done[t, env]:
                    break
            assert advantages[start, env].item() == pytest.approx(expected, abs=1e-9)


@given(seed=seeds, gamma=fractions)
def test_with_lambda_0_an_advantage_is_the_td_residual(seed: int, gamma: float) -> None:
    rewards, values, next_values, terminated, done = random_steps(seed, 6, 2)
    advantages = gae(rewards, values, next_values, terminated, done, gamma=gamma, lam=0.0)
    torch.testing.assert_close(advantages, rewards + gamma * (1 - terminated) * next_values - values)


def test_with_lambda_1_an_advantage_is_the_discounted_return_less_the_value() -> None:
    rewards = torch.tensor([[1.0], [2.0], [4.0]])
    values = torch.tensor([[10.0], [20.0], [30.0]])
    next_values = torch.tensor([[20.0], [30.0], [99.0]])
    ends = torch.tensor([[0.0], [0.0], [1.0]])

    advantages = gae(rewards, values, next_values, ends, ends, gamma=0.5, lam=1.0)

    returns = torch.tensor([[1 + 0.5 * 2 + 0.25 * 4], [2 + 0.5 * 4], [4.0]])
    torch.testing.assert_close(advantages, returns - values)


def test_an_episode_cut_by_its_time_limit_keeps_the_value_of_what_would_have_followed() -> None:
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    fell = gae(one, zero, 8 * one, terminated=one, done=one, gamma=0.5, lam=0.9)
    timed_out = gae(one, zero, 8 * one, terminated=zero, done=one, gamma=0.5, lam=0.9)
    assert fell.item() == pytest.approx(1.0)
    assert timed_out.item() == pytest.approx(1.0 + 0.5 * 8.0)


@given(seed=seeds)
def test_what_happens_in_the_next_episode_does_not_reach_back(seed: int) -> None:
    rewards, values, next_values, terminated, done = random_steps(seed, 8, 1)
    done[3] = 1.0
    before = gae(rewards, values, next_values, terminated, done, gamma=0.99, lam=0.95)
    rewards[4:] += 100.0
    after = gae(rewards, values, next_values, terminated, done, gamma=0.99, lam=0.95)
    assert torch.equal(before[:4], after[:4])


@given(lam=fractions)
def test_a_perfect_value_function_leaves_no_advantage(lam: float) -> None:
    gamma = 0.9
    endless = torch.full((10, 1), 1.0 / (1.0 - gamma), dtype=torch.float64)
    none = torch.zeros_like(endless)
    advantages = gae(torch.ones_like(endless), endless, endless, none, none, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages, none, atol=1e-9, rtol=0.0)


@given(seed=seeds)
def test_under_the_policy_that_played_the_loss_has_the_policy_gradient(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(32, 2, generator=generator, requires_grad=True)
    actions = torch.randint(2, (32,), generator=generator)
    advantages = torch.randn(32, generator=generator)
    log_probs = Categorical(logits=logits).log_prob(actions)
    zeros = torch.zeros(32)

    loss = loss_of(logits, zeros, actions.float(), log_probs.detach(), advantages, zeros)

    (gradient,) = torch.autograd.grad(loss, logits)
    (policy_gradient,) = torch.autograd.grad(-(advantages * log_probs).mean(), logits)
    torch.testing.assert_close(gradient, policy_gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "learns"),
    [
        pytest.param(1.5, 1.0, False, id="a good action already made likelier by more than the clip"),
        pytest.param(0.5, -1.0, False, id="a bad action already made rarer by more than the clip"),
        pytest.param(1.5, -1.0, True, id="a bad action made likelier"),
        pytest.param(0.5, 1.0, True, id="a good action made rarer"),
        pytest.param(1.1, 1.0, True, id="a good action within the clip"),
    ],
)
def test_the_clip_stops_the_gradient_only_where_the_policy_has_gained_enough(
    ratio: float, advantage: float, learns: bool
) -> None:
    logits = torch.zeros(1, 2, requires_grad=True)
    old_log_prob = torch.tensor([math.log(0.5) - math.log(ratio)])
    zero = torch.zeros(1)

    loss = loss_of(logits, zero, zero, old_log_prob, torch.tensor([advantage]), zero)

    (gradient,) = torch.autograd.grad(loss, logits)
    assert bool(gradient.abs().sum() > 0) == learns


@given(seed=seeds)
def test_the_loss_adds_half_the_squared_value_error_and_subtracts_the_entropy(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, 2, generator=generator)
    values, targets, old_log_probs, advantages = torch.randn(4, 8, generator=generator)
    actions = torch.randint(2, (8,), generator=generator).float()
    inputs = (logits, values, actions, old_log_probs, advantages, targets)

    extra = loss_of(*inputs, value_weight=0.5, entropy_weight=0.1) - loss_of(*inputs)

    entropy = Categorical(logits=logits).entropy().mean()
    expected = 0.5 * 0.5 * (values - targets).square().mean() - 0.1 * entropy
    torch.testing.assert_close(extra, expected, atol=1e-5, rtol=1e-5)


@given(seed=seeds, size=st.integers(1, 200), count=st.integers(1, 8))
def test_minibatches_visit_every_step_once_in_parts_of_nearly_equal_size(
    seed: int, size: int, count: int
) -> None:
    parts = list(minibatches(size, count, torch.Generator().manual_seed(seed)))
    assert len(parts) == count
    assert torch.cat(parts).sort().values.tolist() == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_minibatches_of_the_same_generator_seed_are_the_same() -> None:
    first, second = (list(minibatches(64, 4, torch.Generator().manual_seed(7))) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_fields_of_a_trajectory_are_views_that_fill_its_buffer_without_overlap() -> None:
    trajectories = Trajectories.empty(3, 2)
    fields = [
        trajectories.obs,
        trajectories.next_obs,
        trajectories.actions,
        trajectories.log_probs,
        trajectories.rewards,
        trajectories.terminated,
        trajectories.done,
    ]
    for field in fields:
        field += 1.0
    assert trajectories.data.shape == (3, 2, Trajectories.WIDTH)
    assert torch.equal(trajectories.data, torch.ones_like(trajectories.data))


def test_the_model_maps_any_leading_shape_and_starts_near_the_uniform_policy() -> None:
    torch.manual_seed(0)
    logits, values = ActorCritic()(torch.randn(5, 3, OBSERVATION))
    assert logits.shape == (5, 3, 2)
    assert values.shape == (5, 3)
    torch.testing.assert_close(logits.softmax(-1), torch.full((5, 3, 2), 0.5), atol=0.05, rtol=0.0)
