"""The attacks that a stranger, or a process of another job, may try at a listener of a job of several hosts.

Each attack gets a `Target`, and returns when the listener has ended the connection.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.unit.wire.endpoints import credentials_in
from tests.waiting import WAIT_TIMEOUT
from unirun.wire.credentials import AUTHORITY, CERTIFICATE, Credentials, server_name
from unirun.wire.handshake import ANSWER_SIZE, HELLO_SIZE, PROOF_SIZE, Handshake, new_token


@dataclass(frozen=True)
class Target:
    """A listener on `node`. `inside` are the credentials of a process of the job, on another node; `folder` is for what
    an attack leaves behind."""

    addr: str
    port: int
    node: str
    inside: Credentials
    folder: Path
    patience: float = WAIT_TIMEOUT
    mark: str = field(default_factory=lambda: os.urandom(4).hex())

    @property
    def bomb(self) -> Path:
        """A file that is made by who unpickles what it gets."""
        return self.folder / f"exploded-{self.mark}"

    def connect(self) -> socket.socket:
        """A plain connection."""
        return socket.create_connection((self.addr, self.port), self.patience)

    def connect_tls(self, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
        """A connection with TLS, by default with the job's own certificate. Raises SSLError."""
        context = context or self.inside.client_context()
        assert context is not None
        return context.wrap_socket(self.connect(), server_hostname=server_name(self.node))

    def outsider(self) -> Credentials:
        """The credentials of the same node in another job."""
        return credentials_in(self.folder / f"other-{os.urandom(4).hex()}", new_token(), self.node)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[ssl.SSLSocket]:
        """A connection that has proved the token."""
        with self.connect_tls() as sock:
            handshake = Handshake(self.inside.token)
            sock.sendall(handshake.answer(exactly(sock, HELLO_SIZE)))
            handshake.check(exactly(sock, PROOF_SIZE))
            yield sock


def exactly(sock: socket.socket, size: int) -> bytes:
    """The next bytes."""
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        assert part, "the connection has ended"
        data += part
    return data


def ended(sock: socket.socket, sent: bytes = b"") -> None:
    """Return when the peer has closed the connection; it says nothing of use before."""
    heard = b""
    with contextlib.suppress(OSError):
        sock.sendall(sent)
        while data := sock.recv(1 << 16):
            heard += data
    assert len(heard) < 4096, "it has said a lot"


def a_connection_without_a_word(target: Target) -> None:
    target.connect().close()


def random_bytes(target: Target) -> None:
    with target.connect() as sock:
        ended(sock, os.urandom(1 << 16))


def plaintext(target: Target) -> None:
    """The answer of somebody who knows the token, to a listener without TLS."""
    with target.connect() as sock:
        ended(sock, Handshake(target.inside.token).answer(b"unirun\3" + bytes(32)))


def a_request_of_http(target: Target) -> None:
    with target.connect() as sock:
        ended(sock, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def tls_1_2(target: Target) -> None:
    context = target.inside.client_context()
    assert context is not None
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with contextlib.suppress(ssl.SSLError), target.connect_tls(context) as sock:
        raise AssertionError(f"it speaks {sock.version()}")


def _refused(target: Target, context: ssl.SSLContext) -> None:
    """With TLS 1.3 who connects hears of its refusal when it reads."""
    with contextlib.suppress(ssl.SSLError), target.connect_tls(context) as sock:
        assert sock.recv(1) == b"", "it goes on after a wrong certificate"


def no_certificate(target: Target) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    assert target.inside.tls is not None
    context.load_verify_locations(target.inside.tls / AUTHORITY)
    _refused(target, context)


def a_certificate_of_another_job(target: Target) -> None:
    tls = target.outsider().tls
    assert tls is not None
    _refused(target, _careless(tls / CERTIFICATE))


def a_certificate_of_a_foreign_authority_with_our_name(target: Target) -> None:
    assert target.inside.tls is not None
    ours = x509.load_pem_x509_certificate((target.inside.tls / AUTHORITY).read_bytes())
    key, node = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    forged = (
        x509.CertificateBuilder()
        .issuer_name(ours.subject)
        .subject_name(ours.subject)
        .public_key(node.public_key())
        .serial_number(7)
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2100, 1, 1, tzinfo=UTC))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name(target.node))]), critical=False)
        .sign(key, None)
    )
    pem = serialization.Encoding.PEM
    file = target.folder / f"forged-{target.mark}.pem"
    file.write_bytes(
        node.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + forged.public_bytes(pem)
    )
    _refused(target, _careless(file))


def _careless(certificate: Path) -> ssl.SSLContext:
    """Of somebody who does not care whom he speaks to."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(certificate)
    return context


def no_token(target: Target) -> None:
    with target.connect_tls() as sock:
        ended(sock, os.urandom(ANSWER_SIZE))


def a_wrong_token(target: Target) -> None:
    with target.connect_tls() as sock:
        hello = exactly(sock, HELLO_SIZE)
        ended(sock, Handshake(new_token()).answer(hello))


def a_replayed_handshake(target: Target) -> None:
    """The answer of a process with the token to another greeting."""
    with target.connect_tls() as sock:
        recorded = Handshake(target.inside.token).answer(exactly(sock, HELLO_SIZE))
        sock.sendall(recorded)
        exactly(sock, PROOF_SIZE)
    with target.connect_tls() as sock:
        exactly(sock, HELLO_SIZE)
        ended(sock, recorded)


OUTSIDE: tuple[Callable[[Target], None], ...] = (
    a_connection_without_a_word,
    random_bytes,
    plaintext,
    a_request_of_http,
    tls_1_2,
    no_certificate,
    a_certificate_of_another_job,
    a_certificate_of_a_foreign_authority_with_our_name,
    no_token,
    a_wrong_token,
    a_replayed_handshake,
)
"""Without the token."""


class _Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self._path), "w")


def a_frame_over_the_limit(target: Target) -> None:
    with target.admitted() as sock:
        ended(sock, struct.pack(">I", (16 << 20) + 1) + bytes(1 << 16))


def a_pickle_where_json_is_due(target: Target) -> None:
    bomb = pickle.dumps(_Bomb(target.bomb))
    with target.admitted() as sock:
        ended(sock, struct.pack(">I", len(bomb)) + bomb)
    assert not target.bomb.exists()


def noise_after_the_token(target: Target) -> None:
    with target.admitted() as sock:
        ended(sock, b"\xff" * (1 << 16))


INSIDE: tuple[Callable[[Target], None], ...] = (
    a_frame_over_the_limit,
    a_pickle_where_json_is_due,
    noise_after_the_token,
)
"""By a process that has the token, at a listener of messages."""


def flood(target: Target, count: int, origins: int) -> list[socket.socket]:
    """Open many silent connections from several addresses of this host; the listener may close them."""
    found = []
    for number in range(count):
        origin = f"127.7.{number % origins // 250}.{1 + number % origins % 250}"
        found.append(socket.create_connection((target.addr, target.port), target.patience, (origin, 0)))
    return found


def silence(target: Target, count: int) -> list[socket.socket]:
    """Connections that say nothing, half of them after the handshake of TLS."""
    return [target.connect_tls() if number % 2 else target.connect() for number in range(count)]
