"""`RemoteSource`: one process that has weights, as a receiver sees it; its connection, and the tensors from it."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from unirun.errors import FrameError, GroupError, PeerLost
from unirun.roles.transport.protocol import Connection, LendingTransport, Parcel, writable
from unirun.values import Value, WorkerId
from unirun.weights.devices import DeviceError, DeviceInterface
from unirun.weights.messages import WEIGHTS, Answer, Fetch, Fetched, Origin, Peek, Release, Request
from unirun.weights.pairing import PairGroup
from unirun.weights.publishing import TOKEN, Packing
from unirun.weights.tensors import Box, Layout, NamedBox, Part, Piece, dtype_of, part_of

# The tensors that a receiver has of one version: mapped memory of a publisher, or parts that were sent to it.


class Mapped:
    """A block of a publisher on this host. It stays mapped, and is read again when it has another version.

    Memory of a device is borrowed for one version.
    """

    def __init__(self, packing: Packing, memory: torch.Tensor, device: DeviceInterface | None = None) -> None:
        self._packing, self._memory, self._device = packing, memory, device
        self._takes: Sequence[NamedBox] = ()
        self._views: list[torch.Tensor] = []

    @property
    def layout(self) -> Layout:
        """All that the publisher has."""
        return self._packing.layout

    def view(self, name: str, box: Box) -> torch.Tensor:
        """The elements of `box`. Raises KeyError or ValueError when they are not in one piece here."""
        return self._packing.view(self._memory, name, box)

    def views(self, takes: Sequence[NamedBox]) -> list[torch.Tensor]:
        """The elements of each take. A receiver asks for the same ones of every version."""
        if self._takes is not takes:
            self._takes, self._views = takes, [self.view(take.name, take.box) for take in takes]
        return self._views

    def end(self) -> None:
        """Give memory of a device back."""
        device, self._device = self._device, None
        if device is not None:
            device.end(self._memory)


class Sent:
    """Parts in memory of this process."""

    def __init__(self, wanted: Layout, takes: Sequence[NamedBox], tensors: Sequence[torch.Tensor]) -> None:
        """`takes` of `wanted`, and the `tensors` that came."""
        self._wanted = wanted
        self._parts: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for take, tensor in zip(takes, tensors, strict=True):
            self._parts.setdefault(take.name, []).append((take.box, tensor))

    @property
    def layout(self) -> Layout:
        """The parts."""
        return {
            name: Part(self._wanted[name].tensor, tuple(_piece(box) for box, _ in parts))
            for name, parts in self._parts.items()
        }

    def view(self, name: str, box: Box) -> torch.Tensor:
        """The elements of `box`. Raises KeyError or ValueError when they are not in one piece here."""
        about = self._wanted[name].tensor
        for whole, tensor in self._parts[name]:
            if whole.meet(box) == box:
                return part_of(tensor, Part(about, (_piece(whole),)), box)
        raise ValueError(f"{box} of {name} is not in one part")


Copy = Mapped | Sent


class VersionFile:
    """A version as a safetensors file in shared memory, at `path` as long as this object is there. `token` is in the
    file, and in no other."""

    def __init__(
        self,
        path: str,
        token: str,
        end: Callable[[], object],
        memory: object = None,
        is_intact: Callable[[], bool] = lambda: True,
    ) -> None:
        """`end` is called when it is not needed any more; then `memory` is given back. `is_intact` returns False when
        another process may have written to it."""
        self.path, self.token, self.is_intact = path, token, is_intact
        self._memory = memory
        weakref.finalize(self, end).atexit = False


def opened(path: str, token: str, memory: object, is_intact: Callable[[], bool]) -> VersionFile | None:
    """The file at `path`, which is that of another process, with a descriptor of this one: it stays when the other one
    ends. None when the file with this `token` cannot be reached so."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    mine = f"/proc/{os.getpid()}/fd/{handle}"
    file = VersionFile(mine, token, partial(os.close, handle), memory, is_intact)
    try:
        with safe_open(mine, framework="pt") as found:
            return file if (found.metadata() or {}).get(TOKEN) == token else None
    except (OSError, SafetensorError):
        return None


def _piece(box: Box) -> Piece:
    return Piece(box, (0,) * len(box.start))


_links = itertools.count(1)
"""Numbers of process groups, as seen by this process."""

Pairing = Callable[[str, float], PairGroup]
"""Makes this end of the process group of a link before a deadline."""


