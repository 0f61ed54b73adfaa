"""The graph of an algorithm: model function calls, what each needs of others, and the layouts of their models.

::

    rollout = MFCDef("rollout", 64, ModelInterfaceType.GENERATE, ppo, ModelName("actor"),
                     input_keys=("prompt",), output_keys=("tokens",))
    train = MFCDef("train", 64, ModelInterfaceType.TRAIN_STEP, ppo, ModelName("actor"), input_keys=("tokens",))
    build_graph([rollout, train], dataset_keys={"prompt"}).parents("train")  # {"rollout": ("tokens",)}
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import force_setattr, replace

from unirun.errors import Fault, SpecError, UsageError
from unirun.values import Value

# The places of the shards of a model: names, and how the ranks of a model are split over its parallel axes.

AXES = ("pipe", "data", "tensor")
"""The parallel axes of a model; this order is the usual one: ranks of one tensor-parallel group are neighbours."""

_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")

PART_RULE = "use letters, digits and '_', and '-' and '.' between them"


def is_part(value: object) -> bool:
    """Return True if a role or a call may have this name: it is a part of a path, and of keys."""
    return isinstance(value, str) and _PART.fullmatch(value) is not None and ".." not in value


class ModelName(NamedTuple):
    """A model: its `role` in the algorithm, and which of the copies with that role it is. Printed as ``actor@0``."""

    role: str
    replica_id: int = 0

    def __str__(self) -> str:
        return f"{self.role}@{self.replica_id}"


class ProcessTopology(Value):
    """The ranks ``0..world_size()-1`` of a model as a grid: `dims[i]` places along `axes[i]`. The last axis is the
    fastest, so that ranks which differ in it only are neighbours.

    ::

        topology(pipe=2, data=2, tensor=4).rank(pipe=1, data=0, tensor=3)  # 11
        topology(pipe=2, data=2, order=("data", "pipe", "tensor"))  # the stages of one pipeline are neighbours
    """

    axes: tuple[str, ...]
    dims: tuple[int, ...]

    def get_dim(self, axis: str) -> int:
        """The number of places along an axis; 1 for one that is not split."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 1

    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.dims)

    def rank(self, **at: int) -> int:
        """The rank at this place, in which each axis is named. Raises `UsageError` for a place that is not there."""
        if at.keys() != set(self.axes) or any(
            not 0 <= at[a] < d for a, d in zip(self.axes, self.dims, strict=True)
        ):
            raise UsageError(
                f"there is no place {at} in {self}", f"name {', '.join(self.axes)}, each from 0 on"
            )
        found = 0
        for axis, dim in zip(self.axes, self.dims, strict=True):
            found = found * dim + at[axis]
        return found

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank, by axis. Raises `UsageError` for a rank that is not there."""
        if not 0 <= rank < self.world_size():
            raise UsageError(f"there is no rank {rank} in {self}", f"it has {self.world_size()}")
        found = {}
        for axis, dim in zip(reversed(self.axes), reversed(self.dims), strict=True):
            rank, found[axis] = divmod(rank, dim)
        return {axis: found[axis] for axis in self.axes}

    def matching(self, **at: int) -> list[int]:
        """All ranks at these places along the axes that are named, in ascending order."""
        ranges = [
            range(at[axis], at[axis] + 1) if axis in at else range(dim)
            for axis, dim in zip(self.axes, self.dims, strict=True)
        ]
        return [self.rank(**dict(zip(self.axes, place, strict=True))) for place in itertools.product(*ranges)]

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks that differ in this axis only, in its order: the process groups along it."""
        others = [other for other in self.axes if other != axis]
        if axis not in self.axes:
            return [[rank] for rank in range(self.world_size())]
        places = itertools.product(*(range(self.get_dim(other)) for other in others))
        return [self.matching(**dict(zip(others, place, strict=True))) for place in places]

    def __str__(self) -> str:
        return " × ".join(f"{axis} {dim}" for axis, dim in zip(self.axes, self.dims, strict=True))


