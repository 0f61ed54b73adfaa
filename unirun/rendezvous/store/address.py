"""Parse a store's URL: ``sqlite:PATH`` or ``etcd://HOST[:PORT],…?OPTION=VALUE&…``. Opens nothing.

The options of etcd: ``prefix`` (``/unirun/``), ``timeout`` (5 s), ``cacert``, ``cert``, ``key`` (PEM files), ``user``
and ``password_file``. A URL never has a password, as URLs appear in process lists and logs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from urllib.parse import quote, unquote

from unirun.errors import Fault, UsageError
from unirun.values import Value

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
        prefix=_prefix(options.get("prefix", DEFAULT_PREFIX), faults),
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


def _prefix(prefix: str, faults: list[Fault]) -> str:
    try:
        prefix.encode()
    except UnicodeEncodeError:
        faults.append(Fault("prefix", "it is no text", "write it in UTF-8"))
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