class RemoteSource:
    """A publisher, or a receiver that holds what it has received."""

    def __init__(
        self,
        channel: str,
        line: PeerConnection,
        reader: str,
        *,
        here: bool = False,
        holder: bool = False,
        host: str = "",
        backend: str = "",
        checked: bool = True,
        pairing: Pairing | None = None,
    ) -> None:
        """`here`: it is a publisher on this host, so its memory can be mapped. `host`: the host of the reader, whose
        receivers give to each other what one of them has got; empty if they do not. `pairing` makes process groups
        with it; `backend` is that which is always used, if any; `checked`: with checksums."""
        self.line, self.here, self.holder = line, here, holder
        self.packing: Packing | None = None
        self.on_device = False
        """True if its weights are in memory of a device."""
        self.withdrawals = 0
        """The times that it has withdrawn, as far as is known."""
        self.device: DeviceInterface | None = None
        """The device of the reader's tensors, if it can reach memory of the publisher's device."""
        self._unreachable = False
        self._backend, self._checked, self._pairing = backend, checked, pairing
        self._pair: PairGroup | None = None
        self._number = 0
        self._link = ""
        self._channel, self._reader, self._host = channel, reader, host
        self._mapped: dict[int, Mapped] = {}

    @property
    def who(self) -> WorkerId:
        """The process."""
        return self.line.who

    @property
    def origin(self) -> Origin:
        """The origin of its versions."""
        return self.who, self.withdrawals

    def use(self, device: DeviceInterface | None) -> None:
        """The tensors of the reader are on this device."""
        self.device = None if self._unreachable else device

    @property
    def link(self) -> str:
        """The backend of the process group through which parts come now; empty: none."""
        return self._link.partition(" ")[0]

    def ask(self, request: Request) -> Future[Parcel]:
        """Send a request. The answer raises `PeerLost` when the process has ended."""
        return self.line.ask(request)

    def fetch(
        self, at_least: int, takes: Sequence[NamedBox], patience: float, *, keep: bool
    ) -> Future[Parcel]:
        """Ask for a version. `keep`: its tensors are kept, and so the memory that is lent, until they are freed."""
        layout = self.packing.number if self.packing is not None else 0
        reader, mapped = self._reader, tuple(self._mapped)
        self._link = self._wanted_link()
        device = self.device is not None and self.on_device and (self.here or self.link == "nccl")
        if keep and self.here:
            # Its blocks come back when they are not mapped any more, and not when the next version is held.
            reader, mapped = f"{reader} kept", ()
        parts = None if self.here else tuple(takes)
        # Each device has its own way into the network; what one gets is not given to others.
        host = "" if device else self._host
        return self.ask(
            Fetch(
                self._channel,
                reader,
                layout,
                at_least,
                patience,
                mapped,
                parts,
                host,
                self._link,
                self._checked,
                device,
            )
        )

    def _wanted_link(self) -> str:
        """The process group through which the next version comes; empty: none."""
        backend = self._backend
        if not backend and self.device is not None and self.on_device:
            backend = "nccl"
        if self.here or self.holder or self._pairing is None or not backend:
            return ""
        if self._pair is None:
            self._number = next(_links)
        return f"{backend} {self._number}"

    def fetch_parts(
        self,
        version: int,
        takes: Sequence[NamedBox],
        patience: float,
        layout: int = 0,
        origin: Origin | None = None,
    ) -> Future[Parcel]:
        """Ask for parts that this process has itself, of `version` or a later one; a receiver for those from this
        `origin`."""
        return self.ask(
            Fetch(self._channel, self._reader, layout, version, patience, parts=tuple(takes), origin=origin)
        )

    def peek(self, patience: float | None) -> Future[Parcel]:
        """Ask for the number of the latest version."""
        return self.ask(Peek(self._channel, patience))

    def mapped(self, fetched: Fetched, parcel: Parcel, *, keep: bool) -> Mapped:
        """The publisher's memory with the version. Raises `FrameError`, and `DeviceError` when it cannot be reached;
        it is not tried again."""
        assert self.packing is not None
        if fetched.handle and self.device is not None:
            try:
                return Mapped(self.packing, self.device.borrow(fetched.handle), self.device)
            except DeviceError:
                self._unreachable = True
                raise
        known = None if keep else self._mapped.get(fetched.block)
        if known is not None:
            return known
        if not parcel.buffers:
            raise FrameError(f"{self.who} did not lend the block with version {fetched.version}")
        found = Mapped(self.packing, torch.frombuffer(parcel.buffers[0], dtype=torch.uint8))
        if not keep:
            self._mapped[fetched.block] = found
        return found

    def sent(self, parcel: Parcel, takes: Sequence[NamedBox], wanted: Layout) -> list[torch.Tensor]:
        """The tensors in the buffers of `parcel`: `takes` of `wanted`. Raises `FrameError`."""
        if len(parcel.buffers) != len(takes):
            raise FrameError(f"{self.who} sent {len(parcel.buffers)} parts where {len(takes)} were asked for")
        return [
            self._tensor(take, dtype_of(wanted[take.name].tensor.dtype), buffer)
            for take, buffer in zip(takes, parcel.buffers, strict=True)
        ]

    def linked(
        self, takes: Sequence[NamedBox], wanted: Layout, deadline: float, place: torch.device
    ) -> list[torch.Tensor]:
        """The tensors that come through the process group, at `place` if its backend is for devices.

        Raises `PeerLost`; the next ones come through another group.
        """
        assert self._pairing is not None
        dtypes = [dtype_of(wanted[take.name].tensor.dtype) for take in takes]
        sizes = [take.box.count * dtype.itemsize for take, dtype in zip(takes, dtypes, strict=True)]
        try:
            if self._pair is None:
                self._pair = self._pairing(self._link, deadline)
            where = place if self.link == "nccl" else torch.device("cpu")
            runs = self._pair.receive(sizes, where, deadline, checked=self._checked) if takes else []
        except GroupError as error:
            self.unlink()
            raise PeerLost(
                f"{self.who} did not send its weights: {error}",
                "try again when it was started again",
                worker=str(self.who),
            ) from error
        return [
            run.view(dtype).view(take.box.size) for take, dtype, run in zip(takes, dtypes, runs, strict=True)
        ]

    def unlink(self) -> None:
        """End the process group with it."""
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()

    def _tensor(self, take: NamedBox, dtype: torch.dtype, buffer: memoryview) -> torch.Tensor:
        if buffer.nbytes != take.box.count * dtype.itemsize:
            raise FrameError(f"{self.who} sent {buffer.nbytes} bytes of {take.name}")
        return torch.frombuffer(writable(buffer), dtype=torch.uint8).view(dtype).view(take.box.size)

    def was_read(self, fetched: Fetched) -> Future[Parcel] | None:
        """Ask whether nobody has written to what was read. None: it was sent from memory that nobody writes to."""
        if not self.here and not (self.holder and fetched.layout):
            return None
        return self.ask(Release(self._channel, self._reader, fetched.block, keep=True))

    def release(self, block: int) -> Future[Parcel]:
        """Say that the block is not needed any more."""
        return self.ask(Release(self._channel, self._reader, block))

    def describe(self, packing: Packing | None, *, on_device: bool = False, withdrawals: int = 0) -> None:
        """Set where tensors are in the publisher's memory; None when that is not known any more."""
        self.packing, self.on_device, self.withdrawals = packing, on_device, withdrawals
        self._mapped.clear()

    def close(self) -> None:
        """End the connection."""
        self.unlink()
        self.line.close()


