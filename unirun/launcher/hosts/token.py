"""The secret that commands on several hosts share: a file that each of them can read, and no other user."""

from __future__ import annotations

import hmac
import os
import time
from pathlib import Path

from unirun.errors import JobError
from unirun.observe.jobdir import unirun_home
from unirun.observe.ownership import make_private
from unirun.wire.handshake import Token, load_token, new_token

AGAIN = 0.1
"""Seconds between two looks whether the head has made the file."""


def shared_secret(path: str | None, *, make: bool, timeout: float) -> Token:
    """The secret in the file at `path`, by default ``token`` in unirun's directory.

    The head makes the default file when it is missing (`make`); the other nodes, which may share the directory, wait
    for it for `timeout` seconds. Raises `JobError`, also when others can read the file.
    """
    if path is not None:
        return load_token(Path(path))
    file = unirun_home() / "token"
    if make:
        _make(file)
    end = time.monotonic() + timeout
    while not _is_there(file) and time.monotonic() < end:
        time.sleep(AGAIN)
    if not file.exists():
        raise JobError(
            f"{file} is missing, the secret that this node proves to the head",
            "copy it from the head (mode 600), or name one with --token-file",
        )
    return load_token(file)


def token_of_job(secret: Token, name: str) -> Token:
    """The token of one job among those whose nodes share `secret`: `name` is its id, or where its nodes meet."""
    return Token(hmac.digest(secret, f"unirun job {name}".encode(), "sha256"))


def _make(file: Path) -> None:
    """Write a new token, unless there is one. It appears whole."""
    if file.exists():
        return
    try:
        make_private(file.parent)
        fresh = file.with_name(f"token.{os.getpid()}.new")
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as out:
            out.write(new_token().hex())
        try:
            os.link(fresh, file)
        except FileExistsError:
            # Another head was faster.
            pass
        finally:
            fresh.unlink()
    except OSError as error:
        raise JobError(
            f"{file} cannot be written: {error.strerror}", "name a file with --token-file"
        ) from error


def _is_there(file: Path) -> bool:
    # Listing the directory makes a network file system look again.
    try:
        return file.name in os.listdir(file.parent)
    except OSError:
        return False
