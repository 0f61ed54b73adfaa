"""The invariants of views: changes that are put together give the whole view, for agents and for their workers; and no
successor of a worker joins a generation in which callers may have called that one."""

from __future__ import annotations

from msgspec.structs import replace

from unirun.failover.draft import whole_view
from unirun.failover.state import JobState
from unirun.wire.messages import StartRole, View, updated


class ViewChecks:
    """The whole views of which masters have told the changes, by the term of the master and their number."""

    def __init__(self) -> None:
        self._whole: dict[tuple[int, int], View] = {}
        # The incarnations that others may have called, by role, generation and rank.
        self._called: dict[tuple[str, int, int], int] = {}

    def told(self, epoch: int, before: JobState, after: JobState) -> None:
        """A master has taken a step, in which it has told a view, perhaps."""
        if after.told is not None and after.told is not before.told:
            view = told_view(after)
            known = self._whole.setdefault((epoch, view.number), view)
            assert known == view, f"two views of term {epoch} have the number {view.number}"

    def sent(self, epoch: int, number: int, transport: str) -> None:
        """A master sends a view: callers learn from it which workers take calls, and in which generation."""
        view = self._whole.get((epoch, number))
        for role in view.roles if view is not None else ():
            for worker in role.workers:
                if transport in worker.addresses:
                    self._called[role.name, role.generation, worker.rank] = worker.incarnation

    def started(self, order: StartRole) -> None:
        """Ranks are started: no call waits in their generation for the workers before them."""
        for rank, incarnation in ((each.rank, each.incarnation) for each in order.members):
            called = self._called.get((order.role, order.generation, rank), incarnation)
            assert called == incarnation, (
                f"{order.role}:{rank} starts in generation {order.generation}, in which {called} may be called"
            )

    def seen(self, who: str, epoch: int, view: View) -> None:
        """A simulated agent or worker has applied a view of a master."""
        whole = self._whole.get((epoch, view.number))
        # A step may tell twice; what it has told first is in no state.
        assert whole is None or view == whole, f"{who} sees {view}, and should see {whole}"


def told_view(state: JobState) -> View:
    """The view that was told last, as a whole."""
    told = state.told
    assert told is not None
    view = updated(None, whole_view(replace(state, roles=told.roles), told.number))
    assert view is not None
    roles = (replace(role, endpoint=told.endpoints[role.name]) for role in view.roles)
    return replace(view, roles=tuple(roles))
