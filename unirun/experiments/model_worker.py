"""`ModelWorkerProcess`: a process with shards of models. It runs the master's calls, and gives others its data.

`EvaluatorProcess` evaluates saved models beside the trial, one after the other, in a role of its own.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from unirun.errors import InvocationTimeout, PeerLost, RemoteError, UnirunError, UsageError
from unirun.experiments.config import (
    BACKENDS,
    DATASETS,
    INTERFACES,
    MODELS,
    DatasetAbstraction,
    Resolved,
    StandaloneModelShardAbstraction,
)
from unirun.experiments.datasets import Dataset, DatasetUtility, Joined, content_of, load_tokenizer
from unirun.experiments.experiment import ExperimentConfig, import_modules, resolve, trial_of
from unirun.experiments.graph import (
    MFCDef,
    ModelInterfaceType,
    ModelName,
    ModelShardID,
    OffloadHook,
    ParamReallocHook,
    ProcessTopology,
    topology,
)
from unirun.experiments.models.api import FinetuneSpec, Model, ModelBackend, ModelInterface, Place, load_whole
from unirun.experiments.orders import MFCReply, MFCRequest, Traffic, data_of, figures_of, means, reductions_of
from unirun.experiments.recovery import Recovery
from unirun.experiments.sample import SequenceSample
from unirun.roles import BaseWorkload, init, trainer_invocation
from unirun.roles.calls.call import InvocationRef
from unirun.train.losses import LIMIT
from unirun.weights.tensors import Layout, NamedBox, dtype_of, layout_of, local, part_of, plan

# The data that model workers give each other without their master: data of sequences, and parameters.
#
# A `DataStore` has what one process holds. Others ask for it by calls, which run in threads of their own, so none waits
# for a computation.

GIVING_TIMEOUT = 600.0
"""Seconds in which another worker must give what it was asked for."""

GIVING_THREADS = 8
"""Calls of other workers for data that one worker answers at a time."""


Ask = Callable[..., InvocationRef[Any]]
"""``ask(rank, "data", step, key, ids)`` starts a call of this method of the store of a rank. Raises `PeerLost` when the
rank cannot be reached."""


class DataStore:
    """The data that the process `rank` has: those of the sequences of steps, by key and id, and parameters of models.
    Stores of other processes `ask` for them, and it asks these."""

    def __init__(self, rank: int, ask: Ask) -> None:
        self._rank, self._ask = rank, ask
        self._lock = threading.Lock()
        self._data: dict[int, dict[tuple[str, str], torch.Tensor]] = {}
        self._models: dict[str, Callable[[], Mapping[str, torch.Tensor]]] = {}
        self._layouts: dict[tuple[str, int], Layout] = {}
        self.traffic: Traffic = Counter()

    def drop(self, before: float = math.inf) -> None:
        """Drop the data of steps before this one, or of all."""
        with self._lock:
            for step in [step for step in self._data if step < before]:
                del self._data[step]

    def put(self, step: int, sample: SequenceSample) -> None:
        """Keep the data of a sample of `step` in host memory, from which it is sent to others."""
        parts = {key: sample[key].cpu().split(sample.sizes(key)) for key in sample.keys}
        with self._lock:
            known = self._data.setdefault(step, {})
            for key, tensors in parts.items():
                known.update(zip([(key, each) for each in sample.ids], tensors, strict=True))

    def put_model(self, name: str, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Others may ask for the parameters of a model, which `tensors` gives as they are now."""
        with self._lock:
            self._models[name] = tensors

    def forget_models(self) -> None:
        """There are no models any more, and the layouts of those of other ranks may change."""
        with self._lock:
            self._models.clear()
        self._layouts.clear()

    # Others ask for these.

    def layout(self, model: str) -> Layout:
        """The layout of a model in this process. Raises KeyError."""
        return layout_of(self._tensors(model))

    def parts(self, model: str, parts: Sequence[NamedBox]) -> list[torch.Tensor]:
        """Parts of the parameters of a model, in host memory. Raises KeyError, ValueError."""
        tensors = self._tensors(model)
        layout = layout_of(tensors)
        return [
            part_of(local(tensors[part.name]), layout[part.name], part.box).detach().cpu() for part in parts
        ]

    def data(self, step: int, key: str, ids: Sequence[str]) -> torch.Tensor:
        """The data `key` of these ids of a step, in their order. Raises KeyError, ValueError."""
        with self._lock:
            if step not in self._data:
                raise ValueError(f"data of step {step}")
            return torch.cat([self._data[step][key, each] for each in ids])

    def _tensors(self, model: str) -> Mapping[str, torch.Tensor]:
        with self._lock:
            return self._models[model]()

    # It asks others.

    def gather(
        self, step: int, meta: SequenceSample, where: Mapping[str, Sequence[Sequence[int]]]
    ) -> SequenceSample:
        """The sample `meta` with its data. `where` has, for each key and id, the ranks that hold it. Received data
        is kept here, so that it is sent once."""
        with self._lock:
            known = self._data.setdefault(step, {})
        asked: list[tuple[str, list[int], int, InvocationRef[Any]]] = []
        for key in meta.keys:
            missing: dict[int, list[int]] = {}
            size = meta.dtypes[key].itemsize * math.prod(meta.trailing[key])
            for at, (each, ranks) in enumerate(zip(meta.ids, where[key], strict=True)):
                if (key, each) not in known:
                    # Different ranks ask different owners, so that the load is shared.
                    missing.setdefault(ranks[self._rank % len(ranks)], []).append(at)
                    self.traffic["needed"] += sum(meta.seqlens[key][at]) * size
            for rank, places in missing.items():
                ids = [meta.ids[at] for at in places]
                asked.append((key, places, rank, self._ask(rank, "data", step, key, ids)))
        for key, places, rank, ref in asked:
            tensor: torch.Tensor = _answer(rank, ref)
            self.traffic["moved"] += tensor.nbytes
            some = meta.select([key]).reorder(places)
            self.put(step, SequenceSample(some.ids, some.seqlens, some.dtypes, some.trailing, {key: tensor}))
        data = {
            key: torch.cat([known[key, each] for each in meta.ids])
            if meta.ids
            else torch.empty((0, *meta.trailing[key]), dtype=meta.dtypes[key])
            for key in meta.keys
        }
        return SequenceSample(meta.ids, meta.seqlens, meta.dtypes, meta.trailing, data, meta.metadata)

    @torch.no_grad()
    def copy_parameters(
        self, model: str, ranks: Sequence[int], into: Mapping[str, torch.Tensor], eta: float = 1.0
    ) -> None:
        """Copy the parameters of `model`, which `ranks` hold, into the tensors of the same names. Each element is sent
        once. With `eta` below 1 the tensors of `into` become moving averages; integer tensors are copied.

        Raises `WeightsError` for tensors that do not fit.
        """
        layouts = [self._layout_of(model, rank) for rank in ranks]
        wanted = layout_of(into)
        near = [n for n, rank in enumerate(ranks) if rank == self._rank]
        takes = plan(layouts, wanted, near, self._rank)
        asked = {
            n: self._ask(ranks[n], "parts", model, some)
            for n, some in takes.items()
            if ranks[n] != self._rank
        }
        for n, some in takes.items():
            if n not in asked:
                _put(self.parts(model, some), some, into, wanted, eta)
                continue
            came: list[torch.Tensor] = _answer(ranks[n], asked[n])
            sizes = (t.box.count * dtype_of(wanted[t.name].tensor.dtype).itemsize for t in some)
            self.traffic["needed"] += sum(sizes)
            self.traffic["moved"] += sum(tensor.nbytes for tensor in came)
            _put(came, some, into, wanted, eta)

    def _layout_of(self, model: str, rank: int) -> Layout:
        if rank == self._rank:
            return self.layout(model)
        if (model, rank) not in self._layouts:
            self._layouts[model, rank] = _answer(rank, self._ask(rank, "layout", model))
        return self._layouts[model, rank]


