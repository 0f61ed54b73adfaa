"""The protocols `Store` and `Watch`, the addresses of stores, and the checks that all of them share.

Keys are paths such as ``jobs/run1/head``, relative to the prefix in the store's URL; values are text. A key never
ends with ``/`` and a prefix always does, so that ``jobs/run1/`` does not match ``jobs/run10``. Every change has a
revision, which grows by one with each transaction that changes something.

All methods block, have a deadline, and raise `StoreError`: `StoreAway` when nothing was done, `OutcomeUnknown` when
a write may have been done. They are thread-safe.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol
from urllib.parse import quote, unquote

from unirun.errors import Fault, StoreRefused, UsageError
from unirun.values import Value

MAX_CHANGES = 128
"""Maximum number of comparisons, and of changes, of a transaction: etcd's default."""

MAX_SIZE = 1024 * 1024
"""Maximum size in bytes of all keys and values that a transaction puts. etcd's default is 1.5 MiB, with overhead."""


def clock() -> float:
    """Seconds since the boot, including time suspended; the same in all processes of a host."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class KeyValue(Value):
    """A key with its value. `revision` is that of the transaction that put it last."""

    key: str
    value: str
    revision: int


class Listing(Value):
    """All items under a prefix, in order of keys, as of `revision`."""

    items: tuple[KeyValue, ...]
    revision: int


class Lease(Value):
    """Expires `ttl` seconds after it was last kept alive, which deletes its keys. A store may grant a longer lease than
    requested."""

    id: int
    ttl: float


class ValueIs(Value):
    """True when `key` exists and has `value`."""

    key: str
    value: str


class RevisionIs(Value):
    """True when `key` was put last by the transaction `revision`; with 0, when it does not exist."""

    key: str
    revision: int


Compare = ValueIs | RevisionIs


class Put(Value):
    """Set `key` to `value`; with a lease, the key is deleted when the lease ends."""

    key: str
    value: str
    lease: Lease | None = None


class Outcome(Value):
    """The outcome of a transaction: true if all comparisons held and it was made; and the revision after it."""

    succeeded: bool
    revision: int


class Change(Value):
    """One key was put or deleted by the transaction `revision`; `value` is empty for a deletion."""

    kind: Literal["put", "delete"]
    key: str
    value: str
    revision: int


class Watch(Protocol):
    """The changes under a prefix, in order and exactly once, also across restarts of the server."""

    def changes(self, timeout: float) -> tuple[Change, ...] | Listing:
        """Return the next changes, whole transactions only; empty when there are none within `timeout` seconds.

        Returns a `Listing` instead when unread changes have been compacted away: it has the present items; all others
        are deleted. Raises `StoreAway` when the server cannot be reached for `timeout` seconds; the next call
        continues at the same position.
        """

    def close(self) -> None:
        """Stop; a thread blocked in `changes` gets an empty result. Safe to call twice."""


class Store(Protocol):
    """A key-value store with transactions, leases and watches."""

    url: str
    """Its URL, without passwords."""

    def get(self, key: str) -> KeyValue | None:
        """Return the item of `key` or None; never older than what this object has written or read before."""

    def get_prefix(self, prefix: str) -> Listing:
        """Return all items under `prefix`, which ends with ``/`` or is empty (the whole store)."""

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        """Make all changes atomically if every comparison is true, else none.

        A delete that ends with ``/`` deletes the whole prefix; deleting a missing key is no change. No key may be
        changed twice; `MAX_CHANGES` and `MAX_SIZE` apply. Raises `LeaseExpired` for a put with an expired lease."""

    def grant(self, ttl: float) -> Lease:
        """Create a lease of at least `ttl` seconds."""

    def keep_alive(self, lease: Lease) -> None:
        """Renew the lease. Raises `LeaseExpired`."""

    def revoke(self, lease: Lease) -> None:
        """End a lease now and delete its keys. An expired lease is no error."""

    def watch(self, prefix: str, from_revision: int) -> Watch:
        """Watch changes under `prefix`, from the transaction `from_revision` (inclusive) on."""

    def close(self) -> None:
        """Close connections and files; leases last until they expire. Safe to call twice."""


# Argument checks shared by all stores, so that all accept the same calls.


def check_key(key: str) -> None:
    """Raise ValueError for an invalid key."""
    if not key or key.endswith("/"):
        raise ValueError(f"{key!r} is no key: a key is not empty and does not end with '/'")
    key.encode()  # raises for lone surrogates


def check_prefix(prefix: str) -> None:
    """Raise ValueError for an invalid prefix."""
    if prefix and not prefix.endswith("/"):
        raise ValueError(f"{prefix!r} is no prefix: a prefix is empty or ends with '/'")


def check_ttl(ttl: float) -> None:
    """Raise ValueError for a lease that is not positive and finite."""
    if not 0 < ttl < math.inf:
        raise ValueError(f"a lease cannot last {ttl} seconds")


def check_txn(compares: Sequence[Compare], puts: Sequence[Put], deletes: Sequence[str]) -> None:
    """Refuse a transaction that is too large or changes a key twice. Raises ValueError, `StoreRefused`."""
    for compare in compares:
        check_key(compare.key)
    for put in puts:
        check_key(put.key)
    changes = len(puts) + len(deletes)
    if changes > MAX_CHANGES or len(compares) > MAX_CHANGES:
        raise ValueError(
            f"a transaction has at most {MAX_CHANGES} comparisons and as many changes;"
            f" this one has {len(compares)} and {changes}"
        )
    size = sum(len(put.key.encode()) + len(put.value.encode()) for put in puts)
    if size > MAX_SIZE:
        raise StoreRefused(
            f"a transaction of {size} bytes is too large: {MAX_SIZE} is the most",
            "write it in several parts",
        )
    _check_overlaps([put.key for put in puts], deletes)


def _check_overlaps(puts: list[str], deletes: Sequence[str]) -> None:
    targets = {*puts, *deletes}
    if len(targets) < len(puts) + len(deletes):
        raise ValueError("a transaction changes the same key twice")
    everything = [prefix for prefix in deletes if not prefix or prefix.endswith("/")]
    for prefix in everything:
        for target in targets:
            if target != prefix and target.startswith(prefix):
                raise ValueError(f"a transaction deletes {prefix!r} and changes {target!r} besides")


# Parse a store's URL: ``sqlite:PATH`` or ``etcd://HOST[:PORT],…?OPTION=VALUE&…``. Opens nothing.
#
# The options of etcd: ``prefix`` (``/unirun/``), ``timeout`` (5 s), ``cacert``, ``cert``, ``key`` (PEM files), ``user``
# and ``password_file``. A URL never has a password, as URLs appear in process lists and logs.

DEFAULT_PREFIX = "/unirun/"
DEFAULT_TIMEOUT = 5.0
DEFAULT_PORT = 2379
MAX_TIMEOUT = 3600.0

PASSWORD_VARIABLE = "UNIRUN_STORE_PASSWORD"

_ENDPOINT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?")
_OPTIONS = ("prefix", "timeout", "cacert", "cert", "key", "user", "password_file")
_FORMS = "write sqlite:PATH or etcd://HOST:PORT,HOST:PORT"
_NO_PASSWORD = f"put the password into {PASSWORD_VARIABLE}, or into a file that password_file=… names"


class SqliteAddress(Value):
    """A store in the file `path`."""

    path: str

    def __str__(self) -> str:
        return f"sqlite:{self.path}"


class EtcdAddress(Value):
    """A store in etcd, under keys that begin with `prefix`, which ends with ``/``. `timeout` is in seconds. `cacert`
    turns on TLS."""

    endpoints: tuple[str, ...]
    prefix: str = DEFAULT_PREFIX
    timeout: float = DEFAULT_TIMEOUT
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password_file: str | None = None

    def __str__(self) -> str:
        options = {name: getattr(self, name) for name in _OPTIONS}
        options["timeout"] = f"{self.timeout!r}"
        query = "&".join(f"{name}={quote(value)}" for name, value in options.items() if value is not None)
        return f"etcd://{','.join(self.endpoints)}?{query}"


def parse_address(url: str) -> SqliteAddress | EtcdAddress:
    """Parse a store's URL. Raises `UsageError` with every fault, one a line."""
    faults: list[Fault] = []
    address: SqliteAddress | EtcdAddress | None = None
    scheme, colon, rest = url.partition(":")
    match scheme if colon else "":
        case "sqlite":
            address = _sqlite(rest, faults)
        case "etcd":
            address = _etcd(rest, faults)
        case _:
            problem = f"{scheme[:20]!r} is no scheme; a store's URL begins with sqlite: or etcd://"
            faults.append(Fault("", problem, _FORMS))
    if faults or address is None:
        raise UsageError("\n".join(f"the store's URL: {fault}" for fault in faults))
    return address


