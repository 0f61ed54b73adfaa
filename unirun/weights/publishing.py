"""The publishing end: the latest version in shared memory, and the answers to those who want it.

A version is written into a block that nobody reads, then becomes the current one at once. So a receiver has all of a
version or nothing of it, and a publisher does not wait for its receivers. Weights on a device stay there; those who
need them on the host get them from there, where they are copied when the first one asks.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from typing import Any

import numpy
import torch
from msgspec.json import decode, encode
from msgspec.structs import replace
from safetensors.torch import save as serialized

from unirun.errors import Fault, GroupError, UsageError
from unirun.roles.transport.frames import ALIGN, offsets
from unirun.roles.transport.protocol import Lent, Parcel, Reply
from unirun.weights.devices import DeviceError, DeviceInterface, cuda_device
from unirun.weights.messages import (
    Describe,
    Described,
    Fetch,
    Fetched,
    Peek,
    Release,
    Released,
    Request,
)
from unirun.weights.pairing import PairGroup
from unirun.weights.tensors import (
    Box,
    Layout,
    NamedBox,
    Piecewise,
    dtype_of,
    geometry,
    layout_of,
    local,
    part_of,
    writing,
)
from unirun.wire.reporting import report

# Shared memory for versions: it stays mapped, and is written again when nobody reads it any more.
#
# A memfd has no name, so the kernel frees it with the last process that has it, however that ends. Pages that exist are
# written several times as fast as new ones, so blocks are kept.

PAGE = 1 << 12
"""Bytes. Memory is had in pages."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Block:
    """A memfd of `size` bytes, mapped as the bytes `memory`. `readers` are those that may read it now.

    When there is no shared memory, it is ordinary memory, and `handle` is None; so it is for memory of a `device`.

    With `is_file`, what is in it is a safetensors file, which other processes of this user open at `path`. `token` is
    in it, and in no other file.
    """

    def __init__(self, number: int, size: int, device: DeviceInterface | None = None) -> None:
        """Raises `DeviceError`."""
        self.number, self.size, self.device = number, size, device
        self.readers: set[str] = set()
        self.handle: int | None = None
        self.token, self.is_file = secrets.token_hex(16), False
        self.lent = b""
        """With which other processes open the memory of the device."""
        self.memory: torch.Tensor
        if device is not None:
            self.memory = device.allocate(size)
            return
        try:
            self.handle, self.memory = _shared(size)
            # Where workers are threads, one may end without a `close`.
            self._end = weakref.finalize(self, os.close, self.handle)
            self._end.atexit = False
        except OSError as error:
            report(
                f"unirun: there is no shared memory for {size} bytes of weights ({error.strerror}): "
                "they are sent over sockets, which takes longer"
            )
            self.handle, self.memory = None, torch.empty(size, dtype=torch.uint8)

    @property
    def path(self) -> str:
        """The path of the memfd, which has no name of its own."""
        return f"/proc/{os.getpid()}/fd/{self.handle}"

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last mapping. Memory of a device is freed now."""
        if self.device is not None:
            self.device.end(self.memory)
        if self.handle is not None:
            self._end()


def _shared(size: int) -> tuple[int, torch.Tensor]:
    """A sealed memfd, and its memory. Raises OSError."""
    handle = os.memfd_create("unirun-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(handle, 0o600)
        # Reserved now: a page that cannot be had later would be a SIGBUS.
        os.posix_fallocate(handle, 0, size)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, SEALS)
        return handle, torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        # torch finds no second descriptor, or no place in the address space.
        os.close(handle)
        raise OSError(errno.ENOMEM, str(error)) from error
    except BaseException:
        os.close(handle)
        raise


class Blocks:
    """The blocks of one process, of which `spare` are kept though nobody needs them; these are used for less than their
    size, too. Not thread-safe."""

    def __init__(self, spare: int = 0) -> None:
        self._spare = spare
        self._blocks: list[Block] = []
        self._number = 0

    def take(self, size: int, reader: str, device: DeviceInterface | None = None) -> Block:
        """A block of `size` bytes, of which `reader` is the only reader. Raises `DeviceError`."""
        size = max(size, 1)
        most = 2 * size + PAGE if self._spare else size
        free = [block for block in self._blocks if not block.readers and block.device is device]
        fitting = (block for block in free if size <= block.size <= most)
        chosen = min(fitting, key=lambda block: block.size, default=None)
        others = [block for block in free if block is not chosen]
        # Of another size, or needed for a while as a reader was slow. The newest ones are kept.
        for block in others[: len(others) - self._spare] if len(others) > self._spare else ():
            self._blocks.remove(block)
            block.close()
        if chosen is None:
            self._number += 1
            chosen = Block(self._number, size, device)
            self._blocks.append(chosen)
        chosen.readers.add(reader)
        return chosen

    def find(self, number: int) -> Block | None:
        """The block with this number; None if there is none any more."""
        return next((block for block in self._blocks if block.number == number), None)

    def close(self) -> None:
        """Give all memory back that nobody else has mapped."""
        while self._blocks:
            block = self._blocks.pop()
            # Memory of a device that somebody reads ends with this process.
            if block.device is None or not block.readers:
                block.close()


# The format of safetensors: eight bytes with the length of the header, the header as JSON, and the data without holes.
#
# The package writes files, but none into memory that is there.

TOKEN = "unirun"
"""The key of the header's metadata under which a file in shared memory says which one it is."""


