"""`Value`, the base class of small frozen values; and `WorkerId`, the value that every room speaks of."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple, dataclass_transform

import msgspec


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A frozen value with slots, equal to others of its class by its fields. It is written as a frozen dataclass is.

    To create such a class takes a twentieth of what a dataclass takes, and a command creates two hundred of them before
    it does anything. msgspec makes values from JSON and checks each field (`unirun.wire.frames`).

    The garbage collector does not track values of values, which are no part of a cycle: a master may have a hundred
    thousand, and each full collection would hold it up. A class whose values have other objects says
    ``gc=True``: a cycle through a value that is not tracked is never freed.
    """


class WorkerId(NamedTuple):
    """The worker that holds `rank` of `role`; each restart of the rank has the next `incarnation`, the first one has 0.

    Printed as ``actor:2``.
    """

    role: str
    rank: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.role}:{self.rank}"

    @property
    def before(self) -> WorkerId | None:
        """The worker that held the rank before, None when this is the first one."""
        return self._replace(incarnation=self.incarnation - 1) if self.incarnation > 0 else None


class Engine(Value):
    """A server of a job that is `ready` or not, at `url` (``http://10.0.0.5:20001``). One that was restarted is
    another."""

    rank: int
    incarnation: int
    url: str
    ready: bool


class RankAddress(Value):
    """The address of one rank: its `host`, and the ports that it was given, in the order of their names in the spec."""

    host: str
    ports: tuple[int, ...] = ()

    def addr(self, number: int = 0) -> str:
        """``host:port`` of a port, with an IPv6 address in brackets; the host alone when the rank has no port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.ports[number]}" if self.ports else self.host


def split_endpoint(text: str) -> tuple[str, int]:
    """Split ``addr:port`` or ``[v6]:port``. Raises ValueError."""
    addr, _, port = text.rpartition(":")
    return addr.removeprefix("[").removesuffix("]"), int(port)


def natural(text: str) -> int | None:
    """The number that `text` has in at most 18 decimal digits; None for any other text. `int` alone reads digits of all
    scripts, signs, blanks and underscores, and raises ValueError for text that is too long."""
    return int(text) if len(text) <= 18 and text.isascii() and text.isdecimal() else None


def show_ranks(ranks: Iterable[int]) -> str:
    """Ascending `ranks` as people write them: ``0-3,7``."""
    runs = []
    for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        numbers = [rank for _, rank in run]
        runs.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}")
    return ",".join(runs)
