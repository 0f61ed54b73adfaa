"""The form of a message in JSON: ``{"type": <class name>, …fields}``.

`decode` checks each field against its annotation, so what a state machine receives has the types that it was
written for.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

from unirun.errors import FrameError
from unirun.wire.frames import is_text, parse_object
from unirun.wire.messages import Message
from unirun.wire.reports import Metrics, WorkerMetrics

_TYPES: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Message)}
T = typing.TypeVar("T")
_FIELDS: dict[type[Any], dict[str, Any]] = {}


def encode(message: Message) -> dict[str, Any]:
    """Plain values for a frame."""
    fields = dataclasses.asdict(message)
    if isinstance(message, Metrics | WorkerMetrics):
        # JSON has no words for these; a loss that is nan is news all the same.
        fields["values"] = {k: v if _is_finite(v) else str(float(v)) for k, v in message.values.items()}
    return {"type": type(message).__name__, **fields}


def decode(payload: dict[str, Any]) -> Message:
    """The message that `payload` is. Raises `FrameError` for an unknown type or a wrong field."""
    fields = dict(payload)
    name = fields.pop("type", None)
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise FrameError(f"unknown message {_shown(name)}", "is the peer of another version?")
    return typing.cast(Message, _build(kind, fields, kind.__name__))


def typed(kind: type[T], fields: dict[str, Any]) -> T:
    """The dataclass `kind` from plain values, each checked against its annotation. Raises `FrameError`."""
    return typing.cast(T, _build(kind, fields, kind.__name__))


def from_json(kind: type[T], text: str) -> T:
    """The frozen dataclass `kind` that was written as the JSON object `text`, each field of the type that it declares.

    Raises `FrameError`.
    """
    return typed(kind, parse_object(text))


def _fields(kind: type[Any]) -> dict[str, Any]:
    if kind not in _FIELDS:
        _FIELDS[kind] = typing.get_type_hints(kind, include_extras=True)
    return _FIELDS[kind]


def _build(kind: type[Any], fields: dict[str, Any], where: str) -> Any:
    hints = _fields(kind)
    unknown = fields.keys() - hints.keys()
    if unknown:
        raise FrameError(f"{where} has no field {_shown(sorted(unknown)[0])}")
    values = {name: _check(value, hints[name], f"{where}.{name}") for name, value in fields.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise FrameError(f"{where} is incomplete: {error}") from error


def _check(value: Any, hint: Any, where: str) -> Any:
    """`value` as `hint` wants it (lists become tuples, objects become dataclasses)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _plain(value, where)
    if origin is typing.Annotated:
        return float(value) if value in ("nan", "inf", "-inf") else _check(value, args[0], where)
    if origin is typing.Literal and isinstance(value, str) and value in args:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (hint,) = (arg for arg in args if arg is not type(None))
        return _check(value, hint, where)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_check(item, args[0], where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {_check(key, str, where): _check(item, args[1], where) for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(typing.cast(type, hint), dict(value), where)
    if hint is float and type(value) in (int, float) and _is_finite(value):
        return float(value)
    if hint is int and type(value) is int and -(1 << 63) <= value < 1 << 64:
        return value
    if hint is str and type(value) is str and is_text(value):
        return value
    if hint is bool and type(value) is bool:
        return value
    raise FrameError(f"{where} is {_shown(value)}, expected {hint}")


def _is_finite(number: float) -> bool:
    """Whether it is a finite number as a float; an integer may be too large for one."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _plain(value: Any, where: str) -> Any:
    """A part of the user's own: any JSON, as long as all its text is text."""
    if isinstance(value, str) and not is_text(value):
        raise FrameError(f"{where} is {_shown(value)}, expected text")
    if isinstance(value, dict):
        return {_plain(key, where): _plain(item, where) for key, item in value.items()}
    return [_plain(item, where) for item in value] if isinstance(value, list) else value


def _shown(value: Any) -> str:
    """What a peer has sent, in as many characters as a message has room for: it may be of any size."""
    if isinstance(value, str):
        return ascii(value[:80])
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return f"a {type(value).__name__}" if isinstance(value, dict | list | tuple) else f"{value!r}"
