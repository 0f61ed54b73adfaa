"""What a host says of itself, without torch and without a CUDA context."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path

from unirun.collocation.devices import nvml_devices
from unirun.collocation.hostfiles import memory_field
from unirun.errors import RendezvousError
from unirun.launcher.doctor.values import Facts


def read_facts(interface: str | None, head: str | None) -> Facts:
    """The facts of this host. Raises `RendezvousError` when `interface` is none of its, or has no address."""
    address = own_address(interface, head)
    return Facts(
        hostname=socket.gethostname(),
        address=address,
        interface=interface_of(address),
        python=platform.python_version(),
        torch=_version("torch"),
        unirun=_version("torch-unirun"),
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
    """The address of this host by which others reach it; see `unirun.launcher.doctor.requests.Look`."""
    if interface is not None:
        return _address_on(interface)
    targets = [head] if head is not None else [*_reached_by(), *_named(), "192.0.2.1"]
    for target in targets:
        found = _source_towards(target)
        if found is not None and (head is not None or not ip_address(found).is_loopback):
            return found
    return "127.0.0.1"


def interface_of(address: str) -> str:
    """The interface that has `address`; empty when there is none."""
    found = (name for name, each in _addresses() if each == address)
    return next(found, "")


def _address_on(interface: str) -> str:
    usable = [each for name, each in _addresses() if name == interface and not ip_address(each).is_link_local]
    if not usable:
        names = ", ".join(dict.fromkeys(name for name, _ in _addresses()))
        raise RendezvousError(f"no interface {interface!r} with an address", f"there are {names}")
    return usable[0]


def _addresses() -> Iterator[tuple[str, str]]:
    """Every interface with each of its addresses, IPv4 first."""
    from psutil import net_if_addrs

    for family in (socket.AF_INET, socket.AF_INET6):
        for name, addresses in net_if_addrs().items():
            yield from ((name, each.address.partition("%")[0]) for each in addresses if each.family == family)


def _reached_by() -> list[str]:
    """The address at which this ssh session reached sshd."""
    return os.environ.get("SSH_CONNECTION", "").split()[2:3]


def _named() -> list[str]:
    """The addresses of this host's name."""
    try:
        return [str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        return []


def _source_towards(target: str) -> str | None:
    """The address from which this host would send to `target`; nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _lookup(address: str) -> float:
    """How long it takes to look up the name of `address`, also when it has none."""
    began = time.perf_counter()
    with suppress(OSError):
        socket.gethostbyaddr(address)
    return time.perf_counter() - began


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


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
