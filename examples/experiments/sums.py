"""Short sums as tasks: what is asked, what is right, the tokenizer, and a Llama of 0.4 million parameters.

The sums, and the verifier that scores answers, are those of the reasoning-gym package. A question is held out by its
text, so that one that is trained on is never one that is measured.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from unirun.experiments import (
    DatasetAbstraction,
    DatasetUtility,
    ModelAbstraction,
    PromptAnswerDataset,
    PromptDataset,
    register_dataset,
    register_tokenizer,
)

ALPHABET = "0123456789+-="
LLAMA = Path(__file__).parent / "llama"
"""The folder with the configuration of the network, for servers."""

SHAPE = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}


class Characters:
    """A token for each character; 0 fills up, 1 ends."""

    pad_token_id, eos_token_id = 0, 1

    def encode(self, text: str, /) -> list[int]:
        """Tokens."""
        return [2 + ALPHABET.index(each) for each in text]

    def decode(self, tokens: Sequence[int], /) -> str:
        """Text, up to the first end."""
        ended = list(tokens)
        ended = ended[: ended.index(1)] if 1 in ended else ended
        return "".join(ALPHABET[each - 2] if each > 1 else "?" for each in ended)


register_tokenizer("characters", Characters)


def llama(*, critic: bool = False, weights: str = "", folder: Path = LLAMA) -> ModelAbstraction:
    """A Llama with 0.4 million parameters, or the network of another `folder`: new, or with saved `weights`."""
    config = json.loads((folder / "config.json").read_text())
    return ModelAbstraction("causal_lm", {"config": config, "critic": critic, "weights": weights})


@cache
def sums(count: int, *, held_out: bool = False, seed: int = 0) -> list[dict[str, Any]]:
    """This number of different sums: ``{"prompt": "3+8-2=", "answer": "9"}``."""
    # Imported where it is used: the command that starts a trial needs no sums.
    import reasoning_gym  # type: ignore[import-untyped, unused-ignore]

    drawn = reasoning_gym.create_dataset("chain_sum", seed=seed, size=20 * count, **SHAPE)
    found: dict[str, dict[str, Any]] = {}
    for entry in drawn:
        prompt = entry["metadata"]["expression"].replace(" ", "") + "="
        if (zlib.crc32(prompt.encode()) % 5 == 0) == held_out:
            found.setdefault(prompt, {"prompt": prompt, "answer": entry["answer"]})
        if len(found) == count:
            break
    return list(found.values())


def score(row: Mapping[str, Any], text: str) -> float:
    """1 for the right number."""
    return float(text == row["answer"])


class Questions(PromptDataset):
    """Sums to be answered."""

    def __init__(self, util: DatasetUtility, count: int, *, held_out: bool = False) -> None:
        super().__init__(util, rows=sums(count, held_out=held_out))


class Answered(PromptAnswerDataset):
    """Sums and their answers."""

    def __init__(self, util: DatasetUtility, count: int, *, held_out: bool = False) -> None:
        super().__init__(util, rows=sums(count, held_out=held_out))


register_dataset("questions", Questions)
register_dataset("answered", Answered)


def questions(count: int, *, held_out: bool = False) -> DatasetAbstraction:
    """A dataset with this number of `Questions`."""
    return DatasetAbstraction("questions", {"count": count, "held_out": held_out})


def answered(count: int, *, held_out: bool = False) -> DatasetAbstraction:
    """A dataset with this number of `Answered` ones."""
    return DatasetAbstraction("answered", {"count": count, "held_out": held_out})
