"""Programs and services in a job file: each key, each fault with its remedy, and the order of roles."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from unirun.errors import SpecError
from unirun.spec.job import PORT_RANGE, READY_TIMEOUT, Entry, JobSpec, Probe, RoleSpec
from unirun.spec.parse import parse_job
from unirun.spec.programs import interpreter, lacks_unirun, variables_of
from unirun.spec.yaml import load_job_file, write_yaml

SERVE = {"program": "sleep", "service": True, "args": ["--port", "{port}"]}
TRAIN = {"program": "true"}


def parse(roles: dict[str, Any], **more: Any) -> JobSpec:
    return parse_job({"roles": roles, **more}, count_slots=lambda _: 1, run_id="x")


def engine(**more: Any) -> RoleSpec:
    """A service ``engine`` with these keys, beside a role ``train``."""
    return parse({"engine": {**SERVE, **more}, "train": TRAIN}).role("engine")


def faults(roles: dict[str, Any], **more: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse(roles, **more)
    return [f"{fault.where}: {fault.problem}; {fault.remedy}" for fault in caught.value.faults]


def engine_faults(**more: Any) -> list[str]:
    return faults({"engine": {**SERVE, **more}, "train": TRAIN})


class TestDefaults:
    def test_defaults_of_a_program_are_one_rank_without_a_slot_or_a_restart(self) -> None:
        role = parse({"train": TRAIN}).role("train")
        assert (role.count, role.slots, role.contract, role.start_method) == (1, 0, "none", "exec")
        assert (role.restart, role.max_restarts, role.ports, role.ready) == ("role", 0, (), None)
        assert (role.restart_window, role.restart_delay, role.service, role.after) == (0.0, 0.0, False, {})

    def test_defaults_of_a_service_are_a_port_and_ten_restarts_in_an_hour_of_each_rank(self) -> None:
        role = engine()
        assert (role.ports, role.ready, role.ready_timeout) == (("http",), Probe("tcp"), READY_TIMEOUT)
        assert (role.restart, role.max_restarts) == ("process", 10)
        assert (role.restart_window, role.restart_delay) == (3600.0, 1.0)
        assert (role.optional, role.alive, role.group) == (False, None, None)

    @pytest.mark.parametrize("more", [{"args": []}, {"args": ["{rank}", "{{port}}"]}, {"ports": []}])
    def test_defaults_of_a_service_that_is_not_told_its_port_have_no_probe(
        self, more: dict[str, Any]
    ) -> None:
        assert engine(**{"args": [], **more}).ready is None

    @pytest.mark.parametrize("text", ["{addr}", "{ports.http}"])
    def test_defaults_of_a_service_that_finds_its_port_in_a_variable_ask_it(self, text: str) -> None:
        assert engine(args=[], env={"LISTEN": text}).ready == Probe("tcp")

    def test_defaults_of_a_service_with_the_contract_of_torchrun_restart_it_as_a_whole(self) -> None:
        role = engine(contract="torchrun", args=[])
        assert (role.contract, role.restart, role.is_program) == ("torchrun", "role", False)
        assert (role.restart_window, role.restart_delay) == (3600.0, 0.0)
        assert parse({"train": TRAIN}, contract="torchrun").role("train").contract == "torchrun"

    def test_defaults_of_the_primary_roles_leave_services_out(self) -> None:
        assert parse({"engine": SERVE, "train": TRAIN, "other": TRAIN}).primary == ("train", "other")
        assert parse({"engine": SERVE}).primary == ()

    def test_defaults_of_the_port_range_are_below_those_of_clients(self) -> None:
        assert parse({"train": TRAIN}).port_range == PORT_RANGE
        assert parse({"train": TRAIN}, port_range="5000 - 5010").port_range == (5000, 5010)


class TestKeys:
    def test_keys_of_a_service_are_all_read(self) -> None:
        role = engine(
            count=4,
            ports=["http", "dist"],
            optional=True,
            ready="http://{addr}/health",
            ready_timeout=90,
            alive={"tcp": True, "every": 1},
            group=2,
            after={"train": 1},
            max_restarts=3,
            restart_window=60,
            restart_delay=0.5,
        )
        assert (role.count, role.ports, role.optional, role.group) == (4, ("http", "dist"), True, 2)
        assert role.ready == Probe("http", ("http://{addr}/health",))
        assert (role.ready_timeout, role.alive) == (90.0, Probe("tcp", every=1.0))
        assert (role.max_restarts, role.restart_window, role.restart_delay) == (3, 60.0, 0.5)
        assert role.after == {"train": 1}

    @pytest.mark.parametrize(
        ("after", "read"),
        [("a", {"a": 0}), (["a", "b"], {"a": 0, "b": 0}), ({"a": 2, "b": "1"}, {"a": 2, "b": 1}), ([], {})],
    )
    def test_keys_of_the_order_are_a_name_or_several_or_numbers_of_ranks(
        self, after: Any, read: dict[str, int]
    ) -> None:
        roles = {"a": {**TRAIN, "count": 2}, "b": TRAIN, "c": {**TRAIN, "after": after}}
        assert parse(roles).role("c").after == read


class TestFaults:
    @pytest.mark.parametrize(
        ("more", "fault"),
        [
            ({"ports": ["8000"]}, "ports: '8000' is no name of a port; name the ports; unirun chooses the numbers, from port_range: ports: [http]"),
            ({"ports": 8000}, "ports: expected a list of texts, found 8000; "),
            ({"ports": ["http", "http"]}, "ports: a name stands there twice; name each port once"),
            ({"args": [], "ports": [], "ready": "tcp"}, "ready: the role has no port; write ports: [http]"),
            ({"args": [], "ports": [], "ready": {"file": "x"}, "alive": "tcp"}, "alive: the role has no port; write ports: [http]"),
            ({"args": [], "alive": "tcp"}, "alive: it is asked once the program is ready, and there is no ready:; write ready: tcp"),
            ({"ready_timeout": 0}, "ready_timeout: expected a number of seconds, at least 0.01, found 0; "),
            ({"restart_window": -1}, "restart_window: expected a number of seconds, at least 0, found -1; "),
            ({"restart_delay": "soon"}, "restart_delay: expected a number of seconds, at least 0, found 'soon'; "),
            ({"rank_restarts": 2}, "rank_restarts: max_restarts is for each rank of a service; leave it out"),
            ({"optional": "no"}, "optional: expected true or false, found 'no'; "),
            ({"service": False, "optional": True}, "optional: only a service is; add service: true"),
            ({"count": 3, "group": 2}, "group: 2 does not divide the role's 3 ranks; write count: 2, or a multiple"),
            ({"count": 2, "group": 0}, "group: expected a number from 1 to 1000000, found 0; "),
            ({"count": "1:2"}, "count: ranks with ports have a fixed number, so that their addresses stay; write one number"),
            ({"contract": "mpi"}, "contract: expected one of torchrun, none, found 'mpi'; "),
            ({"after": "trian"}, "after: no role is called 'trian'; did you mean 'train'?"),
            ({"after": {"train": 2}}, "after: train has 1, so 2 are never ready; write a smaller number"),
            ({"after": {"train": 0}}, "after.train: expected a number from 1 to 1000000, found 0; "),
            ({"args": ["--mode", True]}, "args: expected a list of texts, found ['--mode', True]; quote it"),
            ({"args": [{"port": None}]}, "args: expected a list of texts, found [{'port': None}]; quote it: '{port}'"),
            ({"env": {"P": {"port": None}}}, "env.P: expected a text or a number, found {'port': None}; quote it: '{port}'"),
        ],
    )  # fmt: skip
    def test_faults_of_a_service_say_what_to_write(self, more: dict[str, Any], fault: str) -> None:
        assert f"roles.engine.{fault}" in engine_faults(**more)

    def test_faults_are_groups_of_roles_that_are_no_services(self) -> None:
        problem = (
            "only ranks of a service are one server together; leave it out; per_group keeps ranks on one node"
        )
        roles: dict[str, Any] = {"train": {**TRAIN, "count": 2, "group": 2}}
        assert faults(roles) == [f"roles.train.group: {problem}"]

    def test_faults_are_more_groups_than_there_are(self) -> None:
        roles = {"engine": {**SERVE, "count": 4, "group": 2}, "train": {**TRAIN, "after": {"engine": 3}}}
        problem = "engine has 2, so 3 are never ready; write a smaller number"
        assert faults(roles) == [f"roles.train.after: {problem}"]

    def test_faults_are_more_ranks_than_a_role_has_at_least(self) -> None:
        """With two it would run to its end, and `train` would wait for ever."""
        roles: dict[str, Any] = {"data": {**TRAIN, "count": "2:8"}, "train": {**TRAIN, "after": {"data": 3}}}
        problem = "data may have 2 only, so 3 may never be ready; write a smaller number"
        assert faults(roles) == [f"roles.train.after: {problem}"]
        roles["train"]["after"]["data"] = 2
        assert parse(roles).role("train").after == {"data": 2}

    def test_faults_are_services_that_are_primary(self) -> None:
        problem = "engine is a service, which is needed until the primary roles have ended"
        remedy = "leave out service: true, or name another role"
        primary = faults({"engine": SERVE, "train": TRAIN}, primary=["engine"])
        assert primary == [f"primary: {problem}; {remedy}"]

    @pytest.mark.parametrize("value", ["8000", "0-10", "9-8", "1-65536"])
    def test_faults_are_ranges_of_other_things_than_ports(self, value: Any) -> None:
        problem = f"expected two numbers of ports, found {value!r}"
        assert faults({"train": TRAIN}, port_range=value) == [f"port_range: {problem}; write 20000-29999"]

    def test_faults_are_keys_of_programs_in_workloads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("ppo.py").write_text("class Actor: ...\n")
        actor = {"workload": "ppo:Actor", "ports": ["http"], "ready": "tcp", "contract": "none"}
        assert faults({"actor": {**actor, "service": True, "python": "."}}) == [
            "roles.actor.contract: a workload has that of torchrun; leave it out, or write program: NAME",
            "roles.actor.service: a workload is none; leave it out: the job ends without waiting for workloads",
            "roles.actor.ready: a workload says itself when it takes calls; leave it out",
            "roles.actor.python: a workload runs with unirun's own interpreter; "
            "leave it out; scripts, modules and programs may have another one",
            "roles.actor.python: '.' is no virtual environment, and no interpreter; "
            "name its directory, which has bin/python, or the interpreter",
        ]  # fmt: skip


class TestPython:
    @pytest.fixture
    def venv(self, tmp_path: Path) -> Path:
        """A virtual environment, as ``python -m venv`` makes it."""
        (tmp_path / "venv/bin").mkdir(parents=True)
        (tmp_path / "venv/pyvenv.cfg").touch()
        (tmp_path / "venv/bin/python").symlink_to("/bin/sh")
        return tmp_path / "venv"

    def test_python_is_the_interpreter_of_a_virtual_environment(self, venv: Path) -> None:
        python = str(venv / "bin/python")
        assert (interpreter(str(venv)), interpreter(python)) == (python, python)
        role = parse({"train": {**TRAIN, "python": str(venv)}}).role("train")
        assert role.python == python

    def test_python_is_not_followed_to_the_interpreter_that_the_environment_was_made_of(
        self, venv: Path
    ) -> None:
        assert interpreter(str(venv)) != "/bin/sh"

    def test_python_of_a_script_has_unirun(
        self, venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
        packages = venv / "lib/python3.11/site-packages"
        packages.mkdir(parents=True)
        (packages / "torch").mkdir()
        (packages / "_virtualenv.pth").write_text("import _virtualenv\n\n# a comment\n/nowhere\n")
        (tmp_path / "train.py").touch()
        train = {"script": str(tmp_path / "train.py"), "python": str(venv)}
        python = venv / "bin/python"
        assert faults({"train": train}) == [
            f"roles.train.python: unirun is not installed in {venv}, and a script needs it there; "
            f"run {python} -m pip install torch-unirun, or write program: python, which does not need it"
        ]
        parse({"train": {**TRAIN, "python": str(venv)}})
        parse({"train": {**train, "env": {"PYTHONPATH": "/src"}}})
        (packages / "torch_unirun-0.1.0.dist-info").mkdir()
        parse({"train": train})

    @pytest.mark.parametrize(
        ("file", "text"),
        [
            ("pyvenv.cfg", "home = /usr\nInclude-System-Site-Packages = True\n"),
            ("lib/python3.11/site-packages/sitecustomize.py", ""),
            ("lib/python3.11/site-packages/other.pth", "../../../other\n"),
            ("lib/python3.11/site-packages/torch-unirun.egg-link", "/src"),
        ],
    )
    def test_python_may_find_unirun_elsewhere(self, venv: Path, file: str, text: str) -> None:
        (venv / "lib/python3.11/site-packages").mkdir(parents=True)
        (venv / "other/unirun").mkdir(parents=True)
        assert lacks_unirun(str(venv / "bin/python"))
        (venv / file).write_text(text)
        assert not lacks_unirun(str(venv / "bin/python"))

    def test_python_of_no_virtual_environment_is_not_known(self, venv: Path) -> None:
        assert not lacks_unirun(str(venv / "bin/python")), "it has no packages"
        (venv / "lib/python3.11/site-packages").mkdir(parents=True)
        (venv / "pyvenv.cfg").unlink()
        assert not lacks_unirun(str(venv / "bin/python"))
        assert not lacks_unirun(sys.executable)

    def test_python_is_searched_in_path_or_below_the_home_directory(
        self, venv: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(venv / "bin"))
        monkeypatch.setenv("HOME", str(venv.parent))
        assert interpreter("python") == str(venv / "bin/python")
        assert interpreter("~/venv") == str(venv / "bin/python")
        assert interpreter("python9") is None
        assert interpreter("x" * 300) is None

    def test_python_that_is_missing_or_no_program_is_told(self, venv: Path) -> None:
        (venv / "bin/notes").touch()
        for path in (venv / "bin", venv / "nothing", venv / "bin/notes"):
            assert faults({"train": {**TRAIN, "python": str(path)}}) == [
                f"roles.train.python: {str(path)!r} is no virtual environment, and no interpreter; "
                "name its directory, which has bin/python, or the interpreter"
            ]

    def test_python_comes_from_the_job_for_the_roles_that_have_none(self, venv: Path) -> None:
        roles = {"a": TRAIN, "b": {**TRAIN, "python": "/bin/sh"}}
        spec = parse(roles, python=str(venv))
        assert [role.python for role in spec.roles] == [str(venv / "bin/python"), "/bin/sh"]

    def test_python_finds_the_program_of_its_environment_first(self, venv: Path) -> None:
        (venv / "bin/vllm").touch(mode=0o755)
        assert parse({"train": {"program": "vllm", "python": str(venv)}}).role("train").entry.target == "vllm"
        assert faults({"train": {"program": "vllm"}})

    def test_python_sets_the_variables_that_activate_sets(self, venv: Path) -> None:
        folder = {"PATH": str(venv / "bin"), "VIRTUAL_ENV": str(venv), "PYTHONHOME": None}
        assert variables_of(str(venv / "bin/python")) == folder
        assert variables_of("/bin/sh") == {"PATH": "/bin", "VIRTUAL_ENV": None, "PYTHONHOME": None}
        assert variables_of(None) == {}


class TestCircles:
    def test_circles_are_refused_with_their_names(self) -> None:
        roles = {name: {**TRAIN, "after": [other]} for name, other in (("a", "b"), ("b", "c"), ("c", "b"))}
        assert faults(roles) == ["roles.b.after: a circle: b after c after b; drop one of them"]
        assert faults({"a": {**TRAIN, "after": "a"}}) == [
            "roles.a.after: a circle: a after a; drop one of them"
        ]

    def test_each_circle_is_told(self) -> None:
        roles = {name: {**TRAIN, "after": [other]} for name, other in zip("abcde", "baded", strict=True)}
        found = faults(roles)
        assert [fault.partition(": ")[0] for fault in found] == ["roles.a.after", "roles.d.after"]

    names = "abcdef"
    pairs = st.lists(st.tuples(st.sampled_from(names), st.sampled_from(names)), max_size=10)

    def roles(self, pairs: list[tuple[str, str]]) -> dict[str, Any]:
        return {name: {**TRAIN, "after": [b for a, b in pairs if a == name]} for name in self.names}

    @given(pairs, st.permutations(names))
    def test_circles_are_in_no_order_that_has_a_beginning(
        self, pairs: list[tuple[str, str]], order: list[str]
    ) -> None:
        forward = [pair for pair in pairs if order.index(pair[0]) > order.index(pair[1])]
        assert len(parse(self.roles(forward)).roles) == len(self.names)

    @given(pairs, st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True))
    def test_circles_are_found_wherever_they_are(
        self, pairs: list[tuple[str, str]], circle: list[str]
    ) -> None:
        around = [*zip(circle, [*circle[1:], circle[0]], strict=True)]
        found = faults(self.roles([*pairs, *around]))
        assert found
        assert all(": a circle: " in fault for fault in found)


probes = st.sampled_from(
    [
        "tcp",
        "http://{addr}/health",
        {"file": "/tmp/{rank} äß"},
        {"command": ["test", "-e", "{ports.http}"]},
        {"tcp": "{host}:{ports.http}"},
    ]
)
services = st.fixed_dictionaries(
    {
        "program": st.just("sleep"),
        "service": st.just(True),
        "args": st.lists(st.sampled_from(["{port}", '{"a": {}}', "{{port}}", "a: b", "- x", "1"]), max_size=3),
        "ports": st.sampled_from([["http"], ["http", "dist"], "http"]),
    },
    optional={
        "count": st.sampled_from([2, 4]),
        "group": st.sampled_from([1, 2]),
        "optional": st.booleans(),
        "ready_timeout": st.floats(0.5, 1e6),
        "max_restarts": st.integers(0, 9),
        "restart_window": st.floats(0, 1e6),
        "restart_delay": st.floats(0, 1e6),
        "contract": st.just("none"),
        "python": st.just("/bin/sh"),
        "slots": st.sampled_from([0, 1]),
        "cpus": st.sampled_from([2, "all"]),
        "memory": st.just("64GB"),
    },
).flatmap(
    lambda role: st.builds(
        lambda ready, alive: {**role, **({"ready": ready, "alive": alive} if ready else {})},
        st.none() | probes | st.just({"log": "a(b|c)"}),
        st.none() | probes,
    )
).filter(lambda role: role.get("count", 1) % role.get("group", 1) == 0)  # fmt: skip


@examples(60)
@given(role=services, wanted=st.sampled_from(["engine", ["engine"], {"engine": 1}]))
def test_a_spec_of_services_survives_json_and_a_job_file(
    role: dict[str, Any], wanted: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    roles = {"engine": role, "train": {**TRAIN, "args": ["{roles.engine.addrs}"], "after": wanted}}
    spec = parse(roles, port_range="5000-5999")
    assert JobSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    file = tmp_path_factory.mktemp("job") / "job.yaml"
    file.write_text(write_yaml({"roles": roles, "port_range": "5000-5999"}))
    assert parse_job(load_job_file(str(file)), count_slots=lambda _: 1, run_id="x") == spec


@given(st.none() | st.integers(1, 5), st.integers(0, 30))
def test_groups_of_ranks_follow_each_other(size: int | None, rank: int) -> None:
    role = RoleSpec("engine", 40, Entry("program", "serve"), contract="none", group=size)
    members = [*role.members(rank)]
    assert len(members) == (size or 1)
    assert rank in members
    assert members[0] == role.head(rank)
    assert all([*role.members(each)] == members for each in members)
