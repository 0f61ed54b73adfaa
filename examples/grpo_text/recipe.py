"""The settings of a run, with their defaults; the ``config:`` section of a job file may set any of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from omegaconf import DictConfig, OmegaConf


@dataclass(frozen=True)
class Recipe:
    """The settings, the same in every role. The defaults were tried with several seeds."""

    seed: int = 0

    min_terms: int = 3
    max_terms: int = 3  # numbers of one digit each in a sum
    room: int = 4  # tokens that an answer may take, its END included; "-18" is among the longest

    warmup_steps: int = 250
    warmup_batch: int = 64  # solved sums per step
    warmup_rate: float = 1e-3  # learning rate at its highest

    steps: int = 200
    prompts: int = 128  # questions per step
    group: int = 8  # answers to each of them
    minibatches: int = 4  # gradient steps per step
    rate: float = 6e-4  # learning rate at its highest
    clip: float = 0.2
    kl_weight: float = 0.02  # how much a token's divergence from the reference counts
    gradient_norm: float = 1.0  # at most, over all parameters

    held_out: int = 400  # questions that accuracy is measured on
    evaluate_every: int = 25  # steps
    bar: float = 15.0  # points of accuracy that a run must gain over its warm-up, else it fails
    out: str = "accuracy.png"


def recipe_of(config: DictConfig) -> Recipe:
    """The recipe of a job's ``config:`` section.

    Raises:
        omegaconf.errors.OmegaConfBaseException: a name is unknown or a value has the wrong type.
    """
    return cast(Recipe, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Recipe), config)))


def learning_rate(step: int, steps: int, peak: float, ramp: int = 10) -> float:
    """The rate of step 0..steps-1: up to ``peak`` within ``ramp`` steps, and down to zero at the end.

    Up, because Adam's first steps are as long as all others and know the least about their direction; down,
    because a policy that keeps its step size wanders around what it has found.
    """
    return peak * min(1.0, (step + 1) / ramp) * (1.0 - step / steps)
