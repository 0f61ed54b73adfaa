"""The faults of a job file: their places, their words and their remedies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from unirun.errors import Fault, SpecError
from unirun.spec.parse import parse_job
from unirun.spec.roles import search_path


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a script."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def parsed(mapping: dict[str, Any]) -> Any:
    return parse_job(mapping, count_slots=lambda *_: 8, run_id="job")


def of_job(**settings: Any) -> dict[str, Any]:
    return {"roles": {"a": {"script": "train.py"}}, **settings}


def of_role(**settings: Any) -> dict[str, Any]:
    return {"roles": {"a": {"script": "train.py", **settings}}}


SECONDS = "expected a number of seconds, at least"
NO_WEIGHTS = "it is for kind: vllm and kind: builtin"
RANGE = "only workloads of which the number is given as MIN:MAX are elastic"

JOB: list[tuple[dict[str, Any], str, str, str]] = [
    ({"primary": "b"}, "primary", "no role is called 'b'", "known: a"),
    ({"stdin": "b:0"}, "stdin", "no role is called 'b'", "known: a"),
    ({"call_timeout": 0}, "call_timeout", f"{SECONDS} 0.001, found 0", ""),
    ({"log": {"line_prefix_template": 3}}, "log.line_prefix_template", "expected a text, found 3", ""),
    ({"secret": ["A=1"]}, "secret", "'A=1' is no name of a variable", "name variables, not their values"),
    ({"env": {"A": [1]}}, "env.A", "expected a text or a number, found [1]", "quote it"),
    ({"env": {"RANK": "1"}}, "env.RANK", "unirun sets this for every worker itself", ""),
    ({"transport": "x"}, "transport", "expected one of socket, torch, found 'x'", ""),
    ({"config": 3}, "config", "expected a mapping with names as keys, found 3", ""),
    (
        {"channels": {"c": {"publisher": "a", "receivers": ["b"]}}},
        *("channels.c.receivers", "no role is called 'b'", "known: a"),
    ),
    ({"collocations": [["a", "b"]]}, "collocations[0]", "no role is called 'b'", "known: a"),
    (
        {"collocations": [["a"]]},
        *("collocations[0]", "['a'] names fewer than two roles", "name those that share devices"),
    ),
    (
        {"roles": {"a": {"script": "train.py"}, "b": {}}},
        *("roles.b", "nothing to run", "name a script, or one for this role: --script b=FILE"),
    ),
]

ROLE: list[tuple[dict[str, Any], str, str, str]] = [
    ({"count": "5:2"}, "count", "'5:2' is from 5 to 2", "write the smaller number first"),
    ({"count": 0}, "count", "expected a number from 1 to 1000000, found 0", ""),
    ({"elastic": True}, "elastic", RANGE, "write count: 2:8, or leave it out"),
    ({"elastic": True, "count": "2:4"}, "elastic", RANGE, "write count: 2:8, or leave it out"),
    (
        {"memory": "lots"},
        *("memory", "'lots' is no number of bytes; write 64MB, 1.5GiB or 4096", "for example 64GB or 512MiB"),
    ),
    (
        {"count": 4, "devices": ["0", "0", "1", "1"]},
        *("devices", "0, 1 stands there twice", "name each device once"),
    ),
    (
        {"stragglers": "replace"},
        *("stragglers", "collectives are counted where ranks have a time-out for hangs"),
        "set hang_timeout, too (--hang-timeout)",
    ),
    ({"stragglers": "x"}, "stragglers", "expected one of tell, replace, found 'x'", ""),
    ({"after": ["b"]}, "after", "no role is called 'b'", "known: a"),
    ({"after": ["a"]}, "after", "a circle: a after a", "drop one of them"),
    ({"component": -1}, "component", "expected a number from 0 to 1000000, found -1", ""),
    ({"fatal_exit_codes": [-1]}, "fatal_exit_codes", "expected a number from 1 to 255, found -1", ""),
    ({"rank_restarts": 0}, "rank_restarts", "expected a number from 1 to 1000000, found 0", ""),
    ({"hang_timeout": -2}, "hang_timeout", f"{SECONDS} 0, found -2", ""),
    ({"cpus": -1}, "cpus", "expected a number from 1 to 1000000, found -1", ""),
    (
        {"ready": {"http": "/x"}},
        *("ready.http", "'/x' is no URL of plain HTTP"),
        "write http://{addr}/health; for other protocols name a command",
    ),
    ({"exit_codes": 3}, "exit_codes", "unknown key", "did you mean 'fatal_exit_codes'?"),
    ({"update_timeout": 0}, "update_timeout", f"{SECONDS} 0.01, found 0", ""),
    ({"ready_timeout": 0}, "ready_timeout", f"{SECONDS} 0.01, found 0", ""),
    ({"count": "gpu"}, "count", "there is no gpu here", ""),
    (
        {"python": "nowhere"},
        *("python", "'nowhere' is no virtual environment, and no interpreter"),
        "name its directory, which has bin/python, or the interpreter",
    ),
]


def count_no_gpus(what: str) -> int:
    raise ValueError(f"there is no {what} here")


@pytest.mark.parametrize(("settings", "where", "problem", "remedy"), JOB, ids=[each[1] for each in JOB])
def test_a_fault_of_a_job_has_its_place_and_its_remedy(
    settings: dict[str, Any], where: str, problem: str, remedy: str
) -> None:
    with pytest.raises(SpecError) as caught:
        parsed(of_job(**settings))
    assert caught.value.faults == (Fault(where, problem, remedy),)


@pytest.mark.parametrize(("settings", "where", "problem", "remedy"), ROLE, ids=[each[1] for each in ROLE])
def test_a_fault_of_a_role_has_its_place_and_its_remedy(
    settings: dict[str, Any], where: str, problem: str, remedy: str
) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(of_role(**settings), count_slots=count_no_gpus, run_id="job")
    # Only some kinds of roles take weights.
    expected = {*caught.value.faults} - {
        Fault("roles.a.update_timeout", "the role takes no weights", NO_WEIGHTS)
    }
    assert expected == {Fault(f"roles.a.{where}", problem, remedy)}


def test_settings_are_where_they_are_looked_for() -> None:
    job = parsed(of_job(restart_delay=2.5, hang_timeout=30.0, log={"line_prefix_template": "${role_name}"}))
    assert (job.roles[0].restart_delay, job.roles[0].hang_timeout) == (2.5, 30.0)
    assert job.log.line_prefix_template == "${role_name}"
    assert parsed(of_role(stragglers="replace", hang_timeout=30.0)).roles[0].stragglers == "replace"
    both = {**of_role()["roles"], "b": {"program": "sh", "service": True}}
    found = {role.name: role for role in parsed({"roles": both, "hang_timeout": 30.0}).roles}
    assert [found[name].hang_timeout for name in "ab"] == [30.0, 0.0]


def test_a_program_is_looked_for_where_its_role_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/of/this/process")
    assert search_path(None) == search_path(None, {}, None, {"PATH": ""}) == "/of/this/process"
    assert search_path(None, {"A": "1"}, {"PATH": "/first"}, {"PATH": "/second"}) == "/first"
    tool = tmp_path / "bin" / "tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    role = {"program": "tool", "env": {"PATH": str(tool.parent)}}
    assert parsed({"roles": {"a": role}}).roles[0].name == "a"
    with pytest.raises(SpecError, match="program 'tool' is not found"):
        parsed({"roles": {"a": {"program": "tool"}}})


@pytest.mark.parametrize("kind", ["function", "workload"])
def test_what_is_called_in_the_job_runs_with_its_own_interpreter(kind: str) -> None:
    with pytest.raises(SpecError, match=f"a {kind} runs with unirun's own interpreter"):
        parsed({"roles": {"a": {kind: "train:thing", "python": sys.executable}}})


def test_modules_are_not_looked_for_where_the_job_does_not_run() -> None:
    """Another host, or a container, may have them."""
    for entry in ({"module": "not_here"}, {"workload": "not_here:Actor"}):
        job = {"roles": {"a": entry}}
        with pytest.raises(SpecError, match="there is no module 'not_here'"):
            parsed(job)
        parse_job(job, count_slots=lambda *_: 8, run_id="job", here=False)


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("train.Actor", "did you mean 'train:Actor'?"),
        ("./lib/train.py:Actor", "did you mean 'lib.train:Actor'?"),
        ("lib.train.Actor", "did you mean 'lib.train:Actor'?"),
    ],
)
def test_a_class_that_is_written_in_another_way_is_told_in_ours(target: str, remedy: str) -> None:
    with pytest.raises(SpecError) as caught:
        parsed({"roles": {"a": {"workload": target}}})
    assert [fault.remedy for fault in caught.value.faults] == [remedy]


def test_a_script_with_a_similar_name_is_told() -> None:
    for name in ("trian.py", "train"):
        with pytest.raises(SpecError, match="did you mean 'train.py'"):
            parsed({"roles": {"a": {"script": name}}})


def test_a_folder_that_is_not_there_is_told_beside_what_is_missing_in_it() -> None:
    with pytest.raises(SpecError) as caught:
        parsed(of_role(cwd="nowhere"))
    assert [fault.where for fault in caught.value.faults] == ["roles.a.cwd", "roles.a"]
    assert caught.value.faults[0].problem == "'nowhere' is no directory"


def test_a_configuration_is_json() -> None:
    for value in (float("nan"), object()):
        with pytest.raises(
            SpecError, match="^config: cannot be sent to workers as JSON: .*; quote it, workers"
        ):
            parsed(of_job(config={"x": value}))


def test_a_name_of_a_role_is_told_with_what_it_may_be() -> None:
    with pytest.raises(SpecError) as caught:
        parsed({"roles": {"é": {"script": "train.py"}}})
    remedy = "a letter, then letters, digits, '-' or '_', of ASCII"
    assert caught.value.faults == (Fault("roles.é", "'é' is no name for a role", remedy),)


@pytest.mark.parametrize("name", ["run.sh", "./run.sh"])
def test_what_is_no_script_of_python_is_told_as_a_program(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    with pytest.raises(SpecError) as caught:
        parsed({"roles": {"a": {"script": name}}})
    (fault,) = caught.value.faults
    assert "run.sh" in fault.remedy
    assert "././" not in fault.remedy


@pytest.mark.parametrize(
    ("role", "where", "problem", "remedy"),
    [
        (
            {"kind": "vllm", "model": "m", "contract": "torchrun"},
            *("contract", "vLLM starts its ranks itself, and takes torchrun's for its own", "leave it out"),
        ),
        (
            {"kind": "openai"},
            *("program", "a server of kind openai has none", "write program: NAME, with args: […]"),
        ),
    ],
)
def test_what_a_ready_made_service_lacks_is_told(
    role: dict[str, Any], where: str, problem: str, remedy: str
) -> None:
    with pytest.raises(SpecError) as caught:
        parsed({"roles": {"a": role}})
    assert Fault(f"roles.a.{where}", problem, remedy) in caught.value.faults