def _answer(rank: int, ref: InvocationRef[Any]) -> Any:
    """The result of a call of the store of `rank`. Raises `PeerLost`, `WorkerLost`."""
    try:
        return ref.result()
    except InvocationTimeout as error:
        raise PeerLost(
            f"rank {rank} has not answered within {GIVING_TIMEOUT:g} s", "is it stopped?", worker=str(rank)
        ) from error
    except (KeyError, ValueError, RuntimeError, RemoteError) as error:
        # The master named this rank as an owner of the data, so its process was replaced since.
        raise PeerLost(
            f"rank {rank} does not give what was asked for: it has no {error}",
            "go on from the last checkpoint",
            worker=str(rank),
        ) from error


def _put(
    found: Sequence[torch.Tensor],
    takes: Sequence[NamedBox],
    into: Mapping[str, torch.Tensor],
    wanted: Layout,
    eta: float,
) -> None:
    for tensor, take in zip(found, takes, strict=True):
        target = part_of(local(into[take.name]), wanted[take.name], take.box)
        if eta < 1.0 and target.is_floating_point():
            target.lerp_(tensor.to(target.device), eta)
        else:
            target.copy_(tensor)


WORKER_CONNECT_TIMEOUT = 30.0
"""Timeout in seconds for a connection to another worker."""


