"""TLS to etcd: load the files, and diagnose failed handshakes.

gRPC only reports that it cannot connect. `diagnose` then repeats the handshake with Python's ssl, to get the reason.
"""

from __future__ import annotations

import socket
import ssl

from unirun.errors import StoreRefused
from unirun.observe.jobdir import expanded
from unirun.rendezvous.store._grpc import grpc
from unirun.rendezvous.store.address import EtcdAddress


def credentials(address: EtcdAddress) -> grpc.ChannelCredentials | None:
    """Load the credentials for gRPC; None without TLS. Raises `StoreRefused` for missing or invalid files."""
    if address.cacert is None:
        return None
    _context(address)
    cacert, key, cert = (
        expanded(name).read_bytes() if name else None for name in (address.cacert, address.key, address.cert)
    )
    return grpc.ssl_channel_credentials(cacert, key, cert)


def _context(address: EtcdAddress) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    names = [name for name in (address.cacert, address.cert, address.key) if name]
    files = [expanded(name) for name in names]
    for file in files:
        try:
            file.read_bytes()
        except OSError as error:
            raise StoreRefused(
                f"{file}, which the store's URL names, cannot be read: {error.strerror}",
                "see its path and owner",
            ) from error
    try:
        context.load_verify_locations(files[0])
        if address.cert:
            cert, key = files[1:]
            context.load_cert_chain(
                cert, key, ""
            )  # with no password argument OpenSSL would prompt on the terminal
    except (ssl.SSLError, ValueError) as error:
        raise StoreRefused(
            f"{', '.join(map(str, files))}: not a certificate authority, or not a certificate with its key"
            f" ({error})",
            "they have to be in PEM, and the key without a passphrase",
        ) from error
    return context


def diagnose(address: EtcdAddress, endpoint: str, timeout: float) -> StoreRefused | None:
    """Return why TLS with the server at `endpoint` fails, None when it has another problem."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    where = (host, int(port))
    try:
        with socket.create_connection(where, timeout) as stream:
            if address.cacert is None:
                return _wants_tls(stream, endpoint)
            refused = _handshake(address, stream, host, endpoint)
        if refused is None:
            with socket.create_connection(where, timeout) as stream:
                refused = _speaks_plainly(stream, endpoint)
        return refused
    except OSError:
        return None  # not reachable


def _wants_tls(stream: socket.socket, endpoint: str) -> StoreRefused | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Safe: nothing is sent over the connection.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(stream).close()
    except OSError:
        return None
    return StoreRefused(
        f"etcd at {endpoint} speaks TLS, and the store's URL does not",
        "add cacert=FILE (who signed its certificate) to the URL",
    )


def _handshake(address: EtcdAddress, stream: socket.socket, host: str, endpoint: str) -> StoreRefused | None:
    try:
        with _context(address).wrap_socket(stream, server_hostname=host) as secure:
            secure.recv(1)  # in TLS 1.3 a server rejects a client certificate after the handshake
    except ssl.SSLCertVerificationError as error:
        return StoreRefused(
            f"the certificate of etcd at {endpoint} is not trusted: {error.verify_message}",
            "cacert=… has to be who signed it, and it has to name the host as the store's URL does",
        )
    except OSError as error:
        words = (getattr(error, "reason", None) or "").lower().replace("_", " ")
        if "certificate" not in words and "unknown ca" not in words:
            return None
        if address.cert is None:
            return StoreRefused(
                f"etcd at {endpoint} wants a client certificate", "add cert=FILE&key=FILE to the store's URL"
            )
        return StoreRefused(
            f"etcd at {endpoint} refuses the client certificate {address.cert}: {words}",
            "see who signed it, and until when it is valid:"
            f" openssl x509 -noout -issuer -dates -in {address.cert}",
        )
    return None


def _speaks_plainly(stream: socket.socket, endpoint: str) -> StoreRefused | None:
    """Detect HTTP/2 without TLS: the server first sends its settings, a frame of type 4 (RFC 9113, 3.4)."""
    stream.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    if stream.recv(9)[3:4] != b"\x04":
        return None
    return StoreRefused(
        f"etcd at {endpoint} does not speak TLS", "leave cacert=… out, or start it with certificates"
    )
