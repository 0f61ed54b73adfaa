"""Argument checks shared by all stores, so that all accept the same calls."""

from __future__ import annotations

import math
from collections.abc import Sequence

from unirun.errors import StoreRefused
from unirun.rendezvous.store.protocol import MAX_CHANGES, MAX_SIZE, Compare, Put


def check_key(key: str) -> None:
    """Raise ValueError for an invalid key."""
    if not key or key.endswith("/"):
        raise ValueError(f"{key!r} is no key: a key is not empty and does not end with '/'")
    key.encode()  # raises for lone surrogates


def check_prefix(prefix: str) -> None:
    """Raise ValueError for an invalid prefix."""
    if prefix and not prefix.endswith("/"):
        raise ValueError(f"{prefix!r} is no prefix: a prefix is empty or ends with '/'")


def check_ttl(ttl: float) -> None:
    """Raise ValueError for a lease that is not positive and finite."""
    if not 0 < ttl < math.inf:
        raise ValueError(f"a lease cannot last {ttl} seconds")


def check_txn(compares: Sequence[Compare], puts: Sequence[Put], deletes: Sequence[str]) -> None:
    """Refuse a transaction that is too large or changes a key twice. Raises ValueError, `StoreRefused`."""
    for compare in compares:
        check_key(compare.key)
    for put in puts:
        check_key(put.key)
    changes = len(puts) + len(deletes)
    if changes > MAX_CHANGES or len(compares) > MAX_CHANGES:
        raise ValueError(
            f"a transaction has at most {MAX_CHANGES} comparisons and as many changes;"
            f" this one has {len(compares)} and {changes}"
        )
    size = sum(len(put.key.encode()) + len(put.value.encode()) for put in puts)
    if size > MAX_SIZE:
        raise StoreRefused(
            f"a transaction of {size} bytes is too large: {MAX_SIZE} is the most",
            "write it in several parts",
        )
    _check_overlaps([put.key for put in puts], deletes)


def _check_overlaps(puts: list[str], deletes: Sequence[str]) -> None:
    targets = {*puts, *deletes}
    if len(targets) < len(puts) + len(deletes):
        raise ValueError("a transaction changes the same key twice")
    everything = [prefix for prefix in deletes if not prefix or prefix.endswith("/")]
    for prefix in everything:
        for target in targets:
            if target != prefix and target.startswith(prefix):
                raise ValueError(f"a transaction deletes {prefix!r} and changes {target!r} besides")
