"""The steps of a trial: their calls, the orders to model workers and their results. No message contains tensors."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from unirun.errors import PeerLost, UsageError, WorkerLost
from unirun.experiments.config import INTERFACES, Resolved
from unirun.experiments.graph import Graph, Hook, MFCDef, ModelInterfaceType, ModelName, ParamReallocHook
from unirun.experiments.sample import SequenceSample, balanced

Where = Mapping[str, Sequence[tuple[int, ...]]]
"""For each key and id of a sample the model workers that have the data."""


@dataclass(frozen=True)
class MFCRequest:
    """A call for one data-parallel rank. `meta` describes its sequences; `where` says which workers have their data.
    Steps before `oldest` have ended."""

    attempt: int
    step: int
    oldest: int
    call: str
    meta: SequenceSample
    where: Where
    seed: int

    def __post_init__(self) -> None:
        """The master has no tensors."""
        assert self.meta.data is None


Traffic = Counter[str]
"""Bytes that a worker got from others: ``moved`` were received; ``needed`` is the size of what it lacked."""

MFCReply = tuple[SequenceSample | None, Mapping[str, float], Traffic]
"""The result of a call: metadata of new data, which stays on its worker, or the figures of a train step. Only ranks
with `Place.is_dp_head` send them; other ranks send their traffic only."""


def seed_of(base: int, step: int, call: str, rank: int) -> int:
    """The seed of a call in a data-parallel rank. It follows from these alone, so a call that is made again draws the
    same numbers, in whatever process."""
    return zlib.crc32(f"{base} {step} {call} {rank}".encode())


def dispatch(sizes: Sequence[int], ranks: int, *, equal: bool) -> list[list[int]]:
    """The sequences that each data-parallel rank gets: equally many of them, or equally many tokens."""
    return balanced([1] * len(sizes) if equal else sizes, ranks)


# The results of an interface: checked in the worker, so that errors name the call and the rank.


def data_of(call: MFCDef, found: Any, given: SequenceSample, rank: int) -> SequenceSample:
    """The data that `rank` of the last stage has made of the sample `given`, under the names of the graph. Raises
    `UsageError`."""
    wrong = partial(_wrong, call, rank)
    if not isinstance(found, SequenceSample):
        raise wrong(f"a {type(found).__name__}", "return a SequenceSample in all ranks of the last stage")
    named = found.remap(call.output_key_remap)
    if missing := [key for key in call.output_keys if key not in named.keys]:
        there = ", ".join(named.keys) or "nothing"
        raise wrong(f"a sample without {', '.join(missing)}", f"it has {there}: see output_keys")
    if set(named.ids) != set(given.ids):
        what = f"data of {_shown(named.ids)}, and got {_shown(given.ids)}"
        raise wrong(what, "return data of each id of the sample that was passed")
    named = named.select(call.output_keys)
    for key in named.keys:
        if call.interface_type is ModelInterfaceType.INFERENCE:
            _check_counts(key, named, given, wrong)
        values = named[key]
        if call.error_if_nonfinite and values.is_floating_point() and not bool(values.isfinite().all()):
            parts = zip(named.ids, values.split(named.sizes(key)), strict=True)
            bad = [each for each, part in parts if not bool(part.isfinite().all())]
            remedy = "correct them, or pass them on with error_if_nonfinite=False in its MFCDef"
            raise wrong(f"values of {key!r} that are not finite, for {_shown(bad)}", remedy)
    return named


def _check_counts(
    key: str, named: SequenceSample, given: SequenceSample, wrong: Callable[[str, str], UsageError]
) -> None:
    """Raise `UsageError` unless each id has as many sequences of `key` as one of its inputs has, one for each group of
    equal size, or a whole number for each sequence."""
    there = {each: at for at, each in enumerate(given.ids)}
    for each, lengths in zip(named.ids, named.seqlens[key], strict=True):
        counts = {other: len(given.seqlens[other][there[each]]) for other in given.keys}
        if not any(_fits(len(lengths), count) for count in counts.values()):
            passed = ", ".join(f"{other} has {count}" for other, count in counts.items())
            what = f"{len(lengths)} sequences of {key!r} for id {each!r}"
            raise wrong(what, f"return as many as were passed: {passed}")


def _fits(found: int, passed: int) -> bool:
    return found == passed or (min(found, passed) > 0 and max(found, passed) % min(found, passed) == 0)


def figures_of(call: MFCDef, found: Any, rank: int) -> dict[str, float]:
    """The figures that `rank` has returned, as numbers. Raises `UsageError`."""
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise _wrong(call, rank, f"a {type(found).__name__}", "return a dict of numbers, or None")
    figures = {}
    for name, value in found.items():
        try:
            # Of a tensor or an array with one element, too.
            figures[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"the figure {name!r}, a {type(value).__name__}"
            raise _wrong(call, rank, what, "return numbers") from error
    return figures


REDUCTIONS = ("mean", "sum", "max", "min")
"""Reductions of a metric over ranks, which `ModelInterface.reductions` names by metric."""


def check_reductions(reductions: Mapping[str, str]) -> None:
    """Raise `UsageError` for an unknown reduction."""
    for name, kind in reductions.items():
        if kind not in REDUCTIONS:
            raise UsageError(
                f"the reduction of {name!r} is {kind!r}", f"it is one of {', '.join(REDUCTIONS)}"
            )


def reduced(
    told: Sequence[tuple[Mapping[str, float], float]], reductions: Mapping[str, str]
) -> dict[str, float]:
    """The metrics of a call. `told` has those of each data-parallel rank with its number of samples, the weight of
    means. A metric that some ranks lack is reduced over the others."""
    names = dict.fromkeys(name for figures, _ in told for name in figures)
    found = {}
    for name in names:
        some = [(figures[name], count) for figures, count in told if name in figures]
        values = [value for value, _ in some]
        kind = reductions.get(name, "mean")
        if kind != "mean":
            found[name] = combined(kind, values)
        elif len(set(values)) == 1:
            # The figures of an engine are the same in all ranks, to the bit.
            found[name] = values[0]
        else:
            found[name] = sum(v * count for v, count in some) / max(sum(count for _, count in some), 1.0)
    return found


def combined(kind: str, values: Sequence[float]) -> float:
    """One figure of several: their ``max`` or ``min``, or their sum. nan if any is nan."""
    if kind in ("max", "min") and not any(map(math.isnan, values)):
        return max(values) if kind == "max" else min(values)
    return sum(values)


def means(
    found: Sequence[Mapping[str, float]], reductions: Mapping[str, str] = MappingProxyType({})
) -> dict[str, float]:
    """The figures of an evaluation: the sums of all ranks, divided by the sum of their ``count``, unless another of
    the `REDUCTIONS` is named."""
    names = dict.fromkeys(name for some in found for name in some)
    sums = {
        name: combined(reductions.get(name, "sum"), [some[name] for some in found if name in some])
        for name in names
    }
    count = sums.pop("count", 1.0)
    return {
        name: value / max(count, 1.0) if reductions.get(name, "mean") == "mean" else value
        for name, value in sums.items()
    }


def _wrong(call: MFCDef, rank: int, what: str, remedy: str) -> UsageError:
    kind = call.interface_impl.type_
    return UsageError(
        f"{call.name}: {call.interface_type.value}() of interface {kind!r} returned {what} in rank {rank} of "
        f"{call.model_name}",
        remedy,
    )


def _shown(ids: Sequence[str]) -> str:
    """Some ids."""
    return f"{len(ids)} ids ({', '.join(sorted(ids)[:3])}{', …' if len(ids) > 3 else ''})"


# The calls that may run now: a pure function of the calls that have run, and of the workers that are busy.

STEPS_IN_FLIGHT = 2
"""Steps whose calls run at the same time, at most."""


class StepProgress(NamedTuple):
    """The calls of a step that have run, and those that run."""

    done: Collection[str]
    running: Collection[str]


def startable(
    graph: Graph, workers: Mapping[ModelName, frozenset[int]], steps: Sequence[StepProgress]
) -> list[tuple[int, str]]:
    """The calls that may begin, with the places of their steps in `steps`, of which the oldest comes first.

    A call waits for the calls of its step whose data it needs; for running calls on any of its workers, so that all
    workers run calls in one order; and for running calls that change parameters it reads, or read or change parameters
    it changes. As long as there is an older step, a call of another one runs only if it changes no parameters, none of
    those that it reads will be changed by the older step, and the same call has run there: it finds what it would find
    if the older step had ended, and what that leaves behind is as if there were no other.
    """
    running = [graph.calls[name] for step in steps for name in step.running]
    busy = {worker for call in running for worker in workers[call.model_name]}
    reads = {model for call in running for model in call.reads}
    writes = {model for call in running for model in call.writes}
    found = []
    older: list[MFCDef] = []
    for at, step in enumerate(steps):
        changed = {model for call in older for model in call.writes}
        for name, call in graph.calls.items():
            if name in step.done or name in step.running or not graph.needs[name].keys() <= {*step.done}:
                continue
            if at and (call.writes or call in older or call.reads & changed):
                continue
            mine = workers[call.model_name]
            if busy & mine or call.reads & writes or call.writes & (reads | writes):
                continue
            found.append((at, name))
            busy |= mine
            reads |= call.reads
            writes |= call.writes
        older += [call for name, call in graph.calls.items() if name not in step.done]
    return found


LOST = (WorkerLost, PeerLost)
"""The errors that a call raises when a worker has died: the worker itself, or one that it needs data of."""


def reductions_of(call: MFCDef) -> Mapping[str, str]:
    """The reductions that the interface of a call names, by metric."""
    found: Mapping[str, str] = getattr(INTERFACES.find(call.interface_impl.type_), "reductions", {})
    return found


READING = "the reading of data"


class Step:
    """The step `number`, counted from 0, of this attempt: its data is read, then its calls run, each when it is told to
    `start`. `group` are the model workers."""

    def __init__(self, group: Any, resolved: Resolved, attempt: int, number: int, seed: int) -> None:
        self._group, self._resolved, self._graph = group, resolved, resolved.graph
        self._attempt, self.number, self._seed = attempt, number, seed
        self._workers = {name: resolved.workers_of(name) for name in resolved.topologies}
        self._traffic: Traffic = Counter()
        self._where: dict[str, dict[str, tuple[int, ...]]] = {}
        self._counts: dict[str, list[float]] = {}
        self._batch: SequenceSample | None = None
        # The workers that read data, and what they have read.
        self._read: dict[int, SequenceSample | None] = {}
        self._done: set[str] = set()
        self._figures: dict[str, float] = {}
        self.running: dict[Any, str] = {}
        """The calls that run, by their refs; `READING` for those that read data."""
        self.failed: set[Any] = set()
        """Those of `running` that have failed while an older step ran. Nothing more of this step begins."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The samples of the step; empty before they are read."""
        return self._batch.ids if self._batch is not None else ()

    @property
    def progress(self) -> StepProgress:
        """The calls that have run, and those that run. After a failure there are no others."""
        running = [name for ref, name in self.running.items() if ref not in self.failed]
        return StepProgress(self._graph.calls if self.failed else self._done, running)

    @property
    def over(self) -> bool:
        """True when all calls have run."""
        return len(self._done) == len(self._graph.calls)

    @property
    def figures(self) -> dict[str, float]:
        """The figures of the calls as ``<call>/<name>``, and the bytes that workers got from others."""
        return {
            **self._figures,
            **{f"bytes_{kind}": float(self._traffic[kind]) for kind in ("moved", "needed")},
        }

    def load(self, model: ModelName, indices: Sequence[int], oldest: int) -> None:
        """Have the workers of `model` read these samples, each data-parallel rank some."""
        topo, workers = self._resolved.topologies[model], self._workers[model]
        ranks = topo.get_dim("data")
        for rank in range(ranks):
            head = workers[topo.rank(pipe=0, data=rank, tensor=0)]
            self._reads(head, self._group[head].load, oldest, indices[rank::ranks])

    def take(self, rank: int, ids: Sequence[str], oldest: int) -> None:
        """Have a worker read these trajectories of its buffer."""
        self._reads(rank, self._group[rank].take, oldest, ids)

    def _reads(self, rank: int, method: Any, oldest: int, rows: Sequence[int] | Sequence[str]) -> None:
        self._read[rank] = None
        self.running[method.call_async(self._attempt, self.number, oldest, rows)] = READING

    def answer(self, ref: Any, *, oldest: bool) -> None:
        """Take the result of a call of `running`, which has ended. Raises what it has raised.

        If this is not the `oldest` step, a failure is only noted, so that the step before comes to its end with all
        that is due after it. After the loss of a worker it would not.
        """
        error = None if oldest else ref.exception()
        if error is not None and not isinstance(error, LOST):
            self.failed.add(ref)
            return
        name, found = self.running.pop(ref), ref.result()
        if name != READING:
            told = self._finish(self._graph.calls[name], found)
            self._figures |= {f"{name}/{key}": value for key, value in told.items()}
            self._done.add(name)
            return
        rank, meta = found
        self._read[rank] = meta
        self._has(meta, (rank,))
        metas = [each for each in self._read.values() if each is not None]
        if len(metas) == len(self._read):
            self._batch = SequenceSample.gather(metas)

    def _has(self, meta: SequenceSample, ranks: tuple[int, ...]) -> None:
        for key in meta.keys:
            known = self._where.setdefault(key, {})
            for each in meta.ids:
                known[each] = ranks

    def start(self, name: str, oldest: int) -> None:
        """Send a call to all workers of its model."""
        assert self._batch is not None, "nothing was read"
        call = self._graph.calls[name]
        self._reallocate(call, call.pre_hooks)
        topo = self._resolved.topologies[call.model_name]
        wanted = self._batch.select(call.input_keys)
        places = dispatch(wanted.sizes(wanted.largest()), topo.get_dim("data"), equal=call.balanced_dp)
        self._counts[name] = [float(len(some)) for some in places]
        parts = []
        for rank, some in enumerate(places):
            meta = wanted.reorder(some)
            where = {key: [self._where[key][each] for each in meta.ids] for key in call.input_keys}
            seed = seed_of(self._seed, self.number, name, rank)
            parts.append(MFCRequest(self._attempt, self.number, oldest, name, meta, where, seed))
        ranks = self._ranks(call)
        method = self._group.call.options(target=[self._workers[call.model_name][rank] for rank in ranks])
        # Each worker gets its own; a single one is no list.
        given = [parts[topo.coordinates(rank)["data"]] for rank in ranks]
        self.running[method.call_async(given if len(given) > 1 else given[0])] = name

    def _ranks(self, call: MFCDef) -> list[int]:
        """The ranks of a call's model, in the order of their workers."""
        workers = self._workers[call.model_name]
        return sorted(range(len(workers)), key=workers.__getitem__)

    def _finish(self, call: MFCDef, answers: Sequence[MFCReply]) -> dict[str, float]:
        """Note where new data is. Returns the figures of the call."""
        self._count(traffic for _, _, traffic in answers)
        self._reallocate(call, call.post_hooks)
        topo, workers = self._resolved.topologies[call.model_name], self._workers[call.model_name]
        last = topo.get_dim("pipe") - 1
        metas = []
        told = []
        for rank, (meta, figures, _) in zip(self._ranks(call), answers, strict=True):
            at = topo.coordinates(rank)["data"]
            if meta is not None:
                self._has(meta, tuple(workers[r] for r in topo.matching(pipe=last, data=at)))
                metas.append(meta)
            if figures:
                told.append((figures, self._counts[call.name][at]))
        if metas and self._batch is not None:
            self._batch = self._batch.update(SequenceSample.gather(metas))
        if call.interface_type is ModelInterfaceType.EVALUATE:
            return means([figures for figures, _ in told], reductions_of(call))
        return reduced(told, reductions_of(call))

    def _reallocate(self, call: MFCDef, hooks: Sequence[Hook]) -> None:
        """Run hooks that have a `target`: its workers copy the parameters. All other hooks are run by the workers."""
        for hook in hooks:
            if isinstance(hook, ParamReallocHook) and hook.target is not None:
                method = self._group.reallocate.options(target=sorted(self._workers[hook.target]))
                self._count(method.call(self._attempt, call.model_name, hook.target, hook.eta))

    def _count(self, traffic: Iterable[Traffic]) -> None:
        for each in traffic:
            self._traffic.update(each)