class ModelShard:
    """A shard of a model in this process."""

    def __init__(self, about: StandaloneModelShardAbstraction, model: Model, backend: ModelBackend) -> None:
        self.about, self.model, self.backend = about, model, backend
        self.offloaded = False
        self._meant: frozenset[str] = frozenset()

    def begins(self) -> None:
        """Note the present values of the model as right: those that are not finite now, such as a mask with
        -inf, are intended."""
        self._meant = frozenset(self._found())

    def not_finite(self) -> list[str]:
        """The parameters and buffers that have got values that are not finite."""
        return [name for name in self._found() if name not in self._meant]

    def _found(self) -> Iterator[str]:
        engine = self.model.engine
        for name, tensor in engine.tensors().items() if engine is not None else ():
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if own.is_floating_point() and not bool(own.isfinite().all()):
                yield name


class ModelWorkerProcess(BaseWorkload):
    """One of the model workers of a trial. Its methods are called by the master, one at a time."""

    def setup(self) -> None:
        """Join the other workers; read the configuration."""
        self._trial = trial_of(self.config)
        import_modules(self._trial.modules, self._trial.folder)
        self._experiment: ExperimentConfig = resolve(self._trial.experiment, self._trial.overrides)
        assert self._experiment.resolved is not None
        self._resolved: Resolved = self._experiment.resolved
        self._mine = self._experiment.model_worker[self.rank]
        self._recovery = Recovery(Path(self._trial.root))
        self._peers, self._others = init().peers, init().role_group(self.role)
        self._store = DataStore(self.rank, self._ask)
        self._device = _device()
        self._shards: dict[ModelName, ModelShard] = {}
        self._interfaces: dict[str, ModelInterface] = {}
        self._held_out: dict[ModelName, SequenceSample] = {}
        self._meshes: dict[ModelName, DeviceMesh] = {}
        self._meshes_of: Any = None
        self._tokenizer: Any = None
        self._dataset: Dataset | None = None
        self._has_read, self._content = False, ""
        self._attempt = -1
        # Counts and figures are on the CPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo")

    def _read(self) -> None:
        """Read the tokenizer and the datasets, once. The master calls this, and ends the trial after an
        error; after an error in `setup` the worker would be started again."""
        if self._has_read:
            return
        self._tokenizer = load_tokenizer(self._mine.tokenizer_name_or_path)
        self._dataset = self._read_dataset()
        if self._dataset is not None:
            self._content = content_of(self._dataset)
        for shard in self._mine.shards:
            if shard.eval_dataset is not None:
                self._held_out[shard.id.model_name] = self._read_held_out(shard.id, shard.eval_dataset)
        self._has_read = True

    def _read_dataset(self) -> Dataset | None:
        """The samples of the trial, in workers that read them."""
        source = self._resolved.graph.calls[self._resolved.graph.sources[0]].model_name
        if not self._mine.datasets or all(shard.id.model_name != source for shard in self._mine.shards):
            return None
        util = DatasetUtility(self._tokenizer, self._mine.base_seed)
        return joined([DATASETS.find(each.type_)(util, **each.args) for each in self._mine.datasets])

    def _read_held_out(self, shard: ModelShardID, chosen: DatasetAbstraction) -> SequenceSample:
        """The part of the held-out data that the data-parallel rank of a shard has."""
        util = DatasetUtility(self._tokenizer, self._seed(shard.model_name))
        dataset = DATASETS.find(chosen.type_)(util, **chosen.args)
        ranks = shard.topo.get_dim("data")
        if len(dataset) < ranks:
            raise UsageError(
                f"the held-out dataset of {shard.model_name} has {len(dataset)} samples, and the model has {ranks} "
                "data-parallel ranks",
                "make it larger",
            )
        indices = range(shard.place["data"], len(dataset), ranks)
        return SequenceSample.gather([dataset[index] for index in indices])

    def _seed(self, model: ModelName) -> int:
        """The seed of a model. Replicas of a role begin with the same parameters."""
        return self._mine.base_seed + sum(map(ord, model.role))

    @trainer_invocation(target="ALL")
    def about(self) -> tuple[int, str]:
        """The number of samples of the dataset, and its content; 0 without one. Raises the errors of reading it."""
        self._read()
        return 0 if self._dataset is None else len(self._dataset), self._content

    @trainer_invocation(target="ALL")
    def restore(self, attempt: int, step: int | None, spec: FinetuneSpec) -> dict[str, int]:
        """Make all models anew, in the process groups that there are now, and go on from a checkpoint, if one is given.
        Returns the versions of the models."""
        self._read()
        self._attempt = attempt
        self._store.drop()
        # Interfaces may keep state of the attempt that failed, and it may differ between ranks.
        self._interfaces.clear()
        # Before the new models are made, as there may not be memory for both.
        self._store.forget_models()
        while self._shards:
            old = self._shards.popitem()[1]
            old.backend.destroy(old.model)
            del old
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        for name, topo in sorted(self._resolved.topologies.items()):
            mesh = self._mesh(name, topo)
            about = next((shard for shard in self._mine.shards if shard.id.model_name == name), None)
            if about is None:
                continue
            rank = about.id.parallelism_rank
            place = Place(name, topo, rank, self._device, mesh, self._seed(name))
            module = MODELS.find(about.model.type_)(place, **about.model.args)
            backend: ModelBackend = BACKENDS.find(about.backend.type_)(**about.backend.args)
            model = backend.initialize(Model(place, module, self._tokenizer), spec)
            self._shards[name] = ModelShard(about, model, backend)
            if model.engine is not None:
                self._store.put_model(str(name), model.engine.tensors)
        # After the last collective: one rank may find that its file is damaged.
        for name, shard in self._shards.items():
            if step is not None and shard.about.should_instantiate:
                shard.backend.load(shard.model, self._recovery.folder(step, str(name)))
            shard.begins()
        return {str(name): shard.model.version for name, shard in self._shards.items()}

    def _mesh(self, name: ModelName, topo: ProcessTopology) -> DeviceMesh | None:
        """The mesh of a model. All workers make it, also those that are not in it, as that is collective.

        There is one for as long as the process group lives. DTensor keeps results with the first of equal meshes, so a
        worker that has come later would use other groups than the others.
        """
        if self._meshes_of is not dist.group.WORLD:
            self._meshes_of, self._meshes = dist.group.WORLD, {}
        workers = self._resolved.workers_of(name)
        if len(workers) > 1 and name not in self._meshes:
            grid = torch.tensor(workers).view(topo.dims)
            self._meshes[name] = DeviceMesh(self._device.type, grid, mesh_dim_names=topo.axes)
        return self._meshes.get(name)

    @trainer_invocation(target="ALL")
    def load(self, attempt: int, step: int, oldest: int, rows: Sequence[int]) -> tuple[int, SequenceSample]:
        """Read these samples of the dataset for `step`. They stay here; returns this rank, and what is known of them.
        Steps before `oldest` have ended."""
        self._check(attempt)
        self._store.drop(oldest)
        assert self._dataset is not None
        sample = SequenceSample.gather([self._dataset[index] for index in rows])
        self._store.put(step, sample)
        return self.rank, sample.meta()

    @trainer_invocation(target="ALL", auto_shard=True)
    def call(self, order: MFCRequest) -> MFCReply:
        """Run a call with the model that it names."""
        self._check(order.attempt)
        definition = self._resolved.graph.calls[order.call]
        shard = self._shards[definition.model_name]
        self._store.drop(order.oldest)
        self._store.traffic.clear()
        for hook in definition.pre_hooks:
            self._run_hook(hook, shard)
        self._fetch(shard)
        sample = self._store.gather(order.step, order.meta, order.where).remap(definition.input_key_remap)
        torch.manual_seed(order.seed)
        found, place = self._run(definition, shard.model, sample), shard.model.place
        meta, figures = None, dict[str, float]()
        if definition.interface_type in (ModelInterfaceType.GENERATE, ModelInterfaceType.INFERENCE):
            if place.last_stage and definition.output_keys:
                made = data_of(definition, found, sample, place.rank)
                self._store.put(order.step, made)
                meta = made.meta()
        else:
            figures = figures_of(definition, found, place.rank)
        for hook in definition.post_hooks:
            self._run_hook(hook, shard)
        traffic = self._store.traffic.copy()
        return (meta, figures, traffic) if place.is_dp_head else (None, {}, traffic)

    def _run(self, definition: MFCDef, model: Model, sample: SequenceSample) -> Any:
        interface = self._interface(definition)
        run = getattr(interface, definition.interface_type.value)
        evaluates = definition.interface_type is ModelInterfaceType.EVALUATE
        found = run(model, sample) if evaluates else run(model, sample, definition.mb_spec)
        if definition.interface_type is ModelInterfaceType.TRAIN_STEP:
            model.version += 1
        return found

    def _interface(self, definition: MFCDef) -> ModelInterface:
        if definition.name not in self._interfaces:
            chosen = definition.interface_impl
            self._interfaces[definition.name] = INTERFACES.find(chosen.type_)(**chosen.args)
        return self._interfaces[definition.name]

    def _run_hook(self, hook: ParamReallocHook | OffloadHook, shard: ModelShard) -> None:
        if isinstance(hook, OffloadHook):
            shard.model.running().offload(keep=shard.about.should_instantiate)
            shard.offloaded = True
        elif hook.source is not None:
            self._copy(hook.source, shard, hook.eta)

    @trainer_invocation(target="ALL")
    def reallocate(self, attempt: int, source: ModelName, target: ModelName, eta: float) -> Traffic:
        """Copy the parameters of `source` into those of `target`, of which each of these workers has a shard."""
        self._check(attempt)
        self._store.traffic.clear()
        self._copy(source, self._shards[target], eta)
        return self._store.traffic.copy()

    def _copy(self, source: ModelName, shard: ModelShard, eta: float) -> None:
        self._fetch(shard)
        workers = self._resolved.workers_of(source)
        self._store.copy_parameters(str(source), workers, shard.model.running().tensors(), eta)

    def _fetch(self, shard: ModelShard) -> None:
        if shard.offloaded:
            shard.model.running().fetch()
            shard.offloaded = False

    @trainer_invocation(target="ALL")
    def not_finite(self, attempt: int, models: Sequence[ModelName]) -> list[str]:
        """The parameters and buffers of `models` in this worker that have got values that are not finite."""
        self._check(attempt)
        shards = {name: self._shards[name] for name in models if name in self._shards}
        return [f"{name}: {each}" for name, shard in shards.items() for each in shard.not_finite()]

    @trainer_invocation(target="ALL")
    def checkpoint(self, attempt: int, step: int) -> None:
        """Write what this worker needs to go on after so many steps."""
        self._check(attempt)
        for name, shard in self._shards.items():
            if shard.about.should_instantiate:
                shard.backend.save(shard.model, self._recovery.folder(step, str(name)))

    @trainer_invocation(target="ALL")
    def save(self, attempt: int, call: str, path: str) -> None:
        """Write the model of a call, as its interface does."""
        self._check(attempt)
        definition = self._resolved.graph.calls[call]
        shard = self._shards.get(definition.model_name)
        if shard is not None:
            self._interface(definition).save(shard.model, Path(path))

    @trainer_invocation(target="ALL")
    def evaluate(self, attempt: int, call: str) -> dict[str, float] | None:
        """Sums over the held-out data of the model of a call. None unless `Place.is_dp_head`."""
        self._check(attempt)
        definition = self._resolved.graph.calls[call]
        shard = self._shards.get(definition.model_name)
        if shard is None or shard.about.eval_dataset is None:
            return None
        place = shard.model.place
        self._fetch(shard)
        found = self._interface(definition).evaluate(shard.model, self._held_out[definition.model_name])
        return found if place.is_dp_head else None

    def _check(self, attempt: int) -> None:
        if attempt != self._attempt:
            raise UnirunError(f"this call is of attempt {attempt}, and the worker is in {self._attempt}")

    def _ask(self, rank: int, *request: Any) -> InvocationRef[Any]:
        """Call a method of the store of another worker."""
        deadline = time.monotonic() + WORKER_CONNECT_TIMEOUT
        while not self._peers.find(self.role, rank).endpoint:
            if time.monotonic() >= deadline:
                raise PeerLost(
                    f"{self.role}:{rank} cannot be reached", "does it live?", worker=f"{self.role}:{rank}"
                )
            time.sleep(0.02)
        ref: InvocationRef[Any] = self._others[rank].give.call_async(*request)
        return ref

    # One that was lost has not the data any more, so the call is not made again.
    @trainer_invocation(
        target="RANK0", concurrency=GIVING_THREADS, idempotent=True, retries=0, timeout=GIVING_TIMEOUT
    )
    def give(self, what: Literal["data", "layout", "parts"], *request: Any) -> Any:
        """The data, layout or parts of a model that another worker asks the store of this one for."""
        return getattr(self._store, what)(*request)


