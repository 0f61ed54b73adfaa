"""Finds what in the arguments of a run cannot be sent to the workers, as pickle names only its type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from unirun.errors import EncodingError
from unirun.roles.calls.codec import dump

DEEPEST = 8
"""Maximum nesting of containers, objects and functions that is searched."""


def unsendable(arguments: Mapping[str, Any], error: EncodingError) -> EncodingError:
    """`error` with the name of the argument that it is about, and of the variable, attribute or element in it."""
    for name, value in arguments.items():
        if (reason := _reason(value)) is not None:
            found = _innermost(value, name, ())
            return EncodingError(
                f"{found} cannot be sent to the workers: {reason}", "make it in the function, in each worker"
            )
    return error


def _reason(value: Any) -> str | None:
    try:
        dump(value, "it")
    except EncodingError as error:
        return error.problem.removeprefix("it cannot be sent: ")
    return None


def _innermost(value: Any, name: str, around: tuple[int, ...]) -> str:
    """The name of the part of `value` that cannot be sent and has no part that cannot. `around` has the identities of
    the values around it, which ends a circle."""
    inside = (*around, id(value))
    for part, each in _parts(value, name) if len(around) < DEEPEST else ():
        if id(each) not in inside and _reason(each) is not None:
            return _innermost(each, part, inside)
    return name


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{number}]", each) for number, each in enumerate(value))
    elif isinstance(value, partial):
        yield from ((f"{name}'s {part}", getattr(value, part)) for part in ("func", "args", "keywords"))
    elif isinstance(value, MethodType):
        yield f"the object of {name}", value.__self__
    elif isinstance(value, FunctionType):
        yield from ((f"{variable}, which {name} uses,", each) for variable, each in _variables(value))
    elif not isinstance(value, type):
        yield from (
            (f"{name}.{attribute}", each) for attribute, each in getattr(value, "__dict__", {}).items()
        )


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables around a function, and the defaults of its arguments."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            # It is not assigned yet.
            continue
    names = set(_names(function.__code__))
    yield from ((name, each) for name, each in function.__globals__.items() if name in names)
    yield from ((f"a default {number}", each) for number, each in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)
