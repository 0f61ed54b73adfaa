"""The processes of a job on the command's host: when none is left to wait for, and that none is left behind.

Each test is a process of its own, as `RunningJob.end` kills every child that there is.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.launcher import local
from unirun.observe.jobdir import JobDir

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from unirun.launcher import local
from unirun.launcher.process import adopt_orphans, children
from unirun.observe.jobdir import JobDir
from unirun.spec.job import Entry, JobSpec, RoleSpec

spec = JobSpec("job", "run-1", (RoleSpec("actor", 1, Entry("script", "a.py")),), ("actor",))

def running(master, agents):
    return local.RunningJob(JobDir(Path()), spec, master, agents)

def child(code):
    '''A process that runs this code in a shell.'''
    return os.posix_spawn("/bin/sh", ["sh", "-c", code], os.environ)

def until(true):
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.005)

def ended(pid):
    '''Wait for its end without reaping it.'''
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid

FOR_EVER = "exec sleep 100"
"""


def run(code: str) -> None:
    """Run `code` in its own process."""
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=WAIT_TIMEOUT,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.starts_processes
def test_a_job_is_not_given_up_while_its_agent_lives() -> None:
    run("""
        for master in (child(FOR_EVER), ended(child("exit 0")), ended(child("kill -9 $$"))):
            found = running(master, (child(FOR_EVER),))
            assert not found.given_up(led=False)
            assert not found.given_up(led=True)
            local.kill_children()
    """)


@pytest.mark.starts_processes
def test_an_agent_or_a_master_that_can_start_no_thread_says_so_in_one_line(tmp_path: Path) -> None:
    """At the user's limit of processes."""
    run(f"""
        from pathlib import Path
        from unirun.wire.reporting import NO_THREAD

        def begin(_):
            raise RuntimeError("can't start new thread")

        log = Path("{tmp_path}/log")
        _, status = os.waitpid(local._fork("unirun-master", log, begin), 0)
        assert os.waitstatus_to_exitcode(status) == 1
        assert log.read_text() == f"unirun-master: {{NO_THREAD}}\\n"
    """)


@pytest.mark.starts_processes
def test_a_job_whose_first_master_cannot_lead_is_given_up() -> None:
    run("""
        found = running(ended(child("exit 2")), (child(FOR_EVER),))
        assert found.given_up(led=False)
        assert not found.given_up(led=True), "another has led since"
        local.kill_children()
    """)


@pytest.mark.starts_processes
def test_a_job_is_given_up_a_moment_after_its_agents_have_ended() -> None:
    run("""
        local.ORPHANED_MASTER_TIMEOUT = 0.2
        other = child(FOR_EVER)
        found = running(child(FOR_EVER), (ended(child("exit 0")), other))
        assert not found.given_up(led=True)
        time.sleep(0.2)
        assert not found.given_up(led=True), "one lives"
        os.kill(other, signal.SIGKILL)
        ended(other)
        began = time.monotonic()
        assert not found.given_up(led=True)
        until(lambda: found.given_up(led=True))
        assert time.monotonic() - began >= 0.2
        local.kill_children()
    """)


@pytest.mark.starts_processes
def test_stop_agents_signals_live_agents_only() -> None:
    run("""
        read, write = os.pipe()
        os.set_inheritable(write, True)
        agent = child(f"trap 'exit 7' TERM; echo ready >&{write}; while :; do sleep 0.02; done")
        assert os.read(read, 20) == b"ready\\n"
        found = running(ended(child("exit 0")), (agent,))
        found.stop_agents()
        assert os.waitid(os.P_PID, agent, os.WEXITED | os.WNOWAIT).si_status == 7
        found.stop_agents()
        running(1 << 22, (ended(child("exit 0")),)).stop_agents()
    """)


