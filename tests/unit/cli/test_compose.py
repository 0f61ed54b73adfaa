"""From a command line to a spec: what torchrun knows, roles, workloads, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cli.conftest import GPUS, Compose, same
from unirun.errors import SpecError, UsageError
from unirun.spec.job import Entry, RoleSpec

JobFile = Callable[[str], str]


class TestALineLikeTorchruns:
    def test_a_line_like_torchruns_is_one_role(self, compose: Compose) -> None:
        spec = compose("--nproc-per-node", "3", "train.py", "--lr", "1")
        (role,) = spec.roles
        assert (role.name, role.count, role.entry) == (
            "default",
            3,
            Entry("script", "train.py", ("--lr", "1")),
        )
        assert spec.primary == ("default",)
        assert spec.name == "train"
        assert spec.run_id.startswith("train-")

    def test_role_names_the_only_role(self, compose: Compose) -> None:
        assert [r.name for r in compose("--role", "trainer", "train.py").roles] == ["trainer"]

    def test_m_and_no_python_run_a_module_or_a_program(self, compose: Compose) -> None:
        assert compose("-m", "tool", "a").roles[0].entry == Entry("module", "tool", ("a",))
        assert compose("--no-python", "ls", "-l").roles[0].entry == Entry("program", "ls", ("-l",))
        assert compose("--no-python", "ls").roles[0].start_method == "exec"

    def test_no_python_means_torchruns_contract(self, compose: Compose, job_file: JobFile) -> None:
        """Programs of a job file have their own."""
        assert compose("--no-python", "ls").roles[0].contract == "torchrun"
        file = job_file(
            "program: ls\nroles: {a: 1, b: {program: cat}, c: {program: cat, contract: torchrun}}"
        )
        of_file = compose("--config", file).roles
        assert [role.contract for role in of_file] == ["none", "none", "torchrun"]
        of_line = compose("--config", file, "--no-python", "ls").roles
        assert [role.contract for role in of_line] == ["torchrun", "none", "torchrun"]

    def test_nproc_per_node_counts_devices_or_processors(self, compose: Compose) -> None:
        assert compose("--nproc-per-node", "cpu", "train.py").roles[0].count == 4
        assert compose("--nproc-per-node", "auto", "train.py").roles[0].count == 4
        assert compose("--nproc-per-node", "auto", "train.py", inventory=GPUS).roles[0].count == 8
        assert compose("--nproc-per-node", "gpu", "train.py", inventory=GPUS).roles[0].count == 8

    @pytest.mark.parametrize("count", ["gpu", "xpu"])
    def test_nproc_per_node_of_a_missing_device_is_refused(self, compose: Compose, count: str) -> None:
        with pytest.raises(SpecError, match="use a number"):
            compose("--nproc-per-node", count, "train.py")


class TestRoles:
    def test_roles_have_their_numbers_of_ranks(self, compose: Compose) -> None:
        spec = compose("--roles", "actor=4,rollout=2", "--roles", "critic", "train.py")
        assert {r.name: r.count for r in spec.roles} == {"actor": 4, "rollout": 2, "critic": 1}
        assert spec.primary == ("actor", "rollout", "critic")

    def test_roles_without_a_number_have_nproc_per_node(self, compose: Compose) -> None:
        spec = compose("--roles", "actor,rollout=2", "--nproc-per-node", "3", "train.py")
        assert {r.name: r.count for r in spec.roles} == {"actor": 3, "rollout": 2}

    def test_take_options_of_their_own(self, compose: Compose, scripts: Path) -> None:
        (scripts / "there").mkdir()
        (scripts / "there" / "train.py").touch()
        spec = compose(
            *("--roles", "actor=1,rollout=1"),
            *("--script", "rollout=serve.py"),
            *("--env", "A=1", "--env", "actor:A=2", "--env", "actor:B=x=y:z"),
            *("--max-restarts", "1", "--max-restarts", "rollout=5"),
            *("--fatal-exit-codes", "2,77", "--fatal-exit-codes", "rollout=139"),
            *("--max-job-restarts", "2", "--restart-window", "10m", "--restart-window", "rollout=1h"),
            *("--restart-delay", "2", "--rank-restarts", "actor=4"),
            *("--nproc-per-node", "rollout=7"),
            *("--cwd", "actor=there"),
            *("--primary", "actor"),
            *("train.py", "--x"),
        )
        actor, rollout = spec.roles
        assert actor.entry == Entry("script", "train.py", ("--x",))
        assert rollout.entry == Entry("script", "serve.py", ("--x",))
        assert (spec.env, actor.env, rollout.env) == ({"A": "1"}, {"A": "2", "B": "x=y:z"}, {})
        assert (actor.max_restarts, rollout.max_restarts) == (1, 5)
        assert (spec.max_job_restarts, spec.restart_window, spec.restart_delay) == (2, 600.0, 2.0)
        assert (actor.restart_window, rollout.restart_window) == (600.0, 3600.0)
        assert (actor.restart_delay, actor.rank_restarts, rollout.rank_restarts) == (2.0, 4, None)
        assert (actor.fatal_exit_codes, rollout.fatal_exit_codes) == ((2, 77), (139,))
        assert (actor.count, rollout.count) == (1, 7)
        assert (actor.cwd, rollout.cwd) == ("there", None)
        assert spec.primary == ("actor",)

    def test_the_role_default_may_be_scoped_when_it_is_the_only_one(self, compose: Compose) -> None:
        assert compose("--env", "default:A=1", "train.py").roles[0].env == {"A": "1"}

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (["--env", "aktor:A=1"], r"--env: no role is called 'aktor'; did you mean 'actor'\?"),
            (["--max-restarts", "rolout=1"], r"did you mean 'rollout'\?"),
            (["--script", "serve.py"], "--script: 'serve.py' names no role; write ROLE=serve.py"),
            (["--cwd", "xyz=there"], "no role is called 'xyz'; known: actor, rollout"),
            (["--env", "A"], "--env: 'A' has no value; write K=V or ROLE:K=V"),
            (["--roles", "actor=2"], "role 'actor' is there twice"),
            (["--primary", "acto"], r"no role is called 'acto'; did you mean 'actor'\?"),
            (["--env", "RANK=1"], "env.RANK: unirun sets this for every worker itself"),
            (["--env", "actor:UNIRUN_X=1"], "roles.actor.env.UNIRUN_X: unirun sets this"),
            (["--env", "1A=1"], "not a name for an environment variable"),
        ],
    )
    def test_faults_name_the_place_and_the_nearest_name(
        self, compose: Compose, argv: list[str], says: str
    ) -> None:
        with pytest.raises(SpecError, match=says):
            compose("--roles", "actor=1,rollout=1", *argv, "train.py")

    def test_all_faults_are_told_at_once(self, compose: Compose) -> None:
        with pytest.raises(SpecError) as caught:
            compose("--roles", "actor=0,9rollout=x", "--master-port", "-1", "train.py")
        places = {fault.where for fault in caught.value.faults}
        assert {"roles.actor.count", "roles.9rollout", "roles.9rollout.count", "master_port"} <= places

    def test_a_folder_may_have_an_equals_sign(self, compose: Compose, scripts: Path) -> None:
        (scripts / "lr=3").mkdir()
        (scripts / "lr=3" / "train.py").touch()
        assert compose("--cwd", "lr=3", "train.py").roles[0].cwd == "lr=3"
        assert compose("--cwd", f"{scripts}/lr=3", "train.py").roles[0].cwd == f"{scripts}/lr=3"
        spec = compose("--roles", "a=1,b=1", "--cwd", "a=lr=3", "train.py")
        assert [role.cwd for role in spec.roles] == ["lr=3", None]

    @pytest.mark.parametrize("flag", ["-m", "--no-python"])
    def test_of_scripts_of_their_own_need_no_kind_for_all(self, compose: Compose, flag: str) -> None:
        with pytest.raises(UsageError, match=f"{flag} says what the script is, and no script for all roles"):
            compose(flag, "--roles", "a=1", "--script", "a=train.py")

    def test_a_script_that_nobody_runs_is_told(self, compose: Compose) -> None:
        with pytest.raises(UsageError, match="no role runs train.py: each has an entry of its own"):
            compose("--roles", "a=1,b=1@ppo:Actor", "--script", "a=serve.py", "train.py")

    @pytest.mark.parametrize(
        ("script", "says"),
        [
            ("nowhere.py", "script 'nowhere.py' does not exist; looked in"),
            ("folder", "script 'folder' is a directory"),
            ("a" * 5000, "does not exist"),
        ],
    )
    def test_a_script_that_cannot_be_run_is_told(
        self, compose: Compose, scripts: Path, script: str, says: str
    ) -> None:
        (scripts / "folder").mkdir()
        with pytest.raises(SpecError, match=says):
            compose(script)

    def test_nothing_to_run_is_told(self, compose: Compose, job_file: JobFile) -> None:
        with pytest.raises(SpecError, match="roles.actor: nothing to run"):
            compose("--roles", "actor=1")
        with pytest.raises(UsageError, match="there are arguments but no script"):
            compose("--config", job_file("roles: {actor: 1}"), "--", "x")

    def test_role_and_roles_exclude_each_other(self, compose: Compose, job_file: JobFile) -> None:
        with pytest.raises(UsageError, match="--role names the only role"):
            compose("--roles", "actor=1", "--role", "b", "train.py")
        with pytest.raises(UsageError, match="--role names the only role"):
            compose("--role", "b", "--config", job_file("roles: {actor: 1}"), "train.py")


CALLS = ("--roles", "actor=4@ppo:Actor,rollout=4@ppo:Rollout", "--trainer", "ppo:PPOTrainer")


class TestWorkloadsAndTheirTrainer:
    def test_workloads_and_their_trainer_need_no_script(self, compose: Compose) -> None:
        spec = compose(*CALLS)
        actor, rollout, trainer = spec.roles
        assert actor == RoleSpec(
            "actor", 4, Entry("workload", "ppo:Actor"), max_restarts=3, restart="process"
        )
        assert rollout.entry == Entry("workload", "ppo:Rollout")
        assert trainer == RoleSpec(
            "trainer", 1, Entry("trainer", "ppo:PPOTrainer"), max_restarts=3, restart="process"
        )
        assert spec.primary == ("trainer",)
        assert (spec.call_timeout, spec.transport) == (1800.0, "socket")
        assert spec.run_id.startswith("ppo-")

    def test_workloads_on_the_command_line_are_the_same_job_in_a_file(
        self, compose: Compose, job_file: JobFile
    ) -> None:
        config = "config: {lr: 0.1}"
        flags = compose(*CALLS, "--transport", "socket", "--call-timeout", "7", "--config", job_file(config))
        file = compose(
            "--config",
            job_file(
                f"""
                roles:
                  actor: {{count: 4, workload: "ppo:Actor"}}
                  rollout: {{count: 4, workload: "ppo:Rollout"}}
                trainer: ppo:PPOTrainer
                transport: socket
                call_timeout: 7
                {config}
                """
            ),
        )
        assert same(flags, file)
        assert file.config == {"lr": 0.1}

    def test_workloads_may_be_mixed_with_scripts(self, compose: Compose) -> None:
        spec = compose(*CALLS, "--roles", "logger=1", "train.py", "--x")
        assert spec.role("logger").entry == Entry("script", "train.py", ("--x",))
        assert (spec.role("logger").restart, spec.role("logger").max_restarts) == ("role", 0)

    def test_take_options_of_their_own(self, compose: Compose, scripts: Path) -> None:
        (scripts / "there").mkdir()
        (scripts / "there" / "ppo.py").write_text("class PPOTrainer: ...")
        spec = compose(
            *CALLS,
            *("--max-restarts", "1", "--max-restarts", "trainer=5"),
            *("--env", "trainer:A=1", "--cwd", "trainer=there"),
        )
        trainer = spec.role("trainer")
        assert (trainer.max_restarts, trainer.env, trainer.cwd) == (5, {"A": "1"}, "there")
        assert spec.role("actor").max_restarts == 1

    def test_a_flag_beats_the_trainer_of_the_file(self, compose: Compose, job_file: JobFile) -> None:
        text = "{trainer: {class: nowhere:T, env: {A: 1}}, roles: {actor: {workload: ppo:Actor}}}"
        spec = compose(
            "--trainer", "ppo:PPOTrainer", "--max-restarts", "trainer=0", "--config", job_file(text)
        )
        trainer = spec.role("trainer")
        assert (trainer.entry.target, trainer.env, trainer.max_restarts) == ("ppo:PPOTrainer", {"A": "1"}, 0)

    def test_a_trainer_may_be_the_reader_of_stdin(self, compose: Compose, job_file: JobFile) -> None:
        assert compose(*CALLS).reader is None
        assert compose(*CALLS, "--stdin", "trainer:0").reader == ("trainer", 0)
        file = job_file("{script: train.py, roles: {a: 2}, stdin: 'a:1'}")
        assert compose("--config", file).reader == ("a", 1)
        assert compose("--stdin", "a:0", "--config", file).reader == ("a", 0)

    def test_a_trainer_alone_is_told(self, compose: Compose) -> None:
        for script in ([], ["train.py"]):
            with pytest.raises(UsageError, match="--trainer has nobody to call without roles"):
                compose("--trainer", "ppo:PPOTrainer", *script)

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (["--roles", "trainer=1@ppo:Actor"], "trainer is given as well"),
            (["--env", "trainr:A=1"], r"--env: no role is called 'trainr'; did you mean 'trainer'\?"),
            (["--nproc-per-node", "trainer=2"], "trainer.count: unknown key"),
            (["--call-timeout", "0"], "call_timeout: expected a number of seconds"),
            (["--roles", "a=1@ppo:Acto"], r"roles.a.workload: .* no class 'Acto'; did you mean 'Actor'\?"),
            (["--roles", "a=1@ppo"], "'ppo' is not of the form pkg.mod:Class"),
            (["--trainer", "pp:T"], r"trainer.class: there is no module 'pp'; did you mean 'ppo'\?"),
        ],
    )
    def test_faults_name_the_place(self, compose: Compose, argv: list[str], says: str) -> None:
        with pytest.raises(SpecError, match=says):
            compose(*CALLS, *argv)


class TestAFunctionAsTheEntryOfARole:
    @pytest.fixture(autouse=True)
    def module(self, scripts: Path) -> None:
        text = "from os import getcwd\ndef main(ctx): ...\nclass Actor:\n    def act(self): ...\n"
        (scripts / "jobs.py").write_text(text)

    def test_a_function_is_told_from_a_workload_by_the_source_of_its_module(self, compose: Compose) -> None:
        spec = compose(
            "--roles", "train=2@jobs:main,actor=1@jobs:Actor", "--primary", "train", "--", "--lr", "1"
        )
        train, actor = spec.roles
        assert train == RoleSpec("train", 2, Entry("function", "jobs:main", ("--lr", "1")))
        assert actor.entry == Entry("workload", "jobs:Actor", ("--lr", "1"))

    def test_a_function_on_the_command_line_is_the_same_job_in_a_file(
        self, compose: Compose, job_file: JobFile
    ) -> None:
        file = job_file("roles: {train: {count: 2, function: 'jobs:main'}}")
        assert same(compose("--roles", "train=2@jobs:main"), compose("--config", file))

    def test_a_function_is_searched_where_its_workers_run(self, compose: Compose, scripts: Path) -> None:
        (scripts / "there").mkdir()
        (scripts / "there" / "far.py").write_text("def main(): ...")
        entry = Entry("function", "far:main")
        assert compose("--roles", "a=1@far:main", "--cwd", "a=there").roles[0].entry == entry
        assert compose("--roles", "a=1@far:main", "--cwd", "there").roles[0].entry == entry
        assert compose("--roles", "a=1@far:main", "--env", "PYTHONPATH=there").roles[0].entry == entry

    def test_an_imported_function_counts_as_a_workload(self, compose: Compose) -> None:
        assert compose("--roles", "a=1@jobs:getcwd").roles[0].entry.kind == "workload"

    @pytest.mark.parametrize(
        ("target", "says"),
        [
            ("jobs.main", r"'jobs.main' is not of the form pkg.mod:Class; did you mean 'jobs:main'\?"),
            ("jobs.py:main", r"did you mean 'jobs:main'\?"),
            ("jobs:mian", r"no class 'mian'; did you mean 'main'\?"),
            ("jobs:Actor.act", "is not of the form pkg.mod:Class"),
            ("", "roles.a: nothing to run"),
        ],
    )
    def test_usual_mistakes_in_the_entry_of_a_role_are_explained(
        self, compose: Compose, target: str, says: str
    ) -> None:
        with pytest.raises(SpecError, match=says):
            compose("--roles", f"a=1@{target}")


def test_nodes_that_are_excluded_replace_those_of_the_file(compose: Compose, job_file: JobFile) -> None:
    job = ("--config", job_file("{script: train.py, exclude_nodes: [old]}"))
    assert compose(*job).exclude_nodes == ("old",)
    assert compose(*job, "exclude_nodes=[a,b]").exclude_nodes == ("a", "b")
    named = compose("--exclude", "node3,node7", "--exclude", "node9", *job)
    assert named.exclude_nodes == ("node3", "node7", "node9")


def test_an_id_is_made_of_the_scripts_name(compose: Compose, scripts: Path) -> None:
    (scripts / "my script.v2.py").touch()
    assert compose("my script.v2.py").run_id.startswith("my-script-v2-")
    (scripts / "my train é.py").touch()
    spec = compose("my train é.py")
    assert (spec.name, spec.run_id[:9]) == ("my-train", "my-train-")
    spec = compose("--name", "modèle", "train.py")
    assert (spec.name, spec.run_id[:7]) == ("modèle", "mod-le-")
    assert compose("train.py").run_id != compose("train.py").run_id


def test_an_endpoint_may_be_v6_or_lack_its_port(compose: Compose) -> None:
    spec = compose("--rdzv-endpoint", "[::1]:29500", "train.py")
    assert (spec.master_addr, spec.master_port) == ("::1", 29500)
    assert compose("--rdzv-endpoint", "localhost", "train.py").master_addr == "localhost"
    assert compose("--rdzv-endpoint", ":29500", "train.py").master_addr == "127.0.0.1"
