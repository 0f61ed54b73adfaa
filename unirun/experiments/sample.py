"""`SequenceSample`: packed sequences by the names of their data, their division over ranks, and `NamedArray`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from unirun.errors import UsageError
from unirun.experiments.graph import MicroBatchSpec

# The division of sequences over data-parallel ranks and micro-batches: pure functions of their numbers of tokens.


def balanced(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """The indices of `sizes` in `parts` lists with nearly equal sums: the largest first, each to the list that has the
    least (longest-processing-time rule; Graham 1969: at most 4/3 of the best). Each list ascends.

    There are no empty lists if there are as many sizes as parts. Equal arguments give equal lists.
    """
    heap = [(0, 0, number) for number in range(parts)]
    found: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        total, count, number = heap[0]
        found[number].append(index)
        heapq.heapreplace(heap, (total + sizes[index], count + 1, number))
    return [sorted(part) for part in found]


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Split the indices of `sizes` by that rule (Johnson 1973: at most 11/9 of the fewest lists, plus 1), each list
    with a sum of at most `capacity`; a larger size is in a list of its own. Each list ascends.
    """
    room = np.full(len(sizes), capacity)
    found: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        fits = room[: len(found) + 1] >= sizes[index]
        # No list has room for a size above the capacity: it opens the next one.
        number = int(fits.argmax()) if fits.any() else len(found)
        if number == len(found):
            found.append([])
        found[number].append(index)
        room[number] -= sizes[index]
    return [sorted(part) for part in found]


def micro_batches(sizes: Sequence[int], least: int, capacity: int) -> list[list[int]]:
    """Split the indices of `sizes` into at least `least` non-empty lists, each with a sum up to `capacity` if possible.

    There are as many lists as `first_fit_decreasing` needs, balanced if possible; fewer than `least` only if there
    are fewer sizes.
    """
    if not sizes:
        return []
    count = len(first_fit_decreasing(sizes, capacity))
    found = balanced(sizes, min(max(count, least), len(sizes)))
    if any(len(part) > 1 and sum(sizes[index] for index in part) > capacity for part in found):
        # Balance needs more room than the rule for the fewest lists.
        found = first_fit_decreasing(sizes, capacity)
    return found


def padded_micro_batches(lengths: Sequence[Sequence[int]], least: int, capacity: int) -> list[list[int]]:
    """Split ids, each with sequences of these lengths, into at least `least` non-empty lists, of similar lengths, as
    each sequence of a micro-batch is padded to its longest one: each list has up to `capacity` tokens with padding, if
    possible. Of the fewest lists those whose largest one is smallest."""
    longest = [max(each, default=0) for each in lengths]
    order = sorted(range(len(lengths)), key=lambda index: (-longest[index], index))

    def cut(limit: int) -> list[list[int]]:
        found: list[list[int]] = []
        rows = limit
        for index in order:
            rows += len(lengths[index])
            if not found or rows * longest[found[-1][0]] > limit:
                found.append([])
                rows = len(lengths[index])
            found[-1].append(index)
        return found

    if not order:
        return []
    count = max(len(cut(capacity)), min(least, len(order)))
    low, high = 0, min(capacity, longest[order[0]] * sum(map(len, lengths)))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= count else (middle + 1, high)
    found = cut(high)
    while len(found) < min(least, len(order)):
        largest = max(range(len(found)), key=lambda number: len(found[number]))
        half = len(found[largest]) // 2
        found[largest : largest + 1] = [found[largest][:half], found[largest][half:]]
    return [sorted(part) for part in found]


