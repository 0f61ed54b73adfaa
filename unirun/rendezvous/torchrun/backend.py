"""torch's rendezvous state in a store: read, compare-and-set, and wait for the next change.

The state is opaque bytes here: torch pickles it for `set_state` and unpickles what `get_state` returns. It is stored in
one key, with a random id of the meeting. If the key is lost while nodes live (all were suspended for longer than the
lease), rounds are counted from 0 again, and the id distinguishes them from the earlier ones.
"""

from __future__ import annotations

import binascii
import json
import logging
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from threading import Lock
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from unirun.errors import LeaseExpired, OutcomeUnknown, StoreAway, StoreError
from unirun.rendezvous.store.protocol import Compare, KeyValue, Lease, Outcome, Put, RevisionIs, Store
from unirun.rendezvous.torchrun import NAME
from unirun.values import Value

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
