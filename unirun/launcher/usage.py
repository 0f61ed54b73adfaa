"""The memory, processors, devices and steps of the workers of a node, sampled for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from unirun.collocation.devices import has_nvml
from unirun.launcher.events import AgentState
from unirun.wire.reports import Sample


def sample_of(
    state: AgentState, step_of: Callable[[int], int], gpus: Mapping[int, tuple[float, int]]
) -> Sample:
    """The resources of each worker that has a process. `step_of` gives the step of a worker by its id, -1 for none;
    `gpus` are as `DeviceUsage.look` returns them."""
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


class DeviceUsage:
    """The use of the NVIDIA devices of this host by process. `nvml` has the functions of `pynvml`, the module that is
    used without it. The driver is asked from the first look on."""

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._handles: list[Any] | None = None

    def look(self) -> dict[int, tuple[float, int]]:
        """For each process with memory on a device: how busy its devices are, in percent, and that memory in bytes.

        It may take seconds, as a driver does for a device that is gone.
        """
        if self._handles is None:
            self._handles = list(self._found())
        found: dict[int, tuple[float, int]] = {}
        for handle in self._handles:
            with suppress(self._nvml.NVMLError):
                busy = float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    before = found.get(process.pid, (0.0, 0))
                    # In a container the driver may not tell the memory.
                    found[process.pid] = max(before[0], busy), before[1] + (process.usedGpuMemory or 0)
        return found

    def _found(self) -> Iterator[Any]:
        if self._nvml is None:
            if not has_nvml():
                return
            self._nvml = import_module("pynvml")
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlInit()
            for number in range(self._nvml.nvmlDeviceGetCount()):
                with suppress(self._nvml.NVMLError):
                    yield self._nvml.nvmlDeviceGetHandleByIndex(number)

    def close(self) -> None:
        """Leave the driver."""
        if self._handles:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
