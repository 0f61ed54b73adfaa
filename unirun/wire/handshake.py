"""Mutual authentication: both ends prove that they know the job's token before any payload is parsed.

Three messages of fixed size, without JSON and without lengths sent by the peer::

    server → client   b"unirun" version(1) nonce_s(32)
    client → server   b"unirun" version(1) nonce_c(32) HMAC(token, "client" nonce_s nonce_c)
    server → client   HMAC(token, "server" nonce_c nonce_s)

HMAC-SHA256, compared in constant time. The classes do no I/O; `aio` and `blocking` move the bytes.
"""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path
from typing import NewType

from unirun.errors import AuthError, JobError
from unirun.wire.frames import VERSION

Token = NewType("Token", bytes)

_MAGIC = b"unirun" + bytes([VERSION])
_NONCE = 32
_MAC = 32

HELLO_SIZE = len(_MAGIC) + _NONCE
ANSWER_SIZE = HELLO_SIZE + _MAC
PROOF_SIZE = _MAC
DEADLINE = 10.0
"""Seconds within which a peer must prove the token."""


def new_token() -> Token:
    """Return 256 random bits."""
    return Token(os.urandom(32))


def load_token(path: Path) -> Token:
    """Read the token in `path`. Raises `JobError` when it is missing, malformed, or readable by other users."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise ValueError("it is not a regular file")
        mode = info.st_mode & 0o077
        token = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise JobError(f"no token can be read from {path}: {error}", "is the job still there?") from error
    if mode:
        raise JobError(f"{path} can be read by others (mode {mode:03o})", f"chmod 600 {path}")
    if len(token) != 32:
        raise JobError(f"{path} holds {len(token)} bytes, expected 32", "start the job again")
    return Token(token)


class ServerHandshake:
    """The accepting end."""

    def __init__(self, token: Token, nonce: bytes | None = None) -> None:
        self._token = token
        self._nonce = nonce or os.urandom(_NONCE)

    def hello(self) -> bytes:
        """Return the first message of the server."""
        return _MAGIC + self._nonce

    def proof(self, answer: bytes) -> bytes:
        """Check the client's `answer` and return the server's proof. Raises `AuthError`."""
        peer_nonce = _peer_nonce(answer[:HELLO_SIZE])
        expected = _mac(self._token, b"client", self._nonce, peer_nonce)
        if not hmac.compare_digest(expected, answer[HELLO_SIZE:]):
            raise AuthError("the peer does not know this job's token", "it may belong to another job")
        return _mac(self._token, b"server", peer_nonce, self._nonce)


class ClientHandshake:
    """The connecting end."""

    def __init__(self, token: Token, nonce: bytes | None = None) -> None:
        self._token = token
        self._nonce = nonce or os.urandom(_NONCE)
        self._peer_nonce = b""

    def answer(self, hello: bytes) -> bytes:
        """Return the client's answer to the server's `hello`. Raises `AuthError`."""
        self._peer_nonce = _peer_nonce(hello)
        return _MAGIC + self._nonce + _mac(self._token, b"client", self._peer_nonce, self._nonce)

    def check(self, proof: bytes) -> None:
        """Check the server's `proof`. Raises `AuthError` when the server does not know the token."""
        expected = _mac(self._token, b"server", self._nonce, self._peer_nonce)
        if not hmac.compare_digest(expected, proof):
            raise AuthError("the server does not know this job's token", "it may belong to another job")


def _peer_nonce(hello: bytes) -> bytes:
    if len(hello) != HELLO_SIZE or not hello.startswith(b"unirun"):
        raise AuthError("the peer does not speak unirun's wire")
    if not hello.startswith(_MAGIC):
        raise AuthError(
            f"the peer speaks version {hello[len(b'unirun')]} of the wire, this is version {VERSION}",
            "use the same unirun everywhere",
        )
    return hello[len(_MAGIC) :]


def _mac(token: Token, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token, side + first + second, "sha256")
