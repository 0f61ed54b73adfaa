"""`Experiment`: what is registered, and how its settings are changed from the command line."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import msgspec
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from unirun.errors import Fault, SpecError, UsageError
from unirun.experiments.config import (
    ExperimentDescription,
    ExperimentScheduling,
    Registry,
    Resolved,
    WorkerInformation,
    calls_with_hooks,
    data_transfer_pairs,
    instantiated,
    sync_param_pairs,
)
from unirun.experiments.graph import build_graph
from unirun.values import Value

# What an experiment returns.


@dataclass
class ExperimentConfig(ExperimentDescription):
    """An experiment: its calls, and what each of its workers has. `call_timeout` is the number of seconds
    that a call of a step, an evaluation, a save or a checkpoint may take; a longer one ends the trial with an
    error."""

    resolved: Resolved | None = field(default=None, init=False, repr=False)

    def lazy_init(self) -> Resolved:
        """Check everything, and derive what follows. Raises `SpecError` with all that is wrong."""
        from unirun.experiments.checks import dataset_keys, faults

        found = faults(self)
        if found:
            raise SpecError(found)
        calls = calls_with_hooks(self)
        graph = build_graph(calls, dataset_keys(self))
        for call in self.model_rpcs:
            call.joins(graph)
        owners = instantiated(calls)
        for worker in self.model_worker:
            for shard in worker.shards:
                shard.should_instantiate = shard.id.model_name in owners
        self.resolved = Resolved(
            graph,
            {name: shard.id.topo for name, shard in self.models().items()},
            tuple(data_transfer_pairs(graph)),
            tuple(sync_param_pairs(calls)),
            owners,
            {shard.id: index for index, worker in enumerate(self.model_worker) for shard in worker.shards},
        )
        return self.resolved

    def resolve_worker_config(self, worker_type: str, worker_index: int) -> Any:
        """The configuration of one worker, as ``model_worker`` 3. Raises `SpecError` when there is none."""
        found = getattr(self, worker_type, None) if worker_type in WORKER_TYPES else None
        if found is None or not 0 <= worker_index < len(found):
            count = "" if found is None else f"; there are {len(found)}"
            raise SpecError(
                [
                    Fault(
                        worker_type,
                        f"there is no such worker {worker_index}{count}",
                        f"types: {', '.join(WORKER_TYPES)}",
                    )
                ]
            )
        return found[worker_index]

    def set_worker_information(self, experiment_name: str, trial_name: str) -> None:
        """Tell each worker which one it is."""
        for kind in WORKER_TYPES:
            workers = getattr(self, kind)
            for index, worker in enumerate(workers):
                worker.worker_info = worker.worker_info or WorkerInformation()
                worker.worker_info.system_setup(experiment_name, trial_name, kind, index, len(workers))


WORKER_TYPES = ("model_worker", "master_worker", "generation_server", "gserver_manager", "rollout_worker")


# The settings of one trial.


class Trial(Value):
    """The names of a trial, the way to make its experiment, and the places of its files. It is the
    ``config:`` of the job.

    `resume`: continue from the last checkpoint, if there is one. Without `resume`, existing checkpoints are deleted.
    `resume_only`: fail if no checkpoint can be read. `accept` names settings that may differ from those of
    the checkpoint.
    """

    experiment: str
    trial: str
    root: str
    modules: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    folder: str = ""
    resume: bool = False
    resume_only: bool = False
    accept: tuple[str, ...] = ()


NAME_RULE = "use printable characters without '/', the first no '-' or '.', and at most 100 bytes"
"""The rule for names of experiments and trials in words, as the remedy of an error."""

MAX_NAME_BYTES = 100


class Experiment:
    """An experiment. A dataclass that derives from it has settings, which ``key=value`` changes on the command line.

    `preload` are modules that take long to import: they are imported once on each node, and not by each worker. They
    must not start threads or use a device when they are imported.
    """

    preload: ClassVar[tuple[str, ...]] = ()

    def scheduling_setup(self) -> ExperimentScheduling:
        """The number of workers of each type, and the resources that each needs."""
        raise NotImplementedError(f"{type(self).__name__} must define scheduling_setup()")

    def initial_setup(self) -> ExperimentConfig | list[ExperimentConfig]:
        """All workers, and the calls; a list has one configuration. Each process of a trial calls it, so it must depend
        on the settings only."""
        raise NotImplementedError(f"{type(self).__name__} must define initial_setup()")


EXPERIMENTS: Registry[Callable[[], Experiment]] = Registry("experiment")


def register_experiment(name: str, cls: Callable[[], Experiment]) -> None:
    """``-e name`` starts ``cls()``. Raises `UsageError` if another one has the name."""
    EXPERIMENTS.register(name, cls)


def make_experiment(name: str) -> Experiment:
    """The experiment that is registered under `name`. Raises `UsageError` with those that there are."""
    return EXPERIMENTS.find(name)()


def check_names(experiment: str, trial: str) -> None:
    """Raise `UsageError` for names that no directory should have."""
    for what, name in (("an experiment", experiment), ("a trial", trial)):
        # A path without ".." stays below its top, and one without a dash first is no option of a command.
        shown = name.isprintable() and name == name.strip() and "/" not in name
        if not shown or name[:1] in ("", "-", ".") or len(name.encode()) > MAX_NAME_BYTES:
            raise UsageError(f"{name!r} is no name for {what}", NAME_RULE)


def import_modules(modules: Sequence[str], folder: str = "") -> None:
    """Import the modules that register experiments, as seen from `folder`: each is the name of a module, or the path of
    a file. Without `modules`, import all modules of the package ``experiments``, if it exists. Raises `UsageError` for
    one that does not exist or cannot be imported."""
    top = Path(folder or ".").resolve()
    if folder and str(top) not in sys.path:
        sys.path.insert(0, str(top))
    files = sorted((top / "experiments").glob("*.py")) if not modules else ()
    # Hidden ones are no modules: editors and systems make them beside a file.
    shown = (path for path in files if path.name != "__init__.py" and not path.name.startswith("."))
    for name in (*modules, *map(str, shown)):
        if name.endswith(".py") or "/" in name:
            _import_file(name, top)
        else:
            _import(name)


def _import_file(name: str, top: Path) -> None:
    """Import a file. One below `top` keeps its whole name, ``experiments.ppo``, by which other modules import it."""
    given = Path(os.path.abspath(top / (name if name.endswith(".py") else f"{name}.py")))
    path = given.parent.resolve() / given.name
    if not path.is_file():
        raise UsageError(f"there is no file {path}", "give --module a module's name, or the path of a file")
    parts = path.relative_to(top).with_suffix("").parts if path.is_relative_to(top) else ()
    if not parts or not all(map(str.isidentifier, parts)):
        parts = (path.stem,)
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
    found = getattr(_import(".".join(parts), path), "__file__", None)
    if found is None or not path.samefile(found):
        raise UsageError(
            f"{path} cannot be imported: there is another module {'.'.join(parts)}, {found or 'built in'}",
            "rename one of them",
        )


def _import(name: str, path: Path | None = None) -> object:
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever a user's module raises
        trace = _inside(error.__traceback__)
        if path is None and trace is None and isinstance(error, ModuleNotFoundError):
            raise UsageError(
                f"there is no module {name!r}", "give --module, as seen from the working directory"
            ) from None
        raise UsageError(
            f"{path or f'module {name!r}'} cannot be imported: {type(error).__name__}: {error}", "correct it"
        ) from error.with_traceback(trace)


def _inside(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of the import system that come first."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file not in (__file__, importlib.__file__) and not file.startswith("<frozen importlib"):
            break
        trace = trace.tb_next
    return trace


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
    override, merged = "", None
    try:
        merged = OmegaConf.structured(experiment)
        for override in overrides:
            merged = OmegaConf.merge(merged, _dotted(override))
        found: Any = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, yaml.YAMLError, TypeError) as error:
        there = ", ".join(field.name for field in dataclasses.fields(experiment))
        given = override.partition("=")[0].strip()
        # What is wrong with an interpolation is found at the end.
        key = getattr(error, "full_key", None) or given
        where = override if key == given else key
        remedy = f"{_quoting(merged, key, override, error)}the settings of {name} are: {there}"
        problem = str(error).partition("\n")[0]
        raise UsageError(f"{where and f'{where}: '}{problem}", remedy) from error
    assert isinstance(found, Experiment)
    return found


def _dotted(override: str) -> DictConfig:
    if "=" not in override:
        raise OmegaConfBaseException("a setting is written as key=value")
    try:
        return OmegaConf.from_dotlist([override])
    except IndexError as error:
        # A key of brackets alone, "[=1".
        raise OmegaConfBaseException("this names no setting") from error


def _quoting(settings: Any, key: str, override: str, error: Exception) -> str:
    """The way to write the text that was meant, if a text was given as YAML's None."""
    if not isinstance(error, ValidationError) or error.value is not None:
        return ""
    if not isinstance(OmegaConf.select(settings, key), str):
        return ""
    text = override.partition("=")[2].strip()
    return f"{text or 'an empty value'} is YAML's None; for the text write {key}=\"'{text}'\"; "


def trial_of(config: Any) -> Trial:
    """The trial that the ``config:`` of a job describes."""
    return msgspec.convert(OmegaConf.to_container(config), Trial)


def resolve(name: str, overrides: Sequence[str]) -> ExperimentConfig:
    """The whole configuration of an experiment, checked. Raises `SpecError`, `UsageError`."""
    config: Any = with_settings(name, overrides).initial_setup()
    if isinstance(config, list):
        if len(config) != 1:
            raise UsageError(
                f"initial_setup() of {name!r} returns {len(config)} configurations, and a trial has one",
                "return one, and start a trial for each",
            )
        (config,) = config
    if not isinstance(config, ExperimentConfig):
        raise UsageError(
            f"initial_setup() of {name!r} returns a {type(config).__name__}", "return an ExperimentConfig"
        )
    config.lazy_init()
    return config
