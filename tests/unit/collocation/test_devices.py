"""The answers of an NVML, by stand-ins for its binding; and types of devices that others add."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from dataclasses import dataclass, field
from importlib.metadata import EntryPoints
from importlib.metadata import entry_points as metadata_of
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unirun.collocation import Device, local_inventory
from unirun.collocation.devices import device_types, nvml_devices
from unirun.collocation.inventory import NEARNESS
from unirun.errors import UsageError


class NVMLError(Exception):
    """The error that NVML raises."""


@dataclass
class Card:
    """One GPU as the driver has it: `links` are the levels of the common ancestors, by the other card's number."""

    uuid: str
    mig: list[str] | None = None
    numa_words: tuple[int, ...] = (1,)
    links: dict[int, int] = field(default_factory=dict)
    nvlinked: tuple[int, ...] = ()
    lost: bool = False


class Nvml:
    """As much of `pynvml` as is used, over cards that are not there."""

    NVMLError = NVMLError
    NVML_AFFINITY_SCOPE_NODE = 0
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0

    def __init__(self, *cards: Card, driver: bool = True) -> None:
        self.cards, self.driver, self.open = cards, driver, 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("no driver")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> Any:
        if self.cards[number].lost:
            raise NVMLError("GPU is lost")
        return number

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        if self.cards[handle].mig is None:
            raise NVMLError("not supported")
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, part: int) -> str:
        parts = self.cards[handle].mig or []
        if part >= len(parts):
            raise NVMLError("not found")
        return parts[part]

    def nvmlDeviceGetName(self, handle: int | str) -> str:
        return "NVIDIA H100" if isinstance(handle, int) else "NVIDIA H100 MIG 1g.10gb"

    def nvmlDeviceGetUUID(self, handle: int | str) -> str | bytes:
        return self.cards[handle].uuid.encode() if isinstance(handle, int) else handle

    def nvmlDeviceGetMemoryInfo(self, handle: int | str) -> Any:
        return SimpleNamespace(total=80 << 30 if isinstance(handle, int) else 10 << 30)

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle + 10:02X}:00.0")

    def nvmlDeviceGetMemoryAffinity(self, handle: int | str, words: int, scope: int) -> tuple[int, ...]:
        if isinstance(handle, str):
            raise NVMLError("not supported")
        return self.cards[handle].numa_words

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        return 0 if other in self.cards[one].nvlinked else 1

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        try:
            return self.cards[one].links[other]
        except KeyError:
            raise NVMLError("not supported") from None


def test_a_device_is_told_with_its_memory_its_uuid_and_its_bus_id_as_sysfs_has_it() -> None:
    assert nvml_devices(Nvml(Card("GPU-a", numa_words=(0, 2)))) == (
        Device("0", "NVIDIA H100", "0000:0a:00.0", "cuda", 80 << 30, "GPU-a", numa=65),
    )


def test_a_host_without_a_driver_has_no_devices() -> None:
    assert nvml_devices(Nvml(driver=False)) == ()


@pytest.mark.parametrize("words", [(), (0, 0), (3,)], ids=["none", "empty", "two nodes"])
def test_a_numa_node_is_told_only_where_there_is_one(words: tuple[int, ...]) -> None:
    assert nvml_devices(Nvml(Card("GPU-a", numa_words=words)))[0].numa == -1


@pytest.mark.parametrize(
    ("level", "near"), [*zip((0, 10, 20, 30, 40, 50), NEARNESS[1:], strict=True)], ids=NEARNESS[1:]
)
def test_how_near_two_devices_are_is_told_by_what_they_have_in_common(level: int, near: str) -> None:
    cards = Nvml(Card("GPU-a", links={1: level}), Card("GPU-b", links={0: level}))
    assert [device.links for device in nvml_devices(cards)] == [(("1", near),), (("0", near),)]


def test_nvlink_goes_before_the_way_through_the_host() -> None:
    cards = Nvml(Card("GPU-a", links={1: 50}, nvlinked=(1,)), Card("GPU-b"))
    assert [device.links for device in nvml_devices(cards)] == [(("1", "nvlink"),), ()]


def test_a_device_that_fell_off_its_bus_is_not_there_and_the_others_keep_their_indices() -> None:
    cards = Nvml(Card("GPU-a"), Card("GPU-b", lost=True), Card("GPU-c", links={0: 50}))
    assert [device.index for device in nvml_devices(cards)] == ["0", "2"]


