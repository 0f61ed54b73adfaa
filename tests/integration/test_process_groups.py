"""A worker's whole process group ends with it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.waiting import WAIT_TIMEOUT, eventually

from .harness import Script, Unirun, alive

CHILDREN = """\
import os, signal, subprocess, sys
code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
for own in (False, True):
    child = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", code], start_new_session=own, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    print(f"child {child.pid}\\n", end="")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        # In one write: its parent writes to the same file.
        print(f"child {os.getpid()}\\n", end="", flush=True)
        while True:
            signal.pause()
    os._exit(0)
os.wait()
print("up\\n", end="", flush=True)
"""


class TestWholeProcessGroups:
    @pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
    def test_a_process_group_ends_with_its_worker(
        self, unirun: Unirun, script: Script, end: str, code: int
    ) -> None:
        job = unirun.start("--roles", "a=2", "--start-method", "exec", script(CHILDREN + end))
        result = job.end()
        assert result.code == code, result.err
        pids = [int(line.split()[1]) for line in result.lines if line.startswith("child")]
        assert pids
        assert not any(map(alive, pids))

    @pytest.mark.parametrize("method", ["fork", "exec"])
    def test_process_groups_end_when_the_job_is_stopped(
        self, unirun: Unirun, script: Script, method: str
    ) -> None:
        job = unirun.start("--roles", "a=2", "--start-method", method, script(CHILDREN + "signal.pause()"))
        job.lines("up$", 2)
        pids = [int(pid) for pid in job.lines(r"child (\d+)", 6)]
        job.signal(signal.SIGTERM)
        assert job.end(WAIT_TIMEOUT).code == 143
        assert not any(map(alive, pids))

    def test_a_process_group_ends_also_when_a_child_has_no_environment(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import subprocess
            child = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={})
            print("child", child.pid, flush=True)
            """
        )
        result = unirun("--roles", "a=2", "--start-method", "exec", train)
        pids = [int(line.split()[1]) for line in result.lines]
        assert (result.code, len(pids), any(map(alive, pids))) == (0, 2, False), result.err

    def test_the_end_of_a_process_group_spares_other_workers(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import os, signal, subprocess, sys
            child = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
            signal.signal(signal.SIGUSR1, lambda *_: sys.exit(child.poll() is not None))
            print("up", os.environ["ROLE_NAME"], os.getpid(), child.pid, flush=True)
            if os.environ["ROLE_NAME"] == "other":
                signal.pause()
            """
        )
        job = unirun.start("--roles", "short=1,other=1", "--start-method", "exec", train)
        (pids,) = job.lines(r"up other (\d+ \d+)")
        job.lines("up short")
        worker, child = map(int, pids.split())
        eventually(lambda: unirun.workers()["short:0"]["phase"] == "exited", "short:0 has ended")
        assert alive(child)
        os.kill(worker, signal.SIGUSR1)
        assert job.end().code == 0
