"""Ranks that hang: which one is found, and that the job goes on. The others wait for it in a collective."""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path

import pytest

from tests.effort import variants

from .harness import EXEC, Script, Unirun

TRAINING = """
    import ctypes, os, sys, threading, time
    import torch, torch.distributed as dist

    how = sys.argv[1]
    dist.init_process_group("gloo")
    rank, first = dist.get_rank(), os.environ["UNIRUN_INCARNATION"] == "0"
    # Rank 1 is in another group than the others.
    group = [dist.new_group(ranks) for ranks in ([0, 2, 3][: dist.get_world_size() - 1], [1])][rank == 1]
    dist.all_reduce(torch.ones(1), group=group)
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
    *("--hang-timeout", "3", "--first-step-timeout", "0"),
)

NOTICE_AFTER_A_SECOND = {
    "unirun.launcher.hangs.NOTICE_SECONDS": 1.0,
    "unirun.launcher.master.hangs.NOTICE_SECONDS": 1.0,
}

WAITING = "default:0,2 wait for it in all_reduce 4 of default_pg"
NOTES = {
    "spin": [WAITING, "train.py:", "no progress for "],
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
        stacks = logs / "1/0/stacks.txt"
        assert (stacks.exists() and "train.py" in stacks.read_text()) == (how != "stop")
        assert "all_reduce" in (logs / "0/0/flight_recorder.json").read_text()


NEVER_BEGINS = """
    import os, signal
    if os.environ.get("RANK") == "1" and os.environ.get("UNIRUN_INCARNATION") == "0":
        os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_rank_that_is_stopped_before_it_has_begun_is_found(
    unirun: Unirun, script: Script, tmp_path: Path
) -> None:
    """The interpreter of rank 1 is stopped while it starts, before anything of unirun is imported."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(NEVER_BEGINS))
    job = unirun.start(
        *(*OPTIONS, *EXEC, script("print('done', flush=True)")), env={"PYTHONPATH": str(tmp_path)}
    )
    result = job.end()
    assert result.code == 0, result.err
    assert "default:1 hangs: no progress for " in result.err
    assert "it is stopped" in result.err


STEPPING = """
    import os, sys, time, unirun

    how, rank = sys.argv[1], int(os.environ["RANK"])
    first = os.environ["UNIRUN_INCARNATION"] == "0"
    for step in range(10):
        unirun.progress(step)
        time.sleep(0.05)
        if first and rank == 1 and step == 4:
            if how == "sleep":
                time.sleep(600)
            if how == "pause":
                time.sleep(5)
            if how == "save":
                with unirun.allowance(60):
                    time.sleep(5)
    print("done", rank, flush=True)
"""


class TestStepsOfALoop:
    def test_a_rank_that_reports_no_more_is_found_without_collectives(
        self, unirun: Unirun, script: Script
    ) -> None:
        result = unirun.start(*OPTIONS, script(STEPPING), "sleep").end()
        assert result.code == 0
        assert "default:1 hangs: no progress since step 4 for " in result.err

    def test_a_slow_save_with_an_allowance_is_no_hang(self, unirun: Unirun, script: Script) -> None:
        result = unirun.start(*OPTIONS, script(STEPPING), "save").end()
        assert (result.code, unirun.status()["failures"]) == (0, [])

    def test_without_a_time_out_the_console_says_who_is_late_and_nobody_is_killed(
        self, unirun: Unirun, script: Script
    ) -> None:
        result = unirun.start(
            *("--nproc-per-node", "3"), script(STEPPING), "pause", constants=NOTICE_AFTER_A_SECOND
        ).end()
        assert result.code == 0
        assert result.err.count("default:1: no progress for") == 1
        assert unirun.status()["failures"] == []


WAITING_SCRIPTS = """
    import os, sys, time
    import torch, torch.distributed as dist
    import unirun.launcher.sampler

    # A look takes place each five seconds.
    unirun.launcher.sampler.INTERVAL = 0.1
    role, rank = os.environ["ROLE_NAME"], int(os.environ["RANK"])
    dist.init_process_group("gloo")
    numbers = torch.ones(1)
    for step in range(3):
        dist.all_reduce(numbers)
    print("waits for", role, flush=True)
    # All ranks of the role `busy`, and rank 1 of the others.
    while (role == "busy" or rank == 1) and not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
    dist.all_reduce(numbers)
    print("done", flush=True)
