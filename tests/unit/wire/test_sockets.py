"""Sockets of IPv4 and IPv6, their ends, and the errors of TLS in words."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from tests.unit.wire.endpoints import NODE, Endpoint
from unirun.errors import AuthError, RendezvousError
from unirun.wire.address import TcpAddress
from unirun.wire.credentials import server_name
from unirun.wire.sockets import handshake_error, listen_tcp, not_the_node, shut, tcp_address


@pytest.mark.parametrize("addr", ["127.0.0.1", "::1"])
def test_the_address_of_a_listener_is_the_one_at_which_it_is_found(addr: str) -> None:
    with listen_tcp(addr) as listener:
        found = tcp_address(listener, NODE)
        assert found == TcpAddress(addr, listener.getsockname()[1], NODE)
        socket.create_connection((found.addr, found.port)).close()
        assert not listener.get_inheritable()


def test_a_port_that_is_in_use_is_to_be_another_one() -> None:
    with listen_tcp("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            RendezvousError, match=f"port {port}: Address already in use; choose another port"
        ):
            listen_tcp("127.0.0.1", port)


def test_a_stream_that_is_shut_has_ended_in_both_directions() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        shut(ours)
        assert ours.recv(1) == b""
        assert theirs.recv(1) == b""
        with pytest.raises(BrokenPipeError):
            theirs.send(b"x")
    shut(ours)  # closed already: no error


def refusal(context: ssl.SSLContext, said: bytes, **options: object) -> ssl.SSLError:
    """The error of an end of TLS that was told `said`."""
    coming = ssl.MemoryBIO()
    coming.write(said)
    end = context.wrap_bio(coming, ssl.MemoryBIO(), **options)  # type: ignore[arg-type]
    with pytest.raises(ssl.SSLError) as caught:
        end.do_handshake()
    return caught.value


def test_what_is_wrong_with_tls_is_told_in_words(tmp_path: Path) -> None:
    endpoint = Endpoint("tls", tmp_path)
    server, client = endpoint.credentials.server_context(), endpoint.stranger.client_context()
    assert server is not None
    assert client is not None
    asked = refusal(server, b"GET / HTTP/1.1\r\n\r\n", server_side=True)
    assert "TLS failed: http request;" in str(handshake_error(asked))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=server_name(NODE))
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (ours, theirs):
        with pytest.raises(ssl.SSLWantReadError):
            end.do_handshake()
    with pytest.raises(ssl.SSLCertVerificationError) as caught:
        ours.do_handshake()
    address = TcpAddress("10.0.0.1", 4711, NODE)
    told = not_the_node(address, caught.value)
    assert isinstance(told, AuthError)
    assert f"what listens at 10.0.0.1:4711 is not node {NODE} of this job: " in str(told)
    assert caught.value.verify_message in str(told)
    without = ssl.SSLError(1, "SOME_WORDS of OpenSSL")
    without.reason = None  # type: ignore[assignment]
    assert "some words of openssl" in str(handshake_error(without))