@cache
def format_code(dtype: torch.dtype) -> str | None:
    """The name that safetensors has for a dtype; None: a file cannot have it, or has two elements of it in a byte."""
    try:
        head = serialized({"": torch.empty(1, dtype=dtype)})
    except KeyError:
        return None
    entry = decode(head[8 : 8 + int.from_bytes(head[:8], "little")])[""]
    return str(entry["dtype"]) if entry["shape"] == [1] else None


def unsaveable(dtypes: Mapping[str, torch.dtype]) -> list[Fault]:
    """A fault for each tensor of a dtype that a file cannot have."""
    return [
        Fault(name, f"safetensors has no {dtype}", "cast it")
        for name, dtype in dtypes.items()
        if format_code(dtype) is None
    ]


def _entries(layout: Layout) -> dict[str, Any]:
    """The tensors in the header of a file. Empty when there can be none: a part of a tensor is elsewhere, or there is
    no code for its dtype."""
    found: dict[str, Any] = {}
    end = 0
    # The end of a file is aligned. Those of larger elements come last, so that all are.
    for name, part in sorted(layout.items(), key=lambda each: dtype_of(each[1].tensor.dtype).itemsize):
        dtype, count = dtype_of(part.tensor.dtype), part.tensor.whole.count
        code = format_code(dtype)
        if code is None or len(part.pieces) > 1 or sum(piece.box.count for piece in part.pieces) != count:
            return {}
        begin, end = end, end + count * dtype.itemsize
        found[name] = {"dtype": code, "shape": part.tensor.shape, "data_offsets": (begin, end)}
    return found


# The places of the pieces of a layout in a block of memory, and copies to and from there.

LARGE = 1 << 20
"""Bytes of a tensor from which on it is copied as memory."""

CHUNK = 16 << 20
"""Bytes that one thread copies at a time."""

THREADS = 4
"""Threads that copy at most, if there are so many processors."""


