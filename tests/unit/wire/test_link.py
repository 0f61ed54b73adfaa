"""The link of a worker to its agent proves the job's token and sends `Hello`."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
from pathlib import Path

import pytest

from tests.unit.wire.endpoints import Endpoint, hears
from unirun.errors import JobError, RendezvousError
from unirun.values import WorkerId
from unirun.wire import blocking
from unirun.wire.blocking import BlockingStream
from unirun.wire.messages import Hello


def test_a_link_sends_hello_to_an_agent_that_knows_the_token(
    agent: Endpoint, environ: dict[str, str]
) -> None:
    with hears(agent, 1) as heard:
        opened = blocking.open_link(environ)
    assert heard == [Hello(WorkerId(role="actor", rank=3, incarnation=2))]
    assert blocking.open_link(environ) is opened, "a process has one"
    assert opened.socket.gettimeout() is None, "an agent may be stopped for any time"


def test_a_fork_does_not_use_the_link_of_its_parent(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(blocking, "_link", BlockingStream(ours))
    blocking._close_in_fork()
    with pytest.raises(RendezvousError, match="nobody answers at .*agent.sock"):
        blocking.open_link(environ)
    with theirs:
        assert theirs.recv(1) == b""


def test_a_link_without_a_token_is_an_error(environ: dict[str, str]) -> None:
    Path(environ["UNIRUN_SOCKET"]).with_name("token").unlink()
    with pytest.raises(JobError, match="no token can be read"):
        blocking.open_link(environ)


def test_a_descriptor_that_is_moved_out_of_the_way_is_closed_on_exec_and_in_forks(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    gone = blocking.out_of_the_way(os.dup(writer))
    moved = blocking.out_of_the_way(writer)
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024)
    assert limit - 64 <= moved < limit
    assert fcntl.fcntl(moved, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writer)
    # A script may have closed all that it did not know.
    os.close(gone)
    blocking._close_in_fork()
    assert os.read(reader, 1) == b"", "a fork keeps no end of it"
    os.close(reader)


def test_a_descriptor_for_which_no_high_number_is_free_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number = os.open(os.devnull, os.O_RDONLY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 40, 1 << 40))
    monkeypatch.setattr(blocking, "_HIGHEST", 1 << 40)
    try:
        assert blocking.out_of_the_way(number) == number
    finally:
        os.close(number)
