"""The main path: two roles, their groups and environment, and the end of a job."""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from .harness import ENVIRON, EXEC, Result, Script, Unirun, swept
from .warm import Warm, WarmUnirun


@pytest.fixture(scope="module")
def two_roles(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[tuple[Unirun, Result]]:
    """One job with two roles, each of which forms its group and prints what it finds."""
    with swept(WarmUnirun(tmp_path_factory.mktemp("two"), warm)) as command:
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

    def test_each_role_is_its_own_process_group(self, actors: Any, rollouts: Any) -> None:
        assert [(row["sum"], row["world"]) for row in actors] == [(3, 2)] * 2
        assert [(row["sum"], row["world"]) for row in rollouts] == [(6, 3)] * 3

    def test_the_default_group_of_each_role_has_its_own_port(self, actors: Any, rollouts: Any) -> None:
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
            (
                "TORCHELASTIC_SIGNALS_TO_HANDLE",
                "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
                "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            ),
            ("OMP_NUM_THREADS", "1", "1"),
            ("UNIRUN_JOB", "two", "two"),
            ("UNIRUN_NODE", socket.gethostname(), socket.gethostname()),
            ("UNIRUN_GENERATION", "0", "0"),
            ("UNIRUN_INCARNATION", "0", "0"),
            ("UNIRUN_SOCKET", "{job}/agent.{node}.sock", "{job}/agent.{node}.sock"),
        ],
    )
    def test_a_worker_has_the_documented_environment(
        self, two_roles: tuple[Unirun, Result], variable: str, actor: str, rollout: str
    ) -> None:
        command, result = two_roles
        for row in result.rows:
            expected = (actor if row["role"] == "actor" else rollout).format(
                rank=row["rank"], job=command.job_dir(), node=socket.gethostname()
            )
            assert row["env"][variable] == expected

    def test_no_device_mask_is_set_where_there_is_no_device(self, actors: Any) -> None:
        assert all(
            row["env"].get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES") for row in actors
        )

    def test_a_script_runs_as_main_with_torch_already_loaded(self, actors: Any) -> None:
        assert all(row["main"] == "__main__" and row["preloaded"] for row in actors)

    def test_console_lines_are_prefixed_with_role_and_rank(self, two_roles: tuple[Unirun, Result]) -> None:
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

    def test_the_sockets_of_a_job_are_private(self, two_roles: tuple[Unirun, Result]) -> None:
        modes = {stat.S_IMODE(path.stat().st_mode) for path in two_roles[0].job_dir().glob("*.sock")}
        assert modes <= {0o600}


class TestPrimaryRoles:
    def test_a_job_succeeds_when_its_primary_roles_do(self, unirun: Unirun, script: Script) -> None:
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

    def test_without_primary_roles_all_roles_are_awaited(self, unirun: Unirun, script: Script) -> None:
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


LATE = """
    import os, sys
    from unirun.cli import main
    from unirun.launcher.foreground.session import JobFollower

    follow = JobFollower.run

    async def late(self):
        # When the agent has ended with the job, or also the master, which waits for this command.
        processes = {"agent": self._running._agents[0], "master": self._running._first}
        os.waitid(os.P_PID, processes[sys.argv.pop(1)], os.WEXITED | os.WNOWAIT)
        return await follow(self)

    JobFollower.run = late
    sys.exit(main(sys.argv[2:]))
    """


@pytest.mark.parametrize("until", ["agent", "master"])
def test_a_job_that_ends_before_its_command_reaches_the_master_has_succeeded(
    unirun: Unirun, script: Script, until: str
) -> None:
    train = script("print('done')")
    command = [sys.executable, str(script(LATE, "late.py")), until, *EXEC, str(train)]
    result = unirun.start_program(command).end()
    assert (result.code, result.lines) == (0, ["done"]), result.err
