"""`Completer`: tokens for tokens, with the log-probability of each and the version of the weights that made it.

`EngineCompleter` asks the engines of a role, in chunks: what an engine had made when it dies is kept but for the last
chunk, and another engine goes on.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from unirun.errors import UsageError
from unirun.rollout.choosing import POLICIES, Answer
from unirun.rollout.client import EngineClient
from unirun.values import Value, WorkerId, natural

MAX_TOKENS = 16
"""The number of new tokens of a request that says nothing of it, as of vLLM."""

REMEMBERED = 100_000
"""Conversations whose engines are remembered, the latest ones."""


class Completion(Value):
    """The tokens that were made for one request, with the log-probability of each, and the version of the weights that
    made it; 0 for those with which the engine was started. `finish_reason` is ``stop`` or ``length``."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str


class Completer(Protocol):
    """Makes tokens for requests."""

    async def complete(
        self, token_ids: Sequence[int], *, conversation: str = "", **sampling: Any
    ) -> Completion:
        """The tokens after `token_ids`. `sampling` has fields of vLLM's ``SamplingParams``: ``max_tokens``,
        ``min_tokens``, ``temperature``, ``top_p``, ``top_k``, ``stop``, ``stop_token_ids``, ``seed``. Requests of one
        `conversation` stay on one engine while its version is the same."""


class EngineCompleter:
    """A `Completer` on the engines of `client`, which chooses one for each chunk of `new_tokens_per_chunk` tokens by
    `schedule_policy`.

    A request with stop strings is one chunk, as an engine looks for them in what it makes itself.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        new_tokens_per_chunk: int | None = None,
        schedule_policy: str = "least_requests",
        timeout: float | None = None,
    ) -> None:
        """`timeout` is that of a request with all of its chunks, in seconds; None: each chunk has that of the client.
        Raises `UsageError`."""
        if new_tokens_per_chunk is not None and new_tokens_per_chunk < 1:
            raise UsageError("new_tokens_per_chunk must be 1 or more", "None: one chunk")
        if schedule_policy not in POLICIES:
            raise UsageError(f"schedule_policy {schedule_policy!r}", f"it is one of {', '.join(POLICIES)}")
        self._client, self._chunk, self._policy = (
            client,
            new_tokens_per_chunk,
            schedule_policy,
        )
        self._timeout = timeout
        # The version that each engine had last, and the engine of each conversation with the version of then.
        self._versions: dict[WorkerId, int] = {}
        self._homes: OrderedDict[str, tuple[WorkerId, int]] = OrderedDict()

    async def complete(
        self, token_ids: Sequence[int], *, conversation: str = "", **sampling: Any
    ) -> Completion:
        """As `Completer` says. Raises `ServerError`, `ServerTimeout`."""
        most = int(sampling.pop("max_tokens", MAX_TOKENS))
        least = int(sampling.pop("min_tokens", 0))
        seed = sampling.pop("seed", None)
        # Continuations of a request have no other name than this.
        name = conversation or f"{random.getrandbits(64):x}"
        prompt = hash(tuple(token_ids))
        made, logprobs, versions = list[int](), list[float](), list[int]()
        while True:
            left = most - len(made)
            count = left if self._chunk is None or sampling.get("stop") else min(self._chunk, left)
            how = {**sampling, "max_tokens": count, "min_tokens": min(max(least - len(made), 0), count)}
            if seed is not None:
                # The first token of a chunk has another random number than that of the chunk before.
                how["seed"] = seed + len(made)
            answer = await self._ask(name, prompt, [*token_ids, *made], how)
            made += answer.token_ids
            logprobs += _logprobs(answer)
            versions += _versions(answer)
            if answer.finish_reason != "length" or len(made) >= most:
                if not conversation:
                    self._homes.pop(name, None)
                reason = answer.finish_reason or "length"
                return Completion(tuple(made), tuple(logprobs), tuple(versions), reason)

    async def _ask(self, name: str, prompt: int, token_ids: Sequence[int], how: dict[str, Any]) -> Answer:
        answer = await self._client.generate(
            token_ids,
            timeout=self._timeout,
            policy=self._policy,
            stay=self._home(name),
            prompt=prompt,
            logprobs=0,
            **how,
        )
        version = _number(answer.spans[-1].version) if answer.spans else 0
        self._versions[answer.engine] = version
        self._homes[name] = answer.engine, version
        self._homes.move_to_end(name)
        if len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)
        return answer

    def _home(self, name: str) -> WorkerId | None:
        """The engine that has this conversation in its cache, as far as it is known here."""
        engine, version = self._homes.get(name, (None, 0))
        return engine if engine is not None and self._versions.get(engine) == version else None


def _logprobs(answer: Answer) -> list[float]:
    content = (answer.choices[0].get("logprobs") or {}).get("content") or ()
    return [float(each["logprob"]) for each in content]


def _versions(answer: Answer) -> list[int]:
    """The version of each token."""
    found = [0] * len(answer.token_ids)
    for span in answer.spans:
        found[span.start : span.end] = [_number(span.version)] * (span.end - span.start)
    return found


def _number(label: str) -> int:
    """The number of a version by its label; that of weights which nobody has labelled is 0."""
    return natural(label) or 0
