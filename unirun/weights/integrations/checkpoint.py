"""A version of the weights as a safetensors file in shared memory, which other processes of this host open by its path.

The file is a memfd: it has no name of its own, and the kernel frees it with the last process that has it, however that
ends. Others of the same user open it as ``/proc/<pid>/fd/<n>``.

The format is that of https://huggingface.co/docs/safetensors (its README, "Format"): eight bytes with the length of the
header, the header as JSON, and the data without holes.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import msgspec
import torch

from unirun.errors import Fault, UnirunError, UsageError, WeightsError
from unirun.weights.packing import ALIGN, copy_all

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
"""As safetensors calls them."""

TOKEN = "unirun"
"""The key of the header's metadata under which a file says which one it is."""


class Param(NamedTuple):
    """One whole tensor: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class Checkpoint:
    """Memory for tensors as `params` say, in a file at `path`. `token` is in the file, and in no other."""

    def __init__(self, params: Sequence[Param]) -> None:
        """Raises `WeightsError` for dtypes that a file cannot have, `UnirunError` when there is no memory."""
        strange = [
            Fault(p.name, f"safetensors has no {p.dtype}", "cast it") for p in params if p.dtype not in DTYPES
        ]
        if strange:
            raise WeightsError("these tensors cannot be given to a server", faults=strange)
        self.params, self.token = tuple(params), secrets.token_hex(16)
        offsets, size = _placed(self.params)
        header = {
            p.name: {"dtype": DTYPES[p.dtype], "shape": p.shape, "data_offsets": offsets[p.name]}
            for p in params
        }
        head = msgspec.json.encode({"__metadata__": {"format": "pt", TOKEN: self.token}, **header})
        head += b" " * (-(8 + len(head)) % ALIGN)
        start = 8 + len(head)
        try:
            self._handle, memory = _memory(start + size)
        except OSError as error:
            raise UnirunError(
                f"there is no shared memory for {start + size} bytes of weights ({error.strerror})",
                "give this job more memory",
            ) from error
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"
        memory[:start] = torch.frombuffer(
            bytearray(len(head).to_bytes(8, "little") + head), dtype=torch.uint8
        )
        self._views = [_view(memory, p, start + offsets[p.name][0]) for p in params]

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the tensors, which come in the order of `params`. Raises `WeightsError` with all that are others."""
        faults = []
        for param, view, pair in zip_longest(self.params, self._views, tensors):
            found = Param(pair[0], pair[1].dtype, tuple(pair[1].shape)) if pair is not None else None
            if found is None or found != param:
                faults.append(Fault(str(param or "nothing"), f"then came {found or 'nothing'}"))
            else:
                copy_all([view], [pair[1].detach()])
        if faults:
            raise WeightsError("metadata() has declared other tensors than those that came", faults=faults)

    def close(self) -> None:
        """Close the file. Its memory is freed when nobody reads it any more."""
        self._views.clear()
        os.close(self._handle)


def read(path: str, token: str) -> dict[str, torch.Tensor]:
    """The tensors of the file with this `token`, over its memory, in the order of its header.

    Writing to one changes this process's copy of it alone. Raises `UsageError` when the file is not there, or another.
    """
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        length = int.from_bytes(mapped[:8], "little")
        header = msgspec.json.decode(mapped[8 : 8 + length])
        known = header.pop("__metadata__")[TOKEN] == token
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"there are no weights at {path} ({error})", SAME_HOST) from error
    if not known:
        raise UsageError(f"there are other weights at {path}", SAME_HOST)
    memory, dtypes = (
        torch.frombuffer(mapped, dtype=torch.uint8),
        {name: dtype for dtype, name in DTYPES.items()},
    )
    return {
        name: _view(
            memory, Param(name, dtypes[each["dtype"]], each["shape"]), 8 + length + each["data_offsets"][0]
        )
        for name, each in header.items()
    }


SAME_HOST = "run the server on the host of the worker that sends, in the same container, as the same user"


def _placed(params: Sequence[Param]) -> tuple[dict[str, tuple[int, int]], int]:
    """Begin and end of each tensor, and of all. Those of larger elements come first, so that all are aligned."""
    offsets, end = {}, 0
    for param in sorted(params, key=lambda p: -p.dtype.itemsize):
        offsets[param.name] = end, end + param.size
        end += param.size
    return offsets, end


def _view(memory: torch.Tensor, param: Param, begin: int) -> torch.Tensor:
    return memory.narrow(0, begin, param.size).view(param.dtype).view(param.shape)


def _memory(size: int) -> tuple[int, torch.Tensor]:
    """A memfd, and its memory. Raises OSError."""
    handle = os.memfd_create("unirun-checkpoint", os.MFD_CLOEXEC)
    try:
        # Reserved now: a page that cannot be had later would be a SIGBUS.
        os.posix_fallocate(handle, 0, size)
        return handle, torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=size, dtype=torch.uint8)
    except BaseException:
        os.close(handle)
        raise
