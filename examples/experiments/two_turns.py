"""`async-grpo` with an environment: after a wrong answer the model may answer once more, for half the reward.

The tokens of both turns are one sequence. Those of the environment are not trained on.

unirun experiment start -e async-two-turns -f first weights=… --mode local
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.async_grpo import AsyncGRPO
from experiments.ppo import ROOM
from experiments.sums import SHAPE
from unirun.experiments import register_agent, register_environment, register_experiment
from unirun.rollout import Recorder

AGAIN = "="
"""The environment's answer to a wrong number."""


class Examiner:
    """Asks one sum, twice if need be."""

    def __init__(self) -> None:
        import reasoning_gym  # type: ignore[import-untyped, unused-ignore]

        self._verifier = reasoning_gym.create_dataset("chain_sum", seed=0, size=1, **SHAPE)
        self._row: Mapping[str, Any] = {}
        self._turns = 0

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin with a row of the dataset; its question."""
        self._row, self._turns = row, 0
        return str(row["prompt"])

    def step(self, text: str) -> tuple[str, float, bool]:
        """The reply to an answer, the reward, and True at the end."""
        self._turns += 1
        right = float(self._verifier.score_answer(text or None, {"answer": self._row["answer"]})) == 1.0
        if right or self._turns == 2:
            return "", right / self._turns, True
        return AGAIN, 0.0, False


class Candidate:
    """Answers until the examiner has heard enough."""

    def __init__(self, n: int = 8) -> None:
        self.group_size = n
        self.sampling = {"temperature": 1.0, "max_tokens": ROOM}

    async def run(self, data: Mapping[str, Any], client: Recorder) -> float:
        """The reward of the last answer."""
        tokens = client.tokenizer.encode(client.env.reset(data))
        while True:
            answer = await client.complete(tokens)
            text = client.tokenizer.decode(answer.token_ids) if answer.finish_reason == "stop" else ""
            said, reward, over = client.env.step(text)
            if over:
                return float(reward)
            tokens += [*answer.token_ids, *client.tokenizer.encode(said)]


register_environment("examiner", Examiner)
register_agent("candidate", Candidate)


@dataclass
class AsyncTwoTurns(AsyncGRPO):
    """The settings of `async-grpo`."""

    agent, env = "candidate", "examiner"


register_experiment("async-two-turns", AsyncTwoTurns)
