"""A job that is described and submitted in Python, by a program as users write it."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.effort import variants
from tests.waiting import eventually

from .harness import START_TIMEOUT, Running, Unirun

PPO = """
    import os, time
    from unirun import BaseTrainer, BaseWorkload, trainer_invocation

    class Actor(BaseWorkload):
        @trainer_invocation()
        def update(self, step):
            print("update", step, flush=True)
            return [self.rank, os.environ["OF_ROLE"], os.environ["OF_JOB"]]

    class PPOTrainer(BaseTrainer):
        def init(self):
            pass

        def fit(self):
            done = self.RG_ACTOR.update(self.config.step)
            if self.config.get("fail"):
                raise ValueError("as asked")
            if self.config.get("hang"):
                print("hanging", flush=True)
                time.sleep(600)
            return {"done": done}
"""
MAIN = """
    import sys, time
    from unirun.train import RLJobBuilder

    def job(**config):
        return (
            RLJobBuilder().node_num(1).device_per_node(2).config({"step": 7, **config})
            .global_env({"OF_JOB": "job", "OF_ROLE": "job"})
            .trainer("ppo", "PPOTrainer")
            .actor("ppo", "Actor").total(2).per_node(2).env({"OF_ROLE": "role"})
            .build()
        )
"""

Program = Callable[..., Running]


@pytest.fixture
def program(unirun: Unirun, script: Callable[..., Path]) -> Program:
    """Starts a program that has `job` and ends with some statements; its folder is not the working directory."""

    def start(statements: str, *, one_file: bool = False, **env: str) -> Running:
        script(PPO, "code/ppo.py")
        parts = [PPO, MAIN, statements] if one_file else [MAIN, statements]
        path = script("".join(map(textwrap.dedent, parts)), "code/ppo.py" if one_file else "code/main.py")
        return unirun.start_program([sys.executable, "-u", str(path)], env=env)

    return start


def test_a_blocking_submit_returns_the_result_of_the_trainer_or_raises_that_the_job_has_failed(
    program: Program, unirun: Unirun, tmp_path: Path
) -> None:
    """1. A program, in one file with its classes, submits a job: it has the result of the trainer.

    2. It submits a job whose trainer fails: that raises `JobFailed`.
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    end = program(
        """
        if __name__ == "__main__":
            print("result", job().submit("demo").result)
            job(fail=True).submit()
        """,
        one_file=True,
        TMPDIR=str(temporary),
    ).end()
    assert end.code == 1
    assert "result {'done': [[0, 'role', 'job'], [1, 'role', 'job']]}" in end.out
    assert end.out.count("update 7") == 4, "what workers write is shown"
    assert end.err.rstrip().splitlines()[-1].startswith("unirun.errors.JobFailed: job ppo-")
    assert "ValueError: as asked" in end.err
    assert unirun.status()["phase"] == "failed"
    assert os.listdir(temporary) == []


def test_a_submit_that_does_not_block_returns_a_handle(program: Program, unirun: Unirun) -> None:
    """1. A program cannot submit a job without a safe directory for it.

    2. It submits a job and goes on. The handle shows that the job runs, waits for its end, and has its phase, result and logs.
    3. Stopping the ended job returns its own exit code.
    4. It submits a job whose trainer hangs. Waiting for its end times out, and the job goes on.
    5. It stops the job: exit code 143, phase stopped. The result of the stopped job raises `JobFailed`.
    """
    end = program(
        """
        import os
        from unirun.errors import JobError
        home, os.environ["UNIRUN_HOME"] = os.environ["UNIRUN_HOME"], "/dev/null"
        try:
            job().submit(blocking=False)
        except JobError as error:
            print(error)
        os.environ["UNIRUN_HOME"] = home

        handle = job().submit("demo", blocking=False)
        print("phase", handle.status().phase in ("launching", "running"))
        print("code", handle.wait(60), handle.status().phase)
        print("result", len(handle.result["done"]))
        print(handle.logs("actor", 1).splitlines()[0])
        print("stopped late", handle.stop())

        handle = job(hang=True).submit(blocking=False)
        try:
            handle.wait(0.1)
        except TimeoutError as error:
            print(type(error).__name__)
        while "hanging" not in handle.logs("trainer"):
            time.sleep(0.05)
        print("stop", handle.stop(), handle.status().phase)
        handle.result
        """
    ).end()
    refused, *others = end.out.splitlines()
    assert "jobs cannot be kept in /dev/null/jobs: not a directory; set UNIRUN_HOME to" in refused
    assert others == [
        *("phase True", "code 0 succeeded", "result 2", "[actor:1] update 7", "stopped late 0"),
        *("TimeoutError", "stop 143 stopped"),
    ]
    assert end.err.rstrip().splitlines()[-1].startswith("unirun.errors.JobFailed: job ppo-")
    jobs = [path.read_text() for path in unirun.home.glob("jobs/*/events.jsonl")]
    assert ["refused" in events for events in jobs] == [False, False]


@pytest.mark.parametrize("signum", variants(signal.SIGKILL, signal.SIGINT, signal.SIGTERM))
def test_a_job_ends_with_the_program_that_is_blocked_in_submit(
    program: Program, unirun: Unirun, signum: int
) -> None:
    """1. A program submits a job whose trainer hangs, and waits for it.

    2. A signal ends the program.
    3. The job is stopped.
    """
    running = program("job(hang=True).submit()")
    running.lines("hanging")
    running.signal(signum)
    assert running.end().code == -signum
    eventually(lambda: unirun.status()["phase"] == "stopped", "the job has ended", START_TIMEOUT)


def test_a_job_is_not_submitted_by_its_own_workers(program: Program) -> None:
    """Workers import the module of a class; what it does at its top level, they do as well."""
    end = program("job().submit()", one_file=True).end()
    assert end.code == 1
    assert (
        "UsageError: a job is submitted inside a worker of another one; put what submits it under" in end.err
    )
