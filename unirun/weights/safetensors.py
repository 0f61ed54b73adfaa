"""The format of safetensors files: https://huggingface.co/docs/safetensors (its README, "Format").

Eight bytes with the length of the header, the header as JSON, and the data without holes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from unirun.errors import Fault, FrameError, WeightsError

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""As safetensors calls them."""

_NAMES = {name: dtype for dtype, name in DTYPES.items()}

ALIGN = 64
"""Bytes; where the data begins. torch copies aligned memory with vector instructions."""

MAX_HEADER = 100_000_000
"""Bytes. The format's own limit."""


class Param(NamedTuple):
    """One tensor: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class Header(NamedTuple):
    """The content of a file: where each tensor begins, in bytes from the beginning of the file, and the `metadata`."""

    params: tuple[Param, ...]
    begins: tuple[int, ...]
    metadata: dict[str, str]

    def view(self, memory: torch.Tensor, number: int) -> torch.Tensor:
        """The tensor with this number, in the memory of the whole file."""
        param = self.params[number]
        return memory.narrow(0, self.begins[number], param.size).view(param.dtype).view(param.shape)


def header_of(params: Sequence[Param], metadata: Mapping[str, str]) -> tuple[bytes, Header, int]:
    """The beginning of a file, what it says, and the size of the file in bytes. Raises `WeightsError` for dtypes that a
    file cannot have."""
    strange = [
        Fault(p.name, f"safetensors has no {p.dtype}", "cast it") for p in params if p.dtype not in DTYPES
    ]
    if strange:
        raise WeightsError("these tensors cannot be in a safetensors file", faults=strange)
    # Those of larger elements come first, so that all are aligned.
    offsets, end = {}, 0
    for number, param in sorted(enumerate(params), key=lambda pair: -pair[1].dtype.itemsize):
        offsets[number] = end
        end += param.size
    entries = {
        p.name: {
            "dtype": DTYPES[p.dtype],
            "shape": p.shape,
            "data_offsets": (offsets[n], offsets[n] + p.size),
        }
        for n, p in enumerate(params)
    }
    text = msgspec.json.encode({"__metadata__": dict(metadata), **entries})
    text += b" " * (-(8 + len(text)) % ALIGN)
    start = 8 + len(text)
    begins = tuple(start + offsets[n] for n in range(len(params)))
    return len(text).to_bytes(8, "little") + text, Header(tuple(params), begins, dict(metadata)), start + end


def read_header(begin: bytes) -> Header:
    """The header in the first bytes of a file. Raises `FrameError` when it is no such file."""
    try:
        length = int.from_bytes(begin[:8], "little")
        found = msgspec.json.decode(begin[8 : 8 + length], type=dict[str, dict[str, msgspec.Raw]])
        metadata = {k: msgspec.json.decode(v, type=str) for k, v in found.pop("__metadata__", {}).items()}
        params, begins = [], []
        for name, each in found.items():
            shape = msgspec.json.decode(each["shape"], type=tuple[int, ...])
            first, last = msgspec.json.decode(each["data_offsets"], type=tuple[int, int])
            params.append(Param(name, _NAMES[msgspec.json.decode(each["dtype"], type=str)], shape))
            begins.append(8 + length + first)
            if min(shape, default=0) < 0 or first < 0 or last - first != params[-1].size:
                raise ValueError(f"{name} has {last - first} bytes at {first} for {list(shape)}")
    except (msgspec.MsgspecError, KeyError, ValueError, RecursionError) as error:
        raise FrameError(f"this is no safetensors file: {error}") from error
    return Header(tuple(params), tuple(begins), metadata)


def length_of(begin: bytes) -> int:
    """The number of bytes of the header, with its length, which are the first eight. Raises `FrameError`."""
    length = int.from_bytes(begin[:8], "little")
    if len(begin) < 8 or length > MAX_HEADER:
        raise FrameError(f"this is no safetensors file: it begins with {begin[:8]!r}")
    return 8 + length
