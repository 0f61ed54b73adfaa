"""Errors that cross from a worker to its caller, with type, message, traceback and ``role:rank``."""

from __future__ import annotations

import contextlib
import pickle
import re
import traceback
from typing import Any

from unirun.errors import CallError, RemoteError, RemoteTraceback
from unirun.roles.calls.codec import dump, load

_TEXT = 1 << 20
"""Characters of a message or a traceback that are sent."""

_DATA = 1 << 20
"""Bytes of tensors and arrays that an exception may hold. Without larger ones it is sent all the same."""

_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
"""What Python shows of an object without a text of its own; another one after each unpickling."""


def dump_error(error: BaseException, worker: str) -> bytes:
    """`error` for the wire, as much of it as can be sent."""
    trace = "".join(traceback.format_exception(error))
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    return pickle.dumps((kind, _text(error)[:_TEXT], trace[-_TEXT:], worker, _pack(error)), 5)


def load_error(body: memoryview | bytes) -> BaseException:
    """The exception to raise in the caller: the original's type where it is known here, else `RemoteError`."""
    kind, message, trace, worker, packed = pickle.loads(body)  # noqa: S301 - peers have proved the job's token
    error: BaseException | None = None
    if packed is not None:
        with contextlib.suppress(Exception):
            error = _unpack(packed)
    if error is None:
        return RemoteError(kind, message, worker=worker, traceback=trace)
    error.add_note(f"raised in {worker}")
    error.__cause__ = RemoteTraceback(worker, trace)
    return error


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - a user's __str__
        return f"<its text cannot be made: {broken!r}>"


def _pack(error: BaseException) -> bytes | None:
    """Something that `_unpack` rebuilds here; None when there is nothing of that kind."""
    state = {name: value for name, value in error.__dict__.items() if name != "__notes__"}
    # Pickle's own way first, which knows what C code keeps; it calls the class with `args`, which fails or lies
    # when the constructor takes others. The text alone is what is left when the arguments cannot be sent.
    kind, args = type(error), error.args
    for form in (error, (kind, args, state), (kind, args, {}), (kind, (_text(error),), {})):
        with contextlib.suppress(Exception):
            packed = _whole(form)
            if _alike(_unpack(packed), error):
                return packed
    return None


def _alike(again: BaseException, error: BaseException) -> bool:
    """Whether an exception was rebuilt. Arguments need not compare equal: tensors and most objects do not."""
    return type(again) is type(error) and _ADDRESS.sub("", _text(again)) == _ADDRESS.sub("", _text(error))


def _whole(form: Any) -> bytes:
    head, buffers = dump(form, "an exception")
    if sum(buffer.nbytes for buffer in buffers) > _DATA:
        raise CallError("an exception holds large data")
    return pickle.dumps((head, [bytearray(buffer) for buffer in buffers]), 5)


def _unpack(packed: bytes) -> BaseException:
    head, buffers = pickle.loads(packed)  # noqa: S301 - peers have proved the job's token
    form = load(head, tuple(memoryview(buffer) for buffer in buffers))
    if isinstance(form, BaseException):
        form.__traceback__ = None
        return form
    kind, args, state = form
    try:
        error: BaseException = kind.__new__(kind, *args)
    except TypeError:
        error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error