"""


@pytest.mark.parametrize("method", variants((), EXEC))
def test_without_a_time_out_the_console_says_who_waits_in_a_collective_and_for_whom(
    unirun: Unirun, script: Script, tmp_path: Path, method: tuple[str, ...]
) -> None:
    """
    1. Scripts of three roles train, and report nothing. In two of them rank 0 waits for rank 1 in a collective: one
       does something else, and one is stopped. In the third role all ranks compute.
    2. The console says it of the first two, `unirun stacks` shows their collectives, and no rank is killed.
    """
    go = tmp_path / "go"
    roles = ("--roles", "busy=2,skip=2,stop=2")
    job = unirun.start(*roles, *method, script(WAITING_SCRIPTS), go, constants=NOTICE_AFTER_A_SECOND)
    job.lines("waits for (stop)", 2)
    pid = unirun.workers()["stop:1"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    late = r"^unirun: {0}: {0}:0-1: no progress for \d+ s; {0}:0 in all_reduce 4 of default_pg, not there: {0}:1{1}$"
    job.lines(late.format("skip", ""))
    job.lines(late.format("stop", "; stopped: stop:1"))
    os.kill(pid, signal.SIGCONT)
    assert (
        "all_reduce 4 of default_pg: skip:0; not there: skip:1" in unirun("stacks", unirun.job_dir().name).out
    )
    go.touch()
    result = job.end()
    assert (result.code, result.lines.count("done"), unirun.status()["failures"]) == (0, 6, []), result.err
    assert "busy:0" not in "".join(unirun.events("late"))


ADDERS = """
    import os, time
    from unirun import BaseTrainer, BaseWorkload, trainer_invocation

    class Adder(BaseWorkload):
        def setup(self):
            import torch.distributed
            torch.distributed.init_process_group("gloo")

        @trainer_invocation(idempotent=True)
        def add(self, step):
            import torch
            if step == 2 and self.rank == 1 and os.environ["UNIRUN_INCARNATION"] == "0":
                time.sleep(600)
            numbers = torch.ones(1)
            torch.distributed.all_reduce(numbers)
            return int(numbers), os.getpid()

    class Trainer(BaseTrainer):
        def init(self):
            pass

        def fit(self):
            answers = [self.RG_ADDER.add(step) for step in range(4)]
            # Idle for longer than the time-out.
            time.sleep(5)
            print("survived", answers[0][0][1] == answers[3][0][1], answers[0][1][1] != answers[3][1][1], flush=True)
"""

ADDING = """
    name: adding
    hang_timeout: 3
    first_step_timeout: 0
    roles:
      adder: {count: 2, workload: "adders:Adder"}
    trainer: adders:Trainer
"""


def test_a_workload_that_hangs_in_a_call_is_killed_alone_and_its_peer_survives(
    unirun: Unirun, script: Script, tmp_path: Path
) -> None:
    """
    1. Rank 1 sleeps in a call, while rank 0 waits for it in a collective and the trainer for both.
    2. Rank 1 alone is killed. Rank 0 keeps its process, and the call is made again.
    3. Between its calls, and while the trainer computes, no rank is late.
    """
    script(ADDERS, "adders.py")
    result = unirun.start("--config", script(ADDING, "job.yaml"), cwd=tmp_path).end()
    assert (result.code, result.lines) == (0, ["survived True True"]), result.err
    failures = [f"{each['role']}:{each['rank']}" for each in unirun.status()["failures"]]
    assert failures == ["adder:1"]


def test_a_rank_on_another_node_than_those_that_wait_is_named_before_they_fail(
    unirun: Unirun, script: Script
) -> None:
    nodes = ("--inventory", "fake:nodes=2,devices=2", "--roles", "actor=4", "--max-restarts", "1")
    result = unirun.start(*nodes, *OPTIONS[4:], script(TRAINING), "spin").end()
    assert result.code == 0
    assert "actor:1: hangs: no progress for " in result.err
    assert "actor:1" in {f"{each['role']}:{each['rank']}" for each in unirun.status()["failures"]}
