"""The certificate authority of a job.

Its key is derived from the token, so nothing but the token has to travel: who has it makes a certificate for its node.
Certificates are valid for a century, as the clocks of hosts may be wrong; they are of no use once their job has ended.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory

from unirun import atomic
from unirun.errors import JobError
from unirun.wire.credentials import (
    AUTHORITY,
    CERTIFICATE,
    INSECURE,
    NODE,
    TLS_FOLDER,
    Credentials,
    node_uri,
    server_name,
)
from unirun.wire.handshake import Token

_BEGIN = datetime(2000, 1, 1, tzinfo=UTC)
_END = datetime(2100, 1, 1, tzinfo=UTC)
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""The order of P-256 (FIPS 186-5, SP 800-186): private keys are less."""


def make_tls(
    folder: Path, token: Token, node: str, *, insecure: bool = False, addrs: Sequence[str] = ()
) -> None:
    """Write the files of TLS for `node` to the job's directory `folder`; with `insecure`, that there is none. The
    certificate also names the addresses `addrs`.

    Raises `JobError` when the package cryptography is missing, OSError.
    """
    with atomic.directory(folder / TLS_FOLDER) as tls:
        if insecure:
            atomic.replace(tls / INSECURE, b"")
        else:
            authority, certificate = issue(token, node, addrs)
            atomic.replace(tls / AUTHORITY, authority)
            atomic.replace(tls / CERTIFICATE, certificate)
        atomic.replace(tls / NODE, node.encode(errors="surrogateescape"))


_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def _usage(only: str) -> dict[str, bool]:
    return {name: name == only for name in _USAGES}


def issue(token: Token, node: str, addrs: Sequence[str] = ()) -> tuple[bytes, bytes]:
    """The authority's certificate, which is the same for everybody who has the token; and one for `node` and its
    `addrs`, with a new key. Both in PEM. Raises `JobError` when the package cryptography is missing.

    Keys are on P-256: gRPC, with which etcd is reached, does not know Ed25519.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError as error:
        raise JobError(
            "a job of several hosts needs the package cryptography", "pip install torch-unirun[hosts]"
        ) from error
    pem = serialization.Encoding.PEM
    curve, digest = ec.SECP256R1(), hashes.SHA256()
    number = int.from_bytes(hmac.digest(token, b"unirun ca 1", "sha512"))
    signer = ec.derive_private_key(number % (_ORDER - 1) + 1, curve)
    public = signer.public_key()
    point = public.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
    mark = hashlib.sha256(point).hexdigest()[:32]
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"unirun job {mark}")])
    authority_key = x509.SubjectKeyIdentifier.from_public_key(public)
    dated = x509.CertificateBuilder().not_valid_before(_BEGIN).not_valid_after(_END).issuer_name(issuer)
    authority = (
        dated.subject_name(issuer)
        .public_key(public)
        .serial_number(1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**_usage("key_cert_sign")), critical=True)
        .add_extension(authority_key, critical=False)
        .sign(signer, digest, ecdsa_deterministic=True)
    )
    key = ec.generate_private_key(curve)
    names: list[x509.GeneralName] = [
        x509.DNSName(server_name(node)),
        x509.UniformResourceIdentifier(node_uri(node)),
    ]
    names += [x509.IPAddress(ip_address(addr)) for addr in addrs]
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        dated.subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, server_name(node))]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**_usage("digital_signature")), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority_key), critical=False
        )
        .sign(signer, digest)
    )
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return authority.public_bytes(pem), private + certificate.public_bytes(pem)


@contextmanager
def temporary(token: Token, node: str, *, insecure: bool = False) -> Iterator[Credentials]:
    """Credentials for `node` in a folder of their own, before there is a directory of the job. Raises `JobError`."""
    with TemporaryDirectory(prefix="unirun-") as folder:
        make_tls(Path(folder), token, node, insecure=insecure)
        yield Credentials(token, node, Path(folder, TLS_FOLDER), insecure=insecure)
