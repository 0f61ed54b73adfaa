"""Values in lists, tuples and dicts, however deep."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

CONTAINERS = (list, dict, UserDict)
"""No union, which torch.compile does not trace."""


def mapped(
    change: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] = lambda value: False
) -> Any:
    """`value` with ``change(leaf)`` in place of each leaf. Leaves are what `rebuilt` returns, and what `is_leaf`
    says. A list or dict that occurs twice is changed once, so circles end."""
    # With the container itself, as another one could get the id of one that is gone.
    known: dict[int, tuple[Any, Any]] = {}

    def changed(value: Any) -> Any:
        if id(value) in known:
            return known[id(value)][1]
        if is_leaf(value):
            return change(value)
        found = rebuilt(changed, value, lambda new: known.update({id(value): (value, new)}))
        return change(value) if found is value else found

    try:
        return changed(value)
    finally:
        # `changed` refers to itself, so what it refers to stays until the garbage collector comes.
        known.clear()


def rebuilt(change: Callable[[Any], Any], value: Any, begin: Callable[[Any], None] = lambda new: None) -> Any:
    """A list, tuple, named tuple or dict of the same type, also one derived from list or dict, with ``change(part)`` in
    place of each part; anything else as it is. `begin` gets a new list or dict before its parts are changed."""
    if isinstance(value, tuple):
        make = _maker(type(value))
        return value if make is None else make(map(change, value))
    if not isinstance(value, CONTAINERS):
        return value
    found: Any = value.copy() if type(value) in (list, dict) else copy.copy(value)
    if found is value:
        # It cannot be changed.
        return value
    if type(value) is not dict and getattr(value, "__dict__", None) is value:
        # Its items are its attributes.
        found.__dict__ = found
    begin(found)
    for key, each in list(enumerate(value) if isinstance(value, list) else value.items()):
        found[key] = change(each)
    return found


def _maker(kind: Any) -> Callable[[Any], Any] | None:
    """The function that makes a tuple of this type from its elements; None for a type that nothing is known of."""
    # The second is that of torch.return_types.
    return getattr(kind, "_make", None) or (
        kind if kind is tuple or hasattr(kind, "n_sequence_fields") else None
    )
