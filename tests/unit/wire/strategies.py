"""The values that have a form on the wire."""

from __future__ import annotations

import math


def within(value: object) -> bool:
    """Return True if all numbers are finite and all integers have at most 64 bits."""
    match value:
        case dict():
            return all(map(within, value.values()))
        case list() | tuple():
            return all(map(within, value))
        case float():
            return math.isfinite(value)
        case int():
            return -(1 << 63) <= value < 1 << 64
    return True
