"""`RowCache`: keys and values of rows of different lengths, in which a row is replaced while the others stay.

It is a `DynamicCache` of transformers, as each family of networks needs its own kinds of layers. All rows end at the
same column, where each step adds one. A row that joins is written so that it ends there too, and what is before it is
hidden by the mask. Its positions are its own, so columns mean nothing to the network.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def left_padded(
    sequences: Sequence[torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, mask and positions ``[rows, length]`` of sequences that all end in the last column. Padding is hidden."""
    length = max(map(len, sequences))
    tokens = torch.zeros(len(sequences), length, dtype=torch.long)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[length - len(sequence) :] = sequence
    mask = mask_of([len(sequence) for sequence in sequences], length)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return tokens.to(device), mask.to(device), positions.to(device)


def mask_of(lengths: Sequence[int], columns: int) -> torch.Tensor:
    """1 in the last columns of each row, as many as it is long; 0 before them."""
    return (torch.arange(columns) >= columns - torch.tensor(lengths)[:, None]).long()


_COLUMNS = {"keys": (0, -2), "values": (0, -2), "indexer_keys": (0, 1), "indexer_position_ids": (1, 2)}
"""The tensors of a layer that have a column for each token, and their dimensions of rows and of columns."""

_STATES = ("conv_states", "recurrent_states")
"""The states of a layer of linear attention, by number. They have rows, and no columns."""

_Tensors = Iterator[tuple[MutableMapping[Any, Any], Any, int, int | None]]


def _tensors(layer: Any) -> _Tensors:
    """The tensors of a layer: where each is, its dimension of rows, and its dimension of columns if it has one."""
    own = vars(layer)
    for name, (rows, columns) in _COLUMNS.items():
        if own.get(name) is not None and own[name].numel():
            yield own, name, rows, columns
    for name in _STATES:
        for number, state in own.get(name, {}).items():
            if state is not None:
                yield own[name], number, 0, None


class _RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """The keys and values of a layer in memory with room for more columns: the layers of transformers copy all that
    they have in each step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rooms: dict[str, torch.Tensor] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add columns, and return all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._with("keys", self.keys, key_states)
        self.values = self._with("values", self.values, value_states)
        return self.keys, self.values

    def _with(self, name: str, old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        if old is None or not old.numel():
            return new
        room, length = self._rooms.get(name), old.shape[-2] + new.shape[-2]
        if room is not None and room.untyped_storage().data_ptr() == old.untyped_storage().data_ptr():
            end = old.storage_offset() // old.stride(-2) + length
        else:
            end = 0
        if room is None or not 0 < end <= room.shape[-2]:
            end = length
            room = self._rooms[name] = old.new_empty((*old.shape[:-2], 2 * length, old.shape[-1]))
            room[..., : old.shape[-2], :] = old
        room[..., end - new.shape[-2] : end, :] = new
        return room.narrow(-2, end - length, length)


class RowCache:
    """A cache of `rows` rows, which `join` fills. `layers` is what the network uses."""

    def __init__(self, config: Any, rows: int) -> None:
        """`config` is that of the network."""
        self._config, self._rows = config, rows
        self.layers = DynamicCache(config=config)
        self.layers.layers = [
            _RoomyLayer() if type(each) is DynamicLayer else each for each in self.layers.layers
        ]
        self.length = 0
        """Columns of the longest row; a step adds one, and its caller counts it."""

    def join(self, places: Sequence[int], other: RowCache) -> None:
        """Put the rows of another cache in these places."""
        if not self.length:
            # Places that are still empty get any row, which the mask hides.
            chosen = torch.zeros(self._rows, dtype=torch.long)
            chosen[list(places)] = torch.arange(len(places))
            self.layers, self.length = other.layers, other.length
            self._select(chosen)
            return
        if other.length > self.length:
            self._lengthen(other.length - self.length)
        for own, its in zip(self.layers.layers, other.layers.layers, strict=True):
            for (into, name, rows, columns), (source, _, _, _) in zip(
                _tensors(own), _tensors(its), strict=True
            ):
                theirs = source[name]
                target = into[name].movedim(rows, 0)
                index = torch.tensor(places, device=target.device)
                if columns is None:
                    target[index] = theirs
                    continue
                # Layers with a sliding window have the last columns only.
                count = min(theirs.shape[columns], into[name].shape[columns])
                at = [slice(None)] * theirs.dim()
                at[columns] = slice(theirs.shape[columns] - count, None)
                part = theirs[tuple(at)].movedim(rows, 0)
                at[columns] = slice(into[name].shape[columns] - count, None)
                into[name][tuple(at)].movedim(rows, 0)[index] = part

    @property
    def shifts(self) -> bool:
        """True if rows can be shifted: all layers have a column for each token, and no states."""
        return all(type(each) is _RoomyLayer for each in self.layers.layers)

    def shift(self, place: int, length: int, count: int) -> None:
        """Move a row of this length by so many columns, to the last one."""
        for layer in self.layers.layers:
            for into, name, rows, columns in _tensors(layer):
                assert columns is not None
                row = into[name].select(rows, place)
                begin = row.shape[columns] - length
                row.narrow(columns, begin, length).copy_(row.narrow(columns, begin - count, length).clone())

    def keep(self, places: Sequence[int]) -> None:
        """Keep these rows alone, in this order."""
        self._rows = len(places)
        self._select(torch.tensor(places))

    def _select(self, chosen: torch.Tensor) -> None:
        for layer in self.layers.layers:
            for into, name, rows, _ in _tensors(layer):
                into[name] = into[name].index_select(rows, chosen.to(into[name].device))

    def _lengthen(self, count: int) -> None:
        """Add columns on the left."""
        self.length += count
        for layer in self.layers.layers:
            most = _window(layer, self.length, count)
            for into, name, _, columns in _tensors(layer):
                if columns is not None:
                    tensor = into[name]
                    shape = [*tensor.shape]
                    shape[columns] = min(count, most - shape[columns])
                    into[name] = torch.cat([tensor.new_zeros(shape), tensor], columns)

    def trim(self, longest: int) -> None:
        """Drop the columns on the left that no row needs, as the longest one has so many."""
        count = self.length - longest
        if count <= 0:
            return
        self.length = longest
        for layer in self.layers.layers:
            most = _window(layer, longest, -count)
            for into, name, _, columns in _tensors(layer):
                if columns is not None:
                    tensor = into[name]
                    kept = min(tensor.shape[columns], most)
                    into[name] = tensor.narrow(columns, tensor.shape[columns] - kept, kept)


def _window(layer: Any, length: int, change: int) -> int:
    """The columns that a layer has of so many; their number has changed by `change`."""
    if not hasattr(layer, "cumulative_length"):
        return length
    if layer.is_initialized:
        layer.cumulative_length += change
    return min(length, int(layer.sliding_window) - 1)
