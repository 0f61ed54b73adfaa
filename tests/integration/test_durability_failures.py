"""Workers that fail while there is no master: the next master handles each failure once."""

from __future__ import annotations

import os
import re
import signal

from tests.waiting import eventually

from .harness import START_TIMEOUT, Running, Script, Unirun
from .masters import Masters, SteadyJob

WAITING = """
    import os, pathlib, time
    role, rank, incarnation = (os.environ[name] for name in ("ROLE_NAME", "RANK", "UNIRUN_INCARNATION"))
    print("up", role, rank, incarnation, os.getpid(), flush=True)
    while not pathlib.Path("enough").exists():
        time.sleep(0.02)
"""


def pid_of(job: Running, role: str, rank: int, incarnation: int = 0) -> int:
    """The pid of a worker of `WAITING`, once it runs."""
    (pid,) = job.lines(rf"up {role} {rank} {incarnation} (\d+)$")
    return int(pid)


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


class TestAWorkerThatDiesWhileThereIsNoMaster:
    def test_a_workload_that_dies_without_a_master_restarts_alone(self, unirun: Unirun) -> None:
        """
        1. The master is killed, then a workload.
        2. The next master restarts that rank alone, and counts one restart.
        3. The trainer's calls continue; all other processes are the same at the end.
        """
        steady_job = SteadyJob(unirun, "--max-restarts", 3)
        _, victim, other, thinker = steady_job.pids()
        masters = Masters(unirun)
        masters.kill()
        kill(victim)
        counted = {"adder": 1, "thinker": 0, "trainer": 0}
        eventually(lambda: masters.restarts() == counted, "the restart is counted", START_TIMEOUT)
        steady_job.goes_on(START_TIMEOUT)
        row = steady_job.end()
        assert row["after"][0][0] != victim
        assert [incarnation for _, incarnation in row["after"]] == [1, 0, 0]
        assert [pid for pid, _ in row["after"][1:]] == [other, thinker]
        assert row["lost"] in (1, 2), "a call may have been made before the death was told"
        decisions = [text for text in unirun.events("decision") if "restart" in text]
        assert len(decisions) == 1, decisions
        assert "adder:0 alone" in decisions[0]

    def test_a_script_worker_that_dies_without_a_master_restarts_its_role(
        self, unirun: Unirun, script: Script
    ) -> None:
        """
        1. The master is killed, then a worker of a role of scripts.
        2. The next master restarts both ranks of the role; the worker of the other role keeps its process.
        3. The workers end, and the command ends with 0.
        """
        job = unirun.start("--roles", "a=2,b=1", "--max-restarts", 3, script(WAITING))
        other = pid_of(job, "b", 0)
        pid_of(job, "a", 1)
        masters = Masters(unirun)
        victim = pid_of(job, "a", 0)
        masters.kill()
        kill(victim)
        pid_of(job, "a", 0, 1)
        pid_of(job, "a", 1, 1)
        eventually(lambda: masters.restarts() == {"a": 1, "b": 0}, "the restart is counted", START_TIMEOUT)
        assert unirun.workers()["b:0"]["pid"] == other
        (unirun.root / "enough").touch()
        assert job.end().code == 0

    def test_workers_of_two_roles_that_die_without_a_master_restart_both_roles(
        self, unirun: Unirun, script: Script
    ) -> None:
        """
        1. The master is killed, then a worker of each of two roles.
        2. The next master restarts both roles; the third role keeps its process.
        3. The workers end, and the command ends with 0.
        """
        job = unirun.start("--roles", "a=2,b=2,c=1", "--max-restarts", 3, script(WAITING))
        victims = [pid_of(job, "a", 0), pid_of(job, "b", 1)]
        other = pid_of(job, "c", 0)
        masters = Masters(unirun)
        masters.kill()
        kill(*victims)
        for role in ("a", "b"):
            for rank in range(2):
                pid_of(job, role, rank, 1)
        counted = {"a": 1, "b": 1, "c": 0}
        eventually(lambda: masters.restarts() == counted, "the restarts are counted", START_TIMEOUT)
        assert unirun.workers()["c:0"]["pid"] == other
        (unirun.root / "enough").touch()
        assert job.end().code == 0

    def test_a_worker_that_dies_without_a_master_may_use_up_the_budget(
        self, unirun: Unirun, script: Script
    ) -> None:
        """
        1. A worker is killed: the role restarts, which uses up its budget of one.
        2. The master is killed, then another worker of the role.
        3. The next master ends the job with 5, and reports the second death as the root cause, once.
        """
        job = unirun.start("--roles", "a=2,b=1", "--max-restarts", 1, script(WAITING))
        kill(pid_of(job, "a", 1))
        victim = pid_of(job, "a", 0, 1)
        pid_of(job, "a", 1, 1)
        masters = Masters(unirun)
        masters.kill()
        kill(victim)
        end = job.end()
        assert end.code == 5, end.err
        assert re.search(r"root cause: a:0 on \S+: killed by SIGKILL", end.err), end.err
        assert end.err.count("root cause") == 1
        status = masters.status()
        assert (status["phase"], status["code"]) == ("failed", 5)
        assert len([text for text in unirun.events("decision") if "restart" in text]) == 2


def test_a_worker_that_succeeds_without_a_master_counts_as_succeeded(unirun: Unirun, script: Script) -> None:
    """
    1. The master is killed, and both workers end with 0.
    2. The next master ends the job as succeeded.
    """
    job = unirun.start("--roles", "a=2", script(WAITING))
    pid_of(job, "a", 0)
    pid_of(job, "a", 1)
    masters = Masters(unirun)
    masters.kill()
    (unirun.root / "enough").touch()
    end = job.end()
    assert end.code == 0, end.err
    assert masters.status()["phase"] == "succeeded"
