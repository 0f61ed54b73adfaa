"""The parts of the tensors that each rank takes, and their sources: a pure function of layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unirun.errors import Fault, WeightsError
from unirun.values import Value
from unirun.weights.layout import Box, Layout, Part, Tensor


class Take(Value):
    """`box` of the tensor `name` comes from the source with this index."""

    source: int
    name: str
    box: Box


def plan(
    sources: Sequence[Layout], wanted: Layout, near: Sequence[int] = (), turn: int = 0
) -> tuple[Take, ...]:
    """The takes that give all of `wanted`, no element twice. The same arguments give the same plan.

    Where several sources have an element, those in `near` (on this host) come first. Those that have the same part of
    a tensor share the work: the next tensor comes from the one that has sent least. The order begins with the source
    number `turn`, so that receivers with different numbers ask different sources first.

    Raises `WeightsError` with every tensor that no source has, that has another shape or dtype, or of which a part is
    nowhere.
    """
    faults = [
        fault for name, part in wanted.items() if (fault := _difference(name, part, sources)) is not None
    ]
    if faults:
        raise WeightsError("the weights do not fit the receiver", faults=faults)
    order = _order(len(sources), near, turn)
    takes: list[Take] = []
    sent = [0] * len(sources)
    # Layers of a model are cut in the same way, and equal parts are one object (`shared`): one search serves all.
    known: dict[tuple[int, ...], tuple[list[tuple[list[int], Box]], list[Box]]] = {}
    for name, part in wanted.items():
        there = [sources[source].get(name) for source in order]
        key = (id(part), *map(id, there))
        if key not in known:
            twins = _twins(order, there, set(near))
            known[key] = _search(part, [(some, sources[some[0]][name]) for some in twins])
        found, missing = known[key]
        for twin, box in found:
            source = min(twin, key=sent.__getitem__) if len(twin) > 1 else twin[0]
            sent[source] += box.count
            takes.append(Take(source, name, box))
        faults += [_nowhere(name, part.tensor, box) for box in missing[:1]]
    if faults:
        raise WeightsError("the publishers do not have all of what the receiver needs", faults=faults)
    return tuple(takes)


def _twins(order: Sequence[int], there: Sequence[Part | None], near: set[int]) -> list[list[int]]:
    """The sources of a tensor: those that have the same part, and are as near as each other, in one list."""
    found: dict[tuple[bool, Part], list[int]] = {}
    for source, held in zip(order, there, strict=True):
        if held is not None:
            found.setdefault((source not in near, held), []).append(source)
    return [*found.values()]


def _search(
    part: Part, there: Sequence[tuple[list[int], Part]]
) -> tuple[list[tuple[list[int], Box]], list[Box]]:
    """The boxes of `part` that come from each source, and those that no source has."""
    found: list[tuple[list[int], Box]] = []
    missing = [piece.box for piece in part.pieces]
    for sources, held in there:
        for piece in held.pieces if missing else ():
            left: list[Box] = []
            for box in missing:
                common = box.meet(piece.box)
                if common is None:
                    left.append(box)
                else:
                    found.append((sources, common))
                    left.extend(box.without(common))
            missing = left
    return found, missing


def _order(count: int, near: Sequence[int], turn: int) -> list[int]:
    close = set(near)
    rotated = [(turn + number) % count for number in range(count)] if count else []
    return sorted(rotated, key=lambda source: source not in close)


def _difference(name: str, wanted: Part, sources: Sequence[Layout]) -> Fault | None:
    found = next((layout[name].tensor for layout in sources if name in layout), None)
    if found is None:
        return Fault(name, "no publisher has it", "rename it, or leave it out of what is received")
    if found != wanted.tensor:
        return Fault(name, f"it is published as {_words(found)} and received as {_words(wanted.tensor)}")
    return None


def _nowhere(name: str, tensor: Tensor, box: Box) -> Fault:
    where = ", ".join(f"{a}:{a + n}" for a, n in zip(box.start, box.size, strict=True))
    return Fault(name, f"no publisher has [{where}] of {_words(tensor)}")


def _words(tensor: Tensor) -> str:
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def by_source(takes: Sequence[Take]) -> Mapping[int, tuple[Take, ...]]:
    """The takes of each source."""
    found: dict[int, list[Take]] = {}
    for take in takes:
        found.setdefault(take.source, []).append(take)
    return {source: tuple(some) for source, some in found.items()}
