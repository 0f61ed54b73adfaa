"""Masters that fail by an internal error again and again: the job ends with the error, and does not loop."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.election import job_prefix, leader_of
from unirun.rendezvous.store.url import open_store

from .harness import (
    EVEN_DELAY,
    EXEC,
    SCRIPTS,
    SHORT_DELAYS,
    SHORT_TERM,
    START_TIMEOUT,
    Running,
    Script,
    Unirun,
)
from .masters import Masters

MORTAL = """
    import os, signal, time
    print("up", flush=True)
    while os.environ["RANK"] != "1" or not os.path.exists("die"):
        time.sleep(0.01)
    raise SystemExit(7)
"""


def planted(function: str, way: str = "raise") -> dict[str, str]:
    path = str(SCRIPTS / "planted")
    return {"PYTHONPATH": path, "PLANTED": function, "PLANTED_WAY": way}


class TestAnEventThatNoMasterCanHandle:
    def test_an_event_that_no_master_can_handle_ends_the_job_with_the_traceback(
        self, unirun: Unirun, script: Script
    ) -> None:
        """
        1. Two workers run; every master raises when it handles a worker's exit.
        2. A worker fails: three masters, one after another, end with a traceback.
        3. The command ends with 1 and names the event, the error and the log of the masters; the status has it
           too.
        """
        argv = ("--roles", "a=2", "--max-restarts", 3, *EXEC, script(MORTAL))
        job = unirun.start(*argv, env=planted("exited"), constants=EVEN_DELAY)
        job.lines("up$", 2)
        (unirun.root / "die").touch()
        end = job.end(START_TIMEOUT)
        assert end.code == 1, end.err
        words = end.err.splitlines()
        cause = "one master after another was ended by a bug in unirun: ZeroDivisionError in "
        report = next(n for n, line in enumerate(words) if f"job failed: {cause}" in line)
        rest = "\n".join(words[report:])
        assert "the event that could not be handled: " in rest
        assert "WorkerExited(worker=WorkerId(role='a', rank=1, incarnation=0)" in rest
        assert "raise ZeroDivisionError" in rest
        assert "/master.log" in rest
        assert words[-1].endswith("failed, exit code 1")
        assert "unirun: master: an error in the master of term" in end.err
        status = JobDir(unirun.job_dir()).read_json("state.json")
        assert (status["phase"], status["code"]) == ("failed", 1)
        assert "ZeroDivisionError" in unirun("status").out
        crashes = [row["details"] for row in events(unirun) if row["kind"] == "master"]
        traces = [each["traceback"] for each in crashes if "traceback" in each]
        assert len(traces) == 3
        assert "planted" in traces[0]

    def test_an_event_that_no_master_can_handle_ends_a_detached_job(
        self, unirun: Unirun, script: Script
    ) -> None:
        assert unirun("-d", *EXEC, script(MORTAL), env=planted("_join"), constants=EVEN_DELAY).code == 0
        eventually(lambda: unirun.status()["phase"] == "failed", "it ends", START_TIMEOUT)
        assert "a bug in unirun: ZeroDivisionError" in unirun("status").out


def events(unirun: Unirun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (unirun.job_dir() / "events.jsonl").read_text().splitlines()]


class TestCtrlCTwice:
    """Ctrl-C twice ends the job on this host without its master."""

    def twice(self, job: Running) -> None:
        for answer in ("stopping", "killing"):
            job.signal(signal.SIGINT)
            job.lines(f"SIGINT: {answer}")
        end = job.end(WAIT_TIMEOUT)
        assert end.code == 130, end.err

    def test_ctrl_c_twice_ends_the_job_while_masters_die_one_after_another(
        self, unirun: Unirun, script: Script
    ) -> None:
        """
        1. A worker fails, and every master exits when it handles that.
        2. From the third term on, Ctrl-C is sent twice.
        3. The command ends with 130.
        """
        argv = ("--roles", "a=2", "--max-restarts", 3, *EXEC, script(MORTAL))
        job = unirun.start(*argv, env=planted("exited", "exit"), constants=EVEN_DELAY)
        job.lines("up$", 2)
        (unirun.root / "die").touch()
        eventually(lambda: epoch(unirun) > 2, "masters follow one another", START_TIMEOUT)
        self.twice(job)

    def test_ctrl_c_twice_ends_the_job_while_the_master_hangs(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start("--roles", "a=2", *EXEC, script(MORTAL), constants=SHORT_DELAYS)
        job.lines("up$", 2)
        Masters(unirun).suspend()
        self.twice(job)

    def test_ctrl_c_twice_ends_the_job_while_the_agent_hangs(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start("--roles", "a=2", *EXEC, script(MORTAL), constants=SHORT_DELAYS)
        job.lines("up$", 2)
        os.kill(unirun.pid_of("unirun-agent"), signal.SIGSTOP)
        self.twice(job)


def epoch(unirun: Unirun) -> int:
    job = JobDir(unirun.job_dir())
    store = open_store(job.store_url)
    try:
        leader = leader_of(store, job_prefix(job.run_id))
    finally:
        store.close()
    return leader.epoch if leader else 0


class TestAMasterThatHangsForGood:
    """Another master leads when the lease expires; followers switch to it, though the old stream stays open."""

    @pytest.mark.breaks("unirun-master keeps a pidfd|gave up waiting for the end of a master")
    def test_a_master_that_hangs_for_good_is_left_by_the_command_and_by_stop(
        self, unirun: Unirun, script: Script
    ) -> None:
        """
        1. The master is suspended, and ``unirun stop`` waits for it.
        2. Its lease expires, and the next master leads.
        3. The new master stops the job; ``unirun stop`` and the command leave the one that hangs.
        """
        job = unirun.start("--roles", "a=2", *EXEC, script(MORTAL), constants=SHORT_TERM)
        job.lines("up$", 2)
        masters = Masters(unirun)
        masters.suspend()
        stop = unirun.start("stop", constants=SHORT_TERM)
        masters.next()
        assert stop.end(START_TIMEOUT).code == 0
        end = job.end(START_TIMEOUT)
        assert (end.code, "stopped (unirun stop)" in end.err) == (143, True), end.err
