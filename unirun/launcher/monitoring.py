"""The signs that a node is sick: a full disk, and faults of its devices. Those of a network that is. The resources that
workers use.

Each sign is told once to each master, which gives a sick node no more ranks
(`unirun.failover.worker_failure.fall_ill`).
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

from unirun.collocation.devices import has_nvml
from unirun.launcher.events import AgentState
from unirun.wire.reports import Sample, Sick

LEAST_BYTES = 1 << 20
"""Free bytes of the job's directory, below which its disk is full: no log and no checkpoint fits."""

SICK_XIDS = frozenset({48, 64, 74, 79, 92, 95, 119, 120, 140})
"""NVIDIA's numbers of errors of the hardware: double-bit ECC, a row that cannot be remapped, NVLink, fallen off the
bus, many single-bit errors, uncontained ECC, the GSP, ECC that cannot be recovered. Others may be the program's."""


class NodeHealth:
    """Looks at a node. `folder` is on the disk that its workers write to. `told` are the signs that were found."""

    def __init__(self, node: str, folder: Path, devices: Devices) -> None:
        self._node, self._folder, self._devices = node, folder, devices
        self.told: list[Sick] = []

    def look(self) -> list[Sick]:
        """The signs that were not told yet. It may take seconds, as a driver does for a device that is gone."""
        signs = [Sick(self._node, "disk", sign) for sign in self._disk()]
        signs += [Sick(self._node, "device", sign) for sign in self._devices.signs()]
        new = [each for each in signs if each not in self.told]
        self.told += new
        return new

    def _disk(self) -> Iterator[str]:
        with suppress(OSError):
            found = os.statvfs(self._folder)
            if found.f_bavail * found.f_frsize < LEAST_BYTES:
                yield f"the disk of {self._folder} is full"


class Devices:
    """The NVIDIA devices of this host. A driver may not support all that is asked.

    `nvml` has the functions of `pynvml`, the module that is used without it. The driver is asked from the first look
    on. A look may take seconds, as a driver does for a device that is gone.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._handles: dict[int, Any] | None = None
        self._errors: dict[int, int] = {}
        self._events: Any = None

    def _opened(self) -> dict[int, Any]:
        """The devices by their numbers, without those that do not answer. The driver is open from then on."""
        if self._handles is None:
            self._handles = {}
            if self._nvml is None and has_nvml():
                self._nvml = import_module("pynvml")
            if self._nvml is not None:
                self._open(self._nvml, self._handles)
        return self._handles

    def _open(self, nvml: Any, found: dict[int, Any]) -> None:
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()
            for number in range(nvml.nvmlDeviceGetCount()):
                with suppress(nvml.NVMLError):
                    found[number] = nvml.nvmlDeviceGetHandleByIndex(number)
        with suppress(nvml.NVMLError):
            self._events = nvml.nvmlEventSetCreate()
        for number, handle in found.items():
            with suppress(nvml.NVMLError):
                self._errors[number] = self._uncorrected(handle)
            if self._events is not None:
                with suppress(nvml.NVMLError):
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    def close(self) -> None:
        """Leave the driver."""
        if self._handles is not None and self._nvml is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def usage(self) -> dict[int, tuple[float, int]]:
        """For each process with memory on a device: how busy its devices are, in percent, and that memory in bytes."""
        found: dict[int, tuple[float, int]] = {}
        for handle in self._opened().values():
            with suppress(self._nvml.NVMLError):
                busy = float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    before = found.get(process.pid, (0.0, 0))
                    # In a container the driver may not tell the memory.
                    found[process.pid] = max(before[0], busy), before[1] + (process.usedGpuMemory or 0)
        return found

    def signs(self) -> Iterator[str]:
        """The signs that devices are sick. A sign is returned by each look until it is gone."""
        handles = self._opened()
        yield from self._xids(handles)
        for number, before in self._errors.items():
            try:
                if (errors := self._uncorrected(handles[number])) > before:
                    self._errors[number] = errors
                    yield f"GPU {number} has had {errors - before} uncorrectable ECC errors"
            except self._nvml.NVMLError as error:
                if getattr(error, "value", None) == self._nvml.NVML_ERROR_GPU_IS_LOST:
                    yield f"GPU {number} is lost"

    def _uncorrected(self, handle: Any) -> int:
        """Uncorrectable errors since the driver was loaded; 0 for a device that does not count them."""
        nvml = self._nvml
        try:
            kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))
        except nvml.NVMLError as error:
            if getattr(error, "value", None) == nvml.NVML_ERROR_NOT_SUPPORTED:
                return 0
            raise

    def _xids(self, handles: Mapping[int, Any]) -> Iterator[str]:
        """The errors of the hardware that the driver has reported since the last look."""
        while self._events is not None:
            try:
                found = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:
                # There is none, or the driver has no events.
                return
            if found.eventData in SICK_XIDS:
                number = next((n for n, each in handles.items() if each == found.device), None)
                name = f"GPU {number}" if number is not None else "a GPU"
                yield f"{name} has had the error XID {found.eventData}"


# The hosts that do not answer this one, by the connections of its processes: what the kernel sends again and again.
#
# Two hosts that do not hear each other may both hear the master. Then their ranks wait for each other, and what gloo
# and NCCL say of that names no host. The kernel has each connection with the number of times that it has sent without
# an answer, also of processes that have ended since.

SENT_AGAIN, ASKED_AGAIN = 5, 3
"""Times of sending again, after which a host counts as one that does not answer: data for 6 s, by then the master knows
whether the whole host is silent; the first packet of a connection for 7 s."""

_SYN_SENT = 2
_RETRANSMITS = 1
"""The kernel's number of the timer for sending again."""