@dataclass(frozen=True, eq=False)
class SequenceSample:
    """A batch of `ids`, each with some sequences for each key. Nothing is padded.

    The tensor of a key has all of its sequences one after the other, in the order of `ids`: its first dimension is the
    sum of ``seqlens[key]``, which has for each id the length of each of its sequences. A number for an id is a sequence
    of length 1. Different keys of one id may have different numbers of sequences. ::

        SequenceSample.of({"prompt": [torch.tensor([5, 6]), torch.tensor([7])]}, ids=["a", "b"])

    In the samples of the master (`meta`), `data` is None: it has shapes, dtypes and lengths. `metadata` has more about
    each id, any values that JSON has. A sample does not change; what is called on it returns another one, whose tensors
    share memory with it where they can.
    """

    ids: tuple[str, ...]
    seqlens: Mapping[str, Sequence[Sequence[int]]]
    dtypes: Mapping[str, torch.dtype]
    trailing: Mapping[str, tuple[int, ...]]
    """The shape of one element of each key, without the first dimension."""
    data: Mapping[str, torch.Tensor] | None
    metadata: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises `UsageError` for parts that do not fit together."""
        if not all(isinstance(each, str) for each in self.ids):
            raise UsageError(f"the ids of a sample are no strings: {list(self.ids[:3])}", "give strings")
        if len(set(self.ids)) != len(self.ids):
            raise UsageError(f"a sample has an id twice: {sorted(self.ids)}", "give each its own")
        for what, found in (("seqlens", self.seqlens), ("metadata", self.metadata)):
            for key, values in found.items():
                if len(values) != len(self.ids):
                    raise UsageError(
                        f"{what} of {key!r} are for {len(values)} ids, and there are {len(self.ids)}",
                        "give one for each id",
                    )
        for key, tensor in (self.data or {}).items():
            if len(tensor) != self.total(key):
                raise UsageError(
                    f"the tensor of {key!r} has {len(tensor)} elements, and its lengths sum up to {self.total(key)}",
                    "give the lengths of its sequences",
                )

    @classmethod
    def of(
        cls,
        data: Mapping[str, Sequence[torch.Tensor | Sequence[torch.Tensor]]],
        ids: Sequence[str],
        **metadata: Sequence[Any],
    ) -> SequenceSample:
        """A sample of tensors: for each key and id one sequence, or a list of them. A tensor without dimensions is a
        sequence of length 1."""
        flat: dict[str, list[torch.Tensor]] = {}
        seqlens: dict[str, list[list[int]]] = {}
        for key, values in data.items():
            groups = [[v] if isinstance(v, torch.Tensor) else list(v) for v in values]
            whole = [[t.reshape(1) if not t.dim() else t for t in group] for group in groups]
            seqlens[key] = [[len(t) for t in group] for group in whole]
            flat[key] = [t for group in whole for t in group]
        return cls.packed({key: torch.cat(some) for key, some in flat.items()}, seqlens, ids, **metadata)

    @classmethod
    def packed(
        cls,
        data: Mapping[str, torch.Tensor],
        seqlens: Mapping[str, Sequence[Sequence[int]]],
        ids: Sequence[str],
        **metadata: Sequence[Any],
    ) -> SequenceSample:
        """A sample of tensors that are packed already."""
        return cls(
            tuple(ids),
            dict(seqlens),
            {key: tensor.dtype for key, tensor in data.items()},
            {key: tuple(tensor.shape[1:]) for key, tensor in data.items()},
            dict(data),
            metadata,
        )

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that each id has."""
        return tuple(self.seqlens)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, key: str) -> torch.Tensor:
        """The packed tensor of a key. Raises `UsageError` when it is not here."""
        if self.data is None or key not in self.data:
            there = ", ".join(self.data or ()) or "none"
            raise UsageError(f"a sample has no data {key!r}", f"it has: {there}")
        return self.data[key]

    def total(self, key: str) -> int:
        """The number of elements (tokens) of a key."""
        return sum(self.sizes(key))

    def sizes(self, key: str) -> list[int]:
        """The number of elements of a key, for each id."""
        return [sum(lengths) for lengths in self.seqlens[key]]

    def lengths(self, key: str) -> list[int]:
        """The lengths of all sequences of a key."""
        return [length for lengths in self.seqlens[key] for length in lengths]

    def sequences(self, key: str) -> list[torch.Tensor]:
        """Its sequences, as views."""
        return list(self[key].split(self.lengths(key)))

    def largest(self) -> str:
        """The key with most elements: what a sample costs is measured by it. Raises `UsageError` without keys."""
        if not self.keys:
            raise UsageError("a sample has no keys", "give it data")
        return max(self.keys, key=lambda key: (self.total(key), key))

    def meta(self) -> SequenceSample:
        """The same without the tensors."""
        return SequenceSample(self.ids, self.seqlens, self.dtypes, self.trailing, None, self.metadata)

    def select(self, keys: Iterable[str]) -> SequenceSample:
        """The same with these keys only. Raises `UsageError` for one that is not there."""
        wanted = list(keys)
        absent = [key for key in wanted if key not in self.seqlens]
        if absent:
            raise UsageError(
                f"a sample has no key {absent[0]!r}", f"it has: {', '.join(self.keys) or 'none'}"
            )
        return self._with({key: key for key in wanted})

    def remap(self, names: Mapping[str, str]) -> SequenceSample:
        """The same with other names for its keys; those that are not in `names` stay. Raises `UsageError` if two get
        one name."""
        found = {names.get(key, key): key for key in self.keys}
        if len(found) != len(self.keys):
            raise UsageError(
                f"keys {', '.join(self.keys)} renamed by {dict(names)} meet", "give each its own"
            )
        return self._with(found)

    def _with(self, old: Mapping[str, str]) -> SequenceSample:
        """With the keys `old`, by their new names."""

        def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
            return {new: values[key] for new, key in old.items()}

        data = None if self.data is None else renamed(self.data)
        return SequenceSample(
            self.ids, renamed(self.seqlens), renamed(self.dtypes), renamed(self.trailing), data, self.metadata
        )

    def update(self, other: SequenceSample) -> SequenceSample:
        """The same with the keys of `other` too, which has the same ids, in any order. `other` replaces equal keys."""
        if set(other.ids) != set(self.ids):
            raise UsageError("samples with other ids are put together", "both have the same ids")
        if other.ids != self.ids:
            place = {each: at for at, each in enumerate(other.ids)}
            other = other.reorder([place[each] for each in self.ids])
        both = self.data is not None and other.data is not None
        return SequenceSample(
            self.ids,
            {**self.seqlens, **other.seqlens},
            {**self.dtypes, **other.dtypes},
            {**self.trailing, **other.trailing},
            {**(self.data or {}), **(other.data or {})} if both else None,
            {**self.metadata, **other.metadata},
        )

    def to(self, device: torch.device) -> SequenceSample:
        """The same with its tensors on this device."""
        data = None if self.data is None else {key: tensor.to(device) for key, tensor in self.data.items()}
        return SequenceSample(self.ids, self.seqlens, self.dtypes, self.trailing, data, self.metadata)

    def reorder(self, places: Sequence[int]) -> SequenceSample:
        """The ids at these places, in this order: all, or some of them."""
        return self._parts([places])[0]

    def unpack(self) -> list[SequenceSample]:
        """A sample for each id."""
        return self._parts([[at] for at in range(len(self))])

    def _parts(self, many: Sequence[Sequence[int]]) -> list[SequenceSample]:
        """For each list of places a sample of the ids there."""
        tensors = self.data or {}
        split = {key: tensor.split(self.sizes(key)) for key, tensor in tensors.items()}
        return [
            SequenceSample(
                tuple(self.ids[at] for at in places),
                {key: [lengths[at] for at in places] for key, lengths in self.seqlens.items()},
                self.dtypes,
                self.trailing,
                None
                if self.data is None
                else {
                    key: torch.cat([parts[at] for at in places]) if places else tensors[key][:0]
                    for key, parts in split.items()
                },
                {key: [values[at] for at in places] for key, values in self.metadata.items()},
            )
            for places in many
        ]

    @staticmethod
    def gather(samples: Sequence[SequenceSample]) -> SequenceSample:
        """All ids of these samples in one, in their order. They have the same keys. Raises `UsageError` otherwise."""
        if not samples:
            raise UsageError("no samples are gathered", "give one at least")
        first = samples[0]
        for other in samples[1:]:
            if (other.dtypes, other.trailing) != (first.dtypes, first.trailing):
                raise UsageError(
                    f"samples differ in keys, dtypes or shapes: {dict(first.dtypes)} and {dict(other.dtypes)}",
                    "gather samples of one kind",
                )
        data = None
        if all(each.data is not None for each in samples):
            data = {key: torch.cat([each[key] for each in samples]) for key in first.keys}
        return SequenceSample(
            tuple(each for sample in samples for each in sample.ids),
            {key: [lengths for each in samples for lengths in each.seqlens[key]] for key in first.keys},
            first.dtypes,
            first.trailing,
            data,
            {
                key: [value for each in samples for value in each.metadata[key]]
                for key in first.metadata
                if all(key in each.metadata for each in samples)
            },
        )

    def split(self, spec: MicroBatchSpec, padded: str = "") -> list[tuple[SequenceSample, list[int]]]:
        """Micro-batches, each with the places of its ids here: by tokens (`micro_batches`), or by the lengths of the
        sequences of the key `padded` (`padded_micro_batches`)."""
        if padded:
            parts = padded_micro_batches(self.seqlens[padded], spec.n_mbs, spec.max_tokens_per_mb)
        else:
            parts = micro_batches(self.sizes(self.largest()), spec.n_mbs, spec.max_tokens_per_mb)
        return list(zip(self._parts(parts), parts, strict=True))


