"""`BaseTrainer`: role groups by name, and what it says before it is bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from unirun.errors import UsageError
from unirun.roles import BaseTrainer, MasterHandle, RoleGroup
from unirun.roles.calls.caller import Caller
from unirun.roles.calls.group import role_group
from unirun.roles.context import Context
from unirun.roles.inprocess import InprocTransport
from unirun.roles.peers import Peer, Peers, RoleInfo
from unirun.roles.workload import SYNC_ANSWER_TIMEOUT, bind, group_name
from unirun.values import WorkerId


class Nobody(Peers):
    """A directory of workers that never come."""

    def __init__(self) -> None:
        """It holds nothing."""

    def size(self, role: str) -> int:
        """Two of each."""
        return 2

    def find(self, role: str, rank: int) -> Peer:
        """Nowhere."""
        return Peer(WorkerId(role, rank, 0))

    def view(self, role: str) -> None:
        """There are no views: roles do not grow."""

    def when_changed(self, listener: Any) -> None:
        """Never."""


def groups_of(*roles: str) -> dict[str, RoleGroup]:
    """Groups of roles that nobody plays."""
    caller = Caller(WorkerId("trainer", 0, 0), Nobody(), InprocTransport(), call_timeout=10)
    return {role: role_group(caller, role, 2) for role in roles}


def handle() -> MasterHandle:
    """The job of a trainer without a launcher."""
    return MasterHandle(Context({}, Peers("trainer", 0, {"trainer": RoleInfo("trainer", 1, 0)})))


def bound(
    trainer: BaseTrainer,
    *roles: str,
    resources: Mapping[str, dict[str, Any]] | None = None,
    channels: Mapping[str, tuple[str, ...]] | None = None,
) -> BaseTrainer:
    """A trainer with groups of these roles."""
    bind(trainer, groups_of(*roles), handle(), resources or {}, channels or {})
    return trainer


def made(kind: type[BaseTrainer] = BaseTrainer) -> BaseTrainer:
    """A trainer that is not bound yet."""
    return kind({}, {}, OmegaConf.create({"lr": 0.1, "model": {"layers": 2}}))


@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("actor", "RG_ACTOR"),
        ("R0", "RG_R0"),
        ("udf_1", "RG_UDF_1"),
        ("my-role", "RG_MY_ROLE"),
        ("Größe", "RG_GR__E"),
    ],
)
def test_a_role_gives_its_group_a_name(role: str, name: str) -> None:
    assert group_name(role) == name


def test_each_role_stands_on_the_trainer_as_a_group() -> None:
    trainer = bound(made(), "actor", "reward-model")
    assert trainer.get_role_groups() == ["RG_ACTOR", "RG_REWARD_MODEL"]
    assert trainer.RG_ACTOR.role == "actor"
    assert len(trainer.RG_REWARD_MODEL) == 2


def test_two_roles_that_give_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="roles a-b and a_b both give RG_A_B; rename one of them"):
        bound(made(), "a-b", "a_b", "c")


def test_an_unknown_role_group_is_an_error_with_the_known_ones() -> None:
    trainer = bound(made(), "actor", "critic")
    with pytest.raises(
        AttributeError, match="there is no role group RG_ACTRO; there are: RG_ACTOR, RG_CRITIC"
    ):
        trainer.RG_ACTRO  # noqa: B018
    with pytest.raises(AttributeError, match="'BaseTrainer' object has no attribute 'stepp'"):
        trainer.stepp  # noqa: B018


def test_role_groups_are_missing_in_the_trainers_constructor() -> None:
    class Eager(BaseTrainer):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.group = self.RG_ACTOR

    class Asking(BaseTrainer):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.master_handle.report({})

    with pytest.raises(AttributeError, match="none before __init__ has returned"):
        made(Eager)
    with pytest.raises(UsageError, match=r"not bound to a job yet; use it in init\(\) or fit\(\)"):
        made(Asking)


def test_a_trainer_has_the_jobs_config() -> None:
    trainer = made()
    assert trainer.config.model.layers == 2
    assert (trainer.actor_handles, trainer.actor_classes) == ({}, {})


def test_an_undeclared_channel_of_weights_is_an_error_with_the_declared_ones() -> None:
    trainer = bound(made(), "actor", "rollout", channels={"policy": ("actor", "rollout")})
    with pytest.raises(UsageError, match=r"no channel 'values'.*there are: policy"):
        trainer.sync_weights("values")
    with pytest.raises(UsageError, match=r"no channel 'values'.*there are: none"):
        bound(made(), "actor").sync_weights("values")


class Syncing:
    """The method ``sync_weights`` of the workers of a role, which records the versions and the options."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.told: list[dict[str, Any]] = []
        self.sync_weights = self

    def options(self, **options: Any) -> Syncing:
        self.told.append(options)
        return self

    def call(self, channel: str, version: int, timeout: float | None) -> None:
        self.versions.append(version)

    def call_async(self, channel: str, version: int, timeout: float | None) -> Any:
        self.call(channel, version, timeout)
        return SimpleNamespace(result=lambda: None)


