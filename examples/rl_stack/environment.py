"""A stand-in for prime-rl's ``env-server``: it has the prompts of one task, and scores answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from policy import ANSWERS
from web import Server

TASKS: dict[str, Callable[[int], int]] = {
    "copy": lambda digit: digit,
    "next": lambda digit: (digit + 1) % ANSWERS,
    "mirror": lambda digit: ANSWERS - 1 - digit,
}


class Environment:
    """One task."""

    def __init__(self, task: str) -> None:
        self.task = task

    def prompts(self, _: Any) -> list[str]:
        return [f"{self.task} {digit}" for digit in range(ANSWERS)]

    def score(self, body: dict[str, Any]) -> list[float]:
        """The reward of each answer to a prompt."""
        right = str(TASKS[self.task](int(body["prompt"].split()[1])))
        return [float(answer == right) for answer in body["answers"]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--task", choices=TASKS)
    options = parser.parse_args()
    environment = Environment(options.task)
    routes = {"/health": lambda _: "ok", "/prompts": environment.prompts, "/score": environment.score}
    Server(options.host, options.port, routes).serve_forever()


if __name__ == "__main__":
    main()
