"""Frames: four bytes of length, big endian, then that many bytes of JSON (one object).

`FrameReader` does no I/O: bytes go in, objects come out. It never trusts a length: one over the cap is
refused before a byte of the frame is kept.

Integers have 64 bits, with a sign or without; other numbers are finite. Text is Unicode, and may have the code points
U+DC80 to U+DCFF, by which Python stands for bytes of file names and variables that are no UTF-8 (PEP 383). Other
surrogates are no text, cannot be printed or written, and are sent as ``\\ud800``.
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
"""Version of the wire; part of the handshake, so two versions never exchange a frame."""

MAX_FRAME = 16 * 1024 * 1024
"""The largest frame in bytes. The largest real one is the spec of a job."""

_LENGTH = struct.Struct(">I")


def encode_frame(payload: dict[str, Any], *, limit: int = MAX_FRAME) -> bytes:
    """The bytes of one frame. Raises `FrameError` when they pass `limit`."""
    try:
        body = _to_json(payload)
        if _ESCAPED.search(body):
            # There may be lone surrogates in what a user's code has said.
            body = _to_json(as_text(payload))
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"a message has no form in JSON: {error}") from error
    if len(body) > limit:
        raise FrameError(f"a frame of {len(body)} bytes is over the limit of {limit}")
    return _LENGTH.pack(len(body)) + body.encode()


def _to_json(payload: dict[str, Any]) -> str:
    return json.dumps(payload, separators=(",", ":"), allow_nan=False)


_NO_TEXT = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that stand for no byte."""

_ESCAPED = re.compile(r"\\u[dD]")
"""How surrogates are written, and the halves of characters outside of the basic plane."""


def as_text(value: Any) -> Any:
    """JSON values in which surrogates that stand for no byte are spelled out."""
    if isinstance(value, str):
        return _NO_TEXT.sub(lambda found: f"\\u{ord(found[0]):04x}", value)
    if isinstance(value, dict):
        return {as_text(key): as_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_text(item) for item in value]
    return value


class FrameReader:
    """Takes bytes as they arrive and gives whole frames."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._buffer = bytearray()
        self._limit = limit

    @property
    def pending(self) -> int:
        """How many bytes of an unfinished frame are held."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Every frame that `data` completes. Raises `FrameError` on the first that is none."""
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
    """The JSON object that `text` is. Raises `FrameError`."""
    try:
        text = text if isinstance(text, str) else text.decode()
        payload = _DECODER.decode(text)
        if (_ESCAPED.search(text) or not text.isascii()) and as_text(payload) != payload:
            raise ValueError("a text has half of a character")
    except (ValueError, RecursionError) as error:
        raise FrameError(f"what should be JSON is not: {error}") from error
    if not isinstance(payload, dict):
        raise FrameError(f"there is a {type(payload).__name__}, expected an object")
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
