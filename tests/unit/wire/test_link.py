"""The link of a worker to its agent proves the job's token and sends `Hello`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.wire.endpoints import Endpoint, serve_once
from unirun.errors import JobError, RendezvousError
from unirun.values import WorkerId
from unirun.wire import blocking
from unirun.wire.blocking import BlockingStream
from unirun.wire.frames import FrameReader, decode
from unirun.wire.handshake import ANSWER_SIZE, Handshake
from unirun.wire.messages import Hello
from unirun.wire.reports import Message


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    return Endpoint("unix", tmp_path)


@pytest.fixture
def environ(endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment of a worker; the link is closed after the test."""
    (tmp_path / "token").write_text(endpoint.token.hex())
    (tmp_path / "token").chmod(0o600)
    opened: dict[int, BlockingStream] = {}
    monkeypatch.setattr(blocking, "_current", opened)
    yield {
        "UNIRUN_SOCKET": str(endpoint.path),
        "UNIRUN_ROLE": "actor",
        "UNIRUN_RANK": "3",
        "UNIRUN_INCARNATION": "2",
    }
    for stream in opened.values():
        stream.close()


def test_a_link_sends_hello_to_an_agent_that_knows_the_token(
    endpoint: Endpoint, environ: dict[str, str]
) -> None:
    heard: list[Message] = []

    def agent(connection) -> None:  # type: ignore[no-untyped-def]
        handshake, reader = Handshake(endpoint.token), FrameReader()
        connection.sendall(handshake.hello())
        connection.sendall(handshake.proof(connection.recv(ANSWER_SIZE)))
        while not heard:
            heard.extend(map(decode, reader.feed(connection.recv(4096))))

    with serve_once(endpoint, agent):
        opened = blocking.open_link(environ)
    assert heard == [Hello(WorkerId(role="actor", rank=3, incarnation=2))]
    assert blocking.open_link(environ) is opened, "a process has one"
    assert opened.socket.gettimeout() is None, "an agent may be stopped for any time"


def test_a_fork_does_not_use_the_link_of_its_parent(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = BlockingStream.__new__(BlockingStream)
    monkeypatch.setattr(blocking, "_current", {os.getppid(): theirs})
    with pytest.raises(RendezvousError, match="nobody answers at .*agent.sock"):
        blocking.open_link(environ)


def test_a_link_without_a_token_is_an_error(environ: dict[str, str]) -> None:
    Path(environ["UNIRUN_SOCKET"]).with_name("token").unlink()
    with pytest.raises(JobError, match="no token can be read"):
        blocking.open_link(environ)
