"""What an interface has returned from a call: checked in the worker, so that errors name the call and the rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unirun.errors import UsageError
from unirun.experiments.data.sample import SequenceSample
from unirun.experiments.graph import MFCDef


def data_of(call: MFCDef, found: Any, ids: Sequence[str], rank: int) -> SequenceSample:
    """The data that `rank` of the last stage has made of the sequences `ids`, under the names of the graph. Raises
    `UsageError`."""
    if not isinstance(found, SequenceSample):
        raise _wrong(
            call, rank, f"a {type(found).__name__}", "return a SequenceSample in all ranks of the last stage"
        )
    named = found.remap(call.output_key_remap)
    if missing := [key for key in call.output_keys if key not in named.keys]:
        there = ", ".join(named.keys) or "nothing"
        raise _wrong(call, rank, f"a sample without {', '.join(missing)}", f"it has {there}: see output_keys")
    if set(named.ids) != set(ids):
        raise _wrong(
            call,
            rank,
            f"data of {_shown(named.ids)}, and got {_shown(ids)}",
            "return data of each id of the sample that was passed",
        )
    return named.select(call.output_keys)


def figures_of(call: MFCDef, found: Any, rank: int) -> dict[str, float]:
    """The figures that `rank` has returned, as numbers. Raises `UsageError`."""
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise _wrong(call, rank, f"a {type(found).__name__}", "return a dict of numbers, or None")
    figures = {}
    for name, value in found.items():
        try:
            # Of a tensor or an array with one element, too.
            figures[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise _wrong(
                call, rank, f"the figure {name!r}, a {type(value).__name__}", "return numbers"
            ) from error
    return figures


def _wrong(call: MFCDef, rank: int, what: str, remedy: str) -> UsageError:
    kind = call.interface_impl.type_
    return UsageError(
        f"{call.name}: {call.interface_type.value}() of interface {kind!r} returned {what} in rank {rank} of "
        f"{call.model_name}",
        remedy,
    )


def _shown(ids: Sequence[str]) -> str:
    """Some ids."""
    return f"{len(ids)} ids ({', '.join(sorted(ids)[:3])}{', …' if len(ids) > 3 else ''})"
