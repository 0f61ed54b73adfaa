"""Roles that share devices, and a trainer that must tell roles apart."""

from __future__ import annotations

from typing import Any

import pytest

from unirun.errors import Fault, SpecError
from unirun.spec.job import JobSpec
from unirun.spec.parse import parse_job


def job(**more: Any) -> JobSpec:
    roles = {"actor": {"count": 4}, "rollout": {"count": 4}, "critic": {"count": 2}, **more.pop("roles", {})}
    data = {"module": "this", "trainer": "json:JSONDecoder", "roles": roles, **more}
    return parse_job(data, count_slots=lambda _: 2, run_id="x")


def faults(**more: Any) -> list[Fault]:
    with pytest.raises(SpecError) as caught:
        job(**more)
    return [*caught.value.faults]


def test_groups_share_devices() -> None:
    spec = job(collocations=[["actor", "rollout"]], roles={"actor": {"count": 4, "per_node": 2}})
    assert spec.collocations == (("actor", "rollout"),)
    assert (spec.role("actor").per_node, spec.role("rollout").per_node) == (2, None)


@pytest.mark.parametrize(
    ("groups", "problem", "remedy"),
    [
        ([["actor", "rolout"]], "no role is called 'rolout'", "did you mean 'rollout'?"),
        ([["actor", "Rollout"]], "no role is called 'Rollout'", "did you mean 'rollout'?"),
        ([["actor", "rollout", "actor"]], "role 'actor' is there twice", "name each role once"),
        (
            [["actor", "rollout"], ["actor", "critic"]],
            "role 'actor' is there in collocations[0] as well",
            "once",
        ),
        ([["actor", "trainer"]], "'trainer' is the trainer, which uses no device", "leave it out"),
        ([["actor"]], "['actor'] names fewer than two roles", "name those that share devices"),
        ([[]], "[] names fewer than two roles", "name those that share devices"),
        ([["actor", "actor"]], "fewer than two", "name those"),
        (["actor"], "expected a list of roles, found 'actor'", "write [[a, b]]"),
        ("actor,rollout", "expected a list of lists of roles", "write [[a, b]]"),
    ],
)
def test_a_wrong_group_is_told(groups: object, problem: str, remedy: str) -> None:
    found = faults(collocations=groups)
    assert any(problem in fault.problem and remedy in fault.remedy for fault in found), found
    assert all(fault.where.startswith("collocations") for fault in found)


@pytest.mark.parametrize(
    ("key", "shares"),
    [("collocations", True), ("host_collocations", True), ("separations", False), ("isolations", False)],
)
def test_a_role_shares_with_one_group_and_is_apart_from_any_number(key: str, shares: bool) -> None:
    groups = {key: [["actor", "rollout"], ["critic", "actor"]]}
    if shares:
        (fault,) = faults(**groups)
        assert (fault.where, fault.problem) == (f"{key}[1]", f"role 'actor' is there in {key}[0] as well")
    else:
        assert getattr(job(**groups), key) == (("actor", "rollout"), ("critic", "actor"))


def test_a_role_without_slots_shares_no_device() -> None:
    (fault,) = faults(roles={"critic": {"count": 2, "slots": 0}}, collocations=[["actor", "critic"]])
    assert (fault.problem, fault.remedy) == ("'critic' has no slots", "leave it out")
    roles = {"critic": {"count": 4, "slots": 0}}
    assert job(roles=roles, separations=[["actor", "critic"]], host_collocations=[["rollout", "critic"]])


def test_a_number_per_node_divides_the_ranks() -> None:
    (fault,) = faults(roles={"actor": {"count": 6, "per_node": 4}})
    assert (fault.where, fault.problem) == (
        "roles.actor.per_node",
        "4 does not divide the role's 6 ranks",
    )
    assert fault.remedy == "every node has as many: 1, 2, 3, 6"


def test_all_faults_are_told_at_once() -> None:
    found = faults(
        collocations=[["actor", "rolout"], ["trainer", "critic"]],
        roles={"actor": {"count": 6, "per_node": 4}, "critic": {"count": 0}},
        trainer="json:JSNDecoder",
        call_timeout=-1,
        transport="pigeon",
        stdin="rolout:0",
    )
    assert {fault.where for fault in found} == {
        "collocations[0]",
        "collocations[1]",
        "roles.actor.per_node",
        "roles.critic.count",
        "trainer.class",
        "call_timeout",
        "transport",
        "stdin",
    }


@pytest.mark.parametrize("key", ["auto_visible_device", "enable_ray_auto_visible_device"])
def test_the_option_for_the_mask_of_devices_has_two_names(key: str) -> None:
    assert job(roles={"actor": {"count": 1, key: False}}).role("actor").auto_visible_device is False
    assert job().role("actor").auto_visible_device is True


def test_the_two_names_of_the_mask_exclude_each_other() -> None:
    (fault,) = faults(roles={"actor": {"auto_visible_device": True, "enable_ray_auto_visible_device": False}})
    assert "they are one and the same" in fault.remedy


def test_a_trainer_can_tell_roles_apart() -> None:
    (fault,) = faults(roles={"Actor": 1, "udf-1": 1, "udf_1": 1, "udf_2": 1})[:1]
    assert fault.problem == "the trainer would find both 'actor' and 'Actor' as RG_ACTOR"
    assert len(faults(roles={"udf-1": 1, "udf_1": 1})) == 1
    spec = parse_job(
        {"module": "this", "roles": {"actor": 1, "Actor": 1}}, count_slots=lambda _: 1, run_id="x"
    )
    assert len(spec.roles) == 2, "without a trainer there are no such names"


@pytest.mark.parametrize(
    ("data", "where", "problem"),
    [
        ({"trainer": "json:X", "module": "this"}, "roles", "the trainer has nobody to call"),
        ({"trainer": {"env": {}}, "roles": {"a": 1}, "module": "this"}, "trainer", "it has no class"),
        (
            {"trainer": {"class": "", "env": {}}, "roles": {"a": 1}, "module": "this"},
            "trainer",
            "it has no class",
        ),
        ({"trainer": 7, "roles": {"a": 1}, "module": "this"}, "trainer.class", "expected a text"),
        ({"trainer": {"clas": "json:X"}, "roles": {"a": 1}, "module": "this"}, "trainer.clas", "unknown key"),
        (
            {"trainer": "json:JSONDecoder", "roles": {"trainer": 1}, "module": "this"},
            "roles.trainer",
            "trainer is given as well",
        ),
    ],
)
def test_a_wrong_trainer_is_told(data: dict[str, Any], where: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(data, count_slots=lambda _: 1, run_id="x")
    assert any(fault.where == where and problem in fault.problem for fault in caught.value.faults), (
        caught.value
    )


def test_classes_are_looked_for_where_workers_will_look(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, name in (("here", "A"), ("there", "B")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "code.py").write_text(f"class {name}: ...")

    def parse(target: str, **role: Any) -> JobSpec:
        data = {"roles": {"a": {"workload": target, **role}}, "env": {"PYTHONPATH": "there"}}
        return parse_job(data, count_slots=lambda _: 1, run_id="x")

    assert parse("code:A", cwd="here").role("a").entry.target == "code:A"
    assert parse("code:B").role("a").restart == "process"
    assert parse("code:A", env={"PYTHONPATH": "here"}).role("a").max_restarts == 3
    with pytest.raises(SpecError, match="has no class 'A'"):
        parse("code:A")
