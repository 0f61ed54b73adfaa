"""Threads of one process as a transport: the first-class twin of the others."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import ChannelError
from unirun.roles import inprocess
from unirun.roles.inprocess import InprocTransport
from unirun.roles.transport.protocol import Parcel
from unirun.values import WorkerId

ME = WorkerId("desk", 0, 0)


def echo(parcel: Parcel, reply: Any) -> None:
    """Send it back."""
    reply(parcel)


def test_inproc_channels_copy_memory() -> None:
    server, client, answers = InprocTransport(), InprocTransport(), queue.SimpleQueue[Parcel]()
    connection = client.connect(ME, server.serve(ME, echo), lambda reason: None)
    memory = bytearray(b"abc")
    connection.call(Parcel(b"x", (memoryview(memory),)), answers.put)
    memory[:] = b"zzz"
    answer = answers.get(timeout=WAIT_TIMEOUT)
    assert bytes(answer.buffers[0]) == b"abc"
    assert server.connections
    client.close()
    assert not server.connections, "a worker that has ended is no caller any more"
    server.close()


def test_a_cut_inproc_channel_can_be_opened_again_until_the_worker_ends() -> None:
    server, client, news = InprocTransport(), InprocTransport(), queue.SimpleQueue[str]()
    endpoint = server.serve(ME, echo)
    connection = client.connect(ME, endpoint, news.put)
    for connection in list(inprocess._servers[endpoint].connections):
        connection.cut("interrupted")
    assert news.get(timeout=WAIT_TIMEOUT) == "interrupted"
    assert not client.opened
    answers: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
    connection.call(Parcel(b"over a broken connection"), answers.put)
    again = client.connect(ME, endpoint, news.put)
    again.call(Parcel(b"over a new one"), answers.put)
    assert answers.get(timeout=WAIT_TIMEOUT).head == b"over a new one"
    server.close()
    assert news.get(timeout=WAIT_TIMEOUT) == "the worker has ended"
    with pytest.raises(ChannelError, match="desk:0 is not there"):
        client.connect(ME, endpoint, news.put)
    client.close()
    client.close()
    assert answers.empty()


def test_a_channel_that_is_closed_says_nothing_any_more() -> None:
    server, client, news = InprocTransport(), InprocTransport(), queue.SimpleQueue[str]()
    connection = client.connect(ME, server.serve(ME, echo), news.put)
    connection.close()
    connection.close()
    assert not client.opened
    assert not server.connections
    server.close()
    client.close()
    assert news.empty()


def test_a_connection_whose_answer_cannot_be_taken_breaks() -> None:
    """Its calls are sent again then, as over the other transports."""
    server, client, news = InprocTransport(), InprocTransport(), queue.SimpleQueue[str]()
    connection = client.connect(ME, server.serve(ME, echo), news.put)

    def fail(parcel: Parcel) -> None:
        raise MemoryError("no room")

    connection.call(Parcel(b"x"), fail)
    assert "no room" in news.get(timeout=10.0)
    client.close()
    server.close()
