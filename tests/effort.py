"""The effort of the tests, less in `make test` than in `make chaos` and `make properties`."""

from __future__ import annotations

import os
from typing import TypeVar

from hypothesis import Phase, settings

T = TypeVar("T")

CHAOS = "UNIRUN_CHAOS" in os.environ
"""True if tests try all moments and all variants, for any time: `make chaos`."""


def variants(*values: T) -> tuple[T, ...]:
    """All of them in `make chaos`; the first one in `make test`, where other tests have the others."""
    return values if CHAOS else values[:1]


def examples(percent: int, *, shrunk: bool = True) -> settings:
    """So many per cent of the profile's: 40 of the 50 in `make test` are 20, and 3 of the 8 in `make quick`. One that
    fails is `shrunk`, which takes minutes where each takes a tenth of a second."""
    phases = [phase for phase in Phase if shrunk or phase not in (Phase.shrink, Phase.explain)]
    return settings(max_examples=max(1, settings().max_examples * percent // 100), phases=phases)


def seeds(percent: int) -> range:
    """The seeds of so many histories, as `examples`."""
    return range(examples(percent).max_examples)
