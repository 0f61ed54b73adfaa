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

import binascii
import gc
import json
import logging
import math
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, cast
from urllib.parse import quote
from uuid import uuid4

from msgspec.structs import replace
from torch.distributed import DistStoreError
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
    _Action,
    _BackendRendezvousStateHolder,
    _DistributedRendezvousOpExecutor,
    _RendezvousContext,
)

from unirun.errors import LeaseExpired, OutcomeUnknown, StoreAway, StoreError, UsageError
from unirun.rendezvous.store.protocol import (
    MAX_CHANGES,
    Compare,
    EtcdAddress,
    KeyValue,
    Lease,
    Listing,
    Outcome,
    Put,
    RevisionIs,
    Store,
    parse_address,
)
from unirun.rendezvous.store.url import open_store
from unirun.values import Value

NAME = "etcd-v3"
"""The value of ``--rdzv-backend``."""

# Parse and check ``--rdzv-endpoint`` and ``--rdzv-conf`` before connecting.


class Config(Value):
    """The keys of ``--rdzv-conf``. Times are in seconds and may have fractions."""

    join_timeout: float = 600
    """Time to wait for the minimum number of nodes."""

    last_call_timeout: float = 30
    """Time to wait for more nodes after that."""

    close_timeout: float = 30
    """Time for a node to mark the run as closed."""

    heartbeat_timeout: float = 5
    """Timeout of a heartbeat, and of any other call to etcd."""

    keep_alive_interval: float = 5
    """Time between two heartbeats of a node."""

    keep_alive_max_attempt: int = 3
    """Number of missed heartbeats after which a node is lost."""

    read_timeout: float = 60
    """Time for which etcd may be away during a rendezvous."""

    prefix: str = "/torchrun/"
    """Prefix of every key in etcd."""

    cacert: str | None = None
    """File with the certificates of the authorities that sign etcd's certificate; turns on TLS."""

    cert: str | None = None
    """File with the client certificate of this node."""

    key: str | None = None
    """File with the private key of `cert`."""

    user: str | None = None
    """User name in etcd."""

    password_file: str | None = None
    """File with the password of `user` and nothing else, readable by its owner only."""

    @property
    def silence(self) -> float:
        """Seconds without a heartbeat after which a node is lost."""
        return self.keep_alive_interval * self.keep_alive_max_attempt

    @property
    def ttl(self) -> float:
        """Seconds by which a run's keys outlive its last node; longer than the nodes take to notice a loss."""
        return 3 * self.silence


NOT_OURS = frozenset({"timeout"})
"""torchrun adds it to the configuration of every backend; only its static backend uses it."""


