"""The agent's state: what runs on its node, and what was not acknowledged by a master."""

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
    """The state of an agent. `spawners`: whether each is ready; `stores`: the last requested store of each role.

    `in_place`: the roles whose workers survive the loss of a peer or of the store; `companions`: those that bring
    weights into engines. `epoch` is the term of the latest master. `launched` is the last ordered incarnation of each
    rank. `ended` are exits without an acknowledgement, `asks` requests of workers without an answer. `ending` is the
    decided end of the job, from a master that could not write it to the store.
    """

    node: str
    in_place: frozenset[str] = frozenset()
    companions: frozenset[str] = frozenset()
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
        """The worker of a rank, or None."""
        return next((w for w in self.workers.values() if (w.who.role, w.who.rank) == (role, rank)), None)


def holdings(state: AgentState) -> tuple[tuple[Held, ...], tuple[HeldStore, ...]]:
    """The workers and stores of this node, for a new master."""
    live = (held(worker) for worker in state.workers.values())
    stores = (
        HeldStore(role, store.request.generation, store.opened, store.ended)
        for role, store in state.stores.items()
    )
    return fitting((*state.ended.values(), *live)), tuple(stores)


def held(worker: Worker) -> Held:
    """The report of a worker that has not ended."""
    serving = worker.serving
    return Held(
        worker=worker.who,
        pid=worker.pid,
        running=worker.running,
        generation=worker.generation,
        addresses=dict(worker.addresses),
        serving=serving is not None,
        recoverable=serving is not None and serving.recoverable,
        calls=worker.calls,
        health=worker.health,
    )
