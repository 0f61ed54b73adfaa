"""The values that every room speaks of."""

from __future__ import annotations

import enum
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest

import unirun
from unirun.failover.state import Ranks
from unirun.values import Value, natural, split_endpoint
from unirun.wire.handshake import Token

PLAIN = (int, float, str, bytes, bool, type(None), Fraction, Path, enum.Enum, Value, Ranks)

BUILDER = "unirun.spec.builder"
"""Its values have whatever a builder was given, until that is checked."""

PLAIN_ANYWAY = {
    # The result of argparse, and parts of a file in YAML or JSON.
    "CommandLine.options",
    "ItemHeader.metadata",
    "Abstraction.args",
    "MFCDef.model_type",
    "Record.details",
    "LoggedEvent.details",
    "JobSpec.config",
}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:5", ("127.0.0.1", 5)),
        ("[::1]:5", ("::1", 5)),
        ("::1:5", ("::1", 5)),
        ("host:0", ("host", 0)),
    ],
)
def test_split_endpoint_separates_address_and_port(text: str, parts: tuple[str, int]) -> None:
    assert split_endpoint(text) == parts


def test_split_endpoint_refuses_half_an_endpoint() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        split_endpoint("host:")


def test_values_that_may_be_part_of_a_cycle_are_tracked_by_the_collector() -> None:
    """A channel, its connections and all of its memory once stayed for ever, as one value was not."""
    for module in pkgutil.walk_packages(unirun.__path__, "unirun."):
        if not module.name.endswith((".__main__", ".boot", ".vllm_worker")):
            importlib.import_module(module.name)
    found = {
        f"{kind.__name__}.{name}"
        for kind in _below(Value)
        if kind.__module__.startswith("unirun.")
        and kind.__module__ != BUILDER
        and not kind.__struct_config__.gc
        for name, hint in get_type_hints(kind).items()
        if name in kind.__struct_fields__ and not _is_plain(hint)
    }
    assert found <= PLAIN_ANYWAY


def _below(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def _is_plain(hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal or hint in (Ellipsis, Token):
        return True
    if origin is Annotated:
        return _is_plain(get_args(hint)[0])
    if origin is not None or isinstance(hint, UnionType):
        return origin is not Callable and all(map(_is_plain, get_args(hint)))
    if hint is Any or not isinstance(hint, type):
        return False
    if issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return all(map(_is_plain, get_type_hints(hint).values()))
    return issubclass(hint, PLAIN)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("007", 7),
        ("9" * 18, 10**18 - 1),
        ("9" * 19, None),
        # `int` raises for more than 4300 digits, and for the first of these; it takes the others.
        ("9" * 5000, None),
        ("\u00b2", None),
        ("\u0663", None),
        ("-1", None),
        ("+1", None),
        ("1_0", None),
        (" 1", None),
        ("1\n", None),
        ("1.0", None),
        ("", None),
    ],
)
def test_a_natural_number_has_decimal_digits_and_not_too_many(text: str, number: int | None) -> None:
    assert natural(text) == number
