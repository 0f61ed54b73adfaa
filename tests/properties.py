"""How many examples a property has."""

from __future__ import annotations

from hypothesis import settings


def examples(percent: int) -> settings:
    """So many per cent of the profile's: 40 of the 100 in `make test` are 3 of the 8 in `make quick`."""
    return settings(max_examples=max(1, settings().max_examples * percent // 100))