@pytest.mark.starts_processes
@pytest.mark.parametrize(("ends", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_ending_the_processes_returns_the_first_masters_exit_code(ends: str, code: int) -> None:
    run(f"""
        found = running(ended(child({ends!r})), (ended(child("exit 0")),))
        assert found.end() == {code}
        assert children() == []
    """)


@pytest.mark.starts_processes
def test_ending_the_processes_waits_for_those_that_exit_by_themselves() -> None:
    run("""
        master, agent = child("sleep 0.2; exit 0"), child("sleep 0.1; exit 0")
        found = running(master, (agent,))
        found.end()
        assert found._exits == {master: 0, agent: 0}, "none of them was killed"
    """)


@pytest.mark.starts_processes
def test_ending_the_processes_leaves_none_behind() -> None:
    run("""
        local.JOB_EXIT_TIMEOUT = 0.1
        adopt_orphans()
        agent = child("sleep 100 & trap '' TERM; while :; do sleep 0.02; done")
        master = child("setsid sleep 100 & exec sleep 100")
        until(lambda: len(open(f"/proc/{master}/task/{master}/children").read().split()) == 1)
        found = running(master, (agent,))
        assert found.end() is None, "the first master lived"
        assert children() == []
    """)


@pytest.mark.starts_processes
@pytest.mark.parametrize(("master", "said"), [("os.getppid()", False), ('child("exec sleep 100")', True)])
def test_the_end_of_a_master_is_given_up_only_where_it_is_awaited(master: str, said: bool) -> None:
    run(f"""
        told = []
        local.gave_up = lambda *about: told.append(about)
        found = running(None, (ended(child("exit 0")),))
        found.led_by({master})
        found.end(farewell=0.1)
        assert told == {[("the end of a master", 0.1)] if said else []}, told
    """)


@pytest.mark.starts_processes
def test_ending_the_processes_waits_for_a_later_master() -> None:
    run("""
        adopt_orphans()
        read, write = os.pipe()
        os.set_inheritable(write, True)
        agent = child(f"(sleep 0.3; exit 0) & echo $! >&{write}; exit 0")
        later = int(os.read(read, 20))
        found = running(ended(child("kill -9 $$")), (ended(agent),))
        found.led_by(later)
        assert found.end() == 137
        assert found._exits[later] == 0, "it was not killed"
        assert children() == []
    """)


@pytest.mark.starts_processes
def test_ending_the_processes_does_not_wait_for_a_stranger() -> None:
    run("""
        found = running(1 << 22, (1 << 22,))
        began = time.monotonic()
        assert found.end() is None
        assert time.monotonic() - began < 5
    """)


AGENT = """
from unirun.errors import RendezvousError
from unirun.wire.messages import AgentTask
from unirun.launcher.local import AgentProcess

folder = Path({folder!r})
agent = AgentProcess(folder / "new.log")

def assign(addr="127.0.0.1"):
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    agent.assign(JobDir(folder), AgentTask(spec, "n1", ("n1",), "/", addr), lock, None)
"""


@pytest.mark.starts_processes
def test_an_agent_that_has_not_bound_its_endpoints_in_time_is_named_and_ended(tmp_path: Path) -> None:
    run(
        AGENT.format(folder=str(tmp_path))
        + textwrap.dedent("""
        os.kill(agent.pid, signal.SIGSTOP)
        assign()
        try:
            with agent:
                agent.wait_until_bound(time.monotonic() + 0.01)
            raise AssertionError
        except RendezvousError as error:
            assert "agent of node n1 has not bound its endpoints" in str(error)
        assert children() == []
        """)
    )


@pytest.mark.starts_processes
def test_an_agent_tells_why_it_cannot_bind_its_endpoints(tmp_path: Path) -> None:
    run(
        AGENT.format(folder=str(tmp_path))
        + textwrap.dedent("""
        assign("192.0.2.1")
        try:
            with agent:
                agent.wait_until_bound(time.monotonic() + 120)
            raise AssertionError
        except RendezvousError as error:
            assert "192.0.2.1" in error.problem
        assert children() == []
        assert not (folder / "new.log").exists()
        """)
    )


@pytest.mark.starts_processes
def test_an_agent_with_a_task_has_its_spawner_before_it_begins(tmp_path: Path) -> None:
    """A job on this host begins so, and a node that comes into a running job: nothing was known before."""
    run(
        AGENT.format(folder=str(tmp_path))
        + textwrap.dedent("""
        adopt_orphans()
        os.environ["UNIRUN_WARM"] = "0"
        assign()
        agent.wait_until_bound(time.monotonic() + 120)
        until(lambda: children(agent.pid))
        (spawner,) = children(agent.pid)
        until(lambda: b"boot.py" in Path(f"/proc/{spawner}/cmdline").read_bytes())
        agent.end()
        os.waitpid(spawner, 0)
        """)
    )


@pytest.mark.starts_processes
def test_an_agent_that_waits_for_a_task_ends_with_the_process_that_has_started_it(tmp_path: Path) -> None:
    run(
        AGENT.format(folder=str(tmp_path))
        + textwrap.dedent("""
        adopt_orphans()
        reader, writer = os.pipe()
        if (starter := os.fork()) == 0:
            os.write(writer, b"%d" % AgentProcess(folder / "other.log").pid)
            os._exit(0)
        other = int(os.read(reader, 20))
        os.waitpid(starter, 0)
        assert os.waitpid(other, 0) == (other, 0)
        agent.end()
        assert children() == []
        """)
    )


@pytest.mark.starts_processes
def test_an_agent_has_the_environment_of_its_job_and_nothing_of_the_time_before(tmp_path: Path) -> None:
    """Its spawner shows it."""
    run(f"""
        from unirun.launcher.process import environment_of
        from unirun.rendezvous.creation import create_job
        from unirun.wire.handshake import new_token
        from unirun.wire.messages import AgentTask

        os.environ |= {{"UNIRUN_HOME": "{tmp_path}", "UNIRUN_WARM": "0", "OF_BEFORE": "1"}}
        agent = local.AgentProcess(Path("{tmp_path}/log"))
        del os.environ["OF_BEFORE"]
        os.environ["OF_THE_JOB"] = "1"
        job, lock = create_job("run-1", new_token())
        agent.assign(job, AgentTask(spec, "n0", ("n0",), "/", "127.0.0.1"), lock, None)
        agent.wait_until_bound(time.monotonic() + 60)
        found = lambda: [environment_of(pid) for pid in children(agent.pid)]
        until(lambda: any("OF_THE_JOB" in env for env in found()))
        assert not any("OF_BEFORE" in env for env in found())
        agent.end()
    """)


def test_the_output_of_a_master_may_have_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A notify command, whose errors are in it, may write in another encoding."""
    job = JobDir(tmp_path)
    job.master_log.write_bytes(b"caf\xe9\nunirun-master: a port is taken\n")
    assert local.output_of_first_master(job) == "caf\\xe9"
    assert local.last_line_of_masters(job) == "a port is taken"
