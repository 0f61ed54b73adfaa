"""Ready-made services: what ``kind:`` stands for, and engines as receivers of weights."""

from __future__ import annotations

import os
import stat
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from unirun.errors import SpecError
from unirun.spec.job import ChannelSpec, JobSpec, Probe, RoleSpec
from unirun.spec.parse import parse_job
from unirun.weights.integrations.vllm_guard import SameHost

HEALTH = Probe("http", ("http://{addr}/health",))
CHANNELS = {"policy": {"publisher": "train", "receivers": ["engine"]}}
VLLM = {"kind": "vllm", "model": "/models/llama"}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a program ``vllm``."""
    program = tmp_path / "vllm"
    program.touch()
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def parse(engine: dict[str, Any], **more: Any) -> JobSpec:
    roles = {"train": {"module": "this"}, "engine": engine, **more.pop("roles", {})}
    return parse_job({"roles": roles, **more}, count_slots=lambda _: 1, run_id="x")


def faults(engine: dict[str, Any], **more: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse(engine, **more)
    return [f"{fault.where}: {fault.problem}; {fault.remedy}" for fault in caught.value.faults]


def args(**more: Any) -> tuple[str, ...]:
    return parse({**VLLM, **more}).role("engine").entry.args


class TestVllm:
    def test_vllm_is_a_service_with_a_port_and_its_health(self) -> None:
        role = parse(VLLM).role("engine")
        assert (role.service, role.ports, role.ready, role.alive) == (True, ("http",), HEALTH, HEALTH)
        assert (role.entry.kind, role.entry.target) == ("program", "vllm")
        assert role.entry.args[:2] == ("serve", "/models/llama")
        assert role.entry.args[2:] == ("--host", "{host}", "--port", "{port}", "--enable-scale-out")
        assert role.env == {}, "the routes of developers are closed"

    def test_vllm_has_more_arguments_and_other_settings_as_the_role_says(self) -> None:
        more = {
            "args": ["--dtype", "float32"],
            "alive": "tcp",
            "env": {"A": "1"},
            "count": 2,
            "optional": True,
        }
        role = parse({**VLLM, **more}).role("engine")
        assert role.entry.args[-2:] == ("--dtype", "float32")
        assert (role.alive, role.env, role.count, role.optional) == (Probe("tcp"), {"A": "1"}, 2, True)

    def test_vllm_is_parallel_over_its_devices(self) -> None:
        assert args(slots=4)[-2:] == ("--tensor-parallel-size", "4")
        for more in ({}, {"slots": 1}, {"slots": 0.5}, {"slots": 4, "device": "cpu"}):
            assert "--tensor-parallel-size" not in args(**more)

    def test_vllm_needs_a_model(self) -> None:
        assert faults({"kind": "vllm"}) == [
            "roles.engine.model: vllm serve has no model; write model: NAME, or the path of a folder"
        ]


class TestBuiltIn:
    def test_builtin_is_a_program_of_the_interpreter_of_unirun(self) -> None:
        role = parse({"kind": "builtin", "model": "/m"}, channels=CHANNELS).role("engine")
        assert (role.entry.kind, role.entry.target) == ("program", sys.executable)
        assert role.entry.args[:3] == ("-m", "unirun.experiments.server", "/m")
        assert (role.service, role.ready, role.slots, role.is_program) == (True, HEALTH, 1.0, True)

    def test_builtin_receives_weights_by_a_companion(self) -> None:
        job = parse({"kind": "builtin", "model": "/m"}, channels=CHANNELS)
        assert job.channels == (ChannelSpec("policy", "train", ("engine-weights",)),)

    def test_builtin_has_a_model_and_one_device(self) -> None:
        assert faults({"kind": "builtin", "slots": 2}) == [
            "roles.engine.model: the built-in server has no model; write model: NAME, or the path of a folder",
            "roles.engine.slots: the built-in server has one device; leave it out, and write a larger count:",
        ]


class TestOpenAI:
    def test_openai_is_any_program_with_a_health_url(self) -> None:
        role = parse({"kind": "openai", "program": "true", "args": ["{port}"]}).role("engine")
        assert (role.service, role.ready, role.entry.args) == (True, HEALTH, ("{port}",))
        assert role.engine == "openai"

    def test_openai_has_no_model_of_its_own(self) -> None:
        (fault,) = faults({"kind": "openai", "program": "true", "model": "m"})
        assert fault.startswith("roles.engine.model: a server of kind openai has its model in its arguments")

    def test_openai_has_a_program_of_its_own(self) -> None:
        fault, *_ = faults({"kind": "openai"}, script="train.py")
        assert fault.startswith("roles.engine.program: a server of kind openai has none")


def test_a_kind_is_one_of_three() -> None:
    assert faults({"kind": "sglang", "model": "m", "program": "true"})[0].startswith(
        "roles.engine.kind: expected one of vllm, builtin, openai, found 'sglang'"
    )


def test_a_model_needs_a_kind() -> None:
    (fault,) = faults({"program": "true", "model": "m"})
    assert (
        fault == "roles.engine.model: the role has no kind; add kind: vllm or kind: builtin or kind: openai"
    )


class TestWeights:
    def test_weights_come_to_engines_by_a_companion_on_each_of_their_nodes(self) -> None:
        spec = parse(VLLM, channels=CHANNELS)
        assert spec.channels == (ChannelSpec("policy", "train", ("engine-weights",)),)
        companion = spec.roles[-1]
        assert (companion.name, companion.beside, companion.slots) == ("engine-weights", "engine", 0)
        assert companion.entry.args == ("policy", "--timeout=300.0")
        assert companion.service
        two = parse({**VLLM, "count": 2}, channels=CHANNELS).roles[-1]
        assert two.max_restarts == 2 * companion.max_restarts > 0
        assert spec.primary == ("train",)

    def test_weights_need_the_routes_of_developers_and_a_guard_of_these(self) -> None:
        role = parse({**VLLM, "env": {"A": "1"}}, channels=CHANNELS).role("engine")
        assert role.env == {"VLLM_SERVER_DEV_MODE": "1", "A": "1"}
        # What the user writes counts.
        closed = parse({**VLLM, "env": {"VLLM_SERVER_DEV_MODE": "0"}}, channels=CHANNELS).role("engine")
        assert closed.env == {"VLLM_SERVER_DEV_MODE": "0"}
        *_, option, guard, weights, backend = role.entry.args
        assert (weights, backend) == ("--weight-transfer-config", '{"backend": "unirun"}')
        module, _, name = guard.rpartition(".")
        assert option == "--middleware"
        assert getattr(import_module(module), name) is SameHost

    def test_how_an_engine_takes_weights_is_a_setting_of_its_role(self) -> None:
        engine = {**VLLM, "clear_cache": False, "update_timeout": "1m"}
        args = parse(engine, channels=CHANNELS).roles[-1].entry.args
        assert args == ("policy", "--timeout=60.0", "--keep-cache")

    def test_only_engines_that_take_weights_have_these_settings(self) -> None:
        (fault,) = faults({"program": "true", "clear_cache": False})
        assert fault == (
            "roles.engine.clear_cache: the role takes no weights; it is for kind: vllm and kind: builtin"
        )

    def test_weights_need_no_secrets_of_the_engine(self) -> None:
        """vLLM asks for its key on other routes."""
        keyed = parse({**VLLM, "env": {"VLLM_API_KEY": "k"}}, channels=CHANNELS).role("engine-weights")
        assert (keyed.env, keyed.env_file) == ({}, None)

    def test_weights_go_to_roles_of_torch_as_before(self) -> None:
        both = {"policy": {"publisher": "train", "receivers": ["other", "engine"]}}
        spec = parse(VLLM, roles={"other": {"module": "this"}}, channels=both)
        assert spec.channels[0].receivers == ("other", "engine-weights")

    def test_weights_need_unirun_in_the_environment_of_the_engine(self, tmp_path: Path) -> None:
        python = tmp_path / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch(mode=0o755)
        python.with_name("vllm").touch(mode=0o755)
        (tmp_path / "venv" / "pyvenv.cfg").touch()
        packages = tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
        packages.mkdir(parents=True)
        engine = {**VLLM, "python": str(tmp_path / "venv")}
        assert faults(engine, channels=CHANNELS) == [
            f"roles.engine.python: unirun is not installed in {tmp_path}/venv, and vLLM loads its plugin for weights "
            f"from there; run {python} -m pip install torch-unirun"
        ]
        assert parse(engine).role("engine").python == str(python), "without weights it need not be there"
        (packages / "torch_unirun-0.1.0.dist-info").mkdir()
        assert parse(engine, channels=CHANNELS)

    def test_weights_are_edges_of_a_job_that_has_some(self) -> None:
        assert parse(VLLM, channels=CHANNELS).edges == ()
        edges = parse(VLLM, channels=CHANNELS, edges=["train -> engine: generate"]).edges
        assert [*map(str, edges[1:])] == ["train ⇢ engine-weights: publish", "engine-weights → engine: load"]

    @pytest.mark.parametrize(
        ("engine", "more", "fault"),
        [
            (
                {"program": "true"},
                {},
                "channels.policy.receivers: engine is a program, which receives no weights; "
                "write kind: vllm or kind: builtin in engine, or name another role",
            ),
            (
                {"kind": "openai", "program": "true"},
                {},
                "channels.policy.receivers: engine is a program, which receives no weights; "
                "write kind: vllm or kind: builtin in engine, or name another role",
            ),
            (
                VLLM,
                {"channels": {**CHANNELS, "value": CHANNELS["policy"]}},
                "channels.value.receivers: engine receives another channel; an engine has one",
            ),
            (
                VLLM,
                {"roles": {"engine-weights": {"program": "true"}}},
                "channels.policy.receivers: a role is called engine-weights, as the one that brings weights into "
                "engine; rename engine-weights",
            ),
        ],
    )
    def test_weights_that_go_nowhere_are_refused(
        self, engine: dict[str, Any], more: dict[str, Any], fault: str
    ) -> None:
        assert faults(engine, **{"channels": CHANNELS, **more}) == [fault]


class TestTheNameOfACompanion:
    """It is that of the engines, and more."""

    def test_a_trainer_can_tell_it_from_others(self) -> None:
        roles = {"engine_weights": {"program": "true"}}
        found = faults(VLLM, roles=roles, channels=CHANNELS, trainer={"class": "trainers:T"})
        clash = "the trainer would find both 'engine_weights' and 'engine-weights' as RG_ENGINE_WEIGHTS"
        assert f"roles.engine-weights: {clash}; rename one of them" in found
        assert parse(VLLM, roles=roles, channels=CHANNELS), "only a trainer has a name for each role"

    def test_it_is_as_short_as_that_of_a_role(self) -> None:
        def channels(name: str) -> dict[str, Any]:
            roles = {name: VLLM}
            return {"roles": roles, "channels": {"policy": {"publisher": "train", "receivers": [name]}}}

        assert parse({"program": "true"}, **channels("e" * 55)).role("e" * 55 + "-weights")
        (fault,) = faults({"program": "true"}, **channels("e" * 56))
        companion = "e" * 56 + "-weights"
        why = "which brings weights into it, is too long a name for a role"
        assert fault == f"roles.{'e' * 56}: {companion}, {why}; give it a shorter name"


def test_a_job_is_the_same_after_its_way_through_the_store() -> None:
    spec = parse(VLLM, channels=CHANNELS)
    assert JobSpec.from_json(spec.to_json()) == spec
    assert isinstance(spec.role("engine"), RoleSpec)
