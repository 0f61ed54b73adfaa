"""What documents of a job's context are made of: JSON in numbered pieces, none longer than a store takes at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

PIECE = 200_000
"""Bytes, as the documents are in ASCII."""

Documents = Mapping[str, str]
"""By their names."""
Changes = dict[str, str | None]
"""By name what a document becomes; None when it goes away."""
T = TypeVar("T")


def as_json(value: Any) -> str:
    """In ASCII: what users write may hold halves of characters, which UTF-8 has no bytes for."""
    return json.dumps(value, separators=(",", ":"))


def hold(true: bool, what: str) -> None:
    """Raise ValueError unless it is `true`."""
    if not true:
        raise ValueError(f"its {what} are not whole")


def pieces(name: str, value: Any) -> Changes:
    """One value in as many documents as it takes."""
    text = as_json(value)
    return {f"{name}/{n}": text[at : at + PIECE] for n, at in enumerate(range(0, len(text), PIECE))}


def blocks(
    name: str, size: int, before: Sequence[T], after: Sequence[T], encode: Callable[[Sequence[T]], Any]
) -> Changes:
    """The blocks of `size` values of `after` in which something is another value than in `before`; those that `after`
    has no more are deleted."""
    found: Changes = {}
    for at in range(0, len(after), size):
        part, old = after[at : at + size], before[at : at + size]
        if len(part) == len(old) and all(x is y for x, y in zip(part, old, strict=True)):
            continue
        text = as_json(encode(part))
        # Most of what changes in a worker is not in its document.
        if not old or text != as_json(encode(old)):
            found[f"{name}/{at // size}"] = text
    for number in range(-(-len(after) // size), -(-len(before) // size)):
        found[f"{name}/{number}"] = None
    return found


def numbered(name: str, documents: Documents) -> list[str]:
    """The blocks called `name`, in the order of their numbers. Raises ValueError when one is missing."""
    prefix = f"{name}/"
    found = sorted((int(key.removeprefix(prefix)), key) for key in documents if key.startswith(prefix))
    hold(all(number == found[0][0] + n for n, (number, _) in enumerate(found)), name)
    return [documents[key] for _, key in found]