def _sqlite(path: str, faults: list[Fault]) -> SqliteAddress:
    if not path:
        faults.append(Fault("", "it names no file", "write sqlite:PATH"))
    if path.startswith("//") and not path.startswith("///"):
        faults.append(Fault("", "a file is on no host", "write sqlite:PATH, without the two slashes"))
    if "?" in path:
        faults.append(Fault("", "sqlite: takes no options", "leave out what begins with '?'"))
    if "\0" in path:
        faults.append(Fault("", "a path has no NUL", "write sqlite:PATH"))
    return SqliteAddress(path)


def _etcd(rest: str, faults: list[Fault]) -> EtcdAddress:
    authority, _, query = rest.removeprefix("//").partition("?")
    if not rest.startswith("//"):
        faults.append(Fault("", "two slashes are missing", "write etcd://HOST:PORT"))
    if "@" in authority:
        # Not shown, as a password may be anywhere in it.
        faults.append(
            Fault("", "a user or a password stands before the hosts", f"write ?user=…; {_NO_PASSWORD}")
        )
        return EtcdAddress(())
    hosts, slash, path = authority.partition("/")
    if slash and path:
        faults.append(Fault("", f"a path /{path} follows the hosts", f"write ?prefix=/{path}"))
    options = _options(query, faults)
    _check_options(options, faults)
    return EtcdAddress(
        endpoints=_endpoints(hosts, faults),
        prefix=_prefix(options.get("prefix", DEFAULT_PREFIX)),
        timeout=_timeout(options.get("timeout"), faults),
        **{name: options.get(name) for name in ("cacert", "cert", "key", "user", "password_file")},
    )


