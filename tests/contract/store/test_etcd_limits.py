"""Requests that an etcd server does not accept, and foreign data in it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.store.etcd_server import EtcdCluster, program
from unirun.errors import StoreError, StoreRefused
from unirun.rendezvous.store.protocol import MAX_SIZE, Put, Store
from unirun.rendezvous.store.url import open_store


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[EtcdCluster]:
    """A server with low limits for the size of requests and the number of operations."""
    flags = (
        "--quota-backend-bytes",
        str(400_000),
        "--max-request-bytes",
        str(200_000),
        "--max-txn-ops",
        "10",
    )
    servers = EtcdCluster(tmp_path, flags=flags)
    yield servers
    servers.stop()


def test_a_full_or_limited_etcd_server_is_reported_with_a_remedy(narrow: EtcdCluster) -> None:
    store = open_store(narrow.url())
    with pytest.raises(StoreRefused, match=r"takes smaller transactions only.*--max-request-bytes"):
        store.txn([], [Put("a", "x" * (MAX_SIZE - 1))])
    with pytest.raises(StoreRefused, match=r"takes smaller transactions only.*--max-txn-ops"):
        store.txn([], [Put(str(number), "") for number in range(50)])
    with pytest.raises(StoreError, match=r"is full.*etcdctl alarm disarm"):
        fill(store)
    assert store.get("a") is not None, "what is there can still be read"
    store.close()


def fill(store: Store) -> None:
    """Until the server notices: it checks its size ten times a second."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        store.txn([], [Put("a", "x" * 100_000)])


def test_foreign_bytes_in_etcd_are_refused(etcd: EtcdCluster) -> None:
    store = open_store(etcd.url(prefix="/foreign/"))
    start = store.get_prefix("").revision + 1
    endpoint = etcd.members[0].endpoint
    put = [program("etcdctl"), "--endpoints", endpoint, "put", "/foreign/a"]
    subprocess.run(put, input=b"\xff\xfe", capture_output=True, check=True)
    watch = store.watch("", start)
    for call in (lambda: store.get("a"), lambda: store.get_prefix(""), lambda: watch.changes(10)):
        with pytest.raises(StoreRefused, match="no unirun has written.*choose another one"):
            call()
    store.txn([], deletes=["a"])
    store.close()
