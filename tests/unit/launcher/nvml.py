"""A fake of the driver of NVIDIA's devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

LOST, NOT_SUPPORTED, TIMEOUT = 15, 3, 10


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class Nvml:
    """As much of `pynvml` as is used, over cards that are not there: each has its number of ECC errors, or the number
    of the error with which it answers. The second one does not tell who uses it."""

    NVMLError = NVMLError
    NVML_ERROR_GPU_IS_LOST, NVML_ERROR_NOT_SUPPORTED = LOST, NOT_SUPPORTED
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *cards: int | Exception) -> None:
        self.cards: list[int | Exception] = [*cards]
        self.xids: list[tuple[int, int]] = []
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return 100 + number

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, since: int) -> int:
        assert (kind, since) == (1, 0)
        found = self.cards[handle - 100]
        if isinstance(found, Exception):
            raise found
        return found

    def nvmlEventSetCreate(self) -> Any:
        return self.xids

    def nvmlDeviceRegisterEvents(self, handle: int, kind: int, events: Any) -> None:
        if handle == 101:
            raise NVMLError(NOT_SUPPORTED)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle == 101:
            raise NVMLError(NOT_SUPPORTED)
        return SimpleNamespace(gpu=40)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=7, usedGpuMemory=1 << 30), SimpleNamespace(pid=8, usedGpuMemory=None)]

    def nvmlEventSetWait_v2(self, events: list[tuple[int, int]], limit: int) -> Any:
        if not events:
            raise NVMLError(TIMEOUT)
        handle, xid = events.pop(0)
        return SimpleNamespace(device=handle, eventData=xid)
