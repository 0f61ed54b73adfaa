"""Mutual authentication: both ends prove that they know the job's token before any payload is parsed.

Three messages of fixed size, without JSON and without lengths sent by the peer::

    server → client   b"unirun" version(1) nonce_s(32)
    client → server   b"unirun" version(1) nonce_c(32) HMAC(token, "client" nonce_s nonce_c)
    server → client   HMAC(token, "server" nonce_c nonce_s)

HMAC-SHA256, compared in constant time. `Handshake` does no I/O; `aio` and `blocking` move the bytes.
"""

from __future__ import annotations

import hmac
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Generic, NewType, TypeVar

from unirun.errors import AuthError, JobError, WireError
from unirun.wire.frames import VERSION

ACCEPT_RETRY_INTERVAL = 0.1
"""Seconds until a listener that is out of descriptors accepts again."""

Token = NewType("Token", bytes)

_MAGIC = b"unirun" + bytes([VERSION])
_NONCE = 32
_MAC = 32

HELLO_SIZE = len(_MAGIC) + _NONCE
ANSWER_SIZE = HELLO_SIZE + _MAC
PROOF_SIZE = _MAC
HANDSHAKE_TIMEOUT = 10.0
"""Seconds within which a peer must prove the token."""


def new_token() -> Token:
    """Return 256 random bits."""
    return Token(os.urandom(32))


