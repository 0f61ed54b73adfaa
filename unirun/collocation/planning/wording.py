"""How lists are said in messages."""

from __future__ import annotations

from collections.abc import Iterable


def join(words: Iterable[object]) -> str:
    """``a, b, c``."""
    return ", ".join(str(word) for word in words)


def both(words: Iterable[object]) -> str:
    """``a, b and c``."""
    *first, last = [str(word) for word in words]
    return f"{', '.join(first)} and {last}" if first else last


def some(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
