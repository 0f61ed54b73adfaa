"""The data that model workers give each other without their master: data of sequences, and parameters.

A `DataStore` has what one process holds. Others ask for it over the listener that weights and queues use, and a thread
of the transport answers, so no request waits for a computation.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from unirun.errors import FrameError, PeerLost
from unirun.experiments.data.sample import SequenceSample
from unirun.experiments.orders import Traffic
from unirun.roles.transport.protocol import Parcel, Reply
from unirun.values import Value
from unirun.weights.layout import Layout, ReadItem, by_source, plan
from unirun.weights.messages import NamedBox, PeerConnection, Query, encode
from unirun.weights.publishing import buffers_of
from unirun.weights.tensors import dtype_of, layout_of, local, part_of

NAME = "experiments"
"""The name under which other workers send requests to a shelf."""


class WantData(Value, tag=True):
    """Asks for the data `key` of these ids of a step: one buffer, in the order of the ids."""

    step: int
    key: str
    ids: tuple[str, ...]


class WantLayout(Value, tag=True):
    """Asks for what this process has of a model."""

    model: str


class WantParts(Value, tag=True):
    """Asks for parts of the parameters of a model: a buffer for each."""

    model: str
    parts: tuple[NamedBox, ...]


class DataReply(Value):
    """The answer to a request. `problem` says why the data cannot be given. `layout` answers `WantLayout`."""

    problem: str = ""
    layout: Layout = {}  # noqa: RUF012


_wants = msgspec.json.Decoder(WantData | WantLayout | WantParts)
_answers = msgspec.json.Decoder(DataReply)


class DataStore:
    """The data that one process has: those of the sequences of a step, by key and id, and parameters of models."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = -1
        self._data: dict[tuple[str, str], torch.Tensor] = {}
        self._models: dict[str, Callable[[], Mapping[str, torch.Tensor]]] = {}

    def begin(self, step: int) -> None:
        """Data that is put here from now on belongs to `step`. Data of another step is dropped."""
        with self._lock:
            if step != self._step:
                self._step = step
                self._data.clear()

    def put(self, sample: SequenceSample) -> None:
        """Keep the data of a sample in host memory, from which it is sent to others."""
        parts = {key: sample[key].cpu().split(sample.sizes(key)) for key in sample.keys}
        with self._lock:
            for key, tensors in parts.items():
                self._data.update(zip([(key, each) for each in sample.ids], tensors, strict=True))

    def has(self, key: str, each: str) -> bool:
        """Return True if the data of an id is here."""
        with self._lock:
            return (key, each) in self._data

    def get(self, key: str, ids: Sequence[str]) -> list[torch.Tensor]:
        """The data of these ids, which are here."""
        with self._lock:
            return [self._data[key, each] for each in ids]

    def model(self, name: str, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Others may ask for the parameters of a model, which `tensors` gives as they are now."""
        with self._lock:
            self._models[name] = tensors

    def forget(self) -> None:
        """There are no models any more."""
        with self._lock:
            self._models.clear()

    def answer(self, body: bytes, reply: Reply) -> None:
        """Answer another process."""
        try:
            want = _wants.decode(body)
            if isinstance(want, WantLayout):
                found = DataReply(layout=layout_of(self._tensors(want.model)))
                parcel = Parcel(msgspec.json.encode(found))
            elif isinstance(want, WantParts):
                parcel = Parcel(msgspec.json.encode(DataReply()), buffers_of(self._parts(want), _nothing))
            else:
                parcel = Parcel(msgspec.json.encode(DataReply()), buffers_of([self._wanted(want)], _nothing))
        except (KeyError, ValueError, RuntimeError) as error:
            parcel = Parcel(msgspec.json.encode(DataReply(f"it has no {error}")))
        reply(parcel)

    def _tensors(self, model: str) -> Mapping[str, torch.Tensor]:
        with self._lock:
            tensors = self._models[model]
        return tensors()

    def _parts(self, want: WantParts) -> list[torch.Tensor]:
        tensors = self._tensors(want.model)
        layout = layout_of(tensors)
        return [part_of(local(tensors[part.name]), layout[part.name], part.box).cpu() for part in want.parts]

    def _wanted(self, want: WantData) -> torch.Tensor:
        with self._lock:
            if want.step != self._step:
                raise ValueError(f"data of step {want.step}: it is in step {self._step}")
            parts = [self._data[want.key, each] for each in want.ids]
        return torch.cat(parts)


def _nothing() -> None:
    """Nothing is released: what is sent is kept by the buffers themselves."""


Lines = Callable[[int], PeerConnection]
"""The connection to a rank. Raises `PeerLost` when it cannot be reached."""


@dataclass(frozen=True)
class _Question:
    """A request to another process, and its answer."""

    head: bytes
    future: Future[Parcel]


class DataClient:
    """Asks other shelves. `traffic` is what that has cost so far."""

    def __init__(self, rank: int, shelf: DataStore, lines: Lines, timeout: float) -> None:
        self._rank, self._shelf, self._lines, self._timeout = rank, shelf, lines, timeout
        self._layouts: dict[tuple[str, int], Layout] = {}
        self.traffic = Traffic()

    def data(
        self, step: int, meta: SequenceSample, where: Mapping[str, Sequence[Sequence[int]]]
    ) -> SequenceSample:
        """The sample `meta` with its data. `where` has, for each key and id, the ranks that hold it. Received data
        is kept on this shelf, so that it is sent once."""
        asked: list[tuple[str, list[int], int, _Question]] = []
        for key in meta.keys:
            missing: dict[int, list[int]] = {}
            size = meta.dtypes[key].itemsize * math.prod(meta.trailing[key])
            for at, (each, ranks) in enumerate(zip(meta.ids, where[key], strict=True)):
                if not self._shelf.has(key, each):
                    # Different ranks ask different owners, so that the load is shared.
                    missing.setdefault(ranks[self._rank % len(ranks)], []).append(at)
                    self.traffic += Traffic(needed=sum(meta.seqlens[key][at]) * size)
            for rank, places in missing.items():
                want = WantData(step, key, tuple(meta.ids[at] for at in places))
                asked.append((key, places, rank, self._ask(rank, want)))
        for key, places, rank, question in asked:
            (buffer,) = self._answer(rank, question, 1)[1]
            some = meta.select([key]).reorder(places)
            shape = (some.total(key), *meta.trailing[key])
            self._shelf.put(
                SequenceSample(
                    some.ids,
                    some.seqlens,
                    some.dtypes,
                    some.trailing,
                    {key: _tensor(buffer, meta.dtypes[key], shape)},
                )
            )
        data = {
            key: torch.cat(self._shelf.get(key, meta.ids))
            if meta.ids
            else torch.empty((0, *meta.trailing[key]), dtype=meta.dtypes[key])
            for key in meta.keys
        }
        return SequenceSample(meta.ids, meta.seqlens, meta.dtypes, meta.trailing, data, meta.metadata)

    @torch.no_grad()
    def parameters(
        self, model: str, ranks: Sequence[int], into: Mapping[str, torch.Tensor], eta: float = 1.0
    ) -> None:
        """Copy the parameters of `model`, which `ranks` hold, into the tensors of the same names. Each element is sent
        once. With `eta` below 1 the tensors of `into` become moving averages; integer tensors are copied.

        Raises `WeightsError` for tensors that do not fit.
        """
        layouts = [self._layout(model, rank) for rank in ranks]
        wanted = layout_of(into)
        near = [n for n, rank in enumerate(ranks) if rank == self._rank]
        takes = by_source(plan(layouts, wanted, near, self._rank))
        asked = {
            n: self._ask(ranks[n], WantParts(model, tuple(NamedBox(t.name, t.box) for t in some)))
            for n, some in takes.items()
            if ranks[n] != self._rank
        }
        for n, some in takes.items():
            if ranks[n] == self._rank:
                own = self._shelf._parts(WantParts(model, tuple(NamedBox(t.name, t.box) for t in some)))
                _put(own, some, into, wanted, eta)
            else:
                buffers = self._answer(ranks[n], asked[n], len(some))[1]
                size = sum(t.box.count * dtype_of(wanted[t.name].tensor.dtype).itemsize for t in some)
                self.traffic += Traffic(needed=size)
                came = [
                    _tensor(buffer, dtype_of(wanted[take.name].tensor.dtype), take.box.size)
                    for buffer, take in zip(buffers, some, strict=True)
                ]
                _put(came, some, into, wanted, eta)

    def _layout(self, model: str, rank: int) -> Layout:
        if (model, rank) not in self._layouts:
            if rank == self._rank:
                self._layouts[model, rank] = layout_of(self._shelf._tensors(model))
            else:
                self._layouts[model, rank] = self._answer(rank, self._ask(rank, WantLayout(model)), 0)[
                    0
                ].layout
        return self._layouts[model, rank]

    def forget(self) -> None:
        """Forget the layouts of all ranks: they may have changed after a restart."""
        self._layouts.clear()

    def _ask(self, rank: int, want: Any) -> _Question:
        head = encode(Query(NAME, msgspec.Raw(msgspec.json.encode(want))))
        return _Question(head, self._lines(rank).ask(head))

    def _answer(
        self, rank: int, question: _Question, buffers: int
    ) -> tuple[DataReply, tuple[memoryview, ...]]:
        try:
            try:
                parcel = question.future.result(self._timeout)
            except PeerLost:
                # The connection may have broken between two that live.
                parcel = self._lines(rank).ask(question.head).result(self._timeout)
        except TimeoutError as error:
            raise PeerLost(
                f"rank {rank} has not answered within {self._timeout:g} s", "is it stopped?", worker=str(rank)
            ) from error
        try:
            found = _answers.decode(parcel.head)
        except (ValueError, RecursionError) as error:
            raise FrameError(f"rank {rank} gives no answer about data: {error}") from error
        if found.problem or len(parcel.buffers) != buffers:
            # The master named this rank as an owner of the data, so its process was replaced since.
            raise PeerLost(
                f"rank {rank} does not give what was asked for: {found.problem or 'other buffers'}",
                "go on from the last checkpoint",
                worker=str(rank),
            )
        self.traffic += Traffic(moved=sum(buffer.nbytes for buffer in parcel.buffers))
        return found, parcel.buffers


def _tensor(buffer: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if not buffer.nbytes:
        return torch.empty(tuple(shape), dtype=dtype)
    try:
        return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(tuple(shape))
    except RuntimeError as error:
        raise FrameError(f"{buffer.nbytes} bytes are no {dtype} of {list(shape)}") from error


def _put(
    found: Sequence[torch.Tensor],
    takes: Sequence[ReadItem],
    into: Mapping[str, torch.Tensor],
    wanted: Layout,
    eta: float,
) -> None:
    for tensor, take in zip(found, takes, strict=True):
        target = part_of(local(into[take.name]), wanted[take.name], take.box)
        if eta < 1.0 and target.is_floating_point():
            target.lerp_(tensor.to(target.device), eta)
        else:
            target.copy_(tensor)
