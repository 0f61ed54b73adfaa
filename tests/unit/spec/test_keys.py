"""Each key of a job file sets one field of the spec, and only that one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from unirun.errors import SpecError
from unirun.spec.entries import is_function
from unirun.spec.job import (
    PORT_RANGE,
    ChannelSpec,
    Edge,
    Entry,
    JobSpec,
    LogSpec,
    Probe,
    RoleSpec,
)
from unirun.spec.parse import JOB_KEYS, LOG_KEYS, parse_job
from unirun.spec.roles import JOB_WIDE_KEYS, ROLE_KEYS, TRAINER_KEYS, python_path
from unirun.spec.yaml import load_job_file, merge

CLASSES = "class Actor: ...\nclass Trainer: ...\ndef both(): ...\nclass both: ...\n"
SERVICE = {"service": True, "ports": ("http",), "max_restarts": 10, "restart_window": 3600.0}
"""The fields that differ in a service."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with scripts, classes and variables."""
    monkeypatch.chdir(tmp_path)
    Path("below").mkdir()
    for folder in (Path(), Path("below")):
        for name in ("train.py", "other.py"):
            (folder / name).touch()
        (folder / "ppo.py").write_text(CLASSES)
    Path("more.env").write_text("A=1\n")


def parsed(mapping: dict[str, Any]) -> JobSpec:
    return parse_job(mapping, count_slots=lambda *_: 8, run_id="job")


def differing(one: Any, other: Any) -> dict[str, Any]:
    """The fields in which `one` differs, with its values."""
    return {
        field: getattr(one, field)
        for field in one.__struct_fields__
        if getattr(one, field) != getattr(other, field)
    }


SAME = {
    "env": {"X": "1"},
    "cwd": "below",
    "env_file": "more.env",
    "max_restarts": 2,
    "rank_restarts": 2,
    "restart_window": 60.0,
    "restart_delay": 1.5,
    "hang_timeout": 30.0,
    "first_step_timeout": 40.0,
    "per_node": 2,
    "per_group": 2,
    "device": "cuda",
    "slots": 0.5,
    "component": 1,
    "cpus": 3,
    "service": True,
    "ready_timeout": 7.0,
    "elastic": False,
}
"""Keys of a role whose value is that of the field."""

ROLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{key: ({key: value}, {key: value}) for key, value in SAME.items() if value},
    "elastic": ({"elastic": False}, {}),
    "script": ({"script": "other.py"}, {"entry": Entry("script", "other.py")}),
    "module": ({"module": "this", "script": None}, {"entry": Entry("module", "this")}),
    "program": (
        {"program": sys.executable, "script": None, "contract": "torchrun"},
        {"entry": Entry("program", sys.executable), "start_method": "exec"},
    ),
    "function": ({"function": "ppo:both", "script": None}, {"entry": Entry("function", "ppo:both")}),
    "workload": (
        {"workload": "ppo:Actor", "script": None},
        {"entry": Entry("workload", "ppo:Actor"), "restart": "process", "max_restarts": 3},
    ),
    "args": ({"args": ["a", "b"]}, {"entry": Entry("script", "train.py", ("a", "b"))}),
    "fatal_exit_codes": ({"fatal_exit_codes": [3, 4]}, {"fatal_exit_codes": (3, 4)}),
    "stragglers": (
        {"stragglers": "replace", "hang_timeout": 9.0},
        {"stragglers": "replace", "hang_timeout": 9.0},
    ),
    "start_method": ({"start_method": "spawn"}, {"start_method": "exec"}),
    "contract": (
        {"contract": "torchrun", "program": sys.executable, "script": None},
        {"entry": Entry("program", sys.executable), "start_method": "exec"},
    ),
    "python": ({"python": sys.executable}, {"python": sys.executable, "start_method": "exec"}),
    "count": ({"count": 4}, {}),
    "devices": ({"devices": [0, 1]}, {"devices": ("0", "1")}),
    "memory": ({"memory": "2GB"}, {"memory": 2 * 10**9}),
    "auto_visible_device": ({"auto_visible_device": False}, {"auto_visible_device": False}),
    "enable_ray_auto_visible_device": (
        {"enable_ray_auto_visible_device": False},
        {"auto_visible_device": False},
    ),
    "ports": ({"ports": ["dist"]}, {"ports": ("dist",)}),
    "service": ({"service": True}, SERVICE),
    "group": (
        {"group": 2, "service": True, "program": sys.executable, "script": None},
        SERVICE
        | {"entry": Entry("program", sys.executable), "start_method": "exec", "group": 2}
        | {"contract": "none", "restart": "process", "restart_delay": 1.0, "slots": 0.0},
    ),
    "optional": ({"optional": True, "service": True}, SERVICE | {"optional": True}),
    "ready": ({"ready": {"log": "up"}}, {"ready": Probe("log", ("up",))}),
    "alive": (
        {
            "alive": {"http": "http://{host}:1/", "every": 3, "misses": 4, "timeout": 5},
            "ready": {"file": "f"},
        },
        {"ready": Probe("file", ("f",)), "alive": Probe("http", ("http://{host}:1/",), 3.0, 4, 5.0)},
    ),
    "after": ({"after": {"b": 1}}, {"after": {"b": 1}}),
}
"""For each key of a role: what is written, and the fields that differ then."""

