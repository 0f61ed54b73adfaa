"""The environments of the PPO example: what a collector records, and what an evaluation returns."""

from __future__ import annotations

import pytest
import torch
from envs import Collector, greedy_returns
from ppo import ActorCritic, Trajectories
from torch import Tensor, nn


class Balancer(nn.Module):
    """A hand-made policy that always balances: push towards where the pole is falling."""

    def forward(self, obs: Tensor) -> Tensor:
        """Logits so far apart that sampling never takes the other action."""
        position, velocity, angle, spin = obs.unbind(-1)
        push_right = 1e4 * (angle + 0.5 * spin + 0.05 * position + 0.1 * velocity)
        return torch.stack([-push_right, push_right], dim=-1)


@pytest.fixture
def untrained() -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic()


@pytest.fixture
def balancing() -> ActorCritic:
    model = ActorCritic()
    model.policy = nn.Sequential(Balancer())
    return model


def collect(model: ActorCritic, steps: int, envs: int = 3) -> tuple[Collector, Trajectories]:
    collector = Collector(range(envs), torch.Generator().manual_seed(0))
    return collector, collector.collect(model, steps)


def test_within_an_episode_each_step_starts_where_the_last_one_led(untrained: ActorCritic) -> None:
    _, steps = collect(untrained, 100)
    going_on = steps.done[:-1] == 0.0
    assert torch.equal(steps.obs[1:][going_on], steps.next_obs[:-1][going_on])


def test_after_an_episode_the_next_step_starts_a_new_one_near_the_middle(untrained: ActorCritic) -> None:
    _, steps = collect(untrained, 100)
    ended = steps.done[:-1] == 1.0
    assert ended.any()
    assert steps.obs[1:][ended].abs().max() <= 0.05
    angle = steps.next_obs[:-1][ended][:, 2].abs()
    position = steps.next_obs[:-1][ended][:, 0].abs()
    assert ((angle > 0.2) | (position > 2.4)).all(), "next_obs is where the episode failed"


def test_collecting_twice_goes_on_with_the_running_episodes(untrained: ActorCritic) -> None:
    collector, first = collect(untrained, 3)
    second = collector.collect(untrained, 3)
    assert not first.done.any()
    assert torch.equal(second.obs[0], first.next_obs[-1])


def test_the_recorded_log_probabilities_are_those_of_the_policy_that_played(untrained: ActorCritic) -> None:
    _, steps = collect(untrained, 20)
    logits, _ = untrained(steps.obs)
    expected = logits.log_softmax(-1).gather(-1, steps.actions.long().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(steps.log_probs, expected)


def test_the_latest_return_is_the_length_of_the_last_finished_episode(untrained: ActorCritic) -> None:
    collector, steps = collect(untrained, 200, envs=1)
    ends = steps.done[:, 0].nonzero().flatten().tolist()
    assert collector.latest_returns().tolist() == [ends[-1] - ends[-2]]


def test_an_environment_without_a_finished_episode_has_no_latest_return(untrained: ActorCritic) -> None:
    collector, _ = collect(untrained, 1)
    assert collector.latest_returns().tolist() == []


def test_the_time_limit_ends_an_episode_without_terminating_it(balancing: ActorCritic) -> None:
    collector, steps = collect(balancing, 501, envs=2)
    assert steps.done.nonzero().tolist() == [[499, 0], [499, 1]]
    assert not steps.terminated.any()
    assert collector.latest_returns().tolist() == [500.0, 500.0]


def test_the_greedy_return_of_a_policy_that_balances_is_the_time_limit(balancing: ActorCritic) -> None:
    assert greedy_returns(balancing, [1, 2, 3]).tolist() == [500.0, 500.0, 500.0]


def test_a_greedy_return_depends_on_its_seed_only(untrained: ActorCritic) -> None:
    together = greedy_returns(untrained, [5, 6, 7])
    apart = torch.cat([greedy_returns(untrained, [seed]) for seed in (5, 6, 7)])
    assert torch.equal(together, apart)


def test_no_seeds_give_no_returns(untrained: ActorCritic) -> None:
    assert greedy_returns(untrained, []).shape == (0,)
