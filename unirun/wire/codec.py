"""Convert messages to and from JSON: ``{"type": <class name>, …fields}``.

`decode` checks each field against its annotation, so a state machine only receives values of the declared types.
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
    """Convert `message` to plain values for a frame."""
    payload: dict[str, Any] = to_builtins(message)
    said, place = message, payload
    if isinstance(message, FromWorker):
        said, place = message.message, payload["message"]
    if isinstance(said, Metrics):
        place["values"] = finite(said.values)
    return payload


def finite(values: Mapping[str, T]) -> dict[str, T | None]:
    """Replace nan and infinities, which JSON does not have, by None: readers of figures, such as pandas, know
    null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def decode(payload: dict[str, Any]) -> Message:
    """Convert `payload` to a message. Raises `FrameError` for an unknown type or a wrong field."""
    name = payload.get("type")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise FrameError(f"unknown message {_short(repr(name))}", "is the peer of another version?")
    if kind is FromWorker and isinstance(said := payload.get("message"), dict):
        payload = {**payload, "message": _with_floats(said)}
    return typed(kind, _with_floats(payload))


def _with_floats(payload: dict[str, Any]) -> dict[str, Any]:
    """Make nan of the nulls in the payload of `Metrics`, which stand for values that are not finite."""
    values = payload.get("values")
    if payload.get("type") != "Metrics" or not isinstance(values, dict):
        return payload
    return {**payload, "values": {k: math.nan if v is None else v for k, v in values.items()}}


def typed(kind: type[T], fields: dict[str, Any]) -> T:
    """Build a `kind`, a `Value`, with each field checked against its annotation. Raises `FrameError`."""
    try:
        return convert(fields, kind)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"this is no {kind.__name__}: {_short(str(error))}") from error


def from_json(kind: type[T], text: str) -> T:
    """Build a `kind`, a `Value`, from the JSON object `text`. Raises `FrameError`."""
    return typed(kind, parse_object(text))


def _short(text: str) -> str:
    """Escape `text`, which may come from a peer, to printable ASCII and cut it to 160 characters."""
    return ascii(text[:160])[1:-1]
