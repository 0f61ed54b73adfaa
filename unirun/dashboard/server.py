"""The server of the page: on loopback, with requests that only read, and with a guard that lets this page alone in."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unirun.dashboard.openmetrics import CONTENT_TYPE, exposition
from unirun.dashboard.reading import STREAMS, RankLog
from unirun.dashboard.views import Plain, changes
from unirun.dashboard.watching import Jobs, WatchedJob
from unirun.errors import JobError, UsageError
from unirun.values import Value, natural

LOOK_SECONDS = 0.2
"""Seconds between two looks at the files of a job that a page shows."""

LOOK_SHARE = 40
"""The times that a look has taken which are waited for before the next one, so that it uses a fortieth of a core."""

LONGEST_LOOK_SECONDS = 2.0

LIST_SECONDS = 1.0
"""Seconds between two looks at the list of jobs."""

KEEPALIVE_SECONDS = 15.0
"""Seconds after which something is sent even if nothing has happened, so that a page that is gone is noticed."""

FILES = {
    "/": ("index.html", "text/html"),
    "/style.css": ("style.css", "text/css"),
    "/uplot.css": ("uPlot.min.css", "text/css"),
    "/uplot.js": ("uPlot.iife.min.js", "text/javascript"),
    "/page.js": ("page.js", "text/javascript"),
    "/views.js": ("views.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
}
"""The files of the page, by their paths. No other file can be asked for."""

WELCOME = """<!doctype html><html lang="en"><title>unirun</title><meta http-equiv="refresh" content="0;url=/">\
<p><a href="/">the jobs</a></p></html>"""
"""It leads to the page. A redirect would not: a browser that comes from another site sends the cookie only with the
request after that."""


class _Server(uvicorn.Server):
    """Waits for the signal that ends it. uvicorn's own wakes up ten times a second to look for that."""

    _wake: Callable[[], object] = staticmethod(lambda: None)

    async def main_loop(self) -> None:
        """Return when a signal has come."""
        over = asyncio.Event()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, over.set)
        # It sets the headers of all answers.
        if not await self.on_tick(0):
            await over.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal."""
        super().handle_exit(sig, frame)
        self._wake()


class PageServer:
    """The page of some jobs on a socket that listens. `announce` gets each link that lets a browser in."""

    def __init__(
        self, jobs: Jobs, listener: socket.socket, scrape: str, announce: Callable[[str], None]
    ) -> None:
        self._jobs, self._listener, self._announce = jobs, listener, announce
        self._guard = Guard(scrape)
        self._uvicorn: uvicorn.Server | None = None
        self.port: int = listener.getsockname()[1]

    def run(self) -> None:
        """Announce a link, and serve until a signal ends it."""
        self._new_link()
        config = uvicorn.Config(
            self.app(),
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",
            server_header=False,
            date_header=False,
            proxy_headers=False,
            # Streams end by themselves at their next look.
            timeout_graceful_shutdown=int(LONGEST_LOOK_SECONDS) + 1,
        )
        self._uvicorn = _Server(config)
        self._uvicorn.run(sockets=[self._listener])

    def _new_link(self) -> None:
        self._announce(f"http://127.0.0.1:{self.port}/?token={self._guard.new_link()}")

    def app(self) -> ASGIApp:
        """The application."""
        routes = [
            Route("/api/jobs", self._answer(lambda _: {"jobs": self._jobs.summaries()})),
            Route("/api/trials", self._answer(lambda _: {"trials": self._jobs.trials()})),
            Route("/api/live", self._live_list),
            Route("/api/jobs/{job}", self._of_job(lambda job, _: job.overview())),
            Route("/api/jobs/{job}/events", self._of_job(lambda job, _: job.event_list())),
            Route("/api/jobs/{job}/failures", self._of_job(lambda job, _: job.failure_list())),
            Route("/api/jobs/{job}/graph", self._of_job(lambda job, _: job.graph())),
            Route("/api/jobs/{job}/stacks", self._of_job(lambda job, _: job.stacks())),
            Route("/api/jobs/{job}/timeline", self._of_job(lambda job, _: job.timeline())),
            Route("/api/jobs/{job}/metrics", self._of_job(_metrics)),
            Route("/api/jobs/{job}/rank", self._of_job(lambda job, query: job.rank(*_who(query)))),
            Route("/api/jobs/{job}/log", self._of_job(_log)),
            Route("/api/jobs/{job}/search", self._of_job(_search)),
            Route("/api/jobs/{job}/live", self._live_job),
            Route("/metrics", self._scraped),
            *(Route(path, _file(name, kind)) for path, (name, kind) in FILES.items()),
        ]
        return _Guarded(Starlette(routes=routes), self._guard, self.port, self._new_link)

    def _answer(self, make: Callable[[Request], Plain]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            try:
                return _json(await run_in_threadpool(make, request))
            except (JobError, UsageError) as error:
                return PlainTextResponse(str(error), 404)

        return answer

    def _of_job(self, make: Callable[[WatchedJob, Query], Plain]) -> Callable[[Request], Any]:
        return self._answer(
            lambda request: make(self._jobs.find(request.path_params["job"]), dict(request.query_params))
        )

    async def _scraped(self, request: Request) -> Response:
        text = await run_in_threadpool(exposition, self._jobs, time.time())
        return Response(text, media_type=CONTENT_TYPE)

    async def _live_list(self, request: Request) -> Response:
        return self._stream(self._list_news())

    async def _live_job(self, request: Request) -> Response:
        try:
            job = await run_in_threadpool(self._jobs.find, request.path_params["job"])
        except JobError as error:
            return PlainTextResponse(str(error), 404)
        # A browser that connects again names the last news that it has got.
        after = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return self._stream(_job_news(job, natural(after) or 0))

    def _stream(self, news: AsyncIterator[dict[str, Any] | None]) -> Response:
        """Server-sent events until the server ends; None is nothing new. A ``number`` is the id of the event."""

        async def lines() -> AsyncIterator[str]:
            said = time.monotonic()
            async for each in news:
                if self._uvicorn is not None and self._uvicorn.should_exit:
                    return
                if each is not None:
                    if "number" in each:
                        yield f"id: {each['number']}\n"
                    yield f"data: {json.dumps(each, separators=(',', ':'))}\n\n"
                elif time.monotonic() - said > KEEPALIVE_SECONDS:
                    yield ":\n\n"
                else:
                    continue
                said = time.monotonic()

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def _list_news(self) -> AsyncIterator[dict[str, Any] | None]:
        shown: Any = None
        while True:
            jobs = await run_in_threadpool(self._jobs.summaries)
            yield {"jobs": jobs} if jobs != shown else None
            shown = jobs
            await asyncio.sleep(LIST_SECONDS)


Query = dict[str, str]


async def _job_news(job: WatchedJob, number: int) -> AsyncIterator[dict[str, Any] | None]:
    """The news of a job: the whole of it at first, then changes; and its events from a number on. They end when its
    files are gone, though another job may have taken its id: nothing of that belongs to what the page has."""
    stamp: Any = None
    shown: Plain = {}
    while True:
        began = time.monotonic()
        news: dict[str, Any] | None = None
        try:
            # In this thread: a look at a job in which nothing happens has to cost little.
            if (now := job.stamp()) != stamp:
                view = await run_in_threadpool(job.view)
                change = {"all": view} if not shown else changes(shown, view)
                events, number = await run_in_threadpool(job.events_since, number)
                news = {"change": change, "events": events, "number": number}
                shown, stamp = view, now
        except JobError as error:
            yield {"gone": str(error)}
            return
        yield news
        took = time.monotonic() - began
        await asyncio.sleep(min(max(LOOK_SECONDS, LOOK_SHARE * took), LONGEST_LOOK_SECONDS))


def _json(value: Plain) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")


def _file(name: str, kind: str) -> Callable[[Request], Any]:
    content = (files("unirun.dashboard") / "static" / name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


def _metrics(job: WatchedJob, query: Query) -> Plain:
    return job.metrics("step" if query.get("axis") == "step" else "time")


def _who(query: Query) -> tuple[str, int]:
    return query.get("role", ""), _number(query, "rank")


def _log(job: WatchedJob, query: Query) -> Plain:
    before, after = (_number(query, name) if name in query else None for name in ("before", "after"))
    return job.log(*_who(query), _log_file(query), before=before, after=after)


def _search(job: WatchedJob, query: Query) -> Plain:
    words = query.get("words", "")[:200]
    if not words:
        raise UsageError("a search needs words")
    before = _number(query, "before") if "before" in query else None
    return job.search(*_who(query), _log_file(query), words, before)


def _log_file(query: Query) -> RankLog:
    stream = query.get("stream", "")
    if stream not in STREAMS:
        raise UsageError("a log is stdout or stderr")
    attempt, folder, incarnation = (_number(query, name) for name in ("attempt", "folder", "incarnation"))
    return RankLog(attempt, folder, incarnation, stream, 0)


def _number(query: Query, name: str) -> int:
    if (found := natural(query.get(name, ""))) is None:
        raise UsageError(f"{name} is no number")
    return found


class _Guarded:
    """The application behind its guard. A request with the token of the link gets the cookie."""

    def __init__(self, app: ASGIApp, guard: Guard, port: int, entered: Callable[[], None]) -> None:
        self._app, self._guard, self._port, self._entered = app, guard, port, entered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        await self._respond(request, headers)(scope, receive, _with_headers(send))

    def _respond(self, request: Request, headers: dict[str, str]) -> ASGIApp:
        path = request.url.path
        token = request.query_params.get("token") if path == "/" else None
        if token is not None and (refused := foreign(request.method, headers, link=True)) is not None:
            return PlainTextResponse(refused.why, refused.code)
        if token is not None and self._guard.takes(token):
            self._entered()
            return HTMLResponse(WELCOME, headers={"set-cookie": self._guard.cookie(self._port)})
        refused = self._guard.refusal(request.method, headers, self._port, metrics=path == "/metrics")
        return self._app if refused is None else PlainTextResponse(refused.why, refused.code)


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message["headers"], *ours]}
        await send(message)

    return sent


def listen(port: int) -> socket.socket:
    """A socket on loopback; 0 is any free port. Raises `UsageError` for a port that is in use."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        # Whoever follows the link at once waits for the server, and is not refused.
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"port {port} cannot be had: {(error.strerror or str(error)).lower()}", "choose another --port"
        ) from error
    return listener


