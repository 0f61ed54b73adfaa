"""Ranks that are told to end save a checkpoint of the same step, whoever was told."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.waiting import WAIT_TIMEOUT

from .harness import START_TIMEOUT, TORCHRUN, Script, Unirun

STEPS = """
    import random, sys, time, torch, torch.distributed as dist, unirun

    dist.init_process_group("gloo")
    for step in range(100_000):
        if unirun.should_stop(step):
            time.sleep(random.random())
            print("saved", step, flush=True)
            break
        dist.all_reduce(torch.ones(1))
        if step == 5:
            print("up", flush=True)
        # A rank may be a step behind.
        time.sleep(random.random() * float(sys.argv[1]))
"""


class TestStopping:
    @pytest.mark.parametrize("seconds", [0.0, 0.2])
    def test_all_ranks_save_at_one_step_when_the_job_is_told_to_end(
        self, unirun: Unirun, script: Script, seconds: float
    ) -> None:
        job = unirun.start("--nproc-per-node", 3, script(STEPS), seconds)
        job.lines("up", 3)
        job.signal(signal.SIGTERM)
        result = job.end(WAIT_TIMEOUT)
        saved = re.findall(r"saved (\d+)", result.out)
        assert (len(saved), len({*saved})) == (3, 1), result.out
        assert result.code == 143
        exits = unirun.events("exit")
        assert sorted(exits) == [f"default:{rank} ended: exit code 143" for rank in range(3)]

    def test_all_ranks_save_at_one_step_when_one_of_them_gets_the_signal(
        self, unirun: Unirun, script: Script
    ) -> None:
        job = unirun.start("--nproc-per-node", 3, script(STEPS), 0.05)
        job.lines("up", 3)
        os.kill(unirun.workers()["default:1"]["pid"], signal.SIGTERM)
        result = job.end(WAIT_TIMEOUT)
        saved = re.findall(r"saved (\d+)", result.out)
        assert (len(saved), len({*saved})) == (3, 1), result.out
        assert result.code == 143

    def test_all_ranks_save_at_one_step_when_every_process_gets_the_signal(
        self, unirun: Unirun, script: Script
    ) -> None:
        """As from scancel, or from systemd."""
        job = unirun.start("--nproc-per-node", 3, script(STEPS), 0.05)
        job.lines("up", 3)
        for pid in unirun.processes():
            os.kill(pid, signal.SIGTERM)
        result = job.end(WAIT_TIMEOUT)
        saved = re.findall(r"saved (\d+)", result.out)
        assert (len(saved), len({*saved})) == (3, 1), result.out
        assert result.code == 143

    def test_a_rank_that_waits_for_a_lost_one_does_not_use_up_the_grace_period(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import os, threading, unirun
            if os.environ["UNIRUN_GENERATION"] == "0":
                unirun.should_stop(0)
                print("up", flush=True)
                while True:
                    threading.Event().wait(1)
            """
        )
        job = unirun.start("--nproc-per-node", 2, "--max-restarts", 1, train)
        job.lines("up", 2)
        os.kill(unirun.workers()["default:0"]["pid"], signal.SIGKILL)
        result = job.end(START_TIMEOUT)
        assert result.code == 0, result.err
        assert "grace period" not in result.err

    def test_it_works_under_torchrun(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start_program([TORCHRUN, "--nproc-per-node", "2", str(script(STEPS)), "0.05"])
        job.lines("up", 2)
        job.signal(signal.SIGTERM)
        saved = re.findall(r"saved (\d+)", job.end(START_TIMEOUT).out)
        assert (len(saved), len({*saved})) == (2, 1)
