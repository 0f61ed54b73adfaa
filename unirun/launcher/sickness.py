"""The signs that a node is sick: a full disk, and faults of its devices.

Each sign is told once. The master gives a sick node no more ranks (`unirun.failover.worker_failure.fall_ill`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from unirun.collocation.devices import has_nvml
from unirun.wire.reports import Sick

LEAST_BYTES = 1 << 20
"""Free bytes of the job's directory, below which its disk is full: no log and no checkpoint fits."""

SICK_XIDS = frozenset({48, 64, 74, 79, 92, 95, 119, 120, 140})
"""NVIDIA's numbers of errors of the hardware: double-bit ECC, a row that cannot be remapped, NVLink, fallen off the
bus, many single-bit errors, uncontained ECC, the GSP, ECC that cannot be recovered. Others may be the program's."""


class NodeHealth:
    """Looks at a node. `folder` is on the disk that its workers write to; `nvml` has the functions of `pynvml`, the
    module that is used without it. The driver is asked from the first look on."""

    def __init__(self, node: str, folder: Path, nvml: Any = None) -> None:
        self._node, self._folder, self._nvml = node, folder, nvml
        self._told: set[str] = set()
        self._devices: _Devices | None = None
        self._looked = False

    def look(self) -> list[Sick]:
        """The signs that were not told yet. It may take seconds, as a driver does for a device that is gone."""
        if not self._looked and (self._nvml is not None or has_nvml()):
            self._devices = _Devices(self._nvml or import_module("pynvml"))
        self._looked = True
        signs = [Sick(self._node, "disk", sign) for sign in self._disk()]
        if self._devices is not None:
            signs += [Sick(self._node, "device", sign) for sign in self._devices.look()]
        new = [each for each in signs if each.sign not in self._told]
        self._told.update(each.sign for each in new)
        return new

    def _disk(self) -> Iterator[str]:
        with suppress(OSError):
            found = os.statvfs(self._folder)
            if found.f_bavail * found.f_frsize < LEAST_BYTES:
                yield f"the disk of {self._folder} is full"

    def close(self) -> None:
        """Leave the driver."""
        if self._devices is not None:
            self._devices.close()


class _Devices:
    """The NVIDIA devices of this host. A driver may not support all that is asked."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: dict[int, Any] = {}
        self._errors: dict[int, int] = {}
        self._events: Any = None
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()
            self._events = nvml.nvmlEventSetCreate()
            for number in range(nvml.nvmlDeviceGetCount()):
                with suppress(nvml.NVMLError):
                    self._handles[number] = nvml.nvmlDeviceGetHandleByIndex(number)
                    self._errors[number] = self._uncorrected(number)
                with suppress(nvml.NVMLError):
                    handle = self._handles.get(number)
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def look(self) -> Iterator[str]:
        """Each sign, as long as it is there."""
        yield from self._xids()
        for number, before in self._errors.items():
            try:
                if (errors := self._uncorrected(number)) > before:
                    self._errors[number] = errors
                    yield f"GPU {number} has had {errors - before} uncorrectable ECC errors"
            except self._nvml.NVMLError as error:
                if getattr(error, "value", None) == self._nvml.NVML_ERROR_GPU_IS_LOST:
                    yield f"GPU {number} is lost"

    def _uncorrected(self, number: int) -> int:
        """Uncorrectable errors since the driver was loaded; 0 for a device that does not count them."""
        nvml = self._nvml
        try:
            kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            return int(nvml.nvmlDeviceGetTotalEccErrors(self._handles[number], kind, since))
        except nvml.NVMLError as error:
            if getattr(error, "value", None) == nvml.NVML_ERROR_NOT_SUPPORTED:
                return 0
            raise

    def _xids(self) -> Iterator[str]:
        """The errors of the hardware that the driver has reported since the last look."""
        while self._events is not None:
            try:
                found = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:
                # There is none, or the driver has no events.
                return
            if found.eventData in SICK_XIDS:
                number = next((n for n, each in self._handles.items() if each == found.device), None)
                name = f"GPU {number}" if number is not None else "a GPU"
                yield f"{name} has had the error XID {found.eventData}"
