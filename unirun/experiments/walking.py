"""The calls of a step that may run now: a pure function of the calls that have run, and of the workers that
are busy."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from unirun.experiments.graph import Graph
from unirun.experiments.layout import ModelName


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
