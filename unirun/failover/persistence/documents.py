"""The parts of the documents of a job's context: JSON in numbered pieces, none longer than a store takes at once."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

from unirun.values import Value

PIECE = 200_000
"""Bytes, as the documents are in ASCII."""

WHOLE = 1 << 26
"""The largest decompressed value, in bytes; the nodes of the largest jobs take some MB. Without a limit, a
small document of a shared store could fill the memory."""

Documents = Mapping[str, str]
"""By their names."""
Changes = dict[str, str | None]
"""By name what a document becomes; None when it goes away."""


class Run(Value):
    """A long sequence, of which `size` values are kept in one document; `first` is the number of the first one."""

    size: int
    values: Sequence[Any]
    first: int = 0

    @property
    def blocks(self) -> dict[int, Sequence[Any]]:
        """The values of each document, by its number."""
        values = tuple(self.values)
        return {
            number: values[max(0, number * self.size - self.first) : (number + 1) * self.size - self.first]
            for number in _numbers(self.size, len(values), self.first)
        }


def _numbers(size: int, length: int, first: int) -> range:
    """The numbers of the blocks that have one of `length` values."""
    return range(first // size, -(-(first + length) // size) if length else 0)


def as_json(value: Any) -> str:
    """In ASCII: what users write may hold halves of characters, which UTF-8 has no bytes for."""
    return json.dumps(value, separators=(",", ":"))


def hold(true: bool, what: str) -> None:
    """Raise ValueError unless it is `true`."""
    if not true:
        raise ValueError(f"its {what} are not whole")


def packed(name: str, value: Any) -> Changes:
    """One value in as many documents as it takes. It is compressed: most nodes of a job are alike."""
    text = b64encode(zlib.compress(as_json(value).encode())).decode()
    return {f"{name}/{n}": text[at : at + PIECE] for n, at in enumerate(range(0, len(text), PIECE))}


def unpacked(name: str, documents: dict[str, str]) -> Any:
    """The inverse of `packed`: the value of the documents called `name`, which are taken out of `documents`. Raises
    ValueError, also for one of more than `WHOLE` bytes, `zlib.error`."""
    text, number = "", 0
    while (piece := documents.pop(f"{name}/{number}", None)) is not None:
        text, number = text + piece, number + 1
    inflate = zlib.decompressobj()
    plain = inflate.decompress(b64decode(text, validate=True), WHOLE)
    hold(inflate.eof, name)
    return json.loads(plain)


def changed_blocks(
    name: str, before: Run | None, after: Run, plain: Callable[[Sequence[Any]], Any]
) -> Changes:
    """The blocks of `after` in which something is another value than in `before`; those that `after` has no more are
    deleted. `plain` makes plain values of a block."""
    before = before or Run(after.size, ())
    if before.values is after.values:
        return {}
    old, found = before.blocks, Changes()
    for number, part in after.blocks.items():
        was = old.pop(number, None)
        # Values that are forgotten at the beginning of a block stay there until it has no others.
        forgotten = max(0, len(was or ()) - len(part)) if after.first > before.first else 0
        if was is not None and len(was) - forgotten == len(part) and all(map(is_, was[forgotten:], part)):
            continue
        text = as_json(plain(part))
        # Most of what changes in a worker is not in its document.
        if was is None or text != as_json(plain(was)):
            found[f"{name}/{number}"] = text
    return found | {f"{name}/{number}": None for number in old}


def values_of(name: str, size: int, length: int, first: int, documents: dict[str, str]) -> list[Any]:
    """The plain values of a `Run`, whose documents are taken out of `documents`. Raises KeyError and ValueError."""
    blocks = [json.loads(documents.pop(f"{name}/{number}")) for number in _numbers(size, length, first)]
    hold(all(isinstance(block, list) for block in blocks), name)
    values = [value for block in blocks for value in block]
    forgotten = len(values) - length
    hold(0 <= forgotten <= first % size, name)
    return values[forgotten:]
