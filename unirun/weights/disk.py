"""Versions in safetensors files: where nothing else connects publisher and receivers, and to begin anew from.

``<url>/<version>/00002-of-00008.safetensors`` is what rank 2 of 8 has. `url` is any that fsspec knows: a path,
``s3://…``, ``gs://…``. A version is there when all of its files are. A whole tensor has its name in the file; the
pieces of one that is cut are ``name/0``, ``name/1``, …, and the metadata of the file says which boxes they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import fsspec
import msgspec
import torch

from unirun.errors import Fault, FrameError, WeightsError
from unirun.weights.layout import Layout, ReadItem, plan, shared
from unirun.weights.memory import untied
from unirun.weights.packing import Packing, copy_all
from unirun.weights.tensors import Piecewise, dtype_of, layout_of, local, part_of

# The format of safetensors files: https://huggingface.co/docs/safetensors (its README, "Format").
#
# Eight bytes with the length of the header, the header as JSON, and the data without holes.

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


LAYOUT = "unirun.layout"
"""The key of the metadata under which a file has the layout of its rank, as JSON."""

_FILE = re.compile(r"(\d{5,})-of-(\d{5,})\.safetensors")


def save(url: str, version: int, rank: int, ranks: int, packing: Packing, memory: torch.Tensor) -> str:
    """Write what this rank has of `version`. Returns the path. Raises `WeightsError`, OSError."""
    params, views = [], []
    for name, part in packing.layout.items():
        for number, piece in enumerate(part.pieces):
            key = name if piece.box == part.tensor.whole else f"{name}/{number}"
            params.append(Param(key, dtype_of(part.tensor.dtype), piece.box.size))
            views.append(packing.view(memory, name, piece.box))
    layout = msgspec.json.encode(packing.layout).decode()
    head, header, _ = header_of(params, {"format": "pt", LAYOUT: layout})
    files, root = fsspec.url_to_fs(url)
    folder = f"{root}/{version}"
    files.makedirs(folder, exist_ok=True)
    path = f"{folder}/{rank:05}-of-{ranks:05}.safetensors"
    # A file that is there is whole.
    with files.open(f"{path}.partial", "wb") as file:
        file.write(head)
        for number in sorted(range(len(views)), key=header.begins.__getitem__):
            data: Any = views[number].contiguous().view(-1).view(torch.uint8).numpy()
            file.write(memoryview(data))
    files.mv(f"{path}.partial", path)
    return str(path)


def load(url: str, tensors: Mapping[str, Piecewise], at_least: int) -> int:
    """Copy the latest whole version under `url` into `tensors`, and return it.

    Raises `WeightsError` when there is none from `at_least` on, or when it does not fit; OSError.
    """
    files, root = fsspec.url_to_fs(url)
    version, paths = next(_versions(files, root, at_least), (0, ()))
    if not paths:
        nothing = Fault(url, "no version is whole there", "does every rank of the publisher save?")
        raise WeightsError(f"there are no weights from version {at_least} on", faults=[nothing])
    mine = layout_of(tensors)
    headers, layouts = [], []
    for path in paths:
        header = _header(files, path)
        headers.append(header)
        layouts.append(_layout(path, header))
    takes = plan(layouts, mine)
    into = [part_of(local(tensors[take.name]), mine[take.name], take.box) for take in takes]
    # All of it is read before anything changes.
    from_ = [_read(files, paths[t.source], headers[t.source], layouts[t.source], t) for t in takes]
    tied = untied([*zip((take.name for take in takes), into, from_, strict=True)])
    if tied:
        raise WeightsError("the weights do not fit the receiver", faults=tied)
    copy_all(into, from_)
    return version


def _versions(files: Any, root: str, at_least: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The whole versions, the latest first, and their files by rank."""
    try:
        names = {str(path).rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False)}
    except FileNotFoundError:
        return
    found = sorted((int(name) for name in names if re.fullmatch(r"-?\d+", name)), reverse=True)
    for version in (each for each in found if each >= at_least):
        paths: dict[tuple[int, int], str] = {}
        for path in files.ls(f"{root}/{version}", detail=False, refresh=True):
            match = _FILE.fullmatch(str(path).rpartition("/")[2])
            if match is not None:
                paths[int(match[2]), int(match[1])] = str(path)
        for ranks in sorted({ranks for ranks, _ in paths}):
            whole = [paths.get((ranks, rank)) for rank in range(ranks)]
            if all(path is not None for path in whole):
                yield version, tuple(path for path in whole if path is not None)


def _header(files: Any, path: str) -> Header:
    with files.open(path, "rb") as file:
        begin = file.read(8)
        begin += file.read(length_of(begin) - 8)
    return read_header(begin)


def _layout(path: str, header: Header) -> Layout:
    try:
        found: Layout = msgspec.json.decode(header.metadata[LAYOUT], type=Layout)
    except (KeyError, msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"{path} has no layout: {error}") from error
    return shared(found)


def _read(files: Any, path: str, header: Header, layout: Layout, take: ReadItem) -> torch.Tensor:
    """The elements of `take`, out of the piece that has them."""
    part = layout[take.name]
    number, piece = next(pair for pair in enumerate(part.pieces) if pair[1].box.meet(take.box) == take.box)
    key = take.name if piece.box == part.tensor.whole else f"{take.name}/{number}"
    at = [param.name for param in header.params].index(key)
    param, begin = header.params[at], header.begins[at]
    with files.open(path, "rb") as file:
        file.seek(begin)
        data = bytearray(file.read(param.size))
    if len(data) != param.size:
        raise FrameError(f"{path} has {len(data)} of the {param.size} bytes of {key}")
    tensor = torch.frombuffer(data, dtype=torch.uint8).view(param.dtype).view(param.shape)
    whole = msgspec.structs.replace(part, pieces=(msgspec.structs.replace(piece, at=(0,) * len(piece.at)),))
    return part_of(tensor, whole, take.box)