def topology(
    *, pipe: int = 1, data: int = 1, tensor: int = 1, order: Iterable[str] = AXES
) -> ProcessTopology:
    """The topology with so many places along each axis. Raises `UsageError` for a wrong number or order."""
    sizes: Mapping[str, int] = {"pipe": pipe, "data": data, "tensor": tensor}
    axes = tuple(order)
    if sorted(axes) != sorted(AXES):
        raise UsageError(f"the order {axes} of parallel axes", f"it has each of {', '.join(AXES)} once")
    for axis, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"{axis}={size!r} is no number of ranks", "it is 1 or more")
    return ProcessTopology(axes, tuple(sizes[axis] for axis in axes))


class ModelShardID(Value):
    """The part of a model that one worker has. ``"actor"`` as its model is ``ModelName("actor")``."""

    model_name: ModelName
    topo: ProcessTopology
    parallelism_rank: int

    def __post_init__(self) -> None:
        if isinstance(self.model_name, str):
            force_setattr(self, "model_name", ModelName(self.model_name))

    @property
    def place(self) -> dict[str, int]:
        """Its index along each axis."""
        return self.topo.coordinates(self.parallelism_rank)

    @classmethod
    def from_parallelism_rank(
        cls, model_name: ModelName, topo: ProcessTopology, parallelism_rank: int
    ) -> ModelShardID:
        """The shard of a rank, as ReaLHF spells it. Raises `UsageError` for a rank that is not there."""
        topo.coordinates(parallelism_rank)
        return cls(model_name, topo, parallelism_rank)

    @property
    def dp_rank(self) -> int:
        """Its index along the axis ``data``."""
        return self.place.get("data", 0)

    @property
    def tp_rank(self) -> int:
        """Its index along the axis ``tensor``."""
        return self.place.get("tensor", 0)

    @property
    def pp_rank(self) -> int:
        """Its index along the axis ``pipe``."""
        return self.place.get("pipe", 0)

    def __str__(self) -> str:
        place = self.place
        return f"{self.model_name}[" + ", ".join(f"{axis} {at}" for axis, at in place.items()) + "]"


class ModelInterfaceType(StrEnum):
    """The kind of work that a call does with its model: the method of its `ModelInterface`."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"
    EVALUATE = "evaluate"


class Abstraction(Value):
    """Something that is registered under `type_`, and the arguments with which it is made."""

    type_: str
    args: dict[str, Any] = {}  # noqa: RUF012 (msgspec gives each value its own)


ModelInterfaceAbstraction = Abstraction
"""A `ModelInterface` (`register_interface`): its name, and a dict of the arguments with which it is made."""


class MicroBatchSpec(Value):
    """The way in which a batch of one data-parallel rank is split to save memory: into at least `n_mbs`
    parts, each with at most `max_tokens_per_mb` tokens if that can be."""

    n_mbs: int = 1
    max_tokens_per_mb: int = 1 << 40


class ParamReallocHook(Value, tag="realloc"):
    """Copies parameters from the model `source` to the model of the call, or from the model of the call to `target`.
    Give one of the two. With `eta` below 1 the receiver becomes ``eta * new + (1 - eta) * old``, a moving average."""

    source: ModelName | None = None
    target: ModelName | None = None
    eta: float = 1.0


class OffloadHook(Value, tag="offload"):
    """Frees the device memory of the parameters of the call's model until it is used again. Parameters that it owns go
    to host memory; a copy is dropped and received again. The optimizer's state stays on the device."""


Hook = ParamReallocHook | OffloadHook


