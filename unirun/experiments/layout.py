"""The places of the shards of a model: names, and how the ranks of a model are split over its parallel axes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from unirun.errors import UsageError
from unirun.values import Value

AXES = ("pipe", "data", "tensor")
"""The parallel axes of a model; this order is the usual one: ranks of one tensor-parallel group are neighbours."""

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?")

_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")

NAME_RULE = "use letters and digits, and '-' and '.' between them"
"""The rule in words, as the remedy of an error."""

PART_RULE = "use letters, digits and '_', and '-' and '.' between them"


def is_name(value: object) -> bool:
    """Return True if an experiment or a trial may have this name: it is a part of a path, and of a job's id."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None and ".." not in value


def is_part(value: object) -> bool:
    """Return True if a role or a call may have this name: it is a part of a path, and of keys."""
    return isinstance(value, str) and _PART.fullmatch(value) is not None and ".." not in value


class ModelName(NamedTuple):
    """A model: its `role` in the algorithm, and which of the copies with that role it is. Printed as ``actor@0``."""

    role: str
    replica_id: int = 0

    def __str__(self) -> str:
        return f"{self.role}@{self.replica_id}"


class ProcessTopology(Value):
    """The ranks ``0..world_size()-1`` of a model as a grid: `dims[i]` places along `axes[i]`. The last axis is the
    fastest, so that ranks which differ in it only are neighbours.

    ::

        topology(pipe=2, data=2, tensor=4).rank(pipe=1, data=0, tensor=3)  # 11
        topology(pipe=2, data=2, order=("data", "pipe", "tensor"))  # the stages of one pipeline are neighbours
    """

    axes: tuple[str, ...]
    dims: tuple[int, ...]

    def get_dim(self, axis: str) -> int:
        """The number of places along an axis; 1 for one that is not split."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 1

    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.dims)

    def rank(self, **at: int) -> int:
        """The rank at this place, in which each axis is named. Raises `UsageError` for a place that is not there."""
        if at.keys() != set(self.axes) or any(
            not 0 <= at[a] < d for a, d in zip(self.axes, self.dims, strict=True)
        ):
            raise UsageError(
                f"there is no place {at} in {self}", f"name {', '.join(self.axes)}, each from 0 on"
            )
        found = 0
        for axis, dim in zip(self.axes, self.dims, strict=True):
            found = found * dim + at[axis]
        return found

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank, by axis. Raises `UsageError` for a rank that is not there."""
        if not 0 <= rank < self.world_size():
            raise UsageError(f"there is no rank {rank} in {self}", f"it has {self.world_size()}")
        found = {}
        for axis, dim in zip(reversed(self.axes), reversed(self.dims), strict=True):
            rank, found[axis] = divmod(rank, dim)
        return {axis: found[axis] for axis in self.axes}

    def matching(self, **at: int) -> list[int]:
        """All ranks at these places along the axes that are named, in ascending order."""
        ranges = [
            range(at[axis], at[axis] + 1) if axis in at else range(dim)
            for axis, dim in zip(self.axes, self.dims, strict=True)
        ]
        return [self.rank(**dict(zip(self.axes, place, strict=True))) for place in itertools.product(*ranges)]

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks that differ in this axis only, in its order: the process groups along it."""
        others = [other for other in self.axes if other != axis]
        if axis not in self.axes:
            return [[rank] for rank in range(self.world_size())]
        places = itertools.product(*(range(self.get_dim(other)) for other in others))
        return [self.matching(**dict(zip(others, place, strict=True))) for place in places]

    def __str__(self) -> str:
        return " × ".join(f"{axis} {dim}" for axis, dim in zip(self.axes, self.dims, strict=True))


def topology(
    *, pipe: int = 1, data: int = 1, tensor: int = 1, order: Iterable[str] = AXES
) -> ProcessTopology:
    """The topology with so many places along each axis. Raises `UsageError` for a wrong number or order."""
    sizes: Mapping[str, int] = {"pipe": pipe, "data": data, "tensor": tensor}
    axes = tuple(order)
    if sorted(axes) != sorted(AXES):
        raise UsageError(f"the order {axes} of parallel axes", f"it has each of {', '.join(AXES)} once")
    for axis, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"{axis}={size!r} is no number of ranks", "it is 1 or more")
    return ProcessTopology(axes, tuple(sizes[axis] for axis in axes))


class ModelShardID(Value):
    """The part of a model that one worker has."""

    model_name: ModelName
    topo: ProcessTopology
    parallelism_rank: int

    @property
    def place(self) -> dict[str, int]:
        """Its index along each axis."""
        return self.topo.coordinates(self.parallelism_rank)

    def __str__(self) -> str:
        place = self.place
        return f"{self.model_name}[" + ", ".join(f"{axis} {at}" for axis, at in place.items()) + "]"


def shards(model_name: ModelName, topo: ProcessTopology) -> list[ModelShardID]:
    """All parts of a model, in rank order."""
    return [ModelShardID(model_name, topo, rank) for rank in range(topo.world_size())]
