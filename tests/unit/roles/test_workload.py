"""`BaseWorkload`: who a worker is, by the names of DLRover's guide."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from unirun.roles import BaseWorkload, MasterHandle, Workload
from unirun.roles.calls.policy import invocations
from unirun.roles.context import Context
from unirun.roles.peers import Peers, RoleInfo
from unirun.wire.messages import View, Welcome


def workload(role: str = "actor", collocation: str = "") -> BaseWorkload:
    """Rank 5 of 8, the second one on its node."""
    shared = (tuple(collocation.lower().split(",")),) if collocation else ()
    welcome = Welcome(View(()), "{}", "job", (), shared, 60.0, "socket")
    peers = Peers(role, 5, {role: RoleInfo(role, 8, 0)}, welcome=welcome)
    context = Context({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, peers)
    return BaseWorkload(MasterHandle(context), OmegaConf.create({"lr": 0.5}))


def test_a_workload_has_every_property_of_dlrovers_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29400")
    found = workload()
    assert found.name == "actor:5"
    assert (found.role, found.rank, found.world_size, found.word_size) == ("actor", 5, 8, 8)
    assert (found.local_rank, found.local_world_size) == (1, 4)
    assert (found.torch_master_addr, found.torch_master_port) == ("10.0.0.1", 29400)
    assert found.config.lr == 0.5


@pytest.mark.parametrize(
    ("role", "is_actor"), [("actor", True), ("ACTOR", True), ("critic", False), ("actor2", False)]
)
def test_a_workload_knows_whether_its_role_is_actor(role: str, is_actor: bool) -> None:
    assert workload(role).is_actor_role() is is_actor


def test_a_workload_knows_the_roles_that_share_its_devices() -> None:
    assert workload().get_device_collocation() == ""
    assert workload(collocation="ACTOR,ROLLOUT").get_device_collocation() == "ACTOR,ROLLOUT"


def test_of_what_belongs_to_every_workload_trainers_call_only_the_sync_of_weights() -> None:
    assert set(invocations(workload())) == {"sync_weights"}
    assert Workload is BaseWorkload


def test_a_workload_without_methods_can_be_set_up_and_torn_down() -> None:
    found = workload()
    found.setup()
    found.on_generation(3)
    found.teardown()
