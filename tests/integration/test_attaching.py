"""A process outside a job calls its workers, over the deaths of workers and masters. This process is the one outside."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest
import torch

import unirun as package
from tests.effort import variants
from tests.integration.harness import Script, Unirun, swept
from tests.integration.warm import Warm, WarmUnirun
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import InvocationTimeout, JobError, RemoteTraceback, UsageError, WorkerLost
from unirun.train import JobHandle

SERVED = """
    import os, time
    from unirun import BaseWorkload, trainer_invocation

    class Rollout(BaseWorkload):
        def setup(self):
            self.calls = 0

        def count(self):
            self.calls += 1
            return self.calls

        def echo(self, value):
            return value

        def pid(self):
            return os.getpid()

        def fail(self):
            raise KeyError(self.rank)

        def sleep(self, seconds):
            time.sleep(seconds)
            return self.rank
"""
JOB = 'roles: {rollout: {count: 2, workload: "served:Rollout", max_restarts: 9}}\n'

OUTSIDE = """
import os, sys, unirun
job = unirun.attach()
print(job["rollout"].echo("from another process"), flush=True)
if sys.argv[1:] == ["killed"]:
    job["rollout"].sleep.call_async(60)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[Unirun]:
    """A job that serves calls, and its command."""
    served = WarmUnirun(tmp_path_factory.mktemp("served"), warm)
    with swept(served) as command, pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNIRUN_HOME", str(command.home))
        (command.root / "served.py").write_text(textwrap.dedent(SERVED))
        (command.root / "job.yaml").write_text(JOB)
        running = command.start("--config", "job.yaml", "--rdzv-id", "served-1a2b")
        yield command
        running.signal(signal.SIGTERM)
        assert running.end().code == 143


@pytest.fixture
def job(command: Unirun) -> Iterator[JobHandle]:
    """Attached, by the beginning of the id."""
    eventually(lambda: (command.home / "jobs" / "served-1a2b" / "state.json").exists(), "the job has begun")
    with package.attach("served-1") as handle:
        yield handle


def test_results_come_in_rank_order_and_tensors_bit_for_bit(job: JobHandle) -> None:
    rollout = job["rollout"]
    assert len(rollout) == 2
    tensor = torch.randn(100_000)
    assert all(torch.equal(each, tensor) for each in rollout.echo(tensor))
    assert rollout[1].echo(5) == 5


def test_errors_keep_their_type_and_the_traceback_of_the_worker(job: JobHandle) -> None:
    with pytest.raises(KeyError) as raised:
        job["rollout"][1].fail()
    assert raised.value.args == (1,)
    assert isinstance(raised.value.__cause__, RemoteTraceback)
    assert "raise KeyError(self.rank)" in str(raised.value.__cause__)


def test_a_call_has_a_deadline(job: JobHandle) -> None:
    with pytest.raises(InvocationTimeout, match="rollout:0"):
        job["rollout"][0].sleep.options(timeout=0.1).call(0.3)


def test_mistakes_are_told(job: JobHandle) -> None:
    with pytest.raises(UsageError, match="this job has no role 'actor'; it has rollout"):
        job["actor"]
    with pytest.raises(AttributeError, match="did you mean 'count'"):
        job["rollout"].cound()
    with pytest.raises(JobError, match="no job is called 'other'"):
        package.attach("other")


def test_a_lost_worker_is_told_once_and_the_next_call_goes_to_its_successor(job: JobHandle) -> None:
    rollout = job["rollout"]
    before = rollout.pid()
    os.kill(before[1], signal.SIGKILL)
    with pytest.raises(WorkerLost, match="rollout:1"):
        rollout.pid()
    after = rollout.pid()
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_calls_go_on_over_the_death_of_the_master_and_what_follows_is_heard(
    command: Unirun, job: JobHandle
) -> None:
    """
    1. A call is open when the master dies; it is answered.
    2. Then a worker dies: the visitor hears it from the next master.
    """
    rollout = job["rollout"]
    (pid, _) = rollout.pid()
    open_call = rollout.sleep.call_async(0.5)
    os.kill(command.pid_of("unirun-master"), signal.SIGKILL)
    assert rollout[0].echo.options(timeout=WAIT_TIMEOUT).call("meanwhile") == "meanwhile"
    assert open_call.result(WAIT_TIMEOUT) == [0, 1]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="rollout:0"):
        rollout.pid.options(timeout=WAIT_TIMEOUT).call()
    assert rollout.pid.options(timeout=WAIT_TIMEOUT).call()[0] != pid


def test_each_call_of_several_visitors_runs_once(job: JobHandle) -> None:
    before = job["rollout"][0].count()
    counts: list[int] = []

    def visit() -> None:
        with package.attach("served") as other:
            counts.extend(other["rollout"][0].count() for _ in range(20))

    threads = [threading.Thread(target=visit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(counts) == list(range(before + 1, before + 81))


@pytest.mark.parametrize("how", variants("killed", "leaves"))
def test_a_process_that_leaves_or_is_killed_takes_nothing_along(
    command: Unirun, job: JobHandle, script: Script, how: str
) -> None:
    pids = job["rollout"].pid()
    outside = command.start_program([sys.executable, str(script(OUTSIDE)), how])
    assert outside.lines("from another process")
    end = outside.end()
    assert end.code == (0 if how == "leaves" else -9), end.err
    # A worker that runs a call of a process which is gone goes on with it, and is called by others meanwhile.
    assert command.status()["phase"] == "running"
    assert sorted(int(w["pid"]) for w in command.workers().values()) == sorted(pids)


def test_who_waits_is_told_that_the_job_has_ended(unirun: Unirun, script: Script) -> None:
    script(SERVED, "served.py")
    running = unirun.start("--config", script(JOB, "job.yaml"))
    eventually(lambda: [*unirun.home.glob("jobs/*/state.json")], "the job has begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNIRUN_HOME", str(unirun.home))
        with package.attach() as job:
            waits = job["rollout"].sleep.call_async(60)
            running.signal(signal.SIGTERM)
            with pytest.raises(WorkerLost):
                waits.result(WAIT_TIMEOUT)
            assert job.wait(WAIT_TIMEOUT) == 143
            running.end()
            with pytest.raises(WorkerLost, match="has ended"):
                job["rollout"].echo(1)
        with pytest.raises(JobError, match="has stopped, so it has no workers"):
            package.attach()["rollout"]
