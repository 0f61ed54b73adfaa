"""The search for the head by the commands of one job step: a file, mode 0600, in a directory that nodes share."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import to_builtins

from unirun.errors import JobError, RendezvousError
from unirun.launcher.hosts.interfaces import is_own, reachable_address, resolve
from unirun.launcher.slurm.allocation import Allocation
from unirun.observe.jobdir import unirun_home
from unirun.observe.ownership import exposure, make_private
from unirun.values import Value
from unirun.wire.frames import from_json

AGAIN = 0.05
"""Seconds between two looks for the file."""


class Place(Value):
    """The address of the head of a step, and the token of the job, in hex."""

    host: str
    port: int
    token: str


def address_here(step: Allocation) -> str:
    """The address of this node that the others of the step reach: that of its name, unless it is loopback.

    Raises `RendezvousError`.
    """
    with contextlib.suppress(RendezvousError):
        found = resolve(step.node)
        if is_own(found) and not found.startswith("127.") and found != "::1":
            return found
    return reachable_address()


@contextmanager
def published(step: Allocation, place: Place) -> Iterator[None]:
    """Let the other commands of the step find this one, as long as the context lasts. Raises `JobError`."""
    file = _file(step)
    fresh = file.with_suffix(f".{os.getpid()}.new")
    try:
        make_private(file.parent)
        if (found := exposure(file.parent)) is not None:
            raise JobError(f"a secret is not safe in {file.parent}: {found.problem}", found.remedy)
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as out:
            json.dump(to_builtins(place), out)
        fresh.replace(file)
    except OSError as error:
        raise JobError(
            f"{file} cannot be written: {error.strerror}",
            "set UNIRUN_HOME to a directory that all nodes share",
        ) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def find(step: Allocation, timeout: float) -> Place:
    """Wait until the head of the step is published. Raises `RendezvousError` after `timeout` seconds."""
    file, end = _file(step), time.monotonic() + timeout
    while time.monotonic() < end:
        # Listing the directory makes a network file system look again.
        with contextlib.suppress(OSError):
            if file.name in os.listdir(file.parent):
                return from_json(Place, file.read_text())
        time.sleep(AGAIN)
    raise RendezvousError(
        f"node {step.head} has not said within {timeout:g} s where it is: {socket.gethostname()} has no {file}",
        "set UNIRUN_HOME to a directory that all nodes share, or name the head: --nnodes N --rdzv-endpoint HOST:PORT",
    )


def _file(step: Allocation) -> Path:
    return unirun_home() / "slurm" / f"{step.job}.{step.step}.{step.restarts}.json"
