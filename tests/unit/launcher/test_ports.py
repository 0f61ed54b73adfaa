"""Ports of ranks: no two agents of a host give away the same one, and none that a process listens on."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from unirun.errors import RendezvousError
from unirun.launcher.orders import PortBook, is_free
from unirun.values import RankAddress

HOST = "127.0.0.1"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def low() -> int:
    """The first of 12 ports that nobody has, below those of clients and apart from those of jobs and of other tests."""
    for low in range(15000 + 12 * (os.getpid() % 300), 20000 - 12, 12):
        book = PortBook(HOST, low, low + 11)
        try:
            book.place("all", 0, 12)
        except RendezvousError:
            continue
        finally:
            book.close()
        return low
    raise AssertionError("no twelve ports in a row are free")


def book(stack: ExitStack, low: int, count: int = 12) -> PortBook:
    book = PortBook(HOST, low, low + count - 1)
    stack.callback(book.close)
    return book


def listener(stack: ExitStack, port: int, host: str = HOST) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = stack.enter_context(socket.socket(family))
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    sock.listen()
    return sock


class TestPlaces:
    @pytest.mark.parametrize("first", range(4))
    @pytest.mark.parametrize("count", [2, 6, 8])
    def test_places_are_found_for_each_port_of_any_range(self, low: int, first: int, count: int) -> None:
        with ExitStack() as stack:
            whole = book(stack, low + first, count)
            ports = [port for rank in range(count) for port in whole.place("actor", rank, 1).ports]
            assert sorted(ports) == [*range(low + first, low + first + count)]

    def test_places_have_as_many_ports_as_were_asked_for_in_the_range(
        self, stack: ExitStack, low: int
    ) -> None:
        place = book(stack, low).place("engine", 0, 3)
        assert place.host == HOST
        assert len({*place.ports}) == 3
        assert all(low <= port < low + 12 for port in place.ports)

    def test_places_stay_the_same(self, stack: ExitStack, low: int) -> None:
        ports = book(stack, low)
        first = ports.place("engine", 0, 2)
        ports.place("engine", 1, 2)
        assert ports.place("engine", 0, 2) == first

    def test_places_of_two_books_are_never_the_same(self, stack: ExitStack, low: int) -> None:
        books = [book(stack, low) for _ in range(3)]
        given = [each.place("engine", rank, 1).ports[0] for rank in range(4) for each in books]
        assert sorted(given) == [*range(low, low + 12)]

    def test_places_are_free_again_when_a_book_is_closed(self, stack: ExitStack, low: int) -> None:
        first, second = book(stack, low, 2), book(stack, low, 2)
        first.place("engine", 0, 2)
        with pytest.raises(RendezvousError, match=f"no port from {low} to {low + 1} is free on this host"):
            second.place("engine", 0, 1)
        first.close()
        assert {*second.place("engine", 0, 2).ports} == {low, low + 1}

    def test_a_place_for_which_there_are_too_few_ports_takes_none(self, stack: ExitStack, low: int) -> None:
        ports, other = book(stack, low, 3), book(stack, low, 3)
        given = ports.place("engine", 0, 2).ports
        with pytest.raises(RendezvousError):
            ports.place("engine", 1, 2)
        assert {*given, *other.place("engine", 0, 1).ports} == {*range(low, low + 3)}

    @pytest.mark.parametrize("host", [HOST, "127.0.0.2", "0.0.0.0", "::1", "::"])
    def test_places_avoid_ports_on_which_a_process_listens_at_any_address(
        self, stack: ExitStack, low: int, host: str
    ) -> None:
        listener(stack, low, host)
        assert not is_free(low)
        assert book(stack, low, 2).place("engine", 0, 1) == RankAddress(HOST, (low + 1,))


class TestTakenPorts:
    def test_taken_ports_are_given_up_and_the_others_of_the_rank_are_free(
        self, stack: ExitStack, low: int
    ) -> None:
        ports, other = book(stack, low), book(stack, low)
        before = ports.place("engine", 0, 2)
        listener(stack, before.ports[0])
        assert ports.release_taken("engine", 0)
        given = {*ports.place("engine", 0, 2).ports, *other.place("engine", 0, 9).ports}
        assert given == {*range(low, low + 12)} - {before.ports[0]}

    def test_taken_ports_are_not_given_again_when_the_stranger_has_gone(
        self, stack: ExitStack, low: int
    ) -> None:
        ports = book(stack, low, 2)
        before = ports.place("engine", 0, 1)
        stranger = listener(stack, before.ports[0])
        assert ports.release_taken("engine", 0)
        stranger.close()
        after = ports.place("engine", 0, 1)
        assert after.ports != before.ports
        with pytest.raises(RendezvousError):
            ports.place("engine", 1, 1)

    def test_taken_ports_are_none_of_a_rank_without_any_or_with_free_ones(
        self, stack: ExitStack, low: int
    ) -> None:
        ports = book(stack, low)
        assert not ports.release_taken("engine", 0)
        before = ports.place("engine", 0, 2)
        assert not ports.release_taken("engine", 0)
        assert ports.place("engine", 0, 2) == before

    def test_taken_ports_are_not_those_of_connections_that_have_ended(
        self, stack: ExitStack, low: int
    ) -> None:
        server = listener(stack, low)
        client = socket.create_connection((HOST, low))
        accepted, _ = server.accept()
        server.close()
        accepted.close()
        client.close()
        assert is_free(low)


@pytest.mark.parametrize(
    ("number", "free"),
    [
        (errno.EADDRINUSE, False),
        (errno.EACCES, False),
        (errno.EAFNOSUPPORT, True),
        (errno.EADDRNOTAVAIL, True),
    ],
)
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_that_this_user_may_not_have_is_not_free(
    family: int, number: int, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host without IPv6 is none of that."""

    class Refusing(socket.socket):
        def bind(self, address: Any) -> None:
            if self.family == family:
                raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", Refusing)
    assert is_free(80) == free
