"""The facts that a host reports of itself, without torch and without a CUDA context."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from unirun.collocation.devices import nvml_devices
from unirun.collocation.limits import memory_field
from unirun.failover.offers import versions
from unirun.launcher.doctor.values import Facts
from unirun.launcher.hosts.interfaces import choose, interface_of, reachable_address, route_to


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
    """The address of this host by which others reach it; see `unirun.launcher.doctor.requests.Look`. Raises
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
