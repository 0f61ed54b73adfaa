"""Errors that cross from a worker to its caller, with type, message, traceback and ``role:rank``."""

from __future__ import annotations

import contextlib
import pickle
import re
import traceback
from typing import Any

from unirun.errors import RemoteError, RemoteTraceback
from unirun.roles.calls.codec import dump, load

_TEXT = 1 << 20
"""Characters of a message or a traceback that are sent."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
"""What Python shows of an object without a text of its own; another one after each unpickling."""

Packed = tuple[bytes, tuple[memoryview, ...]]
"""A pickle, and the buffers of the tensors and arrays in it."""


def dump_error(error: BaseException, worker: str) -> Packed:
    """`error` for the wire, as much of it as can be sent."""
    trace = "".join(traceback.format_exception(error))
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    head, buffers = _pack(error) or (None, ())
    return pickle.dumps((kind, _text(error)[:_TEXT], trace[-_TEXT:], worker, head), 5), buffers


def load_error(body: memoryview | bytes, buffers: tuple[memoryview, ...] = ()) -> Exception:
    """The exception to raise in the caller: the original's type where it is known here, else `RemoteError`.

    What is no `Exception`, like SystemExit, would end the caller; it is a `RemoteError` too.
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
    """Something that `_unpack` rebuilds here; None when there is nothing of that kind."""
    state = {name: value for name, value in error.__dict__.items() if name != "__notes__"} | _slots(error)
    # Pickle's own way first, which knows what C code keeps; it calls the class with `args`, which fails or lies
    # when the constructor takes others, and leaves out slots. The text alone is what is left when the arguments cannot
    # be sent.
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
    """Whether an exception was rebuilt. Arguments need not compare equal: tensors and most objects do not."""
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
    """An exception without a call of its constructor."""
    try:
        return kind.__new__(kind, *args)
    except TypeError:
        return kind.__new__(kind)
