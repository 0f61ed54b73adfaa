"""The state that a user saves, and how it is read again: as bytes or by torch.distributed.checkpoint.

A value may be anything that pickles. A module or an optimizer stands for its state dict; the wrappers of
DistributedDataParallel and torch.compile are taken off, so names are those of the model alone. When any tensor is a
part (a DTensor, as with FSDP2), all ranks write their own.
"""

from __future__ import annotations

import copy
import io
import os
import sys
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO

import numpy
import torch
from torch import nn

from unirun.errors import UsageError
from unirun.roles.nested import mapped
from unirun.train.checkpoints.folder import INDEX, PRIVATE, STATE, Folder, Manifest, Summed
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
    like: Any = model.state_dict()
    own = {original_name(name): name for name in like}
    found: Any = OrderedDict((own.get(name, name), each) for name, each in by_original_name(saved).items())
    # The versions of its modules, by which a module knows how to read its part.
    versions = {original_name(path): each for path, each in getattr(saved, "_metadata", {}).items()}
    found._metadata = {path: versions.get(original_name(path), {}) for path in getattr(like, "_metadata", {})}
    return found  # type: ignore[no-any-return]


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
    # An array of objects has their addresses, which differ between ranks.
    small = isinstance(value, numpy.ndarray) and value.nbytes <= SMALL and not value.dtype.hasobject
    return value.tobytes() if small else b""


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
    try:
        return mapped(_copied, value)
    except Exception as error:
        raise _unsavable(value, error) from error


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - classes raise what they like
        # deepcopy refuses tensors with a grad_fn, which pickle takes.
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=False)


def encode(state: Mapping[str, Any], file: Any) -> None:
    """Write a state to an open file, or to a path. Raises `UsageError` for what cannot be pickled, and OSError."""
    try:
        torch.save(dict(state), file)
    except Exception as error:
        # When a write has failed, torch writes the end of the file even so, which raises once more.
        for each in (error, error.__context__):
            if isinstance(each, OSError):
                raise each from None
        raise _unsavable(state, error) from error


def _unsavable(state: Any, error: Exception) -> UsageError:
    """`error`, with the name of the part of `state` that it is about."""
    name = _culprit(state, "", set()) or "this state"
    return UsageError(
        f"{name} cannot be saved: {type(error).__name__}: {error}", "save tensors, state dicts and plain data"
    )


def _culprit(value: Any, name: str, seen: set[int]) -> str:
    """The name of the innermost part that cannot be pickled; empty if all such parts lead back to those that were
    `seen`, by their identities."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    seen.add(id(value))
    leads_back = False
    for key, each in parts:
        if id(each) in seen:
            leads_back = True
        elif not _can_be_saved(each):
            if found := _culprit(each, f"{name}[{key!r}]" if name else str(key), seen):
                return found
            leads_back = True
    return "" if leads_back else name


def _can_be_saved(value: Any) -> bool:
    try:
        torch.save(value, os.devnull)
    except Exception:  # noqa: BLE001 - classes raise what they like
        return False
    return True


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
        file = Summed(stream)
        yield file
    # The index gets its name when it is whole.
    files[os.path.basename(path).removesuffix(".tmp")] = file.size, file.crc


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


# Reads a checkpoint: as new tensors, or into models and optimizers, however many ranks have written it.
#
# Models whose parameters are shared out (DTensors, as with FSDP2) get their parts.

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


UNNAMED = "_state"
"""The name of a state that is saved without names, such as ``save_checkpoint((model, optimizer))``."""


def named(state: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """A state by names, as `save_checkpoint` is given it: a dict, any other value, and values by name. Raises
    `UsageError`."""
    if state is None or isinstance(state, Mapping):
        return {**(state or {}), **names}
    if names:
        raise UsageError(
            f"save_checkpoint is given a {type(state).__name__}, and {', '.join(names)}", "give each a name"
        )
    return {UNNAMED: state}


def unnamed(state: dict[str, Any]) -> Any:
    """The state as it was given to `save_checkpoint`."""
    return state[UNNAMED] if state.keys() == {UNNAMED} else state


def state_at(url: str) -> Any:
    """The state of a checkpoint, with tensors on the CPU. Raises `CheckpointDamaged` and `UsageError`."""
    place, _, number = url.rpartition("/")
    folder = Folder(place)
    manifest = folder.require(int(number))
    folder.verify(manifest)
    return unnamed(load(folder, manifest, None))


def put_into(into: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Change models, optimizers and the like in `into`, also in its lists, tuples and mappings, to what a plain state
    has in their places. Raises `UsageError`."""
    for target, own in [*_matched(into, state)]:
        if isinstance(target, nn.Module):
            like, own = target.state_dict(), named_as(target, own)
            for key, each in own.items():
                own[key] = _part_of(each, like.get(key))
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
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

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
        return _numbered(unflatten_state_dict(flat, paths))  # type: ignore[no-any-return]
    there = unflatten_state_dict({name: name for name in paths}, paths)
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


def _numbered(value: Any) -> Any:
    """`value` with the numbers in the state of each optimizer, which the names of tensors have as texts."""
    if isinstance(value, list):
        return [*map(_numbered, value)]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"state", "param_groups"}:
        return {**value, "state": {int(key): each for key, each in value["state"].items()}}
    return {key: _numbered(each) for key, each in value.items()}
