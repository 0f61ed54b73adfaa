"""The invariants of views: changes that are put together give the whole view, for agents and for their workers."""

from __future__ import annotations

from msgspec.structs import replace

from unirun.failover.draft import whole_view
from unirun.failover.state import JobState
from unirun.wire.messages import View, updated


class ViewChecks:
    """The whole views of which masters have told the changes, by the term of the master and their number."""

    def __init__(self) -> None:
        self._whole: dict[tuple[int, int], View] = {}

    def told(self, epoch: int, before: JobState, after: JobState) -> None:
        """A master has taken a step, in which it has told a view, perhaps."""
        if after.told is not None and after.told is not before.told:
            view = told_view(after)
            known = self._whole.setdefault((epoch, view.number), view)
            assert known == view, f"two views of term {epoch} have the number {view.number}"

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
