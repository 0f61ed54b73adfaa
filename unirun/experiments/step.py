"""`Step`: one step of a trial. Data is read, and the calls of the graph run, each as soon as it may."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from unirun.errors import PeerLost, WorkerLost
from unirun.experiments.config import Resolved
from unirun.experiments.data.sample import SequenceSample
from unirun.experiments.graph import Graph, Hook, MFCDef, ModelInterfaceType, ModelName, ParamReallocHook
from unirun.experiments.orders import MFCReply, MFCRequest, Traffic, dispatch, means, reduced, seed_of
from unirun.experiments.registry import INTERFACES
from unirun.roles import wait

# The calls of a step that may run now: a pure function of the calls that have run, and of the workers that are busy.


def startable(
    graph: Graph, workers: Mapping[ModelName, frozenset[int]], done: Collection[str], running: Collection[str]
) -> list[str]:
    """The calls that may begin, in the order of the graph.

    A call waits for the calls whose data it needs; for running calls on any of its workers, so that all workers run
    calls in one order; and for running calls that change parameters it reads, or read or change parameters it changes.
    """
    busy = {worker for name in running for worker in workers[graph.calls[name].model_name]}
    reads = {model for name in running for model in graph.calls[name].reads}
    writes = {model for name in running for model in graph.calls[name].writes}
    found = []
    for name, call in graph.calls.items():
        if name in done or name in running or not graph.needs[name].keys() <= set(done):
            continue
        mine = workers[call.model_name]
        if busy & mine or call.reads & writes or call.writes & (reads | writes):
            continue
        found.append(name)
        busy |= mine
        reads |= call.reads
        writes |= call.writes
    return found


LOST = (WorkerLost, PeerLost)
"""The errors that a call raises when a worker has died: the worker itself, or one that it needs data of."""


def reductions_of(call: MFCDef) -> Mapping[str, str]:
    """The reductions that the interface of a call names, by metric."""
    found: Mapping[str, str] = getattr(INTERFACES.find(call.interface_impl.type_), "reductions", {})
    return found


class Step:
    """The step `number`, counted from 0, of this attempt. `group` are the model workers."""

    def __init__(self, group: Any, resolved: Resolved, attempt: int, number: int, seed: int) -> None:
        self._group, self._resolved, self._graph = group, resolved, resolved.graph
        self._attempt, self._number, self._seed = attempt, number, seed
        self._workers = {name: resolved.workers_of(name) for name in resolved.topologies}
        self._traffic = Traffic()
        self._where: dict[str, dict[str, tuple[int, ...]]] = {}
        self._counts: dict[str, list[float]] = {}
        self._batch: SequenceSample | None = None
        self.at = ""
        """The call that has ended last, or has failed; the reading of samples comes before all calls."""

    def load(self, model: ModelName, indices: Sequence[int]) -> tuple[str, ...]:
        """Have the workers of `model` read these samples, each data-parallel rank some. Returns their ids."""
        self.at = "the reading of samples"
        topo, workers = self._resolved.topologies[model], self._workers[model]
        ranks = topo.get_dim("data")
        heads = [workers[topo.rank(pipe=0, data=rank, tensor=0)] for rank in range(ranks)]
        refs = [
            self._group[head].load.call_async(self._attempt, self._number, indices[at::ranks])
            for at, head in enumerate(heads)
        ]
        metas = [ref.result() for ref in refs]
        for head, meta in zip(heads, metas, strict=True):
            self._has(meta, (head,))
        self._batch = SequenceSample.gather(metas)
        return self._batch.ids

    def _has(self, meta: SequenceSample, ranks: tuple[int, ...]) -> None:
        for key in meta.keys:
            known = self._where.setdefault(key, {})
            for each in meta.ids:
                known[each] = ranks

    def walk(self) -> dict[str, float]:
        """Run the calls. Returns their figures as ``<call>/<name>``, and the bytes that workers got from others."""
        sets = {name: frozenset(workers) for name, workers in self._workers.items()}
        done: set[str] = set()
        running: dict[Any, str] = {}
        figures: dict[str, float] = {}
        while len(done) < len(self._graph.calls):
            for name in startable(self._graph, sets, done, running.values()):
                self.at = name
                running[self._start(name)] = name
            for ref in wait([*running])[0]:
                name = self.at = running.pop(ref)
                found = self._finish(self._graph.calls[name], ref.result())
                figures |= {f"{name}/{key}": value for key, value in found.items()}
                done.add(name)
        moved, needed = float(self._traffic.moved), float(self._traffic.needed)
        return {**figures, "bytes_moved": moved, "bytes_needed": needed}

    def _start(self, name: str) -> Any:
        """Send a call to all workers of its model."""
        assert self._batch is not None, "nothing was loaded"
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
            seed = seed_of(self._seed, self._number, name, rank)
            parts.append(MFCRequest(self._attempt, self._number, name, meta, where, seed))
        ranks = self._ranks(call)
        method = self._group.call.options(target=[self._workers[call.model_name][rank] for rank in ranks])
        # Each worker gets its own; a single one is no list.
        given = [parts[topo.coordinates(rank)["data"]] for rank in ranks]
        return method.call_async(given if len(given) > 1 else given[0])

    def _ranks(self, call: MFCDef) -> list[int]:
        """The ranks of a call's model, in the order of their workers."""
        workers = self._workers[call.model_name]
        return sorted(range(len(workers)), key=workers.__getitem__)

    def _finish(self, call: MFCDef, answers: Sequence[MFCReply]) -> dict[str, float]:
        """Note where new data is. Returns the figures of the call."""
        self._count(answer.traffic for answer in answers)
        self._reallocate(call, call.post_hooks)
        topo, workers = self._resolved.topologies[call.model_name], self._workers[call.model_name]
        last = topo.get_dim("pipe") - 1
        metas = []
        for rank, answer in zip(self._ranks(call), answers, strict=True):
            if answer.meta is not None:
                at = topo.coordinates(rank)["data"]
                self._has(answer.meta, tuple(workers[r] for r in topo.matching(pipe=last, data=at)))
                metas.append(answer.meta)
        if metas and self._batch is not None:
            self._batch = self._batch.update(SequenceSample.gather(metas))
        told = [
            (answer.figures, self._counts[call.name][topo.coordinates(rank)["data"]])
            for rank, answer in zip(self._ranks(call), answers, strict=True)
            if answer.figures
        ]
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
        self._traffic = sum(traffic, self._traffic)
