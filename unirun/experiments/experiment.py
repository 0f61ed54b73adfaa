"""`Experiment`: what is registered, and how its settings are changed from the command line."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unirun.errors import UsageError
from unirun.experiments.config import ExperimentConfig, ExperimentScheduling
from unirun.experiments.orders import Trial
from unirun.experiments.registry import Registry

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?")
"""What an experiment and a trial may be called: both are parts of a path, of a key and of a job's id."""

LONGEST = 55
"""Characters of both names together: a job's id has eight more, and 63 at most."""


class Experiment:
    """An experiment. A dataclass that derives from it has settings, which ``key=value`` changes on the command line.

    `preload` are modules that take long to import: they are imported once on each node, and not by each worker. They
    must not start threads or use a device when they are imported.
    """

    preload: ClassVar[tuple[str, ...]] = ()

    def scheduling_setup(self) -> ExperimentScheduling:
        """How many workers of each type there are, and what each needs."""
        raise NotImplementedError(f"{type(self).__name__} must define scheduling_setup()")

    def initial_setup(self) -> ExperimentConfig:
        """All workers, and the calls. Each process of a trial calls it, so it must depend on the settings only."""
        raise NotImplementedError(f"{type(self).__name__} must define initial_setup()")


EXPERIMENTS: Registry[Callable[[], Experiment]] = Registry("experiment")


def register_experiment(name: str, cls: Callable[[], Experiment]) -> None:
    """``-e name`` starts ``cls()``. Raises `UsageError` if another one has the name."""
    EXPERIMENTS.register(name, cls)


def make_experiment(name: str) -> Experiment:
    """The experiment that is registered under `name`. Raises `UsageError` with those that there are."""
    return EXPERIMENTS.find(name)()


def check_names(experiment: str, trial: str) -> None:
    """Raise `UsageError` for names that a path or a key cannot have."""
    if len(experiment) + len(trial) > LONGEST:
        raise UsageError(
            f"{experiment!r} and {trial!r} have {len(experiment) + len(trial)} characters",
            f"use {LONGEST} at most for both",
        )
    for what, name in (("experiment", experiment), ("trial", trial)):
        if not NAME.fullmatch(name) or ".." in name:
            raise UsageError(
                f"{name!r} is no name for {'an' if what == 'experiment' else 'a'} {what}",
                "use letters and digits, and '-' and '.' between them",
            )


def import_modules(modules: Sequence[str], folder: str = "") -> None:
    """Import the modules that register experiments, from `folder`. A module may be given as a relative file name, too.
    Without `modules`, import all modules of the package ``experiments``, if it exists. Raises `UsageError` for a module
    that does not exist."""
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    names = [name.removesuffix(".py").replace("/", ".") for name in modules]
    package = Path(folder or ".") / "experiments"
    if not names and package.is_dir():
        names = [
            f"experiments.{path.stem}" for path in sorted(package.glob("*.py")) if path.stem != "__init__"
        ]
    importlib.import_module("unirun.experiments.builtin")
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise UsageError(
                f"there is no module {name!r}", "give --module, as seen from the working directory"
            ) from error


def with_settings(name: str, overrides: Sequence[str]) -> Experiment:
    """The experiment `name` with some of its settings changed: ``optimizer.lr=1e-4``.

    Raises `UsageError` for a setting that it does not have, or a value of another type.
    """
    experiment = make_experiment(name)
    if not overrides:
        return experiment
    if not dataclasses.is_dataclass(experiment):
        raise UsageError(
            f"experiment {name!r} has no settings",
            f"make {type(experiment).__name__} a dataclass, with a field for each",
        )
    try:
        merged = OmegaConf.merge(OmegaConf.structured(experiment), OmegaConf.from_dotlist(list(overrides)))
        found: Any = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, yaml.YAMLError, TypeError) as error:
        there = ", ".join(field.name for field in dataclasses.fields(experiment))
        raise UsageError(f"{str(error).splitlines()[0]}", f"the settings of {name} are: {there}") from error
    assert isinstance(found, Experiment)
    return found


def trial_of(config: Any) -> Trial:
    """The trial that the ``config:`` of a job describes."""
    return msgspec.convert(OmegaConf.to_container(config), Trial)


def resolve(name: str, overrides: Sequence[str]) -> ExperimentConfig:
    """The whole configuration of an experiment, checked. Raises `SpecError`, `UsageError`."""
    config = with_settings(name, overrides).initial_setup()
    if not isinstance(config, ExperimentConfig):
        raise UsageError(
            f"initial_setup() of {name!r} returns a {type(config).__name__}", "return an ExperimentConfig"
        )
    config.lazy_init()
    return config
