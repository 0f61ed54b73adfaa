"""Workers that fail while there is no master: the next one sees to it, once."""

from __future__ import annotations

import os
import re
import signal

from .harness import START, Running, Script, Unirun, eventually
from .masters import Masters, Steady

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
    def test_comes_back_alone_when_it_is_a_workload(self, unirun: Unirun) -> None:
        steady = Steady(unirun, "--max-restarts", 3)
        _, victim, other, thinker = steady.pids()
        masters = Masters(unirun)
        masters.kill()
        kill(victim)
        counted = {"adder": 1, "thinker": 0, "trainer": 0}
        eventually(lambda: masters.restarts() == counted, "the restart is counted", START)
        steady.goes_on(START)
        row = steady.end()
        assert row["after"][0][0] != victim
        assert [incarnation for _, incarnation in row["after"]] == [1, 0, 0]
        assert [pid for pid, _ in row["after"][1:]] == [other, thinker]
        assert row["lost"] in (1, 2), "a call may have been made before the death was told"
        decisions = [text for text in unirun.events("decision") if "restart" in text]
        assert len(decisions) == 1, decisions
        assert "adder:0 alone" in decisions[0]

    def test_takes_its_role_along_when_it_runs_a_script(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start("--roles", "a=2,b=1", "--max-restarts", 3, script(WAITING))
        other = pid_of(job, "b", 0)
        pid_of(job, "a", 1)
        masters = Masters(unirun)
        victim = pid_of(job, "a", 0)
        masters.kill()
        kill(victim)
        pid_of(job, "a", 0, 1)
        pid_of(job, "a", 1, 1)
        eventually(lambda: masters.restarts() == {"a": 1, "b": 0}, "the restart is counted", START)
        assert unirun.workers()["b:0"]["pid"] == other
        (unirun.root / "enough").touch()
        assert job.end().code == 0

    def test_may_be_one_of_two_roles_at_once(self, unirun: Unirun, script: Script) -> None:
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
        eventually(lambda: masters.restarts() == counted, "the restarts are counted", START)
        assert unirun.workers()["c:0"]["pid"] == other
        (unirun.root / "enough").touch()
        assert job.end().code == 0

    def test_may_use_up_the_budget(self, unirun: Unirun, script: Script) -> None:
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


def test_a_worker_that_ends_well_while_there_is_no_master_has_ended_well(
    unirun: Unirun, script: Script
) -> None:
    job = unirun.start("--roles", "a=2", script(WAITING))
    pid_of(job, "a", 0)
    pid_of(job, "a", 1)
    masters = Masters(unirun)
    masters.kill()
    (unirun.root / "enough").touch()
    end = job.end()
    assert end.code == 0, end.err
    assert masters.status()["phase"] == "succeeded"
