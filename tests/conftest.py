"""Fixtures and settings for all tests.

Examples of properties have no deadline of their own, as a busy machine is no error. Fixtures of a function are made once
for all examples of a property; those that properties use hold no state.

Signals are as a terminal has them: ``sh -c 'pytest &'`` and ``nohup pytest`` have some ignored, what they start inherits
that, and unirun leaves a signal alone that is ignored when it starts.

torch looks up the name of each address that it connects to. A resolver that loses a packet asks again after five seconds,
which says nothing about unirun: here it asks once, for a second.

Jobs of tests have the environment with which the tests were started: torch's compiler, which test modules import, adds a
variable to it.

The networks of tests are small. Two threads that compute one of them spend most of their time waiting for each other.

Output that no terminal shows is of any width, also where the terminal of the tests has told its own.

What was imported for the tests lives until the end: the garbage collector does not look at it again. With torch imported a
full collection takes half a second, and tests that end with one, or make many objects, cause many.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.effort import CHAOS

gc.disable()  # until everything is imported
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)

COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
COMPILER_CACHE_IS_GIVEN = COMPILER_CACHE in os.environ


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that are marked ``chaos`` run in `make chaos` alone. Files that are marked ``long`` come first and those of
    tests/unit last, so that at the end of a run of several processes none is busy for long while the others have
    nothing to do."""
    left_out = [item for item in items if not CHAOS and item.get_closest_marker("chaos")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(
        key=lambda item: (item.get_closest_marker("long") is None, item.nodeid.startswith("tests/unit"))
    )


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.collect()  # so that the collector knows how little is left to it, and looks at that often enough
    gc.enable()


# The same examples each time, so that a run says something about the change and not about its luck; `make properties` draws others.
settings.register_profile(
    "busy machine",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("quick", settings.get_profile("busy machine"), max_examples=8)
settings.register_profile(
    "properties", settings.get_profile("busy machine"), derandomize=False, max_examples=1000
)
settings.load_profile("busy machine")


@functools.cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not COMPILER_CACHE_IS_GIVEN:
        os.environ.pop(COMPILER_CACHE, None)
    if item.get_closest_marker("gpu") is not None and not _has_gpu():
        pytest.skip("there is no GPU")


DEFAULTS: dict[signal.Signals, Callable[[int, FrameType | None], Any] | signal.Handlers] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGTERM: signal.SIG_DFL,
}
for number, handler in DEFAULTS.items():
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)
