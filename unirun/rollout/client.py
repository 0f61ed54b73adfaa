"""`EngineClient`: requests to all engines of a role, as if they were one server that never dies.

::

    async with unirun.EngineClient("engine") as client:
        answer = await client.generate([1, 15043], max_tokens=64, temperature=1.0)
        print(answer.token_ids, answer.engine, answer.version)

The routes are those of vLLM 0.32 and of servers that are compatible with OpenAI's. `EngineClient.generate` uses vLLM's
own route for tokens, ``/inference/v1/generate`` (``vllm serve --enable-scale-out``): only its answers say which version
of the weights has made each token.

Run with two servers of vLLM 0.32.0 (CPU): all routes; 64 requests while one of the servers, or its engine core, was
killed, or got SIGTERM and was no longer ready; the tokens were those of a run without that. vLLM never answers some of
the requests that come while it ends: what frees them is that the engine is no longer ready, or the end of its process.
Never run with SGLang or another server.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
import socket
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from unirun.errors import ServerError, ServerTimeout, UnirunError, UsageError
from unirun.rollout.choosing import (
    Answer,
    Kind,
    Load,
    Policy,
    RequestFailure,
    answered,
    begun,
    choose,
    cut,
    ended,
    fault,
    has_failed,
    is_aborted,
)
from unirun.values import Engine, Value, WorkerId
from unirun.wire.progress import page

if TYPE_CHECKING:
    import httpx2


# `Connections`: the HTTP connections to one engine, over httpx, with the load that this client has put on it.

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
        # Pools of connections, and the number of requests of each.
        self._pools: dict[httpx2.AsyncHTTPTransport, int] = {}
        self._base = engine.url.rstrip("/")
        try:
            host = httpx2.URL(self._base).netloc
        except httpx2.InvalidURL as error:
            raise UsageError(f"{engine.url!r} is no server: {error}", "write http://host:port") from error
        self._headers = [(b"Host", host), (b"Content-Type", b"application/json")]
        if api_key:
            self._headers.append((b"Authorization", f"Bearer {api_key}".encode()))
        self._urls: dict[str, httpx2.URL] = {}
        # Those of the requests in flight, in their order.
        self._scopes: dict[asyncio.Timeout, None] = {}
        self._abandoned = False

    async def post(
        self, path: str, body: bytes, *, turn: int, deadline: float, tokens: int = 0
    ) -> dict[str, Any] | RequestFailure:
        """Send `body`, which is a request for so many `tokens`; return the answer, or the reason why there is none.

        Raises `TimeoutError` when it is not there at `deadline`, in the time of the event loop.
        """
        self.load = begun(self.load, turn, tokens)
        try:
            found = await self._exchange(path, body, deadline)
        except BaseException:
            self.load = cut(self.load, tokens)
            raise
        failure = found if isinstance(found, RequestFailure) else None
        self.load = ended(self.load, failure, asyncio.get_running_loop().time(), tokens)
        return found

    async def _exchange(self, path: str, body: bytes, deadline: float) -> dict[str, Any] | RequestFailure:
        scope = asyncio.timeout_at(deadline)
        try:
            async with scope:
                self._scopes[scope] = None
                try:
                    return await self._answer(path, body)
                finally:
                    del self._scopes[scope]
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
        self._pools[pool] += 1
        try:
            response = await pool.handle_async_request(request)
            try:
                raw = await response.aread()
            finally:
                await response.aclose()
        finally:
            self._pools[pool] -= 1
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

    def _pool(self) -> httpx2.AsyncHTTPTransport:
        """The first one that has room, so that those beyond it come to rest when there are fewer requests."""
        for pool, in_flight in self._pools.items():
            if in_flight < AT_ONCE:
                return pool
        made: httpx2.AsyncHTTPTransport = self._httpx.AsyncHTTPTransport(
            verify=self._context,
            trust_env=False,
            limits=self._httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_SECONDS
            ),
            socket_options=PROBES,
        )
        self._pools[made] = 0
        return made

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
            await pool.aclose()


def _words(error: Exception) -> str:
    """The words of the operating system, which httpx has two or three causes further down, or else its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


