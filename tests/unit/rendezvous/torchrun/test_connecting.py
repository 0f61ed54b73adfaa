"""`connect` with the options of ``torchrun``: the store is opened, or waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from unirun.errors import StoreAway, StoreError, StoreRefused
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import EtcdAddress
from unirun.rendezvous.torchrun import create_handler, handler
from unirun.rendezvous.torchrun.handler import StoreHandler

Opening = Callable[..., list[str]]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def opening(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Opening:
    """Sets the errors that opening a store raises, one a call, before it succeeds; returns the URLs passed."""

    def script(*errors: StoreError) -> list[str]:
        urls: list[str] = []

        def open_store(url: str) -> MemoryStore:
            urls.append(url)
            if len(urls) <= len(errors):
                raise errors[len(urls) - 1]
            return store

        monkeypatch.setattr(handler, "open_store", open_store)
        return urls

    return script


def params(run: str = "run1", **config: str) -> RendezvousParameters:
    return RendezvousParameters("etcd-v3", "h:1", run, 1, 1, local_addr="127.0.0.1", **config)


# The first TCPStore of a process leaves a pipe of libuv.
@pytest.mark.leaves
def test_connect_opens_the_store_of_the_endpoint(
    opening: Opening, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    urls = opening()
    made = create_handler(params(keep_alive_max_attempt="2", heartbeat_timeout="2.5"))
    assert urls == [str(EtcdAddress(("h:1",), prefix="/torchrun/", timeout=2.5))]
    assert made.next_rendezvous().world_size == 1
    assert store.get("run1/state/current") is not None
    assert isinstance(made, StoreHandler)
    assert made._settings.keep_alive_max_attempt == 2
    assert "--rdzv-id" not in caplog.text
    assert made.shutdown()
    with pytest.raises(StoreAway, match="was closed"):
        store.get("run1/state/current")


def test_connect_waits_for_a_store_that_is_away(opening: Opening) -> None:
    urls = opening(StoreAway("gone"), StoreAway("gone"))
    assert create_handler(params(read_timeout="60")).get_backend() == "etcd-v3"
    assert len(urls) == 3


def test_connect_gives_up_after_read_timeout(opening: Opening) -> None:
    opening(*[StoreAway("gone")] * 10_000)
    with pytest.raises(RendezvousConnectionError, match="gone"):
        create_handler(params(read_timeout="0.001"))


def test_connect_gives_up_at_once_when_the_store_refuses(opening: Opening) -> None:
    urls = opening(StoreRefused("not you"))
    with pytest.raises(RendezvousConnectionError, match="not you"):
        create_handler(params(read_timeout="60"))
    assert len(urls) == 1


def test_connect_warns_without_an_rdzv_id(opening: Opening, caplog: pytest.LogCaptureFixture) -> None:
    opening()
    create_handler(params("none"))
    assert "all runs without --rdzv-id meet in this etcd as 'none'" in caplog.text
