"""The options of `trainer_invocation`: which workers of a role a method is called in, and with which arguments."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeVar

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
    """The options of one method; see `trainer_invocation`."""

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


# The division of the arguments of one call over several workers.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Marked:
    """An argument that `shard` has marked, or `replicate`."""

    value: Any
    sharded: bool


def shard(value: T) -> T:
    """Mark an argument of a call: each worker gets a part of it, in rank order. The sizes of the parts differ by at
    most 1.

    For lists, tuples, tensors (split along the first dimension), mappings of these (each value is split), and anything
    else with a length and slices. With fewer items than workers, the last workers get empty parts. The call raises
    `UsageError` for a value that cannot be split::

        self.RG_ACTOR.update(shard([1, 2, 3]), lr=0.1)  # two workers: update([1, 2], lr=0.1), update([3], lr=0.1)
    """
    return Marked(value, sharded=True)  # type: ignore[return-value]


def replicate(value: T) -> T:
    """Mark an argument of a call: every worker gets all of it, even if it is a list with an item for each worker."""
    return Marked(value, sharded=False)  # type: ignore[return-value]


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


Sharding = Mapping[int | str, str]
"""For each argument, by position or name: ``replicate``, ``item`` or ``shard`` with the sizes of the parts."""


def split(
    args: tuple[Any, ...], kwargs: dict[str, Any], ranks: int, *, auto: bool
) -> tuple[tuple[Arguments, ...], Sharding]:
    """Split the arguments of a call over `ranks` workers. Returns those of each worker, one entry if all get the same.

    Raises `UsageError` for what cannot be split.
    """
    if not args and not kwargs:
        return (((), {}),), {}
    named: dict[int | str, Any] = dict(enumerate(args))
    named.update(kwargs)
    marked = any(isinstance(value, Marked) for value in named.values())
    if not auto and any(isinstance(value, Marked) and value.sharded for value in named.values()):
        raise UsageError(
            "unirun.shard(…) is given to a method with auto_shard=False", "leave one of them out"
        )
    if not marked:
        # As in DLRover's guide.
        lists = [value for value in named.values() if isinstance(value, list) and len(value) == ranks]
        if not auto or ranks == 1 or len(lists) != len(named):
            return ((args, kwargs),), dict.fromkeys(named, "replicate")
        items = {where: list(value) for where, value in named.items()}
        return _rows(items, len(args), ranks), dict.fromkeys(named, "item")
    parts: dict[int | str, Sequence[Any]] = {}
    done: dict[int | str, str] = {}
    for where, value in named.items():
        if isinstance(value, Marked) and value.sharded:
            parts[where] = _parts(value.value, ranks, where)
            done[where] = f"shard {'+'.join(map(str, sizes(_length(value.value, where), ranks)))}"
        else:
            parts[where] = [value.value if isinstance(value, Marked) else value] * ranks
            done[where] = "replicate"
    rows = _rows(parts, len(args), ranks)
    return rows if any(d != "replicate" for d in done.values()) else rows[:1], done


def sizes(length: int, ranks: int) -> tuple[int, ...]:
    """The number of items, of `length`, that each rank gets.

    If `ranks` does not divide `length`, the first ranks get one more.
    """
    return tuple(length // ranks + (rank < length % ranks) for rank in range(ranks))


def _rows(parts: Mapping[int | str, Sequence[Any]], positional: int, ranks: int) -> tuple[Arguments, ...]:
    return tuple(
        (
            tuple(parts[position][rank] for position in range(positional)),
            {name: values[rank] for name, values in parts.items() if isinstance(name, str)},
        )
        for rank in range(ranks)
    )


def _length(value: Any, where: int | str) -> int:
    if isinstance(value, Mapping):
        lengths = {_length(each, where) for each in value.values()}
        if len(lengths) != 1:
            raise UsageError(
                f"argument {where}: the values of the mapping have lengths {sorted(lengths)}",
                "unirun.shard wants them equal",
            )
        return lengths.pop()
    if isinstance(value, str | bytes) or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        raise UsageError(
            f"argument {where}: unirun.shard cannot split {type(value).__name__}",
            "give a list, tuple, tensor or mapping of these",
        )
    if getattr(value, "shape", None) == ():
        raise UsageError(f"argument {where}: a tensor without dimensions cannot be split", "replicate it")
    return len(value)


def _parts(value: Any, ranks: int, where: int | str) -> list[Any]:
    if isinstance(value, Mapping):
        _length(value, where)
        split_values = {key: _parts(each, ranks, where) for key, each in value.items()}
        return [{key: each[rank] for key, each in split_values.items()} for rank in range(ranks)]
    begin, found = 0, []
    for size in sizes(_length(value, where), ranks):
        try:
            found.append(value[begin : begin + size])
        except (TypeError, KeyError, ValueError) as error:
            raise UsageError(
                f"argument {where}: unirun.shard cannot slice {type(value).__name__}: {error}", "give a list"
            ) from error
        begin += size
    return found


def rearranged(result: Any) -> Arguments:
    """The arguments that a `pre_func` has returned, as ``(args, kwargs)``."""
    if isinstance(result, tuple):
        if len(result) == 2 and isinstance(result[0], tuple | list) and isinstance(result[1], dict):
            return tuple(result[0]), dict(result[1])
        return result, {}
    if isinstance(result, dict):
        if not all(isinstance(name, str) for name in result):
            raise UsageError(
                "pre_func returned a dict whose keys are not names",
                "return (args, kwargs), or ({…},) for one argument",
            )
        return (), dict(result)
    return (result,), {}
