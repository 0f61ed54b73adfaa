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
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import quote
from uuid import uuid4

from torch.distributed import DistStoreError
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

from unirun.errors import OutcomeUnknown, StoreAway, StoreError
from unirun.rendezvous.store.protocol import MAX_CHANGES, Listing, RevisionIs, Store
from unirun.rendezvous.store.url import open_store
from unirun.rendezvous.torchrun.backend import STORE_RETRY_INTERVAL, LeasedWriter, StoreBackend
from unirun.rendezvous.torchrun.config import Config, parse_config, store_address

# A `torch.distributed.Store` in which the agents of one round exchange ranks and addresses and run the exit barrier.
#
# It is kept in the rendezvous's store, so it outlives every node. Workers do not use it: they get a TCPStore, which
# ``env://`` creates from MASTER_ADDR and MASTER_PORT.

Result = TypeVar("Result")


class RoundStore(TorchStore):
    """The operations that torch's agents and barriers use, below `prefix`. Keys expire with the node that put them.

    Every operation has torch's `timeout` (`set_timeout`, default 300 s), which includes outages of the store, and
    raises `DistStoreError` at its end.
    """

    timeout: timedelta  # torch's, which its type stubs do not know

    def __init__(self, store: Store, writer: LeasedWriter, prefix: str) -> None:
        super().__init__()
        self._store, self._writer, self._prefix = store, writer, prefix

    def set(self, key: str, value: str | bytes) -> None:
        """Put a value; text is encoded as UTF-8."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Put several values, in as few transactions as possible."""
        pairs = list(zip(keys, values, strict=True))
        deadline = self._deadline()
        for start in range(0, len(pairs), MAX_CHANGES):
            some = pairs[start : start + MAX_CHANGES]
            puts = {f"{self._place(key)}value": _encoded(value) for key, value in some}
            # Idempotent, so it is repeated after an unknown outcome.
            self._reached(partial(self._writer.txn, [], puts), deadline, f"set {keys[start]!r}")

    def get(self, key: str) -> bytes:
        """Wait until a key has a value, and return it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all keys have values, and return them."""
        return self._values(keys, self._deadline())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        self._values(keys, self._deadline(timeout))

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys have a value now."""
        deadline = self._deadline()
        return all(self._listing(self._place(key), deadline).items for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0 and return it; exactly once, also when the connection breaks."""
        where, deadline = f"{self._place(key)}value", self._deadline()
        # Exists, with the sum, if and only if this addition was applied.
        receipt = f"{self._prefix}added/{uuid4().hex}"

        def attempt() -> int | None:
            done = self._store.get(receipt)
            if done is not None:
                return int(done.value)
            item = self._store.get(where)
            total = amount + (int(b64decode(item.value)) if item else 0)
            seen = RevisionIs(where, item.revision if item else 0)
            outcome = self._writer.txn([seen], {where: _encoded(str(total)), receipt: str(total)})
            return total if outcome.succeeded else None

        while True:
            total = self._reached(attempt, deadline, f"add to {key!r}")
            if total is not None:
                return total

    def _values(self, keys: Sequence[str], deadline: float) -> list[bytes]:
        found: dict[str, str] = {}
        if len(keys) > 1:
            there = self._listing(f"{self._prefix}keys/", deadline)
            found = {item.key: item.value for item in there.items}
        return [
            b64decode(found.get(f"{self._place(key)}value") or self._value(key, deadline)) for key in keys
        ]

    def _value(self, key: str, deadline: float) -> str:
        place = self._place(key)
        there = self._listing(place, deadline)
        if there.items:
            return there.items[0].value
        with closing(self._store.watch(place, there.revision + 1)) as watch:
            while (left := deadline - time.monotonic()) > 0:
                try:
                    news = watch.changes(left)
                except StoreAway as error:
                    raise DistStoreError(f"wait for {key!r}: {error}") from error
                items = news.items if isinstance(news, Listing) else [c for c in news if c.kind == "put"]
                if items:
                    return items[-1].value
        raise DistStoreError(f"wait for {key!r}: nobody has set it in time")

    def _listing(self, prefix: str, deadline: float) -> Listing:
        return self._reached(lambda: self._store.get_prefix(prefix), deadline, f"read {prefix}")

    def _place(self, key: str) -> str:
        # A prefix for each key, as watches are of prefixes; quoted, as torch's keys may contain or end with "/".
        return f"{self._prefix}keys/{quote(key, safe='')}/"

    def _deadline(self, timeout: timedelta | None = None) -> float:
        return time.monotonic() + (timeout or self.timeout).total_seconds()

    def _reached(self, call: Callable[[], Result], deadline: float, what: str) -> Result:
        while True:
            try:
                return call()
            except (StoreAway, OutcomeUnknown) as error:
                if time.monotonic() >= deadline:
                    raise DistStoreError(f"{what}: {error}") from error
                time.sleep(STORE_RETRY_INTERVAL)
            except StoreError as error:
                raise DistStoreError(f"{what}: {error}") from error


def _encoded(value: str | bytes) -> str:
    return b64encode(value.encode() if isinstance(value, str) else value).decode()


logger = logging.getLogger(__name__)

LOST_NODES_POLL_INTERVAL = 1.0
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
        seconds = min(
            LOST_NODES_POLL_INTERVAL, self._settings.keep_alive_interval.total_seconds()
        )  # when a heartbeat may be due
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