class MFCDef(Value, dict=True, gc=True):
    """A model function call: what `interface_impl` does with the model `model_name`, once in each step, for `n_seqs`
    ids (samples of the dataset; an id may have several sequences). All calls of an experiment have the same `n_seqs`.
    ``"actor"`` as its model is ``ModelName("actor")``.

    It needs `input_keys` of each id and adds `output_keys`. The interface may call them by other names
    (`input_key_remap`: name of the data → name in the interface; `output_key_remap`: the reverse). `pre_hooks` and
    `post_hooks` run before and after it. With `balanced_dp`, data-parallel ranks get equally many ids instead of
    equally many tokens. `log_return_value`: what a train step returns is printed. Data that it makes and that is not
    finite is an error, unless `error_if_nonfinite` is False: then it is passed on as it is. A configuration in which a
    micro-batch of a rank would have fewer ids than `min_n_seqs_per_pass` is refused.

    Its neighbours (`parents`, `is_src`, …) are known once `ExperimentConfig.lazy_init` has made the graph.
    """

    name: str
    n_seqs: int
    interface_type: ModelInterfaceType
    interface_impl: ModelInterfaceAbstraction
    model_name: ModelName
    input_keys: tuple[str, ...] = ()
    output_keys: tuple[str, ...] = ()
    input_key_remap: dict[str, str] = {}  # noqa: RUF012
    output_key_remap: dict[str, str] = {}  # noqa: RUF012
    mb_spec: MicroBatchSpec = msgspec.field(default_factory=MicroBatchSpec)
    balanced_dp: bool = False
    log_return_value: bool = False
    pre_hooks: tuple[Hook, ...] = ()
    post_hooks: tuple[Hook, ...] = ()
    error_if_nonfinite: bool = True
    min_n_seqs_per_pass: float = 0.0
    model_type: Any = None
    model_path: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model_name, str):
            force_setattr(self, "model_name", ModelName(self.model_name))

    @property
    def role(self) -> str:
        """The role of its model."""
        return self.model_name.role

    # Its place in the graph.

    @property
    def graph(self) -> Graph:
        """The graph that it is a part of. Raises `UsageError` before that is made."""
        found: Graph | None = self.__dict__.get("_graph")
        if found is None:
            raise UsageError(
                f"call {self.name!r} is in no graph yet", "ExperimentConfig.lazy_init() makes it"
            )
        return found

    def joins(self, graph: Graph) -> None:
        """Let the call know the graph that it is a part of."""
        # It is no field: a graph is not a part of what a call is.
        self.__dict__["_graph"] = graph

    @property
    def parents(self) -> list[MFCDef]:
        """The calls that it waits for."""
        return [self.graph.calls[name] for name in self.graph.parents(self.name)]

    @property
    def children(self) -> list[MFCDef]:
        """The calls that wait for it."""
        return [self.graph.calls[name] for name in self.graph.children(self.name)]

    def all_successors(self) -> list[MFCDef]:
        """The calls that wait for it, for one of those, and so on, each once."""
        found = {call.name: call for child in self.children for call in (child, *child.all_successors())}
        return [*found.values()]

    @property
    def is_src(self) -> bool:
        """True if it waits for no call: it begins with data."""
        return not self.parents

    @property
    def is_dst(self) -> bool:
        """True if no call waits for it."""
        return not self.children

    @property
    def is_dst_of_model_role(self) -> bool:
        """True if no later call uses a model of its role."""
        return all(call.role != self.role for call in self.all_successors())

    @property
    def data_producers(self) -> dict[str, ModelName]:
        """For each key that a call of the graph makes, the model of that call."""
        return {key: call.model_name for call in self.graph.calls.values() for key in call.output_keys}

    @property
    def data_consumers(self) -> dict[str, list[ModelName]]:
        """For each key that calls of the graph need, the models of those calls."""
        found: dict[str, list[ModelName]] = {}
        for call in self.graph.calls.values():
            for key in call.input_keys:
                found.setdefault(key, []).append(call.model_name)
        return found

    def hooked(self, pre: Hook | None = None, post: Hook | None = None) -> MFCDef:
        """The same call with one more hook before or after it, unless it has that already."""
        both = ((self.pre_hooks, pre), (self.post_hooks, post))
        found = [hooks if more is None or more in hooks else (*hooks, more) for hooks, more in both]
        return replace(self, pre_hooks=found[0], post_hooks=found[1])

    @property
    def trains(self) -> bool:
        """True if it trains its model."""
        return self.interface_type is ModelInterfaceType.TRAIN_STEP

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """All hooks."""
        return (*self.pre_hooks, *self.post_hooks)

    @property
    def reallocs(self) -> list[ParamReallocHook]:
        """The hooks that copy parameters."""
        return [hook for hook in self.hooks if isinstance(hook, ParamReallocHook)]

    @property
    def reads(self) -> frozenset[ModelName]:
        """The models of which it reads the parameters."""
        return frozenset(
            {self.model_name, *(hook.source for hook in self.reallocs if hook.source is not None)}
        )

    @property
    def writes(self) -> frozenset[ModelName]:
        """The models of which it changes the parameters."""
        found = {hook.target for hook in self.reallocs if hook.target is not None}
        if self.trains or any(hook.source is not None for hook in self.reallocs):
            found.add(self.model_name)
        return frozenset(found)


