"""The state that a user saves, as bytes or by torch.distributed.checkpoint.

A value may be anything that pickles. A module or an optimizer stands for its state dict; the wrappers of
DistributedDataParallel and torch.compile are taken off, so names are those of the model alone. When any tensor is a
part (a DTensor, as with FSDP2), all ranks write their own.
"""

from __future__ import annotations

import copy
import io
import os
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn

from unirun.errors import UsageError
from unirun.train.checkpoints.folder import PRIVATE, Folder
from unirun.train.nested import mapped
from unirun.weights.tensors import COMPILED, by_original_name, original_name

SMALL = 1 << 14
"""Bytes of a tensor that is compared between ranks. The state of a generator of random numbers has 5 000."""

SHOWN = 1000
"""Elements of a list that are compared between ranks."""


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` with state dicts in place of modules and optimizers, also of those in lists, tuples and mappings."""
    plain: dict[str, Any] = mapped(_stated, dict(state), _has_state)
    return plain


def _stated(value: Any) -> Any:
    if _has_state(value):
        inner = unwrapped(value)
        return _of_model(inner) if isinstance(inner, nn.Module) else inner.state_dict()
    return plain_state(value) if isinstance(value, Mapping) else value


def _of_model(model: nn.Module) -> Mapping[str, Any]:
    """The state dict of a model, with the names that it has when no part of it is compiled."""
    state: Any = model.state_dict()
    if any(COMPILED in name for name in state):
        versions = {original_name(path): each for path, each in getattr(state, "_metadata", {}).items()}
        state = OrderedDict(by_original_name(state))
        state._metadata = versions
    return state  # type: ignore[no-any-return]


def named_as(model: nn.Module, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict `saved` with the names of `model`, for any combination of compiled parts in the two."""
    own = {original_name(name): name for name in model.state_dict()}
    return {own.get(name, name): value for name, value in by_original_name(saved).items()}


def _has_state(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "state_dict", None))


def unwrapped(value: Any) -> Any:
    """The model inside of DistributedDataParallel and torch.compile, in any order; any other value as it is."""
    while (inner := _inside(value)) is not None:
        value = inner
    return value


def _inside(value: Any) -> Any:
    """The object inside of one wrapper; None if there is no wrapper. The module of torch.compile is slow to import, and
    nothing is compiled where it is not imported."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and isinstance(value, compiler.OptimizedModule):
        return value._orig_mod
    return value.module if isinstance(value, nn.parallel.DistributedDataParallel) else None


def outline(state: Mapping[str, Any]) -> dict[str, int]:
    """A checksum for each name in a plain state, by which ranks compare theirs. It covers names and shapes, numbers and
    texts, and the values of small tensors and arrays under a name of their own."""
    return {
        name: zlib.crc32(repr((_sketch(value), _small_bytes(value))).encode("utf-8", "backslashreplace"))
        for name, value in state.items()
    }


def _sketch(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted((repr(key), repr(_sketch(each))) for key, each in value.items())
    if isinstance(value, list | tuple):
        return [len(value), *map(_sketch, value[:SHOWN])]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    return type(value).__name__, getattr(value, "dtype", None), tuple(getattr(value, "shape", ()))


def _small_bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor) and not is_sharded(value):
        if value.numel() * value.element_size() > SMALL or value.layout != torch.strided:
            return b""
        # The conjugate or the negative of another tensor is a view, which has no bytes of its own.
        plain = value.detach().cpu().resolve_conj().resolve_neg()
        return plain.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return value.tobytes() if isinstance(value, numpy.ndarray) and value.nbytes <= SMALL else b""


def is_sharded(value: Any) -> bool:
    """Return True if some tensor in it is a part. There is none while DTensor is not imported, which takes long."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(each, module.DTensor) for each in _leaves(value))


def _leaves(value: Any) -> list[Any]:
    """The leaves of `value`, however deep in lists, tuples and mappings."""
    if isinstance(value, Mapping):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]


def snapshot(value: Any) -> Any:
    """A copy, of tensors in the memory of the host, which does not change when training goes on. Raises `UsageError`
    for what cannot be pickled."""
    return mapped(_copied, value)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - classes raise what they like
        # deepcopy refuses tensors with a grad_fn, which pickle takes. `encode` raises `UsageError` for the rest.
        return torch.load(io.BytesIO(encode({"value": value})), weights_only=False)["value"]


def encode(state: Mapping[str, Any]) -> bytes:
    """A snapshot as bytes. Raises `UsageError` for what cannot be pickled."""
    file = io.BytesIO()
    try:
        torch.save(dict(state), file)
    except Exception as error:
        raise UsageError(
            f"this state cannot be saved: {type(error).__name__}: {error}",
            "save tensors, state dicts and plain data",
        ) from error
    return file.getvalue()


def save_sharded(
    folder: Folder, number: int, state: dict[str, Any], group: Any, files: dict[str, tuple[int, int]]
) -> Any:
    """Begin to save the state of all ranks of `group`; all of them call this. Returns a future, which is done
    when all of it is written. Then `files` has the size and the CRC-32 of each file that this rank has
    written.

    The tensors are copied before this returns.
    """
    from torch.distributed.checkpoint.state_dict_saver import async_save

    writer = _writer(folder, number)
    writer.fs.create_stream = partial(_summed, writer.fs.create_stream, files, private=folder.local)
    return async_save(listed(state), storage_writer=writer, process_group=group, checkpoint_id=None)


def awaited(saved: Any, patience: float) -> None:
    """Wait until all of it is written. Raises the exception that writing it has raised in some rank."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        saved.result(patience)
    except CheckpointException as error:
        # CheckpointException is no Exception, and holds the exceptions of the ranks.
        raise next(iter(error.failures.values()))[0] from error


@contextmanager
def _summed(
    create: Callable[..., Any],
    files: dict[str, tuple[int, int]],
    path: str | os.PathLike[str],
    mode: str,
    *,
    private: bool,
) -> Iterator[Any]:
    """Open a file as `create` does, a method of torch.distributed.checkpoint's file systems, and note its
    size and CRC-32 when it is written. On this host a `private` file is for this user alone."""
    with create(path, mode) as stream:
        if private:
            os.chmod(path, PRIVATE)
        file = _Summed(stream)
        yield file
    # The index gets its name when it is whole.
    files[os.path.basename(path).removesuffix(".tmp")] = file.size, file.crc


class _Summed:
    """A file that is written from its beginning to its end, with its size and its CRC-32."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.size = self.crc = 0

    def write(self, data: Any) -> Any:
        self.size, self.crc = self.size + memoryview(data).nbytes, zlib.crc32(data, self.crc)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def listed(value: Any) -> Any:
    """`value` with lists in place of tuples with tensors or mappings, in which torch.distributed.checkpoint does not
    look for any."""
    if isinstance(value, Mapping):
        return {key: listed(each) for key, each in value.items()}
    if isinstance(value, list) or (isinstance(value, tuple) and _has_more(value)):
        return [listed(each) for each in value]
    return value


def _has_more(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_more, value))
    return isinstance(value, torch.Tensor | Mapping)


def _writer(folder: Folder, number: int) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    if folder.local:
        return FileSystemWriter(folder.inside(number))
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter(folder.path(number))
