"""The types of devices that a role can request, and how the devices of this host are found.

NVML is asked directly, so no torch and no CUDA context. A package adds a type of its own by an entry point of the group
``unirun.device_types`` that names a `DeviceType`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import CDLL
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from unirun.collocation.inventory import CPU, MIG, Assignment, Device, Node, PlacementRequest, Slot, slots_of
from unirun.errors import UsageError
from unirun.spec.job import JobSpec
from unirun.values import Value

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


GROUP = "unirun.device_types"
"""Of entry points."""

Discover = Callable[[], tuple[Device, ...]]


class DeviceType(Value, gc=True):
    """A type of device: how the devices of this host are found, and the variable that masks them for a process.

    `discover` is called in every process that looks at its host's inventory: it returns the devices, each with `name`
    as its type, and none where there is no driver. `mask_variable` (``ZE_AFFINITY_MASK``) limits them when it is set,
    and is set for workers; None where there is none.
    """

    name: str
    discover: Discover
    mask_variable: str | None


@cache
def device_types() -> Mapping[str, DeviceType]:
    """All types by name: unirun's, then those that installed packages add, by their names.

    Raises `UsageError` for a package whose type cannot be used.
    """
    found = {kind.name: kind for kind in _TYPES}
    if _may_have_more():
        # With its import, and all that it reads, it takes 30 ms.
        from importlib.metadata import entry_points

        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
            found[entry.name] = _load(entry, found)
    return MappingProxyType(found)


def _may_have_more() -> bool:
    """Return False if certainly no package adds a type: each is installed in a directory, and none names the group."""
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):
        return True
    for folder in dict.fromkeys(path or "." for path in sys.path):
        try:
            with os.scandir(folder) as entries:
                packages = [entry for entry in entries if entry.name.endswith(("-info", ".egg"))]
        except NotADirectoryError:
            return True
        except OSError:
            continue
        for entry in packages:
            try:
                with open(f"{entry.path}/entry_points.txt", "rb") as file:
                    if GROUP.encode() in file.read():
                        return True
            except FileNotFoundError:
                if entry.name.endswith(".egg"):
                    return True
            except OSError:
                return True
    return False


def _load(entry: EntryPoint, known: Mapping[str, DeviceType]) -> DeviceType:
    package = entry.dist.name if entry.dist else "a package"
    try:
        kind = entry.load()
    except Exception as error:
        raise UsageError(
            f"the device type {entry.name!r} of {package} cannot be loaded: {error!r}", f"mend {package}"
        ) from error
    if entry.name in known:
        raise UsageError(f"{package} adds a device type {entry.name!r}, which is there", "remove one of them")
    if not isinstance(kind, DeviceType) or kind.name != entry.name:
        raise UsageError(
            f"{entry.value} of {package} is no DeviceType called {entry.name!r}", f"mend {package}"
        )
    return kind


def nvml_devices(nvml: Any = None) -> tuple[Device, ...]:
    """Every NVIDIA device of this host that responds; empty without a driver.

    A GPU in MIG mode is nothing that CUDA could use as a whole: its parts are listed in its place, with their UUIDs
    as indices. `nvml` has the functions of `pynvml`, the module that is used without it.
    """
    if nvml is None and not has_nvml():
        return ()
    nvml = nvml or import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        return tuple(_Nvml(nvml).devices())
    finally:
        nvml.nvmlShutdown()


def has_nvml() -> bool:
    """Return True if the library of the driver is there, for which `pynvml` need not be imported."""
    try:
        CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


class _Nvml:
    """Queries to NVML, which is initialised. A driver may not support all of them."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.handles: dict[str, Any] = {}
        for number in range(nvml.nvmlDeviceGetCount()):
            # A GPU that has fallen off the bus raises an error when queried, and cannot be used.
            handle = self.ask(nvml.nvmlDeviceGetHandleByIndex, number, default=None)
            if handle is not None:
                self.handles[str(number)] = handle

    def ask(self, question: Callable[..., Any], *about: Any, default: Any) -> Any:
        """The answer to `question`, or `default` where the driver or the device has none."""
        try:
            return question(*about)
        except self.nvml.NVMLError:
            return default

    def devices(self) -> Iterator[Device]:
        """All devices in the order of their indices."""
        for index, handle in self.handles.items():
            mode, _ = self.ask(self.nvml.nvmlDeviceGetMigMode, handle, default=(0, 0))
            if mode:
                yield from self.parts(index, handle)
            else:
                yield self.device(index, handle, "cuda", self.pci(handle), self.links(index, handle))

    def parts(self, index: str, handle: Any) -> Iterator[Device]:
        """The parts of a GPU in MIG mode; the GPU itself when it has none."""
        pci = self.pci(handle)
        count = self.ask(self.nvml.nvmlDeviceGetMaxMigDeviceCount, handle, default=0)
        numbers = range(count)
        found = (
            self.ask(self.nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, n, default=None) for n in numbers
        )
        parts = [part for part in found if part is not None]
        for part in parts:
            uuid = _text(self.ask(self.nvml.nvmlDeviceGetUUID, part, default=""))
            yield self.device(uuid, part, MIG, pci, ())
        if not parts:
            yield self.device(index, handle, MIG, pci, ())

    def device(
        self, index: str, handle: Any, kind: str, pci: str, links: tuple[tuple[str, str], ...]
    ) -> Device:
        """One device or a part of one."""
        memory = self.ask(self.nvml.nvmlDeviceGetMemoryInfo, handle, default=None)
        return Device(
            index=index,
            name=_text(self.ask(self.nvml.nvmlDeviceGetName, handle, default="NVIDIA")),
            pci=pci,
            type=kind,
            # A GPU that shares the memory of its host does not report any.
            memory=0 if memory is None else int(memory.total),
            uuid=_text(self.ask(self.nvml.nvmlDeviceGetUUID, handle, default="")),
            numa=self.numa(handle),
            links=links,
        )

    def pci(self, handle: Any) -> str:
        """The bus id in sysfs form: NVML writes the PCI domain with eight digits, sysfs with four."""
        info = self.ask(self.nvml.nvmlDeviceGetPciInfo, handle, default=None)
        return "" if info is None else _text(info.busId).lower()[-12:]

    def numa(self, handle: Any) -> int:
        """The NUMA node with the nearest memory, -1 when there are several or the driver does not tell."""
        words = self.ask(
            self.nvml.nvmlDeviceGetMemoryAffinity,
            handle,
            _NUMA_WORDS,
            self.nvml.NVML_AFFINITY_SCOPE_NODE,
            default=(),
        )
        mask = sum(int(word) << (64 * place) for place, word in enumerate(words))
        return mask.bit_length() - 1 if mask.bit_count() == 1 else -1

    def links(self, index: str, handle: Any) -> tuple[tuple[str, str], ...]:
        """The link from this device to every other one."""
        found = (
            (other, self.nearness(handle, peer)) for other, peer in self.handles.items() if other != index
        )
        return tuple((other, near) for other, near in found if near)

    def nearness(self, one: Any, other: Any) -> str:
        """One of `NEARNESS`; empty when the driver does not tell."""
        nvml = self.nvml
        # NVML also reports NVLink through NVSwitch, where the remote end of a link is a switch and not a GPU.
        status = self.ask(
            nvml.nvmlDeviceGetP2PStatus, one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK, default=None
        )
        if status == nvml.NVML_P2P_STATUS_OK:
            return "nvlink"
        level = self.ask(nvml.nvmlDeviceGetTopologyCommonAncestor, one, other, default=None)
        return _ANCESTORS.get(level, "")