class Committing(MasterHandle):
    """A master that keeps the version of one channel, ``policy``."""

    def __init__(self) -> None:
        self.kept: int | None = None

    def version(self, channel: str) -> int | None:
        assert channel == "policy"
        return self.kept

    def commit_version(self, channel: str, version: int) -> int:
        assert channel == "policy"
        self.kept = max(version, -1 if self.kept is None else self.kept)
        return self.kept


@given(st.lists(st.none() | st.integers(0, 9), max_size=6))
def test_a_version_that_nobody_names_follows_the_latest(asked: list[int | None]) -> None:
    trainer, master = bound(made(), channels={"policy": ("actor", "rollout", "critic")}), Committing()
    groups: dict[str, Any] = {name: Syncing() for name in ("RG_ACTOR", "RG_ROLLOUT", "RG_CRITIC")}
    trainer._groups, trainer._master_handle = groups, master
    expected, latest = list[int](), -1
    for version in asked:
        expected.append(latest + 1 if version is None else version)
        latest = max(latest, expected[-1])
        assert trainer.sync_weights("policy", version=version) == latest
    assert [group.versions for group in groups.values()] == [expected] * 3
    assert groups["RG_ACTOR"].told == [{"timeout": None}] * len(asked)
    assert groups["RG_ROLLOUT"].told == [{"timeout": None, "idempotent": True}] * len(asked)


@pytest.mark.parametrize(("timeout", "limit"), [(7200.0, 7200.0), (math.inf, 1e9), (-1.0, 0.0)])
def test_the_calls_for_a_version_have_its_time_though_it_is_longer_than_that_of_calls(
    timeout: float, limit: float
) -> None:
    trainer = bound(made(), channels={"policy": ("actor", "rollout")})
    groups: dict[str, Any] = {name: Syncing() for name in ("RG_ACTOR", "RG_ROLLOUT")}
    trainer._groups, trainer._master_handle = groups, Committing()
    trainer.sync_weights("policy", timeout=timeout)
    told = {"timeout": limit + SYNC_ANSWER_TIMEOUT}
    assert groups["RG_ACTOR"].told == [told]
    assert groups["RG_ROLLOUT"].told == [told | {"idempotent": True}]


def test_a_trainer_knows_the_resources_of_its_roles() -> None:
    trainer = bound(made(), "actor", resources={"actor": {"total": 2}})
    found = trainer.get_workload_resource("actor")
    assert found == {"total": 2}
    found["total"] = 99
    assert trainer.get_workload_resource("actor") == {"total": 2}
    with pytest.raises(UsageError, match="no role 'critic'; it has actor"):
        trainer.get_workload_resource("critic")


def test_a_trainer_loads_the_state_that_it_saved() -> None:
    trainer = bound(made(), "actor")
    assert trainer.load_state() is None
    trainer.save_state(b"step 3")
    assert trainer.load_state() == b"step 3"
    assert not trainer.is_recoverable()


@pytest.mark.parametrize("method", ["init", "fit"])
def test_a_trainer_must_define_init_and_fit(method: str) -> None:
    class Half(BaseTrainer):
        """Defines neither."""

    with pytest.raises(NotImplementedError, match=rf"Half must define {method}\(\)"):
        getattr(made(Half), method)()
