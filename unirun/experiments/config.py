"""The configuration of an experiment: its workers, what each of them has, and what follows from all of them
together.

The names are those of AReaL's system API. What users write are dataclasses that they fill in;
`ExperimentConfig.lazy_init` checks all of it (`checks.py`) and derives the rest. What they name by a string is in a
`Registry`.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Generic, TypeVar

from unirun.errors import Fault, UsageError
from unirun.experiments.graph import (
    Abstraction,
    Graph,
    MFCDef,
    ModelName,
    ModelShardID,
    ProcessTopology,
    with_hooks,
)


class ExpStatus(Enum):
    """The state of a trial, as ReaLHF has it (`trial_status`)."""

    RUNNING = "RUNNING"
    ABORTED = "ABORTED"
    COMPLETE = "COMPLETE"


# The times at which an experiment saves, checkpoints, evaluates and ends.


@dataclass
class ExperimentSaveEvalControl:
    """The length of an experiment, and the intervals at which it saves, checkpoints and evaluates: every so
    many epochs, steps or seconds, whichever comes first. None: this unit does not trigger it. Models are
    always saved at the end.

    It *saves* models for other programs, writes *checkpoints* from which it can be resumed, and *evaluates*.
    `benchmark_steps` ends it after so many steps, and `benchmark_n_seqs` after so many samples.
    """

    total_train_epochs: int = 1
    save_freq_epochs: int | None = None
    save_freq_steps: int | None = None
    save_freq_secs: float | None = None
    ckpt_freq_epochs: int | None = None
    ckpt_freq_steps: int | None = None
    ckpt_freq_secs: float | None = None
    eval_freq_epochs: int | None = None
    eval_freq_steps: int | None = None
    eval_freq_secs: float | None = None
    benchmark_steps: int | None = None
    benchmark_n_seqs: int | None = None

    def every(self, what: str) -> dict[str, float]:
        """The interval at which it does `what`, one of `PERIODIC`, by unit; a unit that does not trigger it is
        absent."""
        limits = {unit: getattr(self, f"{what}_freq_{unit}") for unit in UNITS}
        return {unit: limit for unit, limit in limits.items() if limit is not None}

    def is_over(self, epoch: int, step: int, n_seqs: int) -> bool:
        """Return True after so many epochs and steps of `n_seqs` samples each."""
        ends = ((self.benchmark_steps, step), (self.benchmark_n_seqs, step * n_seqs))
        return epoch >= self.total_train_epochs or any(
            most is not None and reached >= most for most, reached in ends
        )

    def due(self, since: Since) -> list[str]:
        """Those of `PERIODIC` that are to be done now."""
        return [
            what
            for what in PERIODIC
            if any(since.get(what, {}).get(unit, 0) >= limit for unit, limit in self.every(what).items())
        ]

    def faults(self) -> list[Fault]:
        """Settings that are not positive numbers of the right type."""
        found = []
        for name, value in vars(self).items():
            if value is None and name != "total_train_epochs":
                continue
            whole = not name.endswith("secs")
            right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not right or not value > 0:
                kind = "a whole number" if whole else "a number of seconds"
                remedy = "None: never" if name != "total_train_epochs" else ""
                found.append(Fault(f"exp_ctrl.{name}", f"{value!r} is not {kind} above 0", remedy))
        return found


PERIODIC = ("save", "ckpt", "eval")
"""Tasks that an experiment repeats."""

UNITS = ("epochs", "steps", "secs")

Since = Mapping[str, Mapping[str, float]]
"""By task, the epochs, steps and seconds since it was last done; 0 where it is absent. Seconds are those spent in the
calls of steps: evaluations, saves, checkpoints, and times when the job does not run, do not count."""


def passed(since: Since, **more: float) -> Since:
    """`since` after so many more ``epochs``, ``steps`` and ``secs``."""
    return {
        what: {unit: since.get(what, {}).get(unit, 0) + more.get(unit, 0) for unit in UNITS}
        for what in PERIODIC
    }


def done(since: Since, what: Collection[str]) -> Since:
    """`since` after these tasks were done now."""
    return {**since, **{name: {} for name in what}}


# One value under the names that ReaLHF and AReaL have for each use.

ModelAbstraction = Abstraction
"""A network (`register_model`): its name, and a dict of its arguments, as with all abstractions."""

ModelBackendAbstraction = Abstraction
"""The backend that trains a network, or only runs it (`register_backend`)."""

DatasetAbstraction = Abstraction
"""A dataset (`register_dataset`)."""

AgentAbstraction = Abstraction
"""The agent that turns a prompt into a trajectory, in a rollout worker."""

EnvServiceAbstraction = Abstraction
"""The environment service that judges trajectories, in a rollout worker."""


@dataclass
class Scheduling:
    """The resources that each worker of one type needs: `cpu` processors, `gpu` devices (0: it runs on the
    CPU), `mem` MiB of memory. One processor, the default, is no need, as workers may share processors.

    `nodelist` and `exclude` are lists of hosts, as Slurm writes them. They hold for all workers of a trial.
    `container_image`, `time_limit`, `begin` and `deadline` are options of sbatch, and refused in other modes.
    """

    cpu: int = 1
    gpu: int = 0
    mem: int = 0
    nodelist: str | None = None
    exclude: str | None = None
    container_image: str | None = None
    env_vars: dict[str, str] = field(default_factory=dict)
    time_limit: str | None = None
    begin: str | None = None
    deadline: str | None = None

    @staticmethod
    def master_worker_default(**kwargs: Any) -> Scheduling:
        """For the master, the manager of generation servers, or a rollout worker: one processor."""
        return Scheduling(**{"cpu": 1, "gpu": 0, **kwargs})

    @staticmethod
    def model_worker_default(**kwargs: Any) -> Scheduling:
        """For a model worker or a generation server: one processor and one device."""
        return Scheduling(**{"cpu": 1, "gpu": 1, **kwargs})

    generation_server_default = model_worker_default
    gserver_manager_default = master_worker_default
    rollout_worker_default = master_worker_default


@dataclass
class TasksGroup:
    """`count` workers of one type."""

    count: int
    scheduling: Scheduling


@dataclass
class ExperimentScheduling:
    """The number of workers of each type, and the resources that each needs. By default, the evaluator needs
    the same as a model worker."""

    model_worker: TasksGroup
    master_worker: TasksGroup = field(
        default_factory=lambda: TasksGroup(1, Scheduling.master_worker_default())
    )
    generation_server: TasksGroup | None = None
    gserver_manager: TasksGroup | None = None
    rollout_worker: TasksGroup | None = None
    evaluator: Scheduling | None = None
    controller_image: str | None = None


@dataclass
class WorkerInformation:
    """The identity of one worker; `ExperimentConfig.set_worker_information` fills it in."""

    experiment_name: str = ""
    trial_name: str = ""
    worker_type: str = ""
    worker_index: int = -1
    worker_count: int = 0
    worker_tag: str | None = None
    host_key: str | None = None
    watch_keys: str | list[str] | None = None

    def system_setup(
        self, experiment_name: str, trial_name: str, worker_type: str, worker_index: int, worker_count: int
    ) -> None:
        """Fill in the identity, and leave the rest."""
        self.experiment_name, self.trial_name = experiment_name, trial_name
        self.worker_type, self.worker_index, self.worker_count = worker_type, worker_index, worker_count


@dataclass
class StandaloneModelShardAbstraction:
    """The shard of a model that a worker has: its model, its backend, and the dataset on which it is evaluated while
    it is trained. `should_instantiate` is derived: the shard owns its parameters, and is not filled from another
    replica."""

    id: ModelShardID
    model: ModelAbstraction
    backend: ModelBackendAbstraction
    eval_dataset: DatasetAbstraction | None = None
    should_instantiate: bool = True


@dataclass
class ModelWorker:
    """A process with shards of some models, at most one of each. The workers of the model that is called first read
    `datasets`, one after the other, which have the same keys; those of other workers are ignored. A text is a dataset
    without arguments."""

    base_seed: int
    shards: list[StandaloneModelShardAbstraction]
    tokenizer_name_or_path: str = ""
    datasets: list[DatasetAbstraction] = field(default_factory=list)
    shuffle_dataset: bool = True
    worker_info: WorkerInformation | None = None
    use_dataset_cache: bool = False
    dataset_cahce_root: str | None = None
    cuda_cache_cleanliness: bool = True
    cuda_cache_clear_freq: int = 10
    torch_cache_mysophobia: bool = False
    profile_mode: bool = False

    def __post_init__(self) -> None:
        self.tokenizer_name_or_path = self.tokenizer_name_or_path or ""
        self.datasets = _as_datasets(self.datasets)


def _as_datasets(given: Sequence[str | DatasetAbstraction] | None) -> list[DatasetAbstraction]:
    """The datasets as AReaL may write them: by their names, or None for none."""
    return [DatasetAbstraction(each) if isinstance(each, str) else each for each in given or ()]


@dataclass
class GenerationServer:
    """A server that generates with `tp_size` devices: a service with the kind `backend_type`, ``builtin`` or ``vllm``.
    `backend_args` are more options of it: ``{"max_num_seqs": 64}`` is ``--max-num-seqs 64``. Two are of
    unirun: with ``clear_cache``, which is True by default, the keys and values of sequences in work are computed anew
    for each new version; ``python`` is the virtual environment of the server. All servers are alike."""

    base_seed: int
    backend_type: str
    backend_args: Any
    model_path: str
    tp_size: int
    worker_info: WorkerInformation | None = None


@dataclass
class GserverManager:
    """The manager that sends requests to `n_servers` generation servers, and holds back samples that would be
    too stale. Each request of an update of a server's weights may take `flush_request_timeout` seconds. ``"actor"`` as
    its model is ``ModelName("actor")``."""

    model_name: ModelName
    n_servers: int
    schedule_policy: str
    max_head_offpolicyness: int
    train_batch_size: int
    flush_request_timeout: int
    max_concurrent_rollouts: int
    worker_info: WorkerInformation | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model_name, str):
            self.model_name = ModelName(self.model_name)


@dataclass
class RolloutWorker:
    """A worker in which an agent makes trajectories of the prompts in `datasets`, with an environment for each episode.

    A request to a generation server may take `rollout_request_timeout` seconds, and is made in parts of
    `new_tokens_per_chunk` tokens.
    """

    base_seed: int
    model_name: ModelName
    tokenizer_path: str
    new_tokens_per_chunk: int
    rollout_request_timeout: int
    env: EnvServiceAbstraction
    agent: AgentAbstraction
    datasets: list[DatasetAbstraction]
    worker_info: WorkerInformation | None = None
    use_dataset_cache: bool = False
    dataset_cahce_root: str | None = None

    def __post_init__(self) -> None:
        self.datasets = _as_datasets(self.datasets)
        if isinstance(self.model_name, str):
            self.model_name = ModelName(self.model_name)


@dataclass
class MasterWorker:
    """The worker that walks the graph. It is made by `ExperimentConfig`."""

    base_seed: int
    exp_ctrl: ExperimentSaveEvalControl
    n_model_workers: int
    shuffle_dataset: bool = True
    worker_info: WorkerInformation | None = None


@dataclass
class AutomaticEvaluator:
    """Evaluates each saved model of one role, in a role `evaluator` of the job. Uses `dataset`, and the interface and
    the model of the call that trains `role`; by default of the only call that trains."""

    dataset: DatasetAbstraction | None = None
    role: str = ""


@dataclass
class WandBConfig:
    """A run of Weights & Biases that gets the figures of each step, unless `mode` is ``disabled``; it may be ``online``
    or ``offline``. Without `project` and `name`, these are the names of the experiment and of the trial. `config` is
    logged besides the settings of the trial."""

    mode: str = "disabled"
    entity: str | None = None
    project: str | None = None
    name: str | None = None
    job_type: str | None = None
    group: str | None = None
    notes: str | None = None
    tags: list[str] | None = None
    config: dict[str, Any] | None = None


@dataclass
class TensorBoardConfig:
    """The directory of the event files that get the figures of each step; None: there are none."""

    path: str | None = None


@dataclass(frozen=True)
class Resolved:
    """The values that follow from an `ExperimentConfig`.

    The calls of `graph` have the added hooks. `data_transfer_pairs` are the models between which data goes, producer
    first; `sync_param_pairs` those between which parameters go, source first. `instantiated` have parameters of their
    own. `workers` has the model worker of each shard.
    """

    graph: Graph
    topologies: Mapping[ModelName, ProcessTopology]
    data_transfer_pairs: tuple[tuple[ModelName, ModelName], ...]
    sync_param_pairs: tuple[tuple[ModelName, ModelName], ...]
    instantiated: frozenset[ModelName]
    workers: Mapping[ModelShardID, int]

    def workers_of(self, model: ModelName) -> list[int]:
        """The model workers with the shards of a model, in the order of its ranks."""
        topo = self.topologies[model]
        return [self.workers[ModelShardID(model, topo, rank)] for rank in range(topo.world_size())]


@dataclass
class ExperimentDescription:
    """The calls of an experiment, and what each of its workers has: all that can be checked and derived from."""

    exp_ctrl: ExperimentSaveEvalControl
    model_rpcs: list[MFCDef]
    model_worker: list[ModelWorker] = field(default_factory=list)
    generation_server: list[GenerationServer] = field(default_factory=list)
    gserver_manager: list[GserverManager] = field(default_factory=list)
    rollout_worker: list[RolloutWorker] = field(default_factory=list)
    master_worker: list[MasterWorker] = field(default_factory=list)
    auto_eval: bool = False
    evaluator: AutomaticEvaluator = field(default_factory=AutomaticEvaluator)
    call_timeout: float = 2 * 3600.0
    wandb: WandBConfig = field(default_factory=WandBConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)

    def __post_init__(self) -> None:
        first = self.model_worker[0] if self.model_worker else None
        if not self.master_worker and first is not None:
            self.master_worker = [
                MasterWorker(first.base_seed, self.exp_ctrl, len(self.model_worker), first.shuffle_dataset)
            ]

    def models(self) -> dict[ModelName, StandaloneModelShardAbstraction]:
        """A shard of each model, sorted by the names of the models; all shards of a model are alike."""
        found = {shard.id.model_name: shard for worker in self.model_worker for shard in worker.shards}
        return {name: found[name] for name in sorted(found)}

    def evaluated(self) -> MFCDef:
        """The call whose model the evaluator evaluates: the one that trains its role, or the only one that trains."""
        role = self.evaluator.role
        return next(call for call in self.model_rpcs if call.trains and role in ("", call.role))


# Fields of the originals that mean nothing here.

_CACHE = "a dataset is read once, by each worker that needs it"
_MEMORY = "memory of devices is torch's: see PYTORCH_CUDA_ALLOC_CONF"
_KEYS = "the job watches its workers"
WITHOUT_EFFECT = {
    "use_dataset_cache": _CACHE,
    "dataset_cahce_root": _CACHE,
    "cuda_cache_cleanliness": _MEMORY,
    "cuda_cache_clear_freq": _MEMORY,
    "torch_cache_mysophobia": _MEMORY,
    "profile_mode": "unirun profile shows what a worker does",
    "worker_tag": "workers have a type and an index",
    "host_key": _KEYS,
    "watch_keys": _KEYS,
    "model_type": "a network has the type that its configuration names",
    "model_path": "a network comes from its ModelAbstraction",
    "controller_image": "the command is the controller, and container_image is that of the workers",
}
"""Fields that configurations of ReaLHF and AReaL may have, by name, with what is in their place."""


def without_effect(config: ExperimentDescription, scheduling: ExperimentScheduling) -> list[str]:
    """A line for each of `WITHOUT_EFFECT` that is set to something else than its default."""
    workers: list[ModelWorker | RolloutWorker] = [*config.model_worker, *config.rollout_worker]
    about = [worker.worker_info for worker in workers if worker.worker_info is not None]
    given = {
        f"{type(each).__name__}.{one.name}": WITHOUT_EFFECT[one.name]
        for each in (scheduling, *workers, *about)
        for one in fields(each)
        if one.name in WITHOUT_EFFECT and getattr(each, one.name) != one.default
    }
    given |= {
        f"MFCDef.{name}": WITHOUT_EFFECT[name]
        for name in ("model_type", "model_path")
        if any(getattr(call, name) is not None for call in config.model_rpcs)
    }
    return [f"{name} has no effect: {why}" for name, why in given.items()]


# `model_workers` makes the list of model workers from an `Allocation` for each model, instead of shard by shard.


@dataclass(frozen=True)
class Allocation:
    """A model in its layout, from the worker `first` on: rank `r` is in worker ``first + r``. `eval_dataset` is what
    the model is evaluated on while it is trained."""

    model: ModelAbstraction
    backend: ModelBackendAbstraction
    topo: ProcessTopology
    first: int = 0
    eval_dataset: DatasetAbstraction | None = None


def model_workers(
    models: Mapping[ModelName, Allocation],
    *,
    seed: int = 1,
    tokenizer: str = "",
    datasets: Sequence[DatasetAbstraction] = (),
    shuffle: bool = True,
) -> list[ModelWorker]:
    """As many workers as the models need, each with its shards. All of them have the datasets."""
    count = max((a.first + a.topo.world_size() for a in models.values()), default=0)
    return [
        ModelWorker(
            base_seed=seed,
            shards=[
                StandaloneModelShardAbstraction(
                    ModelShardID(name, a.topo, index - a.first), a.model, a.backend, a.eval_dataset
                )
                for name, a in models.items()
                if 0 <= index - a.first < a.topo.world_size()
            ],
            tokenizer_name_or_path=tokenizer,
            datasets=list(datasets),
            shuffle_dataset=shuffle,
        )
        for index in range(count)
    ]


# The values that are derived from a valid configuration of an experiment: pure functions.

Pair = tuple[ModelName, ModelName]


def shared_models(config: ExperimentDescription) -> set[ModelName]:
    """The models that share a worker with another model."""
    return {
        shard.id.model_name
        for worker in config.model_worker
        if len(worker.shards) > 1
        for shard in worker.shards
    }


def calls_with_hooks(config: ExperimentDescription) -> list[MFCDef]:
    """The calls, with the hooks that follow from where their models are."""
    return with_hooks(config.model_rpcs, shared_models(config))


def data_transfer_pairs(graph: Graph) -> list[Pair]:
    """The pairs of models between which data goes, each once: producer and consumer of each edge of the graph; and the
    model of the first source call, whose workers read the dataset, with the model of each source call."""
    calls = graph.calls
    pairs = [(calls[producer].model_name, calls[name].model_name) for producer, name, _ in graph.edges]
    sources = [calls[name].model_name for name in graph.sources]
    return list(dict.fromkeys([*pairs, *((sources[0], other) for other in sources)]))


def sync_param_pairs(calls: Sequence[MFCDef]) -> list[Pair]:
    """The models between which parameters go, source first, each pair once, in the order of the calls."""
    found: list[Pair] = []
    for call in calls:
        for hook in call.reallocs:
            if hook.target is not None:
                found.append((call.model_name, hook.target))
            elif hook.source is not None:
                found.append((hook.source, call.model_name))
    return list(dict.fromkeys(found))


def instantiated(calls: Sequence[MFCDef]) -> frozenset[ModelName]:
    """The models that own parameters: the trained replica of each role that is trained, and all models of other roles.

    Replicas that are updated as a moving average (`eta`) own parameters too.
    """
    trained = {call.role: call.model_name for call in calls if call.trains}
    found = {call.model_name for call in calls if trained.get(call.role, call.model_name) == call.model_name}
    for call in calls:
        found.update(hook.target or call.model_name for hook in call.reallocs if hook.eta < 1.0)
    return frozenset(found)


# Registries: what configurations name by a string.

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects of one `kind` by name. A name is used once. An object whose import is slow is registered as a string,
    ``package.module:name``, and imported when it is needed."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._found: dict[str, T | str] = {}

    def register(self, name: str, value: T | str) -> None:
        """Give `value` a name. Raises `UsageError` if another one has it."""
        known = self._found.setdefault(name, value)
        if known is not value and not _same(known, value):
            raise UsageError(
                f"{self.kind} {name!r} is registered already, as {_where(known)}", "choose another name"
            )

    def find(self, name: str) -> T:
        """Return the entry with this name. Raises `UsageError` with the names that there are."""
        if name not in self._found:
            near = difflib.get_close_matches(name, self._found, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            there = f"there are: {', '.join(self.names())}"
            none = f"there are none: a file of experiments/, or of --module, calls register_{self.kind}"
            raise UsageError(
                f"no {self.kind} is registered as {name!r}", f"{hint}{there}" if self._found else none
            )
        found = self._found[name]
        if isinstance(found, str):
            module, _, attribute = found.partition(":")
            found = self._found[name] = getattr(importlib.import_module(module), attribute)
        return found

    def at_hand(self, name: str) -> T | None:
        """Return the entry with this name. None if nothing has, or if it is not imported yet."""
        found = self._found.get(name)
        return None if isinstance(found, str) else found

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._found)

    def __contains__(self, name: object) -> bool:
        return name in self._found


def _where(value: object) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}".lstrip(".")


def _same(one: object, other: object) -> bool:
    """Return True if both are from one place: a module imported twice, as ``__main__`` too, registers twice."""
    if isinstance(other, str):
        return other in (one, f"{getattr(one, '__module__', '')}:{getattr(one, '__qualname__', '')}")
    places = [
        (
            getattr(each, "__qualname__", None),
            getattr(sys.modules.get(getattr(each, "__module__", "")), "__file__", None),
        )
        for each in (one, other)
    ]
    return None not in places[0] and places[0] == places[1]


DATASETS: Registry[Any] = Registry("dataset")
MODELS: Registry[Any] = Registry("model")
BACKENDS: Registry[Any] = Registry("backend")
INTERFACES: Registry[Any] = Registry("interface")
AGENTS: Registry[Any] = Registry("agent")
ENVIRONMENTS: Registry[Any] = Registry("environment")

# What is built in is registered as strings: the command that starts a trial needs only the names. Datasets register
# themselves, and interfaces come with the algorithms.
for _name, _class in (("ddp", "Train"), ("fsdp2", "Sharded"), ("inference", "Inference"), ("null", "Null")):
    BACKENDS.register(_name, f"unirun.experiments.models.backends:{_class}Backend")
MODELS.register("causal_lm", "unirun.experiments.models.backends:causal_lm")
MODELS.register("null", "unirun.experiments.models.backends:no_model")
ENVIRONMENTS.register("null", lambda: None)

INTERFACES.register("decoupled_grpo", "unirun.experiments.algorithms:DecoupledGRPO")


def register_dataset(name: str, cls: Any) -> None:
    """`DatasetAbstraction(name, args)` makes ``cls(util, **args)``; ``cls.keys`` are the keys of its samples."""
    if not isinstance(getattr(cls, "keys", None), tuple):
        raise UsageError(
            f"dataset {name!r} does not say which keys it has", "give the class keys = ('prompt', …), a tuple"
        )
    # torch's IterableDataset inherits a __getitem__ that only raises.
    own = [vars(each) for each in getattr(cls, "__mro__", ()) if not each.__module__.startswith("torch.")]
    if hasattr(cls, "__iter__") and not any("__getitem__" in names for names in own):
        raise UsageError(
            f"dataset {name!r} can only be iterated over, and samples are read by number, as the master says",
            "give the class __len__ and __getitem__; n_seqs is the size of a batch, and mb_spec splits it by tokens",
        )
    DATASETS.register(name, cls)


def register_model(name: str, make: Any) -> None:
    """`ModelAbstraction(name, args)` makes ``make(place, **args)``."""
    MODELS.register(name, make)


def register_backend(name: str, cls: Any) -> None:
    """`ModelBackendAbstraction(name, args)` makes ``cls(**args)``, a `ModelBackend`."""
    BACKENDS.register(name, cls)


def register_interface(name: str, cls: Any) -> None:
    """`ModelInterfaceAbstraction(name, args)` makes ``cls(**args)``, a `ModelInterface`."""
    INTERFACES.register(name, cls)


def register_agent(name: str, cls: Any) -> None:
    """`AgentAbstraction(name, args)` makes ``cls(**args)``, a `RolloutAgent` or a `CollectingAgent`, once in each
    rollout worker."""
    AGENTS.register(name, cls)


def register_environment(name: str, cls: Any) -> None:
    """`EnvServiceAbstraction(name, args)` makes ``cls(**args)`` for each episode. ``null``: there is
    none."""
    ENVIRONMENTS.register(name, cls)