_NUMA_WORDS = 16
"""Words of 64 bits in a set of NUMA nodes: the kernel's most is 1024 nodes."""

_ANCESTORS = {0: "board", 10: "switch", 20: "switches", 30: "bridge", 40: "numa", 50: "system"}
"""By ``nvmlGpuTopologyLevel_t``."""


def _text(value: str | bytes) -> str:
    """NVML's texts; some versions of its binding return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


_TYPES = (DeviceType("cpu", tuple, None), DeviceType("cuda", nvml_devices, "CUDA_VISIBLE_DEVICES"))


# Devices as torchrun assigns them: for jobs on one node that have no placement options.
#
# The planner places these jobs as all others. This module changes the request for them, and the assignments of workers
# that choose a device themselves.


class TorchrunDevices(Value):
    """The devices of a job whose ranks are all on `node`. It needs `needed` of its `devices` for one per rank.

    With the `mode` ``masked``, the device mask of each rank has its own device; with ``local_rank``, every worker sees
    all devices, and uses the one with the index LOCAL_RANK. The mode is ``unknown`` where there are fewer devices than
    ranks, so that only the workers know which they use, and ``none`` where the node has no devices.
    """

    mode: Literal["none", "masked", "local_rank", "unknown"]
    node: Node
    devices: tuple[Slot, ...]
    needed: int

    def request(self, request: PlacementRequest) -> PlacementRequest:
        """`request` with devices only where ranks get one each, else with CPU slots, of which any number may be used.

        All ranks of a role are on the node, so they are one cell, however many they are, unless fewer could be told.
        """
        roles = tuple(
            replace(
                role,
                device=role.device if self.mode == "masked" or role.device is None else CPU,
                per_node=role.per_node or (None if role.device is None or role.needs else role.count),
            )
            for role in request.roles
        )
        return replace(request, roles=roles)

    def assigned(self, planned: Assignment) -> Assignment:
        """`planned` by the planner, with the device that the rank uses, as far as that is known."""
        if planned.slot < 0 or self.mode in ("none", "masked"):
            return planned
        if self.mode == "unknown":
            return replace(planned, own=(), share=1.0, numa=-1)
        index, numa = self.devices[planned.local_rank]
        return replace(planned, own=(index,), numa=numa)

    def note(self, spec: JobSpec) -> str:
        """The decision in words."""
        if self.mode == "none":
            return f"{self.node.name} has no accelerator: each rank has a CPU slot"
        if self.mode == "local_rank":
            return "one role: every worker sees all devices and chooses by LOCAL_RANK"
        if self.mode == "unknown":
            return (
                f"{self.needed} ranks on {len(self.devices)} devices: CUDA_VISIBLE_DEVICES is left as it is"
            )
        shared = "".join(f", {' and '.join(group)} share theirs" for group in spec.collocations)
        used = f"{self.needed} of {len(self.devices)} devices of {self.node.name} are in use"
        return f"{used}, one per rank{shared}"


def torchrun_devices(spec: JobSpec, nodes: Sequence[Node], usual: str) -> TorchrunDevices | None:
    """The devices of a job without placement options on one node; None for other jobs.

    `usual` is the type of device of a role that names none. Ranks get a device each when there are several roles, which
    share a node, and enough devices. A role alone can choose by ``LOCAL_RANK``, as under torchrun, unless
    ``virtual_local_rank`` makes that 0 everywhere. Roles without slots need no device, and change nothing.
    """
    if len(nodes) != 1 or _has_placement_options(spec):
        return None
    devices = () if usual == CPU else slots_of(nodes[0], usual)
    # Roles that share devices have the same number of ranks: the first one's count for all.
    sharing = {name for group in spec.collocations for name in group[1:]}
    takers = [role for role in spec.roles if role.takes_slots]
    needed = sum(role.count for role in takers if role.name not in sharing)
    # Beside a trainer a role is one of several, though the trainer needs no device.
    trained = any(role.entry.kind == "trainer" for role in spec.roles)
    if not takers:
        return None
    if not devices:
        return TorchrunDevices("none", nodes[0], devices, needed)
    if len(devices) < needed:
        return TorchrunDevices("unknown", nodes[0], devices, needed)
    masked = len(takers) > 1 or trained or spec.virtual_local_rank
    return TorchrunDevices("masked" if masked else "local_rank", nodes[0], devices, needed)


def _has_placement_options(spec: JobSpec) -> bool:
    return bool(
        spec.host_collocations
        or spec.separations
        or spec.isolations
        or spec.spares
        or any(
            role.device or role.slots != 1 or role.per_group or role.devices or role.least is not None
            for role in spec.roles
            if role.takes_slots
        )
    )
