"""Exceptions of a worker, pickled for its caller with type, message, traceback and the worker's name."""

from __future__ import annotations

import contextlib
import pickle
import re
import traceback
from typing import Any

from unirun.errors import RemoteError, RemoteTraceback
from unirun.roles.calls.codec import dump, load

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
