"""The figures of a trial in Weights & Biases and in TensorBoard, by the callbacks that trainers have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from unirun.errors import Fault, UsageError
from unirun.experiments.config import ExperimentDescription
from unirun.train.callbacks import TensorBoardCallback, TrainingCallback, WandbCallback

MODES = ("online", "offline", "disabled")
"""Modes of wandb."""


def trackers(config: ExperimentDescription, experiment: str, trial: str, job: str) -> list[TrainingCallback]:
    """The trackers of a trial. A job is one run of wandb, even if its master is started again. Raises `UsageError` if
    a library is not installed."""
    found: list[TrainingCallback] = []
    if config.wandb.mode != "disabled":
        given = {name: value for name, value in vars(config.wandb).items() if value is not None}
        given.pop("config", None)
        run: dict[str, Any] = {"project": experiment, "name": trial, "id": job, "resume": "allow"}
        found.append(WandbCallback(**{**run, **given}))
    if config.tensorboard.path is not None:
        found.append(TensorBoardCallback(config.tensorboard.path))
    return found


def tracked_settings(config: ExperimentDescription, experiment: object) -> dict[str, Any]:
    """The settings that trackers show: those of the `experiment`, and what wandb is given besides."""
    named = dataclasses.fields(experiment) if dataclasses.is_dataclass(experiment) else ()
    return {**{each.name: getattr(experiment, each.name) for each in named}, **(config.wandb.config or {})}


def tracker_faults(config: ExperimentDescription) -> Iterator[Fault]:
    """Trackers whose library is not installed on this host, and a mode that wandb does not have."""
    if config.wandb.mode not in MODES:
        yield Fault("wandb.mode", repr(config.wandb.mode), f"it is one of {', '.join(MODES)}")
        return
    try:
        trackers(config, "", "", "")
    except UsageError as error:
        yield Fault("wandb and tensorboard", error.problem, error.remedy)
