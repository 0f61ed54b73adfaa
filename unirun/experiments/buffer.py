"""The buffer of an asynchronous trial: the trajectories that were accepted, on disk, and the steps that took them.

::

    <trial>/recover/buffer/000001.items   trajectories in their order of arrival, with their data
                          /000001.gone    those of them that are not needed any more
                          /taken.jsonl    which of them each step has taken, written before it changes anything

Model worker 0 takes trajectories from rollout workers, and writes them before it says so: from then on none is lost. A
step takes the oldest ones; a step that is made again takes the same ones again, from here. What no checkpoint goes back
to any more is removed.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from unirun import atomic
from unirun.errors import CheckpointDamaged, QueueTimeout, UsageError
from unirun.experiments.config import GserverManager
from unirun.experiments.sample import SequenceSample
from unirun.observe.events import read_lines
from unirun.values import Value
from unirun.weights.queue import Item, Queue
from unirun.wire.reporting import gave_up

# The order: a pure value of the master, which trajectories wait and which step has taken which.


class Taken(Value):
    """The trajectories that a step trains on, and those that were too `old` for it, and are dropped."""

    step: int
    ids: tuple[str, ...]
    old: tuple[str, ...] = ()


class TakeOrder(Value):
    """The versions of the trajectories that wait, by id, the oldest first; what each step has taken."""

    waiting: Mapping[str, int] = MappingProxyType({})
    taken: Mapping[int, Taken] = MappingProxyType({})

    @classmethod
    def of(cls, taken: Iterable[Taken]) -> TakeOrder:
        """The order after these steps; nothing waits."""
        return cls(taken={each.step: each for each in taken})

    @property
    def begun(self) -> int:
        """The number of steps that were begun, in any attempt: versions up to this one may have been seen."""
        return max(self.taken, default=-1) + 1

    def arrived(self, some: Iterable[tuple[str, int]]) -> TakeOrder:
        """These were accepted, in this order, made with these versions. Those that were taken before do not wait."""
        used = {each for taken in self.taken.values() for each in (*taken.ids, *taken.old)}
        more = {each: version for each, version in some if each not in used}
        return replace(self, waiting={**self.waiting, **more})

    def take(self, step: int, count: int, eta: int) -> tuple[TakeOrder, Taken | None]:
        """The trajectories of `step`, which trains version `step` of the weights: those that it has taken before, if it
        is made again; else the `count` that arrived first, of those that are at most `eta` versions old. None while
        there are too few."""
        if step in self.taken:
            return self, self.taken[step]
        old = tuple(each for each, version in self.waiting.items() if step - version > eta)
        fresh = [each for each in self.waiting if each not in {*old}][:count]
        if len(fresh) < count:
            return self, None
        found = Taken(step, tuple(fresh), old)
        gone = {*fresh, *old}
        waiting = {each: version for each, version in self.waiting.items() if each not in gone}
        return replace(self, waiting=waiting, taken={**self.taken, step: found}), found

    def released(self, step: int) -> tuple[TakeOrder, list[str]]:
        """No step before `step` is made again: the order without them, and the trajectories that they have taken."""
        over = [taken for number, taken in self.taken.items() if number < step]
        kept = {number: taken for number, taken in self.taken.items() if number >= step}
        return replace(self, taken=kept), [each for taken in over for each in (*taken.ids, *taken.old)]


def staleness(taken: Taken, versions: Mapping[str, int]) -> dict[int, int]:
    """The number of trajectories of a step by their age in versions."""
    found: dict[int, int] = {}
    for age in sorted(taken.step - versions[each] for each in taken.ids):
        found[age] = found.get(age, 0) + 1
    return found


class TakenFile:
    """``taken.jsonl``. A line is on disk before its step changes anything."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "taken.jsonl"

    def read(self) -> list[Taken]:
        """All lines. One that was cut is of a step that had not begun."""
        if not self._path.exists():
            return []
        return [msgspec.convert(line, Taken) for line in read_lines(self._path)]

    def write(self, taken: Taken) -> None:
        """Add a line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        append_line(self._path, msgspec.to_builtins(taken))

    def cut(self, step: int) -> None:
        """Drop the lines of steps before this one."""
        lines = [msgspec.to_builtins(taken) for taken in self.read() if taken.step >= step]
        atomic.replace(self._path, "".join(f"{json.dumps(line)}\n" for line in lines), lasting=True)


def append_line(path: Path, value: Any) -> None:
    """Add a line of JSON, which is on disk when it returns. A line before it that was cut ends there."""
    with path.open("a") as file:
        cut = file.tell() and not _ends_with_newline(path)
        file.write("\n" * bool(cut) + json.dumps(value) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


# The file of the trajectories.

SEGMENT_BYTES = 64 << 20
"""The size from which on a file is followed by the next one. A file is removed when all of its trajectories are."""

_HEAD = 16
"""Bytes before each trajectory: the length of its description, that of its data, and a checksum of both."""


class ItemHeader(Value):
    """The description of a trajectory in its file."""

    id: str
    version: int
    seqlens: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    trailing: dict[str, tuple[int, ...]]
    metadata: dict[str, Any]

    def meta(self) -> SequenceSample:
        """The sample, without its data."""
        return SequenceSample(
            (self.id,),
            {key: [list(lengths)] for key, lengths in self.seqlens.items()},
            {key: getattr(torch, name) for key, name in self.dtypes.items()},
            self.trailing,
            None,
            {name: [value] for name, value in self.metadata.items()},
        )


def header_of(sample: SequenceSample, version: int) -> ItemHeader:
    """The description of a trajectory. Raises `UsageError` for a sample with any other number of ids than one."""
    if len(sample.ids) != 1 or sample.data is None:
        raise UsageError(
            f"an item of the queue of trajectories has {len(sample.ids)} ids", "put one for each group"
        )
    return ItemHeader(
        sample.ids[0],
        version,
        {key: tuple(lengths[0]) for key, lengths in sample.seqlens.items()},
        {key: str(dtype).removeprefix("torch.") for key, dtype in sample.dtypes.items()},
        {key: tuple(shape) for key, shape in sample.trailing.items()},
        {name: values[0] for name, values in sample.metadata.items()},
    )


class Extent(Value):
    """The place of a trajectory's data."""

    file: str
    start: int
    size: int


