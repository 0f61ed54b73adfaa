"""A pytest plugin that tests one mutant: it is enough that something fails, soon, and the same in every run."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings

FLOORS = ("unit", "contract", "sim")
"""The tests that mirror a module come first, histories last."""

settings.register_profile(
    "mutants",
    deadline=None,
    suppress_health_check=[*HealthCheck],
    derandomize=True,
    database=None,
    max_examples=50,
    phases=(Phase.explicit, Phase.generate),
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FLOORS.index(item.nodeid.split("/")[1]))