def joined(made: Sequence[Dataset]) -> Dataset:
    """Several datasets as one."""
    return made[0] if len(made) == 1 else Joined(made)


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class EvaluatorProcess(BaseWorkload):
    """Makes the model once, whole, and gives it the parameters of each save."""

    _sample: SequenceSample | None = None

    def _prepare(self) -> SequenceSample:
        """Make the model and read the dataset, once. This is done in the first call, so that the master hears of
        errors: a restart would not mend them."""
        if self._sample is not None:
            return self._sample
        trial = trial_of(self.config)
        import_modules(trial.modules, trial.folder)
        config = resolve(trial.experiment, trial.overrides)
        assert config.resolved is not None
        self._call = call = config.evaluated()
        worker = config.model_worker[config.resolved.workers_of(call.model_name)[0]]
        shard = config.models()[call.model_name]
        place = Place(call.model_name, topology(), 0, _device())
        tokenizer = load_tokenizer(worker.tokenizer_name_or_path)
        module = MODELS.find(shard.model.type_)(place, **shard.model.args)
        self._model: Model = BACKENDS.find("inference")().initialize(
            Model(place, module, tokenizer), FinetuneSpec(1, 1, 1)
        )
        self._interface = INTERFACES.find(call.interface_impl.type_)(**call.interface_impl.args)
        chosen = config.evaluator.dataset
        assert chosen is not None
        dataset = DATASETS.find(chosen.type_)(DatasetUtility(tokenizer, worker.base_seed), **chosen.args)
        self._sample = SequenceSample.gather([dataset[index] for index in range(len(dataset))])
        return self._sample

    @trainer_invocation(target="RANK0", idempotent=True, retries=LIMIT - 1)
    def evaluate(self, path: str) -> dict[str, float]:
        """The figures of the model that was saved in this directory."""
        sample = self._prepare()
        load_whole(self._model, Path(path))
        found = self._interface.evaluate(self._model, sample)
        return means([found], reductions_of(self._call))
