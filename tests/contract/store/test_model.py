"""Each store against a dictionary as its model: after any operations both have the same items and changes."""

from __future__ import annotations

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.store.backends import StoreBackend, read
from unirun.rendezvous.store.protocol import Change, Compare, KeyValue, Lease, Put, RevisionIs, ValueIs

KEYS = ("a", "a/b", "a/b/c", "a0", "b/a", "b/b")
PREFIXES = ("", "a/", "b/", "a/b/")

values = st.sampled_from(["", "1", "2"])
compares = st.one_of(
    st.builds(lambda key, value: ("value", key, value), st.sampled_from(KEYS), values),
    st.builds(lambda key, age: ("revision", key, age), st.sampled_from(KEYS), st.integers(0, 2)),
)
transactions = st.tuples(
    st.lists(compares, max_size=2),
    st.dictionaries(st.sampled_from(KEYS), st.tuples(values, st.booleans()), max_size=4),
    st.sets(st.sampled_from((*KEYS, *PREFIXES)), max_size=2),
)
steps = st.lists(st.one_of(transactions, st.just("revoke")), min_size=1, max_size=25)


class Model:
    """A dictionary, the changes that were made to it, and one lease."""

    def __init__(self, revision: int) -> None:
        self.items: dict[str, KeyValue] = {}
        self.leased: set[str] = set()
        self.changes: list[Change] = []
        self.revision = revision

    def holds(self, compare: Compare) -> bool:
        item = self.items.get(compare.key)
        if isinstance(compare, ValueIs):
            return item is not None and item.value == compare.value
        return (item.revision if item else 0) == compare.revision

    def apply(self, puts: list[Put], deletes: list[str]) -> None:
        gone = [
            key
            for target in deletes
            for key in sorted(self.items)
            if key == target or ((not target or target.endswith("/")) and key.startswith(target))
        ]
        if not puts and not gone:
            return
        self.revision += 1
        for put in puts:
            self.items[put.key] = KeyValue(put.key, put.value, self.revision)
            (self.leased.add if put.lease else self.leased.discard)(put.key)
            self.changes.append(Change("put", put.key, put.value, self.revision))
        for key in gone:
            del self.items[key]
            self.leased.discard(key)
            self.changes.append(Change("delete", key, "", self.revision))


def overlap(puts: list[Put], deletes: list[str]) -> bool:
    targets = [put.key for put in puts] + deletes
    return len(set(targets)) < len(targets) or any(
        target != prefix and target.startswith(prefix)
        for prefix in deletes
        if not prefix or prefix.endswith("/")
        for target in targets
    )


@settings(
    max_examples=20,
    derandomize=True,  # a build does not fail for what nobody has changed
)
@given(steps=steps)
def test_a_store_is_a_dictionary_with_a_history(backend: StoreBackend, steps: list[object]) -> None:
    store = backend.open()
    store.txn([], deletes=[""])
    model = Model(store.get_prefix("").revision)
    start = model.revision + 1
    lease: Lease = store.grant(60)
    for step in steps:
        if step == "revoke":
            store.revoke(lease)
            model.apply([], sorted(model.leased))
            lease = store.grant(60)
        else:
            transact(store, model, lease, step)
    store.revoke(lease)
    model.apply([], sorted(model.leased))
    for prefix in PREFIXES:
        expected = [change for change in model.changes if change.key.startswith(prefix)]
        watch = store.watch(prefix, start)
        assert read(watch, partial(as_many, expected)) == expected
        watch.close()


def as_many(expected: list[Change], seen: list[Change]) -> bool:
    return len(seen) >= len(expected)


def transact(store, model: Model, lease: Lease, step) -> None:  # type: ignore[no-untyped-def]
    asked, put, delete = step
    puts = [Put(key, value, lease if leased else None) for key, (value, leased) in sorted(put.items())]
    deletes = sorted(delete)
    if overlap(puts, deletes):
        return
    checks: list[Compare] = []
    for kind, key, what in asked:
        item = model.items.get(key)
        # An age of 0 is what is there now, 1 is one before it, and 2 says that nothing is there.
        now = item.revision if item else 0
        checks.append(
            ValueIs(key, what) if kind == "value" else RevisionIs(key, max(0, (now, now - 1, 0)[what]))
        )
    expected = all(map(model.holds, checks))
    if expected:
        model.apply(puts, deletes)
    outcome = store.txn(checks, puts, deletes)
    assert (outcome.succeeded, outcome.revision) == (expected, model.revision)
    listing = store.get_prefix("")
    assert listing.revision == model.revision
    assert listing.items == tuple(model.items[key] for key in sorted(model.items))
    for key in KEYS:
        assert store.get(key) == model.items.get(key)
