"""The companion as a worker of its role."""

from __future__ import annotations

from unirun.roles.peers import Peers, RoleInfo
from unirun.weights.companion.__main__ import follow
from unirun.wire.messages import RoleView, View, WorkerView
from unirun.wire.reports import GroupFormed, Message


def test_each_generation_of_its_role_is_formed_once_however_often_something_else_changes() -> None:
    told: list[Message] = []
    peers = Peers("weights", 0, {"weights": RoleInfo("weights", 1, 0)}, send=told.append)
    peers.when_changed(lambda: follow(peers))
    follow(peers)
    assert told == []
    for generation in (0, 1, 1, 3, 3):
        worker = WorkerView(0, generation, "serving", {})
        peers.update(View((RoleView("weights", 1, generation, "", "running", (worker,)),)))
        peers.found(())
    assert told == [GroupFormed(1), GroupFormed(3)]
    assert peers.generation == 3
