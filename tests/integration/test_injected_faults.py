"""``unirun inject``: faults in the workers of a running job, which recovers from them."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from tests.waiting import eventually

from .harness import Script, Unirun, state_of
from .serving import SERVE_SCRIPT, end_well


class TestAFault:
    def test_ranks_that_are_killed_by_a_schedule_are_chosen_by_the_seed_and_come_back(
        self, unirun: Unirun, script: Script
    ) -> None:
        """
        1. Four workers run, which restart together.
        2. One of them at random is killed every second, three times: the same ones for the same seed.
        3. Each end has its fault as its cause, and all ranks are up again; the job ends well.
        """
        job = unirun.start(*("--roles", "actor=4", "--max-restarts", "9"), script(SERVE_SCRIPT))
        job.lines(r"line actor \d", 4)
        schedule = ("--fault", "sigkill", "--every", "1s", "--for", "3s", "--seed", "1")
        found = unirun("inject", unirun.job_dir().name, "actor", *schedule)
        assert found.code == 0, found.err
        killed = re.findall(r"sigkill → (actor:\d)", found.out)
        job.lines(r"line actor \d", 4 * (1 + len(killed)))
        assert unirun.events("inject") == [f"the fault sigkill is injected into {who}" for who in killed]
        assert [text for text in unirun.events("exit") if "SIGKILL" in text] == [
            f"{who} ended: killed by SIGKILL" for who in killed
        ]
        # random.Random(1) of the four ranks.
        assert killed == ["actor:1", "actor:0", "actor:2"][: len(killed)]
        assert len(killed) >= 2
        rows = unirun("failures", "--json").out.splitlines()
        records = [json.loads(row)["record"] for row in rows]
        assert [(each["kind"], f"actor:{each['rank']}") for each in records if each["fault"]] == [
            ("injected", who) for who in killed
        ]
        end_well(unirun, job)

    @pytest.mark.parametrize(("fault", "code"), [("sigkill", 137), ("segv", 139)])
    def test_the_job_ends_with_the_code_of_the_fault(
        self, unirun: Unirun, script: Script, fault: str, code: int
    ) -> None:
        job = unirun.start("--roles", "actor=2", script(SERVE_SCRIPT))
        job.lines(r"line actor \d", 2)
        assert unirun("inject", unirun.job_dir().name, "actor:1", "--fault", fault).code == 0
        end = job.end()
        assert end.code == code
        assert f"actor:1: the fault {fault} is injected" in end.err
        assert "root cause: actor:1" in end.err

    def test_a_rank_that_is_stopped_stays_there(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start("--roles", "actor=2", script(SERVE_SCRIPT))
        job.lines(r"line actor \d", 2)
        assert unirun("inject", unirun.job_dir().name, "actor:0", "--fault", "sigstop").code == 0
        pid = unirun.workers()["actor:0"]["pid"]
        eventually(lambda: state_of(pid) == "T", "the rank is stopped")
        os.kill(pid, signal.SIGCONT)
        end_well(unirun, job)

    @pytest.mark.parametrize(
        ("fault", "code", "words"), [("exit=3", 3, "exit code 3"), ("oom", 1, "MemoryError: injected")]
    )
    def test_a_rank_injects_a_fault_into_itself(
        self, unirun: Unirun, script: Script, fault: str, code: int, words: str
    ) -> None:
        job = unirun.start("--roles", "actor=2", script(SERVE_SCRIPT))
        job.lines(r"line actor \d", 2)
        assert unirun("inject", unirun.job_dir().name, "actor:1", "--fault", fault).code == 0
        end = job.end()
        assert end.code == code
        assert "root cause: actor:1" in end.err
        assert words in end.err
        assert f"the fault {fault} is injected".encode() in unirun.log("actor", 1, stream="stderr")

    @pytest.mark.parametrize(("fault", "ticks"), [("hang", True), ("hang-gil", False), ("slow=10x", True)])
    def test_a_rank_that_hangs_or_is_slow_lives_and_its_threads_run_or_not(
        self, unirun: Unirun, script: Script, fault: str, ticks: bool
    ) -> None:
        """
        1. A rank counts in a thread, and its main thread waits for signals.
        2. With `hang` the thread goes on, with `hang-gil` it does not, with `slow` it is slow.
        3. The job can be ended.
        """
        count = script(
            """
            import threading, time
            def tick():
                while True:
                    print("tick", flush=True)
                    time.sleep(0.02)
            threading.Thread(target=tick, daemon=True).start()
            while True:
                time.sleep(0.01)
            """
        )
        job = unirun.start("--roles", "actor=1", "--shutdown-timeout", 2, count)
        job.lines("tick", 10)
        assert unirun("inject", unirun.job_dir().name, "actor", "--fault", fault).code == 0
        if fault.startswith("hang"):
            path = unirun.job_dir() / "logs/actor/0/0/stderr.log"
            eventually(lambda: f"the fault {fault} is injected" in path.read_text(), "the fault is there")
        before = len(re.findall("tick", job.text))
        if ticks:
            job.lines("tick", before + 5)
        else:
            seen, since = before, time.monotonic()

            def is_quiet() -> bool:
                nonlocal seen, since
                if (now := len(re.findall("tick", job.text))) != seen:
                    seen, since = now, time.monotonic()
                return time.monotonic() - since > 1.0

            eventually(is_quiet, "the thread does not run for a second")
        job.signal(signal.SIGTERM)
        assert job.end().code == 143
