"""The form of a message in JSON: ``{"type": <class name>, …fields}``.

`decode` checks each field against its annotation, so what a state machine receives has the types that it was
written for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from msgspec import convert, to_builtins

from unirun.errors import FrameError
from unirun.wire.frames import parse_object
from unirun.wire.messages import Message
from unirun.wire.reports import FromWorker, Metrics

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}
T = TypeVar("T")


def encode(message: Message) -> dict[str, Any]:
    """Plain values for a frame."""
    payload: dict[str, Any] = to_builtins(message)
    said, place = message, payload
    if isinstance(message, FromWorker):
        said, place = message.message, payload["message"]
    if isinstance(said, Metrics):
        place["values"] = finite(said.values)
    return payload


def finite(values: Mapping[str, float]) -> dict[str, float | str]:
    """`values` as JSON can have them: ``"nan"``, ``"inf"`` and ``"-inf"`` stand for floats that it has no words for."""
    return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}


def decode(payload: dict[str, Any]) -> Message:
    """The message that `payload` is. Raises `FrameError` for an unknown type or a wrong field."""
    name = payload.get("type")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise FrameError(f"unknown message {_short(repr(name))}", "is the peer of another version?")
    if kind is FromWorker and isinstance(said := payload.get("message"), dict):
        payload = {**payload, "message": _with_floats(said)}
    return typed(kind, _with_floats(payload))


def _with_floats(payload: dict[str, Any]) -> dict[str, Any]:
    """`payload` with the floats that JSON has no words for, if it has the figures of `Metrics`."""
    values = payload.get("values")
    if payload.get("type") != "Metrics" or not isinstance(values, dict):
        return payload
    texts = ("nan", "inf", "-inf")
    return {**payload, "values": {k: float(v) if v in texts else v for k, v in values.items()}}


def typed(kind: type[T], fields: dict[str, Any]) -> T:
    """The `Value` of class `kind` with these fields, each checked against its annotation. Raises `FrameError`."""
    try:
        return convert(fields, kind)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"this is no {kind.__name__}: {_short(str(error))}") from error


def from_json(kind: type[T], text: str) -> T:
    """The `Value` of class `kind` that was written as the JSON object `text`. Raises `FrameError`."""
    return typed(kind, parse_object(text))


def _short(text: str) -> str:
    """`text`, in which something is from a peer, in printable characters and as many as a message has room for."""
    return ascii(text[:160])[1:-1]