def _endpoints(hosts: str, faults: list[Fault]) -> tuple[str, ...]:
    endpoints: list[str] = []
    for each in hosts.split(","):
        match = _ENDPOINT.fullmatch(each)
        port = int(match["port"] or DEFAULT_PORT) if match else 0
        if match is None or not 0 < port < 65536:
            what = f"{each!r} is no host" if each else "a host is missing"
            faults.append(Fault("", what, "write HOST:PORT, with commas between several"))
            continue
        endpoint = f"{match['host']}:{port}"
        if endpoint in endpoints:
            faults.append(Fault("", f"{endpoint} is named twice", "name each member once"))
        endpoints.append(endpoint)
    return tuple(endpoints)


def _options(query: str, faults: list[Fault]) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if name in ("password", "passwd", "pass"):
            faults.append(Fault("", "it has a password", _NO_PASSWORD))
        elif name not in _OPTIONS:
            faults.append(Fault("", f"there is no option {name!r}", f"there are {', '.join(_OPTIONS)}"))
        elif name in options:
            faults.append(Fault("", f"{name} is given twice", "give it once"))
        elif not equals or not value:
            faults.append(Fault("", f"{name} has no value", f"write {name}=…, or leave it out"))
        elif not _is_text(value):
            faults.append(Fault(name, "it is no text", "write it in UTF-8"))
        else:
            options[name] = unquote(value)
    return options


def _check_options(options: Mapping[str, str], faults: list[Fault]) -> None:
    if ("cert" in options) != ("key" in options):
        there, missing = ("cert", "key") if "cert" in options else ("key", "cert")
        faults.append(Fault("", f"{there} is given, and {missing} is not", f"add {missing}=FILE"))
    if "cert" in options and "cacert" not in options:
        faults.append(
            Fault("", "a client certificate without cacert", "add cacert=FILE: who signed the servers'")
        )
    if "password_file" in options and "user" not in options:
        faults.append(Fault("", "password_file is given, and user is not", "add user=NAME"))


def _is_text(value: str) -> bool:
    """Return False for bytes of the command line that are no UTF-8: a URL cannot have them."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _prefix(prefix: str) -> str:
    return prefix if prefix.endswith("/") else f"{prefix}/"


def _timeout(text: str | None, faults: list[Fault]) -> float:
    if text is None:
        return DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT:
        faults.append(
            Fault("", f"timeout={text} is no time", f"write seconds, more than 0, at most {MAX_TIMEOUT:g}")
        )
        return DEFAULT_TIMEOUT
    return seconds
