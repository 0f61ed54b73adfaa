"""`Connections`: the HTTP connections to one engine, over httpx, with the load that this client has put on it."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from unirun.errors import UsageError
from unirun.rollout.choosing import Engine, Kind, Load, RequestFailure, begun, cut, ended, is_aborted

if TYPE_CHECKING:
    import httpx2

ENGINE_CONNECT_TIMEOUT = 5.0
"""Seconds within which a host must accept a connection. One that is gone does not even refuse it."""

KEEPALIVE_SECONDS = 2.0
"""Seconds for which an idle connection is kept. vLLM closes its end after 5; a request must not meet that moment."""

TIMEOUTS = {"connect": ENGINE_CONNECT_TIMEOUT, "read": None, "write": None, "pool": None}
"""Those of httpx. The deadline of a request is not one of them, as it is for all of its attempts."""

PROBES = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""The kernel ends a connection to a host that has been gone for 25 s."""


AT_ONCE = 64
"""Requests of one pool of connections. A pool looks at all of them whenever one begins or ends."""


class Pool:
    """Some of the connections to an engine."""

    def __init__(self, httpx: ModuleType, context: ssl.SSLContext) -> None:
        self.in_flight = 0
        self.transport: httpx2.AsyncHTTPTransport = httpx.AsyncHTTPTransport(
            verify=context,
            trust_env=False,
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_SECONDS
            ),
            socket_options=PROBES,
        )


class Connections:
    """Those to the engine of `load`.

    httpx's transport is used without its client: no cookies, no redirects, and no proxies of the environment.
    """

    def __init__(self, engine: Engine, partial: bool, api_key: str) -> None:
        """With `partial`, an answer that the server has aborted is one."""
        import httpx2

        self.load, self._partial = Load(engine), partial
        if not engine.url.startswith(("http://", "https://")):
            raise UsageError(f"{engine.url!r} is no server", "write http://host:port")
        self._httpx = httpx2
        # To read the certificates of authorities takes longer than many requests.
        self._context = httpx2.create_ssl_context(verify=engine.url.startswith("https"), trust_env=False)
        self._pools: list[Pool] = []
        self._base = engine.url.rstrip("/")
        self._headers = [(b"Host", httpx2.URL(self._base).netloc), (b"Content-Type", b"application/json")]
        if api_key:
            self._headers.append((b"Authorization", f"Bearer {api_key}".encode()))
        self._urls: dict[str, httpx2.URL] = {}
        self._scopes: set[asyncio.Timeout] = set()
        self._abandoned = False

    async def post(
        self, path: str, body: bytes, *, turn: int, deadline: float
    ) -> dict[str, Any] | RequestFailure:
        """Send `body`; return the answer, or the reason why there is none.

        Raises `TimeoutError` when it is not there at `deadline`, in the time of the event loop.
        """
        self.load = begun(self.load, turn)
        try:
            found = await self._exchange(path, body, deadline)
        except BaseException:
            self.load = cut(self.load)
            raise
        failure = found if isinstance(found, RequestFailure) else None
        self.load = ended(self.load, failure, asyncio.get_running_loop().time())
        return found

    async def _exchange(self, path: str, body: bytes, deadline: float) -> dict[str, Any] | RequestFailure:
        scope = asyncio.timeout_at(deadline)
        try:
            async with scope:
                self._scopes.add(scope)
                try:
                    return await self._answer(path, body)
                finally:
                    self._scopes.discard(scope)
        except TimeoutError:
            if self._abandoned:
                return self._failed("unready", "it is no longer ready")
            raise
        except (self._httpx.ConnectError, self._httpx.ConnectTimeout) as error:
            return self._failed("refused", _words(error))
        except self._httpx.TransportError as error:
            return self._failed("lost", _words(error))

    async def _answer(self, path: str, body: bytes) -> dict[str, Any] | RequestFailure:
        request = self._httpx.Request(
            "POST", self._url(path), headers=self._headers, content=body, extensions={"timeout": TIMEOUTS}
        )
        pool = self._pool()
        pool.in_flight += 1
        try:
            response = await pool.transport.handle_async_request(request)
            try:
                raw = await response.aread()
            finally:
                await response.aclose()
        finally:
            pool.in_flight -= 1
        if response.status_code != 200:
            words = raw.decode(errors="replace").strip()
            return self._failed("status", words or response.reason_phrase, response.status_code)
        try:
            found = msgspec.json.decode(raw, type=dict[str, Any])
        except msgspec.DecodeError as error:
            return self._failed("status", f"this is no JSON object: {error}", 200)
        if not self._partial and is_aborted(found):
            return self._failed("aborted", "it has aborted the request")
        return found

    def _pool(self) -> Pool:
        """The first one that has room, so that those beyond it come to rest when there are fewer requests."""
        for pool in self._pools:
            if pool.in_flight < AT_ONCE:
                return pool
        self._pools.append(Pool(self._httpx, self._context))
        return self._pools[-1]

    def _url(self, path: str) -> httpx2.URL:
        url = self._urls.get(path)
        if url is None:
            try:
                url = self._urls[path] = self._httpx.URL(f"{self._base}{path}")
            except self._httpx.InvalidURL as error:
                raise UsageError(
                    f"{self._base}{path!r} is no URL: {error}", "write /v1/completions"
                ) from error
        return url

    def _failed(self, kind: Kind, words: str, status: int = 0) -> RequestFailure:
        return RequestFailure(self.load.engine, kind, words, status)

    def abandon(self) -> None:
        """End all requests, as ``unready``."""
        self._abandoned = True
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Close the connections."""
        for pool in self._pools:
            await pool.transport.aclose()


def _words(error: Exception) -> str:
    """The words of the operating system, which httpx has two or three causes further down, or else its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
