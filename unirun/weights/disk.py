"""Versions in safetensors files: where nothing else connects publisher and receivers, and to begin anew from.

``<url>/<version>/00002-of-00008.safetensors`` is what rank 2 of 8 has. `url` is any that fsspec knows: a path,
``s3://…``, ``gs://…``. A version is there when all of its files are. A whole tensor has its name in the file; the
pieces of one that is cut are ``name/0``, ``name/1``, …, and the metadata of the file says which boxes they are.

A file of this host is mapped, so that what is not needed is not read. From elsewhere, the headers come first, then the
files of which something is needed, into a temporary folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import msgspec
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from unirun.atomic import writing
from unirun.errors import Fault, FrameError, WeightsError
from unirun.weights.publishing import Packing, copy_all, unsaveable
from unirun.weights.tensors import (
    Layout,
    NamedBox,
    Piecewise,
    dtype_of,
    layout_of,
    local,
    part_of,
    plan,
    shared,
    untied,
)

LAYOUT = "unirun.layout"
"""The key of the metadata under which a file has the layout of its rank, as JSON."""

MAX_HEADER = 100_000_000
"""Bytes. The format's own limit."""

_FILE = re.compile(r"(\d{5,})-of-(\d{5,})\.safetensors")


def save(url: str, version: int, rank: int, ranks: int, packing: Packing, memory: torch.Tensor) -> str:
    """Write what this rank has of `version`. Returns the path. Raises `WeightsError`, OSError."""
    views = {
        _key(name, number, packing.layout): packing.view(memory, name, piece.box)
        for name, part in packing.layout.items()
        for number, piece in enumerate(part.pieces)
    }
    if faults := unsaveable({key: view.dtype for key, view in views.items()}):
        raise WeightsError("these tensors cannot be in a safetensors file", faults=faults)
    files, root = fsspec.url_to_fs(url)
    files.makedirs(f"{root}/{version}", exist_ok=True)
    path = f"{root}/{version}/{rank:05}-of-{ranks:05}.safetensors"
    about = {"format": "pt", LAYOUT: msgspec.json.encode(packing.layout).decode()}
    try:
        if isinstance(files, LocalFileSystem):
            with writing(Path(path), private=False, lasting=True) as file:
                mode = os.fstat(file.fileno()).st_mode
                save_file(views, file.name, about)
                # The package makes a file that its owner alone can read.
                os.chmod(file.name, mode)
        else:
            with TemporaryDirectory() as folder:
                save_file(views, f"{folder}/file", about)
                files.put_file(f"{folder}/file", f"{path}.partial")
            files.mv(f"{path}.partial", path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    return path


def load(url: str, tensors: Mapping[str, Piecewise], at_least: int) -> int:
    """Copy the latest whole version under `url` into `tensors`, and return it.

    Raises `WeightsError` when there is none from `at_least` on, or when it does not fit; `FrameError`, OSError.
    """
    files, root = fsspec.url_to_fs(url)
    version, paths = next(_versions(files, root, at_least), (0, ()))
    if not paths:
        nothing = Fault(url, "no version is whole there", "does every rank of the publisher save?")
        raise WeightsError(f"there are no weights from version {at_least} on", faults=[nothing])
    mine = layout_of(tensors)
    here = isinstance(files, LocalFileSystem)
    with nullcontext("") if here else TemporaryDirectory() as folder:
        names = [path if here else _header(files, path, folder) for path in paths]
        layouts = [_layout(name) for name in names]
        takes = plan(layouts, mine)
        for source in () if here else takes:
            files.get_file(paths[source], names[source])
        all_takes = [take for some in takes.values() for take in some]
        into = [part_of(local(tensors[take.name]), mine[take.name], take.box) for take in all_takes]
        from_: list[torch.Tensor] = []
        for source, some in takes.items():
            file = _opened(names[source])
            from_ += [_read(file, layouts[source], take) for take in some]
        tied = untied([*zip((take.name for take in all_takes), into, from_, strict=True)])
        if tied:
            raise WeightsError("the weights do not fit the receiver", faults=tied)
        copy_all(into, from_)
    return version


def _versions(files: Any, root: str, at_least: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The whole versions, the latest first, and their files by rank."""
    try:
        names = {
            str(path).rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False, refresh=True)
        }
    except FileNotFoundError:
        return
    found = sorted((name for name in names if re.fullmatch(r"-?\d+", name)), key=int, reverse=True)
    for name in (each for each in found if int(each) >= at_least):
        paths: dict[tuple[int, int], str] = {}
        for path in files.ls(f"{root}/{name}", detail=False, refresh=True):
            match = _FILE.fullmatch(str(path).rpartition("/")[2])
            if match is not None:
                paths[int(match[2]), int(match[1])] = str(path)
        wanted = [[(ranks, rank) for rank in range(ranks)] for ranks in sorted({ranks for ranks, _ in paths})]
        whole = [tuple(paths[each] for each in some) for some in wanted if paths.keys() >= {*some}]
        if len(whole) > 1:
            # Other numbers of ranks have saved it: the last of them counts.
            whole.sort(key=lambda some: min(map(files.modified, some)))
        if whole:
            yield int(name), whole[-1]


def _header(files: Any, path: str, folder: str) -> str:
    """A file in `folder` that has the header of `path`, and is as long."""
    name = f"{folder}/{path.rpartition('/')[2]}"
    with files.open(path, "rb") as there, open(name, "wb") as here:
        size = there.read(8)
        here.write(size + there.read(min(int.from_bytes(size, "little"), MAX_HEADER)))
        here.truncate(files.size(path))
    return name


def _opened(name: str) -> Any:
    try:
        return safe_open(name, framework="pt")
    except SafetensorError as error:
        raise FrameError(f"{name} is no safetensors file: {error}") from error


def _layout(name: str) -> Layout:
    try:
        found: Layout = msgspec.json.decode((_opened(name).metadata() or {})[LAYOUT], type=Layout)
    except (KeyError, msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"{name} has no layout: {error}") from error
    return shared(found)


def _key(name: str, number: int, layout: Layout) -> str:
    """The key of a piece of the tensor `name` in a file."""
    part = layout[name]
    return name if part.pieces[number].box == part.tensor.whole else f"{name}/{number}"


def _read(file: Any, layout: Layout, take: NamedBox) -> torch.Tensor:
    """The elements of `take`, out of the piece that has them. Raises `FrameError`."""
    part = layout[take.name]
    number, piece = next(pair for pair in enumerate(part.pieces) if pair[1].box.meet(take.box) == take.box)
    try:
        tensor: torch.Tensor = file.get_tensor(_key(take.name, number, layout))
    except SafetensorError as error:
        raise FrameError(f"a file of weights does not have what its layout says: {error}") from error
    if (tensor.dtype, tuple(tensor.shape)) != (dtype_of(part.tensor.dtype), piece.box.size):
        raise FrameError(
            f"{take.name} is {tensor.dtype} {list(tensor.shape)} in a file whose layout says {part}"
        )
    whole = msgspec.structs.replace(part, pieces=(msgspec.structs.replace(piece, at=(0,) * len(piece.at)),))
    return part_of(tensor, whole, take.box)