MOST_HOSTS = 64

LOOK_SECONDS = 1.0
"""Seconds after which a look ends: the kernel takes several to list hundreds of thousands of connections, so on such a
host some of them are seen."""


def unanswered(net: Path = Path("/proc/self/net"), uid: int | None = None) -> tuple[str, ...]:
    """The addresses that do not answer processes of the user `uid`, by default this one. It takes `LOOK_SECONDS` at
    most."""
    found: set[str] = set()
    until = time.monotonic() + LOOK_SECONDS
    for name in ("tcp", "tcp6"):
        with suppress(OSError), (net / name).open() as table:
            lines = takewhile(lambda _: time.monotonic() < until, table)
            found.update(_silent(lines, os.getuid() if uid is None else uid))
    return tuple(sorted(found)[:MOST_HOSTS])


def _silent(table: Iterable[str], uid: int) -> Iterator[str]:
    for line in table:
        with suppress(ValueError, IndexError):
            _, _, remote, state, _, timer, again, owner, *_ = line.split()
            limit = ASKED_AGAIN if int(state, 16) == _SYN_SENT else SENT_AGAIN
            # What a process has left behind has no owner.
            if (
                int(timer.partition(":")[0], 16) == _RETRANSMITS
                and int(again, 16) >= limit
                and int(owner) in (0, uid)
            ):
                yield address_of(remote.partition(":")[0])


def address_of(number: str) -> str:
    """An address as the kernel writes it: words of four bytes in the order of this host."""
    words = [int(number[at : at + 8], 16) for at in range(0, len(number), 8)]
    data = struct.pack(f"{'<' if sys.byteorder == 'little' else '>'}{len(words)}I", *words)
    mapped = data.removeprefix(bytes(10) + b"\xff\xff")
    return socket.inet_ntop(socket.AF_INET if len(mapped) == 4 else socket.AF_INET6, mapped)


# The memory, processors, devices and steps of the workers of a node, sampled for people.


def sample_of(
    state: AgentState, step_of: Callable[[int], int], gpus: Mapping[int, tuple[float, int]]
) -> Sample:
    """The resources of each worker that has a process. `step_of` gives the step of a worker by its id, -1 for none;
    `gpus` are as `Devices.usage` returns them."""
    import psutil

    memory: dict[str, int] = {}
    cpu: dict[str, float] = {}
    steps: dict[str, int] = {}
    used: dict[str, tuple[float, int]] = {}
    for worker in state.workers.values():
        if worker.pid is None:
            continue
        who = str(worker.who)
        with suppress(psutil.Error):
            process = psutil.Process(worker.pid)
            memory[who] = process.memory_info().rss
            cpu[who] = round(sum(process.cpu_times()[:2]), 2)
        if (step := step_of(worker.id)) >= 0:
            steps[who] = step
        if worker.pid in gpus:
            used[who] = gpus[worker.pid]
    return Sample(state.node, memory, cpu, steps, used)
