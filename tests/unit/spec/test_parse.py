"""From any mapping to a checked spec, or to faults; and from a spec to JSON and YAML and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec import structs

from tests.effort import examples
from unirun.errors import SpecError
from unirun.spec.job import ChannelSpec, Entry, JobSpec, LogSpec, RoleSpec
from unirun.spec.parse import JOB_KEYS, LOG_KEYS, NUMA_MODES, handle_name, parse_job
from unirun.spec.read import RESERVED_ENV, nearest
from unirun.spec.roles import ROLE_KEYS, TRAINER_KEYS
from unirun.spec.yaml import load_job_file

quick = examples(80)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(
        ["auto", "gpu", "train.py", "0:1", "1,2", "SIGTERM", "a:b", "x" * 400, "\ud800", "\0", "/", "json:X"]
    )
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def mapping_of(keys: tuple[str, ...], special: dict[str, Any]) -> Any:
    known = {key: special.get(key, json_values) | scalars for key in keys}
    return st.fixed_dictionaries({}, optional=known).flatmap(
        lambda found: (
            st.just(found)
            | st.dictionaries(st.text(max_size=5), json_values, max_size=1).map(
                lambda more: {**more, **found}
            )
        )
    )


roles_like = mapping_of(ROLE_KEYS, {})
jobs_like = mapping_of(
    JOB_KEYS,
    {
        "roles": st.dictionaries(
            st.sampled_from(["actor", "rollout", "trainer", "9", ""]), roles_like | scalars, max_size=2
        ),
        "trainer": mapping_of(TRAINER_KEYS, {}),
        "collocations": st.lists(
            st.lists(st.sampled_from(["actor", "rollout", "trainer", "critic"]) | scalars, max_size=3)
            | json_values,
            max_size=3,
        ),
        "log": mapping_of(LOG_KEYS, {}),
    },
)


def count(kind: str) -> int:
    if kind == "gpu":
        raise ValueError("no GPU")
    return 2


@quick
@given(jobs_like)
@example({"roles": {"a": {"script": "x" * 5000}}})
@example({"script": "x", "cwd": "y" * 5000})
@example({"shutdown_timeout": 10**400})
@example({"config": {"a": float("nan")}})
def test_any_mapping_gives_a_spec_or_faults_and_nothing_else(data: dict[str, Any]) -> None:
    try:
        spec = parse_job(data, count_slots=count, run_id="fallback")
    except SpecError as error:
        assert error.faults
        assert all(fault.problem for fault in error.faults)
    else:
        assert JobSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


names = st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,8}", fullmatch=True)
texts = st.text("abXY09 ._-/=:,#'\"{}[]&*!|>%@äß中\t\n", max_size=8)
env_names = (
    st.from_regex(r"[A-Z_][A-Z0-9_]{0,6}", fullmatch=True)
    .map(lambda name: f"{name}_" if name in RESERVED_ENV or name.startswith("UNIRUN_") else name)
    .filter(lambda name: not name.startswith("UNIRUN_"))
)
envs = st.dictionaries(env_names, texts, max_size=3)
configs = st.dictionaries(
    names,
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**31), 2**31) | texts,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
        max_leaves=4,
    ),
    max_size=2,
)
arguments = st.lists(texts, max_size=3).map(tuple)
scripts = st.builds(Entry, st.just("script"), st.just("train.py"), arguments) | st.builds(
    Entry, st.just("module"), st.just("train"), arguments
)
workloads = st.builds(Entry, st.just("workload"), st.sampled_from(["ppo:Actor", "ppo:Rollout"]), arguments)


@st.composite
def roles(draw: st.DrawFn, entries: st.SearchStrategy[Entry], named: st.SearchStrategy[str]) -> RoleSpec:
    entry = draw(entries)
    per_node = draw(st.none() | st.integers(1, 8))
    by_class = entry.kind in ("workload", "trainer")
    return RoleSpec(
        name=draw(named),
        count=1 if entry.kind == "trainer" else draw(st.integers(1, 100)) * (per_node or 1),
        entry=entry,
        env=draw(envs),
        cwd=draw(st.none() | st.just(".")),
        max_restarts=draw(st.integers(0, 99)),
        fatal_exit_codes=draw(st.lists(st.integers(1, 255), max_size=3).map(tuple)),
        start_method=draw(st.sampled_from(["fork", "exec"])),
        restart="process" if by_class else "role",
        per_node=None if entry.kind == "trainer" else per_node,
        auto_visible_device=entry.kind == "trainer" or draw(st.booleans()),
    )


trainers = roles(st.just(Entry("trainer", "ppo:PPOTrainer")), st.just("trainer"))
masks = st.sampled_from(["0", "3", "0:1", "0:1,12:3"])
filters = st.lists(texts.filter(bool), max_size=2).map(tuple)
seconds = st.integers(1, 10_000).map(lambda n: n / 16)
logs = st.builds(
    LogSpec,
    dir=st.none() | st.just("logs"),
    redirects=masks,
    tee=masks,
    local_ranks_filter=st.none() | st.lists(st.integers(0, 9), max_size=3).map(tuple),
    duplicate_stdout_filters=filters,
    duplicate_stderr_filters=filters,
)


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    each = roles(scripts | workloads, names.filter(lambda name: name != "trainer"))
    chosen = draw(st.lists(each, min_size=1, max_size=3, unique_by=lambda role: handle_name(role.name)))
    together = draw(st.booleans()) and len(chosen) > 1
    if together:
        # Roles that share devices have the same numbers.
        size = {"count": chosen[0].count, "per_node": chosen[0].per_node}
        chosen = [structs.replace(role, **size) for role in chosen]
    collocations = (tuple(role.name for role in chosen),) if together else ()
    chosen += draw(st.lists(trainers, max_size=1))
    known = [role.name for role in chosen]
    return JobSpec(
        name=draw(names),
        run_id=draw(names),
        roles=tuple(chosen),
        primary=tuple(draw(st.lists(st.sampled_from(known), min_size=1, max_size=2, unique=True))),
        env=draw(envs),
        config=draw(configs),
        preload=tuple(draw(st.lists(names, max_size=2))),
        master_addr=draw(st.sampled_from(["127.0.0.1", "localhost", "::1"])),
        master_port=draw(st.integers(0, 65535)),
        shutdown_timeout=draw(seconds),
        join_timeout=draw(seconds.filter(lambda s: s >= 0.1)),
        sample_interval=draw(seconds),
        virtual_local_rank=draw(st.booleans()),
        numa_binding=draw(st.none() | st.sampled_from(NUMA_MODES)),
        signals=tuple(draw(st.lists(st.sampled_from(["SIGTERM", "SIGINT", "SIGUSR1"]), max_size=2))),
        event_log=draw(st.sampled_from(["null", "console"])),
        log=draw(logs),
        collocations=collocations,
        exclude_nodes=tuple(draw(st.lists(st.sampled_from(["node3", "n-7.rack_2"]), unique=True))),
        channels=(ChannelSpec("policy", known[0], tuple(known[1:])),) if len(known) > 1 else (),
        call_timeout=draw(seconds),
        transport=draw(st.sampled_from(["torch", "socket"])),
        stdin=draw(st.none() | st.sampled_from([f"{name}:0" for name in known])),
        notify_command=draw(st.sampled_from(["", "curl -d @- http://h/x"])),
    )


def write_code() -> None:
    """Write the files that the specs name."""
    Path("train.py").touch()
    Path("ppo.py").write_text("class Actor: ...\nclass Rollout: ...\nclass PPOTrainer: ...\n")


def as_job_file(spec: JobSpec) -> dict[str, Any]:
    """The mapping that a person would write for `spec`."""
    data = spec.to_json()
    # That is an option of the command.
    del data["most_nodes"]
    data["port_range"] = "-".join(map(str, spec.port_range))
    every = ("env", "cwd", "max_restarts", "fatal_exit_codes", "start_method")
    data["roles"] = {
        role["name"]: {
            **{key: role[key] for key in (*every, "count", "per_node", "auto_visible_device")},
            role["entry"]["kind"]: role["entry"]["target"],
            "args": role["entry"]["args"],
        }
        for role in spec.to_json()["roles"]
    }
    data["channels"] = {
        channel["name"]: {key: channel[key] for key in ("publisher", "receivers")}
        for channel in data["channels"]
    }
    trainer = data["roles"].pop("trainer", None)
    if trainer is not None:
        data["trainer"] = {"class": trainer["trainer"], **{key: trainer[key] for key in every}}
    plain: dict[str, Any] = json.loads(json.dumps(data))
    return plain


@quick
@given(specs())
def test_a_spec_survives_json(spec: JobSpec) -> None:
    assert JobSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@examples(40)
@given(spec=specs())
def test_a_spec_survives_a_job_file(
    spec: JobSpec, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("job")
    monkeypatch.chdir(folder)
    write_code()
    Path("job.yaml").write_text(yaml.safe_dump(as_job_file(spec), allow_unicode=True, sort_keys=False))
    assert parse_job(load_job_file("job.yaml"), count_slots=count, run_id="other") == spec


@quick
@given(spec=specs())
def test_a_mapping_is_parsed_without_being_changed(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_code()
    mapping = as_job_file(spec)
    before = json.dumps(mapping)
    assert parse_job(mapping, count_slots=count, run_id="x") == spec
    assert json.dumps(mapping) == before


@given(st.sampled_from(JOB_KEYS), st.integers(0, 20), st.characters(codec="ascii", categories=["Ll"]))
def test_a_slip_of_the_pen_gets_the_key_that_was_meant(key: str, place: int, letter: str) -> None:
    place = place % len(key)
    slip = key[:place] + letter + key[place + 1 :]
    assume(slip not in JOB_KEYS and len(key) > 4)
    with pytest.raises(SpecError) as caught:
        parse_job({slip: 1, "module": "this"}, count_slots=count, run_id="x")
    (fault,) = caught.value.faults
    assert (fault.where, fault.problem) == (slip, "unknown key")
    assert fault.remedy == nearest(slip, JOB_KEYS)
    assert "did you mean" in fault.remedy


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("gpus", "slots: N"),
        ("num_cpus", "cpus: N"),
        ("resources", "memory: 64GB"),
        ("depends_on", "after: "),
        ("replicas", "count: N"),
    ],
)
def test_a_key_of_another_launcher_gets_what_stands_for_it_here(key: str, remedy: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job({"roles": {"actor": {key: 1}}, "module": "this"}, count_slots=count, run_id="x")
    (fault,) = caught.value.faults
    assert (fault.where, fault.problem, remedy in fault.remedy) == (f"roles.actor.{key}", "unknown key", True)


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("gpus", "in a role, below roles: NAME:, write slots: N, the devices that each rank has"),
        ("depends_on", "in a role, below roles: NAME:, write after: [ROLE], and ready: in that role"),
        ("cpus", "it is a key of a role: write it below roles: NAME:"),
        ("after", "it is a key of a role: write it below roles: NAME:"),
    ],
)
def test_a_key_of_a_role_that_stands_beside_the_roles_is_told(key: str, remedy: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job({key: 1, "module": "this"}, count_slots=count, run_id="x")
    assert [(f.where, f.problem, f.remedy) for f in caught.value.faults] == [(key, "unknown key", remedy)]


def test_the_defaults_are_those_of_the_spec() -> None:
    spec = parse_job({"module": "this"}, count_slots=count, run_id="x")
    role = RoleSpec("default", 1, Entry("module", "this"))
    assert spec == JobSpec("this", "x", (role,), ("default",))


def test_a_role_takes_from_the_job_what_it_does_not_say() -> None:
    data = {
        "module": "this",
        "args": ["1"],
        "max_restarts": 2,
        "start_method": "spawn",
        "roles": {"a": {}, "b": 3},
    }
    spec = parse_job(data, count_slots=count, run_id="x")
    assert [(r.name, r.count, r.entry.args, r.max_restarts, r.start_method) for r in spec.roles] == [
        ("a", 1, ("1",), 2, "exec"),
        ("b", 3, ("1",), 2, "exec"),
    ]


def test_a_role_may_say_all_of_it() -> None:
    data = {
        "module": "this",
        "max_restarts": 2,
        "roles": {
            "a": {
                "module": "antigravity",
                "args": [],
                "max_restarts": 0,
                "start_method": "fork",
                "count": "auto",
            }
        },
    }
    (role,) = parse_job(data, count_slots=count, run_id="x").roles
    assert role == RoleSpec("a", 2, Entry("module", "antigravity"))


def test_a_file_that_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may read everything
    (tmp_path / "train.py").touch()
    with pytest.raises(SpecError, match="cannot be read; check its permissions"):
        parse_job({"script": str(tmp_path / "train.py")}, count_slots=count, run_id="x")


def test_a_folder_with_a_main_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").touch()
    assert parse_job({"script": str(tmp_path)}, count_slots=count, run_id="x").roles[0].entry.kind == "script"


def test_nodes_that_are_not_used_are_named_once() -> None:
    data = {"module": "this", "exclude_nodes": ["node3", "gpu-a_1.rack7.example", "node3"]}
    spec = parse_job(data, count_slots=count, run_id="x")
    assert spec.exclude_nodes == ("node3", "gpu-a_1.rack7.example")


@pytest.mark.parametrize("name", ["", "node1,node2", "node[1-3]", "node 1", "-n", "x" * 300])
def test_what_cannot_be_the_name_of_a_node_is_told(name: str) -> None:
    with pytest.raises(SpecError, match="exclude_nodes: .* is no name of a node; name each one"):
        parse_job({"module": "this", "exclude_nodes": [name]}, count_slots=count, run_id="x")


def test_programs_have_no_contract_unless_the_job_or_the_role_names_one() -> None:
    def contracts(**job: Any) -> list[str]:
        roles = {
            "a": {"program": "true"},
            "b": {"program": "true", "contract": "torchrun"},
            "c": {"module": "this"},
        }
        return [
            role.contract for role in parse_job({"roles": roles, **job}, count_slots=count, run_id="x").roles
        ]

    assert contracts() == ["none", "torchrun", "torchrun"]
    assert contracts(contract="torchrun") == ["torchrun", "torchrun", "torchrun"]
    assert contracts(contract="none") == ["none", "torchrun", "torchrun"]


def test_programs_need_no_slot_unless_they_ask_for_one_or_are_started_as_by_torchrun() -> None:
    def slots(entry: str = "program", **keys: Any) -> float:
        data = {"roles": {"a": {entry: "true" if entry == "program" else "this", **keys}}}
        return parse_job(data, count_slots=count, run_id="x").role("a").slots

    assert slots() == slots(per_node=1) == slots(slots=0) == slots("module", slots=0) == 0
    assert (
        slots(device="cuda") == slots(device="cpu") == slots(devices=[0]) == slots(contract="torchrun") == 1
    )
    assert (slots(slots=2), slots(slots=0.5, device="cuda"), slots("module")) == (2, 0.5, 1)
    assert slots(contract="torchrun", slots=0) == 0


def test_programs_without_torchruns_contract_have_one_rank_unless_they_say_how_many() -> None:
    roles = {
        "a": {"module": "this"},
        "b": {"program": "true"},
        "c": {"program": "true", "contract": "torchrun"},
        "d": {"program": "true", "count": 3},
    }
    data = {"roles": roles, "nproc_per_node": 4}
    here = parse_job(data, count_slots=count, run_id="x").roles
    assert [role.count for role in here] == [4, 1, 4, 3]
    on_nodes = parse_job(data, count_slots=count, run_id="x", nodes=(1, 2)).roles
    assert [(role.least, role.count, role.per_node) for role in on_nodes] == [
        (4, 8, 4),
        (None, 1, None),
        (4, 8, 4),
        (None, 3, None),
    ]


@pytest.mark.parametrize("role", [None, {}, {"count": None}], ids=str)
def test_a_role_whose_count_is_null_has_as_many_ranks_as_one_without(role: Any) -> None:
    data = {"module": "this", "roles": {"a": role}, "nproc_per_node": 4}
    assert parse_job(data, count_slots=count, run_id="x").roles[0].count == 4
    (on_nodes,) = parse_job(data, count_slots=count, run_id="x", nodes=(2, 2)).roles
    assert (on_nodes.count, on_nodes.per_node) == (8, 4)


def test_a_contract_of_what_is_no_program_is_told() -> None:
    with pytest.raises(SpecError, match=r"roles\.a\.contract: a module has that of torchrun; leave it out"):
        parse_job({"roles": {"a": {"module": "this", "contract": "none"}}}, count_slots=count, run_id="x")
    with pytest.raises(SpecError, match="expected one of torchrun, none, found 'slurm'"):
        parse_job({"program": "true", "contract": "slurm"}, count_slots=count, run_id="x")


def test_a_missing_program_is_told() -> None:
    with pytest.raises(SpecError, match="program 'no-such-program' is not found"):
        parse_job({"program": "no-such-program"}, count_slots=count, run_id="x")


def test_specs_are_frozen() -> None:
    spec = parse_job({"module": "this"}, count_slots=count, run_id="x")
    with pytest.raises(AttributeError, match="immutable"):
        spec.name = "other"  # type: ignore[misc]
    with pytest.raises(KeyError):
        spec.role("nobody")


@pytest.mark.parametrize(
    ("roles", "trainer", "primary"),
    [
        ({"a": {"program": "true"}, "b": {"program": "true"}}, None, ("a", "b")),
        ({"a": {"workload": "ppo:Actor"}, "b": {"program": "true"}}, None, ("b",)),
        ({"a": {"workload": "ppo:Actor"}}, None, ("a",)),
        ({"a": {"workload": "ppo:Actor"}}, "ppo:Trainer", ("trainer",)),
    ],
)
def test_a_job_ends_with_its_trainer_or_with_those_that_end_by_themselves(
    roles: dict[str, object],
    trainer: str | None,
    primary: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ppo.py").write_text("class Actor: ...\nclass Trainer: ...")
    data = {"roles": roles, **({"trainer": trainer} if trainer else {})}
    assert parse_job(data, count_slots=lambda _: 1, run_id="x").primary == primary


ROLES = {"actor": {"count": 2}, "rollout": {"count": "1:4"}}


@pytest.mark.parametrize(
    ("stdin", "problem"),
    [
        ("actr:0", "stdin: no role is called 'actr'; did you mean 'actor'?"),
        ("actor:2", "stdin: there is no actor:2: the ranks of actor are 0 to 1"),
        ("rollout:1", "stdin: there is no rollout:1: the ranks of rollout are 0 to 0"),
        ("actor", "stdin: 'actor' is no worker; write ROLE:RANK, for example actor:0"),
        ("actor:-1", "stdin: 'actor:-1' is no worker; write ROLE:RANK, for example actor:0"),
        (":0", "stdin: ':0' is no worker; write ROLE:RANK, for example actor:0"),
        (["actor:0"], "stdin: expected a text, found ['actor:0']"),
    ],
)
def test_a_reader_that_may_not_be_there_is_told(stdin: object, problem: str) -> None:
    data = {"roles": ROLES, "program": "/bin/true", "stdin": stdin}
    with pytest.raises(SpecError) as caught:
        parse_job(data, count_slots=count, run_id="x")
    assert [str(fault) for fault in caught.value.faults] == [problem]


@pytest.mark.parametrize(("stdin", "reader"), [("actor:01", ("actor", 1)), (None, None)])
def test_of_several_workers_the_one_that_is_named_reads(
    stdin: str | None, reader: tuple[str, int] | None
) -> None:
    data = {"roles": ROLES, "program": "/bin/true", "stdin": stdin}
    assert parse_job(data, count_slots=count, run_id="x").reader == reader
