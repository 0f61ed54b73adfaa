"""A builder collects in any order what a job file says."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.unit.spec.sample_builders import code, complete_builder, faults
from unirun.collocation.host import parse_fake
from unirun.collocation.placing import place
from unirun.spec.job import Entry, Probe, RoleSpec
from unirun.spec.parse import parse_job
from unirun.train import DLJobBuilder, Job, RLJobBuilder

__all__ = ["code"]

pytestmark = pytest.mark.usefixtures("code")


class TestAJob:
    def test_is_the_one_that_a_job_file_describes(self) -> None:
        job = (
            RLJobBuilder()
            .node_num(1)
            .device_per_node(4)
            .config({"lr": 0.1})
            .global_env({"A": "job", "B": "job"})
            .trainer("algo", "PPOTrainer")
            .actor("algo", "Actor")
            .total(4)
            .per_node(4)
            .env({"A": "role"})
            .rollout("algo", "Rollout")
            .total(4)
            .per_node(4)
            .with_collocation("actor", "rollout")
            .build()
        )
        file = {
            "roles": {
                "actor": {"count": 4, "per_node": 4, "workload": "algo:Actor", "env": {"A": "role"}},
                "rollout": {"count": 4, "per_node": 4, "workload": "algo:Rollout"},
            },
            "trainer": "algo:PPOTrainer",
            "collocations": [["actor", "rollout"]],
            "config": {"lr": 0.1},
            "env": {"A": "job", "B": "job"},
        }
        assert job.spec == parse_job(file, count_slots=lambda _: 1, run_id="job")
        assert job.spec.role("trainer").entry == Entry("trainer", "algo:PPOTrainer")
        assert job.spec.primary == ("trainer",)

    def test_has_services_beside_its_workloads(self) -> None:
        job = (
            RLJobBuilder()
            .node_num(1)
            .device_per_node(4)
            .config({})
            .trainer("algo", "PPOTrainer")
            .actor("algo", "Actor")
            .total(2)
            .per_node(2)
            .after("engine")
            .service("engine", "sleep", "{port}", count=2, ready={"log": "up"})
            .with_host_collocation("actor", "ENGINE")
            .build()
        )
        engine = job.spec.role("engine")
        assert (engine.entry, engine.count) == (Entry("program", "sleep", ("{port}",)), 2)
        assert engine.service
        assert engine.ready == Probe("log", ("up",))
        assert job.spec.role("actor").after == {"engine": 0}
        assert job.spec.host_collocations == (("actor", "engine"),)

    def test_has_the_roles_of_reinforcement_learning(self) -> None:
        builder = RLJobBuilder().node_num().device_per_node().config({}).trainer("algo", "PPOTrainer")
        for name in ("actor", "rollout", "reference", "reward", "critic"):
            getattr(builder, name)("algo", "Actor").total(1).per_node(1)
        builder.workload("udf_1", "algo", "Critic").total(1).per_node(1)
        spec = builder.build().spec
        assert [role.name for role in spec.roles] == [
            *("actor", "rollout", "reference", "reward", "critic", "udf_1", "trainer")
        ]

    def test_goes_on_from_a_workload_to_the_next_and_to_the_job(self) -> None:
        job: Job = (
            RLJobBuilder()
            .actor("algo", "Actor")
            .total(1)
            .per_node(1)
            .critic("algo", "Critic")
            .per_node(1)
            .total(1)
            .workload("extra", "algo", "Actor")
            .total(1)
            .per_node(1)
            .reward("algo", "Critic")
            .total(1)
            .per_node(1)
            .config({})
            .node_num(1)
            .device_per_node(8)
            .trainer("algo", "PPOTrainer")
            .build()
        )
        assert job.spec.role("critic") == RoleSpec(
            *("critic", 1, Entry("workload", "algo:Critic")),
            max_restarts=3,
            restart="process",
            per_node=1,
        )

    def test_has_the_config_of_omegaconf_resolved(self) -> None:
        config = OmegaConf.create({"lr": 0.1, "twice": "${lr}", "deep": {"list": [1, 2]}})
        spec = complete_builder().config(config).build().spec
        assert spec.config == {"lr": 0.1, "twice": 0.1, "deep": {"list": [1, 2]}}

    def test_adds_up_environments(self) -> None:
        builder = complete_builder().global_env({"A": 1}).global_env({"B": 2, "A": 3})
        builder.workload("b", "algo", "Actor").total(1).per_node(1).env({"X": 1}).env({"Y": "2"})
        spec = builder.build().spec
        assert (spec.env, spec.role("b").env) == ({"A": "3", "B": "2"}, {"X": "1", "Y": "2"})

    @pytest.mark.parametrize(
        ("say", "expected"),
        [
            (lambda workload: workload, True),
            (lambda workload: workload.enable_ray_auto_visible_device(), True),
            (lambda workload: workload.auto_visible_device(False), False),
        ],
    )
    def test_shows_workers_their_own_devices(self, say: Callable[[Any], Any], expected: bool) -> None:
        builder = complete_builder()
        say(builder.workload("b", "algo", "Actor").total(1).per_node(1))
        assert builder.build().spec.role("b").auto_visible_device is expected

    def test_collocates_roles_in_any_case_and_all_whenever_named(self) -> None:
        builder = complete_builder().with_collocation_all()
        for name in ("rollout", "critic"):
            builder.workload(name, "algo", "Actor").total(2).per_node(2)
        assert builder.build().spec.collocations == (("actor", "rollout", "critic"),)
        upper = RLJobBuilder().node_num().device_per_node(1).config({}).trainer("algo", "PPOTrainer")
        for name in ("actor", "rollout"):
            upper.workload(name, "algo", "Actor").total(1).per_node(1)
        assert upper.with_collocation("ACTOR", "Rollout").build().spec.collocations == (("actor", "rollout"),)

    @pytest.mark.parametrize("kind", ["PRE", "SFT", "RL", "MULTIMODAL"])
    def test_has_one_of_four_types(self, kind: str) -> None:
        assert isinstance(complete_builder().dl_type(kind).build(), Job)
        assert isinstance(complete_builder().dl_type().build(), Job)


def test_roles_that_share_devices_count_once() -> None:
    builder = DLJobBuilder().dl_type().node_num(2).device_per_node(2).config({}).trainer("algo", "PPOTrainer")
    for name in ("actor", "rollout", "critic"):
        builder.workload(name, "algo", "Actor").total(4).per_node(2)
    (fault,) = faults(builder)
    assert fault.problem.startswith("total: actor 4 + rollout 4 + critic 4 = 12 devices, and 2 × 2 = 4")
    (fault,) = faults(builder.with_collocation("actor", "rollout"))
    assert fault.problem.startswith("total: actor=rollout 4 + critic 4 = 8 devices")
    assert builder.device_per_node(4).build().node_num == 2


def test_a_node_has_as_many_devices_as_its_ranks_need() -> None:
    builder = complete_builder().node_num(3).device_per_node(4)
    builder.workload("rollout", "algo", "Actor").total(8).per_node(8)
    (fault,) = faults(builder)
    assert fault.problem == "per_node: rollout needs 8 devices, and 4 are there"


def test_roles_that_fill_nodes_of_their_own_need_not_fit_on_one_together() -> None:
    builder = complete_builder().node_num(2).device_per_node(4)
    builder.workload("rollout", "algo", "Actor").total(4).per_node(4)
    job = builder.with_separation("actor", "rollout").build()
    _, placement = place(job.spec, parse_fake("fake:nodes=2,devices=4"))
    assert {(each.role, each.node) for each in placement.assignments if each.slot >= 0} == {
        ("actor", "node0"),
        ("rollout", "node1"),
    }


def test_a_role_alone_is_collocated_with_nobody() -> None:
    assert complete_builder().with_collocation_all().build().spec.collocations == ()


class TestAFunction:
    def test_is_the_entry_of_a_role_beside_workloads(self) -> None:
        builder = complete_builder()
        builder.function("data", "algo:make").total(1).per_node(1).env({"A": "1"})
        role = builder.build().spec.role("data")
        assert (role.entry, role.count, role.env) == (Entry("function", "algo:make"), 1, {"A": "1"})
        assert (role.restart, role.max_restarts) == ("role", 0), "as of a script"

    def test_may_be_given_as_an_object_and_needs_no_trainer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(".")
        algo = importlib.import_module("algo")
        builder = DLJobBuilder().dl_type("PRE").node_num(1).device_per_node(2).config({})
        spec = builder.function("train", algo.make).total(2).per_node(2).build().spec
        assert [role.entry for role in spec.roles] == [Entry("function", "algo:make")]
        assert spec.primary == ("train",)

    def test_goes_on_with_the_roles_of_reinforcement_learning(self) -> None:
        builder = RLJobBuilder().node_num().device_per_node().config({}).trainer("algo", "PPOTrainer")
        builder.function("data", "algo:make").total(1).per_node(1).actor("algo", "Actor").total(1).per_node(1)
        assert [role.name for role in builder.build().spec.roles] == ["data", "actor", "trainer"]


class TestPlaces:
    def test_are_what_a_job_file_says_of_them(self) -> None:
        builder = complete_builder().node_num(3).with_separation("ACTOR", "rollout").spares(1)
        builder.exclude_nodes("gpu7", "gpu9").exclude_nodes("gpu12")
        builder.workload("rollout", "algo", "Rollout").total(4).per_node(4).slots(2).devices(
            0, 1, 2, 3, 4, 5, 6, 7
        )
        builder.workload("reward", "algo", "Actor").total(2).per_node(2).slots(0.5).per_group(2)
        builder.with_host_collocation("actor", "reward").with_isolation("rollout", "reward")
        builder.edge("actor", "rollout", "load", kind="broadcast", asynchronous=True, weight="2GB")
        file = builder.build().mapping
        assert file["separations"] == [["actor", "rollout"]]
        assert file["host_collocations"] == [["actor", "reward"]]
        assert file["isolations"] == [["rollout", "reward"]]
        assert file["spares"] == 1
        assert file["exclude_nodes"] == ["gpu7", "gpu9", "gpu12"]
        assert file["roles"]["rollout"] | {"slots": 2, "devices": [*range(8)]} == file["roles"]["rollout"]
        assert file["roles"]["reward"] | {"slots": 0.5, "per_group": 2} == file["roles"]["reward"]
        assert file["edges"] == [
            {"from": "actor", "to": "rollout", "async": True, "weight": "2GB", "invocation": "load"}
            | {"kind": "broadcast"}
        ]

    def test_are_nodes_only_for_roles_without_slots(self) -> None:
        builder = complete_builder().node_num(1).device_per_node(2)
        builder.workload("rollout", "algo", "Rollout").total(2).per_node(2)
        builder.workload("judge", "algo", "Actor").total(8).per_node(8).slots(0).cpus(96).memory("2TB")
        job = builder.with_collocation_all().build()
        assert job.mapping["collocations"] == [["actor", "rollout"]]
        assert [role.slots for role in job.spec.roles] == [1, 1, 0, 1]
        judge = job.spec.role("judge")
        assert (judge.cpus, judge.memory) == (96, 2 * 10**12), "what nodes have is known when it starts"

    def test_of_roles_and_of_the_job_may_be_restarts(self) -> None:
        builder = complete_builder().job_restarts(2, window="1h")
        builder.workload("rollout", "algo", "Rollout").total(2).per_node(2).restarts(
            5, per_rank=2, window="10m", delay=1.5, fatal_exit_codes=(2, 77)
        )
        spec = builder.with_collocation_all().build().spec
        actor, rollout = spec.role("actor"), spec.role("rollout")
        assert (spec.max_job_restarts, spec.restart_window, actor.restart_window) == (2, 3600.0, 3600.0)
        assert (rollout.max_restarts, rollout.rank_restarts, rollout.restart_window) == (5, 2, 600.0)
        assert (rollout.restart_delay, rollout.fatal_exit_codes) == (1.5, (2, 77))
        assert actor.max_restarts == 3

    def test_that_there_are_not_are_told(self) -> None:
        apart = complete_builder()
        apart.workload("rollout", "algo", "Rollout").total(2).per_node(2)
        found = faults(apart.with_separation("actor", "rollout"))
        assert "rollout" in str(found[0])

    def test_of_roles_that_there_are_not_are_told_in_the_builders_words(self) -> None:
        found = faults(complete_builder().with_separation("actor", "rollouts").with_isolation("actor"))
        assert {fault.where for fault in found} == {"with_separation[0]", "with_isolation[0]"}

    def test_that_are_excluded_have_names(self) -> None:
        (fault,) = faults(complete_builder().exclude_nodes("gpu7,gpu9"))
        assert fault.where == "exclude_nodes"
        assert complete_builder().exclude_nodes("node0").build(), "who excludes one counts on others"

    def test_and_edges_are_checked(self) -> None:
        (fault,) = faults(complete_builder().edge("actor", "actors"))
        assert fault.where.startswith("edges[0]")
