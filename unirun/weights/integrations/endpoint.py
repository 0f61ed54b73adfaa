"""`HttpEndpoint`: requests to an HTTP server that answers JSON, each with a deadline and typed errors."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

import msgspec

from unirun.errors import ServerError, ServerTimeout, UsageError

LONGEST = 1 << 20
"""Bytes of an answer that are read."""

LONGEST_WORDS = 4000
"""Characters of an answer that an error repeats. A list of all tensors that do not fit is long."""

ITS_LOG = "its log has the cause"


class HttpEndpoint:
    """A server at `url` (``http://127.0.0.1:8000``); every request has a connection of its own."""

    def __init__(self, url: str, timeout: float, api_key: str) -> None:
        """`timeout` is that of one request, in seconds. Raises `UsageError` for a URL that is not ``http://host[:port]``."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
            raise UsageError(f"{url!r} is no server", "write http://host:port")
        self.url, self.timeout = f"http://{parts.netloc}", timeout
        self._host, self._port = parts.hostname, parts.port
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def post(
        self, path: str, body: Mapping[str, object] | None = None, remedy: str = ITS_LOG
    ) -> dict[str, Any]:
        """Send `body` as JSON, and return the object in the answer, which is empty when there is none.

        `remedy` is that of the errors, for a caller who knows what a failure leaves behind. Raises `ServerError`, with
        the server's words when it refuses, and without when it dies; and `ServerTimeout`.
        """
        status, raw = self._exchange(path, msgspec.json.encode(body or {}), remedy)
        found = _decoded(raw)
        if status >= 300 or (isinstance(found, dict) and found.get("success") is False):
            raise ServerError(
                f"{self.url}{path} refused ({status}): {_words(raw, found)}",
                remedy,
                server=self.url,
                status=status,
            )
        return found if isinstance(found, dict) else {}

    def _exchange(self, path: str, body: bytes, remedy: str) -> tuple[int, bytes]:
        """The status and the beginning of the answer."""
        deadline = time.monotonic() + self.timeout
        with closing(HTTPConnection(self._host, self._port, timeout=self.timeout)) as connection:
            try:
                connection.connect()
                # The time-out of a socket begins anew with every byte. This one does not.
                watch = threading.Timer(max(deadline - time.monotonic(), 0), _cut, [connection.sock])
                watch.daemon = True
                watch.start()
                try:
                    connection.request("POST", path, body, self._headers)
                    answer = connection.getresponse()
                    found = answer.status, answer.read(LONGEST)
                finally:
                    watch.cancel()
            except (OSError, HTTPException) as error:
                if time.monotonic() < deadline:
                    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                    raise ServerError(
                        f"{self.url}{path} did not answer: {said}",
                        f"does it still run there? {remedy}",
                        server=self.url,
                    ) from error
                raise self._late(path, remedy) from error
            if time.monotonic() >= deadline:
                raise self._late(path, remedy)
            return found

    def _late(self, path: str, remedy: str) -> ServerTimeout:
        return ServerTimeout(
            f"{self.url}{path} did not answer within {self.timeout:g} s", remedy, server=self.url
        )


def _cut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _decoded(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return None


def _words(raw: bytes, found: Any) -> str:
    """The server's words about the fault: ``detail``, ``error`` or ``message``, the innermost; else all of it."""
    while isinstance(found, dict):
        found = next((found[key] for key in ("detail", "error", "message") if found.get(key)), None)
    words = found if isinstance(found, str) else raw.decode(errors="replace").strip()
    return words[:LONGEST_WORDS] or "it gives no reason"
