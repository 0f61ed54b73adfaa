"""A job ends when it is told to, though somebody has stopped one of its own processes (SIGSTOP)."""

from __future__ import annotations

import os
import signal

import pytest

from tests.waiting import WAIT_TIMEOUT, eventually

from .harness import Script, Unirun, alive


@pytest.mark.parametrize("part", ["unirun-agent", "unirun-spawner"])
def test_a_job_with_a_stopped_process_ends_when_it_is_told_to(
    unirun: Unirun, script: Script, part: str
) -> None:
    job = unirun.start("--nproc-per-node", 2, script("import time; print('up', flush=True); time.sleep(600)"))
    job.lines("up", 2)
    os.kill(unirun.pid_of(part), signal.SIGSTOP)
    job.signal(signal.SIGTERM)
    assert job.end(WAIT_TIMEOUT).code == 143
    unirun.assert_nothing_left()


def test_unirun_stop_ends_a_job_whose_agent_is_stopped_and_says_so(unirun: Unirun, script: Script) -> None:
    job = unirun.start("--nproc-per-node", 2, script("import time; print('up', flush=True); time.sleep(600)"))
    job.lines("up", 2)
    os.kill(unirun.pid_of("unirun-agent"), signal.SIGSTOP)
    stopped = unirun("stop")
    assert stopped.code == 0, stopped.out
    assert "was stopped (SIGSTOP); it goes on, as the job is to end" in stopped.out
    result = job.end(WAIT_TIMEOUT)
    assert result.code == 143, result.err
    assert "was stopped (SIGSTOP)" in result.err
    unirun.assert_nothing_left()


def test_unirun_stop_ends_a_job_whose_agent_is_stopped_and_whose_master_is_dead(
    unirun: Unirun, script: Script
) -> None:
    """Nobody else would start another master, so the command lets the agent go on."""
    job = unirun.start("--nproc-per-node", 2, script("import time; print('up', flush=True); time.sleep(600)"))
    job.lines("up", 2)
    os.kill(unirun.pid_of("unirun-agent"), signal.SIGSTOP)
    os.kill(unirun.pid_of("unirun-master"), signal.SIGKILL)
    assert unirun("stop").code == 0
    assert job.end(WAIT_TIMEOUT).code == 143
    unirun.assert_nothing_left()


@pytest.mark.cold
def test_a_spawner_that_is_stopped_while_it_imports_is_let_go_on(unirun: Unirun, script: Script) -> None:
    job = unirun.start("--nproc-per-node", 2, script("print('up', flush=True)"))
    os.kill(unirun.pid_of("unirun-spawner"), signal.SIGSTOP)
    job.lines("up", 2)
    assert job.end(WAIT_TIMEOUT).code == 0


def test_the_end_of_a_rank_is_noticed_though_its_spawner_is_stopped(unirun: Unirun, script: Script) -> None:
    train = """
        import os, time
        if os.environ["UNIRUN_INCARNATION"] == "0":
            print("up", flush=True)
            time.sleep(600)
    """
    job = unirun.start("--max-restarts", 1, script(train))
    job.lines("up")
    victim = unirun.workers()["default:0"]["pid"]
    os.kill(unirun.pid_of("unirun-spawner"), signal.SIGSTOP)
    os.kill(victim, signal.SIGKILL)
    assert job.end(WAIT_TIMEOUT).code == 0
    eventually(lambda: not alive(victim), "its end")
