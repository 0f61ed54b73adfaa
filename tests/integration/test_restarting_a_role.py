"""A role whose worker fails restarts while its budget lasts; other roles are unaffected."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.waiting import WAIT_TIMEOUT, eventually

from .harness import Script, Unirun, alive, gone

WAITING = """
    import os, signal, sys
    e = os.environ
    names = ("RANK", "TORCHELASTIC_RESTART_COUNT", "UNIRUN_GENERATION", "UNIRUN_INCARNATION")
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(9))
    print("up", e["ROLE_NAME"], *(e[name] for name in names), os.getpid(), flush=True)
    while True:
        signal.pause()
"""


def restarted(unirun: Unirun, times: int) -> dict[str, dict[str, Any]]:
    """The workers, as soon as the status shows that the rollouts were started again so often: it is written after
    they were started."""

    def look() -> dict[str, dict[str, Any]] | None:
        workers = unirun.workers()
        rollouts = [worker for who, worker in workers.items() if who.startswith("rollout")]
        return workers if all(worker["incarnation"] == times for worker in rollouts) else None

    return eventually(look, f"the rollouts were started again {times} times")


class TestARestart:
    @pytest.mark.parametrize("method", ["fork", "exec"])
    def test_a_restart_starts_every_rank_of_the_role_and_spares_other_roles(
        self, unirun: Unirun, script: Script, method: str
    ) -> None:
        """
        1. Two actors and two rollouts run.
        2. A rollout is killed: both rollouts restart in generation 1; the actors keep their processes.
        3. The other rollout fails: both restart in generation 2, as a restart resets nothing.
        4. The workers end, and the command ends with 0.
        """
        job = unirun.start(
            *("--roles", "actor=2,rollout=2", "--max-restarts", "rollout=2", "--start-method", method),
            script(WAITING),
        )
        job.lines(r"up \w+ \d 0 0 0 ", 4)
        before = {who: worker["pid"] for who, worker in unirun.workers().items()}

        os.kill(before["rollout:1"], signal.SIGKILL)
        assert sorted(job.lines(r"up (rollout \d \d \d \d) ", 4)[2:]) == [
            "rollout 0 1 1 1",
            "rollout 1 1 1 1",
        ]
        after = restarted(unirun, 1)
        assert {who: w["pid"] for who, w in after.items() if who.startswith("actor")} == {
            who: pid for who, pid in before.items() if who.startswith("actor")
        }
        assert not {w["pid"] for who, w in after.items() if who.startswith("rollout")} & set(before.values())
        assert not alive(before["rollout:0"])

        # A restart resets nothing: the second failure is handled like the first.
        os.kill(after["rollout:0"]["pid"], signal.SIGUSR2)
        assert sorted(job.lines(r"up (rollout \d \d \d \d) ", 6)[4:]) == [
            "rollout 0 2 2 2",
            "rollout 1 2 2 2",
        ]
        last = restarted(unirun, 2)
        assert {last[who]["pid"] for who in ("actor:0", "actor:1")} == {before["actor:0"], before["actor:1"]}
        assert {who: worker["incarnation"] for who, worker in last.items()} == {
            "actor:0": 0,
            "actor:1": 0,
            "rollout:0": 2,
            "rollout:1": 2,
        }

        for worker in last.values():
            os.kill(worker["pid"], signal.SIGUSR1)
        result = job.end()
        assert result.code == 0, result.err
        (rollout,) = (role for role in unirun.status()["roles"] if role["name"] == "rollout")
        assert (rollout["generation"], rollout["restarts"], rollout["max_restarts"]) == (2, 2, 2)

    def test_a_restart_is_reported_with_its_reason_on_the_console_and_in_events(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script("import os, sys; sys.exit(3 if os.environ['UNIRUN_INCARNATION'] == '0' else 0)")
        result = unirun("--max-restarts", 1, "--start-method", "exec", train)
        assert result.code == 0, result.err
        decision = "default:0 ended with exit code 3; restart 1 of 1 of role default"
        assert decision in result.err
        assert unirun.events("decision") == [decision]
        assert unirun.events("restart") == ["role default starts as generation 1"]
        story = unirun("events", "--story", "default:0").out.splitlines()
        chain = [line[12:] for line in story if "exit code 3" in line or "restart:" in line]
        assert [line.lstrip().partition(":")[0] for line in chain] == ["exit", "decision", "restart"]
        depths = [len(line) - len(line.lstrip()) for line in chain]
        assert depths == sorted(set(depths)), "each follows from the one before"

    def test_five_restarts_each_give_a_working_group(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import os, pathlib, signal, time, torch, torch.distributed as dist
            generation = int(os.environ["UNIRUN_GENERATION"])
            dist.init_process_group("gloo")
            value = torch.ones(1)
            dist.all_reduce(value)
            print("sum", generation, int(value), flush=True)
            pathlib.Path(f"{generation}-{dist.get_rank()}").touch()
            if generation < 5 and dist.get_rank() == generation % 3:
                # The others are past the collective: a death in the midst of it would be theirs too.
                while not all(pathlib.Path(f"{generation}-{rank}").exists() for rank in range(3)):
                    time.sleep(0.001)
                os.kill(os.getpid(), signal.SIGKILL)
            if generation < 5:
                dist.barrier()
            dist.destroy_process_group()
            """
        )
        result = unirun("--roles", "actor=3", "--max-restarts", 5, train)
        assert result.code == 0, result.err
        assert [line for line in result.lines if line.startswith("sum")] == [
            f"sum {generation} 3" for generation in range(6) for _ in range(3)
        ]

    def test_a_restarted_role_never_reads_a_key_of_an_earlier_generation(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import datetime, os, sys
            from torch.distributed import TCPStore
            e = os.environ
            store = TCPStore(e["MASTER_ADDR"], int(e["MASTER_PORT"]), is_master=False)
            print("stale", store.check(["key"]), e["MASTER_PORT"], flush=True)
            store.set("key", "1")
            sys.exit(e["UNIRUN_GENERATION"] != "2")
            """
        )
        result = unirun("--max-restarts", 2, train)
        assert result.code == 0, result.err
        assert len(result.lines) == 3
        assert all(line.startswith("stale False") for line in result.lines)
        assert len({line.split()[-1] for line in result.lines}) == 1, "the address of a role does not change"

    def test_a_restart_keeps_the_output_of_every_incarnation(self, unirun: Unirun, script: Script) -> None:
        train = script(
            "import os, sys; n = os.environ['UNIRUN_INCARNATION']; print('I am', n); sys.exit(n != '2')"
        )
        result = unirun("--max-restarts", 2, "--start-method", "exec", train)
        assert (result.code, result.lines) == (0, ["I am 0", "I am 1", "I am 2"]), result.err
        assert [unirun.log("default", 0, n) for n in range(3)] == [b"I am 0\n", b"I am 1\n", b"I am 2\n"]

    def test_a_restart_kills_a_worker_that_ignores_sigterm_after_the_grace_period(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import os, signal, sys
            first, rank = os.environ["UNIRUN_INCARNATION"] == "0", os.environ["RANK"]
            if not first:
                sys.exit()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1))
            print("up", rank, flush=True)
            while True:
                signal.pause()
            """
        )
        job = unirun.start(
            *("--roles", "actor=2", "--max-restarts", 1, "--shutdown-timeout", 0.5, "--start-method", "exec"),
            train,
        )
        job.lines("up", 2)
        workers = unirun.workers()
        os.kill(workers["actor:0"]["pid"], signal.SIGUSR1)
        result = job.end()
        assert result.code == 0, result.err
        assert "actor:1: did not end in its grace period and is killed" in result.err
        assert not alive(workers["actor:1"]["pid"])

    def test_a_restart_leaves_no_child_of_earlier_workers(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import os, subprocess, sys
            if os.environ["UNIRUN_INCARNATION"] == "1":
                sys.exit()
            for own in (False, True):
                child = subprocess.Popen(["/bin/sleep", "600"], start_new_session=own)
                print("child", child.pid, flush=True)
            sys.exit(1)
            """
        )
        job = unirun.start("--roles", "actor=2", "--max-restarts", 1, "--start-method", "exec", train)
        result = job.end()
        assert result.code == 0, result.err
        pids = [int(line.split()[1]) for line in result.lines if line.startswith("child")]
        assert pids
        assert not any(map(alive, pids))

    def test_a_role_restarts_when_the_spawner_was_killed(self, unirun: Unirun, script: Script) -> None:
        """
        1. The spawner is killed, and its workers with it.
        2. The agent starts another spawner, and the role restarts.
        3. The workers end, and the command ends with 0.
        """
        job = unirun.start("--roles", "actor=2", "--max-restarts", 1, script(WAITING))
        job.lines(r"up actor \d 0 0 0 ", 2)
        spawner = unirun.pid_of("unirun-spawner")
        os.kill(spawner, signal.SIGKILL)
        pids = job.lines(r"up actor \d 1 1 1 (\d+)", 2)
        assert not alive(spawner)
        for pid in pids:
            os.kill(int(pid), signal.SIGUSR1)
        assert job.end().code == 0


class TestABudget:
    @pytest.mark.parametrize(("limit", "code"), [(0, 3), (3, 5)])
    def test_a_spent_restart_budget_ends_the_job(
        self, unirun: Unirun, script: Script, limit: int, code: int
    ) -> None:
        train = script("import os, sys; print('try', os.environ['UNIRUN_INCARNATION']); sys.exit(3)")
        result = unirun("--max-restarts", limit, "--start-method", "exec", train)
        assert result.code == code, result.err
        assert result.lines == [f"try {n}" for n in range(limit + 1)]
        if limit:
            assert f"all {limit} restarts of role default are used up" in result.err
        assert "root cause: default:0" in result.err
        assert f"log: {unirun.job_dir()}/logs/default/0/{limit}/stderr.log" in result.err

    def test_a_restart_budget_belongs_to_its_role(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import os, signal, sys
            if os.environ["ROLE_NAME"] == "fragile":
                sys.exit(4)
            signal.pause()
            """
        )
        result = unirun(
            *("--roles", "solid=1,fragile=1", "--max-restarts", "solid=9", "--max-restarts", "fragile=1"),
            *("--start-method", "exec", train),
        )
        assert result.code == 5, result.err
        restarts = {role["name"]: (role["restarts"], role["phase"]) for role in unirun.status()["roles"]}
        assert restarts == {"solid": (0, "stopped"), "fragile": (1, "failed")}


