"""Reads a checkpoint: as new tensors, or into models and optimizers, however many ranks have written it.

Models whose parameters are shared out (DTensors, as with FSDP2) get their parts.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from unirun.errors import CheckpointDamaged, UsageError
from unirun.train.checkpoints.folder import Folder, Manifest
from unirun.train.checkpoints.state import STATE, is_local, plain_state, unwrapped


def load(folder: Folder, manifest: Manifest, into: Mapping[str, Any] | None) -> dict[str, Any]:
    """The state of a checkpoint; models, optimizers and the like in `into` are changed to what it has under their name.

    Raises `CheckpointDamaged`, OSError, and `UsageError` for a name that it does not have.
    """
    if manifest.sharded:
        return _load_sharded(folder, manifest.number, into)
    found = _load_plain(folder, manifest.number)
    put_into(into or {}, found)
    return found


def put_into(into: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Change models, optimizers and the like in `into` to what a plain state has. Raises `UsageError`."""
    for name, value in into.items():
        target = unwrapped(value)
        if not hasattr(target, "load_state_dict"):
            continue
        _check(name, state)
        own = state[name]
        if isinstance(target, nn.Module):
            like = target.state_dict()
            own = {key: _part_of(each, like.get(key)) for key, each in own.items()}
        elif isinstance(target, torch.optim.Optimizer):
            parameters = _parameters(target)
            own = {
                **own,
                "state": {
                    number: {key: _part_of(each, parameters.get(number)) for key, each in stats.items()}
                    for number, stats in own["state"].items()
                },
            }
        target.load_state_dict(own)


def _check(name: str, names: Collection[str]) -> None:
    if name not in names:
        raise UsageError(
            f"the checkpoint has no {name!r}; it has {', '.join(map(repr, sorted(names))) or 'nothing'}",
            "load it under the name with which save_checkpoint has saved it",
        )


def _load_plain(folder: Folder, number: int) -> dict[str, Any]:
    try:
        with folder.open(number, STATE) as file:
            found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointDamaged(f"{folder.path(number)} cannot be read: {error}") from error
    return found


def _part_of(value: Any, like: Any) -> Any:
    """A whole tensor as this rank's part of it, if the tensor `like` is one; any other value as it is."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(like, module.DTensor) or not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, module.DTensor) or value.shape != like.shape:
        return value
    # Each rank has all of it, so none needs to send any.
    whole = value.to(like.device)
    return module.distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _parameters(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    """Its parameters, by their numbers in its state dict."""
    groups = zip(optimizer.state_dict()["param_groups"], optimizer.param_groups, strict=True)
    return {
        number: parameter
        for stated, group in groups
        for number, parameter in zip(stated["params"], group["params"], strict=True)
    }


def _load_sharded(folder: Folder, version: int, into: Mapping[str, Any] | None) -> dict[str, Any]:
    reader = _reader(folder, version)
    saved = reader.read_metadata()
    paths = {name: saved.planner_data.get(name, (name,)) for name in saved.state_dict_metadata}
    if into is None:
        flat = {name: _empty(saved.state_dict_metadata[name], None) for name in paths}
        _fill(flat, reader)
        nested: dict[str, Any] = {}
        for name, path in paths.items():
            _put(nested, path, flat[name])
        return {name: _shaped(value) for name, value in nested.items()}
    state, names = plain_state(into), {path[0] for path in paths.values()}
    for key, value in into.items():
        _check(key, names)
        if isinstance(value, torch.optim.Optimizer):
            # One that has made no step has no state yet, so nothing of it would be read.
            parameters = _parameters(value)
            for name, path in paths.items():
                if path[:2] == (key, "state") and (number := int(path[2])) in parameters:
                    empty = _empty(saved.state_dict_metadata[name], parameters[number])
                    _put(state[key]["state"], (number, *path[3:]), empty)
    _fill(state, reader)
    for key, value in into.items():
        if hasattr(value, "load_state_dict") and not isinstance(value, nn.Module):
            # The tensors of a module were changed where they are.
            value.load_state_dict(state[key])
    return state


def _empty(about: Any, like: torch.Tensor | None) -> Any:
    """A tensor to read into, cut as `like` is, if it has the same shape; None for what is no tensor."""
    if not hasattr(about, "size") or not hasattr(about, "properties"):
        return None
    if like is not None and about.size == like.shape:
        return torch.zeros_like(like.detach(), dtype=about.properties.dtype)
    return torch.zeros(about.size, dtype=about.properties.dtype)


def _fill(state: dict[str, Any], reader: Any) -> None:
    """Read what `state` needs; each rank reads for itself."""
    from torch.distributed.checkpoint.state_dict_loader import load as load_parts

    with warnings.catch_warnings():
        # That is what is meant.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load_parts(state, storage_reader=reader, no_dist=True)


def _reader(folder: Folder, number: int) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if is_local(folder):
        return FileSystemReader(folder.inside(number))
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(folder.path(number))


def _put(nested: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
    nested[path[-1]] = value


def _shaped(value: Any) -> Any:
    """Lists, and the numbers in the state of an optimizer, which the names of tensors have as texts."""
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_shaped(value[key]) for key in sorted(value)]
    if value.keys() == {"state", "param_groups"}:
        value = {**value, "state": {int(key): each for key, each in value["state"].items()}}
        return {**value, "param_groups": _shaped(value["param_groups"])}
    return {key: _shaped(each) for key, each in value.items()}