GENERATE = "/inference/v1/generate"

CLIENT_IDLE_TIMEOUT = 1.0
"""Seconds without a request after which the client no longer looks for changes of the engines."""


class EngineClient:
    """A client of all engines of `role`. A request goes to the ready engine that has the fewest of this client.

    What an engine had not answered when it died, became unready, or said that it has failed, is sent to another one;
    while none is ready, requests wait. Each call returns one answer, or raises; what was answered is not sent again. A
    call that is cancelled closes its request, which ends it in vLLM. A client belongs to one event loop; there is no
    limit to the requests at a time.
    """

    def __init__(
        self,
        role: str,
        *,
        engines: Engines | None = None,
        timeout: float = 600.0,
        attempts: int = 5,
        partial: bool = False,
        api_key: str = "",
    ) -> None:
        """`engines` are those of the job, unless given.

        A request has `timeout` seconds, all attempts and waiting included, and is given up when `attempts` engines have
        failed on it, as the request itself may crash them. On SIGTERM, or a pause with ``mode=abort``, vLLM answers its
        requests with what they have; these are sent again, unless `partial` outputs are wanted, which have ``abort`` as
        `Answer.finish_reason`.
        `api_key` is that of the servers. Raises `UsageError`.
        """
        try:
            importlib.import_module("httpx2")
        except ModuleNotFoundError as error:
            raise UsageError(
                "EngineClient needs the package httpx2", "pip install 'torch-unirun[engines]'"
            ) from error
        if timeout <= 0 or attempts < 1:
            raise UsageError("timeout must be more than 0, and attempts 1 or more")
        self.role, self.timeout, self.attempts = role, timeout, attempts
        self._source = _of_the_job(role) if engines is None else engines
        self._partial, self._api_key = partial, api_key
        self._known: tuple[Engine, ...] = ()
        self._lines: dict[Engine, Connections] = {}
        self._turn, self._pending, self._last_request = 0, 0, 0.0
        self._news = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Requests that are not answered raise `UsageError`."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        for line in self._lines.values():
            line.abandon()
        self._tell()
        for line in self._lines.values():
            await line.close()
        self._lines.clear()
        await asyncio.gather(*self._closing, *([self._watch] if self._watch else ()), return_exceptions=True)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines of the role as they are now, ready or not."""
        return self._source.engines()

    async def changes(self) -> AsyncIterator[tuple[Engine, ...]]:
        """The engines of the role: as they are now, and again whenever that changes."""
        known = self._source.engines()
        yield known
        while not self._closed:
            found = await self._source.changed(known, CLIENT_IDLE_TIMEOUT)
            if found != known:
                known = found
                yield known

    async def ready(self) -> None:
        """Wait until an engine is ready. A load of large weights may take longer than the `timeout` of a request.

        Raises `UsageError` when the client is closed."""
        with page().awaiting(asyncio.get_running_loop()):
            async for engines in self.changes():
                if any(each.ready for each in engines):
                    return
        raise self._is_closed()

    async def complete(
        self,
        prompt: str | Sequence[int] | Sequence[str],
        *,
        timeout: float | None = None,
        **parameters: Any,
    ) -> Answer:
        """``/v1/completions``, for text or tokens. `parameters` are the server's: ``max_tokens``, ``model``, ``n`` …

        Raises `ServerError` and `ServerTimeout`, as the other methods do.
        """
        return await self.post("/v1/completions", {"prompt": prompt, **parameters}, timeout=timeout)

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, timeout: float | None = None, **parameters: Any
    ) -> Answer:
        """``/v1/chat/completions``. `messages` and `parameters` are the server's."""
        return await self.post("/v1/chat/completions", {"messages": messages, **parameters}, timeout=timeout)

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        timeout: float | None = None,
        policy: Policy = "least_requests",
        stay: WorkerId | None = None,
        prompt: int | None = None,
        **sampling: Any,
    ) -> Answer:
        """Tokens for tokens, by vLLM's ``/inference/v1/generate``. `sampling` has fields of vLLM's ``SamplingParams``.

        The engine is the one to `stay` on, if that is ready, or else it is chosen by the `policy`: ``round_robin``,
        ``least_requests`` or ``least_token_usage``. Requests with the same number of a `prompt` go to the same engine
        if they can (``least_requests``), which need not compute what they begin with again.

        The answer has `Answer.token_ids` and `Answer.spans` (vLLM 0.32; 0.28 does not say the versions). vLLM has this
        route with ``--enable-scale-out``; without it there is ``complete(token_ids, return_token_ids=True)``.
        """
        body = {"token_ids": token_ids, "sampling_params": sampling}
        if model is not None:
            body["model"] = model
        tokens = len(token_ids) + (sampling.get("max_tokens") or 0)
        return await self.post(
            GENERATE, body, timeout=timeout, policy=policy, stay=stay, tokens=tokens, prompt=prompt
        )

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        timeout: float | None = None,
        policy: Policy = "least_requests",
        stay: WorkerId | None = None,
        tokens: int = 0,
        prompt: int | None = None,
    ) -> Answer:
        """The answer to `body`, as JSON, from any route of the servers: ``/pooling``, ``/v1/embeddings`` …

        It is a request for so many `tokens`; see `generate` for `policy`, `stay` and `prompt`.

        Raises `ServerError` when a server says that the request is wrong, or when several have failed on it;
        `ServerTimeout` at the deadline; and `UsageError`.
        """
        if body.get("stream"):
            raise UsageError(
                "EngineClient does not stream", "what has been streamed cannot be asked of another engine"
            )
        seconds = self.timeout if timeout is None else timeout
        now = asyncio.get_running_loop().time
        deadline = now() + seconds
        encoded = msgspec.json.encode(body)
        failures: tuple[RequestFailure, ...] = ()
        line: Connections | None = None
        self._pending += 1
        try:
            # A rank that waits for an engine is not late itself.
            with page().awaiting(asyncio.get_running_loop()):
                while True:
                    line = None
                    line = await self._line(failures, deadline, policy, stay, prompt)
                    self._turn += 1
                    found = await line.post(path, encoded, turn=self._turn, deadline=deadline, tokens=tokens)
                    if not line.load.doubted:
                        # Requests may wait for the end of a doubt that is over now.
                        self._tell()
                    if not isinstance(found, RequestFailure):
                        return self._answer(found, line.load.engine)
                    failures = (*failures, found)
                    if has_failed(failures, self.attempts) and not self._closed:
                        raise self._given_up(found, len(failures), path)
        except TimeoutError as error:
            holder = None if line is None else line.load.engine
            raise self._late(path, seconds, holder, failures) from error
        finally:
            self._pending -= 1
            self._last_request = now()

    async def _line(
        self,
        failures: tuple[RequestFailure, ...],
        deadline: float,
        policy: Policy,
        stay: WorkerId | None,
        prompt: int | None,
    ) -> Connections:
        """The connections to the engine that gets the request. Raises `TimeoutError` at the deadline."""
        now = asyncio.get_running_loop().time
        avoid = tuple(each.engine for each in failures)
        while True:
            self._update()
            loads = [each.load for each in self._lines.values()]
            chosen = choose(loads, avoid, now(), policy, stay, prompt)
            if isinstance(chosen, Engine):
                return self._lines[chosen]
            look = min(deadline, now() + chosen)
            try:
                async with asyncio.timeout_at(look):
                    await self._news.wait()
            except TimeoutError:
                if now() >= deadline:
                    raise

    def _update(self) -> None:
        """Take over what the source says, and have a task that waits for more while there are requests."""
        if self._closed:
            raise self._is_closed()
        self._take(self._source.engines())
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look_for_changes(), name=f"engines of {self.role}")

    def _is_closed(self) -> UsageError:
        return UsageError(f"the client of {self.role} is closed")

    async def _look_for_changes(self) -> None:
        now = asyncio.get_running_loop().time
        try:
            while self._pending or now() - self._last_request < CLIENT_IDLE_TIMEOUT:
                self._take(await self._source.changed(self._known, CLIENT_IDLE_TIMEOUT))
        except UnirunError:
            # Requests that wait ask the source themselves, and raise it.
            self._tell()

    def _take(self, engines: tuple[Engine, ...]) -> None:
        """These are the engines: end requests to those that are not ready, and let others go on."""
        if engines is self._known or engines == self._known:
            return
        gone, lines = dict(self._lines), dict[Engine, Connections]()
        for engine in engines:
            if engine.ready:
                lines[engine] = (
                    gone.pop(engine) if engine in gone else Connections(engine, self._partial, self._api_key)
                )
        # Only after a success: each request to a URL that is none fails with the same error.
        self._known, self._lines = engines, lines
        for line in gone.values():
            line.abandon()
            closing = asyncio.create_task(line.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._tell()

    def _tell(self) -> None:
        """Wake the requests that wait for an engine."""
        self._news.set()
        self._news = asyncio.Event()

    def _answer(self, body: dict[str, Any], engine: Engine) -> Answer:
        try:
            return answered(body, WorkerId(self.role, engine.rank, engine.incarnation))
        except msgspec.ValidationError as error:
            raise ServerError(
                f"{self._name(engine)} ({engine.url}) tells the versions of its weights in an unknown way: {error}",
                "vLLM 0.32 is known",
                server=engine.url,
                status=200,
            ) from error

    def _name(self, engine: Engine) -> str:
        return f"{self.role}:{engine.rank}"

    def _given_up(self, failure: RequestFailure, times: int, path: str) -> ServerError:
        where = f"{self._name(failure.engine)} ({failure.engine.url}{path})"
        if failure.status >= 300:
            problem = f"{where} refused ({failure.status}): {fault(failure.words)}"
        else:
            problem = f"{where} did not answer: {failure.words}"
        if failure.is_final:
            remedy = ""
            if failure.status in (403, 404) and path == GENERATE:
                remedy = (
                    "start vLLM with --enable-scale-out, or use complete(token_ids, return_token_ids=True)"
                )
        else:
            problem = f"{problem}, as the last of {times} attempts"
            remedy = "its log has the cause; perhaps it is this request"
        return ServerError(problem, remedy, server=failure.engine.url, status=failure.status)

    def _late(
        self, path: str, seconds: float, holder: Engine | None, failures: tuple[RequestFailure, ...]
    ) -> ServerTimeout:
        """The error of a request that `holder` has not answered yet; or for which there was no engine (None)."""
        if holder is not None:
            problem = f"{self._name(holder)} ({holder.url}{path}) did not answer within {seconds:g} s"
        else:
            states = [f"{self._name(each)} {'failed' if each.ready else 'not ready'}" for each in self._known]
            state = ", ".join(states) or "none is known"
            problem = f"no engine of {self.role} could take {path} within {seconds:g} s: {state}"
        latest = {self._name(each.engine): fault(each.words)[:200] for each in failures}
        if latest:
            problem = f"{problem}; before, {', '.join(f'{name}: {words}' for name, words in latest.items())}"
        return ServerTimeout(
            problem,
            f"see `unirun status` and `unirun logs {self.role}`",
            server=self.role if holder is None else holder.url,
        )


def _of_the_job(role: str) -> Engines:
    """The engines of `role` in the job of this process."""
    path = os.environ.get(ADDRESSES)
    if not path:
        raise UsageError(
            f"EngineClient({role!r}) is not in a job: {ADDRESSES} is not set",
            "run it in a role of a job, or name the servers: engines=unirun.rollout.EngineList.at(url, …)",
        )
    return AddressFile(path, role)


ADDRESSES = "UNIRUN_ADDRS_FILE"
"""The environment variable with the path of the file of addresses."""


ADDRESSES_POLL_INTERVAL = 0.05
"""Seconds between two looks at the file. A look takes some microseconds."""


class Engines(Protocol):
    """The engines of one role, their addresses and their readiness."""

    def engines(self) -> tuple[Engine, ...]:
        """All of them as they are now, and the same tuple while nothing changes. Raises `UsageError`: no such role."""

    async def changed(self, known: tuple[Engine, ...], timeout: float) -> tuple[Engine, ...]:
        """Wait until they are not those that are `known`, for at most `timeout` seconds; return them."""


class EngineList:
    """Engines that the program itself names, for servers outside a job and for tests."""

    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        self._engines = tuple(engines)
        self._news = asyncio.Event()

    @classmethod
    def at(cls, *urls: str) -> EngineList:
        """Engines at these URLs, which are ready."""
        return cls(Engine(rank, 0, url, True) for rank, url in enumerate(urls))

    def set(self, engines: Iterable[Engine]) -> None:
        """These are the engines from now on. To be called in the thread of the event loop."""
        self._engines = tuple(engines)
        self._news.set()
        self._news = asyncio.Event()

    def engines(self) -> tuple[Engine, ...]:
        """See `Engines`."""
        return self._engines

    async def changed(self, known: tuple[Engine, ...], timeout: float) -> tuple[Engine, ...]:
        """See `Engines`."""
        try:
            async with asyncio.timeout(timeout):
                while self._engines == known:
                    await self._news.wait()
        except TimeoutError:
            pass
        return self._engines


# The agent of each node keeps the file of addresses, for all processes that it starts. It is JSON, with a list for each
# role that has addresses, and is replaced whenever something changes::
#
#     {"engine": [{"rank": 0, "incarnation": 0, "host": "10.0.0.5", "ports": {"http": 20001},
#                  "addr": "10.0.0.5:20001", "ready": true, "node": "n0"}]}


class _Address(Value, forbid_unknown_fields=False):
    """An entry of the file, as far as it is read here. The agent may be of another version than this process."""

    rank: int
    incarnation: int
    addr: str
    ready: bool


class AddressFile:
    """The engines of `role` in the file of addresses at `path`. There are none while there is no file."""

    def __init__(self, path: str, role: str) -> None:
        self.path, self.role = path, role
        self._engines: tuple[Engine, ...] = ()
        self._seen: tuple[int, int, int] | None = None
        self._looked = float("-inf")

    def engines(self) -> tuple[Engine, ...]:
        """See `Engines`. The file is looked at once in `ADDRESSES_POLL_INTERVAL` seconds, and read when it is another
        one."""
        now = time.monotonic()
        if now - self._looked >= ADDRESSES_POLL_INTERVAL:
            self._look()
            # Only after a success: each request of a role without addresses reads them, and fails with the same error.
            self._looked = now
        return self._engines

    async def changed(self, known: tuple[Engine, ...], timeout: float) -> tuple[Engine, ...]:
        """See `Engines`."""
        deadline = time.monotonic() + timeout
        while (found := self.engines()) == known and (left := deadline - time.monotonic()) > 0:
            await asyncio.sleep(min(ADDRESSES_POLL_INTERVAL, left))
        return found

    def _look(self) -> None:
        try:
            status = os.stat(self.path)
            seen = status.st_ino, status.st_mtime_ns, status.st_size
            if seen == self._seen:
                return
            with open(self.path, "rb") as file:
                raw = file.read()
        except FileNotFoundError:
            self._engines, self._seen = (), None
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            # Requests have all descriptors: what is known counts until the next look.
            return
        self._engines, self._seen = self._read(raw), seen

    def _read(self, raw: bytes) -> tuple[Engine, ...]:
        try:
            roles = msgspec.json.decode(raw, type=dict[str, list[_Address]])
        except msgspec.DecodeError as error:
            raise UsageError(f"{self.path} is no file of addresses: {error}") from error
        if self.role not in roles:
            raise UsageError(
                f"role {self.role!r} has no address in this job",
                f"roles with addresses: {', '.join(sorted(roles)) or 'none'}",
            )
        return tuple(
            Engine(each.rank, each.incarnation, f"http://{each.addr}", each.ready)
            for each in roles[self.role]
        )
