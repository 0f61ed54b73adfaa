"""Frames: a length of four bytes, big endian, followed by that many bytes of JSON (one object).

`FrameReader` does no I/O: it takes bytes and yields objects. A length over the limit is refused before the body is
buffered.

Integers are signed or unsigned 64-bit; other numbers are finite. Text is Unicode and may contain the code points
U+DC80 to U+DCFF, which Python uses for undecodable bytes in file names and variables (PEP 383). Other surrogates
cannot be printed or encoded; they are sent escaped, as ``\ud800``.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from msgspec import convert, to_builtins

from unirun.errors import FrameError
from unirun.wire.messages import KINDS
from unirun.wire.reports import Message

VERSION = 3
"""Version of the protocol. It is part of the handshake, so peers of different versions never exchange a frame."""

MAX_FRAME = 16 * 1024 * 1024
"""Maximum size of a frame in bytes. The largest frame in practice is the spec of a job."""

_LENGTH = struct.Struct(">I")


def encode_frame(payload: dict[str, Any], *, limit: int = MAX_FRAME) -> bytes:
    """Encode one frame. Raises `FrameError` when it exceeds `limit` bytes or `payload` is not valid JSON."""
    try:
        body = _to_json(payload)
        if _ESCAPED.search(body):
            # Text from user code may contain lone surrogates.
            body = _to_json(as_text(payload))
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"cannot encode a message as JSON: {error}") from error
    if len(body) > limit:
        raise FrameError(f"a frame of {len(body)} bytes is over the limit of {limit}")
    return _LENGTH.pack(len(body)) + body.encode()


def _to_json(payload: dict[str, Any]) -> str:
    return json.dumps(payload, separators=(",", ":"), allow_nan=False)


_NO_TEXT = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that do not represent an undecodable byte."""

_ESCAPED = re.compile(r"\\u[dD]")
"""A JSON escape of a surrogate, lone or half of a pair."""


def as_text(value: Any) -> Any:
    """Escape the surrogates in JSON values that do not represent an undecodable byte."""
    if isinstance(value, str):
        return _NO_TEXT.sub(lambda found: f"\\u{ord(found[0]):04x}", value)
    if isinstance(value, dict):
        return {as_text(key): as_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_text(item) for item in value]
    return value


class FrameReader:
    """Incremental parser: takes bytes as they arrive and yields complete frames."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._buffer = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield each frame that `data` completes. Raises `FrameError` on the first invalid one."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._limit:
                raise FrameError(f"a frame of {length} bytes is over the limit of {self._limit}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield parse_object(body)


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse `text` as one JSON object. Raises `FrameError`."""
    try:
        text = text if isinstance(text, str) else text.decode()
        payload = _DECODER.decode(text)
        if (_ESCAPED.search(text) or not text.isascii()) and as_text(payload) != payload:
            raise ValueError("a string has a lone surrogate")
    except (ValueError, RecursionError) as error:
        raise FrameError(f"invalid JSON: {error}") from error
    if not isinstance(payload, dict):
        raise FrameError(f"expected a JSON object, found a {type(payload).__name__}")
    return payload


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not allowed")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _of_64_bits(text: str) -> int:
    value = int(text)
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError("an integer has more than 64 bits")
    return value


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, parse_int=_of_64_bits)


# Convert messages to and from JSON: ``{"type": <class name>, …fields}``.
#
# `decode` checks each field against its annotation, so a state machine only receives values of the declared types.

T = TypeVar("T")


def encode(message: Message) -> dict[str, Any]:
    """Convert `message` to plain values for a frame."""
    payload: dict[str, Any] = to_builtins(message)
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
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise FrameError(f"unknown message {_short(repr(name))}", "is the peer of another version?")
    return typed(kind, payload)


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
