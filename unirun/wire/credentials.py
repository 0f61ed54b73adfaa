"""The credentials that let a process into its job: the token, and for TCP the files of TLS.

One host: unix sockets and the token alone. Several hosts: TLS 1.3, inside of which both ends prove the token as well.
Both present a certificate of the job's own certificate authority (`unirun.wire.certificates`), which names a node.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirun.errors import JobError
from unirun.values import Value
from unirun.wire.handshake import Token, load_token

if TYPE_CHECKING:
    import ssl

TLS_FOLDER = "tls"
AUTHORITY = "ca.pem"
CERTIFICATE = "node.pem"
NODE = "node"
INSECURE = "insecure"
"""Files in that folder: the authority's certificate; the node's, with its key; its name; one that stands for no TLS."""

NODE_URI = "unirun:"
"""Beginning of the URI in a certificate that holds the node's name."""


class Credentials(Value):
    """The `token`, and of a job of several hosts the name of this `node` and the folder `tls`.

    With `insecure` TCP goes without TLS, and who listens or connects is not known by its node.
    """

    token: Token
    node: str = ""
    tls: Path | None = None
    insecure: bool = False

    def client_context(self, *, any_node: bool = False) -> ssl.SSLContext | None:
        """The TLS context of a client that names the node, or takes `any_node` of the job; None with `insecure`. Raises
        `JobError`."""
        import ssl

        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        if context is not None:
            context.check_hostname = not any_node
        return context

    def server_context(self) -> ssl.SSLContext | None:
        """The TLS context of a server; None with `insecure`. Raises `JobError`."""
        import ssl

        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def _context(self, side: int) -> ssl.SSLContext | None:
        import ssl

        if self.tls is None:
            raise JobError("this job is one of one host: it has no certificates", "start it with --hosts")
        if self.insecure:
            return None
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
        if side == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        try:
            context.load_verify_locations(self.tls / AUTHORITY)
            context.load_cert_chain(self.tls / CERTIFICATE)
        except OSError as error:
            raise JobError(
                f"the certificates in {self.tls} cannot be used: {error}", "start the job again"
            ) from error
        return context


def load_credentials(folder: Path) -> Credentials:
    """Read those in the directory of a job. Raises `JobError`."""
    token, tls = load_token(folder / "token"), folder / TLS_FOLDER
    try:
        node = (tls / NODE).read_text(errors="surrogateescape")
    except FileNotFoundError:
        return Credentials(token)
    except OSError as error:
        raise JobError(f"{tls / NODE} cannot be read: {error.strerror}") from error
    return Credentials(token, node, tls, insecure=(tls / INSECURE).exists())


def server_name(node: str) -> str:
    """The DNS name in the certificate of `node`, which TLS compares. A node's name may be longer than a DNS label, have
    capitals and underscores, or look like an address; its hash does not."""
    import hashlib

    return "n" + hashlib.sha256(_octets(node)).hexdigest()[:60]


def node_uri(node: str) -> str:
    """The URI in the certificate of `node`, from which its name can be read."""
    from urllib.parse import quote

    return NODE_URI + quote(_octets(node), safe="")


def node_of(connection: ssl.SSLObject | ssl.SSLSocket | None) -> str:
    """The name of the peer's node, which TLS has verified; empty without TLS."""
    found = connection.getpeercert() if connection is not None else None
    from urllib.parse import unquote

    names: Any = (found or {}).get("subjectAltName", ())
    uri = next((value for kind, value in names if kind == "URI"), "")
    return unquote(uri.removeprefix(NODE_URI), errors="surrogateescape")


def _octets(node: str) -> bytes:
    return node.encode(errors="surrogateescape")
