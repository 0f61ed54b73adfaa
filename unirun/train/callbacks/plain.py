"""Metrics of any type as values that every reader knows: strict JSON, numbers, texts.

No library is imported to recognise its types: tensors and arrays have ``tolist`` and ``item``, numbers ``__float__``.
Nothing here raises, whatever the value is: a report that cannot be written must not end a run.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeAlias

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

_DEEPEST = 64
"""Containers in containers; what is deeper becomes a text, as the readers of JSON have a limit."""

_LONGEST = 1023
"""Bits of an int. A longer one becomes a text, as no double has its value and most readers of JSON have doubles."""


def plain(value: object) -> Plain:
    """Return `value` as strict JSON has it.

    Tensors and arrays become lists, and their scalars numbers; nan and the infinities become None, which is null; keys
    become texts, sets sorted lists, and everything else a text.
    """
    return _plain(value, ())


def readable(value: object) -> Plain:
    """The same for formats other than JSON: a figure that is not finite becomes ``"nan"``, ``"inf"`` or
    ``"-inf"``."""
    found = plain(value)
    figure = number(value) if found is None else None
    return found if figure is None else str(figure)


def _plain(value: object, within: tuple[int, ...]) -> Plain:
    """`within` has the identities of the containers around `value`, which ends a circle."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _LONGEST else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if id(value) not in within and len(within) < _DEEPEST:
        inside = (*within, id(value))
        # A type of the user may raise anything; so may a tensor without data, and a DictConfig with values missing.
        with contextlib.suppress(Exception):
            if isinstance(value, Mapping):
                return {text(key): _plain(item, inside) for key, item in value.items()}
            if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
                return [_plain(item, inside) for item in value]
            if isinstance(value, Set):
                return sorted((_plain(item, inside) for item in value), key=repr)
            return _plain(value.tolist(), inside)  # type: ignore[attr-defined]
    found = number(value)
    return text(value) if found is None else _plain(found, within)


def number(value: object) -> int | float | None:
    """Return `value` as a number if it is one, or a tensor or an array of one real number; otherwise None.

    nan and the infinities are numbers here. An int that no float can hold is none.
    """
    with contextlib.suppress(Exception):  # more than one element, a signalling Decimal, a foreign `item`
        if not isinstance(value, int | float) and hasattr(value, "item"):
            value = value.item()
        if isinstance(value, int):
            return int(value) if value.bit_length() <= _LONGEST else None
        if hasattr(value, "__float__"):
            return float(value)
    return None


def text(value: object) -> str:
    """Return ``str(value)``, with characters that UTF-8 does not have (lone surrogates, as in paths) escaped."""
    shown = f"<{type(value).__qualname__}>"
    with contextlib.suppress(Exception):
        shown = str(value)
    return shown.encode("utf-8", "backslashreplace").decode()


def flat(result: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the metrics in `result`, those of nested dicts under ``outer/inner``, as they are."""
    return dict(_leaves(result, "", ()))


def _leaves(value: Any, name: str, within: tuple[int, ...]) -> list[tuple[str, Any]]:
    """`within` has the identities of the dicts around `value`, which ends a circle."""
    if isinstance(value, Mapping) and id(value) not in within and len(within) < _DEEPEST:
        inside, prefix = (*within, id(value)), f"{name}/" if within else ""
        with contextlib.suppress(Exception):
            return [
                leaf for key, item in value.items() for leaf in _leaves(item, f"{prefix}{text(key)}", inside)
            ]
    return [(name, value)]


def numbers(result: Mapping[Any, Any]) -> dict[str, int | float]:
    """Return the metrics in `result` that are numbers, by their names in `flat`."""
    found = ((name, number(value)) for name, value in flat(result).items())
    return {name: value for name, value in found if value is not None}


def json_of(value: object) -> str:
    """Return `value` as one line of strict JSON, in ASCII."""
    return json.dumps(plain(value), allow_nan=False)
