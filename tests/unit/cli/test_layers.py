"""Defaults < PET_* < YAML < key=value < flags, and whichever way, the same spec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Compose, same
from unirun.errors import SpecError, UsageError
from unirun.spec.job import LogSpec

JobFile = Callable[[str], str]


class TestLayers:
    FILE = """
        run_id: of-the-file
        shutdown_timeout: 3
        roles: {actor: {count: 2, env: {A: file}}, rollout: 1}
        script: train.py
        env: {X: "${shutdown_timeout}"}
        config: {lr: 0.1, deep: {er: [1, 2]}}
    """

    def test_a_file_alone_is_a_job(self, compose: Compose, job_file: JobFile) -> None:
        spec = compose("--config", job_file(self.FILE))
        assert spec.run_id == "of-the-file"
        assert spec.env == {"X": "3"}
        assert spec.config == {"lr": 0.1, "deep": {"er": [1, 2]}}
        assert spec.role("actor").count == 2

    def test_the_environment_is_the_weakest(self, compose: Compose, job_file: JobFile) -> None:
        environ = {"PET_SHUTDOWN_TIMEOUT": "8", "PET_MAX_RESTARTS": "4", "PET_RDZV_ID": "pet"}
        spec = compose("--config", job_file(self.FILE), environ=environ)
        assert (spec.shutdown_timeout, spec.run_id, spec.role("actor").max_restarts) == (
            3.0,
            "of-the-file",
            4,
        )

    @pytest.mark.parametrize(
        ("option", "variable", "field"),
        [
            ("--max-restarts", "PET_MAX_RESTARTS", "max_restarts"),
            ("--nproc-per-node", "PET_NPROC_PER_NODE", "count"),
        ],
    )
    def test_a_flag_for_one_role_leaves_the_environment_to_the_others(
        self, compose: Compose, option: str, variable: str, field: str
    ) -> None:
        words = ("--roles", "actor,rollout", option, "actor=2", "train.py")
        spec = compose(*words, environ={variable: "3"})
        assert [getattr(spec.role(name), field) for name in ("actor", "rollout")] == [2, 3]

    def test_an_override_beats_the_file(self, compose: Compose, job_file: JobFile) -> None:
        spec = compose(
            "--config", job_file(self.FILE), "roles.actor.count=5", "shutdown_timeout=6", "config.lr=1"
        )
        assert spec.role("actor").count == 5
        assert spec.config["lr"] == 1
        assert spec.env == {"X": "6"}, "interpolation sees the override"

    def test_a_flag_beats_all(self, compose: Compose, job_file: JobFile) -> None:
        spec = compose(
            *(
                "--shutdown-timeout",
                "9",
                "--env",
                "actor:A=flag",
                "--env",
                "actor:B=2",
                "--max-restarts",
                "actor=1",
            ),
            *("--config", job_file(self.FILE), "shutdown_timeout=6"),
            environ={"PET_SHUTDOWN_TIMEOUT": "8"},
        )
        assert spec.shutdown_timeout == 9.0
        assert spec.role("actor").env == {"A": "flag", "B": "2"}
        assert (spec.role("actor").count, spec.role("actor").max_restarts) == (2, 1)

    def test_a_flag_adds_a_role_to_those_of_the_file(self, compose: Compose, job_file: JobFile) -> None:
        spec = compose("--roles", "critic=2,rollout=3", "--config", job_file(self.FILE))
        assert {r.name: r.count for r in spec.roles} == {"actor": 2, "rollout": 3, "critic": 2}

    def test_the_shutdown_timeout_of_torch_counts_when_nobody_says_otherwise(self, compose: Compose) -> None:
        environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "11"}
        assert compose("train.py", environ=environ).shutdown_timeout == 11.0
        assert compose("--shutdown-timeout", "1", "train.py", environ=environ).shutdown_timeout == 1.0
        assert compose("train.py").shutdown_timeout == 30.0

    @pytest.mark.parametrize(
        ("variable", "flag"),
        [
            ({"PET_NNODES": "2"}, ["--nnodes", "1"]),
            ({"PET_RDZV_BACKEND": "etcd"}, ["--rdzv-backend", "c10d"]),
            ({"PET_RDZV_BACKEND": "etcd", "PET_RDZV_ID": "x"}, ["--standalone"]),
            ({"PET_NODE_RANK": "3"}, ["--node-rank", "0"]),
            ({"PET_START_METHOD": "spawn"}, ["--start-method", "fork"]),
            ({"PET_ROLE": "a"}, ["--role", "default"]),
            ({"PET_TEE": "9"}, ["--tee", "0"]),
            ({"PET_MAX_RESTARTS": "9"}, ["--max-restarts", "0"]),
            ({"PET_NPROC_PER_NODE": "gpu"}, ["--nproc-per-node", "1"]),
        ],
        ids=str,
    )
    def test_a_flag_replaces_its_variable_right_or_wrong(
        self, compose: Compose, variable: dict[str, str], flag: list[str]
    ) -> None:
        spec = compose(*flag, "train.py", environ=variable)
        assert same(spec, compose(*flag, "train.py"))
        assert spec.run_id.startswith("train-")

    def test_a_variable_that_has_no_place_is_refused(self, compose: Compose, job_file: JobFile) -> None:
        with pytest.raises(UsageError, match="--role names the only role"):
            compose("--roles", "actor=1,rollout=1", "train.py", environ={"PET_ROLE": "x"})
        with pytest.raises(UsageError, match="--role names the only role"):
            compose("--config", job_file(self.FILE), environ={"PET_ROLE": "x"})
        with pytest.raises(UsageError, match="--nnodes two: expected N or MIN:MAX"):
            compose("train.py", environ={"PET_NNODES": "two"})


class TestFlagsAndFile:
    def test_flags_and_a_file_build_the_same_spec(self, compose: Compose, job_file: JobFile) -> None:
        flags = compose(
            *("--roles", "actor=2,rollout=3", "--script", "rollout=serve.py", "--primary", "actor"),
            *("--env", "A=1", "--env", "rollout:B=2", "--max-restarts", "1", "--max-restarts", "rollout=4"),
            *("--rdzv-id", "seven", "--name", "ppo", "--start-method", "exec", "--preload", "json,csv"),
            *("--master-addr", "127.0.0.2", "--master-port", "29500", "--rdzv-conf", "timeout=7"),
            *("--monitor-interval", "2", "--signals-to-handle", "SIGTERM,SIGINT", "--shutdown-timeout", "4"),
            *(
                "--virtual-local-rank",
                "--event-log-handler",
                "console",
                "--log-dir",
                "logs",
                "-r3",
                "-t",
                "0:1",
            ),
            *("--local-ranks-filter", "0,1", "--duplicate-stdout-filters", "loss,acc"),
            *("train.py", "--lr", "0.1"),
        )
        file = compose(
            "--config",
            job_file(
                """
                roles:
                  actor: {count: 2}
                  rollout: {count: 3, script: serve.py, env: {B: 2}, max_restarts: 4}
                primary: actor
                env: {A: 1}
                max_restarts: 1
                run_id: seven
                name: ppo
                start_method: exec
                preload: [json, csv]
                master_addr: 127.0.0.2
                master_port: 29500
                join_timeout: 7
                sample_interval: 2
                signals: [SIGTERM, SIGINT]
                shutdown_timeout: 4
                virtual_local_rank: true
                event_log: console
                log:
                  dir: logs
                  redirects: 3
                  tee: "0:1"
                  local_ranks_filter: [0, 1]
                  duplicate_stdout_filters: [loss, acc]
                script: train.py
                args: [--lr, 0.1]
                """
            ),
        )
        assert flags == file
        assert file.log == LogSpec("logs", "3", "0:1", (0, 1), ("loss", "acc"))


class TestAWrongFile:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("rolls: {a: 1}\nscript: train.py", r"rolls: unknown key; did you mean 'roles'\?"),
            (
                "roles: {a: {counts: 1}}\nscript: train.py",
                r"roles.a.counts: unknown key; did you mean 'count'\?",
            ),
            ("log: {tea: 1}\nscript: train.py", r"log.tea: unknown key; did you mean 'tee'\?"),
            ("roles: {a: {1: 2}}\nscript: train.py", "roles.a: expected a mapping with names as keys"),
            ("roles: [a, b]\nscript: train.py", "roles: expected a mapping with names"),
            ("script: [train.py]", "script: expected a text"),
            ("virtual_local_rank: yess\nscript: train.py", "expected true or false, found 'yess'"),
            ("config: {clip: .inf}\nscript: train.py", "config: cannot be sent to workers as JSON"),
            ("config: {raw: !!binary aGk=}\nscript: train.py", "config: cannot be sent to workers as JSON"),
            ('args: ["a\\0b"]\nscript: train.py', "args: expected a text"),
            ("shutdown_timeout: 1" + "0" * 400 + "\nscript: train.py", "shutdown_timeout: expected a number"),
            ("env: {A: [1]}\nscript: train.py", "env.A: expected a text or a number"),
            ("env: {A: yes}\nscript: train.py", "quote it"),
            ("script: train.py\nmodule: pkg", "script and module are given"),
            ("script: ${nowhere}", "nowhere"),
            ("a: [", "is no YAML"),
            ("- a\n- b", "holds a list, expected a mapping|Cannot merge"),
            ("roles: {a: '???'}\nscript: train.py", "roles.a.count: has no value yet"),
        ],
    )
    def test_a_wrong_job_file_is_refused_in_one_line(
        self, compose: Compose, job_file: JobFile, text: str, says: str
    ) -> None:
        with pytest.raises(SpecError, match=says):
            compose("--config", job_file(text))

    def test_a_job_file_in_json_is_taken_as_it_is(self, compose: Compose, scripts: Path) -> None:
        (scripts / "job.json").write_text('{"script": "train.py", "config": {"a": "${b}", "c": 1e-05}}')
        assert compose("--config", "job.json").config == {"a": "${b}", "c": 1e-05}
        with pytest.raises(SpecError, match="nothing can be overridden"):
            compose("--config", "job.json", "config.c=1")
        for text, says in (("[1]", "holds no object"), ("{", "is no JSON"), ("[" * 10**5, "too deeply")):
            (scripts / "job.json").write_text(text)
            with pytest.raises(SpecError, match=says):
                compose("--config", "job.json")

    def test_a_missing_job_file_is_refused(self, compose: Compose, scripts: Path) -> None:
        for path in ("nowhere.yaml", "nowhere.json", "."):
            with pytest.raises(SpecError, match="cannot be read"):
                compose("--config", path)
        (scripts / "latin.yaml").write_bytes(b"name: \xff\xfe\xe4")
        with pytest.raises(SpecError, match=r"latin.yaml"):
            compose("--config", "latin.yaml")
