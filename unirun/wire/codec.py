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
        fields["values"] = {k: v if math.isfinite(v) else str(v) for k, v in message.values.items()}
    return {"type": type(message).__name__, **fields}


def decode(payload: dict[str, Any]) -> Message:
    """The message that `payload` is. Raises `FrameError` for an unknown type or a wrong field."""
    fields = dict(payload)
    name = fields.pop("type", None)
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise FrameError(f"unknown message {name!r}", "is the peer of another version?")
    return typing.cast(Message, _build(kind, fields, kind.__name__))


def typed(kind: type[T], fields: dict[str, Any]) -> T:
    """The dataclass `kind` from plain values, each checked against its annotation. Raises `FrameError`."""
    return typing.cast(T, _build(kind, fields, kind.__name__))


def _fields(kind: type[Any]) -> dict[str, Any]:
    if kind not in _FIELDS:
        _FIELDS[kind] = typing.get_type_hints(kind, include_extras=True)
    return _FIELDS[kind]


def _build(kind: type[Any], fields: dict[str, Any], where: str) -> Any:
    hints = _fields(kind)
    unknown = fields.keys() - hints.keys()
    if unknown:
        raise FrameError(f"{where} has no field {sorted(unknown)[0]!r}")
    values = {name: _check(value, hints[name], f"{where}.{name}") for name, value in fields.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise FrameError(f"{where} is incomplete: {error}") from error


def _check(value: Any, hint: Any, where: str) -> Any:
    """`value` as `hint` wants it (lists become tuples, objects become dataclasses)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
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
        return {key: _check(item, args[1], where) for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(typing.cast(type, hint), dict(value), where)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise FrameError(f"{where} is {value!r:.80}, expected {hint}")
