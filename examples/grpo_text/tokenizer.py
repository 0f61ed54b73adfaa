"""One token per character: an alphabet this small needs no learned vocabulary and nothing to download."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALPHABET = "0123456789+-="
PAD = 0  # fills what a shorter text leaves free; no text contains it
END = 1  # closes an answer
_FIRST = 2  # the id of the alphabet's first character

VOCABULARY = _FIRST + len(ALPHABET)


def encode(text: str) -> list[int]:
    """The ids of the characters of ``text``, without END.

    Raises:
        ValueError: a character is not in the alphabet.
    """
    return [_FIRST + ALPHABET.index(character) for character in text]


def decode(ids: Sequence[int]) -> str | None:
    """The text of an answer; None when it is not one: without END it was cut off, with PAD it has a hole."""
    if END not in ids:
        return None
    before_end = ids[: ids.index(END)]
    if PAD in before_end:
        return None
    return "".join(ALPHABET[token - _FIRST] for token in before_end)


def pad_left(texts: Sequence[str]) -> Tensor:
    """The ids of prompts, ``[len(texts), longest]``, filled up on the left.

    On the left, so that all prompts end in the same column and their answers start in the same one.
    """
    rows = [encode(text) for text in texts]
    width = max(map(len, rows), default=0)
    return _matrix([[PAD] * (width - len(row)) + row for row in rows], width)


def pad_right(texts: Sequence[str], width: int) -> Tensor:
    """The ids of answers, each closed with END, ``[len(texts), width]``, filled up on the right.

    Raises:
        ValueError: an answer and its END do not fit into ``width``.
    """
    rows = [[*encode(text), END] for text in texts]
    longest = max(map(len, rows), default=0)
    if longest > width:
        raise ValueError(f"an answer takes {longest} tokens with its END, there is room for {width}")
    return _matrix([row + [PAD] * (width - len(row)) for row in rows], width)


def answer_mask(tokens: Tensor) -> Tensor:
    """1.0 for the tokens of an answer, its END included, and 0.0 after it; the shape of ``tokens`` ``[..., T]``."""
    is_end = (tokens == END).long()
    return (is_end.cumsum(-1) - is_end == 0).float()


def _matrix(rows: list[list[int]], width: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.long).reshape(len(rows), width)
