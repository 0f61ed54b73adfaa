"""Pickling of values with protocol 5: the memory of tensors and arrays is not copied into the pickle.

Of a tensor only its elements are sent, not the rest of its storage. A tensor on a GPU is copied through host memory to
the current device of the receiver. Classes and functions of ``__main__`` and lambdas go by value
(cloudpickle); everything else by name, as pickle does.
"""

from __future__ import annotations

import io
import marshal
import pickle
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle
import torch

from unirun.errors import EncodingError
from unirun.roles.transport.frames import MAX_HEAD as MAX_FRAME_HEAD
from unirun.roles.transport.protocol import writable

INLINE = 512
"""Bytes up to which a tensor is part of the pickle itself, which costs less than a separate buffer."""

MAX_HEAD = MAX_FRAME_HEAD - (1 << 24)
"""Bytes that a pickle may have without its buffers. The rest of a frame's head is for the header of the request."""


class _ByValue(Exception):
    """Raised when something in the value has to be pickled by value."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            return _reduce(obj)
        if isinstance(obj, type | _FUNCTION) and obj.__module__ == "__main__":
            raise _ByValue
        return NotImplemented


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            return _reduce(obj)
        if type(obj) is CodeType:
            # cloudpickle 3.1.3 drops the name of the file, and with it the source lines in tracebacks.
            return marshal.loads, (marshal.dumps(obj),)
        return super().reducer_override(obj)


_FUNCTION = type(lambda: None)


def dump(value: Any, what: str) -> tuple[bytes, tuple[memoryview, ...]]:
    """Pickle `value`. Returns the pickle and its buffers. Raises `EncodingError`, which names `what`."""
    head, buffers = (pickle.dumps(value, 5), ()) if _is_plain(value) else _dump_any(value, what)
    if len(head) > MAX_HEAD:
        problem = (
            f"{what} cannot be sent: it has {len(head)} bytes beside its tensors, and {MAX_HEAD} is the most"
        )
        raise EncodingError(problem, "send large data as tensors or arrays")
    return head, buffers


def _dump_any(value: Any, what: str) -> tuple[bytes, tuple[memoryview, ...]]:
    try:
        return _dump(_Pickler, value)
    except Exception:  # noqa: BLE001 - classes raise what they like when they are pickled
        # Objects that pickle cannot find by name; cloudpickle sends them by value.
        pass
    try:
        return _dump(_CloudPickler, value)
    except Exception as error:
        problem = f"{what} cannot be sent: {type(error).__name__}: {error}"
        raise EncodingError(problem, "send plain data, tensors or objects that pickle") from error


def _is_plain(value: Any) -> bool:
    """Return True if `value` is ``(args, {})`` with simple arguments only: plain pickle is enough and fastest."""
    return (
        type(value) is tuple
        and len(value) == 2
        and type(value[0]) is tuple
        and type(value[1]) is dict
        and not value[1]
        and _PLAIN.issuperset(map(type, value[0]))
    )


_PLAIN = frozenset((type(None), bool, int, float, str))


def _dump(kind: Callable[..., Any], value: Any) -> tuple[bytes, tuple[memoryview, ...]]:
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    kind(file, 5, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), tuple(buffer.raw() for buffer in buffers)


def load(head: bytes | memoryview, buffers: tuple[memoryview, ...]) -> Any:
    """The inverse of `dump`. Raises what unpickling raises."""
    return pickle.loads(head, buffers=buffers)  # noqa: S301 - peers have proved the job's token


def _reduce(tensor: torch.Tensor) -> Any:
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.device.type not in ("cpu", "cuda")
    ):
        return NotImplemented
    data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat: Any = data.reshape(-1).view(torch.uint8).numpy() if data.numel() else b""
    place = "" if tensor.device.type == "cpu" else tensor.device.type
    shape = tuple(data.shape)
    memory: Any = bytearray(flat) if data.nbytes <= INLINE else pickle.PickleBuffer(flat)
    return _rebuild, (memory, data.dtype, shape, place, tensor.requires_grad)


def _rebuild(
    memory: Any, dtype: torch.dtype, shape: tuple[int, ...], place: str, requires_grad: bool
) -> torch.Tensor:
    if len(memory) == 0:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = torch.frombuffer(writable(memoryview(memory)), dtype=torch.uint8).view(dtype).reshape(shape)
    if place:
        tensor = tensor.to(place)
    return tensor.requires_grad_() if requires_grad else tensor
