"""Open the store at a URL."""

from __future__ import annotations

import os
import stat

from msgspec.structs import replace

from unirun.errors import UsageError
from unirun.observe.jobdir import HERE, expanded
from unirun.rendezvous.store.protocol import (
    PASSWORD_VARIABLE,
    EtcdAddress,
    SqliteAddress,
    Store,
    parse_address,
)

STORE_VARIABLE = "UNIRUN_STORE"


def store_url(option: str | None) -> str | None:
    """The value of ``--store``, else of ``UNIRUN_STORE``, else None."""
    return option or os.environ.get(STORE_VARIABLE) or None


def anchored(url: str) -> str:
    """Make every path in `url` absolute: agents and other commands have other working directories. Raises
    `UsageError`."""
    if HERE in url:
        # Each host has its own paths in it.
        return url
    address = parse_address(url)
    names = ("path",) if isinstance(address, SqliteAddress) else ("cacert", "cert", "key", "password_file")
    paths = {name: getattr(address, name) for name in names if getattr(address, name) is not None}
    whole = {name: os.path.abspath(expanded(path)) for name, path in paths.items()}
    return url if whole == paths else str(replace(address, **whole))


def open_store(url: str, *, timeout: float | None = None) -> Store:
    """Open the store at `url`. Raises `UsageError` for an invalid URL, and `StoreError` when it cannot be opened.
    `timeout` is in seconds, for etcd in place of that of the URL.

    Imports sqlite3 or grpc on demand.
    """
    address = parse_address(url)
    if isinstance(address, SqliteAddress):
        from unirun.rendezvous.store.sqlite import SqliteStore

        return SqliteStore(expanded(address.path))
    password = _password(address)
    try:
        from unirun.rendezvous.store.etcd import EtcdStore
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(("grpc", "google")):
            raise
        raise _missing(error.name or "") from error
    return EtcdStore(replace(address, timeout=timeout or address.timeout), password)


def _missing(package: str) -> UsageError:
    return UsageError(f"a store in etcd needs the package {package}", "pip install 'torch-unirun[etcd]'")


def _password(address: EtcdAddress) -> str | None:
    if address.user is None:
        return None
    if address.password_file is None:
        password = os.environ.get(PASSWORD_VARIABLE)
        if password:
            return password
        raise UsageError(
            f"the store's user {address.user} has no password",
            f"set {PASSWORD_VARIABLE}, or add password_file=FILE to the store's URL",
        )
    path = expanded(address.password_file)
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise UsageError(f"others may read the store's password in {path}", f"chmod 600 {path}")
        password = path.read_text().rstrip("\n")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the store's password cannot be read from {path}: {getattr(error, 'strerror', 'it is no text')}",
            "name a file that holds it",
        ) from error
    if not password:
        raise UsageError(f"the store's password in {path} is empty", "write it into the file")
    return password
