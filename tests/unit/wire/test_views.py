"""Views are sent as changes and restored by the receiver."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unirun.wire.messages import FIRST, RoleView, View, WorkerView, updated, whole

seen = st.tuples(
    st.integers(0, 2), st.sampled_from(["starting", "serving"]), st.sampled_from([{}, {"socket": "a"}])
)
roles = st.lists(seen, max_size=5).map(
    lambda workers: RoleView(
        "actor", len(workers), 0, "a:1", "running", tuple(WorkerView(n, *w) for n, w in enumerate(workers))
    )
)


def changes(before: RoleView, after: RoleView) -> RoleView:
    """`after` with only the workers that differ from those of `before`."""
    changed = tuple(w for w in after.workers if w not in before.workers[w.rank : w.rank + 1])
    return RoleView(after.name, after.world_size, after.generation, after.endpoint, after.phase, changed)


@given(roles)
def test_a_whole_view_omits_workers_in_their_initial_state_and_is_restored(role: RoleView) -> None:
    view = View((role,), 3)
    sent = whole(view)
    assert all((w.incarnation, w.phase, w.addresses, w.place) != FIRST for w in sent.roles[0].workers)
    assert updated(None, sent) == view
    assert updated(View((), 7), sent) == view


@given(roles, roles)
def test_view_changes_applied_to_a_role_give_its_next_view_also_after_a_resize(
    before: RoleView, after: RoleView
) -> None:
    other = RoleView("critic", 0, 4, "b:1", "starting", ())
    news = View((changes(before, after),), 4, 3)
    assert updated(View((before, other), 3), news) == View((after, other), 4)


@given(roles, st.integers(0, 5), st.none() | st.integers(0, 5))
def test_view_changes_after_a_gap_are_not_applied(role: RoleView, since: int, number: int | None) -> None:
    view = None if number is None else View((role,), number)
    result = updated(view, View((), since + 1, since))
    assert (result is None) == (number != since)
