"""Reads a checkpoint: as new tensors, or into models and optimizers, however many ranks have written it.

Models whose parameters are shared out (DTensors, as with FSDP2) get their parts.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO

import torch
from torch import nn

from unirun.errors import UsageError
from unirun.train.checkpoints.folder import INDEX, STATE, Folder, Manifest
from unirun.train.checkpoints.state import listed, named_as, plain_state, unwrapped
from unirun.train.nested import mapped
from unirun.weights.tensors import original_name

ALIKE = "load it under the name with which save_checkpoint has saved it"


def load(folder: Folder, manifest: Manifest, into: Mapping[str, Any] | None) -> dict[str, Any]:
    """The state of a checkpoint; models, optimizers and the like in `into` load the states that it has under
    their names. Raises `CheckpointDamaged`; `UsageError` for a name that it does not have, and for a
    checkpoint that another user may have written if it has more than tensors and plain data.
    """
    if manifest.sharded:
        return _load_sharded(folder, manifest.number, into)
    found = _load_plain(folder, manifest.number)
    put_into(into or {}, found)
    return found


def put_into(into: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Change models, optimizers and the like in `into`, also in its lists, tuples and mappings, to what a plain state
    has in their places. Raises `UsageError`."""
    for target, own in [*_matched(into, state)]:
        if isinstance(target, nn.Module):
            like = target.state_dict()
            own = {key: _part_of(each, like.get(key)) for key, each in named_as(target, own).items()}
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


def _matched(into: Any, saved: Any, place: str = "") -> Iterator[tuple[Any, Any]]:
    """Each model, optimizer and the like in `into`, with what `saved` has in its place. Raises `UsageError`."""
    if _loads(into):
        target = unwrapped(into)
        if isinstance(target, nn.Module | torch.optim.Optimizer) and not isinstance(saved, Mapping):
            raise UsageError(
                f"the checkpoint has no state dict as {place}, it has {type(saved).__name__}", ALIKE
            )
        yield target, saved
        return
    there = _parts(saved)
    if isinstance(into, list | tuple) and len(into) != len(there) and _has_targets(into):
        raise UsageError(f"{place} has length {len(into)}, and {len(there)} in the checkpoint", ALIKE)
    for key, each in _parts(into).items():
        if _has_targets(each):
            here = f"{place}[{key!r}]" if place else key
            _check(key, there, here)
            yield from _matched(each, there[key], here)


def _has_targets(into: Any) -> bool:
    return _loads(into) or any(map(_has_targets, _parts(into).values()))


def _loads(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(unwrapped(value), "load_state_dict", None))


def _parts(value: Any) -> Mapping[Any, Any]:
    """The parts of a container, by key or index."""
    if isinstance(value, Mapping):
        return value
    return dict(enumerate(value)) if isinstance(value, list | tuple) else {}


def _check(name: Any, names: Collection[Any], place: str) -> None:
    if name not in names:
        raise UsageError(
            f"the checkpoint has no {place!r}; it has {', '.join(sorted(map(repr, names))) or 'nothing'}",
            ALIKE,
        )


def _load_plain(folder: Folder, number: int) -> dict[str, Any]:
    try:
        with folder.open(number, STATE) as file:
            return _read(file, folder, number)
    except UsageError:
        raise
    except OSError as error:
        raise folder.unreadable(number, STATE, error) from error
    except Exception as error:
        raise folder.damaged(number, STATE, f"cannot be read: {error}") from error


def _read(file: BinaryIO, folder: Folder, number: int) -> dict[str, Any]:
    """The state in a file. Only a file that no other user can have written may have objects of any class, as making
    them runs code."""
    found: dict[str, Any]
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - bytes that are no pickle may raise anything, here and below
        _check_own(folder, number, "it does not consist of tensors and plain data alone", error)
        file.seek(0)
        found = torch.load(file, map_location="cpu", weights_only=False)
    return found


def _check_own(folder: Folder, number: int, why: str, error: Exception | None = None) -> None:
    """Raise `UsageError` for a checkpoint that another user may have written."""
    if problem := folder.foreign(number):
        raise UsageError(
            f"checkpoint {folder.path(number)} is not loaded: {why}, and {problem}",
            "copy it to a directory of your own if you trust it",
        ) from error


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


def _load_sharded(folder: Folder, number: int, into: Mapping[str, Any] | None) -> dict[str, Any]:
    _check_own(folder, number, "it is sharded, so its index is a pickle")
    reader = _reader(folder, number)
    try:
        saved = reader.read_metadata()
    except OSError as error:
        raise folder.unreadable(number, INDEX, error) from error
    except Exception as error:
        # Bytes that are no pickle may raise anything.
        raise folder.damaged(number, INDEX, f"cannot be read: {error}") from error
    paths = {name: saved.planner_data.get(name, (name,)) for name in saved.state_dict_metadata}

    def empty(name: str, like: torch.Tensor | None = None) -> Any:
        return _empty(saved.state_dict_metadata[name], like)

    if into is None:
        flat = {name: empty(name) for name in paths}
        _fill(flat, reader, folder, number)
        nested: dict[str, Any] = {}
        for name, path in paths.items():
            _put(nested, path, flat[name])
        return {name: _shaped(value) for name, value in nested.items()}
    there: dict[Any, Any] = {}
    for name, path in paths.items():
        _put(there, path, name)
    state: dict[str, Any] = listed(plain_state(into))
    for key in into:
        _check(key, there, key)
    for (target, names), (_, own) in [*zip(_matched(into, there), _matched(into, state), strict=True)]:
        if isinstance(target, torch.optim.Optimizer):
            # One that has made no step has no state yet, so nothing of it would be read.
            parameters = _parameters(target)
            for number, stats in names.get("state", {}).items():
                if (like := parameters.get(int(number))) is not None:
                    own["state"][int(number)] = mapped(partial(empty, like=like), stats)
        elif isinstance(target, nn.Module):
            # A user's state dict of a compiled model has been saved with its own names.
            saved_as = {original_name(name): name for name in names}
            tensors = {saved_as.get(name, name): tensor for name, tensor in own.items()}
            own.clear()
            own.update(tensors)
    _fill(state, reader, folder, number)
    for target, own in [*_matched(into, state)]:
        if not isinstance(target, nn.Module):
            # The tensors of a module were changed where they are.
            target.load_state_dict(own)
    return state


def _empty(about: Any, like: torch.Tensor | None) -> Any:
    """A tensor to read into, cut as `like` is, if it has the same shape; None for what is no tensor."""
    if not hasattr(about, "size") or not hasattr(about, "properties"):
        return None
    if like is not None and about.size == like.shape:
        return torch.zeros_like(like.detach(), dtype=about.properties.dtype)
    return torch.zeros(about.size, dtype=about.properties.dtype)


def _fill(state: dict[str, Any], reader: Any, folder: Folder, number: int) -> None:
    """Read what `state` needs; each rank reads for itself."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load as load_parts

    try:
        with warnings.catch_warnings():
            # This is intended: each rank reads for itself.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load_parts(state, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        # CheckpointException is no Exception. It holds the exceptions of all ranks, here of this one.
        ((cause, _),) = error.failures.values()
        if isinstance(cause, OSError):
            raise folder.unreadable(number, os.path.basename(cause.filename or ""), cause) from error
        raise cause from error


def _reader(folder: Folder, number: int) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if folder.local:
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
