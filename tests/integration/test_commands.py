"""``unirun plan``, ``status``, ``logs``, ``stop``, ``ls``, ``gc`` and ``-d``, as a user calls them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .harness import SOON, Running, Unirun, alive, eventually, gone

Script = Callable[..., Path]
EXEC = ("--start-method", "exec")

QUICK = 5.0
"""Seconds in which a subcommand answers on a busy machine; the bench measures what it takes on a quiet one."""

SERVE = """
    import os, signal, sys
    print("line", os.environ["ROLE_NAME"], os.environ["RANK"], flush=True)
    print("error", os.environ["RANK"], file=sys.stderr, flush=True)
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(1))
    while True:
        signal.pause()
"""


@pytest.fixture
def running(unirun: Unirun, script: Script) -> Running:
    """A job in the foreground that runs until it is told to end."""
    job = unirun.start(
        *EXEC, "--roles", "actor=2,rollout=1", "--max-restarts", "actor=1", "--rdzv-id", "mine", script(SERVE)
    )
    job.lines(r"line (\w+ \d)", 3)
    eventually(lambda: {role["phase"] for role in unirun.status()["roles"]} == {"running"}, "all ranks run")
    return job


def end_well(unirun: Unirun, job: Running) -> None:
    """Let every worker end with 0."""
    for worker in unirun.workers().values():
        os.kill(worker["pid"], signal.SIGUSR1)
    assert job.end().code == 0


class TestTheStoresPassword:
    @pytest.mark.parametrize("how", [(), EXEC], ids=["fork", "exec"])
    def test_is_nowhere_in_a_worker(self, unirun: Unirun, script: Script, how: tuple[str, ...]) -> None:
        look = script(
            """
            import os, pathlib
            own = b"secret" in pathlib.Path("/proc/self/environ").read_bytes()
            print("found" if own or "secret" in os.environ.values() else "nothing", os.environ["K"])
            """
        )
        env = {"UNIRUN_STORE_PASSWORD": "secret", "K": "passed on"}
        assert unirun(*how, look, env=env).lines == ["nothing passed on"]


class TestPlan:
    def test_prints_what_would_run_as_a_table(self, unirun: Unirun, script: Script) -> None:
        train = script("raise SystemExit(9)")
        result = unirun("plan", "--roles", "actor=2,rollout=1", train, "--lr", "3", within=QUICK)
        assert result.code == 0, result.err
        assert re.search(r"ROLE +RANK +NODE +SLOT +RESTART +COMMAND", result.out)
        rows = [line for line in result.out.splitlines() if re.match(r"(actor|rollout) ", line)]
        assert len(rows) == 3
        assert all("--lr 3" in row for row in rows)

    def test_in_json_has_everything_and_starts_nothing(self, unirun: Unirun, script: Script) -> None:
        train = script("raise SystemExit(9)")
        result = unirun(
            *(
                "plan",
                "--json",
                "--roles",
                "actor=2,rollout=1",
                "--env",
                "actor:K=V",
                "--rdzv-id",
                "mine",
                train,
                "x",
            ),
            within=QUICK,
        )
        plan = json.loads(result.out)
        assert [(w["role"], w["rank"], w["slot"], w["local_rank"]) for w in plan["workers"]] == [
            ("actor", 0, 0, 0),
            ("actor", 1, 1, 1),
            ("rollout", 0, 2, 0),
        ]
        assert all(w["command"].endswith(f"{train} x") for w in plan["workers"])
        assert [w["env"].get("K") for w in plan["workers"]] == ["V", "V", None]
        assert [w["env"]["WORLD_SIZE"] for w in plan["workers"]] == ["2", "2", "1"]
        assert plan["spec"]["run_id"] == "mine"
        assert not (unirun.home / "jobs").exists()
        assert unirun.processes() == {}

    def test_refuses_what_a_run_would_refuse(self, unirun: Unirun) -> None:
        result = unirun("plan", "--roles", "actor=0", "missing.py", within=QUICK)
        assert (result.code, len(result.err.splitlines())) == (2, 2)


class TestStatus:
    def test_shows_every_worker_of_a_running_job(self, unirun: Unirun, running: Running) -> None:
        result = unirun("status", "mine", within=QUICK)
        assert result.code == 0
        assert result.out.startswith("job mine: running, ")
        workers = unirun.workers()
        for who, worker in workers.items():
            (row,) = re.findall(rf"^{who} .*$", result.out, re.M)
            assert str(worker["pid"]) in row
            assert "running" in row
        assert all(alive(worker["pid"]) for worker in workers.values())
        end_well(unirun, running)

    def test_tells_of_restarts(self, unirun: Unirun, running: Running) -> None:
        os.kill(unirun.workers()["actor:0"]["pid"], signal.SIGUSR2)
        running.lines("line actor", 4)
        result = unirun("status")
        assert re.search(r"^actor:0 .* 1 .*generation 1, 1/1 restarts", result.out, re.M), result.out
        running.signal(signal.SIGTERM)
        assert running.end().code == 143

    def test_has_the_history_of_failures(self, unirun: Unirun, script: Script) -> None:
        train = script(
            "import os\nif os.environ['UNIRUN_INCARNATION'] == '0': raise ValueError('first\\nsecond')"
        )
        assert unirun("--max-restarts", 2, "--rdzv-id", "mine", train).code == 0
        (failure,) = unirun.status()["failures"]
        assert (failure["role"], failure["rank"], failure["incarnation"]) == ("default", 0, 0)
        assert failure["message"] == "ValueError: first"
        assert failure["decision"] == "default:0 ended with exit code 1; restart 1 of 2 of role default"
        text = unirun("status").out
        assert "\nrestarts: default 1 of 2\n" in text
        row = r"default:0  0 +\d+ s ago  exit code 1  restart 1 of 2 of role default  ValueError: first$"
        assert re.search(row, text), text

    def test_of_a_finished_job_says_how_it_ended(self, unirun: Unirun, script: Script) -> None:
        unirun(*EXEC, "--rdzv-id", "bad", script("raise SystemExit(3)"))
        result = unirun("status", "bad", within=QUICK)
        assert result.code == 0
        assert result.out.startswith("job bad: failed, exit code 3")
        assert "reason: default:0 ended with exit code 3" in result.out

    def test_shows_memory_and_processor_time(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start(*EXEC, "--monitor-interval", 0.05, "--role", "a", script(SERVE))
        job.lines("line")
        sampled = eventually(lambda: (w := unirun.workers()["a:0"])["memory"] and w, "a sample")
        assert sampled["memory"] > 1 << 20
        assert sampled["cpu"] >= 0
        end_well(unirun, job)


class TestLogs:
    def test_prints_what_was_written_with_prefixes(self, unirun: Unirun, running: Running) -> None:
        result = unirun("logs", "mine", within=QUICK)
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

    def test_follows_a_job_to_its_end_through_restarts(self, unirun: Unirun, running: Running) -> None:
        follower = unirun.start("logs", "-f", "mine")
        follower.lines("line", 3)
        os.kill(unirun.workers()["actor:0"]["pid"], signal.SIGUSR2)
        running.lines("line actor", 4)
        follower.lines("line actor", 4)
        end_well(unirun, running)
        result = follower.end(SOON)
        assert result.code == 0, result.err
        assert len(re.findall("line actor", result.out)) == 4

    def test_has_earlier_incarnations_on_demand(self, unirun: Unirun, script: Script) -> None:
        train = script(
            "import os, sys; n = os.environ['UNIRUN_INCARNATION']; print('I', n); sys.exit(n == '0')"
        )
        unirun(*EXEC, "--max-restarts", 1, train)
        assert unirun("logs").out == "[default:0] I 1\n"
        job = unirun.job_dir().name
        assert unirun("logs", job, "--all").out.splitlines() == ["[default:0] I 0", "[default:0] I 1"]

    def test_of_who_is_not_there_is_refused(self, unirun: Unirun, running: Running) -> None:
        for who, message in (
            ("critic", "job mine has no role 'critic'; it has actor, rollout"),
            ("actor:9", "no logs of actor:9"),
        ):
            result = unirun("logs", "mine", who)
            assert (result.code, message in result.err) == (2, True), result.err
        end_well(unirun, running)


class TestStop:
    def test_from_another_process_ends_the_job_and_waits_for_it(
        self, unirun: Unirun, running: Running
    ) -> None:
        pids = [worker["pid"] for worker in unirun.workers().values()]
        result = unirun("stop", "mine", within=SOON)
        assert (result.code, result.out) == (0, "job mine stopped, exit code 143\n"), result.err
        assert not any(map(alive, pids))
        ended = running.end(SOON)
        assert ended.code == 143
        assert "unirun stop" in ended.err

    def test_sends_the_signal_that_is_asked_for(self, unirun: Unirun, running: Running) -> None:
        assert unirun("stop", "mine", "--signal", "INT", within=SOON).code == 0
        assert running.end(SOON).code == 130

    @pytest.mark.parametrize("how", [("--now",), ("--grace", "0.2")])
    def test_kills_who_does_not_listen(self, unirun: Unirun, script: Script, how: tuple[str, ...]) -> None:
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
        assert unirun("stop", *how, within=SOON).code == 0
        assert job.end(SOON).code == (137 if how == ("--now",) else 143)

    def test_without_waiting_returns_before_the_end(self, unirun: Unirun, running: Running) -> None:
        result = unirun("stop", "--no-wait")
        assert (result.code, result.out) == (0, "job mine is stopping\n")
        assert running.end(SOON).code == 143

    def test_of_a_finished_job_says_so(self, unirun: Unirun, script: Script) -> None:
        unirun(*EXEC, "--rdzv-id", "done", script(""))
        result = unirun("stop", "done", within=QUICK)
        assert (result.code, result.out) == (0, "job done has ended already: succeeded\n")


class TestLs:
    def test_lists_running_and_finished_jobs(self, unirun: Unirun, running: Running, script: Script) -> None:
        unirun(*EXEC, "--rdzv-id", "bad", script("raise SystemExit(3)", "bad.py"))
        result = unirun("ls", within=QUICK)
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
        assert running.end(SOON).code == 143

    def test_of_nothing_is_an_empty_table(self, unirun: Unirun) -> None:
        result = unirun("ls", within=QUICK)
        assert (result.code, len(result.out.splitlines())) == (0, 1), result.out


class TestByTheStore:
    """From another shell, which has no access to the job's directory."""

    @pytest.fixture
    def url(self, unirun: Unirun) -> str:
        return f"sqlite:{unirun.root / 'shared.db'}"

    @pytest.fixture
    def elsewhere(self, tmp_path: Path) -> Unirun:
        root = tmp_path / "elsewhere"
        root.mkdir()
        return Unirun(root)

    def test_a_job_is_seen_through_the_death_of_its_master(
        self, unirun: Unirun, elsewhere: Unirun, script: Script, url: str
    ) -> None:
        job = unirun.start(*EXEC, "--store", url, "--rdzv-id", "mine", "--role", "a", script(SERVE))
        job.lines("line")

        def seen() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(elsewhere("status", "mi", "--store", url, "--json").out)
            return found

        eventually(lambda: seen()["phase"] == "running", "the store has it")
        first = seen()["leader"]
        assert (first["epoch"], first["host"]) == (1, socket.gethostname())
        os.kill(first["pid"], signal.SIGKILL)
        second = eventually(lambda: (s := seen())["epoch"] == 2 and s["leader"], "another has written")
        assert second["pid"] != first["pid"]
        assert unirun.status()["epoch"] == 2
        (row,) = elsewhere("ls", env={"UNIRUN_STORE": url}, within=QUICK).out.splitlines()[1:]
        assert row.split()[0:2] == ["mine", "running"]
        assert row.endswith(f"  {socket.gethostname()}:{second['pid']}")
        for command in ("stop", "logs"):
            refused = elsewhere(command, "mine", "--store", url, within=QUICK)
            assert (refused.code, f"runs on host {socket.gethostname()}" in refused.err) == (2, True)
        end_well(unirun, job)
        ended = seen()
        assert (ended["phase"], ended["code"], ended["leader"]) == ("succeeded", 0, None)

    def test_a_job_is_cleared_when_it_is_over_and_not_before(
        self, unirun: Unirun, elsewhere: Unirun, script: Script, url: str
    ) -> None:
        job = unirun.start(
            *EXEC, "--store", url, "--rdzv-id", "mine", "--log-dir", unirun.root / "logs", script(SERVE)
        )
        job.lines("line")
        for command in (unirun, elsewhere):
            refused = command("gc", "mine", "--store", url)
            assert (refused.code, "job mine is running" in refused.err) == (2, True), refused.err
        end_well(unirun, job)
        unirun(*EXEC, "--store", url, "--rdzv-id", "mine2", script(""))
        assert "0 jobs removed" in unirun("gc", within=QUICK).out
        cleared = unirun("gc", "mine", within=QUICK)
        assert (cleared.code, "1 job removed" in cleared.out) == (0, True), cleared.err
        assert unirun.job_dir().name == "mine2"
        assert [*(unirun.root / "logs").iterdir()] == []
        (row,) = elsewhere("ls", "--store", url).out.splitlines()[1:]
        assert row.startswith("mine2  succeeded")
        assert "1 job removed" in elsewhere("gc", "--store", url, "--older-than", "0s").out
        assert len(elsewhere("ls", "--store", url).out.splitlines()) == 1

    def test_a_relative_path_means_the_same_file_in_every_directory(
        self, unirun: Unirun, script: Script
    ) -> None:
        started = unirun("-d", *EXEC, "--store", "sqlite:relative.db", script(SERVE))
        assert started.code == 0, started.err
        eventually(lambda: unirun.status()["roles"][0]["phase"] == "running", "the rank runs")
        folder = unirun.root / "folder"
        folder.mkdir()
        assert unirun("stop", cwd=folder).code == 0
        assert [*folder.iterdir()] == []


