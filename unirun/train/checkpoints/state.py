"""What a user saves, as bytes or by torch.distributed.checkpoint.

A value may be anything that pickles. A module or an optimizer stands for its state dict; the wrapper of
DistributedDataParallel is taken off. When any tensor is a part (a DTensor, as with FSDP2), all ranks write their own.
"""

from __future__ import annotations

import io
import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from unirun.errors import UsageError
from unirun.train.checkpoints.folder import Folder

STATE = "state.pt"


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` with state dicts in place of modules and optimizers."""
    stated = {name: unwrapped(value) for name, value in state.items()}
    return {
        name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in stated.items()
    }


def unwrapped(value: Any) -> Any:
    """The model inside of DistributedDataParallel; any other value as it is."""
    return value.module if isinstance(value, nn.parallel.DistributedDataParallel) else value


def is_sharded(value: Any) -> bool:
    """Whether some tensor in it is a part. There is none where nobody has imported DTensor, which takes long."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(each, module.DTensor) for each in _leaves(value))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]


def snapshot(value: Any) -> Any:
    """A copy in the memory of the host, which does not change when training goes on."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        copied = {key: snapshot(each) for key, each in value.items()}
        return copied if type(value) is dict else _like(value, copied)
    if type(value) in (list, tuple):
        return type(value)(snapshot(each) for each in value)
    return value


def _like(value: Mapping[Any, Any], copied: dict[Any, Any]) -> Any:
    """An OrderedDict, as state dicts are, becomes one again; any other mapping a dict."""
    return OrderedDict(copied) if isinstance(value, OrderedDict) else copied


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


def save_sharded(folder: Folder, number: int, state: dict[str, Any], group: Any) -> Any:
    """Begin to save what all ranks of `group` have, which all of them call. Returns a future: all of it is written.

    The tensors are copied before this returns.
    """
    from torch.distributed.checkpoint.state_dict_saver import async_save

    return async_save(state, storage_writer=_writer(folder, number), process_group=group, checkpoint_id=None)


def _writer(folder: Folder, number: int) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    if is_local(folder):
        return FileSystemWriter(folder.inside(number))
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter(folder.path(number))


def is_local(folder: Folder) -> bool:
    """Whether it is in the file system of this host."""
    return "file" in (
        folder.files.protocol if isinstance(folder.files.protocol, tuple) else (folder.files.protocol,)
    )
