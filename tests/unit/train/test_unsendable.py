"""Arguments that cannot be sent are named, with the variable, attribute or element that is the reason."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from unirun.errors import EncodingError
from unirun.train.arguments import unsendable

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


def recursive() -> Callable[[], Any]:
    numbers = (each for each in range(3))

    def count() -> Any:
        return next(numbers, None) or count()

    return count


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"the function f": closure()}, "lock, which the function f uses,"),
        ({"the function f": nested()}, "lock, which inner, which the function f uses, uses,"),
        ({"the function f": recursive()}, "numbers, which the function f uses,"),
        ({"the function f": partial(print, LOCK)}, "the function f's args[0]"),
        ({"the function f": Dataset().read}, "the object of the function f.files[1]['cache']"),
        ({"the function f": print, "config": {"lr": 1, "lock": LOCK}}, "config['lock']"),
        ({"config": {}, "dataset": {None: Dataset()}}, "dataset[None].files[1]['cache']"),
    ],
)
def test_the_part_that_is_the_reason_is_named(arguments: dict[str, Any], name: str) -> None:
    found = unsendable(arguments, EncodingError("an argument cannot be sent"))
    assert found.problem.startswith(f"{name} cannot be sent to the workers: TypeError: cannot pickle '")
    assert found.remedy == "make it in the function, in each worker"


def test_an_error_of_another_cause_stays() -> None:
    error = EncodingError("it has too many bytes")
    assert unsendable({"config": {"lr": 1}}, error) is error
