"""Frames: four bytes of length, big endian, then that many bytes of JSON (one object).

`FrameReader` does no I/O: bytes go in, objects come out. It never trusts a length: one over the cap is
refused before a byte of the frame is kept.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from unirun.errors import FrameError

VERSION = 1
"""Version of the wire; part of the handshake, so two versions never exchange a frame."""

MAX_FRAME = 16 * 1024 * 1024
"""The largest frame in bytes. The largest real one is the spec of a job."""

_LENGTH = struct.Struct(">I")


def encode_frame(payload: dict[str, Any], *, limit: int = MAX_FRAME) -> bytes:
    """The bytes of one frame. Raises `FrameError` when they pass `limit`."""
    body = json.dumps(payload, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > limit:
        raise FrameError(f"a frame of {len(body)} bytes is over the limit of {limit}")
    return _LENGTH.pack(len(body)) + body


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
            yield _parse(body)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        payload = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame is no JSON: {error}") from error
    if not isinstance(payload, dict):
        raise FrameError(f"a frame holds a {type(payload).__name__}, expected an object")
    return payload


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not allowed")
