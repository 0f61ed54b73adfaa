"""The tensors that a receiver has of one version: mapped memory of a publisher, or parts that were sent to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from unirun.weights.layout import Box, Layout, Part, Piece, ReadItem
from unirun.weights.packing import DeviceInterface, Packing
from unirun.weights.tensors import part_of


class Copy(Protocol):
    """Pieces of tensors, all of one version."""

    @property
    def layout(self) -> Layout:
        """The pieces."""

    def view(self, name: str, box: Box) -> torch.Tensor:
        """The elements of `box`. Raises KeyError or ValueError when they are not in one piece here."""


class Mapped:
    """A block of a publisher on this host. It stays mapped, and is read again when it has another version.

    Memory of a device is borrowed for one version.
    """

    def __init__(self, packing: Packing, memory: torch.Tensor, device: DeviceInterface | None = None) -> None:
        self._packing, self._memory, self._device = packing, memory, device
        self._takes: Sequence[ReadItem] = ()
        self._views: list[torch.Tensor] = []

    @property
    def layout(self) -> Layout:
        """All that the publisher has."""
        return self._packing.layout

    def view(self, name: str, box: Box) -> torch.Tensor:
        """The elements of `box`."""
        return self._packing.view(self._memory, name, box)

    def views(self, takes: Sequence[ReadItem]) -> list[torch.Tensor]:
        """The elements of each take. A receiver asks for the same ones of every version."""
        if self._takes is not takes:
            self._takes, self._views = takes, [self.view(take.name, take.box) for take in takes]
        return self._views

    @property
    def borrowed(self) -> bool:
        """True if it is memory of a device, and so has to be given back."""
        return self._device is not None

    def end(self) -> None:
        """Give memory of a device back."""
        device, self._device = self._device, None
        if device is not None:
            device.end(self._memory)


class Sent:
    """Parts in memory of this process."""

    def __init__(
        self,
        wanted: Layout,
        takes: Sequence[ReadItem],
        tensors: Sequence[torch.Tensor],
        own: Collection[ReadItem] = (),
    ) -> None:
        """`takes` of `wanted`, and the `tensors` that came. Those of `own` have memory of their own; the others came in
        frames, and each keeps all of its frame."""
        self._wanted, self.own = wanted, frozenset(own)
        self._parts: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for take, tensor in zip(takes, tensors, strict=True):
            self._parts.setdefault(take.name, []).append((take.box, tensor))

    @property
    def layout(self) -> Layout:
        """The parts."""
        return {
            name: Part(self._wanted[name].tensor, tuple(_piece(box) for box, _ in parts))
            for name, parts in self._parts.items()
        }

    def kept(self, take: ReadItem) -> torch.Tensor:
        """The same elements, without the frame that they came in."""
        found = self.view(take.name, take.box)
        return found if take in self.own else found.clone()

    def view(self, name: str, box: Box) -> torch.Tensor:
        """The elements of `box`."""
        about = self._wanted[name].tensor
        for whole, tensor in self._parts[name]:
            if whole.meet(box) == box:
                return part_of(tensor, Part(about, (_piece(whole),)), box)
        raise ValueError(f"{box} of {name} is not in one part")


def _piece(box: Box) -> Piece:
    return Piece(box, (0,) * len(box.start))
