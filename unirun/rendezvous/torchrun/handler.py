"""torch's `DynamicRendezvousHandler` over a store, with four fixes.

*Each round has a new TCPStore.* torch 2.13 keeps one for all rounds and gives it to the workers without a prefix, so
a restarted round reads the keys of its predecessor; and nodes other than rank 0 keep its address even when its host
is gone. Here both are dropped at the start of a round, and rank 0 opens a new store on a new port.

*No polling during rendezvous.* Where torch sleeps for a second, this waits for a change of the state.

*A lost node is noticed.* torch removes a silent node from its copy of the state and continues. Here a change of a
round's members makes the agents meet again, without using up one of their restarts.

*An outage of the store is tolerated.* Agents that cannot reach it continue training; afterwards every node has time
for a heartbeat before it counts as lost.

torch has no public hooks for this, so this uses private names of torch. They are the same in torch 2.11 to 2.15; all
are in this file, and ``tests/unit/rendezvous/torchrun`` fails where one is gone.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from urllib.parse import quote

from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    _Action,
    _BackendRendezvousStateHolder,
    _DistributedRendezvousOpExecutor,
    _RendezvousContext,
)

from unirun.errors import StoreAway, StoreError
from unirun.rendezvous.store.protocol import Store
from unirun.rendezvous.store.url import open_store
from unirun.rendezvous.torchrun.backend import LeasedWriter, StoreBackend
from unirun.rendezvous.torchrun.config import Config, parse_config, store_address
from unirun.rendezvous.torchrun.roundstore import RoundStore

logger = logging.getLogger(__name__)

LOOK = 1.0
"""Maximum seconds between two checks of a waiting node for lost nodes; torch's interval."""

UNNAMED = "none"
"""torchrun's default run id."""


class StoreHandler(DynamicRendezvousHandler):
    """Handler of one node of the run in `params`, whose state is in `store`; `shutdown` closes the store."""

    def __init__(self, params: RendezvousParameters, config: Config, store: Store) -> None:
        # Quoted and with a "/" at the end, so that the prefix of run1 matches neither run10 nor run1/a.
        root = f"{quote(params.run_id, safe='')}/"
        writer = LeasedWriter(store, config.ttl)
        node = self._node_desc_generator.generate(params.local_addr)
        backend = StoreBackend(store, writer, root, str(node), grace=config.silence)
        settings = RendezvousSettings(
            run_id=params.run_id,
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            timeout=RendezvousTimeout(
                join=timedelta(seconds=config.join_timeout),
                last_call=timedelta(seconds=config.last_call_timeout),
                close=timedelta(seconds=config.close_timeout),
                heartbeat=timedelta(seconds=config.heartbeat_timeout),
            ),
            keep_alive_interval=timedelta(seconds=config.keep_alive_interval),
            keep_alive_max_attempt=config.keep_alive_max_attempt,
        )
        holder = _StateHolder(backend, settings)
        rounds = f"{root}rounds/"
        super().__init__(node, settings, backend.name, RoundStore(store, writer, rounds), holder)
        self._op_executor = self._executor = _Executor(node, holder, settings)
        self._backend, self._config = backend, config
        self._kv, self._writer, self._rounds = store, writer, rounds
        self._left = False
        self._formed: tuple[int, frozenset[Any]] | None = None
        """The round of this node, and its members when it was formed."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes. Raises `RendezvousClosedError`, `RendezvousTimeoutError`, and
        `RendezvousConnectionError` when etcd cannot be reached for `read_timeout` seconds."""
        # Makes torch open a new store and read its address again.
        self._shared_tcp_store_server = None
        self._bootstrap_store_info = None
        run, config = self._settings.run_id, self._config
        try:
            with self._backend.patient(config.read_timeout):
                return super().next_rendezvous()
        except RendezvousClosedError:
            raise RendezvousClosedError(
                f"the run {run!r} is over, as one of its nodes has ended it; for a new run use another --rdzv-id, or "
                f"wait until all nodes have left (those that were killed after at most {config.ttl:g} s)"
            ) from None
        except RendezvousTimeoutError:
            raise RendezvousTimeoutError(
                f"{self._executor.most} of at least {self._settings.min_nodes} nodes of the run {run!r} came within "
                f"{config.join_timeout:g} s; are all started with this --rdzv-id and --rdzv-endpoint? "
                "--rdzv-conf=join_timeout=… waits longer"
            ) from None

    def num_nodes_waiting(self) -> int:
        """Number of nodes that want to join; at least 1 when the round has lost a member."""
        if self._backend.away:  # heartbeats notice its return
            return 0
        try:
            waiting = super().num_nodes_waiting()
        except RendezvousConnectionError as error:
            logger.warning("etcd is away; workers go on meanwhile: %s", error)
            return 0
        state = self._state_holder.state
        if state.closed:  # nobody can join any more
            return 0
        if waiting == 0 and self._formed != (state.round, frozenset(state.participants)):
            logger.warning("a node of round %s is lost; the others meet again", state.round)
            return 1
        return waiting

    def shutdown(self) -> bool:
        """Close the run and leave it. Safe to call twice."""
        if self._left:
            return True
        self._left = True
        with self._backend.patient(self._config.close_timeout):
            closed = super().shutdown()
        state = self._state_holder.state
        self._backend.leave([str(node) for node in {*state.participants, *state.wait_list}])
        self._kv.close()
        return closed

    def _get_store(self) -> TorchStore:
        state = self._state_holder.state
        self._formed = (state.round, frozenset(state.participants))
        name = f"{self._backend.meeting}.{state.round}/"
        if state.participants[self._this_node] == 0:
            self._remove_rounds_but(name)
        return RoundStore(self._kv, self._writer, f"{self._rounds}{name}")

    def _remove_rounds_but(self, name: str) -> None:
        """Delete the keys of earlier rounds, which would otherwise last as long as the nodes live."""
        try:
            keys = (item.key.removeprefix(self._rounds) for item in self._kv.get_prefix(self._rounds).items)
            for old in {f"{key.partition('/')[0]}/" for key in keys} - {name}:
                self._kv.txn([], deletes=[f"{self._rounds}{old}"])
        except StoreError as error:
            logger.warning("an earlier round's keys stay until their leases end: %s", error)


