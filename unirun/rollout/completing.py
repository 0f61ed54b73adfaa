"""`Completer`: tokens for tokens, with the log-probability of each and the version of the weights that made it; and
the episodes of agents, made of its completions.

`EngineCompleter` asks the engines of a role, in chunks: what an engine had made when it dies is kept but for the last
chunk, and another engine goes on.

An *episode* is one run of an agent. A *turn* is one request to an engine in it, and the tokens that were made for it. A
*trajectory* is a sequence of tokens with what is known of each. The turns of an episode are one trajectory as long as
the prompt of each begins with all tokens before. A prompt that does not (the agent has cut or rewritten what was said)
begins another trajectory, with the same reward. A *group* has the trajectories of several episodes with one prompt.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

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
        now = asyncio.get_running_loop().time
        deadline = None if self._timeout is None else now() + self._timeout
        made, logprobs, versions = list[int](), list[float](), list[int]()
        while True:
            left = most - len(made)
            count = left if self._chunk is None or sampling.get("stop") else min(self._chunk, left)
            how = {**sampling, "max_tokens": count, "min_tokens": min(max(least - len(made), 0), count)}
            if seed is not None:
                # The first token of a chunk has another random number than that of the chunk before.
                how["seed"] = seed + len(made)
            how["timeout"] = None if deadline is None else max(deadline - now(), 0.0)
            answer = await self._ask(name, prompt, [*token_ids, *made], how)
            made += answer.token_ids
            logprobs += _logprobs(answer)
            versions += _versions(answer)
            # An engine that makes less than it was asked for takes no more tokens.
            if answer.finish_reason != "length" or len(answer.token_ids) < count or len(made) >= most:
                if not conversation:
                    self._homes.pop(name, None)
                reason = answer.finish_reason or "length"
                return Completion(tuple(made), tuple(logprobs), tuple(versions), reason)

    async def _ask(self, name: str, prompt: int, token_ids: Sequence[int], how: dict[str, Any]) -> Answer:
        answer = await self._client.generate(
            token_ids,
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


NOT_MADE = -1
"""The version of a token that no model has made: one of a prompt, or of an environment's answer."""


class Turn(Value):
    """The prompt of one request, and what was made for it."""

    prompt: tuple[int, ...]
    completion: Completion


class Trajectory(Value):
    """A sequence of tokens. A token that the model has made is `trained` on, and has the log-probability with which it
    was drawn, and the version of the weights that have made it. Other tokens have 0 and `NOT_MADE`."""

    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float = 0.0

    def __len__(self) -> int:
        return len(self.token_ids)


class Group(Value, gc=True):
    """Trajectories of episodes with one prompt, the row `data`. `version` is the oldest that has made a token of it."""

    id: str
    data: Mapping[str, Any]
    trajectories: tuple[Trajectory, ...]
    version: int

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of the trajectories."""
        return tuple(each.reward for each in self.trajectories)


EMPTY = Trajectory((), (), (), ())


def trajectories(turns: Iterable[Turn], reward: float) -> tuple[Trajectory, ...]:
    """The trajectories of an episode with this reward, in the order in which they have begun."""
    found: list[Trajectory] = []
    for turn in turns:
        place = next((n for n in reversed(range(len(found))) if begins(turn.prompt, found[n])), None)
        if place is None:
            found.append(_extended(EMPTY, turn))
        else:
            found[place] = _extended(found[place], turn)
    return tuple(replace(each, reward=reward) for each in found)


def begins(prompt: Sequence[int], before: Trajectory) -> bool:
    """Return True if a prompt begins with all tokens of a trajectory."""
    return tuple(prompt[: len(before)]) == before.token_ids


def _extended(before: Trajectory, turn: Turn) -> Trajectory:
    more, made = turn.prompt[len(before) :], turn.completion
    return Trajectory(
        before.token_ids + more + made.token_ids,
        before.trained + (False,) * len(more) + (True,) * len(made.token_ids),
        before.logprobs + (0.0,) * len(more) + made.logprobs,
        before.versions + (NOT_MADE,) * len(more) + made.versions,
    )


def recorded(
    tokens: Sequence[int], turns: Sequence[Turn], reward: float, masked: Sequence[bool] | None = None
) -> Trajectory:
    """A sequence that an agent has put together, with what the turns in it have recorded. Tokens that are `masked` are
    not trained on, though the model has made them."""
    whole, end = tuple(tokens), len(tokens)
    trained, logprobs, versions = [False] * end, [0.0] * end, [NOT_MADE] * end
    while True:
        # From the last turn to the first one, whose outputs are in the prompts of those after it.
        places = [(len(turn.prompt), len(turn.prompt) + len(turn.completion.token_ids)) for turn in turns]
        ends = [
            (stop, begin, turn.completion)
            for turn, (begin, stop) in zip(turns, places, strict=True)
            if begin < stop <= end and whole[:stop] == turn.prompt + turn.completion.token_ids
        ]
        if not ends:
            return Trajectory(whole, tuple(trained), tuple(logprobs), tuple(versions), reward)
        stop, end, made = max(ends, key=lambda each: each[0])
        trained[end:stop] = [not each for each in masked[end:stop]] if masked else [True] * (stop - end)
        logprobs[end:stop], versions[end:stop] = made.logprobs, made.versions


def oldest(made: Iterable[Completion]) -> int | None:
    """The oldest version that has made a token; None if there is no token."""
    return min((min(each.versions) for each in made if each.versions), default=None)


class Outcomes(Value):
    """Numbers of groups and episodes so far: groups that are being made (`open`) and their episodes, groups that were
    `accepted`, that were `rejected` (by the agent, or as no episode is left), and that were `stale`; episodes that have
    `failed`, and requests to reward functions that have; tokens that were made."""

    open: int = 0
    episodes: int = 0
    accepted: int = 0
    rejected: int = 0
    stale: int = 0
    failed: int = 0
    tokens: int = 0
