"""Frames: a length of four bytes, big endian, followed by that many bytes of JSON (one object).

`FrameReader` does no I/O: it takes bytes and yields objects. A length over the limit is refused before the body is
buffered.

Integers are signed or unsigned 64-bit; other numbers are finite. Text is Unicode and may contain the code points
U+DC80 to U+DCFF, which Python uses for undecodable bytes in file names and variables (PEP 383). Other surrogates
cannot be printed or encoded; they are sent escaped, as ``\\ud800``.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from typing import Any

from unirun.errors import FrameError

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