# `NamedArray`: tensors by name, nested, that are sliced together and sent as they are.

Leaf = torch.Tensor


class NamedArray(Mapping[str, Any]):
    """Tensors by name; a value may be a `NamedArray` again, or None where there is nothing.

    ``array[2:5]`` slices every tensor, ``array["obs"]`` and ``array.obs`` are one of them. `metadata` are more values
    by name, any that JSON has. Every dtype is kept, also when it is sent. ::

        array = NamedArray.from_dict({"obs": {"image": image, "text": text}, "reward": reward}, step=3)
    """

    def __init__(self, values: Mapping[str, Any] | None = None, /, **metadata: Any) -> None:
        self._values: dict[str, Leaf | NamedArray | None] = {}
        self.metadata = metadata
        for name, value in (values or {}).items():
            if not name or "." in name or name in ("metadata", "_values") or hasattr(NamedArray, name):
                raise UsageError(
                    f"{name!r} is no name for an array", "no dots, and no name that NamedArray has"
                )
            if isinstance(value, np.ndarray):
                value = torch.from_numpy(value)
            if not isinstance(value, Leaf | NamedArray | None):
                raise UsageError(f"{name} is a {type(value).__name__}", "give tensors, arrays or None")
            self._values[name] = value

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], /, **metadata: Any) -> NamedArray:
        """The same of nested dicts."""
        return cls(
            {n: cls.from_dict(v) if isinstance(v, Mapping) else v for n, v in values.items()}, **metadata
        )

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts."""
        return {n: v.to_dict() if isinstance(v, NamedArray) else v for n, v in self._values.items()}

    def __getitem__(self, key: Any) -> Any:
        """The value of a name; for anything else, that part of every tensor."""
        if isinstance(key, str):
            return self._values[key]
        return self.apply(lambda tensor: tensor[key])

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"NamedArray has no {name!r}; it has: {', '.join(values) or 'none'}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def apply(self, function: Callable[[Leaf], Leaf]) -> NamedArray:
        """The same with `function` of each tensor."""
        found = {
            name: value.apply(function)
            if isinstance(value, NamedArray)
            else value
            if value is None
            else function(value)
            for name, value in self._values.items()
        }
        return NamedArray(found, **self.metadata)

    def flat(self, prefix: str = "") -> dict[str, Leaf | None]:
        """All tensors by their paths, ``obs.image``."""
        found: dict[str, Leaf | None] = {}
        for name, value in self._values.items():
            if isinstance(value, NamedArray):
                found |= value.flat(f"{prefix}{name}.")
            else:
                found[prefix + name] = value
        return found

    def __repr__(self) -> str:
        shown = {n: "None" if t is None else f"{t.dtype}{list(t.shape)}" for n, t in self.flat().items()}
        return f"NamedArray({shown})"
