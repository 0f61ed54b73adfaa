"""Reading, writing and comparing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contract.store.backends import StoreBackend
from unirun.errors import StoreAway, StoreRefused
from unirun.rendezvous.store.protocol import (
    MAX_CHANGES,
    MAX_SIZE,
    Compare,
    KeyValue,
    Put,
    RevisionIs,
    Store,
    ValueIs,
)


def put(store: Store, **values: str) -> int:
    return store.txn([], [Put(key, value) for key, value in values.items()]).revision


def test_get_of_a_missing_key_is_none(store: Store) -> None:
    assert store.get("a") is None
    assert store.get_prefix("").items == ()


def test_a_client_reads_what_another_has_put(store: Store, other_store: Store) -> None:
    outcome = store.txn([], [Put("a/b", "1")])
    assert outcome.succeeded
    assert other_store.get("a/b") == KeyValue("a/b", "1", outcome.revision)


@pytest.mark.parametrize(
    "value", ["", " ", "two\nlines", "nul\0byte", "ünïcödé 𝄞", "'; DROP TABLE items; --"]
)
def test_any_text_is_a_value_and_part_of_a_key(store: Store, value: str) -> None:
    store.txn([], [Put(f"k/{value}.", value)])
    assert [(item.key, item.value) for item in store.get_prefix("k/").items] == [(f"k/{value}.", value)]


def test_a_listing_is_in_order_of_keys_and_has_the_revision_of_the_store(store: Store) -> None:
    store.txn([], [Put(key, key) for key in ("b", "a/é", "a/z", "a/b/c", "c")])
    last = put(store, d="1")
    listing = store.get_prefix("")
    assert [item.key for item in listing.items] == ["a/b/c", "a/z", "a/é", "b", "c", "d"]
    assert listing.revision == last
    assert store.get_prefix("nothing/").revision == last


def test_a_prefix_matches_whole_path_components_only(store: Store) -> None:
    store.txn(
        [],
        [Put("jobs/run1/a", "1"), Put("jobs/run10/a", "2"), Put("jobs/run1.5", "3"), Put("jobs/run1", "4")],
    )
    assert [item.key for item in store.get_prefix("jobs/run1/").items] == ["jobs/run1/a"]
    store.txn([], deletes=["jobs/run1/"])
    assert [item.key for item in store.get_prefix("jobs/").items] == [
        "jobs/run1",
        "jobs/run1.5",
        "jobs/run10/a",
    ]


@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (lambda revision: ValueIs("a", "1"), True),
        (lambda revision: ValueIs("a", "2"), False),
        (lambda revision: ValueIs("a", ""), False),
        (lambda revision: ValueIs("absent", ""), False),
        (lambda revision: ValueIs("empty", ""), True),
        (lambda revision: RevisionIs("a", revision), True),
        (lambda revision: RevisionIs("a", revision - 1), False),
        (lambda revision: RevisionIs("a", 0), False),
        (lambda revision: RevisionIs("absent", 0), True),
        (lambda revision: RevisionIs("absent", revision), False),
    ],
)
def test_a_transaction_is_applied_when_its_comparison_is_true(
    store: Store, compare: Callable[[int], Compare], holds: bool
) -> None:
    revision = put(store, a="1", empty="")
    outcome = store.txn([compare(revision)], [Put("b", "new")])
    assert outcome.succeeded is holds
    assert (store.get("b") is not None) is holds
    assert outcome.revision == revision + holds


def test_a_transaction_with_one_false_comparison_changes_nothing(store: Store) -> None:
    revision = put(store, a="1", b="2", c="3")
    outcome = store.txn([ValueIs("a", "1"), ValueIs("b", "9")], [Put("a", "x")], ["b", "c"])
    assert not outcome.succeeded
    assert outcome.revision == revision
    assert [item.value for item in store.get_prefix("").items] == ["1", "2", "3"]


def test_comparisons_see_what_was_there_before_the_transaction(store: Store) -> None:
    assert store.txn([RevisionIs("a", 0)], [Put("a", "1")]).succeeded
    assert store.txn([ValueIs("a", "1")], [], ["a"]).succeeded
    assert store.txn([RevisionIs("a", 0)], [Put("a", "2")]).succeeded


def test_each_transaction_that_changes_something_has_the_next_revision(store: Store) -> None:
    first = put(store, a="1", b="2")
    assert put(store, a="1") == first + 1, "the same value again is a change"
    assert store.txn([], [Put("c", "1")], ["a"]).revision == first + 2
    assert store.txn([], deletes=["b", "c"]).revision == first + 3
    assert store.txn([], deletes=["b", "nothing/"]).revision == first + 3, (
        "what is not there cannot be deleted"
    )
    assert store.txn([]).revision == first + 3


def test_an_item_has_the_revision_of_its_last_put(store: Store) -> None:
    first = put(store, a="1", b="1")
    second = put(store, b="2")
    assert [item.revision for item in store.get_prefix("").items] == [first, second]


def test_the_empty_prefix_deletes_the_whole_store(store: Store) -> None:
    store.txn([], [Put("a/b", "1"), Put("c", "2")])
    assert store.txn([], deletes=[""]).succeeded
    assert store.get_prefix("").items == ()


@pytest.mark.parametrize(
    ("puts", "deletes"),
    [
        (["a", "a"], []),
        (["a"], ["a"]),
        ([], ["a", "a"]),
        (["p/a"], ["p/"]),
        ([], ["p/", "p/q/"]),
        (["a"], [""]),
    ],
)
def test_no_key_is_changed_twice_in_one_transaction(
    store: Store, puts: list[str], deletes: list[str]
) -> None:
    with pytest.raises(ValueError, match="twice|besides"):
        store.txn([], [Put(key, "1") for key in puts], deletes)
    assert store.get_prefix("").items == ()


@pytest.mark.parametrize("key", ["", "a/", "/"])
def test_an_invalid_key_is_refused(store: Store, key: str) -> None:
    for call in (
        store.get,
        lambda key: store.txn([], [Put(key, "1")]),
        lambda key: store.txn([ValueIs(key, "1")]),
    ):
        with pytest.raises(ValueError, match="no key"):
            call(key)


def test_an_invalid_prefix_is_refused(store: Store) -> None:
    for call in (store.get_prefix, lambda prefix: store.watch(prefix, 1)):
        with pytest.raises(ValueError, match="no prefix"):
            call("jobs/run1")


def test_a_value_may_have_256_kib(store: Store, other_store: Store) -> None:
    value = "é" * (128 * 1024)
    store.txn([], [Put("large", value)])
    item = other_store.get("large")
    assert item is not None
    assert item.value == value


def test_a_transaction_may_have_max_changes_and_max_size(store: Store) -> None:
    keys = [f"k/{number:03}" for number in range(MAX_CHANGES)]
    value = "x" * (MAX_SIZE // MAX_CHANGES - len(keys[0]))
    outcome = store.txn([RevisionIs(key, 0) for key in keys], [Put(key, value) for key in keys])
    assert outcome.succeeded
    listing = store.get_prefix("k/")
    assert [item.key for item in listing.items] == keys
    assert {item.revision for item in listing.items} == {outcome.revision}


def test_a_transaction_that_is_too_large_is_refused_by_all_stores(store: Store) -> None:
    for put in (Put("a", "x" * MAX_SIZE), Put("a", "é" * (MAX_SIZE // 2)), Put("é" * (MAX_SIZE // 2), "x")):
        with pytest.raises(StoreRefused, match="too large.*several parts"):
            store.txn([], [put])
    with pytest.raises(ValueError, match=f"at most {MAX_CHANGES}"):
        store.txn([], [Put(str(number), "") for number in range(MAX_CHANGES + 1)])


def test_every_call_to_a_closed_store_is_an_error(backend: StoreBackend) -> None:
    store = backend.open()
    store.close()
    store.close()
    for call in (
        lambda: store.get("a"),
        lambda: store.txn([], [Put("a", "1")]),
        lambda: store.grant(1),
        lambda: store.watch("", 1).changes(5),
    ):
        with pytest.raises(StoreAway, match="closed"):
            call()
