"""Failures with real processes that are rows of the matrix in docs/failover.md and have no test of their own elsewhere.

`tests/unit/test_real_cells.py` has the list of all tests of cells. Here several roles of one job have one failure each.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.waiting import WAIT_TIMEOUT

from .harness import Script, Unirun

FAULTS = """
    import ctypes, os, signal, sys, time

    def fault(name):
        match name:
            case "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sigstop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "one":
                os._exit(1)
            case "zero":
                os._exit(0)
            case "gil":
                ctypes.PyDLL(None).sleep(600)
            case "full":
                with open("/dev/full", "w") as file:
                    file.write("half of a checkpoint")
            case "deaf":
                pass

    role, rank = os.environ["ROLE_NAME"], os.environ["RANK"]
    first = os.environ["UNIRUN_GENERATION"] == "0"
"""

AT_ONCE = (
    FAULTS
    + """
    if first and rank == "1":
        fault(role)
    if first:
        time.sleep(600)
"""
)

AS_THEY_FORM = (
    FAULTS
    + """
    import datetime, torch.distributed as dist

    if first and rank == "1":
        fault(role)
    seconds = 4 if role == "zero" else 600
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
"""
)

AT_THE_END = (
    FAULTS
    + """
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(0))
    print("up", flush=True)
    while True:
        time.sleep(0.05)
        if ended and rank == "1":
            fault(role)
        if ended and role != "deaf":
            sys.exit(143)
"""
)


def test_a_rank_that_starts_or_saves_fails_and_its_role_alone_restarts(
    unirun: Unirun, script: Script
) -> None:
    """1. In each of three roles a rank fails as it starts: by SIGKILL, exit code 1, and a full disk where it saves.
    2. Each role restarts once, and the record of its failure names the rank, its exit and the likely cause.
    """
    job = unirun.start("--roles", "sigkill=2,one=2,full=2", "--max-restarts", 1, script(AT_ONCE))
    result = job.end()
    status = unirun.status()
    assert (result.code, {role["restarts"] for role in status["roles"]}) == (0, {1}), result.err
    failures = {(each["role"], each["rank"]): (each["exit"], each["kind"]) for each in status["failures"]}
    assert failures == {
        ("sigkill", 1): ("killed by SIGKILL", "killed"),
        ("one", 1): ("exit code 1", "exit_code"),
        ("full", 1): ("exit code 1", "disk_full"),
    }


def test_a_rank_that_hangs_or_leaves_as_its_role_forms_is_named(unirun: Unirun, script: Script) -> None:
    """1. In two roles, rank 1 does not come to the first group: it is stopped, or has ended with 0.
    2. Each role restarts once. The failure is that of rank 1, which the others have waited for.
    """
    options = ("--max-restarts", 1, "--hang-timeout", "sigstop=3", "--first-step-timeout", "sigstop=0")
    job = unirun.start("--roles", "sigstop=2,zero=2", *options, script(AS_THEY_FORM))
    result = job.end()
    status = unirun.status()
    assert (result.code, {role["restarts"] for role in status["roles"]}) == (0, {1}), result.err
    assert "sigstop:1: sigstop:1 hangs: no progress for " in result.err
    assert "ended with exit code 0 while zero:0 waited for it" in result.err


def test_a_rank_that_fails_as_the_job_ends_changes_nothing_of_the_end(unirun: Unirun, script: Script) -> None:
    """1. A job of six roles is told to end. Of each one rank fails in its own way, or ignores the signal.
    2. Those that do not end are killed after the grace period, and the exit code is that of the signal.
    """
    roles = ("sigkill", "sigstop", "one", "zero", "gil", "deaf")
    counts = ",".join(f"{role}=2" for role in roles)
    job = unirun.start("--roles", counts, "--shutdown-timeout", 2, script(AT_THE_END))
    job.lines("up", 2 * len(roles))
    job.signal(signal.SIGTERM)
    result = job.end(WAIT_TIMEOUT)
    late = [line.split()[1] for line in result.err.splitlines() if "did not end in its grace period" in line]
    assert result.code == 143, result.err
    assert sorted(late) == ["deaf:0:", "deaf:1:", "gil:1:", "sigstop:1:"]
    unirun.assert_nothing_left()


class TestSeveralFailures:
    def test_ranks_of_one_role_that_fail_at_once_cost_one_restart(
        self, unirun: Unirun, script: Script
    ) -> None:
        """Two of three ranks of one role, and all of another one."""
        train = """
            import os, signal, time
            if os.environ["UNIRUN_GENERATION"] == "0":
                print("up", flush=True)
                time.sleep(600)
        """
        job = unirun.start("--roles", "two=3,all=3", "--max-restarts", 1, script(train))
        job.lines("up", 6)
        found = {who: worker["pid"] for who, worker in unirun.workers().items()}
        victims = [pid for who, pid in found.items() if who != "two:2"]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        result = job.end()
        roles = unirun.status()["roles"]
        assert (result.code, {role["name"]: role["restarts"] for role in roles}) == (0, {"two": 1, "all": 1})

    def test_a_failure_while_the_first_one_is_handled_costs_nothing(
        self, unirun: Unirun, script: Script
    ) -> None:
        """A peer fails in its grace period."""
        train = """
            import os, signal, sys, time
            if os.environ["UNIRUN_GENERATION"] == "0":
                signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), os.abort()))
                print("up", flush=True)
                while True:
                    time.sleep(0.05)
        """
        job = unirun.start("--nproc-per-node", 2, "--max-restarts", 1, script(train))
        job.lines("up", 2)
        os.kill(unirun.workers()["default:0"]["pid"], signal.SIGKILL)
        result = job.end()
        (role,) = unirun.status()["roles"]
        assert (result.code, role["restarts"]) == (0, 1), result.err
        assert unirun.status()["failures"][0]["rank"] == 0

    @pytest.mark.chaos
    def test_a_rank_may_fail_twenty_times(self, unirun: Unirun, script: Script) -> None:
        train = """
            import os, sys
            sys.exit(os.environ["RANK"] == "1" and int(os.environ["UNIRUN_GENERATION"]) < 20)
        """
        result = unirun("--nproc-per-node", 2, "--max-restarts", 20, script(train), within=WAIT_TIMEOUT)
        (role,) = unirun.status()["roles"]
        assert (result.code, role["restarts"]) == (0, 20), result.err

    def test_the_only_rank_of_a_job_restarts_or_ends_it(self, unirun: Unirun, script: Script) -> None:
        train = """
            import os, signal
            if int(os.environ["UNIRUN_GENERATION"]) < 2:
                os.kill(os.getpid(), signal.SIGKILL)
        """
        assert unirun("--max-restarts", 2, script(train)).code == 0
        spent = unirun("--max-restarts", 1, script(train))
        assert spent.code == 5
        assert "root cause: default:0 on " in spent.err