OTHERS = {"kind", "model", "clear_cache", "update_timeout"}
"""Keys of ready-made services (`test_engines`)."""


def role_of(settings: dict[str, Any], **job: Any) -> RoleSpec:
    written = {"script": "train.py", "count": 4, **settings}
    written = {key: value for key, value in written.items() if value is not None}
    return parsed({"roles": {"a": written, "b": {"script": "train.py"}}, **job}).role("a")


def test_each_key_of_a_role_has_an_example_here() -> None:
    assert ROLE.keys() | OTHERS == {*ROLE_KEYS}


@pytest.mark.parametrize("key", ROLE)
def test_each_key_of_a_role_sets_its_field(key: str) -> None:
    written, differs = ROLE[key]
    assert differing(role_of(written), role_of({})) == differs


WIDE = {*JOB_WIDE_KEYS} - {"script", "module", "program", "function", "workload", "contract", "env"}


@pytest.mark.parametrize("null", [False, True], ids=["without the key", "null"])
@pytest.mark.parametrize("key", sorted(WIDE - {"stragglers"}))
def test_a_role_has_the_settings_of_the_job(key: str, null: bool) -> None:
    written, differs = ROLE[key]
    role = {"count": 4, **({key: None} if null else {})}
    found = parsed({"script": "train.py", "roles": {"a": role}, **written}).role("a")
    plain = parsed({"script": "train.py", "roles": {"a": {"count": 4}}}).role("a")
    assert differing(found, plain) == differs


TRAINER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{key: ROLE[key] for key in TRAINER_KEYS if key in ROLE and key != "after"},
    "class": ({"class": "ppo:both"}, {"entry": Entry("trainer", "ppo:both")}),
    "after": ({"after": ["a"]}, {"after": {"a": 0}}),
}


@pytest.mark.parametrize("key", TRAINER_KEYS)
def test_each_key_of_the_trainer_sets_its_field(key: str) -> None:
    def trainer(settings: dict[str, Any]) -> RoleSpec:
        roles = {"a": {"workload": "ppo:Actor"}}
        return parsed({"roles": roles, "trainer": {"class": "ppo:Trainer", **settings}}).role("trainer")

    written, differs = TRAINER[key]
    assert differing(trainer(written), trainer({})) == differs


PAIR = ("a", "b")
JOB: dict[str, tuple[Any, Any]] = {
    "name": ("n", "n"),
    "run_id": ("other", "other"),
    "primary": (["b"], ("b",)),
    "env": ({"A": 1}, {"A": "1"}),
    "config": ({"x": [1]}, {"x": [1]}),
    "preload": (["this"], ("this",)),
    "max_job_restarts": (2, 2),
    "restart_window": (3, 3.0),
    "restart_delay": (4, 4.0),
    "master_addr": ("localhost", "localhost"),
    "master_port": (65535, 65535),
    "shutdown_timeout": (5, 5.0),
    "join_timeout": (0.1, 0.1),
    "sample_interval": (0.01, 0.01),
    "virtual_local_rank": (True, True),
    "numa_binding": ("socket", "socket"),
    "signals": (["SIGINT"], ("SIGINT",)),
    "event_log": ("console", "console"),
    "log": ({"redirects": "3"}, LogSpec(redirects="3")),
    **{
        key: ([["a", "b"]], (PAIR,))
        for key in ("collocations", "host_collocations", "separations", "isolations")
    },
    "spares": (1, 1),
    "exclude_nodes": (["n1", "n1"], ("n1",)),
    "edges": (["a -> b"], (Edge("a", "b", kind=""),)),
    "channels": ({"c": {"publisher": "a", "receivers": ["b"]}}, (ChannelSpec("c", "a", ("b",)),)),
    "call_timeout": (0.001, 0.001),
    "transport": ("torch", "torch"),
    "stdin": ("b:0", "b:0"),
    "port_range": ("1-65535", (1, 65535)),
    "env_file": ("more.env", "more.env"),
    "secret": (["A"], ("A",)),
    "notify_command": ("mail", "mail"),
}
"""For each key of a job that is no role's: what is written, and the field of the same name then."""

