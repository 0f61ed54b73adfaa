"""The turns of an episode, the sequences that they are trained on as, and groups of these. Pure values.

An *episode* is one run of an agent. A *turn* is one request to an engine in it, and the tokens that were made for it. A
*trajectory* is a sequence of tokens with what is known of each. The turns of an episode are one trajectory as long as
the prompt of each begins with all tokens before. A prompt that does not (the agent has cut or rewritten what was said)
begins another trajectory, with the same reward. A *group* has the trajectories of several episodes with one prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from unirun.rollout.completing import Completion
from unirun.values import Value

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
