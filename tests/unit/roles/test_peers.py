"""Where callers find workers, also when a role has become smaller."""

from __future__ import annotations

import pytest

from unirun.errors import UsageError
from unirun.roles.peers import Peers, RoleInfo
from unirun.wire.messages import RoleBrief, RoleView, View, Welcome, WorkerView


def role(ranks: int, generation: int) -> RoleView:
    workers = tuple(WorkerView(n, generation, "serving", {"torch": f"at {n}"}) for n in range(ranks))
    return RoleView("actor", ranks, generation, "h:1", "running", workers)


@pytest.fixture
def peers() -> Peers:
    """Of a job whose three actors have become two."""
    briefs = (RoleBrief("actor", "script", "a.py", 3, None, "role"),)
    welcome = Welcome(View((role(3, 0),)), "{}", "job", briefs, (), 60.0, "torch")
    found = Peers("actor", 0, {"actor": RoleInfo("actor", 3, 0, "h:1")}, welcome=welcome)
    found.update(View((role(2, 1),)))
    return found


def test_a_rank_that_a_smaller_role_has_no_more_is_over(peers: Peers) -> None:
    assert peers.size("actor") == 2
    assert [peers.find("actor", rank).over for rank in range(3)] == [False, False, True]
    assert peers.find("actor", 1).endpoint == "at 1"


def test_a_rank_that_never_was_is_a_mistake(peers: Peers) -> None:
    with pytest.raises(UsageError, match="role actor has no rank 3"):
        peers.find("actor", 3)


def test_what_a_role_has_had_is_known_to_processes_that_come_later(peers: Peers) -> None:
    assert (peers.count("actor"), peers.known("actor").world_size) == (3, 2)
