"""``python -m unirun.launcher.doctor.probe``: the process on each host that answers the doctor until its stdin ends.

Requests and answers are lines of JSON. It tells the facts and the time, and becomes a process of the job.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import json

from unirun.collocation.devices import nvml_devices
from unirun.collocation.limits import memory_field
from unirun.errors import UnirunError
from unirun.failover.offers import versions
from unirun.launcher.doctor.judge import Facts, JobPlace, JobResult
from unirun.launcher.interfaces import choose, interface_of, reachable_address, route_to
from unirun.values import Value
from unirun.wire.messages import Dismissed


class Inspect(Value, tag=True):
    """Asks for the facts and the time.

    The host's address is that of `interface`; without one, that from which it reaches `head`, the address of the first
    host; the first host itself has no `head` and takes that of its default route.
    """

    interface: str | None
    head: str | None


class ImportTorch(Value, tag=True):
    """Asks to import torch, which may take long, and with `store` to open the store of the job."""

    store: bool


class Inspected(Value, tag=True):
    """The facts of a host, and its time in seconds since 1970."""

    facts: Facts
    now: float


class PortOpened(Value, tag=True):
    """The port of the store; 0 when none was wanted."""

    port: int


Request = Inspect | ImportTorch | JobPlace
Answer = Inspected | PortOpened | JobResult | Dismissed


# The facts that a host reports of itself, without torch and without a CUDA context.


def read_facts(interface: str | None, head: str | None) -> Facts:
    """The facts of this host. Raises `RendezvousError` when it has no such address."""
    address = own_address(interface, head)
    return Facts(
        hostname=socket.gethostname(),
        address=address,
        interface=interface_of(address),
        **versions(),
        kernel=platform.release(),
        driver=_driver(),
        gpus=tuple(device.name for device in nvml_devices()),
        cpus=len(os.sched_getaffinity(0)),
        memory=memory_field(Path("/proc/meminfo"), "MemTotal"),
        shm=shutil.disk_usage("/dev/shm").total,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        lookup=_lookup(address),
    )


def own_address(interface: str | None, head: str | None) -> str:
    """The address of this host by which others reach it; see `Inspect`. Raises
    `RendezvousError`."""
    if interface is not None:
        return choose(interface)
    return reachable_address() if head is None else route_to(head)


def _lookup(address: str) -> float:
    """The time that a look-up of the name of `address` takes, also when it has none."""
    began = time.perf_counter()
    with suppress(OSError):
        socket.gethostbyaddr(address)
    return time.perf_counter() - began


def _driver() -> str:
    """The version of the NVIDIA driver; empty without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ""
    try:
        found = pynvml.nvmlSystemGetDriverVersion()
        return found.decode() if isinstance(found, bytes) else str(found)
    finally:
        pynvml.nvmlShutdown()


class ProbeServer:
    """Answers requests, one after the other."""

    def __init__(self) -> None:
        self._facts: Facts | None = None
        self._store: Any = None

    def answer(self, request: Request) -> Answer:
        """Do what is asked. Raises what goes wrong."""
        match request:
            case Inspect(interface, head):
                if self._facts is None or head is not None:
                    self._facts = read_facts(interface, head)
                return Inspected(self._facts, time.time())
            case ImportTorch(store):
                from unirun.launcher.doctor.collective import open_store

                assert self._facts is not None
                self._store, port = open_store(self._facts.address) if store else (None, 0)
                return PortOpened(port)
            case JobPlace():
                from unirun.launcher.doctor.collective import run

                assert self._facts is not None
                return run(request, self._facts.interface)


def main() -> None:
    """Answer until stdin ends. Whatever else is written to stdout goes to stderr."""
    # torch looks up the name of each address. The resolver's own limits would make that ten seconds where it is away.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    probe = ProbeServer()
    for line in sys.stdin.buffer:
        try:
            answer = probe.answer(json.decode(line, type=Request))
        except UnirunError as error:
            answer = Dismissed(error.problem, error.remedy)
        except (OSError, RuntimeError, ImportError, ValueError) as error:
            # torch adds a stack trace of C++.
            answer = Dismissed(str(error).partition("\n")[0] or type(error).__name__)
        answers.write(json.encode(answer) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