class _StateHolder(_BackendRendezvousStateHolder):
    """torch's copy of the state, from which no member is removed during an outage of the store."""

    _backend: StoreBackend

    def wait(self, timeout: float) -> None:
        """Wait for a change for at most `timeout` seconds, and read the state again."""
        self._backend.wait_for_change(self._token, timeout)
        self._last_sync_time = -1
        self.sync()

    def _sanitize(self) -> None:
        if not self._backend.blinded:
            super()._sanitize()


class _Executor(_DistributedRendezvousOpExecutor):
    """Runs torch's operations, but waits for a change where they would sleep for a second."""

    most = 0
    """Highest number of participants that the last operation has seen, for the error message."""

    def run(
        self,
        state_handler: Callable[[_RendezvousContext, float], _Action],
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        """See base class."""
        holder = cast(_StateHolder, self._state_holder)
        self.most = 0

        def step(context: _RendezvousContext, deadline: float) -> _Action:
            while True:
                self.most = max(self.most, len(context.state.participants))
                action = state_handler(context, deadline)
                if action is not _Action.SYNC:
                    return action
                holder.wait(self._look_in(holder.state.deadline))
                context.state = self._state = holder.state

        super().run(step, deadline, update_deadline)

    def _look_in(self, last_call: datetime | None) -> float:
        seconds = min(LOOK, self._settings.keep_alive_interval.total_seconds())  # when a heartbeat may be due
        if last_call is not None:
            seconds = min(seconds, (last_call - datetime.now(UTC)).total_seconds())
        return max(0.01, seconds)


def connect(params: RendezvousParameters) -> RendezvousHandler:
    """See `unirun.rendezvous.torchrun.create_handler`."""
    config = parse_config(params.config)
    address = store_address(params.endpoint, config)
    if params.run_id == UNNAMED:
        logger.warning("all runs without --rdzv-id meet in this etcd as %r; give each its own", UNNAMED)
    deadline = time.monotonic() + config.read_timeout
    while True:
        try:
            with _uncollected():
                store = open_store(str(address))
            return StoreHandler(params, config, store)
        except StoreAway as error:
            if time.monotonic() >= deadline:
                raise RendezvousConnectionError(str(error)) from error
            logger.warning("waiting for etcd: %s", error)
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn off garbage collection: with torch's many objects, the one that importing grpc triggers takes longer (75 ms)
    than the import itself (45 ms), while the other nodes wait."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
