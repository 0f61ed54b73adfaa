"""Requests that run at once, and whether their tokens are those of the versions that they are labelled with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from transformers import LlamaForCausalLM

from tests.engines.llama import is_greedy, prompts
from tests.engines.server import Engine
from tests.waiting import eventually

COUNT = 200
"""Tokens of an answer that is still being made when the weights change."""


def tokens_match_versions(
    answer: Mapping[str, Any], prompt: Sequence[int], versions: Mapping[str, LlamaForCausalLM]
) -> bool:
    """Return True if all tokens of an answer are what the version of their label generates after those before them."""
    tokens, covered = [*prompt, *answer["token_ids"]], 0
    for span in answer["weight_versions"]:
        begin, end = len(prompt) + span["start"], len(prompt) + span["end"]
        if span["start"] != covered or not is_greedy(versions[span["version"]], tokens[:end], begin):
            return False
        covered = span["end"]
    return bool(covered == len(answer["token_ids"]))


class ConcurrentRequests:
    """64 requests that run at once."""

    def __init__(self, *engines: Engine) -> None:
        self.prompts = prompts(64, 40)
        self._engines = engines

    def answers_during(self, act: Callable[[], object]) -> list[dict[str, Any]]:
        """The answers of requests during which `act` was called."""
        return [future.result() for future in self._asked(act)]

    def answers_during_a_kill(self, act: Callable[[], object]) -> list[dict[str, Any] | None]:
        """The same, with None in place of the answers that have not come, as a server has died."""
        return [future.result() if future.exception() is None else None for future in self._asked(act)]

    def _asked(self, act: Callable[[], object]) -> list[Future[dict[str, Any]]]:
        with ThreadPoolExecutor(len(self.prompts)) as pool:
            futures = [
                pool.submit(self._engines[number % len(self._engines)].generate, prompt, COUNT)
                for number, prompt in enumerate(self.prompts)
            ]
            eventually(lambda: all(engine.running() for engine in self._engines), "requests run")
            act()
        return futures
