"""Arguments that cannot be sent are named, with the variable, attribute or element that is the reason."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from unirun.errors import EncodingError
from unirun.roles.calls import codec
from unirun.roles.calls.call import InvocationRef
from unirun.roles.calls.group import RoleGroup
from unirun.roles.calls.sending import named_arguments, unsendable

LOCK = threading.Lock()


class Dataset:
    def __init__(self) -> None:
        self.files: list[Any] = [1, {"cache": threading.Lock()}]

    def read(self) -> None:
        """A method that is sent with its object."""


def closure() -> Callable[[], Any]:
    lock = threading.Lock()
    return lambda: lock.acquire()


def nested() -> Callable[[], Any]:
    inner = closure()
    return lambda: inner()


def of_a_global() -> Callable[[], Any]:
    def function() -> None:
        """With the line of the lock, not that of the function."""
        for _ in range(2):
            with LOCK:
                continue

    return function


def default() -> Callable[..., Any]:
    def function(batch: Any, step: int = 0, lock: Any = LOCK, *, last: bool = False) -> Any:
        return lock

    return function


def keyword() -> Callable[..., Any]:
    def function(batch: Any, step: int = 0, *, lock: Any = LOCK) -> Any:
        return lock

    return function


class Ref(InvocationRef[int]):
    def __init__(self) -> None:
        """Without a call."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle '_thread.lock' object")


def recursive() -> Callable[[], Any]:
    numbers = (each for each in range(3))

    def count() -> Any:
        return next(numbers, None) or count()

    return count


def first_line(function: Callable[..., Any]) -> int:
    return function.__code__.co_firstlineno


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (
            {"the function f": closure()},
            f"the function f uses `lock`, line {first_line(closure) + 2},",
        ),
        (
            {"the function f": nested()},
            f"the function f uses `inner`, line {first_line(nested) + 2}, which uses `lock`, "
            f"line {first_line(closure) + 2},",
        ),
        (
            {"the function f": recursive()},
            f"the function f uses `numbers`, line {first_line(recursive) + 4},",
        ),
        (
            {"the function f": of_a_global()},
            f"the function f uses `LOCK`, line {first_line(of_a_global) + 4},",
        ),
        ({"the function f": default()}, "the function f uses `lock`"),
        ({"the function f": keyword()}, "the function f uses `lock`"),
        ({"the function f": partial(print, LOCK)}, "the function f, at args[0]"),
        ({"the function f": Dataset().read}, "the function f uses `self.files[1]['cache']`"),
        ({"the function f": print, "config": {"lr": 1, "lock": LOCK}}, "config['lock']"),
        ({"config": {}, "dataset": {None: Dataset()}}, "dataset[None].files[1]['cache']"),
        (named_arguments("update", (1, LOCK), {}), "argument 2 of `update`"),
        (named_arguments("update", (), {"batch": [LOCK]}), "argument batch of `update`, at [0]"),
        ({"the result of `f`": {"a": LOCK}}, "the result of `f`, at ['a']"),
    ],
)
def test_the_part_that_is_the_reason_is_named(arguments: dict[str, Any], name: str) -> None:
    found = unsendable(arguments, EncodingError("an argument cannot be sent"))
    assert found.problem.startswith(f"{name} cannot be sent: TypeError: cannot pickle '")
    assert found.remedy in ("make it in the function, in each worker", ITEMS)


ITEMS = "a generator stays in its process: send a list of its items, or one after the other through a queue"


class Closed:
    """In place of the calls of this process: no worker can have them."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'socket' object")

    def methods(self, role: str) -> Any:
        return {}


async def coming() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ((each for each in range(3)), ITEMS),
        (coming(), ITEMS),
        (RoleGroup(cast(Any, Closed()), "actor", [0]), "unirun.init().role_group(NAME)"),
        (object.__new__(Ref), "call result() first, and send that"),
    ],
)
def test_a_value_of_a_special_kind_has_a_remedy_of_its_own(value: Any, remedy: str) -> None:
    found = unsendable(
        {"argument 1 of `update`": {"a": [value]}}, EncodingError("it cannot be sent"), "no other"
    )
    assert found.problem.startswith("argument 1 of `update`, at ['a'][0] cannot be sent: TypeError")
    assert remedy in found.remedy


def test_what_is_too_large_keeps_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_HEAD", 1000)
    error = EncodingError("it has too many bytes", "send large data as tensors")
    found = unsendable({"config": {"text": "x" * 2000}}, error, "no other")
    assert found.problem.startswith("config['text'] cannot be sent: it has 20")
    assert found.remedy == "send large data as tensors"


def test_an_error_of_another_cause_stays() -> None:
    error = EncodingError("it has too many bytes")
    assert unsendable({"config": {"lr": 1}}, error) is error
