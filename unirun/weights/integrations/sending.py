"""Requests to an inference server over HTTP, in rounds, with the weights in shared memory."""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, IncompleteRead
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from unirun.errors import Fault, ServerError, ServerTimeout, UnirunError, UsageError, WeightsError
from unirun.weights.publishing import TOKEN, Block, Blocks, Packing, copy_all, unsaveable
from unirun.weights.tensors import (
    Layout,
    Part,
    Piece,
    Tensor,
    Weights,
    is_dtensor,
    tensors_of,
    unreadable,
)


class Param(NamedTuple):
    """One tensor: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def file_for(params: Sequence[Param], blocks: Blocks, reader: str) -> tuple[Packing, Block]:
    """A block that is a file for tensors as `params` say, and their places in it. `reader` is its only reader.

    Raises `WeightsError` for dtypes that a file cannot have, `UnirunError` when there is no memory.
    """
    if faults := unsaveable({param.name: param.dtype for param in params}):
        raise WeightsError("these tensors cannot be in a safetensors file", faults=faults)
    layout: Layout = {}
    for param in params:
        about = Tensor(param.shape, str(param.dtype).removeprefix("torch."))
        layout[param.name] = Part(about, (Piece(about.whole, (0,) * len(param.shape)),))
    packing = Packing(layout, 0)
    block = blocks.take(packing.size, reader)
    if block.handle is None:
        raise UnirunError(
            f"there is no shared memory for {block.size} bytes of weights", "give this job more memory"
        )
    packing.begin(block)
    return packing, block


def read(path: str, token: str) -> dict[str, torch.Tensor]:
    """The tensors of the file with this `token`, over its memory, in the order of its header.

    Writing to one changes this process's copy of it alone. Raises `UsageError` when the file is not there, or another.
    """
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get(TOKEN) != token:
                raise UsageError(f"there are other weights at {path}", SAME_HOST)
            return {name: file.get_tensor(name) for name in file.offset_keys()}
    except (OSError, SafetensorError) as error:
        raise UsageError(f"there are no weights at {path} ({error})", SAME_HOST) from error


SAME_HOST = "run the server on the host of the worker that sends, in the same container, as the same user"


class WeightSource(Protocol):
    """Whole tensors by name, as often as they are asked for: what vLLM calls a ``WeightSource``."""

    def metadata(self) -> list[Param]:
        """The metadata of the tensors that iteration yields, in the same order."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, from the first one."""


class Source:
    """The tensors of a module or a dict, with the names that they have there; the server has to know these names.

    It has what vLLM's engines for NCCL and CUDA IPC ask of a ``WeightSource``, so that it can be given to them, too.
    What sharded engines ask (``held_names``, ``groups``) it does not have.
    """

    def __init__(self, weights: Weights) -> None:
        """`weights` is looked at in every round. Raises `WeightsError` for tensors that are parts (DTensors)."""
        self._weights = weights
        self._tensors()

    def metadata(self) -> list[Param]:
        """Name, dtype and shape of each tensor."""
        return [Param(name, value.dtype, tuple(value.shape)) for name, value in self._tensors().items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors().items())

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = tensors_of(self._weights)
        whole = {n: v for n, v in tensors.items() if isinstance(v, torch.Tensor) and not is_dtensor(v)}
        parts = [
            Fault(
                name,
                f"a {type(tensors[name]).__name__} is a part",
                "receive into plain tensors, which are whole",
            )
            for name in tensors
            if name not in whole
        ]
        if parts:
            raise WeightsError("a server takes whole tensors", faults=parts)
        return whole


SERVER = "server"
"""The reader of the memory that a server loads."""


class TrainerEngine:
    """Gives the tensors of `source` to a server, through a file in shared memory that is written again in each round.

    One process makes it for each server. It has the form of vLLM's ``TrainerWeightTransferEngine``, but not its base
    class, which would need vLLM in this process.
    """

    def __init__(self, client: ServerClient, source: WeightSource) -> None:
        self.source = source
        self._client = client
        self._blocks = Blocks()

    def send_weights(self, weight_version: str | None = None) -> None:
        """Send all tensors, and return when the server has loaded them; its label for them is then `weight_version`.

        When it raises, the server may have some of the new tensors. Raises `ServerError`, `ServerTimeout`, and
        `WeightsError` with all tensors that cannot be sent.
        """
        params = tuple(Param(p.name, p.dtype, tuple(p.shape)) for p in self.source.metadata())
        packing, block = file_for(params, self._blocks, SERVER)
        try:
            _write(self.source, params, [*packing.tensors(block).values()])
            self._client.deliver(block.path, block.token, weight_version)
        except BaseException:
            # The server may still read this memory, so it is not written again.
            self.shutdown()
            raise
        block.readers.clear()

    def shutdown(self) -> None:
        """Give the memory back. The next round takes new memory."""
        self._blocks.close()


def _write(
    tensors: Iterable[tuple[str, torch.Tensor]], params: Sequence[Param], views: Sequence[torch.Tensor]
) -> None:
    """Copy `tensors` into `views`. They come in the order of `params`. Raises `WeightsError` with all that are
    others."""
    faults = []
    for param, view, pair in zip_longest(params, views, tensors):
        empty = unreadable(*pair) if pair is not None else None
        found = Param(pair[0], pair[1].dtype, tuple(pair[1].shape)) if pair and not empty else None
        if empty is not None:
            faults.append(empty)
        elif found is None or found != param:
            faults.append(Fault(str(param or "nothing"), f"then came {found or 'nothing'}"))
        else:
            copy_all([view], [pair[1].detach().resolve_conj().resolve_neg()])
    if faults:
        raise WeightsError("these tensors cannot be sent, or metadata() has declared others", faults=faults)


# `ServerClient`: requests to an HTTP server that answers JSON, each with a deadline and typed errors.

MAX_ANSWER_BYTES = 1 << 20
"""Bytes of an answer that are read."""

LONGEST_WORDS = 4000
"""Characters of an answer that an error repeats. A list of all tensors that do not fit is long."""

ITS_LOG = "its log has the cause"


class ServerClient(ABC):
    """A server at `url` (``http://127.0.0.1:8000``). Every request has a connection of its own.

    Each call waits at most `timeout` seconds, and raises `ServerError`, with the words of the server when it refuses,
    and `ServerTimeout`.
    """

    def __init__(self, url: str, *, timeout: float = 300.0, api_key: str = "") -> None:
        """`api_key` is that of the server, if it has one. Raises `UsageError` for a URL that is not
        ``http://host[:port]``."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"{url!r} is no server: {error}", "write http://host:port") from error
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
            raise UsageError(f"{url!r} is no server", "write http://host:port")
        self.url, self.timeout = f"http://{parts.netloc}", timeout
        self._host, self._port = parts.hostname, port
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @abstractmethod
    def deliver(self, path: str, token: str, weight_version: str | None) -> None:
        """Have the server load the file at `path`, and wait for it."""

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
                    found = answer.status, answer.read(MAX_ANSWER_BYTES)
                    if answer.length and len(found[1]) < MAX_ANSWER_BYTES:
                        # `read` with a limit does not tell that the end is missing.
                        raise IncompleteRead(found[1], answer.length)
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
