"""JSON over HTTP with the standard library: a server of functions, and a client that survives restarts."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Route = Callable[[Any], Any]


class Unavailable(Exception):
    """The error of a request without an answer."""


class Server(ThreadingHTTPServer):
    """A server that listens from its construction on, and ends when all answers are sent."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, routes: Mapping[str, Route]) -> None:
        super().__init__((host, port), Handler)
        self.routes = routes


class Handler(BaseHTTPRequestHandler):
    """Answers a request with the result of its route."""

    server: Server

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        route = self.server.routes.get(self.path)
        status, answer = 200, None
        if route is None:
            status = 404
        else:
            try:
                answer = route(json.loads(body) if body else None)
            except Unavailable:
                status = 503
        data = json.dumps(answer).encode()
        self.send_response(status)
        # Without it, a truncated answer of a killed server would look complete.
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        """Requests are not logged."""


def ask(addr: str, path: str, body: Any = None, patience: float = 600.0) -> Any:
    """The answer of the server at `addr`, which may be down for `patience` seconds. Raises `Unavailable`."""
    deadline = time.monotonic() + patience
    while True:
        connection = http.client.HTTPConnection(addr, timeout=60)
        try:
            connection.request("GET" if body is None else "POST", path, json.dumps(body))
            response = connection.getresponse()
            answer = response.read()
            if response.status == 200:
                return json.loads(answer)
            problem = f"{addr}{path} answers with status {response.status}"
        except (OSError, http.client.HTTPException) as error:
            problem = f"{addr}{path} does not answer: {error!r}"
        finally:
            connection.close()
        if time.monotonic() >= deadline:
            raise Unavailable(problem)
        time.sleep(0.05)