# The guard, which is pure: other users of the host, pages of other sites in the same browser, and names of other sites
# that point to this host (DNS rebinding) get nothing.

HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names by which a browser on this host may call the server. The port may be that of a tunnel."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every answer. The page runs no script but its own files, and asks no other host for anything."""


class Refusal(Value):
    """The answer to a request that is not let in."""

    code: int
    why: str


class Guard:
    """The secrets of one server. `scrape` is the token of programs that read metrics, which have no cookies."""

    def __init__(self, scrape: str) -> None:
        self._scrape = scrape
        self._session = secrets.token_urlsafe(32)
        self._link = ""

    def new_link(self) -> str:
        """A token that lets in the first that brings it. The one before does not count any more."""
        self._link = secrets.token_urlsafe(32)
        return self._link

    def takes(self, token: str) -> bool:
        """Return True if this is the token of the last link, and no request has had it before."""
        if not self._link or not _same(token, self._link):
            return False
        self._link = ""
        return True

    def cookie(self, port: int) -> str:
        """The header that makes a browser one that is let in."""
        return f"{_name(port)}={self._session}; Path=/; HttpOnly; SameSite=Strict"

    def refusal(self, method: str, headers: Mapping[str, str], port: int, *, metrics: bool) -> Refusal | None:
        """The reason why a request is not let in, None if it is. `headers` have lower-case names; `metrics`: it is one
        for metrics, which programs make."""
        if (refused := foreign(method, headers)) is not None:
            return refused
        kind, _, token = headers.get("authorization", "").partition(" ")
        if metrics and kind.lower() == "bearer" and _same(token, self._scrape):
            return None
        if _same(_cookie(headers.get("cookie", ""), _name(port)), self._session):
            return None
        return Refusal(401, "open the link that unirun dashboard has printed last: each link counts once")


def foreign(method: str, headers: Mapping[str, str], *, link: bool = False) -> Refusal | None:
    """The reason why a request may come from another site; None if it does not. A `link` may be followed from
    anywhere, as its token is what counts."""
    host = headers.get("host", "")
    name = host.rpartition(":")[0] if natural(host.rpartition(":")[2]) is not None else host
    if name.lower() not in HOSTS:
        return Refusal(421, "this server has no such name: open it as 127.0.0.1 or localhost")
    if method not in ("GET", "HEAD"):
        return Refusal(405, "nothing can be changed here")
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host.lower()}":
        return Refusal(403, "the request comes from another site")
    if not link and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return Refusal(403, "the request comes from another site")
    return None


def _name(port: int) -> str:
    # Cookies of one host are shared by all of its ports.
    return f"unirun-{port}"


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _same(given: str, wanted: str) -> bool:
    """Compare two tokens in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())
