"""A stand-in for vllm-router: each request goes to the engine with the fewest open ones, or to another on failure."""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

from web import Server, Unavailable, ask

REST = 0.5
"""Seconds in which an engine that has failed gets a request only if all others have failed too."""


class Router:
    """The engines, with the number of open requests of each."""

    def __init__(self, engines: list[str]) -> None:
        self.requests = dict.fromkeys(engines, 0)
        self.failed = dict.fromkeys(engines, 0.0)
        self.lock = threading.Lock()

    def complete(self, body: dict[str, Any]) -> Any:
        """The answer of an engine. Raises `Unavailable` when each has failed."""
        untried = list(self.requests)
        while untried:
            with self.lock:
                now = time.monotonic()
                engine = min(untried, key=lambda each: (self.failed[each] > now, self.requests[each]))
                self.requests[engine] += 1
            untried.remove(engine)
            try:
                return ask(engine, "/v1/completions", body, patience=0) | {"engine": engine}
            except Unavailable:
                self.failed[engine] = time.monotonic() + REST
            finally:
                with self.lock:
                    self.requests[engine] -= 1
        raise Unavailable("no engine answers")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--engines", type=lambda text: text.split(","))
    options = parser.parse_args()
    router = Router(options.engines)
    routes = {"/health": lambda _: "ok", "/v1/completions": router.complete}
    Server(options.host, options.port, routes).serve_forever()


if __name__ == "__main__":
    main()
