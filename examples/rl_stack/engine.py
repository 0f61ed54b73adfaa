"""A stand-in for ``vllm serve``: it samples answers from the latest version of the policy that it has loaded."""

from __future__ import annotations

import argparse
import math
import os
import random
from pathlib import Path
from typing import Any

from policy import latest, row
from web import Server


class Engine:
    """The weights of one engine, and its routes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.update(None)

    def update(self, _: Any) -> dict[str, int]:
        """Load the latest version."""
        self.version, self.table = latest(self.folder)
        return {"version": self.version}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """``n`` answers to a prompt."""
        version, weights = self.version, self.table[row(body["prompt"])]
        temperature = body.get("temperature", 1.0) or 1e-3
        chances = [math.exp((weight - max(weights)) / temperature) for weight in weights]
        texts = random.choices([str(answer) for answer in range(len(weights))], chances, k=body["n"])
        return {"version": version, "choices": [{"text": text} for text in texts]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--weights", type=Path, help="a folder that all nodes share")
    options = parser.parse_args()
    routes: dict[str, Any] = {"/health": lambda _: "ok"}
    # It listens before it loads: a version that is published meanwhile is told to it, and the call waits.
    server = Server(options.host, options.port, routes)
    engine = Engine(options.weights / os.environ["UNIRUN_JOB"])
    routes |= {"/v1/completions": engine.complete, "/update_weights": engine.update}
    server.serve_forever()


if __name__ == "__main__":
    main()
