"""The division of the arguments of one call over several workers. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from unirun.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Marked(Generic[T]):
    value: T


class Sharded(_Marked[T]):
    """An argument that `shard` has marked."""


class Replicated(_Marked[T]):
    """An argument that `replicate` has marked."""


def shard(value: T) -> T:
    """Mark an argument of a call: each worker gets a part of it, in rank order. The sizes of the parts differ by at
    most 1.

    For lists, tuples, tensors (split along the first dimension), mappings of these (each value is split), and anything
    else with a length and slices. With fewer items than workers, the last workers get empty parts. The call raises
    `UsageError` for a value that cannot be split::

        self.RG_ACTOR.update(shard([1, 2, 3]), lr=0.1)  # two workers: update([1, 2], lr=0.1), update([3], lr=0.1)
    """
    return Sharded(value)  # type: ignore[return-value]


def replicate(value: T) -> T:
    """Mark an argument of a call: every worker gets all of it, even if it is a list with an item for each worker."""
    return Replicated(value)  # type: ignore[return-value]


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class SplitArguments:
    """The arguments of each worker (one entry if all get the same), and how they were made.

    `sharding` says for each argument, by position or name, ``replicate``, ``item`` or ``shard`` with the sizes.
    """

    arguments: tuple[Arguments, ...]
    sharding: Mapping[int | str, str]


def split(args: tuple[Any, ...], kwargs: dict[str, Any], ranks: int, *, auto: bool) -> SplitArguments:
    """Split the arguments of a call over `ranks` workers. Raises `UsageError` for what cannot be split."""
    if not args and not kwargs:
        return SplitArguments((((), {}),), {})
    named: dict[int | str, Any] = dict(enumerate(args))
    named.update(kwargs)
    marked = any(isinstance(value, _Marked) for value in named.values())
    if marked and not auto and any(isinstance(value, Sharded) for value in named.values()):
        raise UsageError(
            "unirun.shard(…) is given to a method with auto_shard=False", "leave one of them out"
        )
    if not marked:
        # As in DLRover's guide; not for a call without arguments.
        lists = [value for value in named.values() if isinstance(value, list) and len(value) == ranks]
        if not auto or ranks == 1 or not named or len(lists) != len(named):
            return SplitArguments(((args, kwargs),), dict.fromkeys(named, "replicate"))
        parts = {where: list(value) for where, value in named.items()}
        return SplitArguments(_rows(parts, len(args), ranks), dict.fromkeys(named, "item"))
    parts, done = {}, {}
    for where, value in named.items():
        if isinstance(value, Sharded):
            parts[where] = _parts(value.value, ranks, where)
            done[where] = f"shard {'+'.join(map(str, sizes(_length(value.value, where), ranks)))}"
        else:
            parts[where] = [value.value if isinstance(value, Replicated) else value] * ranks
            done[where] = "replicate"
    rows = _rows(parts, len(args), ranks)
    return SplitArguments(rows if any(d != "replicate" for d in done.values()) else rows[:1], done)


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
