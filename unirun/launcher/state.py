"""The agent's state: what runs on this node, and what a master has still to hear of it."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import field
from msgspec.structs import replace

from unirun.launcher.ends import fitting
from unirun.launcher.environment import SpawnerKey
from unirun.launcher.events import Store, Worker
from unirun.values import Value, WorkerId
from unirun.wire.messages import View
from unirun.wire.reports import Ending, FromWorker, Held, HeldStore


class AgentState(Value):
    """What this node does. `spawners`: whether each is ready; `stores`: by role, the last that was to be served here.

    `in_place`: the roles whose workers outlive a peer, and a store. `epoch` is the term of the latest master.
    `launched` is the last incarnation of each rank that a master wanted, `ended` the workers that have ended, as long
    as no master has kept that. `asks` are what workers have asked and no master has answered. `ending` is how the
    job ends, when a master has told so that could not write it.
    """

    node: str
    in_place: frozenset[str] = frozenset()
    workers: Mapping[int, Worker] = field(default_factory=dict)
    spawners: Mapping[SpawnerKey, bool] = field(default_factory=dict)
    stores: Mapping[str, Store] = field(default_factory=dict)
    view: View | None = None
    leaving: bool = False
    epoch: int = 0
    launched: Mapping[tuple[str, int], int] = field(default_factory=dict)
    ended: Mapping[WorkerId, Held] = field(default_factory=dict)
    asks: Mapping[tuple[int, int], FromWorker] = field(default_factory=dict)
    ending: Ending | None = None

    def with_worker(self, worker: Worker) -> AgentState:
        """This state with one worker replaced."""
        return replace(self, workers={**self.workers, worker.id: worker})

    def find(self, role: str, rank: int) -> Worker | None:
        """The worker that holds a rank."""
        return next((w for w in self.workers.values() if (w.who.role, w.who.rank) == (role, rank)), None)


def holdings(state: AgentState) -> tuple[tuple[Held, ...], tuple[HeldStore, ...]]:
    """What a master must know that has not followed this node from its beginning: its workers, its stores."""
    live = (held(worker) for worker in state.workers.values())
    stores = (
        HeldStore(role, store.request.generation, store.opened, store.ended)
        for role, store in state.stores.items()
    )
    return fitting((*state.ended.values(), *live)), tuple(stores)


def held(worker: Worker) -> Held:
    """What is told of a worker that has not ended."""
    serving = worker.serving
    return Held(
        worker=worker.who,
        pid=worker.pid,
        running=worker.running,
        generation=worker.generation,
        addresses=serving.addresses if serving else None,
        recoverable=serving is not None and serving.recoverable,
        calls=worker.calls,
    )
