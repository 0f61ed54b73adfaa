"""Pickling of values with protocol 5: the memory of tensors and arrays is not copied into the pickle.

Of a tensor only its elements are sent, not the rest of its storage. A tensor on a GPU is copied through host memory to
the current device of the receiver. Classes and functions of ``__main__`` and lambdas go by value
(cloudpickle); everything else by name, as pickle does.
"""

from __future__ import annotations

import contextlib
import io
import marshal
import pickle
import re
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle
import torch

from unirun.errors import EncodingError, RemoteError, RemoteTraceback
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


# Exceptions of a worker, pickled for its caller with type, message, traceback and the worker's name.

_TEXT = 1 << 20
"""Characters of a message or a traceback that are sent at most."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
"""The address in the default repr of an object, which differs after unpickling."""

Packed = tuple[bytes, tuple[memoryview, ...]]
"""A pickle, and the buffers of the tensors and arrays in it."""


def dump_error(error: BaseException, worker: str) -> Packed:
    """Pickle `error`, as much of it as can be pickled."""
    trace = "".join(traceback.format_exception(error))
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    head, buffers = _pack(error) or (None, ())
    return pickle.dumps((kind, _text(error)[:_TEXT], trace[-_TEXT:], worker, head), 5), buffers


def load_error(body: memoryview | bytes, buffers: tuple[memoryview, ...] = ()) -> Exception:
    """The exception to raise in the caller: of the original type if that can be unpickled here, else `RemoteError`.

    An exception that is not an `Exception`, like SystemExit, would end the caller and is a `RemoteError`, too.
    """
    kind, message, trace, worker, head = pickle.loads(body)  # noqa: S301 - peers have proved the job's token
    error: BaseException | None = None
    if head is not None:
        with contextlib.suppress(Exception):
            error = _unpack((head, buffers))
    if not isinstance(error, Exception):
        return RemoteError(kind, message, worker=worker, traceback=trace)
    error.add_note(f"raised in {worker}")
    error.__cause__ = RemoteTraceback(worker, trace)
    return error


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - a user's __str__
        return f"<its text cannot be made: {broken!r}>"


def _pack(error: BaseException) -> Packed | None:
    """A pickle from which `_unpack` rebuilds the exception; None if there is none."""
    state = {name: value for name, value in error.__dict__.items() if name != "__notes__"} | _slots(error)
    # First as pickle does it, which also restores the state of exceptions in C. It calls the class with `args`, which
    # is wrong if the constructor takes other arguments, and it leaves out slots. If the arguments cannot be pickled,
    # only the text is sent.
    kind, args = type(error), error.args
    for form in ((error, state), (kind, args, state), (kind, args, {}), (kind, (_text(error),), {})):
        with contextlib.suppress(Exception):
            packed = dump(form, "an exception")
            if _alike(_unpack(packed), error):
                return packed
    return None


def _slots(error: BaseException) -> dict[str, Any]:
    """The attributes that a class keeps in ``__slots__``."""
    names: list[str] = []
    for kind in type(error).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return {name: getattr(error, name) for name in names if name != "__dict__" and hasattr(error, name)}


def _alike(again: BaseException, error: BaseException) -> bool:
    """Return True if an exception was rebuilt: same type and text. Arguments are not compared, as many
    objects have no equality."""
    return type(again) is type(error) and _ADDRESS.sub("", _text(again)) == _ADDRESS.sub("", _text(error))


def _unpack(packed: Packed) -> BaseException:
    form = load(*packed)
    if len(form) == 2:
        error, state = form
        error.__traceback__ = None
    else:
        kind, args, state = form
        error = _made(kind, args)
        error.args = args
    for name, value in state.items():
        setattr(error, name, value)
    return error  # type: ignore[no-any-return]


def _made(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An exception that is made without its constructor."""
    try:
        return kind.__new__(kind, *args)
    except TypeError:
        return kind.__new__(kind)