def load_token(path: Path, remedy: str = "") -> Token:
    """Read the token in `path`. Raises `JobError` when it is missing, malformed, or readable by other users. `remedy`
    is that for a file which the user has made."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise ValueError("it is not a regular file")
        mode = info.st_mode & 0o077
        token = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise JobError(
            f"no token can be read from {path}: {problem}", remedy or "is the job still there?"
        ) from error
    if mode:
        raise JobError(f"{path} can be read by others (mode {mode:03o})", f"chmod 600 {path}")
    if len(token) != 32:
        raise JobError(f"{path} holds {len(token)} bytes, expected 32", remedy or "start the job again")
    return Token(token)


class Handshake:
    """One end of a handshake: `hello` and `proof` are the server's, `answer` and `check` the client's."""

    def __init__(self, token: Token, nonce: bytes | None = None) -> None:
        self._token = token
        self._nonce = nonce or os.urandom(_NONCE)
        self._peer_nonce = b""

    def hello(self) -> bytes:
        """Return the first message of the server."""
        return _MAGIC + self._nonce

    def answer(self, hello: bytes) -> bytes:
        """Return the client's answer to the server's `hello`. Raises `AuthError`."""
        self._peer_nonce = _peer_nonce(hello)
        return _MAGIC + self._nonce + _mac(self._token, b"client", self._peer_nonce, self._nonce)

    def proof(self, answer: bytes) -> bytes:
        """Check the client's `answer` and return the server's proof. Raises `AuthError`."""
        peer_nonce = _peer_nonce(answer[:HELLO_SIZE])
        expected = _mac(self._token, b"client", self._nonce, peer_nonce)
        if not hmac.compare_digest(expected, answer[HELLO_SIZE:]):
            raise AuthError("the peer does not know this job's token", "it may belong to another job")
        return _mac(self._token, b"server", peer_nonce, self._nonce)

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


# Admission of connections to the handshake in which they prove the token. They are strangers until then. No I/O.
#
# Any machine that can send packets to a listener can connect, and a handshake of TLS takes processor time and memory.
# So each address has limits that hold before any TLS: connections that wait, connections in a handshake, and, for an
# address that is not known, handshakes in a second. Addresses take turns. Those of the job's own hosts are *known*,
# come first, and do not share their limits with others. An address from which the token was proved once is known from
# then on. On a unix socket all connections are this user's; they have no address, and are known.

BURST = 20
"""Refusals that are reported at once; after these one a second, as whoever can connect must not fill a log."""

KNOWN, EACH, TOGETHER = 64, 16, 64
"""Maximum of handshakes at one time: of a known address, of one that is not known, of all that are not known."""

RATE, RATE_TOGETHER = 10.0, 100.0
"""Handshakes a second of one address that is not known, and of all of these; bursts are `EACH` and `TOGETHER`."""

QUEUE_KNOWN, QUEUE, QUEUE_TOGETHER = 4096, 64, 512
"""Maximum of waiting connections: of a known address, of one that is not known, of all that are not known."""

MIN_HANDSHAKE_SECONDS = 1.0
"""Seconds after which a handshake may be ended to make room for another."""

CONNECTION_QUEUE_TIMEOUT = 10.0
"""Seconds after which a connection that waits is refused."""

OVERDUE_POLL_INTERVAL = 0.05
"""Seconds until the next look for connections that are `overdue`, while some wait."""

ORIGINS = 4096
"""Number of addresses whose connections are counted; when there are more, idle ones are forgotten."""

C = TypeVar("C", bound=Hashable)


class _Bucket:
    """Tokens that come at a `rate` a second, up to `most`."""

    def __init__(self, most: float, rate: float, now: float) -> None:
        self._most, self._rate, self._left, self._since = most, rate, most, now

    def left(self, now: float) -> float:
        self._left = min(self._left + (now - self._since) * self._rate, self._most)
        self._since = now
        return self._left

    def full(self, now: float) -> bool:
        return self.left(now) >= self._most

    def take(self, now: float) -> None:
        self._left = self.left(now) - 1


class _Origin(Generic[C]):
    """The connections from one address: those that wait, and those in a handshake, each with when that has begun."""

    def __init__(self, name: str, known: bool, now: float) -> None:
        self.name, self.known = name, known
        self.waiting: deque[tuple[C, float]] = deque()
        self.begun: dict[C, float] = {}
        self.bucket = _Bucket(EACH, RATE, now)

    def may_begin(self, now: float) -> bool:
        if self.known:
            return len(self.begun) < KNOWN
        return len(self.begun) < EACH and self.bucket.left(now) >= 1


class Strangers(Generic[C]):
    """The connections of one listener that have not proved the token, and how many of them were refused.

    `known` says whether an address is one of the job's hosts. `tell` gets a text for a refused connection, unless there
    are too many, and the number of refusals so far. `clock` gives the time in seconds.
    """

    def __init__(
        self,
        known: Callable[[str], bool],
        tell: Callable[[str, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_known, self._tell, self._clock = known, tell, clock
        self._origins: dict[str, _Origin[C]] = {}
        self._of: dict[C, _Origin[C]] = {}
        self._addresses: dict[C, str] = {}
        # Origins with connections that wait, in the order of their turns.
        self._turns: dict[str, _Origin[C]] = {}
        self._proved: set[str] = set()
        self._begun = self._queued = 0  # of addresses that are not known
        self._together = _Bucket(TOGETHER, RATE_TOGETHER, clock())
        self._refused, self._reports = 0, _Bucket(BURST, 1.0, clock())

    def __iter__(self) -> Iterator[C]:
        return iter(tuple(self._of))

    @property
    def waiting(self) -> bool:
        """True if any connection waits."""
        return bool(self._turns)

    def arrives(self, connection: C, origin: str) -> C | None:
        """Add a connection from the address `origin`. Returns the one to close, this or another; None if there is
        room."""
        self._addresses[connection] = origin
        out = self._add(connection, origin, self._clock())
        if out is not None:
            self.refused("too many connections of its kind wait", self._addresses.pop(out))
        return out

    def _add(self, connection: C, origin: str, now: float) -> C | None:
        found = self._origin(origin, now)
        if len(found.waiting) >= (QUEUE_KNOWN if found.known else QUEUE):
            return connection
        out = None
        if not found.known and self._queued >= QUEUE_TOGETHER:
            if found.waiting:
                return connection
            others = (each for each in self._turns.values() if not each.known)
            longest = max(others, key=lambda each: len(each.waiting))
            if len(longest.waiting) == 1:
                return connection
            out = self._leave(longest)
        found.waiting.append((connection, now))
        self._of[connection] = found
        self._queued += not found.known
        self._turns.setdefault(found.name, found)
        return out

    def next(self) -> C | None:
        """Begin the handshake of the connection whose turn it is, and return it; None when none may begin now."""
        now = self._clock()
        room = self._begun < TOGETHER and self._together.left(now) >= 1
        for known in (True, False):
            if not known and not room:
                return None
            for found in self._turns.values():
                if found.known == known and found.may_begin(now):
                    connection = self._leave(found)
                    self._of[connection], found.begun[connection] = found, now
                    if not known:
                        self._begun += 1
                        self._together.take(now)
                        found.bucket.take(now)
                    if found.waiting:
                        self._turns[found.name] = self._turns.pop(found.name)
                    return connection
        return None

    def overdue(self) -> list[C]:
        """Remove and return the connections to close: those that have waited too long, and handshakes that make room
        for others."""
        now, found = self._clock(), []
        for each in tuple(self._turns.values()):
            while each.waiting and each.waiting[0][1] + CONNECTION_QUEUE_TIMEOUT <= now:
                found.append(self._leave(each))
                self.refused("it has waited for its turn too long", self._addresses.pop(found[-1]))
            if len(each.begun) >= (KNOWN if each.known else EACH):
                found += self._make_room(each.begun.items(), len(each.waiting), now)
        if self._begun >= TOGETHER:
            begun = (pair for each in self._origins.values() if not each.known for pair in each.begun.items())
            found += self._make_room(sorted(begun, key=lambda pair: pair[1]), self._queued, now)
        return found

    def _make_room(self, begun: Iterable[tuple[C, float]], count: int, now: float) -> list[C]:
        """End the first `count` of the handshakes in `begun` that have had their time."""
        out = [connection for connection, since in begun if since + MIN_HANDSHAKE_SECONDS <= now][:count]
        for connection in out:
            self.ends(connection, WireError("it has not proved the token yet, and others wait"))
        return out

    def ends(self, connection: C, error: BaseException | None) -> None:
        """Remove a handshake that has ended with `error`, None if the token was proved. Does nothing for one that was
        removed."""
        found = self._of.pop(connection, None)
        if found is None:
            return
        del found.begun[connection]
        self._begun -= not found.known
        origin = self._addresses.pop(connection)
        if error is not None:
            self.refused(error, origin)
        elif not found.known:
            self._trust(found)

    def refused(self, error: BaseException | str, origin: str = "") -> None:
        """Count the refusal of a connection from the address `origin`, and report it unless there were too many."""
        now = self._clock()
        self._refused += 1
        if self._reports.left(now) >= 1:
            self._reports.take(now)
            whence = f" from {origin}" if origin else ""
            self._tell(f"a connection{whence} was refused: {error}", self._refused)

    def _trust(self, found: _Origin[C]) -> None:
        self._begun -= len(found.begun)
        self._queued -= len(found.waiting)
        found.known = True
        self._proved.add(found.name)

    def _leave(self, found: _Origin[C]) -> C:
        """Take the first that waits."""
        connection, _ = found.waiting.popleft()
        del self._of[connection]
        self._queued -= not found.known
        if not found.waiting:
            del self._turns[found.name]
        return connection

    def _origin(self, address: str, now: float) -> _Origin[C]:
        known = not address or self._is_known(address)
        name = address if known else _network(address)
        found = self._origins.get(name)
        if found is None:
            if len(self._origins) >= ORIGINS:
                self._forget(now)
            found = self._origins[name] = _Origin(name, known or name in self._proved, now)
        elif known and not found.known:
            self._trust(found)
        return found

    def _forget(self, now: float) -> None:
        """Forget addresses without connections: all whose count is that of a new one; if there are none, the oldest."""
        idle = [each for each in self._origins.values() if not each.waiting and not each.begun]
        for each in [each for each in idle if each.known or each.bucket.full(now)] or idle[: ORIGINS // 2]:
            del self._origins[each.name]


def _network(address: str) -> str:
    """The addresses that count as one: a single IPv4 address, or an IPv6 network of 64 bits."""
    import ipaddress

    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(parsed, ipaddress.IPv6Address):
        return address
    return str(parsed.ipv4_mapped or ipaddress.IPv6Address(int(parsed) >> 64 << 64))
