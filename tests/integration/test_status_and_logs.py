"""``unirun status`` and ``unirun logs``, as a user calls them."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

from tests.waiting import WAIT_TIMEOUT, eventually

from .harness import EXEC, Running, Script, Unirun, alive
from .serving import COMMAND_TIMEOUT, SERVE_SCRIPT, end_well


class TestStatus:
    def test_status_shows_every_worker_of_a_running_job(self, unirun: Unirun, running: Running) -> None:
        result = unirun("status", "mine", within=COMMAND_TIMEOUT)
        assert result.code == 0
        assert result.out.startswith("job mine: running, ")
        workers = unirun.workers()
        for who, worker in workers.items():
            (row,) = re.findall(rf"^{who} .*$", result.out, re.M)
            assert str(worker["pid"]) in row
            assert "running" in row
        assert all(alive(worker["pid"]) for worker in workers.values())
        end_well(unirun, running)

    def test_status_shows_restarts(self, unirun: Unirun, running: Running) -> None:
        os.kill(unirun.workers()["actor:0"]["pid"], signal.SIGUSR2)
        running.lines("line actor", 4)
        row = re.compile(r"^actor +running +[12] +1 +1 of 1$.*^actor:0 .* 1 ", re.M | re.S)
        # The status is written a moment after what it tells of.
        eventually(lambda: row.search(unirun("status").out), "the status tells of the restart")
        running.signal(signal.SIGTERM)
        assert running.end().code == 143

    def test_status_shows_the_history_of_failures(self, unirun: Unirun, script: Script) -> None:
        train = script(
            "import os\nif os.environ['UNIRUN_INCARNATION'] == '0': raise ValueError('first\\nsecond')"
        )
        assert unirun("--max-restarts", 2, "--rdzv-id", "mine", train).code == 0
        (failure,) = unirun.status()["failures"]
        assert (failure["role"], failure["rank"], failure["incarnation"]) == ("default", 0, 0)
        assert failure["message"] == "ValueError: first"
        assert failure["decision"] == "default:0 ended with exit code 1; restart 1 of 2 of role default"
        text = unirun("status").out
        assert "\ndefault  succeeded  1      1           1 of 2\n" in text
        row = r"default:0  0 +\d+ s ago  exit code 1  restart 1 of 2 of role default  ValueError: first$"
        assert re.search(row, text), text

    def test_status_of_a_finished_job_shows_how_it_ended(self, unirun: Unirun, script: Script) -> None:
        unirun(*EXEC, "--rdzv-id", "bad", script("raise SystemExit(3)"))
        result = unirun("status", "bad", within=COMMAND_TIMEOUT)
        assert result.code == 0
        assert result.out.startswith("job bad: failed, exit code 3")
        assert "reason: default:0 ended with exit code 3" in result.out

    def test_status_shows_memory_and_processor_time(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start(*EXEC, "--monitor-interval", 0.05, "--role", "a", script(SERVE_SCRIPT))
        job.lines("line")

        def look() -> dict[str, Any] | None:
            found = unirun.workers()["a:0"]
            return found if found["memory"] and found["cpu"] is not None else None

        sampled = eventually(look, "samples")
        assert sampled["memory"] > 1 << 20
        assert sampled["cpu"] >= 0
        end_well(unirun, job)


class TestLogs:
    def test_logs_prints_lines_with_prefixes(self, unirun: Unirun, running: Running) -> None:
        result = unirun("logs", "mine", within=COMMAND_TIMEOUT)
        assert sorted(result.out.splitlines()) == [
            "[actor:0] error 0",
            "[actor:0] line actor 0",
            "[actor:1] error 1",
            "[actor:1] line actor 1",
            "[rollout:0] error 0",
            "[rollout:0] line rollout 0",
        ]
        assert unirun("logs", "mine", "actor:1", "--stdout").out == "[actor:1] line actor 1\n"
        assert unirun("logs", "mine", "rollout", "--stderr").out == "[rollout:0] error 0\n"
        assert unirun("logs", "mine", "actor", "-n", 0).out == ""
        end_well(unirun, running)

    def test_logs_follows_a_job_to_its_end_through_restarts(self, unirun: Unirun, running: Running) -> None:
        follower = unirun.start("logs", "-f", "mine")
        follower.lines("line", 3)
        os.kill(unirun.workers()["actor:0"]["pid"], signal.SIGUSR2)
        running.lines("line actor", 4)
        follower.lines("line actor", 4)
        end_well(unirun, running)
        result = follower.end(WAIT_TIMEOUT)
        assert result.code == 0, result.err
        assert len(re.findall("line actor", result.out)) == 4

    def test_logs_prints_earlier_incarnations_on_demand(self, unirun: Unirun, script: Script) -> None:
        train = script(
            "import os, sys; n = os.environ['UNIRUN_INCARNATION']; print('I', n); sys.exit(n == '0')"
        )
        unirun(*EXEC, "--max-restarts", 1, train)
        assert unirun("logs").out == "[default:0] I 1\n"
        job = unirun.job_dir().name
        assert unirun("logs", job, "--all").out.splitlines() == ["[default:0] I 0", "[default:0] I 1"]

    def test_logs_of_an_unknown_worker_is_refused(self, unirun: Unirun, running: Running) -> None:
        for who, message in (
            ("critic", "job mine has no role 'critic'; it has actor, rollout"),
            ("actor:9", "no logs of actor:9"),
        ):
            result = unirun("logs", "mine", who)
            assert (result.code, message in result.err) == (2, True), result.err
        end_well(unirun, running)