class Packing:
    """The pieces of `layout`, one behind the other; `offsets` are where, in bytes, for each tensor and piece.

    `number` is that which the publisher has given it. Whole tensors are in the order and at the places of a safetensors
    file, with its header before them.
    """

    def __init__(
        self, layout: Layout, number: int, offsets: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        self.layout, self.number = layout, number
        self.size = 0
        self.offsets = dict(offsets) if offsets is not None else self._placed()
        self._views: dict[int, list[torch.Tensor]] = {}

    @cached_property
    def _entries(self) -> dict[str, Any]:
        return _entries(self.layout)

    @property
    def is_file(self) -> bool:
        """True if the tensors can be in a safetensors file."""
        return bool(self._entries)

    def _placed(self) -> dict[str, tuple[int, ...]]:
        if self.is_file:
            start = len(self._head("0" * 32))
            self.size = start + self._data_size
            begins_in = {name: start + entry["data_offsets"][0] for name, entry in self._entries.items()}
            return {name: tuple(begins_in[name] for _ in part.pieces) for name, part in self.layout.items()}
        begins, self.size = offsets(
            [
                piece.box.count * dtype_of(part.tensor.dtype).itemsize
                for part in self.layout.values()
                for piece in part.pieces
            ]
        )
        left = iter(begins)
        return {name: tuple(next(left) for _ in part.pieces) for name, part in self.layout.items()}

    @property
    def _data_size(self) -> int:
        return max(int(entry["data_offsets"][1]) for entry in self._entries.values())

    def _head(self, token: str) -> bytes:
        text = encode({"__metadata__": {"format": "pt", TOKEN: token}} | self._entries)
        text += b" " * (-(8 + len(text) + self._data_size) % ALIGN)
        return len(text).to_bytes(8, "little") + text

    def begin(self, block: Block) -> None:
        """Write the header of a file, if these tensors in this block can be one."""
        block.is_file = self.is_file and block.handle is not None
        if block.is_file:
            head = self._head(block.token)
            block.memory[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)

    def pack(self, tensors: Mapping[str, Piecewise], block: Block) -> None:
        """Copy this rank's pieces of `tensors` into `block`."""
        if block.number not in self._views:
            self.begin(block)
            # A publisher has two or three blocks. Views keep the memory of the others.
            self._views = {n: views for n, views in self._views.items() if len(self._views) < 3}
            self._views[block.number] = [
                self.view(block.memory, name, piece.box)
                for name, part in self.layout.items()
                for piece in part.pieces
            ]
        pieces = [
            part_of(_resolved(tensors[name]), part, piece.box)
            for name, part in self.layout.items()
            for piece in part.pieces
        ]
        if block.device is None:
            copy_all(self._views[block.number], pieces)
        else:
            block.device.copy(self._views[block.number], pieces)
            block.device.finish()

    def tensors(self, block: Block) -> dict[str, torch.Tensor]:
        """The tensors of a file, over its memory."""
        return {name: self.view(block.memory, name, part.tensor.whole) for name, part in self.layout.items()}

    def view(self, memory: torch.Tensor, name: str, box: Box) -> torch.Tensor:
        """The elements of `box`, which are in one piece, in the memory of a block."""
        part = self.layout[name]
        dtype = dtype_of(part.tensor.dtype)
        for piece, begin in zip(part.pieces, self.offsets[name], strict=True):
            if piece.box == box or piece.box.meet(box) == box:
                raw = memory.narrow(0, begin, piece.box.count * dtype.itemsize)
                found = raw.view(dtype).view(piece.box.size)
                if piece.box == box:
                    return found
                for axis, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
                    found = found.narrow(axis, start - piece.box.start[axis], size)
                return found
        raise ValueError(f"{box} of {name} is not in one piece")


def _resolved(tensor: Piecewise) -> torch.Tensor:
    """The memory of this rank behind `tensor`, which has the elements themselves, not their conjugates or negatives."""
    return local(tensor).resolve_conj().resolve_neg()


def copy_all(into: Sequence[torch.Tensor], from_: Sequence[torch.Tensor]) -> None:
    """Copy tensors, each into that of the same place: large ones as memory, all others with one call of torch.

    For large memory the C library writes around the caches. A few threads are as fast as the memory is.
    """
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    large: list[tuple[Any, Any]] = []
    for pair in zip(into, from_, strict=True):
        if pair[0].nbytes >= LARGE and all(t.is_cpu and t.is_contiguous() for t in pair):
            target, source = (t.view(-1).view(torch.uint8).numpy() for t in pair)
            large += [
                (target[at : at + CHUNK], source[at : at + CHUNK]) for at in range(0, len(target), CHUNK)
            ]
        else:
            others.append(pair)
    left = iter(large)
    count = min(THREADS, len(os.sched_getaffinity(0)), len(large))
    helpers: list[threading.Thread] = []
    # Where no more threads can be started, those that run copy all of it.
    with suppress(RuntimeError):
        for _ in range(count - 1):
            helper = threading.Thread(target=_copy, args=(left,))
            helper.start()
            helpers.append(helper)
    _copy(left)
    for helper in helpers:
        helper.join()
    if others:
        with writing(into):
            torch._foreach_copy_([pair[0] for pair in others], [pair[1] for pair in others])


def _copy(left: Iterator[tuple[Any, Any]]) -> None:
    """Copy what is left, as other threads do; numpy lets them."""
    for target, source in left:
        numpy.copyto(target, source)


def blend(into: Sequence[torch.Tensor], from_: Sequence[torch.Tensor], eta: float) -> None:
    """Make each tensor of floating-point numbers ``eta * from_ + (1 - eta) * into``; copy all others.

    A tensor that is in `into` twice, as tied weights are, is blended once.
    """
    # The tensors are distinct, or the same by two names.
    pairs = {geometry(target): (target, source) for target, source in zip(into, from_, strict=True)}
    with writing(into):
        for target, source in pairs.values():
            if not target.is_floating_point() and not target.is_complex():
                target.copy_(source)
            elif target.dtype.itemsize > 1:
                target.lerp_(source.to(target.device), eta)
            else:
                # There is no arithmetic of float8.
                target.copy_(torch.lerp(target.float(), source.float().to(target.device), eta))


_numbers = itertools.count(1)
"""Of layouts; 0 is the number of none."""

CURRENT = "current"
"""As a reader of a block: it has the current version."""


class _Version:
    """A version and where it is: in `block`, and on the `host`, which is the same unless it is on a device."""

    def __init__(self, version: int, packing: Packing, block: Block) -> None:
        self.version, self.packing, self.block = version, packing, block
        self.host = block if block.device is None else None
        self.copying = threading.Lock()
        # By host and part, who was the first to get it.
        self.first: dict[tuple[str, NamedBox], str] = {}

    def end(self) -> None:
        """It is not the current one any more."""
        self.block.readers.discard(CURRENT)
        if self.host is not None and self.host is not self.block:
            self.host.readers.discard(CURRENT)
            self.host = None


class _Sending:
    """The process group with one worker, of the reader and the `link` that have asked for it last. One thread sends at
    a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.link = ""
        self.pair: PairGroup | None = None

    def close(self) -> None:
        """End it, with what is under way."""
        pair, self.pair = self.pair, None
        if pair is not None:
            pair.close()


Pairing = Callable[[str, str, float], PairGroup]
"""Makes this end of the process group with the reader of this name, for a link, within so many seconds."""


def device_of(tensors: Mapping[str, Piecewise]) -> DeviceInterface | None:
    """The device on which all of `tensors` are. None when they are on the host or on several devices."""
    places = {local(tensor).device for tensor in tensors.values()}
    first = next(iter(places), None)
    if first is None or first.type != "cuda" or len(places) != 1:
        return None
    return cuda_device(first.index)


class Publisher:
    """The versions that one process publishes in one channel. `handle` is called in a thread of the transport."""

    def __init__(
        self,
        channel: str,
        now: Callable[[], float] = time.monotonic,
        pairing: Pairing | None = None,
    ) -> None:
        """`pairing` makes process groups with receivers that ask for one."""
        self._channel, self._now = channel, now
        self._device, self._pairing = device_of, pairing
        self._sending: dict[str, _Sending] = {}
        self._lock = threading.RLock()
        self._blocks = Blocks()
        self._current: _Version | None = None
        self._withdrawals = 0
        # Requests that cannot be answered yet, and when their time is over.
        self._waiting: list[tuple[Describe | Peek | Fetch, Reply, float]] = []
        self._sent = 0
        # By block and reader, how often the reader has it mapped: again, when it has learned the layout anew.
        self._mapped: Counter[tuple[int, str]] = Counter()

    def publish(self, tensors: Mapping[str, Piecewise], version: int) -> None:
        """Make `tensors` the current version. They may be changed when this returns.

        Raises `UsageError` for a version that is not after the current one.
        """
        before = self._current
        if before is not None and version <= before.version:
            raise UsageError(
                f"version {version} of channel {self._channel!r} comes after {before.version}",
                "publish each version once, in ascending order",
            )
        layout = layout_of(tensors)
        same = before is not None and before.packing.layout == layout
        packing = before.packing if before is not None and same else Packing(layout, next(_numbers))
        block = self._packed(packing, tensors)
        with self._lock:
            self._current = _Version(version, packing, block)
            if before is not None:
                before.end()
        self._answer_waiting()

    def withdraw(self) -> None:
        """Have no version until the next one, which may have any number. Those who read the one before may go on.

        The next one has a layout of its own. So a receiver that has parts of other ranks, from before, asks all anew;
        one that waits is told at once, as it may wait for a version that other ranks had.
        """
        with self._lock:
            self._withdrawals += 1
            if self._current is not None:
                self._current.end()
                self._current = None
        self._answer_waiting()

    def _packed(self, packing: Packing, tensors: Mapping[str, Piecewise]) -> Block:
        """A block with `tensors`: on their device, unless that has no memory left."""
        device = self._device(tensors)
        try:
            return self._filled(packing, tensors, device)
        except DeviceError as error:
            report(f"unirun: {error}: weights go through the memory of the host, which takes longer")
            return self._filled(packing, tensors, None)

    def _filled(
        self, packing: Packing, tensors: Mapping[str, Piecewise], device: DeviceInterface | None
    ) -> Block:
        with self._lock:
            block = self._blocks.take(packing.size, CURRENT, device)
        try:
            packing.pack(tensors, block)
            if device is not None:
                block.lent = device.lend(block.memory)
        except BaseException:
            self._release(block.number, CURRENT)
            raise
        return block

    def _on_host(self, current: _Version, reader: str) -> Block:
        """The block on the host with this version, for `reader`, which reads its block on the device until now."""
        with current.copying:
            with self._lock:
                if current.host is not None:
                    current.host.readers.add(reader)
                    return current.host
                host = self._blocks.take(current.packing.size, reader)
            device, size = current.block.device, current.packing.size
            assert device is not None
            device.copy([host.memory[:size]], [current.block.memory[:size]])
            device.finish()
            current.packing.begin(host)
            with self._lock:
                if self._current is current:
                    current.host = host
                    host.readers.add(CURRENT)
            return host

    def handle(self, request: Request, reply: Reply) -> None:
        """Answer a request, now or when there is something to answer."""
        if isinstance(request, Release):
            held = self._release(request.block, request.reader, keep=request.keep)
            reply(Parcel(encode(Released(held))))
            return
        with self._lock:
            self._expire()
            wait = not self._can_answer(request)
            if wait and request.patience is not None:
                self._waiting.append((request, reply, self._now() + request.patience))
        if not wait:
            self._answer(request, reply)
        elif request.patience is None:
            reply(Parcel(encode(Fetched(0, 0, 0))))

    def _expire(self) -> None:
        """Forget those who do not wait any more. They know themselves when their time is over."""
        now = self._now()
        self._waiting = [each for each in self._waiting if each[2] > now]

    def _answer_waiting(self) -> None:
        """Answer those whose wait is over."""
        with self._lock:
            self._expire()
            ready = [(request, reply) for request, reply, _ in self._waiting if self._can_answer(request)]
            self._waiting = [each for each in self._waiting if not self._can_answer(each[0])]
        for request, reply in ready:
            self._answer(request, reply)

    def _can_answer(self, request: Describe | Peek | Fetch) -> bool:
        """Return True if there is what was asked for, or another layout than the one of which it was asked."""
        current = self._current
        if isinstance(request, Fetch) and (current is None or request.layout != current.packing.number):
            return True
        return current is not None and (not isinstance(request, Fetch) or request.at_least <= current.version)

    def _answer(self, request: Describe | Peek | Fetch, reply: Reply) -> None:
        """Answer, in a thread of its own when something has to be copied or sent before."""
        with self._lock:
            if not self._can_answer(request):
                # It was withdrawn a moment ago.
                self.handle(request, reply)
                return
            current = self._current
            if current is None:
                reply(Parcel(encode(Fetched(0, 0, 0))))
                return
            packing, device, withdrawals = current.packing, current.block.device, self._withdrawals
            on_device = device is not None and isinstance(request, Fetch) and request.device
            source = current.block if on_device else current.host
            reader = ""
            if isinstance(request, Fetch) and request.layout == packing.number:
                reader = request.reader
                if request.parts is not None:
                    # Until the buffers are sent.
                    self._sent += 1
                    reader = f"{reader} {self._sent}"
                (source or current.block).readers.add(reader)
        if isinstance(request, Describe):
            number, layout, offsets = packing.number, packing.layout, packing.offsets
            reply(Parcel(encode(Described(number, layout, offsets, device is not None, withdrawals))))
        elif isinstance(request, Peek) or not reader:
            reply(Parcel(encode(Fetched(current.version, packing.number, current.block.number))))
        elif request.link or source is None:
            answer = partial(self._answer_later, current, request, reader, reply)
            try:
                threading.Thread(target=answer, name="unirun-weights", daemon=True).start()
            except RuntimeError:
                # No more threads can be started.
                answer()
        else:
            self._answer_from(current, source, request, reader, reply)

    def _answer_later(self, current: _Version, request: Fetch, reader: str, reply: Reply) -> None:
        """Copy to the host what is needed there, or send through a process group."""
        block = current.block
        try:
            if block.device is not None and not request.device:
                block = self._on_host(current, reader)
                self._release(current.block.number, reader)
            self._answer_from(current, block, request, reader, reply)
        except BaseException:
            self._release(block.number, reader)
            raise

    def _answer_from(
        self, current: _Version, block: Block, request: Fetch, reader: str, reply: Reply
    ) -> None:
        """Lend or send what `reader` has asked for, which reads `block`."""
        packing = current.packing

        def release() -> None:
            self._release(block.number, reader)

        lendable = block.handle is not None or block.device is not None
        fetched = Fetched(current.version, packing.number, block.number if lendable else 0)
        if block.is_file:
            fetched = replace(fetched, path=block.path, token=block.token)
        if request.parts is None:
            if not lendable or block.number in request.mapped:
                if not lendable:
                    release()
                reply(Parcel(encode(fetched)))
            elif block.device is not None:
                reply(Parcel(encode(replace(fetched, handle=block.lent))))
            else:
                assert block.handle is not None
                with self._lock:
                    self._mapped[block.number, reader] += 1
                unmapped = partial(self._unmapped, block.number, reader)
                reply(Parcel(encode(fetched), lent=Lent(block.handle, block.size, unmapped)))
            return
        with self._lock:
            parts, elsewhere = self._divided(current, request)
        head = encode(replace(fetched, elsewhere=elsewhere))
        views = [packing.view(block.memory, part.name, part.box) for part in parts]
        if not request.link:
            reply(Parcel(head, buffers_of(views, release)))
            return
        try:
            reply(Parcel(head))
            self._send(request, views)
        finally:
            release()

    def _send(self, request: Fetch, views: Sequence[torch.Tensor]) -> None:
        """Send `views` through the process group with this reader. It learns of a fault by itself."""
        assert self._pairing is not None
        deadline = self._now() + request.patience
        worker, link = request.reader.partition(" ")[0], f"{request.reader} {request.link}"
        with self._lock:
            sending = self._sending.setdefault(worker, _Sending())
        if sending.link != link:
            # The reader has given up what was sent before, or has never asked, or was started again.
            sending.close()
        with sending.lock:
            try:
                if sending.pair is None:
                    sending.link = link
                    sending.pair = self._pairing(request.reader, request.link, request.patience)
                if views:
                    sending.pair.send(views, deadline, checked=request.checked)
            except GroupError as error:
                sending.close()
                report(f"unirun: {error}")

    def _divided(
        self, current: _Version, request: Fetch
    ) -> tuple[list[NamedBox], dict[str, tuple[int, ...]]]:
        """The parts that the reader gets from here, and the places of those that it gets from others on its host."""
        here: list[NamedBox] = []
        others: dict[str, list[int]] = {}
        for place, part in enumerate(request.parts or ()):
            first = current.first.setdefault((request.host, part), request.reader) if request.host else ""
            if first in ("", request.reader):
                here.append(part)
            else:
                others.setdefault(first, []).append(place)
        return here, {reader: tuple(places) for reader, places in others.items()}

    def _unmapped(self, number: int, reader: str) -> None:
        """The reader has not mapped the block any more, as its connection may have ended while it waited. What it waits
        for is lent to it anew: so it comes back when nobody takes it."""
        with self._lock:
            self._mapped[number, reader] -= 1
            if self._mapped[number, reader]:
                return
            del self._mapped[number, reader]
            self._waiting = [
                (
                    replace(request, mapped=tuple(each for each in request.mapped if each != number))
                    if isinstance(request, Fetch) and request.reader == reader
                    else request,
                    reply,
                    end,
                )
                for request, reply, end in self._waiting
            ]
        self._release(number, reader)

    def _release(self, number: int, reader: str, *, keep: bool = False) -> bool:
        """The reader does not need the block any more, unless it is to `keep`. Returns whether it was the reader's
        until now, so that no process has written to it."""
        with self._lock:
            block = self._blocks.find(number)
            held = block is not None and reader in block.readers
            if block is not None and not keep:
                block.readers.discard(reader)
            return held

    @contextmanager
    def current(self) -> Iterator[tuple[int, Packing, Block]]:
        """The current version, which nobody writes to within the block. Raises `UsageError` when there is none."""
        with self._lock:
            version = self._current
            if version is None:
                raise UsageError(f"nothing is published in channel {self._channel!r}", "publish before")
            self._sent += 1
            reader = f"this process {self._sent}"
            version.block.readers.add(reader)
        try:
            host = self._on_host(version, reader)
            try:
                yield version.version, version.packing, host
            finally:
                self._release(host.number, reader)
        finally:
            self._release(version.block.number, reader)

    def close(self) -> None:
        """Give the memory back. Receivers that wait get what is published later, if this process makes the channel
        again."""
        with self._lock:
            sending, self._sending = self._sending, {}
        for each in sending.values():
            each.close()
        with self._lock:
            if self._current is not None:
                self._current.end()
                self._current = None
            self._blocks.close()


def buffers_of(views: Sequence[torch.Tensor], release: Callable[[], object]) -> tuple[memoryview, ...]:
    """The bytes of `views`, where they are if they are contiguous. `release` is called when all are freed."""
    left = len(views)

    def freed() -> None:
        nonlocal left
        left -= 1
        if not left:
            release()

    if not views:
        release()
    found = []
    for view in views:
        array: Any = view.contiguous().view(-1).view(torch.uint8).numpy()
        weakref.finalize(array, freed).atexit = False
        found.append(memoryview(array))
    return tuple(found)
