"""Views, by which workers know the state of their peers, are kept up to date by differences.

The master numbers its views. An agent first gets a whole view, then only the changes since the previous view. It
forwards views to its workers unchanged. A receiver that sees a gap in the numbers requests a whole view. A whole view
omits workers that are still in their initial state.
"""

from __future__ import annotations

from msgspec.structs import replace

from unirun.wire.messages import RoleView, View, WorkerView

FIRST: tuple[int, str, dict[str, str], None] = (0, "starting", {}, None)
"""The initial state of a worker: incarnation, phase, addresses, no place."""


def updated(view: View | None, news: View) -> View | None:
    """Apply `news` to `view`. Returns the view with all workers, None when there is a gap between the two."""
    if news.since is None:
        return View(tuple(_updated((), role) for role in news.roles), news.number)
    if view is None or view.number != news.since:
        return None
    changed = {role.name: role for role in news.roles}
    roles = (
        _updated(role.workers, changed[role.name]) if role.name in changed else role for role in view.roles
    )
    return View(tuple(roles), news.number)


def _updated(before: tuple[WorkerView, ...], news: RoleView) -> RoleView:
    if len(before) == news.world_size and not news.workers:
        return replace(news, workers=before)
    workers = list(before[: news.world_size])
    workers += (WorkerView(rank, *FIRST) for rank in range(len(workers), news.world_size))
    for worker in news.workers:
        workers[worker.rank] = worker
    return replace(news, workers=tuple(workers))


def whole(view: View) -> View:
    """Return `view`, which has all workers, without those in their initial state."""
    return replace(view, roles=tuple(_brief(role) for role in view.roles))


def _brief(role: RoleView) -> RoleView:
    changed = (w for w in role.workers if (w.incarnation, w.phase, w.addresses, w.place) != FIRST)
    return replace(role, workers=tuple(changed))
