"""Finds the part of a value that cannot be sent, as pickle names only its type, and says what to do instead."""

from __future__ import annotations

import dis
import io
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from unirun.errors import EncodingError
from unirun.roles.calls.codec import dump

DEEPEST = 8
"""Maximum nesting of containers, objects and functions that is searched."""


class _Part(NamedTuple):
    """The name of a part of a value: the words `before`, which end with the function that uses it, then its `path`, and
    the line of its use."""

    before: str
    path: str = ""
    line: int = 0

    def item(self, text: str) -> _Part:
        """The part of this one that `text` selects, as ``.lock`` or ``['lock']``."""
        return self._replace(path=f"{self.path}{text}")

    def used(self, path: str, line: int = 0) -> _Part:
        """A variable that this function uses."""
        before = f"{str(self).removesuffix(',')}, which" if self.path else self.before
        return _Part(f"{before} uses", path, line)

    def __str__(self) -> str:
        if not self.path or not self.before:
            return self.before or self.path
        quoted = f"`{self.path}`" if self.before.endswith(" uses") else f"at {self.path}"
        return f"{self.before}{' ' if self.before.endswith(' uses') else ', '}{quoted}" + (
            f", line {self.line}," if self.line else ""
        )


def unsendable(
    values: Mapping[str, Any], error: EncodingError, remedy: str = "make it in the function, in each worker"
) -> EncodingError:
    """`error` with the name of the value that it is about, and of the variable, attribute or element in it. A name with
    a space is words, any other one an expression. `remedy` is for a part of no special kind."""
    for name, value in values.items():
        if (reason := _reason(value)) is not None:
            words = " " in name or isinstance(value, FunctionType | MethodType | partial)
            part, culprit = _innermost(value, _Part(name) if words else _Part("", name), ())
            large = reason.startswith("it has ")
            return EncodingError(
                f"{part} cannot be sent: {reason}", error.remedy if large else _instead(culprit) or remedy
            )
    return error


def named_arguments(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, by the names that an error has for them."""
    named = {f"argument {number} of `{method}`": each for number, each in enumerate(args, 1)}
    return named | {f"argument {name} of `{method}`": each for name, each in kwargs.items()}


def _instead(value: Any) -> str:
    """The remedy for a part of a special kind."""
    # Of classes whose objects are never sent.
    told = getattr(type(value), "_send_instead", "")
    if isinstance(told, str) and told:
        return told
    if isinstance(value, Iterator | AsyncIterator) and not isinstance(value, io.IOBase):
        return "a generator stays in its process: send a list of its items, or one after the other through a queue"
    if isinstance(value, io.IOBase):
        return "send its path, and open it there"
    return ""


def _reason(value: Any) -> str | None:
    try:
        dump(value, "it")
    except EncodingError as error:
        return error.problem.removeprefix("it cannot be sent: ")
    return None


def _innermost(value: Any, part: _Part, around: tuple[int, ...]) -> tuple[_Part, Any]:
    """The name of the part of `value` that cannot be sent and has no part that cannot, and that part. `around` has the
    identities of the values around it, which ends a circle."""
    inside = (*around, id(value))
    if len(around) < DEEPEST and not _is_ours(value):
        for name, each in _parts(value, part):
            if id(each) not in inside and _reason(each) is not None:
                return _innermost(each, name, inside)
    return part, value


def _is_ours(value: Any) -> bool:
    """Return True for an object of unirun, whose parts say nothing to users."""
    return type(value).__module__.partition(".")[0] == "unirun"


def _parts(value: Any, part: _Part) -> Iterator[tuple[_Part, Any]]:
    if isinstance(value, Mapping):
        yield from ((part.item(f"[{key!r}]"), each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        yield from ((part.item(f"[{number}]"), each) for number, each in enumerate(value))
    elif isinstance(value, partial):
        yield from (
            (part.item(f".{name}" if part.path else name), getattr(value, name))
            for name in ("func", "args", "keywords")
        )
    elif isinstance(value, MethodType):
        yield part.used("self"), value.__self__
    elif isinstance(value, FunctionType):
        lines = _lines(value.__code__)
        yield from ((part.used(name, lines.get(name, 0)), each) for name, each in _variables(value, lines))
    elif not isinstance(value, type):
        yield from ((part.item(f".{name}"), each) for name, each in getattr(value, "__dict__", {}).items())


def _variables(function: FunctionType, lines: Mapping[str, int]) -> Iterator[tuple[str, Any]]:
    """The variables around a function, and the defaults of its arguments."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            # It is not assigned yet.
            continue
    yield from ((name, each) for name, each in function.__globals__.items() if name in lines)
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _lines(code: CodeType) -> dict[str, int]:
    """The lines in which a function, with those inside it, first uses names that are not its own."""
    found: dict[str, int] = {}
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF") and each.positions is not None:
            found.setdefault(each.argval, each.positions.lineno or 0)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found = _lines(inner) | found
    return found
