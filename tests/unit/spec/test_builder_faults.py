"""A builder checks everything at the end, and tells all that is wrong at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.unit.spec.sample_builders import code, complete_builder, faults
from unirun.errors import SpecError
from unirun.train import DLJobBuilder, RLJobBuilder

__all__ = ["code"]

pytestmark = pytest.mark.usefixtures("code")

Change = Callable[[DLJobBuilder], Any]


def second(total: Any = 2, per_node: Any = 2, role: Any = "rollout", name: str = "Actor") -> Change:
    return lambda b: b.workload(role, "algo", name).total(total).per_node(per_node)


def function(entry: Any) -> Change:
    return lambda b: b.function("data", entry).total(1).per_node(1)


def local() -> Callable[[], None]:
    def main() -> None: ...

    return main


RULES: list[tuple[str, Change, str, str, str]] = [
    ("a lambda", function(lambda: 1), "data.function", "<lambda> is a lambda, which workers", "with def"),
    ("a local function", function(local()), "data.function", "main is a local function or", "top level"),
    ("a method", function(DLJobBuilder.build), "data.function", "DLJobBuilder.build is a local", "def"),
    ("a function without a name", function(partial(local)), "data.function", "expected a func", "with def"),
    ("a function's module alone", function("algo"), "data.function", "expected a function", "with def"),
    ("an unknown function", function("algo:mak"), "data.function", "did you mean 'make'?", "correct"),
    ("a class for a function", function("algo:Plain"), "data.function", "is no function", ".workload"),
    ("a type that is none", lambda b: b.dl_type("PPO"), "dl_type", "found 'PPO'", "MULTIMODAL"),
    ("a type in lower case", lambda b: b.dl_type("rl"), "dl_type", "found 'rl'", "did you mean 'RL'?"),
    ("a type that is no text", lambda b: b.dl_type(3), "dl_type", "found 3", "known"),  # type: ignore[arg-type]
    ("no nodes", lambda b: b.node_num(0), "node_num", "greater than 0, found 0", ".node_num"),
    ("half a node", lambda b: b.node_num(0.5), "node_num", "found 0.5", ".node_num"),  # type: ignore[arg-type]
    ("nodes in words", lambda b: b.node_num("1"), "node_num", "found '1'", ".node_num"),  # type: ignore[arg-type]
    ("true nodes", lambda b: b.node_num(True), "node_num", "found True", ".node_num"),
    ("no devices", lambda b: b.device_per_node(-1), "device_per_node", "found -1", ".device_per_node"),
    ("a config that is a list", lambda b: b.config([1]), "config", "found [1]", "pass the training"),
    ("a config for nobody", lambda b: b.config({"f": object()}), "config", "cannot be sent", "quote it"),
    (
        "a config with a dangling reference",
        lambda b: b.config(OmegaConf.create({"a": "${b}"})),
        *("config", "Interpolation key 'b' not found", "correct the reference"),
    ),
    ("no ranks", second(total=0), "rollout.total", "greater than 0, found 0", ".total"),
    ("ranks that are not said", second(total=None), "rollout.total", "it is not set", ".total(1)"),
    ("none on a node", second(per_node=0), "rollout.per_node", "found 0", ".per_node"),
    ("nodes that are not said", second(per_node=None), "rollout.per_node", "not set", ".per_node(1)"),
    ("a node that does not divide", second(3, 2), "rollout.per_node", "2 does not divide", "as many: 1, 3"),
    (
        "too few places",
        second(4, 2),
        *("rollout.per_node", "2 on each of 1 nodes are 2, and total is 4", ".per_node(4)"),
    ),
    (
        "too many ranks",
        second(8, 8),
        *("device_per_node", "total: actor 2 + rollout 8 = 10 devices, and 1 × 8 = 8", "collocate"),
    ),
    (
        "an unknown role in a collocation",
        lambda b: b.with_collocation("actor", "rolout"),
        *("with_collocation[0]", "no role is called 'rolout'", "known: actor"),
    ),
    (
        "a collocation with the trainer",
        lambda b: b.with_collocation("actor", "trainer"),
        *("with_collocation[0]", "'trainer' is the trainer", "leave it out"),
    ),
    (
        "a role twice in a collocation",
        lambda b: b.with_collocation("actor", "ACTOR"),
        *("with_collocation[0]", "role 'actor' is there twice", "once"),
    ),
    (
        "a collocation of what are no names",
        lambda b: b.with_collocation("actor", 7),  # type: ignore[arg-type]
        *("with_collocation[0]", "expected names of roles, found 7", ".with_collocation"),
    ),
    (
        "a role in two collocations",
        lambda b: second()(b).with_collocation("actor", "rollout").with_collocation("rollout", "actor"),
        *("with_collocation[1]", "role 'rollout' is there in collocations[0] as well", "once"),
    ),
    ("a role given twice", second(role="actor"), "actor", "'actor' is given twice", "once"),
    ("a role called trainer", second(role="trainer"), "trainer", "trainer is given as well", "rename"),
    ("a role with an odd name", second(role="9 lives"), "9 lives", "is no name for a role", "a letter"),
    (
        "roles with one handle",
        second(role="ACTOR"),
        "ACTOR",
        "both 'actor' and 'ACTOR' as RG_ACTOR",
        "rename",
    ),
    (
        "a class that is not there",
        second(name="Acto"),
        "rollout.class",
        "has no 'Acto', did you mean 'Actor'?",
        "",
    ),
    (
        "a class that is none",
        second(name="make"),
        "rollout.class",
        "is no workload, it is a function",
        "derive",
    ),
    (
        "a class of another kind",
        second(name="Plain"),
        "rollout.class",
        "algo:Plain is no workload",
        "BaseWorkload",
    ),
    (
        "a trainer as a workload",
        second(name="PPOTrainer"),
        *("rollout.class", "is no workload, it is a trainer", "derive it from unirun.BaseWorkload"),
    ),
    (
        "a workload as the trainer",
        lambda b: b.trainer("algo", "Actor"),
        *("trainer.class", "algo:Actor is no trainer, it is a workload", "unirun.BaseTrainer"),
    ),
    (
        "a module that is not there",
        lambda b: b.trainer("nowhere_at_all", "T"),
        *("trainer.class", "ModuleNotFoundError: No module named 'nowhere_at_all'", "correct"),
    ),
    (
        "a module that cannot be imported",
        lambda b: b.trainer("broken", "T"),
        *("trainer.class", "No module named 'no_such_module'", "correct"),
    ),
    ("a module that leaves", lambda b: b.trainer("leaves", "T"), "trainer.class", "SystemExit: 3", "correct"),
    ("a module without a name", lambda b: b.trainer("", "T"), "trainer.module", "found ''", "name it"),
    ("a class without a name", lambda b: b.trainer("algo", None), "trainer.class", "found None", "name it"),  # type: ignore[arg-type]
    (
        "a variable that is unirun's",
        lambda b: b.global_env({"RANK": 1}),
        *("env.RANK", "unirun sets this for every worker itself", ""),
    ),
    (
        "a transport that there is not",
        lambda b: b.transport("pigeon"),
        *("transport", "expected one of socket, torch, found 'pigeon'", ""),
    ),
    (
        "a deadline that is no time",
        lambda b: b.call_timeout(-1),
        *("call_timeout", "expected a number of seconds", ""),
    ),
    (
        "a variable of a role that is no text",
        lambda b: second()(b).env({"X": [1]}),
        *("rollout.env.X", "expected a text or a number", "quote it"),
    ),
    (
        "an environment that is none",
        lambda b: second()(b).env("X=1"),
        *("rollout.env", "expected a mapping", ""),
    ),
]


def test_all_that_is_wrong_with_places_is_told_at_once() -> None:
    builder = complete_builder()
    second(1, 1)(builder)
    found = faults(builder.with_collocation("actor", "rollout").with_separation("actor", "rollout"))
    assert {fault.where for fault in found} == {"actor.count", "actor.per_node", "separations[0]"}
    assert "differ in count: actor 2, rollout 1; give them the same count" in "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("change", "where", "problem", "remedy"), [r[1:] for r in RULES], ids=[r[0] for r in RULES]
)
def test_what_is_wrong_is_told(change: Change, where: str, problem: str, remedy: str) -> None:
    builder = complete_builder()
    change(builder)
    found = faults(builder)
    assert any(
        fault.where == where and problem in fault.problem and remedy in fault.remedy for fault in found
    ), "\n".join(map(str, found))
    assert {fault.where for fault in found} == {where}, "\n".join(map(str, found))


def test_what_must_be_said_and_was_not_is_told_at_once() -> None:
    assert {fault.where for fault in faults(DLJobBuilder())} == {
        *("dl_type", "node_num", "device_per_node", "config", "trainer", "workload")
    }
    assert {fault.where for fault in faults(RLJobBuilder())} == {
        *("node_num", "device_per_node", "config", "trainer", "workload", "actor")
    }


def test_reinforcement_learning_has_an_actor() -> None:
    builder = DLJobBuilder().dl_type("RL").node_num().device_per_node().config({})
    builder.trainer("algo", "PPOTrainer").workload("critic", "algo", "Critic").total(1).per_node(1)
    (fault,) = faults(builder)
    assert (fault.where, fault.problem) == ("actor", "a job of type RL has an actor")
    assert builder.dl_type("SFT").build().spec.role("critic").count == 1


def test_faults_of_every_part_are_told_together() -> None:
    builder = (
        RLJobBuilder()
        .dl_type("XL")
        .node_num(0)
        .device_per_node(2)
        .config([])
        .global_env({"1": 1})
        .trainer("algo", "Actor")
        .actor("algo", "Nobody")
        .total(-1)
        .per_node(1)
        .env({"RANK": 1})
        .with_collocation("actor", "ghost")
    )
    assert {fault.where for fault in faults(builder)} == {
        "dl_type",
        "node_num",
        "config",
        "env.1",
        "trainer.class",
        "actor.class",
        "actor.total",
        "actor.env.RANK",
        "with_collocation[0]",
    }


junk = (
    st.none() | st.booleans() | st.integers(-1, 9) | st.floats() | st.text(max_size=3) | st.lists(st.none())
)


roles = st.sampled_from(["actor", "rollout", "trainer", "Actor", "x y", ""]) | junk


numbers = st.integers(1, 8) | junk


modules, classes = (
    st.sampled_from(["algo", "broken", "."]) | junk,
    st.sampled_from(["Actor", "PPOTrainer"]) | junk,
)


environments = st.dictionaries(st.sampled_from(["A", "RANK", "1"]), junk, max_size=2) | junk


workloads = st.tuples(roles, modules, classes, numbers, numbers, environments)


@given(
    of_job=st.tuples(st.sampled_from(["RL", "SFT"]) | junk, numbers, numbers, environments, environments),
    trainer=st.tuples(modules, classes),
    described=st.lists(workloads, max_size=3),
    groups=st.lists(st.lists(roles, max_size=3), max_size=2),
    together=st.booleans(),
)
def test_whatever_is_said_gives_a_job_or_faults_and_nothing_else(
    of_job: Any, trainer: Any, described: Any, groups: Any, together: bool
) -> None:
    kind, nodes, devices, config, env = of_job
    builder = DLJobBuilder().dl_type(kind).node_num(nodes).device_per_node(devices).config(config)
    builder.global_env(env).trainer(*trainer)
    for role, module, name, total, per_node, of_role in described:
        builder.workload(role, module, name).total(total).per_node(per_node).env(of_role)
    for group in groups:
        builder.with_collocation(*group)
    if together:
        builder.with_collocation_all()
    try:
        job = builder.build()
    except SpecError as error:
        assert all(fault.problem for fault in error.faults)
        assert len(set(error.faults)) == len(error.faults), "nothing is told twice"
    else:
        assert job.spec.role("trainer").count == 1


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_a_number_of_ranks_on_a_node_that_is_told_fits(total: int, per_node: int, nodes: int) -> None:
    builder = RLJobBuilder().node_num(nodes).device_per_node(12).config({}).trainer("algo", "PPOTrainer")
    actor = builder.actor("algo", "Actor").total(total).per_node(per_node)
    try:
        actor.build()
    except SpecError as error:
        told = [re.match(r"call \.per_node\((\d+)\)", fault.remedy) for fault in error.faults]
        for number in (int(found[1]) for found in told if found):
            assert actor.per_node(number).build().spec.role("actor").per_node == number
