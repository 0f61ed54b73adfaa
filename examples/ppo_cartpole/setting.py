"""The settings of both variants of this example: the task's sizes and the seeds of its episodes."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

ENVS = 16  # environments in the whole job, shared out among the rollouts and again among the actors
STEPS = 64  # steps of each environment per update
UPDATES = 200  # per seed, at most
SOLVED = 475.0  # mean return at which a seed stops early: Gymnasium's reward threshold for CartPole-v1
EPISODES = 20  # per evaluation of the greedy policy


class Purpose(IntEnum):
    """The purpose of episodes; those of different purposes start from different states."""

    TRAINING = 0
    VALIDATION = 1  # may this seed stop early?
    FINAL = 2  # the reported figure, from episodes that neither trained nor selected the policy


def episode_seeds(seed: int, purpose: Purpose, count: int) -> list[int]:
    """``count`` environment seeds, fixed by the run's ``seed`` and the ``purpose``."""
    return [int(word) for word in np.random.SeedSequence([seed, purpose]).generate_state(count)]
