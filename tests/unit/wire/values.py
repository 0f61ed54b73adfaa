"""Which values have a form on the wire."""

from __future__ import annotations

import math


def within(value: object) -> bool:
    """Whether numbers are finite, and integers (but a user's own) have 64 bits at most."""
    match value:
        case dict():
            return all(within(item) for key, item in value.items() if key != "config")
        case list() | tuple():
            return all(map(within, value))
        case float():
            return math.isfinite(value)
        case int():
            return -(1 << 63) <= value < 1 << 64
    return True