class Graph(Value, gc=True):
    """Calls by name, in the order in which they were given, and what each needs from which other."""

    calls: dict[str, MFCDef]
    needs: dict[str, dict[str, tuple[str, ...]]]
    """By call and by the call that it waits for: the keys."""

    def parents(self, name: str) -> Mapping[str, tuple[str, ...]]:
        """The calls that one waits for, with the keys that it gets from them."""
        return self.needs[name]

    def children(self, name: str) -> list[str]:
        """The calls that wait for one."""
        return [other for other, needs in self.needs.items() if name in needs]

    @property
    def edges(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Producer, consumer and keys."""
        return [
            (producer, name, keys) for name, needs in self.needs.items() for producer, keys in needs.items()
        ]

    @property
    def sources(self) -> list[str]:
        """The calls that need nothing from others: they begin with data."""
        return [name for name, needs in self.needs.items() if not needs]

    @property
    def trained(self) -> list[MFCDef]:
        """The calls that train."""
        return [call for call in self.calls.values() if call.trains]

    def levels(self) -> list[list[str]]:
        """The calls in an order in which they may run; those of one level do not wait for each other."""
        done: set[str] = set()
        found: list[list[str]] = []
        while len(done) < len(self.calls):
            found.append([n for n in self.calls if n not in done and self.needs[n].keys() <= done])
            done.update(found[-1])
        return found


def build_graph(calls: Sequence[MFCDef], dataset_keys: Collection[str]) -> Graph:
    """The graph of `calls`. Raises `SpecError` with all that is wrong (`graph_faults`)."""
    faults = graph_faults(calls, dataset_keys)
    if faults:
        raise SpecError(faults)
    graph = _graph(calls)
    for call in calls:
        call.joins(graph)
    return graph


def _graph(calls: Sequence[MFCDef]) -> Graph:
    makers = {key: call.name for call in calls for key in call.output_keys}
    needs: dict[str, dict[str, tuple[str, ...]]] = {call.name: {} for call in calls}
    for call in calls:
        for key in call.input_keys:
            maker = makers.get(key)
            if maker is not None and maker != call.name:
                needs[call.name][maker] = (*needs[call.name].get(maker, ()), key)
    return Graph({call.name: call for call in calls}, needs)


def graph_faults(calls: Sequence[MFCDef], dataset_keys: Collection[str]) -> list[Fault]:
    """All that is wrong with a graph: duplicate names, keys that no call or several calls make, cycles, …"""
    if not calls:
        problem = "there are no model function calls"
        return [Fault("model_rpcs", problem, "an experiment has one at least")]
    return [*_faults(calls, dataset_keys)]


def _faults(calls: Sequence[MFCDef], dataset_keys: Collection[str]) -> Iterator[Fault]:
    where = "model_rpcs"
    for name, count in Counter(call.name for call in calls).items():
        if count > 1:
            yield Fault(where, f"{count} calls have the name {name!r}", "give each call a name of its own")
    makers: dict[str, list[str]] = {}
    for call in calls:
        for key in dict.fromkeys(call.output_keys):
            makers.setdefault(key, []).append(call.name)
    for key, names in makers.items():
        if len(names) > 1:
            yield Fault(where, f"{_and(names)} both make {key!r}", "rename one with output_key_remap")
        elif key in dataset_keys:
            problem = f"it makes {key!r}, which the dataset has"
            yield Fault(f"{where}.{names[0]}", problem, "rename it with output_key_remap")
    for call in calls:
        yield from _call_faults(call, makers, dataset_keys)
    if len({call.name for call in calls}) == len(calls) and (circle := _circle(_graph(calls))):
        problem = f"the calls {' → '.join([*circle, circle[0]])} wait for each other"
        yield Fault(where, problem, "cut the circle")
    if len({call.n_seqs for call in calls}) > 1:
        sizes = ", ".join(f"{call.name} {call.n_seqs}" for call in calls)
        yield Fault(where, f"calls differ in n_seqs: {sizes}", "a step has as many for each of them")


def _call_faults(
    call: MFCDef, makers: Mapping[str, Sequence[str]], dataset_keys: Collection[str]
) -> Iterator[Fault]:
    where = f"model_rpcs.{call.name}"
    if call.n_seqs < 1:
        yield Fault(where, f"n_seqs={call.n_seqs}", "it is 1 or more")
    if not call.min_n_seqs_per_pass >= 0:
        yield Fault(where, f"min_n_seqs_per_pass={call.min_n_seqs_per_pass}", "it is 0 or more")
    if call.mb_spec.n_mbs < 1 or call.mb_spec.max_tokens_per_mb < 1:
        yield Fault(where, f"mb_spec is {call.mb_spec}", "both are 1 or more")
    if not call.input_keys:
        yield Fault(where, "it needs no data", "name the keys that it needs in input_keys")
    for key in call.input_keys:
        if key in call.output_keys:
            problem = f"it needs {key!r}, which it makes itself"
            yield Fault(where, problem, "rename one with a key remap")
        elif key not in makers and key not in dataset_keys:
            there = ", ".join(sorted({*makers, *dataset_keys})) or "none"
            problem = f"nothing makes {key!r}: neither a call nor the dataset"
            yield Fault(where, problem, f"there are: {there}")
    renamed = call.output_key_remap.values()
    for kind, mapping, keys in (
        ("input_key_remap", call.input_key_remap, call.input_keys),
        ("output_key_remap", renamed, call.output_keys),
    ):
        for key in mapping:
            if key not in keys:
                yield Fault(
                    where, f"{kind} names {key!r}, which is no such key of it", f"it has {_and(keys)}"
                )
    for kind, names in (
        ("input_key_remap", [call.input_key_remap.get(key, key) for key in call.input_keys]),
        ("output_key_remap", [*renamed]),
    ):
        for name, count in Counter(names).items():
            if count > 1:
                yield Fault(where, f"{kind} gives {count} keys the name {name!r}", "give each its own")
    if any(isinstance(hook, OffloadHook) for hook in call.pre_hooks):
        problem = "an OffloadHook is in its pre_hooks: the call would fetch the parameters again at once"
        yield Fault(where, problem, "put it into post_hooks")
    for realloc in call.reallocs:
        if (realloc.source is None) == (realloc.target is None):
            problem = "a ParamReallocHook has both source and target, or neither"
            yield Fault(where, problem, "give one of them")
            continue
        if call.model_name in (realloc.source, realloc.target):
            problem = f"a ParamReallocHook of {call.model_name} with itself"
            yield Fault(where, problem, "it is between two replicas")
        if not 0.0 < realloc.eta <= 1.0:
            problem = f"a ParamReallocHook with eta={realloc.eta:g}"
            yield Fault(where, problem, "it is above 0, and 1 at most")


def _circle(graph: Graph) -> list[str]:
    """One circle: the calls in the order in which each waits for the one before. Empty if there is none."""
    try:
        # Of the circle that is found, the last one is the first, and each is followed by one that waits for it.
        TopologicalSorter(graph.needs).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle[:-1]
    return []


def _and(names: Collection[str]) -> str:
    return " and ".join(map(repr, names)) or "none"


def with_hooks(calls: Sequence[MFCDef], shared: Collection[ModelName]) -> list[MFCDef]:
    """The calls, with automatic hooks. If a role is trained, each other replica gets the parameters before each of
    its calls, unless it is a moving average. If that replica is in `shared` (models that share workers with other
    models), it is offloaded after each call."""
    trained = {call.role: call.model_name for call in calls if call.trains}
    averages = {h.target or call.model_name for call in calls for h in call.reallocs if h.eta < 1.0}
    found = []
    for call in calls:
        source = trained.get(call.role)
        if source is not None and call.model_name != source:
            sources = [h for h in call.pre_hooks if isinstance(h, ParamReallocHook) and h.source is not None]
            if not sources and call.model_name not in averages:
                call = call.hooked(pre=ParamReallocHook(source=source))
            if call.model_name in shared:
                call = call.hooked(post=OffloadHook())
        found.append(call)
    return found
