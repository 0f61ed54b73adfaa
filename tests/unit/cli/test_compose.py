"""From a command line to a spec: what torchrun knows, roles, workloads, and what is wrong with them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, static_tcp_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.run import get_args_parser

from tests.unit.cli.conftest import GPUS, Compose, same
from unirun.cli.compose import BETWEEN_NODES, ONE_NODE
from unirun.errors import SpecError, UsageError
from unirun.spec import Entry, RoleSpec

JobFile = Callable[[str], str]


class TestALineLikeTorchruns:
    def test_is_one_role(self, compose: Compose) -> None:
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

    def test_names_its_role(self, compose: Compose) -> None:
        assert [r.name for r in compose("--role", "trainer", "train.py").roles] == ["trainer"]

    def test_runs_a_module_or_a_program(self, compose: Compose) -> None:
        assert compose("-m", "pkg.train", "a").roles[0].entry == Entry("module", "pkg.train", ("a",))
        assert compose("--no-python", "ls", "-l").roles[0].entry == Entry("program", "ls", ("-l",))
        assert compose("--no-python", "ls").roles[0].start_method == "exec"

    def test_counts_what_the_host_has(self, compose: Compose) -> None:
        assert compose("--nproc-per-node", "cpu", "train.py").roles[0].count == 4
        assert compose("--nproc-per-node", "auto", "train.py").roles[0].count == 4
        assert compose("--nproc-per-node", "auto", "train.py", inventory=GPUS).roles[0].count == 8
        assert compose("--nproc-per-node", "gpu", "train.py", inventory=GPUS).roles[0].count == 8

    @pytest.mark.parametrize("count", ["gpu", "xpu"])
    def test_says_that_there_is_no_such_device(self, compose: Compose, count: str) -> None:
        with pytest.raises(SpecError, match="use a number"):
            compose("--nproc-per-node", count, "train.py")


LANDS = {
    "nnodes": ("1:1", lambda s: True),
    "nproc_per_node": ("2", lambda s: s.roles[0].count == 2),
    "rdzv_backend": ("c10d", lambda s: True),
    "rdzv_endpoint": ("127.0.0.2:29501", lambda s: (s.master_addr, s.master_port) == ("127.0.0.2", 29501)),
    "rdzv_id": ("run7", lambda s: s.run_id == "run7"),
    "rdzv_conf": ("join_timeout=7", lambda s: s.join_timeout == 7.0),
    "standalone": (None, lambda s: s.master_port == 0),
    "max_restarts": ("3", lambda s: s.roles[0].max_restarts == 3),
    "monitor_interval": ("0.5", lambda s: s.sample_interval == 0.5),
    "start_method": ("spawn", lambda s: s.roles[0].start_method == "exec"),
    "event_log_handler": ("console", lambda s: s.event_log == "console"),
    "role": ("trainer", lambda s: s.roles[0].name == "trainer"),
    "module": (None, lambda s: s.roles[0].entry.kind == "module"),
    "no_python": (None, lambda s: s.roles[0].entry.kind == "program"),
    "run_path": (None, lambda s: s.roles[0].entry.kind == "script" and s.roles[0].start_method == "fork"),
    "log_dir": ("some/logs", lambda s: s.log.dir == "some/logs"),
    "redirects": ("0:1,1:3", lambda s: s.log.redirects == "0:1,1:3"),
    "tee": ("3", lambda s: s.log.tee == "3"),
    "local_ranks_filter": ("0,2", lambda s: s.log.local_ranks_filter == (0, 2)),
    "duplicate_stdout_filters": ("loss,a,,b", lambda s: s.log.duplicate_stdout_filters == ("loss", "a,b")),
    "duplicate_stderr_filters": ("warn", lambda s: s.log.duplicate_stderr_filters == ("warn",)),
    "node_rank": ("0", lambda s: True),
    "master_addr": ("127.0.0.3", lambda s: s.master_addr == "127.0.0.3"),
    "master_port": ("29502", lambda s: s.master_port == 29502),
    "local_addr": ("127.0.0.4", lambda s: s.master_addr == "127.0.0.4"),
    "signals_to_handle": ("SIGTERM,SIGUSR1", lambda s: s.signals == ("SIGTERM", "SIGUSR1")),
    "shutdown_timeout": ("9", lambda s: s.shutdown_timeout == 9.0),
    "virtual_local_rank": (None, lambda s: s.virtual_local_rank),
}
NOT_HERE = {"logs_specs", "numa_binding", "help"}


class TestEveryTorchrunOption:
    def test_is_looked_at_here(self) -> None:
        dests = {action.dest for action in get_args_parser()._actions if action.option_strings}
        assert dests == LANDS.keys() | NOT_HERE

    @pytest.mark.parametrize("dest", LANDS)
    def test_lands_where_it_should(self, dest: str, compose: Compose, scripts: Path) -> None:
        value, landed = LANDS[dest]
        (scripts / "tool").touch()
        argv = [f"--{dest.replace('_', '-')}", *([value] if value else [])]
        assert landed(compose(*argv, "tool"))

    @pytest.mark.parametrize("dest", LANDS)
    def test_may_come_from_the_environment(self, dest: str, compose: Compose, scripts: Path) -> None:
        value, landed = LANDS[dest]
        (scripts / "tool").touch()
        assert landed(compose("tool", environ={f"PET_{dest.upper()}": value or "1"}))

    @pytest.mark.parametrize("option", ["--master-addr", "--local-addr"])
    def test_an_ipv6_address_may_stand_in_brackets(self, compose: Compose, option: str) -> None:
        for text in ("::1", "[::1]"):
            assert compose(option, text, "train.py").master_addr == "::1"

    @pytest.mark.parametrize("value", ["1", "1:1", "1:2", "1:64"])
    def test_one_node_is_enough_where_the_least_is_one(self, compose: Compose, value: str) -> None:
        assert same(compose("--nnodes", value, "train.py"), compose("train.py"))

    @pytest.mark.parametrize(
        "value",
        ["last_call_timeout=5", "close_timeout=1,read_timeout=3", "is_host=True", "store_type=TCP", "rank=0"],
    )
    def test_settings_between_nodes_change_nothing_on_one(self, compose: Compose, value: str) -> None:
        plain = compose("train.py")
        assert same(compose("--rdzv-backend", "c10d", "--rdzv-conf", value, "train.py"), plain)
        mixed = compose("--rdzv-conf", f" {value} , join_timeout = 7 ", "train.py")
        assert mixed.join_timeout == 7.0

    def test_every_setting_that_torch_asks_for_is_known(self) -> None:
        """Of the backends that apply on one node. torch asks by name; whatever it asks for is in this record."""
        asked: set[str] = set()

        class Recorder(RendezvousParameters):
            def get(self, key: str, default: Any = None) -> Any:
                asked.add(key)
                return super().get(key, default)

        params = Recorder("c10d", "localhost:0", "run", 1, 1)
        backend, store = create_backend(params)
        create_handler(store, backend, params)
        asked |= set(
            re.findall(r'params\.config(?:\.get\(|\[)"(\w+)"', inspect.getsource(static_tcp_rendezvous))
        )
        assert asked >= {"join_timeout", "is_host", "timeout", "rank"}
        assert asked <= {"join_timeout", "timeout", *BETWEEN_NODES, *ONE_NODE}

    def test_filters_are_split_as_torchrun_does(self, compose: Compose) -> None:
        for text in ("a", "a,b", "a,,b", ",,", "a,,,b", "a b,c"):
            theirs = get_args_parser().parse_args(["--duplicate-stdout-filters", text, "train.py"])
            ours = compose("--duplicate-stdout-filters", text, "train.py").log.duplicate_stdout_filters
            assert [*ours] == theirs.duplicate_stdout_filters

    def test_numa_binding_lands_on_a_host_with_devices(self, compose: Compose) -> None:
        assert compose("--numa-binding", "node", "train.py", inventory=GPUS).numa_binding == "node"


class TestWhatCannotApplyIsRefused:
    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (["--nnodes", "2"], "--nnodes 2: this version of unirun runs on one node, and the job wants 2"),
            (["--nnodes", "2:4"], "runs on one node, and the job wants 2"),
            (["--nnodes", "2:1"], "no more than MAX"),
            (["--nnodes", "0:1"], "at least 1"),
            (["--nnodes", "1:2:3"], "expected N or MIN:MAX"),
            (["--nnodes", "one"], "expected N or MIN:MAX"),
            (["--node-rank", "1"], "the rank of the node is 0"),
            (["--rdzv-backend", "etcd-v2"], "only static and c10d apply"),
            (["--rdzv-conf", "is_host=0"], "on one node only 1 applies"),
            (["--rdzv-conf", "store_type=file"], "on one node only tcp applies"),
            (["--rdzv-conf", "rank=1"], "on one node only 0 applies"),
            (["--rdzv-conf", "last_cal_timeout=1"], "did you mean 'last_call_timeout'"),
            (["--rdzv-conf", "last_call_timeout=soon"], "expected a whole number"),
            (["--rdzv-conf", "last_call_timeout"], "write key=value"),
            (["--rdzv-conf", "join_timeout="], "write key=value"),
            (["--logs-specs", "mine"], "has nothing to decide"),
            (["--numa-binding", "node"], "there are none"),
            (["-m", "--no-python"], "exclude each other"),
            (["-m", "--run-path"], "--run-path runs a file"),
        ],
    )
    def test_with_a_reason(self, compose: Compose, argv: list[str], says: str) -> None:
        with pytest.raises(UsageError, match=says) as caught:
            compose(*argv, "train.py")
        assert caught.value.remedy
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (["--max-restarts", "many"], "roles.default.max_restarts: expected a whole number, found 'many'"),
            (["--max-restarts", "-1"], "from 0 to"),
            (["--nproc-per-node", "0"], "roles.default.count: expected a number from 1"),
            (["--nproc-per-node=-2"], "roles.default.count: expected a number from 1"),
            (["--redirects", "4"], "log.redirects: expected 0, 1, 2, 3 or RANK:N"),
            (["--local-ranks-filter", "a"], "log.local_ranks_filter: expected a whole number"),
            (["--signals-to-handle", "SIGFOO"], "'SIGFOO' is no signal"),
            (["--signals-to-handle", "SIGKILL"], "SIGKILL cannot be handled"),
            (["--shutdown-timeout", "-1"], "shutdown_timeout: expected a number of seconds"),
            (["--master-port", "70000"], "from 0 to 65535"),
            (["--rdzv-id", "../x"], "is no job id"),
            (["--primary", "other"], "no role is called 'other'"),
        ],
    )
    def test_a_wrong_value_is_told_with_its_place(self, compose: Compose, argv: list[str], says: str) -> None:
        with pytest.raises(SpecError, match=says):
            compose(*argv, "train.py")


class TestRoles:
    def test_have_their_numbers(self, compose: Compose) -> None:
        spec = compose("--roles", "actor=4,rollout=2", "--roles", "critic", "train.py")
        assert {r.name: r.count for r in spec.roles} == {"actor": 4, "rollout": 2, "critic": 1}
        assert spec.primary == ("actor", "rollout", "critic")

    def test_without_a_number_have_the_common_one(self, compose: Compose) -> None:
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
        assert (actor.count, rollout.count) == (1, 7)
        assert (actor.cwd, rollout.cwd) == ("there", None)
        assert spec.primary == ("actor",)

    def test_default_may_be_scoped_when_there_are_no_others(self, compose: Compose) -> None:
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

    def test_nothing_to_run_is_told(self, compose: Compose) -> None:
        with pytest.raises(SpecError, match="roles.actor: nothing to run"):
            compose("--roles", "actor=1")
        with pytest.raises(UsageError, match="there are arguments but no script"):
            compose("--roles", "actor=1", "--", "x")

    def test_role_and_roles_exclude_each_other(self, compose: Compose, job_file: JobFile) -> None:
        with pytest.raises(UsageError, match="--role names the only role"):
            compose("--roles", "actor=1", "--role", "b", "train.py")
        with pytest.raises(UsageError, match="--role names the only role"):
            compose("--role", "b", "--config", job_file("roles: {actor: 1}"), "train.py")


CALLS = ("--roles", "actor=4@ppo:Actor,rollout=4@ppo:Rollout", "--trainer", "ppo:PPOTrainer")


class TestWorkloadsAndTheirTrainer:
    def test_need_no_script(self, compose: Compose) -> None:
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
        assert (spec.call_timeout, spec.transport) == (1800.0, "torch")
        assert spec.run_id.startswith("ppo-")

    def test_are_the_same_job_in_a_file(self, compose: Compose, job_file: JobFile) -> None:
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

    def test_may_be_mixed_with_scripts(self, compose: Compose) -> None:
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


def test_nodes_that_are_excluded_replace_those_of_the_file(compose: Compose, job_file: JobFile) -> None:
    job = ("--config", job_file("{script: train.py, exclude_nodes: [old]}"))
    assert compose(*job).exclude_nodes == ("old",)
    assert compose(*job, "exclude_nodes=[a,b]").exclude_nodes == ("a", "b")
    named = compose("--exclude", "node3,node7", "--exclude", "node9", *job)
    assert named.exclude_nodes == ("node3", "node7", "node9")


def test_an_id_is_made_of_the_scripts_name(compose: Compose, scripts: Path) -> None:
    (scripts / "my script.v2.py").touch()
    assert compose("my script.v2.py").run_id.startswith("my-script-v2-")
    assert compose("train.py").run_id != compose("train.py").run_id


def test_an_endpoint_may_be_v6_or_lack_its_port(compose: Compose) -> None:
    spec = compose("--rdzv-endpoint", "[::1]:29500", "train.py")
    assert (spec.master_addr, spec.master_port) == ("::1", 29500)
    assert compose("--rdzv-endpoint", "localhost", "train.py").master_addr == "localhost"
    assert compose("--rdzv-endpoint", ":29500", "train.py").master_addr == "127.0.0.1"
