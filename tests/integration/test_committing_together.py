"""Roles that commit steps together: a restart of the job goes back to the last one that all have."""

from __future__ import annotations

import os
import signal

from tests.waiting import WAIT_TIMEOUT

from .harness import Script, Unirun
from .masters import Masters

COMMITS = """
    import os, signal, sys, unirun

    ctx = unirun.init()
    told = (ctx.committed_step, os.environ.get("UNIRUN_COMMITTED_STEP"))
    print("told", ctx.incarnation, ctx.role, ctx.rank, *told, flush=True)
    if ctx.incarnation:
        sys.exit()
    # The actor is ahead of the critic.
    last = 4 if ctx.role == "actor" else 3
    for step in range(1, last + 1):
        kept = unirun.commit_job(step)
    print("done", ctx.role, ctx.rank, flush=True)
    while True:
        signal.pause()
"""


def test_a_restart_of_the_job_tells_all_roles_the_step_that_they_have_committed_together(
    unirun: Unirun, script: Script
) -> None:
    """
    1. Two actors commit the steps 1 to 4, and a critic 1 to 3. The status shows step 3.
    2. The master is killed, and another one goes on.
    3. The critic is killed: all roles start again, as the job has a restart, and all ranks are told step 3.
    """
    job = unirun.start("--roles", "actor=2,critic=1", "--max-job-restarts", "1", script(COMMITS))
    assert sorted(job.lines(r"told 0 (.*)", 3)) == [
        "actor 0 None None",
        "actor 1 None None",
        "critic 0 None None",
    ]
    job.lines("done", 3)
    masters = Masters(unirun)
    masters.kill()
    masters.next()
    assert unirun.status()["committed"] == 3
    os.kill(unirun.workers()["critic:0"]["pid"], signal.SIGKILL)
    assert sorted(job.lines(r"told 1 (.*)", 3)) == ["actor 0 3 3", "actor 1 3 3", "critic 0 3 3"]
    result = job.end(WAIT_TIMEOUT)
    assert result.code == 0, result.err
    assert "the job goes back to step 3, which all of actor, critic have" in result.err
    assert "committed: step 3" in unirun("status", unirun.status()["run_id"]).out
