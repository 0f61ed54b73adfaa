"""What a caller keeps of its open calls, and of the workers that it has called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unirun.errors import UsageError, WorkerLost
from unirun.roles.calls.counting import Count
from unirun.roles.calls.policy import RANK0, Invocation
from unirun.roles.calls.refs import InvocationRef
from unirun.roles.calls.service import Deadlines
from unirun.roles.transport.protocol import Parcel

if TYPE_CHECKING:
    from unirun.roles.calls.peer import Peer


@dataclass(eq=False, slots=True)
class Method:
    """A method of some ranks of a role: what is the same in each of its calls.

    `workers` are their names. When it `chooses`, each call goes to one of them, else to all; `turns` has for each rank
    when it was chosen last, as a count.
    """

    role: str
    name: str
    options: Invocation
    ranks: Sequence[int]
    workers: tuple[str, ...]
    bare: bool
    chooses: bool
    deadlines: Deadlines[Invoked]
    wire: bytes
    count: Count
    turns: dict[int, int]


@dataclass(eq=False, slots=True)
class Call:
    """One worker's part of an invocation. `generation` is that of the role for which it was sent."""

    invocation: Invoked
    index: int
    rank: int
    seq: int = 0
    generation: int = 0
    peer: Peer | None = None


@dataclass(eq=False, slots=True)
class Invoked:
    """An invocation that is under way since `began`, on the service's clock.

    `parcels`: one for all calls, or one for each. `joint`: it has several calls, which all run in one generation of the
    role; `generation` is that one, None until the first of them is sent. `untold`: a worker whose loss the invocation
    tells instead of being sent. `patience`: how many seconds its caller will do nothing but wait for its only call, as
    long as that was not sent.
    """

    ref: InvocationRef[Any]
    method: Method
    parcels: Sequence[Parcel]
    retries: int
    began: float
    joint: bool = False
    generation: int | None = None
    untold: str = ""
    calls: list[Call] = field(default_factory=list)
    failing: bool = False
    attempt: int = 0
    patience: float | None = None

    @property
    def ranks(self) -> list[int]:
        """Those that it calls."""
        return [call.rank for call in self.calls]

    def parcel(self, index: int) -> Parcel:
        """What the call at `index` sends."""
        return self.parcels[index if len(self.parcels) > 1 else 0]

    def untie(self) -> None:
        """Calls and their invocation name each other, and the ref has the results: so that their memory is free as soon
        as the user lets go of it, and not when Python looks for circles."""
        self.calls.clear()


def called_ranks(role: str, size: int, options: Invocation, ranks: Sequence[int] | None) -> Sequence[int]:
    """Who may be called of a role with `size` ranks: `ranks` come before the target in `options`.

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


def lost(worker: str, reason: str, remedy: str = "") -> WorkerLost:
    """The error of a call whose worker is gone."""
    return WorkerLost(
        f"{worker} was lost before it answered: {reason}",
        remedy or "mark the method idempotent=True to have it called again",
        worker=worker,
    )