class PeerConnection:
    """A connection to `who`. Thread-safe."""

    def __init__(self, who: WorkerId, transport: LendingTransport, endpoint: str) -> None:
        """Raises `ChannelError` when nobody answers."""
        self.who, self.endpoint = who, endpoint
        self._lock = threading.Lock()
        self._open: set[Future[Parcel]] = set()
        self._lost = ""
        self._channel: Connection = transport.connect(who, endpoint, self._broken, WEIGHTS)

    @property
    def lost(self) -> bool:
        """True if the connection has ended."""
        return bool(self._lost)

    def _broken(self, reason: str) -> None:
        with self._lock:
            self._lost = reason or "the connection has ended"
            failed, self._open = self._open, set()
        for future in failed:
            future.set_exception(self._error())

    def _error(self) -> PeerLost:
        return PeerLost(
            f"{self.who} is gone: {self._lost}", "try again when it was started again", worker=str(self.who)
        )

    def ask(self, request: Value) -> Future[Parcel]:
        """Send a request. The future raises `PeerLost` when the connection ends; this does when it has ended."""
        future: Future[Parcel] = Future()
        with self._lock:
            if self._lost:
                raise self._error()
            self._open.add(future)
        self._channel.call(Parcel(msgspec.json.encode(request)), partial(self._answered, future))
        return future

    def _answered(self, future: Future[Parcel], parcel: Parcel) -> None:
        with self._lock:
            # The connection may be closed in another thread meanwhile.
            waits = future in self._open
            self._open.discard(future)
        if waits:
            future.set_result(parcel)

    def close(self, reason: str = "it was closed here") -> None:
        """Close the connection, which the other end sees."""
        self._channel.close()
        self._broken(reason)


_answers = msgspec.json.Decoder(Answer)


def answer_of(head: bytes) -> Answer:
    """The answer in a parcel about weights. Raises `FrameError` for anything else."""
    try:
        found: Answer = _answers.decode(head)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"this is no answer about weights: {error}") from error
    return found
