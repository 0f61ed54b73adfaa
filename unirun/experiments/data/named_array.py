"""`NamedArray`: tensors by name, nested, that are sliced together and sent as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from unirun.errors import FrameError, UsageError
from unirun.values import Value

Leaf = torch.Tensor


class NamedArray(Mapping[str, Any]):
    """Tensors by name; a value may be a `NamedArray` again, or None where there is nothing.

    ``array[2:5]`` slices every tensor, ``array["obs"]`` and ``array.obs`` are one of them. `metadata` are more values
    by name, any that JSON has. Every dtype is kept, also when it is sent (`pack`, `unpack`): bfloat16 and int64 too. ::

        array = NamedArray.from_dict({"obs": {"image": image, "text": text}, "reward": reward}, step=3)
    """

    def __init__(self, values: Mapping[str, Any] | None = None, /, **metadata: Any) -> None:
        self._values: dict[str, Leaf | NamedArray | None] = {}
        self.metadata = metadata
        for name, value in (values or {}).items():
            if not name or "." in name or name in ("metadata", "_values") or hasattr(NamedArray, name):
                raise UsageError(
                    f"{name!r} is no name for an array", "no dots, and no name that NamedArray has"
                )
            if isinstance(value, np.ndarray):
                value = torch.from_numpy(value)
            if not isinstance(value, Leaf | NamedArray | None):
                raise UsageError(f"{name} is a {type(value).__name__}", "give tensors, arrays or None")
            self._values[name] = value

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], /, **metadata: Any) -> NamedArray:
        """The same of nested dicts."""
        return cls(
            {n: cls.from_dict(v) if isinstance(v, Mapping) else v for n, v in values.items()}, **metadata
        )

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts."""
        return {n: v.to_dict() if isinstance(v, NamedArray) else v for n, v in self._values.items()}

    def __getitem__(self, key: Any) -> Any:
        """The value of a name; for anything else, that part of every tensor."""
        if isinstance(key, str):
            return self._values[key]
        return self.apply(lambda tensor: tensor[key])

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"NamedArray has no {name!r}; it has: {', '.join(values) or 'none'}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def apply(self, function: Callable[[Leaf], Leaf]) -> NamedArray:
        """The same with `function` of each tensor."""
        found = {
            name: value.apply(function)
            if isinstance(value, NamedArray)
            else value
            if value is None
            else function(value)
            for name, value in self._values.items()
        }
        return NamedArray(found, **self.metadata)

    def flat(self, prefix: str = "") -> dict[str, Leaf | None]:
        """All tensors by their paths, ``obs.image``."""
        found: dict[str, Leaf | None] = {}
        for name, value in self._values.items():
            if isinstance(value, NamedArray):
                found |= value.flat(f"{prefix}{name}.")
            else:
                found[prefix + name] = value
        return found

    def __repr__(self) -> str:
        shown = {n: "None" if t is None else f"{t.dtype}{list(t.shape)}" for n, t in self.flat().items()}
        return f"NamedArray({shown})"


class _Header(Value):
    """The header, before the bytes of the tensors: for each its path, dtype and shape, None for nothing."""

    leaves: list[tuple[str, tuple[str, tuple[int, ...]] | None]]
    metadata: dict[str, Any] = {}  # noqa: RUF012


def pack(array: NamedArray) -> list[bytes | memoryview]:
    """Its header, in JSON, and the bytes of each tensor."""
    leaves: list[tuple[str, tuple[str, tuple[int, ...]] | None]] = []
    buffers: list[bytes | memoryview] = []
    for path, tensor in array.flat().items():
        if tensor is None:
            leaves.append((path, None))
            continue
        whole = tensor.detach().cpu().contiguous()
        leaves.append((path, (str(whole.dtype).removeprefix("torch."), tuple(whole.shape))))
        data: Any = whole.view(-1).view(torch.uint8).numpy()
        buffers.append(memoryview(data))
    return [msgspec.json.encode(_Header(leaves, array.metadata)), *buffers]


def unpack(parts: list[bytes | memoryview]) -> NamedArray:
    """The inverse; the tensors are copies. Raises `FrameError` for anything else."""
    try:
        header = msgspec.json.decode(parts[0], type=_Header)
        buffers = iter(parts[1:])
        values: dict[str, Any] = {}
        for path, about in header.leaves:
            tensor = None if about is None else _tensor(*about, next(buffers))
            *outer, name = path.split(".")
            place = values
            for each in outer:
                place = place.setdefault(each, {})
            place[name] = tensor
        if next(buffers, None) is not None:
            raise ValueError("there are more buffers than tensors")
        return NamedArray.from_dict(values, **header.metadata)
    except (
        msgspec.MsgspecError,
        ValueError,
        TypeError,
        AttributeError,
        StopIteration,
        IndexError,
        RuntimeError,
        RecursionError,
        UsageError,
    ) as error:
        raise FrameError(f"this is no NamedArray: {error}") from error


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> torch.Tensor:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or any(size < 0 for size in shape):
        raise ValueError(f"{dtype}{list(shape)} is no tensor")
    if len(data) != kind.itemsize * int(np.prod(shape, dtype=object)):
        raise ValueError(f"{len(data)} bytes are no {dtype}{list(shape)}")
    if not len(data):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).view(shape)
