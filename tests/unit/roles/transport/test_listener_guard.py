"""A listener that a library has closed is noticed, whatever its descriptor is used for afterwards."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.roles.transport import torch_rpc
from unirun.roles.transport.torch_rpc import listeners


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_rpc, "GUARD_POLL_INTERVAL", 0.01)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def test_only_sockets_that_listen_are_found(listener: socket.socket) -> None:
    before = listeners()
    assert listener.fileno() in before
    one, two = socket.socketpair()
    with one, two, open(os.devnull), socket.create_connection(listener.getsockname()):
        assert listeners() == before


@contextlib.contextmanager
def watched(lost: threading.Event) -> Iterator[None]:
    """The listeners of this process are watched in the block."""
    closed = threading.Event()
    thread = threading.Thread(target=torch_rpc.watch_listeners, args=(dict(listeners()), closed, lost.set))
    thread.start()
    yield
    closed.set()
    thread.join(WAIT_TIMEOUT)


@pytest.mark.parametrize("reused", [False, True], ids=["closed", "number used again"])
def test_a_closed_listener_is_reported(listener: socket.socket, reused: bool) -> None:
    lost = threading.Event()
    with watched(lost):
        if reused:
            with socket.create_server(("127.0.0.1", 0)) as other:
                os.dup2(other.fileno(), listener.fileno())
        else:
            listener.close()
        assert lost.wait(WAIT_TIMEOUT)


def test_open_listeners_and_a_closed_guard_report_nothing(listener: socket.socket) -> None:
    lost = threading.Event()
    with watched(lost):
        assert not lost.wait(0.1)
    listener.close()
    assert not lost.wait(0.1)
