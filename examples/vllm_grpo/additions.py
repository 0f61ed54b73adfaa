"""Sums of two numbers of two digits, such as ``37+58=``. Each character is a token."""

import random
from collections.abc import Iterable

CHARACTERS = "0123456789+="
END = len(CHARACTERS)
"""The token that ends an answer, and that pads a shorter one."""


def tokens_of(text: str) -> list[int]:
    """The tokens of a question or an answer."""
    return [CHARACTERS.index(character) for character in text]


def text_of(tokens: Iterable[int]) -> str:
    """The text of an answer."""
    return "".join(CHARACTERS[token] for token in tokens if token != END)


def questions(held_out: int = 512) -> tuple[list[str], list[str]]:
    """The questions to train with, and those that only measure accuracy."""
    drawn = [f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(drawn)
    return drawn[held_out:], drawn[:held_out]


def right(question: str) -> str:
    """The right answer."""
    return str(sum(map(int, question.rstrip("=").split("+"))))


def careless(question: str) -> str:
    """The answer without the carry: ``37+58=85``."""
    return "".join(right(f"{a}+{b}")[-1] for a, b in zip(question[:2], question[3:5], strict=True))
