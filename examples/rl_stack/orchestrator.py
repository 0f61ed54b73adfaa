"""A stand-in for prime-rl's orchestrator: it collects answers and rewards, and hands batches to the trainer.

It is at most one version ahead of the trainer. When the last version is there, it measures the accuracy of all engines.
"""

from __future__ import annotations

import argparse
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from web import Server, Unavailable, ask

GROUP = 8
"""Answers to each prompt; the advantage of one is its reward minus the mean of the group."""


class Orchestrator:
    """The batches, by step, and the version that was published last."""

    def __init__(self, router: str, engines: list[str], environments: list[str]) -> None:
        self.router, self.engines = router, engines
        self.pool = ThreadPoolExecutor(4)
        self.tasks = [(addr, prompt) for addr in environments for prompt in ask(addr, "/prompts")]
        self.batches: list[list[dict[str, Any]]] = []
        self.version = 0
        self.closed = False
        self.changed = threading.Condition()

    def batch(self, body: dict[str, int]) -> list[dict[str, Any]]:
        """A rank's part of the batch of a step, once there is one. Raises `Unavailable` if there will be none."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.batches) > body["step"] or self.closed)
            if self.closed:
                raise Unavailable("the orchestrator has ended")
            return self.batches[body["step"]][body["rank"] :: body["count"]]

    def published(self, body: dict[str, int]) -> None:
        """Announce a new version to each engine. An engine that is down loads it when it starts again."""
        list(self.pool.map(self._update, self.engines))
        with self.changed:
            self.version = body["version"]
            self.changed.notify_all()

    def run(self, steps: int) -> None:
        """Make the batches of all steps."""
        for step in range(steps):
            self._wait_for(step - 1)
            groups = list(self.pool.map(self._group, self.tasks))
            rewards = [reward for group in groups for reward in group["rewards"]]
            version = min(group["version"] for group in groups)
            print(f"step {step}: reward {sum(rewards) / len(rewards):.2f}, version {version}", flush=True)
            with self.changed:
                self.batches.append(groups)
                self.changed.notify_all()
        self._wait_for(steps)
        groups = list(self.pool.map(lambda task: self._group(task, temperature=0.0), self.tasks))
        accuracy = sum(sum(group["rewards"]) for group in groups) / (GROUP * len(groups))
        versions = {group["version"] for group in groups}
        print(f"accuracy {accuracy:.0%}, versions {versions}", flush=True)

    def close(self) -> None:
        """End the wait of all requests."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _wait_for(self, version: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.version >= version)

    def _group(self, task: tuple[str, str], temperature: float = 1.0) -> dict[str, Any]:
        environment, prompt = task
        asked = {"prompt": prompt, "n": GROUP, "temperature": temperature}
        answer = ask(self.router, "/v1/completions", asked)
        texts = [choice["text"] for choice in answer["choices"]]
        rewards = ask(environment, "/score", {"prompt": prompt, "answers": texts})
        return {"prompt": prompt, "answers": texts, "rewards": rewards, "version": answer["version"]}

    @staticmethod
    def _update(engine: str) -> None:
        try:
            ask(engine, "/update_weights", {}, patience=0)
        except Unavailable as problem:
            print(f"not told: {problem}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--router")
    parser.add_argument("--engines", type=lambda text: text.split(","))
    parser.add_argument("--environments", nargs="+")
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    orchestrator = Orchestrator(options.router, options.engines, options.environments)
    routes = {"/batch": orchestrator.batch, "/published": orchestrator.published}
    with Server(options.host, options.port, routes) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            orchestrator.run(options.steps)
        finally:
            orchestrator.close()
            server.shutdown()


if __name__ == "__main__":
    main()