REMEMBERED = 1 << 16
"""Trajectories that are known to have been accepted after they were released. A producer that has not heard of it puts
the same one again as soon as it can reach this process."""


class Buffer:
    """The trajectories on disk. One process at a time has it open. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Read what is there. Raises `CheckpointDamaged`."""
        self._folder, self._lock = folder, threading.Condition()
        # In their order of arrival, with their numbers in it.
        self._found: dict[str, tuple[ItemHeader, Extent, int]] = {}
        self._next = 0
        # The ones that were released last, as keys.
        self._released: dict[str, None] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {path.name: 0 for path in sorted(folder.glob("*.items"))}
        for name in self._files:
            path = self._gone(name)
            gone = {each for line in read_lines(path) for each in line["ids"]} if path.exists() else set()
            self._released.update(dict.fromkeys(gone))
            for about, place in _items(folder / name):
                if about.id not in gone:
                    self._files[name] += 1
                    self._arrived(about, place)
        self.earlier = frozenset({*self._found, *self._released})
        """The trajectories that processes before have accepted, as far as their files are there."""
        self._out: Any = None
        self._remove_files()

    def _arrived(self, about: ItemHeader, place: Extent) -> None:
        self._found[about.id] = about, place, self._next
        self._next += 1

    def __contains__(self, each: str) -> bool:
        """Return True for a trajectory that was accepted, also if it was released not long ago."""
        return each in self._found or each in self._released

    def __len__(self) -> int:
        return len(self._found)

    def add(self, some: Sequence[tuple[SequenceSample, int]]) -> None:
        """Write trajectories and the versions that they were made with. They are on disk when it returns, and nobody
        finds them before."""
        new: list[tuple[ItemHeader, Extent]] = []
        for sample, version in some:
            about = header_of(sample, version)
            data = b"".join(_bytes(sample[key]) for key in about.seqlens)
            head = msgspec.json.encode(about)
            out = self._file()
            place = Extent(Path(out.name).name, out.tell() + _HEAD + len(head), len(data))
            sum_ = zlib.crc32(data, zlib.crc32(head))
            with self._lock:
                # Counted first, so that the file is not removed meanwhile.
                self._files[place.file] += 1
            out.write(b"".join([len(head).to_bytes(4), len(data).to_bytes(8), sum_.to_bytes(4), head, data]))
            new.append((about, place))
        if self._out is not None:
            self._out.flush()
            os.fsync(self._out.fileno())
        with self._lock:
            for about, place in new:
                self._arrived(about, place)
            self._lock.notify_all()

    def _file(self) -> Any:
        """The file to write to. What a process before has written is not appended to, as it may have been cut."""
        if self._out is None or self._out.tell() >= SEGMENT_BYTES:
            if self._out is not None:
                self._out.flush()
                os.fsync(self._out.fileno())
                self._out.close()
            number = 1 + max((int(name.partition(".")[0]) for name in self._files), default=0)
            name = f"{number:06}.items"
            with self._lock:
                self._out = (self._folder / name).open("xb")
                self._files[name] = 0
            atomic.sync(self._folder)
        return self._out

    def since(self, number: int, seconds: float = 0.0) -> tuple[int, list[tuple[int, SequenceSample]]]:
        """The trajectories that arrived from `number` on, with their versions, and the number of the next one. Waits
        for one, but not longer than so many `seconds`."""
        with self._lock:
            self._lock.wait_for(lambda: self._next > number, seconds)
            newest = itertools.takewhile(lambda each: each[2] >= number, reversed(self._found.values()))
            found = [about for about, _, _ in newest][::-1]
            return self._next, [(about.version, about.meta()) for about in found]

    def read(self, ids: Sequence[str]) -> SequenceSample:
        """The trajectories with these ids. Raises `CheckpointDamaged`."""
        return SequenceSample.gather([self._read(each) for each in ids])

    def _read(self, each: str) -> SequenceSample:
        with self._lock:
            if each not in self._found:
                raise CheckpointDamaged(
                    f"trajectory {each!r} is not in {self._folder}, and a step has taken it"
                )
            about, place, _ = self._found[each]
        with (self._folder / place.file).open("rb") as file:
            file.seek(place.start)
            content = file.read(place.size)
        meta, data, at = about.meta(), {}, 0
        for key in meta.keys:
            count, trailing, dtype = meta.total(key), meta.trailing[key], meta.dtypes[key]
            size = count * dtype.itemsize * torch.Size(trailing).numel()
            part = torch.frombuffer(bytearray(content[at : at + size] or bytes(dtype.itemsize)), dtype=dtype)
            data[key] = part[: count * torch.Size(trailing).numel()].view(count, *trailing)
            at += size
        return SequenceSample(meta.ids, meta.seqlens, meta.dtypes, meta.trailing, data, meta.metadata)

    def release(self, ids: Collection[str]) -> int:
        """These are not read any more, also by the next process. Files that have no others are removed. Returns how
        many of them were here."""
        with self._lock:
            there = [each for each in ids if each in self._found]
            self._released.update(dict.fromkeys(there))
            for each in [*itertools.islice(self._released, max(len(self._released) - REMEMBERED, 0))]:
                del self._released[each]
            gone: dict[str, list[str]] = {}
            for each in there:
                name = self._found.pop(each)[1].file
                self._files[name] -= 1
                gone.setdefault(name, []).append(each)
            for name in self._remove_files():
                gone.pop(name, None)
            for name, some in gone.items():
                append_line(self._gone(name), {"ids": some})
            return len(there)

    def _remove_files(self) -> list[str]:
        """Remove the files without trajectories that are needed, and return their names."""
        current = Path(self._out.name).name if self._out is not None else ""
        empty = [name for name, count in self._files.items() if not count and name != current]
        for name in empty:
            (self._folder / name).unlink()
            # Last: without it, all that it names would be needed again.
            self._gone(name).unlink(missing_ok=True)
            del self._files[name]
        return empty

    def _gone(self, name: str) -> Path:
        return (self._folder / name).with_suffix(".gone")


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def _items(path: Path) -> Iterator[tuple[ItemHeader, Extent]]:
    """The trajectories of a file. One that was cut, at its end, was not accepted. Raises `CheckpointDamaged`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while len(head := file.read(_HEAD)) == _HEAD:
            about_size, data_size = int.from_bytes(head[:4]), int.from_bytes(head[4:12])
            if file.tell() + about_size + data_size > size:
                return
            start = file.tell()
            about, data = file.read(about_size), file.read(data_size)
            if not about or zlib.crc32(data, zlib.crc32(about)) != int.from_bytes(head[12:]):
                if not any(file.read()):
                    # Its bytes were not all on disk when the power failed: a file may have zeros in their place.
                    return
                raise CheckpointDamaged(f"{path} is damaged at byte {start}")
            yield (
                msgspec.json.decode(about, type=ItemHeader),
                Extent(path.name, start + about_size, data_size),
            )


# The way of trajectories into the buffer: a thread of model worker 0.

BUFFER_RANK = 0
"""The model worker that has the buffer and the gate."""

Arrivals = tuple[int, list[tuple[int, SequenceSample]], tuple[int, int]]
"""The number of the next trajectory, those before it with their versions, and how many this process has accepted and
rejected in all."""


QUEUE_ITEMS = 64
"""Groups of one rollout worker that are not in the buffer yet."""


def trajectories(manager: GserverManager) -> Queue:
    """The queue from rollout workers to the buffer, in a process of either role."""
    return Queue(
        "trajectories",
        producer="rollout_worker",
        consumer="model_worker",
        maxsize=QUEUE_ITEMS,
        batch=manager.train_batch_size,
        max_head_offpolicyness=manager.max_head_offpolicyness,
        max_concurrent_rollouts=manager.max_concurrent_rollouts,
    )


TAKEN_TOGETHER = 16
"""Trajectories that are taken at a time, and written together, if so many are there."""

TAKE_TIMEOUT = 1.0
"""Seconds after which the thread looks whether it is to end."""

CLOSE_TIMEOUT = 10.0
"""Seconds in which it ends; an interface may take long to accept trajectories."""


class Intake:
    """Takes trajectories from a queue into a buffer. `accepts` returns False for one that is not worth training on;
    another one takes its place."""

    def __init__(self, buffer: Buffer, source: Queue, accepts: Callable[[SequenceSample], bool]) -> None:
        self._buffer, self._source, self._accepts = buffer, source, accepts
        self.accepted = self.rejected = 0
        self.waited = 0.0
        """Seconds in which there was none."""
        self.error: Exception | None = None
        """The end of the thread, which `raise_error` tells."""
        self._thread = threading.Thread(target=self._run, name="trajectories", daemon=True)
        self._closed = False

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Take no more, and end the thread. What it has taken is on disk then."""
        self._closed = True
        self._thread.join(CLOSE_TIMEOUT)
        if self._thread.is_alive():
            gave_up("the thread that takes trajectories", CLOSE_TIMEOUT)

    def raise_error(self) -> None:
        """Raise the error that has ended the thread, if there is one."""
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        while self.error is None and not self._closed:
            try:
                self.take()
            except Exception as error:  # noqa: BLE001 - the master is told, with the next call
                self.error = error

    def take(self) -> None:
        """Take what is there, or wait a moment for it."""
        began = time.monotonic()
        try:
            items = self._source.get_some(TAKEN_TOGETHER, timeout=TAKE_TIMEOUT)
        except QueueTimeout:
            return
        finally:
            self.waited += time.monotonic() - began
        new: dict[str, tuple[SequenceSample, int]] = {}
        for item in items:
            sample: SequenceSample = item.value
            if sample.ids and sample.ids[0] in self._buffer:
                # It was written, and the producer had not heard of it.
                if sample.ids[0] in self._buffer.earlier:
                    # The master has counted it (`Queue.keep`, `Queue.advance`), so it does not count as an item, too.
                    self._source.drop(item)
                continue
            if self._accepts(sample):
                new[header_of(sample, version_of(item)).id] = sample, version_of(item)
            else:
                self.rejected += 1
                self._source.drop(item)
        self._buffer.add([*new.values()])
        self.accepted += len(new)
        self._source.done()


def version_of(item: Item) -> int:
    """The oldest version that has made a token of a trajectory. Raises `UsageError`."""
    if item.version is not None:
        return item.version
    sample: SequenceSample = item.value
    made = sample["versions"][sample["versions"] >= 0] if "versions" in sample.keys else torch.empty(0)
    if not len(made):
        raise UsageError("a trajectory was put without a version", "put(sample, version=…)")
    return int(made.min())
