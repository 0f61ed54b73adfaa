"""``key=value`` on a command line changes what the job file has; ``+key=value`` adds what it has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import SpecError
from unirun.spec.yaml import load_job_file

FILE = """
roles: {actor: 4, rollout: {count: 2, script: serve.py}}
trainer: ppo:PPOTrainer
config: {steps: 3, optim: {lr: 0.1, name: adam}, layers: [1, {dim: 8}], out: null}
"""


def load(folder: Path, *overrides: str, text: str = FILE) -> dict[str, Any]:
    file = folder / "job.yaml"
    file.write_text(text)
    return load_job_file(str(file), overrides)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("config.steps=5", "config.steps", 5),
        ("config.optim.lr=1e-3", "config.optim.lr", 1e-3),
        ("config.optim={lr: 2}", "config.optim", {"lr": 2, "name": "adam"}),
        ("config.layers=[7]", "config.layers", [7]),
        ("config.layers[0]=5", "config.layers", [5, {"dim": 8}]),
        ("config.layers.1.dim=5", "config.layers", [1, {"dim": 5}]),
        ("config.out=null", "config.out", None),
        ("config.out=''", "config.out", ""),
        ("config.out=${config.steps}", "config.out", 3),
        ("config.out=2:8", "config.out", "2:8"),
        ("+config.new=5", "config.new", 5),
        ("+config.a.b.c=5", "config.a", {"b": {"c": 5}}),
        ("+config.out.deep=5", "config.out", {"deep": 5}),
        ("+config.steps=5", "config.steps", 5),
        ("roles.actor.count=8", "roles.actor", {"count": 8}),
        ("roles.actor.script=a.py", "roles.actor", {"count": 4, "script": "a.py"}),
        ("roles.rollout=8", "roles.rollout", {"count": 8, "script": "serve.py"}),
        ("+roles.critic=2", "roles.critic", {"count": 2}),
        ("trainer.max_restarts=1", "trainer", {"class": "ppo:PPOTrainer", "max_restarts": 1}),
        ("max_restarts=2", "max_restarts", 2),
        ("env.DEBUG=1", "env", {"DEBUG": 1}),
        ("roles.actor.env.DEBUG=1", "roles.actor", {"count": 4, "env": {"DEBUG": 1}}),
        ("log.tee=3", "log", {"tee": 3}),
    ],
)
def test_an_override_says_what_a_value_is(tmp_path: Path, override: str, path: str, value: object) -> None:
    found: Any = load(tmp_path, override)
    for part in path.split("."):
        found = found[part]
    assert found == value


def test_one_override_sees_what_another_has_added(tmp_path: Path) -> None:
    found = load(tmp_path, "+config.a.b=1", "config.a.b=2", "config.a={c: 3}")
    assert found["config"]["a"] == {"b": 2, "c": 3}


def test_a_file_without_names_takes_all(tmp_path: Path) -> None:
    found = load(tmp_path, "config.lr=1", "config.deep.er=2", "roles.actor.count=3", text="script: a.py")
    assert (found["config"], found["roles"]) == ({"lr": 1, "deep": {"er": 2}}, {"actor": {"count": 3}})


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "config.stepz=5",
            "the job file has no 'stepz' in config; did you mean 'steps'?; +config.stepz=5 adds",
        ),
        ("config.optin.lr=5", "has no 'optin' in config; did you mean 'optim'?; +config.optin.lr=5 adds it"),
        (
            "config.optim.beta=5",
            "the job file has no 'beta' in config.optim; known: lr, name; +config.optim.be",
        ),
        ("config.out.deep=5", "the job file has no 'deep' in config.out; there are none; +config.out.deep=5"),
        ("roles.acter.count=5", "the job file has no 'acter' in roles; did you mean 'actor'?"),
        ("roles.critic=5", "has no 'critic' in roles; known: actor, rollout; +roles.critic=5 adds it"),
        ("config.steps.x=5", "config.steps is 3, which has no keys; write config.steps=VALUE"),
        ("config.layers[2]=5", "config.layers is a list of 2, and has no item 2; items are counted from 0"),
        ("config.layers.x=5", "config.layers is a list of 2, and has no item x"),
        ("roles.actor.count=", "has no value; write roles.actor.count=VALUE; null is for none"),
        ("config.steps= ", "has no value; write config.steps=VALUE"),
        ("config.steps=[1,2", "its value is no YAML: line 1, column 5: expected ',' or ']'"),
        ("config.steps={a", "its value is no YAML: "),
        ("config.steps=${a", "no viable alternative at input '${a'; quote it"),
        ("=5", "is no override; write key=value"),
        ("config.=5", "is no override; write key=value"),
        ("config..steps=5", "is no override"),
        ("config steps=5", "is no override"),
    ],
)
def test_a_fault_names_the_override_and_what_may_be_meant(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, override)
    assert str(caught.value).startswith(f"{override}: ")
    assert says in str(caught.value)


def test_all_faults_of_overrides_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, "config.a=1", "config.steps=2", "config.b=[")
    assert [fault.where for fault in caught.value.faults] == ["config.a=1", "config.b=["]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("config:\n  out: ???", "job.yaml: config.out: has no value yet (???)"),
        ("name: ${nothing.here}", "job.yaml: name: Interpolation key 'nothing.here' not found"),
        ("name: ${name}", "job.yaml: name: Recursive interpolation detected"),
        ("roles: {a: 1}: x", "job.yaml: is no YAML: line 1, column 14: "),
        ("a: " + "[" * 400 + "]" * 400, "job.yaml: is nested too deeply"),
        ("a: " + "{b: " * 150 + "1" + "}" * 150, "job.yaml: is nested too deeply"),
        ("config: {n: " + "9" * 5000 + "}", "job.yaml: a number of more than 4300 digits"),
        ("config: {n: 0x" + "f" * 5000 + "}", "job.yaml: config.n: a number of more than 4096 bits"),
        ("args: [0x" + "f" * 5000 + "]", "job.yaml: args.0: a number of more than 4096 bits"),
    ],
)
def test_what_no_job_file_can_hold_is_told_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, text=text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    ["9" * 5000, "0x" + "f" * 5000, "[" * 400 + "]" * 400, "{a: " * 150 + "1" + "}" * 150],
    ids=lambda v: v[:4],
)
def test_an_override_that_cannot_be_parsed_is_a_spec_error(tmp_path: Path, value: str) -> None:
    with pytest.raises(SpecError):
        load(tmp_path, f"config.steps={value}")


@pytest.mark.parametrize(
    "text", ['{"a": ' + "[" * 100_000, '{"a": ' + "9" * 5000 + "}", '{"a": ' + "[" * 150 + "]" * 150 + "}"]
)
def test_a_json_file_that_cannot_be_parsed_is_a_spec_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "job.json"
    file.write_text(text)
    with pytest.raises(SpecError):
        load_job_file(str(file))


KEYS = st.sampled_from(["config", "roles", "actor", "steps", "optim", "layers", "0", "new", "env", "é", ""])
VALUES = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    [
        "1",
        "[1, 2",
        "${config.steps}",
        "${",
        "???",
        "{a: 1}",
        "!!int x",
        "&a [*a]",
        "'",
        "#",
        "2024-01-01",
        "\0",
    ]
)


@given(
    overrides=st.lists(
        st.builds(
            lambda add, keys, sign, value: f"{add}{'.'.join(keys)}{sign}{value}",
            st.sampled_from(["", "+"]),
            st.lists(KEYS, min_size=1, max_size=4),
            st.sampled_from(["=", "[0]=", "", "=="]),
            VALUES,
        ),
        max_size=3,
    )
)
def test_any_override_is_taken_or_refused(
    overrides: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    try:
        load(tmp_path_factory.mktemp("job"), *overrides)
    except SpecError as error:
        assert error.faults


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("actor.count=3", "did you mean roles.actor.count=3?"),
        ("optim.lr=3", "did you mean config.optim.lr=3?"),
        ("+steps=3", "did you mean +config.steps=3?"),
        ("gamma=0.9", "+config.gamma=0.9 adds it to your own configuration"),
        ("+gamma=0.9", "+config.gamma=0.9 adds it to your own configuration"),
    ],
)
def test_a_key_that_is_no_jobs_is_looked_for_where_the_user_chooses_keys(
    tmp_path: Path, override: str, remedy: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, override)
    (fault,) = caught.value.faults
    assert fault.remedy == remedy


@pytest.mark.parametrize(
    ("value", "remedy"),
    [("${config.steps}", "quote it in braces: '${config.steps}'"), ("???", "quote it in braces: '???'")],
)
def test_what_yaml_does_not_take_in_braces_is_to_be_quoted(tmp_path: Path, value: str, remedy: str) -> None:
    with pytest.raises(SpecError, match="is no YAML: line 2") as caught:
        load(tmp_path, text=f"roles: {{actor: 4}}\nconfig: {{x: {value}}}\n")
    assert caught.value.faults[0].remedy == remedy
