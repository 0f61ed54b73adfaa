"""What workers know of each other, and how it is kept up to date by differences.

The master numbers its views. At first, and whenever one asks, an agent gets a whole view; after that each view has only
what has changed since the one before. An agent passes views on to its workers as they come. Who finds that a view does
not follow on its own asks for a whole one. A whole view leaves out workers that stand as at the beginning.
"""

from __future__ import annotations

from msgspec.structs import replace

from unirun.wire.messages import RoleView, View, WorkerView

FIRST: tuple[int, str, dict[str, str]] = (0, "starting", {})
"""The fields of a worker at the beginning, besides its rank."""


def updated(view: View | None, news: View) -> View | None:
    """The view that `view` is after `news`, with all workers.

    None when `news` does not follow on `view`: a whole one is needed.
    """
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
    """`view`, which has all workers, as it is sent."""
    return replace(view, roles=tuple(_brief(role) for role in view.roles))


def _brief(role: RoleView) -> RoleView:
    return replace(
        role, workers=tuple(w for w in role.workers if (w.incarnation, w.phase, w.addresses) != FIRST)
    )
