"""``unirun stop``, ``ls`` and ``-d``, as a user calls them, and any command without a job."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.waiting import WAIT_TIMEOUT, eventually

from .harness import EXEC, Running, Script, Unirun, alive, gone
from .serving import COMMAND_TIMEOUT, SERVE_SCRIPT


class TestStop:
    def test_stop_ends_the_job_and_waits_for_it(self, unirun: Unirun, running: Running) -> None:
        pids = [worker["pid"] for worker in unirun.workers().values()]
        result = unirun("stop", "mine", within=WAIT_TIMEOUT)
        assert (result.code, result.out) == (0, "job mine stopped, exit code 143\n"), result.err
        assert not any(map(alive, pids))
        ended = running.end(WAIT_TIMEOUT)
        assert ended.code == 143
        assert "unirun stop" in ended.err

    def test_stop_sends_the_requested_signal(self, unirun: Unirun, running: Running) -> None:
        assert unirun("stop", "mine", "--signal", "INT", within=WAIT_TIMEOUT).code == 0
        assert running.end(WAIT_TIMEOUT).code == 130

    @pytest.mark.parametrize("how", [("--now",), ("--grace", "0.2")])
    def test_stop_kills_workers_that_ignore_the_signal(
        self, unirun: Unirun, script: Script, how: tuple[str, ...]
    ) -> None:
        train = script(
            """
            import signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("up", flush=True)
            while True:
                signal.pause()
            """
        )
        job = unirun.start(*EXEC, "--shutdown-timeout", 600, train)
        job.lines("up$")
        assert unirun("stop", *how, within=WAIT_TIMEOUT).code == 0
        assert job.end(WAIT_TIMEOUT).code == (137 if how == ("--now",) else 143)

    def test_stop_without_waiting_returns_before_the_end(self, unirun: Unirun, running: Running) -> None:
        result = unirun("stop", "--no-wait")
        assert (result.code, result.out) == (0, "job mine is stopping\n")
        assert running.end(WAIT_TIMEOUT).code == 143

    def test_stop_of_a_finished_job_says_so(self, unirun: Unirun, script: Script) -> None:
        unirun(*EXEC, "--rdzv-id", "done", script(""))
        result = unirun("stop", "done", within=COMMAND_TIMEOUT)
        assert (result.code, result.out) == (0, "job done has ended already: succeeded\n")


class TestLs:
    def test_ls_lists_running_and_finished_jobs(
        self, unirun: Unirun, running: Running, script: Script
    ) -> None:
        unirun(*EXEC, "--rdzv-id", "bad", script("raise SystemExit(3)", "bad.py"))
        result = unirun("ls", within=COMMAND_TIMEOUT)
        rows = [line.split() for line in result.out.splitlines()]
        assert rows[0] == ["JOB", "STATE", "EXIT", "ROLES", "STARTED", "TOOK"]
        assert rows[1][:3] == ["mine", "running", "actor=2,rollout=1"]
        assert rows[2][:4] == ["bad", "failed", "3", "default=1"]
        objects = [json.loads(line) for line in unirun("ls", "--json").out.splitlines()]
        assert [(each["run_id"], each["phase"], each["code"]) for each in objects] == [
            ("mine", "running", None),
            ("bad", "failed", 3),
        ]
        assert unirun("stop", "mine").code == 0
        assert running.end(WAIT_TIMEOUT).code == 143

    def test_ls_without_jobs_is_an_empty_table(self, unirun: Unirun) -> None:
        result = unirun("ls", within=COMMAND_TIMEOUT)
        assert (result.code, len(result.out.splitlines())) == (0, 1), result.out


class TestWithoutAJob:
    @pytest.mark.parametrize("command", ["status", "logs", "stop"])
    def test_a_command_without_any_job_says_what_to_do(self, unirun: Unirun, command: str) -> None:
        result = unirun(command, within=COMMAND_TIMEOUT)
        assert (result.code, result.err) == (
            2,
            "unirun: there are no jobs; start one with: unirun script.py\n",
        )

    def test_a_name_that_fits_none_or_several_is_refused(self, unirun: Unirun, script: Script) -> None:
        for name in ("one-a", "one-b"):
            unirun(*EXEC, "--rdzv-id", name, script(""))
        assert (
            unirun("status", "two").err
            == "unirun: no job is called 'two'; unirun ls shows the jobs there are\n"
        )
        assert (
            unirun("status", "one").err == "unirun: 'one' fits 2 jobs; write more of the id: one-b, one-a\n"
        )
        assert unirun("status", "one-b").out.startswith("job one-b: succeeded")


class TestDetach:
    def test_detach_returns_at_once_with_the_id_and_the_job_goes_on(
        self, unirun: Unirun, script: Script
    ) -> None:
        started = unirun("-d", *EXEC, "--roles", "actor=2", script(SERVE_SCRIPT), within=WAIT_TIMEOUT)
        assert started.code == 0
        name = started.out.strip()
        assert f"unirun logs -f {name}" in started.err
        eventually(lambda: unirun.status()["roles"][0]["phase"] == "running", "both ranks run")
        follower = unirun.start("logs", "-f", name)
        follower.lines("line actor", 2)
        pids = [worker["pid"] for worker in unirun.workers().values()]
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        assert all(gone(pid, WAIT_TIMEOUT) for pid in pids)
        assert follower.end(WAIT_TIMEOUT).code == 0
        status = unirun.status()
        assert (status["run_id"], status["phase"], status["code"]) == (name, "succeeded", 0)

    def test_a_detached_job_survives_a_hang_up_and_an_interrupt_of_the_terminal(
        self, unirun: Unirun, script: Script
    ) -> None:
        started = unirun.start("-d", *EXEC, script(SERVE_SCRIPT))
        assert started.end().code == 0
        eventually(lambda: unirun.status()["roles"][0]["phase"] == "running", "the rank runs")
        assert all(os.getsid(pid) != started.pid for pid in unirun.processes())
        assert unirun("stop").code == 0

    def test_a_detached_job_keeps_why_it_failed(self, unirun: Unirun, script: Script) -> None:
        unirun("-d", *EXEC, script("raise ValueError('kept')"))
        eventually(lambda: unirun.status()["phase"] == "failed", "the job has failed")
        assert unirun.status()["code"] == 1
        assert "ValueError: kept" in unirun("logs").out
