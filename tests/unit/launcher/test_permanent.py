"""An error that would come again is told from one that may pass; in doubt it may pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from unirun.errors import GroupError, StoreAway, UsageError, WireError
from unirun.launcher.worker import is_permanent


@pytest.mark.parametrize(
    "error",
    [
        ImportError("cannot import name 'x'"),
        ModuleNotFoundError("No module named 'x'"),
        SyntaxError("invalid syntax"),
        IndentationError("unexpected indent"),
        NotImplementedError("must define init()"),
        UsageError("ppo:Actor is not derived from BaseWorkload"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_wrong_in_the_code_comes_again(error: Exception) -> None:
    assert is_permanent(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        FileNotFoundError(2, "checkpoint"),
        ConnectionRefusedError(111, "refused"),
        TimeoutError("late"),
        RuntimeError("CUDA error: out of memory"),
        MemoryError(),
        ValueError("3 samples"),
        TypeError("unsupported operand"),
        KeyError("lr"),
        NameError("x"),
        AssertionError(),
        StoreAway("the store is away"),
        GroupError("nobody came"),
        WireError("gone"),
        SystemExit(1),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_may_come_from_outside_may_pass(error: BaseException) -> None:
    assert not is_permanent(error)


def raised(body: Callable[[], None]) -> BaseException:
    try:
        body()
    except BaseException as error:  # noqa: BLE001 - what it raises is what is asked for
        return error
    raise AssertionError


def from_disk() -> None:
    try:
        raise OSError(5, "Input/output error")
    except OSError as error:
        raise ImportError("numpy cannot be loaded") from error


def beside_disk() -> None:
    try:
        raise OSError(5, "Input/output error")
    except OSError:
        raise NotImplementedError("no reader") from None


def after_disk() -> None:
    try:
        raise OSError(5, "Input/output error")
    except OSError:
        raise ImportError("numpy cannot be loaded")  # noqa: B904 - as it is written


def without_module() -> None:
    try:
        raise ModuleNotFoundError("flash_attn")
    except ImportError:
        raise NotImplementedError("no attention")  # noqa: B904 - as it is written


@pytest.mark.parametrize(
    ("body", "permanent"),
    [(from_disk, False), (after_disk, False), (beside_disk, True), (without_module, True)],
)
def test_what_follows_from_the_outside_may_pass_too(body: Callable[[], None], permanent: bool) -> None:
    assert is_permanent(raised(body)) == permanent


def test_an_error_that_is_its_own_cause_is_told_all_the_same() -> None:
    one, two = ImportError("one"), ImportError("two")
    with contextlib.suppress(ImportError):
        raise one from two
    with contextlib.suppress(ImportError):
        raise two from one
    assert is_permanent(one)
