"""Where workers are, as a caller sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from unirun.roles.transport.protocol import Address


@dataclass(frozen=True, slots=True)
class Place:
    """The worker that holds a rank now. `endpoint` is empty unless it serves; `over`: it will not serve any more.
    `generation` is that of its role's process group, and `whole` says whether no rank of the role is without a worker.
    """

    address: Address
    endpoint: str = ""
    generation: int = 0
    gone: bool = False
    over: bool = False
    whole: bool = True


class Directory(Protocol):
    """Tells where workers are, and when that changes."""

    def size(self, role: str) -> int:
        """How many ranks a role has. Raises `UsageError` when there is no such role."""

    def find(self, role: str, rank: int) -> Place:
        """The worker that holds a rank now."""

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change, in some thread; it must return soon."""
