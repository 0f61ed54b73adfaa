"""Scripts, modules and programs, their arguments, environment and directory; by flags or by a job file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .harness import ENVIRON, EXEC, Script, Unirun


class TestWhatRuns:
    @pytest.mark.parametrize(("method", "sums"), [("exec", [3, 3]), ("spawn", [])])
    def test_exec_starts_a_new_interpreter_per_worker(
        self, unirun: Unirun, method: str, sums: list[int]
    ) -> None:
        reduce = ["--reduce"] if sums else []
        result = unirun("--start-method", method, "--roles", "actor=2", ENVIRON, *reduce)
        assert (result.code, [row["sum"] for row in result.rows if "sum" in row]) == (0, sums), result.err
        assert not any(row["preloaded"] for row in result.rows)
        titles = [row["cmdline"][0].partition(" /")[0] for row in result.rows]
        assert titles == ["unirun actor:0", "unirun actor:1"], "as ps and pgrep -f find them"

    def test_a_module_runs_like_python_m(self, unirun: Unirun, script: Script) -> None:
        script("", "pkg/__init__.py")
        script("import sys; print(__package__, __name__, *sys.argv[1:])", "pkg/job.py")
        result = unirun("--nproc-per-node", 2, "-m", "pkg.job", "a", "--b")
        assert (result.code, result.lines) == (0, ["pkg __main__ a --b"] * 2), result.err

    def test_a_program_runs_with_the_workers_environment(self, unirun: Unirun) -> None:
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

    def test_environment_precedence_is_command_then_job_then_role(self, unirun: Unirun) -> None:
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

    def test_variables_read_at_import_reach_a_forked_worker_by_its_own_spawner(
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

    def test_a_job_file_with_overrides_is_the_same_job_as_the_flags(
        self, unirun: Unirun, script: Script
    ) -> None:
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

    def test_a_flag_has_precedence_over_the_job_file(self, unirun: Unirun, script: Script) -> None:
        job = script(self.YAML.format(script=script("")), "job.yaml")
        plan = self.plan(
            unirun, "--max-restarts", 7, "--roles", "actor=1", "--env", "K=flag", "--config", job
        )
        assert [(r["name"], r["count"], r["max_restarts"]) for r in plan["spec"]["roles"]] == [
            ("actor", 1, 7),
            ("rollout", 3, 7),
        ]
        assert plan["spec"]["env"] == {"K": "flag"}

    def test_a_job_files_config_reaches_the_workers(self, unirun: Unirun, script: Script) -> None:
        train = script(
            "import json, sys, unirun; print(json.dumps([dict(unirun.init().config), sys.argv[1:]]))"
        )
        job = script(self.YAML.format(script=train), "job.yaml")
        result = unirun("--config", job, "config.n=1", "config.lr=2.5", "roles.actor=1")
        assert result.code == 0, result.err
        config = {"algo": "ppo", "lr": 2.5, "n": 1, "nested": {"deep": [1, 2]}}
        assert [json.loads(line) for line in result.lines] == [[config, ["--x", "2.5"]]] * 2


class TestTheStoresPassword:
    @pytest.mark.parametrize("how", [(), EXEC], ids=["fork", "exec"])
    def test_the_stores_password_is_nowhere_in_a_worker(
        self, unirun: Unirun, script: Script, how: tuple[str, ...]
    ) -> None:
        look = script(
            """
            import os, pathlib
            own = b"secret" in pathlib.Path("/proc/self/environ").read_bytes()
            print("found" if own or "secret" in os.environ.values() else "nothing", os.environ["K"])
            """
        )
        env = {"UNIRUN_STORE_PASSWORD": "secret", "K": "passed on"}
        assert unirun(*how, look, env=env).lines == ["nothing passed on"]