OF_THE_ROLES = {"roles", "trainer", "nproc_per_node", *JOB_WIDE_KEYS} - {
    "env",
    "restart_window",
    "restart_delay",
}


def test_each_key_of_a_job_has_an_example_here() -> None:
    assert JOB.keys() | OF_THE_ROLES == {*JOB_KEYS}


@pytest.mark.parametrize("key", JOB)
def test_each_key_of_a_job_sets_its_field(key: str) -> None:
    written, value = JOB[key]
    plain: dict[str, Any] = {"roles": {"a": {"script": "train.py"}, "b": {"script": "train.py"}}}
    found, without = parsed(plain | {key: written}), parsed(plain)
    assert found == structs.replace(without, roles=found.roles, **{key: value})
    assert (found.roles == without.roles) is not (key in JOB_WIDE_KEYS and key != "env")


def test_each_key_of_the_log_sets_its_field() -> None:
    written = {
        "dir": "logs",
        "redirects": "0:1,12:3",
        "tee": 3,
        "local_ranks_filter": "0, 2",
        "duplicate_stdout_filters": ["a", "b"],
        "duplicate_stderr_filters": "c",
        "line_prefix_template": "[${rank}]",
    }
    assert written.keys() == {*LOG_KEYS}
    found = parsed({"script": "train.py", "log": written}).log
    assert found == LogSpec("logs", "0:1,12:3", "3", (0, 2), ("a", "b"), ("c",), "[${rank}]")


@pytest.mark.parametrize("text", ["0-1", "2-1", "1-65536", "1", "x-y"])
def test_a_range_of_ports_has_two_ports_in_order(text: str) -> None:
    with pytest.raises(
        Exception, match=r"^port_range: expected two numbers of ports, found .*; write 20000-29999"
    ):
        parsed({"script": "train.py", "port_range": text})
    assert parsed({"script": "train.py"}).port_range == PORT_RANGE


def test_json_is_read_as_it_is_written(tmp_path: Path) -> None:
    """Programs write it, and their texts may look like references."""
    file = tmp_path / "job.json"
    file.write_text('{"name": "${oc.env:HOME}", "count": "2:8", "config": {"a": "1e3", "b": "${x}"}}')
    assert load_job_file(str(file)) == {
        "name": "${oc.env:HOME}",
        "count": "2:8",
        "config": {"a": "1e3", "b": "${x}"},
    }


def test_nothing_is_overridden_in_json(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text('{"name": "a"}')
    with pytest.raises(SpecError, match="is no YAML, so nothing can be overridden; write a job in YAML"):
        load_job_file(str(file), ["name=c"])


def test_elastic_workloads_have_a_range_whose_ends_may_be_equal() -> None:
    for written, least, most in (("2:4", 2, 4), ("3:3", 3, 3)):
        (role,) = parsed({"roles": {"a": {"workload": "ppo:Actor", "count": written, "elastic": True}}}).roles
        assert (role.least, role.count, role.elastic) == (least, most, True)


def test_a_role_without_a_count_has_its_ranks_on_each_of_the_nodes_that_come() -> None:
    data = {"script": "train.py", "nproc_per_node": 3}
    (role,) = parse_job(data, count_slots=lambda *_: 8, run_id="job", nodes=(2, 4)).roles
    assert (role.least, role.count, role.per_node) == (6, 12, 3)


def test_modules_are_looked_for_in_the_folders_of_the_first_pythonpath() -> None:
    first, second = {"PYTHONPATH": "/a b:/c::"}, {"PYTHONPATH": "/d"}
    assert python_path({"A": "1"}, None, first, second) == ["/a b", "/c"]
    assert python_path({"PYTHONPATH": ""}, second) == ["/d"]
    assert python_path() == []


def test_what_comes_later_is_merged_into_mappings_at_any_depth() -> None:
    base = {"a": {"b": {"c": 1, "d": 2}, "e": [1]}, "f": 1}
    merge(base, {"a": {"b": {"d": 3}, "e": {"x": 1}}, "f": {"g": 2}, "h": {}})
    assert base == {"a": {"b": {"c": 1, "d": 3}, "e": {"x": 1}}, "f": {"g": 2}, "h": {}}


def test_the_first_equals_sign_ends_the_key_of_an_override(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: x\nenv: {A: '1'}\n")
    assert load_job_file(str(file), ["env.A=b=c=d"])["env"] == {"A": "b=c=d"}


def test_a_name_of_a_class_is_of_no_function() -> None:
    """The source says what it is."""
    assert is_function("ppo:Actor", ["."]) is False
    Path("one.py").write_text("def only(): ...\n")
    assert is_function("one:only", ["."]) is True
