"""A `torch.distributed.Store` in which the agents of one round exchange ranks and addresses and run the exit barrier.

It is kept in the rendezvous's store, so it outlives every node. Workers do not use it: they get a TCPStore, which
``env://`` creates from MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import TypeVar
from urllib.parse import quote
from uuid import uuid4

from torch.distributed import DistStoreError
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from unirun.errors import OutcomeUnknown, StoreAway, StoreError
from unirun.rendezvous.store.protocol import MAX_CHANGES, Listing, RevisionIs, Store
from unirun.rendezvous.torchrun.backend import RETRY, LeasedWriter

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
                time.sleep(RETRY)
            except StoreError as error:
                raise DistStoreError(f"{what}: {error}") from error


def _encoded(value: str | bytes) -> str:
    return b64encode(value.encode() if isinstance(value, str) else value).decode()