def parse_config(given: Mapping[str, Any]) -> Config:
    """Parse the configuration and add defaults. Raises `UsageError` that names the key."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in NOT_OURS:
            continue
        if name not in _PARSERS:
            raise UsageError(
                f"--rdzv-conf has no key {name!r} for etcd-v3", f"there are {', '.join(_PARSERS)}"
            )
        values[name] = _PARSERS[name](name, value)
    for one, other in _NEEDS:
        if one in values and other not in values:
            raise UsageError(f"--rdzv-conf: {one} is given, and {other} is not", f"add {other}=…")
    return Config(**values)


def store_address(endpoint: str, config: Config) -> EtcdAddress:
    """Parse the endpoint: ``h1:2379,h2`` are two members, empty is this host. Raises `UsageError`."""
    try:
        if set("/?@") & set(endpoint):
            raise UsageError("neither a scheme, nor a path, nor a password may stand in it")
        there = parse_address(f"etcd://{endpoint.strip() or 'localhost'}")
    except UsageError as error:
        raise UsageError(
            f"--rdzv-endpoint={endpoint} names no etcd: {error}",
            "write HOST:PORT, with commas between several; cacert, cert, key, user and password_file are keys of "
            "--rdzv-conf",
        ) from error
    assert isinstance(there, EtcdAddress)
    return replace(
        there,
        prefix=config.prefix,
        timeout=config.heartbeat_timeout,
        cacert=config.cacert,
        cert=config.cert,
        key=config.key,
        user=config.user,
        password_file=config.password_file,
    )


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UsageError(f"--rdzv-conf: {name}={value} is no number of seconds greater than 0")
    return seconds


def _attempts(name: str, value: Any) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    if count < 2:  # with 1, every heartbeat would come slightly too late
        raise UsageError(f"--rdzv-conf: {name}={value} is no whole number from 2 on")
    return count


def _prefix(name: str, value: Any) -> str:
    return f"{str(value).rstrip('/')}/"


def _file(name: str, value: Any) -> str:
    if not Path(str(value)).is_file():
        raise UsageError(f"--rdzv-conf: {name}={value}: there is no such file on this node")
    return str(value)


def _name(name: str, value: Any) -> str:
    return str(value)


_PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout"), _seconds),
    **dict.fromkeys(("keep_alive_interval", "read_timeout"), _seconds),
    "keep_alive_max_attempt": _attempts,
    "prefix": _prefix,
    **dict.fromkeys(("cacert", "cert", "key", "password_file"), _file),
    "user": _name,
}

_NEEDS = (("cert", "key"), ("key", "cert"), ("cert", "cacert"), ("password_file", "user"))


# torch's rendezvous state in a store: read, compare-and-set, and wait for the next change.
#
# The state is opaque bytes here: torch pickles it for `set_state` and unpickles what `get_state` returns. It is stored
# in one key, with a random id of the meeting. If the key is lost while nodes live (all were suspended for longer than
# the lease), rounds are counted from 0 again, and the id distinguishes them from the earlier ones.

# Writes to a store under a lease, so that they expire some time after their node is gone.

STORE_RETRY_INTERVAL = 0.1
"""Seconds between two attempts to reach a store that is away."""


class LeasedWriter:
    """Puts keys under a lease that expires at most `ttl` seconds after the last write. Thread-safe."""

    def __init__(self, store: Store, ttl: float) -> None:
        self._store, self._ttl = store, ttl
        self._lock = Lock()
        self._lease: Lease | None = None
        self._kept = 0.0

    def txn(self, compares: Sequence[Compare], values: Mapping[str, str]) -> Outcome:
        """Put all `values` if every comparison is true, else none. Raises `StoreError`, but not `LeaseExpired`: an
        expired lease is replaced."""
        while True:
            lease = self._current()
            try:
                return self._store.txn(compares, [Put(key, value, lease) for key, value in values.items()])
            except LeaseExpired:
                self._forget(lease)

    def _current(self) -> Lease:
        with self._lock:
            now = time.monotonic()
            if self._lease is not None and now - self._kept > self._ttl / 4:
                # Renewed well before its end, but not with every write.
                try:
                    self._store.keep_alive(self._lease)
                    self._kept = now
                except LeaseExpired:
                    self._lease = None
            if self._lease is None:
                self._lease, self._kept = self._store.grant(self._ttl), now
            return self._lease

    def _forget(self, lease: Lease) -> None:
        with self._lock:
            if self._lease == lease:
                self._lease = None


logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class StateToken(Value):
    """A version of the state: written by the transaction `revision`, in the meeting `meeting`."""

    revision: int
    meeting: str


class StoreBackend(RendezvousBackend):
    """Access of the node `node` to the state of a run, at ``<root>state/current``.

    `grace` is the time in seconds after an outage of the store in which old heartbeats are ignored.
    """

    def __init__(self, store: Store, writer: LeasedWriter, root: str, node: str, *, grace: float) -> None:
        self._store, self._writer, self._root, self._grace = store, writer, root, grace
        self._state_key, self._nodes = f"{root}state/current", f"{root}nodes/"
        self._node_key = f"{self._nodes}{quote(node, safe='')}"
        self._patience = 0.0
        self._grace_ends = 0.0
        self.meeting = ""
        """Id of the meeting that was read or written last."""
        self.away = False
        """True if the last operation on the store failed."""

    @property
    def name(self) -> str:
        """The name in ``--rdzv-backend``."""
        return NAME

    @property
    def blinded(self) -> bool:
        """True if heartbeats may be old because of an outage of the store."""
        return self.away or time.monotonic() < self._grace_ends

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Context in which operations retry for `seconds` while the store is away, instead of failing at once."""
        self._patience = seconds
        try:
            yield
        finally:
            self._patience = 0.0

    def get_state(self) -> tuple[bytes, StateToken] | None:
        """Return the state and its token, or None. Raises `RendezvousConnectionError`, and `RendezvousStateError` when
        `set_state` has not written it."""
        item = self._reached(lambda: self._store.get(self._state_key))
        return None if item is None else self._decoded(item)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, StateToken, bool] | None:
        """Replace the version `token` of the state (None: there is no state yet).

        Returns the state after that, its token, and whether it was replaced. Raises like `get_state`.
        """
        if token is not None and not isinstance(token, StateToken):
            return self._found()
        meeting = token.meeting if token else uuid4().hex
        value = json.dumps({"meeting": meeting, "state": b64encode(state).decode()})
        seen = RevisionIs(self._state_key, token.revision if token else 0)
        try:
            outcome = self._reached(lambda: self._write(seen, value))
        except OutcomeUnknown:
            item = self._reached(lambda: self._store.get(self._state_key))
            if item is None or item.value != value:
                return self._found()
            return (*self._decoded(item), True)
        if not outcome.succeeded:
            return self._found()
        self.meeting = meeting
        return state, StateToken(outcome.revision, meeting), True

    def wait_for_change(self, token: StateToken, timeout: float) -> None:
        """Wait until the state is newer than `token`, for at most `timeout` seconds."""
        try:
            with closing(self._store.watch(f"{self._root}state/", token.revision + 1)) as watch:
                watch.changes(timeout)
        except StoreError as error:  # the next read raises it
            logger.debug("the watch of the rendezvous state: %s", error)

    def leave(self, members: Collection[str]) -> None:
        """Remove this node; the last of the `members` deletes all keys of the run.

        Does not raise `StoreError`: remaining keys expire with their leases.
        """
        try:
            self._store.txn([], deletes=[self._node_key])
            state = self._store.get(self._state_key)
            there = {item.key for item in self._store.get_prefix(self._nodes).items}
            # The key of a killed node outlives it, but it is no member once the others have met again.
            if there.isdisjoint(f"{self._nodes}{quote(member, safe='')}" for member in members):
                # Fails when a node has joined in between, as that changed the state.
                unchanged = RevisionIs(self._state_key, state.revision if state else 0)
                self._store.txn([unchanged], deletes=[self._root])
        except StoreError as error:
            logger.warning("the run's keys stay in the store until their leases end: %s", error)

    def _write(self, seen: RevisionIs, value: str) -> Outcome:
        return self._writer.txn([seen], {self._state_key: value, self._node_key: ""})

    def _found(self) -> tuple[bytes, StateToken, bool] | None:
        found = self.get_state()
        return None if found is None else (*found, False)

    def _decoded(self, item: KeyValue) -> tuple[bytes, StateToken]:
        try:
            record = json.loads(item.value)
            self.meeting = str(record["meeting"])
            return b64decode(record["state"], validate=True), StateToken(item.revision, self.meeting)
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            raise RendezvousStateError(
                f"{item.key} holds {item.value!r:.80}, which no {NAME} backend has written; "
                "does the prefix belong to something else? choose another one with --rdzv-conf=prefix=…"
            ) from error

    def _reached(self, call: Callable[[], Result]) -> Result:
        """Call the store and translate its errors to torch's, except `OutcomeUnknown`. Retries within `patient`."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                result = call()
            except OutcomeUnknown:
                raise
            except StoreError as error:
                self.away = True
                if not isinstance(error, StoreAway) or time.monotonic() >= deadline:
                    raise RendezvousConnectionError(str(error)) from error
                time.sleep(STORE_RETRY_INTERVAL)
            else:
                if self.away:
                    self.away, self._grace_ends = False, time.monotonic() + self._grace
                return result


# A `torch.distributed.Store` in which the agents of one round exchange ranks and addresses and run the exit barrier.
#
# It is kept in the rendezvous's store, so it outlives every node. Workers do not use it: they get a TCPStore, which
# ``env://`` creates from MASTER_ADDR and MASTER_PORT.


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
                except StoreError as error:
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
        # One that is left over has to read that the run is closed. Otherwise it would begin the run anew.
        members = {*state.participants, *state.wait_list, *state.redundancy_list}
        self._backend.leave([str(node) for node in members])
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
