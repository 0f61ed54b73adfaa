"""Pairs of answers to short sums, the right one and a wrong one; and the layout that experiments on pairs share."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from experiments.sums import sums
from unirun.experiments import (
    DatasetAbstraction,
    DatasetUtility,
    PairedDataset,
    SequenceSample,
    register_dataset,
)


@cache
def pairs(count: int, *, near: bool = False, held_out: bool = False) -> list[dict[str, Any]]:
    """This number of rows: ``{"prompt": "3+8-2=", "pos_answers": ["9"], "neg_answers": ["-4"]}``. A wrong answer is
    that of another sum, or with `near` one that differs from the right one by 3 at most."""
    chance, rows = random.Random(count), sums(count, held_out=held_out)
    answers: list[str] = [row["answer"] for row in rows]

    def wrong(right: str) -> str:
        if near:
            return str(int(right) + chance.choice((-3, -2, -1, 1, 2, 3)))
        return chance.choice([other for other in answers if other != right])

    return [
        {"prompt": row["prompt"], "pos_answers": [row["answer"]], "neg_answers": [wrong(row["answer"])]}
        for row in rows
    ]


class Preferences(PairedDataset):
    """Pairs of answers."""

    def __init__(self, util: DatasetUtility, count: int, *, near: bool, held_out: bool) -> None:
        super().__init__(util, rows=pairs(count, near=near, held_out=held_out))


register_dataset("preferences", Preferences)


def dataset(count: int, *, near: bool = False, held_out: bool = False) -> DatasetAbstraction:
    """A dataset with this number of pairs."""
    return DatasetAbstraction("preferences", {"count": count, "near": near, "held_out": held_out})


def number_of_pairs(sample: SequenceSample) -> float:
    """The weight of a batch."""
    return len(sample.lengths("packed_input_ids")) / 2