def test_the_parts_of_a_gpu_are_shown_in_its_place_and_are_of_another_type() -> None:
    whole, *parts = nvml_devices(Nvml(Card("GPU-a"), Card("GPU-b", mig=["MIG-1", "MIG-2"])))
    assert (whole.index, whole.type) == ("0", "cuda")
    assert [(part.index, part.uuid, part.type, part.memory) for part in parts] == [
        ("MIG-1", "MIG-1", "mig", 10 << 30),
        ("MIG-2", "MIG-2", "mig", 10 << 30),
    ]
    assert {part.pci for part in parts} == {"0000:0b:00.0"}


def test_a_gpu_in_mig_mode_without_parts_is_shown_and_left_alone() -> None:
    (device,) = nvml_devices(Nvml(Card("GPU-a", mig=[])))
    assert (device.index, device.type) == ("0", "mig")


def test_nvml_is_left_as_it_was_found() -> None:
    nvml = Nvml(Card("GPU-a"))
    nvml_devices(nvml)
    assert nvml.open == 0


XPU = """
from unirun.collocation import Device, DeviceType

def look():
    return tuple(Device(str(n), "X", type="xpu") for n in range(2))

XPU = DeviceType("xpu", look, "XPU_MASK")
BROKEN = None
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Installs a package with an entry point: ``install("xpu = xpus:XPU")``."""

    def install(entry: str) -> None:
        (tmp_path / "xpus.py").write_text(XPU)
        info = tmp_path / "xpus-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xpus\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[unirun.device_types]\n{entry}\n")
        monkeypatch.syspath_prepend(tmp_path)
        device_types.cache_clear()

    yield install
    device_types.cache_clear()
    sys.modules.pop("xpus", None)


def test_a_package_can_add_a_type_of_device(install: Callable[[str], None]) -> None:
    install("xpu = xpus:XPU")
    assert [*device_types()] == ["cpu", "cuda", "xpu"]
    assert device_types()["xpu"].mask_variable == "XPU_MASK"

    def devices(**environ: str) -> list[tuple[str, str]]:
        (node,) = local_inventory({"CUDA_VISIBLE_DEVICES": "", **environ}).nodes
        return [(device.type, device.index) for device in node.devices]

    assert devices() == [("xpu", "0"), ("xpu", "1")]
    assert devices(XPU_MASK="1") == [("xpu", "1")]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("cuda = xpus:XPU", "adds a device type 'cuda', which is there"),
        ("ypu = xpus:XPU", "no DeviceType called 'ypu'"),
        ("xpu = xpus:BROKEN", "no DeviceType called 'xpu'"),
        ("xpu = xpus:MISSING", "cannot be loaded: AttributeError"),
        ("xpu = nowhere:XPU", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_package_that_is_broken_is_named(install: Callable[[str], None], entry: str, words: str) -> None:
    install(entry)
    with pytest.raises(UsageError, match=words) as caught:
        device_types()
    assert "xpus" in str(caught.value)


def test_packages_are_read_only_when_one_may_add_a_type(
    install: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The packages of each directory are looked at; those of anything else are not known."""
    asked: list[str] = []

    def ask(group: str) -> EntryPoints:
        asked.append(group)
        return metadata_of(group=group)

    monkeypatch.setattr(importlib.metadata, "entry_points", ask)
    device_types.cache_clear()
    assert [*device_types()] == ["cpu", "cuda"]
    assert asked == []
    install("xpu = xpus:XPU")
    assert [*device_types()] == ["cpu", "cuda", "xpu"]
    assert asked == ["unirun.device_types"]
    (tmp_path / "archive.zip").touch()
    (tmp_path / "xpus-1.0.dist-info/entry_points.txt").unlink()
    monkeypatch.syspath_prepend(tmp_path / "archive.zip")
    device_types.cache_clear()
    assert [*device_types()] == ["cpu", "cuda"]
    assert len(asked) == 2


@pytest.mark.starts_processes
def test_the_binding_of_nvml_is_not_imported_without_the_library() -> None:
    script = "import sys; from unirun.collocation.devices import nvml_devices as n; n(); print('pynvml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{find_library('nvidia-ml') is not None}\n"


def test_what_nvml_is_asked_for_is_in_its_binding() -> None:
    import pynvml

    assert not [name for name in dir(Nvml) if name.lower().startswith("nvml") and not hasattr(pynvml, name)]
    levels = ("INTERNAL", "SINGLE", "MULTIPLE", "HOSTBRIDGE", "NODE", "SYSTEM")
    assert [getattr(pynvml, f"NVML_TOPOLOGY_{level}") for level in levels] == [0, 10, 20, 30, 40, 50]
    assert (pynvml.NVML_P2P_CAPS_INDEX_NVLINK, pynvml.NVML_P2P_STATUS_OK) == (2, 0)
