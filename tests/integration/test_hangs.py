"""Ranks that hang: which one is found, and that the job goes on. The others wait for it in a collective."""

from __future__ import annotations

import os
import signal

import pytest

from .harness import Script, Unirun

TRAINING = """
    import ctypes, os, sys, threading, time
    import torch, torch.distributed as dist

    how = sys.argv[1]
    dist.init_process_group("gloo")
    rank, first = dist.get_rank(), os.environ["UNIRUN_INCARNATION"] == "0"
    numbers = torch.ones(1)
    for step in range(6):
        if first and rank == 1 and step == 3:
            print("begins to", how, flush=True)
            if how == "spin":
                while True:
                    pass
            if how == "gil":
                # A lock that is taken twice, in C: not even a signal ends the wait.
                libc, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
                libc.pthread_mutex_lock(lock)
                libc.pthread_mutex_lock(lock)
            if how == "skip":
                time.sleep(600)
            if how == "stop":
                time.sleep(600)
            if how == "other":
                dist.broadcast(numbers, 0)
        dist.all_reduce(numbers)
    print("done", rank, flush=True)
"""

OPTIONS = (
    *("--nproc-per-node", "3", "--max-restarts", "1"),
    *("--hang-timeout", "2", "--first-step-timeout", "0"),
)

WAITING = "default:0,2 wait for it in all_reduce 4 of default_pg"
NOTES = {
    "spin": [WAITING, "train.py:", "no progress for 2"],
    "gil": ["holds the GIL", "train.py:"],
    "skip": [WAITING, "train.py:"],
    "other": ["it waits in broadcast 4 of default_pg, the others in all_reduce 4 of default_pg", "train.py:"],
    "stop": ["it is stopped"],
}
"""Words in the note of the failure, by the kind of the hang."""


class TestAHang:
    @pytest.mark.parametrize("how", ["spin", "gil", "skip", "other", "stop"])
    def test_the_rank_for_which_the_others_wait_is_killed_and_named(
        self, unirun: Unirun, script: Script, how: str
    ) -> None:
        """
        1. Three ranks train. Rank 1 spins, holds the GIL, skips a collective, is in another one, or is stopped.
        2. It is killed when the time-out is over, and the role restarts and ends with 0.
        3. The record of the failure names it, and its stack is in its log directory.
        """
        train = script(TRAINING)
        job = unirun.start(*OPTIONS, train, how)
        job.lines(rf"begins to ({how})")
        if how == "stop":
            os.kill(unirun.workers()["default:1"]["pid"], signal.SIGSTOP)
        result = job.end()
        assert (result.code, result.lines.count("done 1")) == (0, 1), result.err

        failures = {f"{each['role']}:{each['rank']}": each for each in unirun.status()["failures"]}
        decision = failures["default:1"]["decision"]
        for words in (*NOTES[how], "restart 1 of 1"):
            assert words in decision
        logs = unirun.job_dir() / "logs" / "default"
        assert ("train.py" in (logs / "1/0/stacks.txt").read_text()) == (how != "stop")
        assert "all_reduce" in (logs / "0/0/flight_recorder.json").read_text()
