"""The options of `trainer_invocation`: how a method of a workload is called through its role group."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from unirun.errors import UsageError

OneWorker = Literal["RANK0", "ANY"] | int
Workers = Literal["ALL"] | Sequence[int]
Target = OneWorker | Workers

ALL: Final[Literal["ALL"]] = "ALL"
RANK0: Final[Literal["RANK0"]] = "RANK0"
ANY: Final[Literal["ANY"]] = "ANY"

ASYNC_TIMEOUT: Final = 10.0
"""Seconds that ``is_async=True`` waits when no timeout is given, as in DLRover's guide."""

IDEMPOTENT_RETRIES: Final = 3

_MARK = "__unirun_invocation__"


@dataclass(frozen=True, slots=True)
class Invocation:
    """The options of one method; see `trainer_invocation`. `ranks` of None stands for `target` ALL or ANY."""

    blocking: bool = True
    is_async: bool = False
    timeout: float | None = None
    target: Target = ALL
    auto_shard: bool = True
    pre_func: Callable[..., Any] | None = None
    post_func: Callable[[Any], Any] | None = None
    idempotent: bool = False
    concurrency: int = 1
    retries: int = 0

    @property
    def one(self) -> bool:
        """True if it goes to one worker, so that the bare result is returned."""
        return self.target in (RANK0, ANY) or isinstance(self.target, int)


_NAMES = tuple(field.name for field in fields(Invocation))

_OF_A_CALL = ("timeout", "target", "auto_shard", "pre_func", "post_func", "idempotent", "retries")
"""The options that the calling process carries out, besides the choice to wait."""

DEFAULT = Invocation()
"""The options of public methods that are not decorated."""


def with_options(invocation: Invocation, method: str, options: Mapping[str, Any]) -> Invocation:
    """`invocation` with other `options`, those that a caller may change. Raises `UsageError` for a wrong one.

    `method` is its name in errors.
    """
    what = f"{method}.options"
    _expect_names(what, options, _OF_A_CALL)
    before = {name: getattr(invocation, name) for name in _NAMES}
    if "idempotent" in options:
        before["retries"] = None
    return checked(what, {**before, **options})


def mark(method: Any, invocation: Invocation) -> Any:
    """Give a method its options. Raises `UsageError` for what is no method."""
    if not callable(method) and not isinstance(method, classmethod):
        raise UsageError(f"@trainer_invocation decorates methods, not {method!r}", "write it above a def")
    setattr(method, _MARK, invocation)
    return method


def checked(what: str, options: dict[str, Any]) -> Invocation:
    """The invocation with these options. Errors begin with `what`."""
    _expect_names(what, options, _NAMES)

    def expect(name: str, right: Callable[[Any], bool], wanted: str) -> None:
        if name in options and not right(options[name]):
            raise UsageError(f"{what}: {name}={options[name]!r}", f"give {wanted}")

    for name in ("blocking", "is_async", "auto_shard", "idempotent"):
        expect(name, lambda value: isinstance(value, bool), "True or False")
    for name in ("pre_func", "post_func"):
        expect(name, lambda value: value is None or callable(value), "a function")
    expect(
        "timeout",
        lambda value: value is None or (_is_number(value) and 0 < value < math.inf),
        "seconds above 0",
    )
    expect("target", _is_target, "'ALL', 'RANK0', 'ANY', a rank or a list of different ranks")
    expect("concurrency", lambda value: _is_int(value) and value >= 1, "a whole number from 1")
    expect("retries", lambda value: value is None or (_is_int(value) and value >= 0), "a whole number")
    if options.get("is_async") and options.get("blocking") is False:
        raise UsageError(f"{what}: is_async waits for results, blocking=False does not", "choose one")
    if options.get("retries") and not options.get("idempotent"):
        raise UsageError(f"{what}: retries would run the method again", "add idempotent=True if it may be")
    if options.get("retries") is None:
        options["retries"] = IDEMPOTENT_RETRIES if options.get("idempotent") else 0
    if options.get("is_async") and options.get("timeout") is None:
        options["timeout"] = ASYNC_TIMEOUT
    return Invocation(**options)


def _expect_names(what: str, options: Iterable[str], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"{what} has no option {name}", remedy)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_target(value: Any) -> bool:
    if isinstance(value, str):
        return value in (ALL, RANK0, ANY)
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_int(r) and r >= 0 for r in value) and len(set(value)) == len(value)
    return _is_int(value) and value >= 0


def called_ranks(role: str, size: int, options: Invocation, ranks: Sequence[int] | None) -> Sequence[int]:
    """The ranks of a role with `size` that may be called: `ranks` come before the target in `options`.

    Raises `UsageError` for ranks that there are not.
    """
    target = options.target
    if isinstance(target, int):
        ranks = (target,)
    elif not isinstance(target, str):
        ranks = tuple(target)
    elif ranks is None:
        ranks = range(size)
    if target == RANK0:
        ranks = ranks[:1]
    for rank in ranks:
        if not 0 <= rank < size:
            raise UsageError(f"role {role} has no rank {rank}", f"it has ranks 0 to {size - 1}")
    return ranks


def invocations(target: Any) -> dict[str, Invocation]:
    """The public methods of an object or a class, and their options; of those of its base class
    in unirun only the ones that are marked.

    Raises `UsageError` for a method called ``role``, an attribute of every role group.
    """
    found = {}
    kind = target if isinstance(target, type) else type(target)
    base = next((each for each in reversed(kind.__mro__) if "__unirun_kind__" in vars(each)), object)
    for name in dir(kind):
        if name.startswith("_"):
            continue
        method = inspect.getattr_static(kind, name)
        plain = method.__func__ if isinstance(method, staticmethod | classmethod) else method
        if hasattr(base, name) and not hasattr(plain, _MARK):
            continue
        if callable(plain) and not isinstance(plain, type):
            found[name] = getattr(method, _MARK, getattr(plain, _MARK, DEFAULT))
    if "role" in found:
        raise UsageError(f"{kind.__name__} has a method called role, as every role group has", "rename it")
    return found
