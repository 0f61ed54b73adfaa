"""The PPO example over ssh, as two roles of scripts and as a trainer with workloads."""

from __future__ import annotations

import pytest

from tests.testbed.hosts import REPOSITORY

from .cluster import UnirunOnHosts

PPO = REPOSITORY / "examples" / "ppo_cartpole"

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]


def test_ppo_as_trainer_and_workloads_runs_on_three_hosts(cluster: UnirunOnHosts) -> None:
    short = ("config.solved=40", "config.bar=40", f"config.out={cluster.root}/reward.png")
    cluster.place("nothing", "")
    end = cluster("--hosts", "h1:2,h2:2,h3:2", "--config", "job.yaml", *short, within=300.0, cwd=PPO)
    assert end.code == 0, end.err
    assert "1 of 1 seeds reached 40" in end.out


def test_ppo_as_two_roles_of_scripts_runs_on_three_hosts(cluster: UnirunOnHosts) -> None:
    cluster.place("nothing", "")
    train = ("train.py", "--seeds", "0", "--bar", "0", "--out", cluster.root / "reward.png")
    roles = ("--roles", "actor=2,rollout=3")
    end = cluster("--hosts", "h1:2,h2:2,h3:2", *roles, *train, within=300.0, cwd=PPO)
    assert end.code == 0, end.err
