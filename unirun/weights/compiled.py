"""Names of tensors without the part that torch.compile adds.

The module that `torch.compile` returns holds the user's module as ``_orig_mod``, and so do compiled parts of a model:
``_orig_mod.layers.0._orig_mod.weight`` is the tensor ``layers.0.weight``. Weights and checkpoints have the latter, so
that either side may be compiled, as a whole or in parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from unirun.errors import UsageError

COMPILED = "_orig_mod"
"""The attribute of a compiled module with the module that was compiled."""

T = TypeVar("T")


def original_name(name: str) -> str:
    """`name`, of a tensor or a module, as it is in a model of which nothing is compiled."""
    if COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != COMPILED)


def by_original_name(named: Mapping[str, T]) -> dict[str, T]:
    """The same values in the same order, by `original_name`. Raises `UsageError` when two names become one."""
    found: dict[str, T] = {}
    for name, value in named.items():
        original = original_name(name)
        if original in found:
            raise UsageError(
                f"two tensors are called {original}, one of a compiled module", "rename the other one"
            )
        found[original] = value
    return found
