"""The main path: what runs, in which groups, with which environment, arguments and directory."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import SCRIPTS, START, TORCHRUN, Result, Unirun, command_in

ENVIRON = SCRIPTS / "environ.py"
Script = Callable[..., Path]


@pytest.fixture(scope="module")
def two_roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Unirun, Result]]:
    """One job with two roles, each of which forms its group and prints what it finds."""
    with command_in(tmp_path_factory.mktemp("two")) as command:
        result = command(
            *("--roles", "actor=2,rollout=3", "--rdzv-id", "two", "--max-restarts", "rollout=5"),
            ENVIRON,
            "--reduce",
        )
        assert result.code == 0, result.err
        yield command, result


class TestTwoRoles:
    @pytest.fixture
    def actors(self, two_roles: tuple[Unirun, Result]) -> list[dict[str, Any]]:
        return [row for row in two_roles[1].rows if row["role"] == "actor"]

    @pytest.fixture
    def rollouts(self, two_roles: tuple[Unirun, Result]) -> list[dict[str, Any]]:
        return [row for row in two_roles[1].rows if row["role"] == "rollout"]

    def test_each_role_has_all_its_ranks_once(self, actors: Any, rollouts: Any) -> None:
        assert [row["rank"] for row in actors] == [0, 1]
        assert [row["rank"] for row in rollouts] == [0, 1, 2]

    def test_each_role_is_a_process_group_of_its_own(self, actors: Any, rollouts: Any) -> None:
        assert [(row["sum"], row["world"]) for row in actors] == [(3, 2)] * 2
        assert [(row["sum"], row["world"]) for row in rollouts] == [(6, 3)] * 3

    def test_the_default_group_of_each_role_has_a_port_of_its_own(self, actors: Any, rollouts: Any) -> None:
        ports = [{row["env"]["MASTER_PORT"] for row in rows} for rows in (actors, rollouts)]
        assert [len(each) for each in ports] == [1, 1]
        assert ports[0] != ports[1]
        assert all(1024 <= int(port) <= 65535 for each in ports for port in each)

    @pytest.mark.parametrize(
        ("variable", "actor", "rollout"),
        [
            ("RANK", "{rank}", "{rank}"),
            ("WORLD_SIZE", "2", "3"),
            ("LOCAL_RANK", "{rank}", "{rank}"),
            ("LOCAL_WORLD_SIZE", "2", "3"),
            ("GROUP_RANK", "0", "0"),
            ("GROUP_WORLD_SIZE", "1", "1"),
            ("ROLE_NAME", "actor", "rollout"),
            ("ROLE_RANK", "{rank}", "{rank}"),
            ("ROLE_WORLD_SIZE", "2", "3"),
            ("MASTER_ADDR", "127.0.0.1", "127.0.0.1"),
            ("TORCHELASTIC_RUN_ID", "two", "two"),
            ("TORCHELASTIC_RESTART_COUNT", "0", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "0", "5"),
            (
                "TORCHELASTIC_ERROR_FILE",
                "{job}/logs/actor/{rank}/0/error.json",
                "{job}/logs/rollout/{rank}/0/error.json",
            ),
            ("TORCHELASTIC_USE_AGENT_STORE", "True", "True"),
            ("OMP_NUM_THREADS", "1", "1"),
            ("UNIRUN_JOB", "two", "two"),
            ("UNIRUN_NODE", socket.gethostname(), socket.gethostname()),
            ("UNIRUN_GENERATION", "0", "0"),
            ("UNIRUN_INCARNATION", "0", "0"),
            ("UNIRUN_SOCKET", "{job}/agent.sock", "{job}/agent.sock"),
        ],
    )
    def test_a_worker_finds(
        self, two_roles: tuple[Unirun, Result], variable: str, actor: str, rollout: str
    ) -> None:
        command, result = two_roles
        for row in result.rows:
            expected = (actor if row["role"] == "actor" else rollout).format(
                rank=row["rank"], job=command.job_dir()
            )
            assert row["env"][variable] == expected

    def test_no_device_mask_is_set_where_there_is_no_device(self, actors: Any) -> None:
        assert all(
            row["env"].get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES") for row in actors
        )

    def test_the_script_is_main_and_torch_is_there_already(self, actors: Any) -> None:
        assert all(row["main"] == "__main__" and row["preloaded"] for row in actors)

    def test_lines_on_the_console_have_the_role_and_rank_before_them(
        self, two_roles: tuple[Unirun, Result]
    ) -> None:
        heads = sorted(line.split(" ")[0] for line in two_roles[1].out.splitlines())
        assert heads == ["[actor:0]", "[actor:1]", "[rollout:0]", "[rollout:1]", "[rollout:2]"]

    def test_the_token_is_in_a_private_file_and_nowhere_else(self, two_roles: tuple[Unirun, Result]) -> None:
        command, result = two_roles
        job = command.job_dir()
        token = (job / "token").read_text()
        assert len(bytes.fromhex(token)) == 32
        assert stat.S_IMODE((job / "token").stat().st_mode) == 0o600
        assert stat.S_IMODE(job.stat().st_mode) == 0o700
        assert token not in result.out + result.err
        others = [path for path in job.rglob("*") if path.is_file() and path.name != "token"]
        assert others
        assert [path for path in others if token.encode() in path.read_bytes()] == []

    def test_the_sockets_are_private(self, two_roles: tuple[Unirun, Result]) -> None:
        modes = {stat.S_IMODE(path.stat().st_mode) for path in two_roles[0].job_dir().glob("*.sock")}
        assert modes <= {0o600}


class TestWhatRuns:
    @pytest.mark.parametrize("method", ["exec", "spawn"])
    def test_exec_starts_a_new_interpreter_per_worker(self, unirun: Unirun, method: str) -> None:
        result = unirun("--start-method", method, "--roles", "actor=2", ENVIRON, "--reduce")
        assert (result.code, [row["sum"] for row in result.rows]) == (0, [3, 3]), result.err
        assert not any(row["preloaded"] for row in result.rows)
        assert all("unirun.launcher.worker" in row["cmdline"] for row in result.rows)

    def test_a_module_runs_like_python_m(self, unirun: Unirun, script: Script) -> None:
        script("", "pkg/__init__.py")
        script("import sys; print(__package__, __name__, *sys.argv[1:])", "pkg/job.py")
        result = unirun("--nproc-per-node", 2, "-m", "pkg.job", "a", "--b")
        assert (result.code, result.lines) == (0, ["pkg __main__ a --b"] * 2), result.err

    def test_a_program_runs_as_it_is_with_the_workers_environment(self, unirun: Unirun) -> None:
        result = unirun(
            "--nproc-per-node", 2, "--no-python", "/bin/sh", "-c", 'echo "$ROLE_NAME $RANK $0 $1"', "x", "y"
        )
        assert (result.code, result.lines) == (0, ["default 0 x y", "default 1 x y"]), result.err

    def test_run_path_runs_the_file_as_main(self, unirun: Unirun) -> None:
        result = unirun("--run-path", ENVIRON, "x")
        assert (result.code, result.rows[0]["main"], result.rows[0]["argv"]) == (0, "__main__", ["x"]), (
            result.err
        )

    def test_a_directory_with_a_main_runs(self, unirun: Unirun, script: Script) -> None:
        main = script("print(__name__, __file__.rsplit('/', 2)[1:])", "app/__main__.py")
        result = unirun(main.parent)
        assert (result.code, result.out) == (0, "__main__ ['app', '__main__.py']\n"), result.err

    def test_each_role_may_have_its_own_script_arguments_environment_and_directory(
        self, unirun: Unirun, script: Script
    ) -> None:
        line = "import os, sys; print(sys.argv[0][-7:], os.environ['K'], os.environ['L'], os.path.basename(os.getcwd()))"
        train, serve = script(line, "t/atrn.py"), script(line, "s/serv.py")
        result = unirun(
            *("--roles", "actor=1,rollout=2", "--script", f"rollout={serve}"),
            *("--env", "K=all", "--env", "rollout:K=own", "--env", "L=a=b"),
            *("--cwd", f"rollout={serve.parent}", "--cwd", train.parent, train),
        )
        assert result.code == 0, result.err
        assert result.lines == ["atrn.py all a=b t", "serv.py own a=b s", "serv.py own a=b s"]

    @pytest.mark.parametrize("args", [["--lr", "3", "--", "-q"], ["", "a b", "--help", "--roles=x"]])
    def test_arguments_of_the_script_pass_through_untouched(self, unirun: Unirun, args: list[str]) -> None:
        result = unirun("--start-method", "exec", ENVIRON, *args)
        assert (result.code, result.rows[0]["argv"]) == (0, args), result.err

    def test_arguments_may_follow_two_dashes(self, unirun: Unirun, script: Script) -> None:
        script(f"roles: {{actor: 1}}\nscript: {ENVIRON}\n", "job.yaml")
        result = unirun("--config", "job.yaml", "start_method=exec", "--", "key=value", "--x")
        assert (result.code, result.rows[0]["argv"]) == (0, ["key=value", "--x"]), result.err

    def test_the_environment_of_the_command_is_below_the_jobs_and_that_below_the_roles(
        self, unirun: Unirun
    ) -> None:
        result = unirun(
            *(
                "--start-method",
                "exec",
                "--roles",
                "a=1,b=1",
                "--env",
                "X=job",
                "--env",
                "Y=job",
                "--env",
                "b:X=role",
            ),
            ENVIRON,
            env={"X": "shell", "Y": "shell", "Z": "shell", "OMP_NUM_THREADS": "3"},
        )
        assert result.code == 0, result.err
        found = [[row["env"][name] for name in ("X", "Y", "Z", "OMP_NUM_THREADS")] for row in result.rows]
        assert found == [["job", "job", "shell", "3"], ["role", "job", "shell", "3"]]

    def test_variables_that_count_at_import_reach_a_forked_worker_by_a_spawner_of_its_own(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            "import os, torch; print(os.environ['ROLE_NAME'], torch.get_num_threads(), os.environ.get('PYTHONX'))"
        )
        result = unirun(
            *("--roles", "a=1,b=1", "--env", "a:OMP_NUM_THREADS=1", "--env", "b:OMP_NUM_THREADS=2"),
            *("--env", "b:PYTHONX=y"),
            train,
        )
        assert (result.code, result.lines) == (0, ["a 1 None", "b 2 y"]), result.err

    def test_every_worker_draws_its_own_random_numbers(self, unirun: Unirun, script: Script) -> None:
        train = script("import random, torch; print(random.random(), int(torch.randint(2**60, (1,))))")
        result = unirun("--roles", "a=3", train)
        drawn = [number for line in result.lines for number in line.split()]
        assert (result.code, len(set(drawn))) == (0, 6), result.err

    def test_a_preloaded_module_is_imported_once(self, unirun: Unirun, script: Script) -> None:
        script("import os\nPID = os.getpid()", "heavy.py")
        train = script("import heavy; print(heavy.PID)")
        result = unirun("--roles", "a=3", "--preload", "heavy", train, env={"PYTHONPATH": str(unirun.root)})
        assert (result.code, len(result.lines), len(set(result.lines))) == (0, 3, 1), result.err


class TestPrimaryRoles:
    def test_the_job_ends_well_when_the_primary_roles_do(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import os, signal
            if os.environ["ROLE_NAME"] == "server":
                signal.pause()
            """
        )
        result = unirun("--roles", "trainer=2,server=2", "--primary", "trainer", train)
        assert result.code == 0, result.err
        roles = {role["name"]: role["phase"] for role in unirun.status()["roles"]}
        assert roles == {"trainer": "succeeded", "server": "stopped"}

    def test_without_the_option_all_roles_are_awaited(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import os, pathlib, time
            done = pathlib.Path("done")
            if os.environ["ROLE_NAME"] == "late":
                while not done.exists():
                    time.sleep(0.01)
                print("late too")
            else:
                done.touch()
            """
        )
        result = unirun("--roles", "early=1,late=1", train)
        assert (result.code, result.lines) == (0, ["late too"]), result.err


class TestAJobFile:
    YAML = """
    name: ${{config.algo}}-run
    script: {script}
    args: [--x, "${{config.lr}}"]
    max_restarts: 1
    env: {{K: v}}
    roles:
      actor: 2
      rollout:
        count: ${{config.n}}
        env: {{K: own}}
    config: {{algo: ppo, lr: 0.1, n: 3, nested: {{deep: [1, 2]}}}}
    """

    def plan(self, unirun: Unirun, *args: object) -> Any:
        result = unirun("plan", "--json", "--rdzv-id", "same", *args)
        assert result.code == 0, result.err
        return json.loads(result.out)

    def test_with_overrides_is_the_same_job_as_the_flags(self, unirun: Unirun, script: Script) -> None:
        train = script("")
        job = script(self.YAML.format(script=train), "job.yaml")
        override = ("roles.actor=4", "config.n=1", "roles.rollout.max_restarts=5")
        by_file = self.plan(unirun, "--config", job, *override)
        by_flags = self.plan(
            unirun,
            *(
                "--name",
                "ppo-run",
                "--roles",
                "actor=4,rollout=1",
                "--max-restarts",
                1,
                "--max-restarts",
                "rollout=5",
            ),
            *("--env", "K=v", "--env", "rollout:K=own", train, "--x", "0.1"),
        )
        assert by_file["workers"] == by_flags["workers"]
        assert by_file["spec"].pop("config") == {"algo": "ppo", "lr": 0.1, "n": 1, "nested": {"deep": [1, 2]}}
        assert by_flags["spec"].pop("config") == {}
        assert by_file["spec"] == by_flags["spec"]

    def test_a_flag_wins_over_the_file(self, unirun: Unirun, script: Script) -> None:
        job = script(self.YAML.format(script=script("")), "job.yaml")
        plan = self.plan(
            unirun, "--max-restarts", 7, "--roles", "actor=1", "--env", "K=flag", "--config", job
        )
        assert [(r["name"], r["count"], r["max_restarts"]) for r in plan["spec"]["roles"]] == [
            ("actor", 1, 7),
            ("rollout", 3, 7),
        ]
        assert plan["spec"]["env"] == {"K": "flag"}

    def test_gives_its_config_to_the_workers(self, unirun: Unirun, script: Script) -> None:
        train = script(
            "import json, sys, unirun; print(json.dumps([dict(unirun.init().config), sys.argv[1:]]))"
        )
        job = script(self.YAML.format(script=train), "job.yaml")
        result = unirun("--config", job, "config.n=1", "config.lr=2.5", "roles.actor=1")
        assert result.code == 0, result.err
        config = {"algo": "ppo", "lr": 2.5, "n": 1, "nested": {"deep": [1, 2]}}
        assert [json.loads(line) for line in result.lines] == [[config, ["--x", "2.5"]]] * 2


class TestOneRoleIsTorchrun:
    def test_a_script_without_roles_runs_as_the_role_default(self, unirun: Unirun) -> None:
        result = unirun("--standalone", "--nproc-per-node", 2, ENVIRON, "--reduce")
        assert (result.code, [row["sum"] for row in result.rows]) == (0, [3, 3]), result.err
        assert {row["role"] for row in result.rows} == {"default"}

    def test_the_role_can_be_named_and_one_worker_has_no_prefix(self, unirun: Unirun) -> None:
        result = unirun("--role", "learner", "--no-python", "/bin/sh", "-c", "echo $ROLE_NAME")
        assert (result.code, result.out) == (0, "learner\n"), result.err

    def test_the_same_script_gives_the_same_result_under_torchrun(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import os, torch, torch.distributed as dist
            from torch.distributed.elastic.multiprocessing.errors import record

            @record
            def main():
                dist.init_process_group("gloo")
                torch.manual_seed(dist.get_rank())
                value = torch.randn(3)
                dist.all_reduce(value)
                rank, local = dist.get_rank(), os.environ["LOCAL_RANK"]
                print(f"result {rank} {local} {dist.get_world_size()} {value.tolist()}\\n", end="", flush=True)
                dist.destroy_process_group()

            main()
            """
        )
        ours = unirun("--nproc-per-node", 2, train)
        assert ours.code == 0, ours.err
        theirs = subprocess.run(
            [TORCHRUN, "--standalone", "--nproc-per-node", "2", str(train)],
            env=unirun.environment(),
            capture_output=True,
            text=True,
            timeout=START,
            check=True,
        )
        assert ours.lines == sorted(line for line in theirs.stdout.splitlines() if line.startswith("result"))

    def test_variables_of_torchrun_are_taken(self, unirun: Unirun) -> None:
        result = unirun(
            *("--start-method", "exec", ENVIRON), env={"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "2"}
        )
        assert (result.code, len(result.rows)) == (0, 3), result.err
        assert {row["env"]["TORCHELASTIC_MAX_RESTARTS"] for row in result.rows} == {"2"}

    def test_the_port_and_the_id_can_be_chosen(self, unirun: Unirun) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        result = unirun("--master-port", port, "--rdzv-id", "mine", "--start-method", "exec", ENVIRON)
        assert result.code == 0, result.err
        env = result.rows[0]["env"]
        assert (env["MASTER_PORT"], env["TORCHELASTIC_RUN_ID"]) == (str(port), "mine")

    def test_a_virtual_local_rank_is_0_everywhere(self, unirun: Unirun) -> None:
        result = unirun("--virtual-local-rank", "--nproc-per-node", 2, "--start-method", "exec", ENVIRON)
        assert [(row["rank"], row["env"]["LOCAL_RANK"]) for row in result.rows] == [(0, "0"), (1, "0")], (
            result.err
        )


class TestWithoutALauncher:
    def test_init_gives_one_role_with_one_rank_under_plain_python(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            "import unirun; c = unirun.init(); print(c.role, c.rank, c.world_size, dict(c.config), c.generation)"
        )
        done = subprocess.run(
            [sys.executable, str(train)],
            env=unirun.environment(),
            capture_output=True,
            text=True,
            timeout=START,
        )
        assert (done.returncode, done.stdout) == (0, "default 0 1 {} 0\n"), done.stderr
