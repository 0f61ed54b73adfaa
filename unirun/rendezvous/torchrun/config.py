"""Parse and check ``--rdzv-endpoint`` and ``--rdzv-conf`` before connecting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from unirun.errors import UsageError
from unirun.rendezvous.store.protocol import EtcdAddress, parse_address
from unirun.values import Value


class Config(Value):
    """The keys of ``--rdzv-conf``. Times are in seconds and may have fractions."""

    join_timeout: float = 600
    """Time to wait for the minimum number of nodes."""

    last_call_timeout: float = 30
    """Time to wait for more nodes after that."""

    close_timeout: float = 30
    """Time for a node to mark the run as closed."""

    heartbeat_timeout: float = 5
    """Timeout of a heartbeat, and of any other call to etcd."""

    keep_alive_interval: float = 5
    """Time between two heartbeats of a node."""

    keep_alive_max_attempt: int = 3
    """Number of missed heartbeats after which a node is lost."""

    read_timeout: float = 60
    """Time for which etcd may be away during a rendezvous."""

    prefix: str = "/torchrun/"
    """Prefix of every key in etcd."""

    cacert: str | None = None
    """File with the certificates of the authorities that sign etcd's certificate; turns on TLS."""

    cert: str | None = None
    """File with the client certificate of this node."""

    key: str | None = None
    """File with the private key of `cert`."""

    user: str | None = None
    """User name in etcd."""

    password_file: str | None = None
    """File with the password of `user` and nothing else, readable by its owner only."""

    @property
    def silence(self) -> float:
        """Seconds without a heartbeat after which a node is lost."""
        return self.keep_alive_interval * self.keep_alive_max_attempt

    @property
    def ttl(self) -> float:
        """Seconds by which a run's keys outlive its last node; longer than the nodes take to notice a loss."""
        return 3 * self.silence


NOT_OURS = frozenset({"timeout"})
"""torchrun adds it to the configuration of every backend; only its static backend uses it."""


def parse_config(given: Mapping[str, Any]) -> Config:
    """Parse the configuration and add defaults. Raises `UsageError` that names the key."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in NOT_OURS:
            continue
        if name not in _PARSERS:
            raise UsageError(
                f"--rdzv-conf has no key {name!r} for etcd-v3", f"there are {', '.join(_PARSERS)}"
            )
        values[name] = _PARSERS[name](name, value)
    for one, other in _NEEDS:
        if one in values and other not in values:
            raise UsageError(f"--rdzv-conf: {one} is given, and {other} is not", f"add {other}=…")
    return Config(**values)


def store_address(endpoint: str, config: Config) -> EtcdAddress:
    """Parse the endpoint: ``h1:2379,h2`` are two members, empty is this host. Raises `UsageError`."""
    try:
        if set("/?@") & set(endpoint):
            raise UsageError("neither a scheme, nor a path, nor a password may stand in it")
        there = parse_address(f"etcd://{endpoint.strip() or 'localhost'}")
    except UsageError as error:
        raise UsageError(
            f"--rdzv-endpoint={endpoint} names no etcd: {error}",
            "write HOST:PORT, with commas between several; cacert, cert, key, user and password_file are keys of "
            "--rdzv-conf",
        ) from error
    assert isinstance(there, EtcdAddress)
    return replace(
        there,
        prefix=config.prefix,
        timeout=config.heartbeat_timeout,
        cacert=config.cacert,
        cert=config.cert,
        key=config.key,
        user=config.user,
        password_file=config.password_file,
    )


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UsageError(f"--rdzv-conf: {name}={value} is no number of seconds greater than 0")
    return seconds


def _attempts(name: str, value: Any) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    if count < 2:  # with 1, every heartbeat would come slightly too late
        raise UsageError(f"--rdzv-conf: {name}={value} is no whole number from 2 on")
    return count


def _prefix(name: str, value: Any) -> str:
    return f"{str(value).rstrip('/')}/"


def _file(name: str, value: Any) -> str:
    if not Path(str(value)).is_file():
        raise UsageError(f"--rdzv-conf: {name}={value}: there is no such file on this node")
    return str(value)


def _name(name: str, value: Any) -> str:
    return str(value)


_PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout"), _seconds),
    **dict.fromkeys(("keep_alive_interval", "read_timeout"), _seconds),
    "keep_alive_max_attempt": _attempts,
    "prefix": _prefix,
    **dict.fromkeys(("cacert", "cert", "key", "password_file"), _file),
    "user": _name,
}

_NEEDS = (("cert", "key"), ("key", "cert"), ("cert", "cacert"), ("password_file", "user"))
