"""Two ranks die within 200 ms: all ranks are up again. `make chaos` does it 500 times, and measures."""

from __future__ import annotations

import random
import signal

from tests.waiting import WAIT_TIMEOUT

from .harness import Script, Unirun
from .kills import SCRIPTS, WORKLOADS, kill_pairs, scripts_up, workloads_up


class TestTwoDeathsInAMoment:
    def test_workloads_are_up_again_after_two_deaths_in_a_moment(
        self, unirun: Unirun, script: Script
    ) -> None:
        folder = script(WORKLOADS, "chaotic.py").parent
        roles = ("--roles", "w=4@chaotic:Worker", "--max-restarts", 50)
        job = unirun.start(*roles, "--cwd", folder)
        kill_pairs(job, lambda: workloads_up(unirun), 6, random.Random(0))
        job.signal(signal.SIGTERM)
        assert job.end(WAIT_TIMEOUT).code == 143

    def test_scripts_meet_again_after_two_deaths_in_a_moment(self, unirun: Unirun, script: Script) -> None:
        train = script(SCRIPTS)
        job = unirun.start("--roles", "v=1,w=2", "--max-restarts", 50, train, cwd=train.parent)
        kill_pairs(job, lambda: scripts_up(train.parent, ["v:0", "w:0", "w:1"]), 2, random.Random(0))
        job.signal(signal.SIGTERM)
        assert job.end(WAIT_TIMEOUT).code == 143
