"""`PairGroup`: a process group of one publisher and one receiver, of any backend that sends tensors.

What is sent is one run of bytes, in buckets. While one is under way, the next one is packed: there are two. A bucket
that lies within one tensor is sent from there. The receiver has memory for all of it, as it may not touch its tensors
before it has everything.

Behind the run go the checksums of its buckets, as torch's backends have none: TCP's notices all but one of 65 536
errors that the network adapters miss.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch

from unirun.errors import GroupError
from unirun.roles.gloo import GlooGroup
from unirun.roles.process_groups import c10d, dist, process_groups
from unirun.roles.transport.frames import ALIGN, SpareMemory, offsets

BUCKET = 32 << 20
"""Bytes that are sent at a time, at most."""

WORD = 8
"""Bytes that a checksum adds at a time."""

NCCL_POLL_INTERVAL = 0.001
"""Seconds between two looks at a transfer of NCCL, which has no wait that ends."""

BACKENDS = ("gloo", "nccl")


def checksum(bucket: torch.Tensor) -> torch.Tensor:
    """The sum of its 64-bit words, modulo 2**64; of bytes whose number is a multiple of eight."""
    return bucket.view(torch.int64).sum()


def joined(flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same run of bytes, with those tensors as one that are behind each other in memory as in the run: what comes
    from one block is sent from there."""
    found: list[torch.Tensor] = []
    for each in flat:
        if found:
            last = found[-1]
            size = -(-last.nbytes // ALIGN) * ALIGN
            memory = last.untyped_storage().data_ptr()
            if (
                each.untyped_storage().data_ptr() == memory
                and each.storage_offset() == last.storage_offset() + size
            ):
                found[-1] = last.as_strided((size + each.nbytes,), (1,))
                continue
        found.append(each)
    return found


def buckets(flat: Sequence[torch.Tensor], most: int) -> Iterator[tuple[int, list[tuple[int, torch.Tensor]]]]:
    """The length of each bucket of the run of these bytes, and what is in it: parts of the tensors, and where."""
    begins, total = offsets([each.nbytes for each in flat])
    left = deque(zip(begins, flat, strict=True))
    for low in range(0, total, most):
        high = min(low + most, total)
        parts = []
        while left and left[0][0] < high:
            begin, tensor = left[0]
            start = max(low - begin, 0)
            part = tensor[start : high - begin]
            if part.nbytes:
                parts.append((begin + start - low, part))
            if begin + tensor.nbytes > high:
                break
            left.popleft()
        yield high - low, parts


class PairGroup:
    """This process's end. Not thread-safe, but for `close`."""

    def __init__(
        self,
        store: Any,
        rank: int,
        backend: str,
        patience: float,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Waits until the other end, which has the other `rank` (0 or 1), does the same with the same store.

        When `over` turns true, all waits end. Raises `GroupError`.
        """
        self._other, self._backend, self._over = 1 - rank, backend, over
        self._gloo: list[GlooGroup] = []
        self._spare = SpareMemory()
        self._lock = threading.Lock()
        limit = timedelta(seconds=max(patience, 0.001))
        try:
            store.set_timeout(limit)
            with process_groups().forming(over) as made:
                self._group = self._made(store, rank, limit)
        except (dist.DistError, RuntimeError) as error:
            raise GroupError(
                f"{backend} did not connect a publisher and a receiver: {error}", "is the network open?"
            ) from error
        self._gloo = made

    def _made(self, store: Any, rank: int, limit: timedelta) -> Any:
        if self._backend == "gloo":
            return c10d.ProcessGroupGloo(store, rank, 2, limit)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)  # Its watchdog would end the process. Waits have deadlines here.
        return c10d.ProcessGroupNCCL(store, rank, 2, options)

    def send(self, tensors: Sequence[torch.Tensor], deadline: float, *, checked: bool = True) -> None:
        """Send `tensors`, which may be of any strides. Returns when the other end has them or they are on their way.

        `checked` is the same at both ends. Raises `GroupError` when the other end is gone, or at the deadline.
        """
        flat = joined([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
        spare: list[torch.Tensor] = []
        works: list[tuple[Any, torch.Tensor]] = []
        sums: list[torch.Tensor] = []
        for length, parts in buckets(flat, BUCKET):
            if len(works) == 2:
                self._wait(works.pop(0)[0], deadline)
            first = parts[0][1] if parts else None
            if first is not None and first.nbytes == length and first.storage_offset() % WORD == 0:
                bucket = first
            else:
                if len(spare) < 2:
                    spare.append(torch.empty(BUCKET, dtype=torch.uint8, device=flat[0].device))
                else:
                    # That of the bucket before is under way.
                    spare.reverse()
                bucket = spare[-1][:length]
                for at, part in parts:
                    bucket[at : at + part.nbytes] = part
            works.append((self._begin(self._group.send, bucket), bucket))
            if checked:
                sums.append(checksum(bucket))
        if sums:
            works.append((self._begin(self._group.send, sent := torch.stack(sums)), sent))
        for work, _ in works:
            self._wait(work, deadline)

    def receive(
        self, sizes: list[int], device: torch.device, deadline: float, *, checked: bool = True
    ) -> list[torch.Tensor]:
        """The bytes of tensors of these sizes. Their memory is used again when all of them are freed.

        Raises `GroupError`, also when something was damaged on the way.
        """
        begins, total = offsets(sizes)
        if device.type == "cpu":
            run = torch.from_numpy(self._spare.take(total))
        else:
            run = torch.empty(total, dtype=torch.uint8, device=device)
        parts = [run[low : low + BUCKET] for low in range(0, total, BUCKET)]
        told = torch.empty(len(parts), dtype=torch.int64, device=device)
        works = [self._begin(self._group.recv, part) for part in parts]
        if checked and parts:
            works.append(self._begin(self._group.recv, told))
        sums = []
        for work, part in zip_longest(works, parts):
            self._wait(work, deadline)
            if checked and part is not None:
                sums.append(checksum(part))
        if sums and not torch.equal(torch.stack(sums), told):
            raise GroupError(f"weights were damaged on their way over {self._backend}", "send them again")
        return [run[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]

    def _begin(self, action: Any, bucket: torch.Tensor) -> Any:
        try:
            return action([bucket], self._other, 0)
        except (dist.DistError, RuntimeError) as error:
            raise self._error(error) from error

    def _wait(self, work: Any, deadline: float) -> None:
        try:
            if self._backend == "gloo":
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
                return
            while not work.is_completed():
                if time.monotonic() >= deadline or self._over():
                    raise GroupError("a transfer over nccl did not end", "is the other end alive?")
                time.sleep(NCCL_POLL_INTERVAL)
        except (dist.DistError, RuntimeError) as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> GroupError:
        return GroupError(f"weights over {self._backend}: {error}", "did the other end die?")

    def close(self) -> None:
        """End it; all waits in it fail, here and at the other end."""
        with self._lock:
            for each in self._gloo:
                each.end()
            self._gloo = []
            if self._backend == "nccl":
                self._group.abort()