class TestWithoutAJob:
    @pytest.mark.parametrize("command", ["status", "logs", "stop"])
    def test_a_command_says_what_to_do(self, unirun: Unirun, command: str) -> None:
        result = unirun(command, within=QUICK)
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
            unirun("status", "one").err
            == "unirun: 'one' fits 2 jobs; write more of the id; unirun ls shows them\n"
        )
        assert unirun("status", "one-b").out.startswith("job one-b: succeeded")


class TestDetach:
    def test_returns_at_once_with_the_id_and_the_job_goes_on(self, unirun: Unirun, script: Script) -> None:
        started = unirun("-d", *EXEC, "--roles", "actor=2", script(SERVE), within=SOON)
        assert started.code == 0
        name = started.out.strip()
        assert f"unirun logs -f {name}" in started.err
        eventually(lambda: unirun.status()["roles"][0]["phase"] == "running", "both ranks run")
        follower = unirun.start("logs", "-f", name)
        follower.lines("line actor", 2)
        pids = [worker["pid"] for worker in unirun.workers().values()]
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        assert all(gone(pid, SOON) for pid in pids)
        assert follower.end(SOON).code == 0
        status = unirun.status()
        assert (status["run_id"], status["phase"], status["code"]) == (name, "succeeded", 0)

    def test_is_not_ended_by_a_hang_up_or_an_interrupt_of_the_terminal(
        self, unirun: Unirun, script: Script
    ) -> None:
        started = unirun.start("-d", *EXEC, script(SERVE))
        assert started.end().code == 0
        eventually(lambda: unirun.status()["roles"][0]["phase"] == "running", "the rank runs")
        assert all(os.getsid(pid) != started.pid for pid in unirun.processes())
        assert unirun("stop").code == 0

    def test_keeps_why_it_failed(self, unirun: Unirun, script: Script) -> None:
        unirun("-d", *EXEC, script("raise ValueError('kept')"))
        eventually(lambda: unirun.status()["phase"] == "failed", "the job has failed")
        assert unirun.status()["code"] == 1
        assert "ValueError: kept" in unirun("logs").out


class TestHelp:
    @pytest.mark.parametrize(
        "args", [["--help"], ["-h"], [], ["status", "--help"], ["plan", "--help"], ["stop", "-h"]]
    )
    def test_is_printed(self, unirun: Unirun, args: list[str]) -> None:
        result = unirun(*args, within=QUICK)
        assert (result.code, "usage: unirun" in result.out.lower()) == (0, True)

    @pytest.mark.parametrize("args", [["--help"], ["status", "--json"], ["ls"], ["plan", "train.py"]])
    def test_and_the_short_commands_import_no_torch(
        self, unirun: Unirun, script: Script, args: list[str]
    ) -> None:
        script("")
        # torch is not to be found on the path that this process has: an import of it would fail.
        script("raise SystemExit('torch was imported')", "blocked/torch.py")
        result = unirun(*args, env={"PYTHONPATH": str(unirun.root / "blocked")}, within=QUICK)
        assert "torch was imported" not in result.err
        assert result.code == (2 if args[0] == "status" else 0), result.err
