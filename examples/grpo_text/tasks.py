"""Sums to work out, and the verifier that scores an answer; both are those of the reasoning-gym package.

reasoning-gym draws entry ``i`` of a dataset with the random seed ``seed + i``, so datasets with neighbouring
seeds hold almost the same questions, and short sums come again under any seed. Whether a question is held
out is therefore a property of its text: one in `FOLD` is never trained on, whoever draws it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import reasoning_gym  # type: ignore[import-untyped, unused-ignore]

DATASET = "chain_sum"
FOLD = 5
_APART = 2**32  # between the first entries of two seeds, so that their streams do not meet
_ENDLESS = 2**31  # entries are made when they are asked for, so a size costs nothing


@dataclass(frozen=True)
class Task:
    """One question, and the data with which the verifier scores an answer."""

    prompt: str
    """``"3+8-2="``; the sentence around the sum is the same in every question, so the model is spared it."""
    answer: str


class Tasks:
    """Sums and differences of ``min_terms`` to ``max_terms`` numbers of one digit each."""

    def __init__(self, min_terms: int, max_terms: int) -> None:
        self._shape = {"min_terms": min_terms, "max_terms": max_terms, "min_digits": 1, "max_digits": 1}
        self._verifier = self._dataset(first=0, size=1)

    def training(self, seed: int) -> Iterator[Task]:
        """An endless stream of tasks, none of them held out; another one for each seed, with repetitions."""
        return (task for task in self._stream(seed) if not is_held_out(task.prompt))

    def held_out(self, count: int, seed: int = 0) -> list[Task]:
        """``count`` different tasks, none of which is in any training stream."""
        found: dict[str, Task] = {}
        for task in self._stream(seed):
            if is_held_out(task.prompt):
                found.setdefault(task.prompt, task)
            if len(found) == count:
                break
        return list(found.values())

    def score(self, task: Task, answer: str | None) -> float:
        """The dataset's own score: 1 for the right number, less for a text that contains it, 0 otherwise."""
        return float(self._verifier.score_answer(answer, {"answer": task.answer}))

    def _stream(self, seed: int) -> Iterator[Task]:
        for entry in self._dataset(first=seed * _APART, size=_ENDLESS):
            yield Task(entry["metadata"]["expression"].replace(" ", "") + "=", entry["answer"])

    def _dataset(self, first: int, size: int) -> Any:
        return reasoning_gym.create_dataset(DATASET, seed=first, size=size, **self._shape)


def is_held_out(prompt: str) -> bool:
    """Return True if a question is used only to measure accuracy."""
    return zlib.crc32(prompt.encode()) % FOLD == 0