class TestSeveralRolesThatFail:
    def test_roles_that_fail_at_once_restart_each_on_its_own(self, unirun: Unirun, script: Script) -> None:
        """
        1. All workers of two roles are killed.
        2. Each role restarts once, and both run again.
        3. The workers end, and the command ends with 0.
        """
        job = unirun.start("--roles", "a=2,b=2", "--max-restarts", 1, script(WAITING))
        job.lines(r"up \w \d 0 0 0 ", 4)
        for worker in unirun.workers().values():
            os.kill(worker["pid"], signal.SIGKILL)
        pids = [int(pid) for pid in job.lines(r"up \w \d 1 1 1 (\d+)", 4)]
        eventually(
            lambda: {r["phase"] for r in unirun.status()["roles"]} == {"running"}, "both roles run again"
        )
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        assert all(gone(pid, WAIT_TIMEOUT) for pid in pids)
        result = job.end()
        assert (result.code, {role["restarts"] for role in unirun.status()["roles"]}) == (0, {1}), result.err


def test_a_failure_restarts_all_roles_when_its_own_has_no_restart_left(
    unirun: Unirun, script: Script
) -> None:
    """
    1. The actor fails when another role has succeeded. Its role has no restarts, and the job has one: the others are
       started again with it.
    2. All end with 0 then, and so does the job. The restart is told with its reason.
    """
    code = """
        import os, sys, time, unirun
        e, context = os.environ, unirun.init()
        print("up", e["ROLE_NAME"], e["UNIRUN_INCARNATION"], e["TORCHELASTIC_RESTART_COUNT"], flush=True)
        if e["UNIRUN_INCARNATION"] == "0" and context.role == "actor":
            while context.peers.view("reward").phase != "succeeded":
                time.sleep(0.01)
            sys.exit(3)
        if e["UNIRUN_INCARNATION"] == "0" and context.role == "rollout":
            time.sleep(600)
    """
    roles = "actor=1,rollout=1,reward=1"
    result = unirun("--roles", roles, "--max-job-restarts", "1", script(code))
    assert result.code == 0, result.err
    assert "up actor 1 1" in result.out
    assert "up reward 1 1" in result.out
    assert "up rollout 1 1" in result.out
    assert "role actor has no restarts (--max-restarts 0); restart 1 of 1 of the job" in result.err
    assert unirun.status()["restarts"] == 1
