"""Every error is one line with what to do, and an exit code that means something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from tests.unit.cli.in_process import run_cli
from unirun.cli.commands import COMMANDS, SUBCOMMANDS
from unirun.observe.jobdir import JobDir
from unirun.observe.status import (
    FailureStatus,
    JobStatus,
    RoleStatus,
    WorkerStatus,
    read_status,
    write_status,
)
from unirun.rendezvous.creation import create_job
from unirun.values import WorkerId
from unirun.wire.handshake import new_token


def ended(run_id: str, phase: str = "failed", code: int = 7) -> JobDir:
    job, lock = create_job(run_id, new_token())
    worker = WorkerStatus(0, "exited", "n0", 1, None, "exit code 7")
    role = RoleStatus("actor", "failed", 1, 1, 1, (worker,))
    write_status(job, JobStatus(run_id, "t", phase, "why", 1.0, 9.0, code, (role,)))
    for incarnation in (0, 1):
        logs = job.worker_logs(WorkerId("actor", 0, incarnation))
        logs.mkdir(parents=True)
        (logs / "stdout.log").write_bytes(f"out {incarnation}\nlast".encode())
        (logs / "stderr.log").write_bytes(b"err\n")
    os.close(lock)
    return job


@pytest.mark.starts_processes
@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_logs_to_a_closed_pipe_end_quietly(follow: list[str]) -> None:
    ended("job-1")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "unirun", "logs", *follow]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.starts_processes
@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_logs_that_cannot_be_written_are_an_error(follow: list[str]) -> None:
    ended("job-1")
    command = [sys.executable, "-m", "unirun", "logs", *follow]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    words = b"unirun: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, words)


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["nowhere.py"], 2, "unirun: roles.default: script 'nowhere.py' does not exist; looked in"),
        (["trian.py"], 2, "script 'trian.py' does not exist; did you mean 'train.py'?"),
        (["train"], 2, "script 'train' does not exist; did you mean 'train.py'?"),
        (["plan", "--roles", "a=1@wl:Actor"], 2, "and on sys.path; --cwd DIR names another folder"),
        (["--max-restart5", "1", "train.py"], 2, "did you mean '--max-restarts'?"),
        (["--roles", "a=0", "train.py"], 2, "unirun: roles.a.count: expected a number from 1"),
        (
            ["--nnodes", "2", "train.py"],
            2,
            "unirun: --nnodes 2: nothing says where the nodes meet; name the head on each",
        ),
        (["status", "x"], 2, "unirun: there are no jobs; start one with"),
        (["stop", "--signal", "NONE"], 2, "'NONE' is no signal"),
        (["logs", "-n", "-1"], 2, "'-1' is no whole number from 0"),
        (["status", "--jso0n"], 2, "unirun: unrecognized arguments: --jso0n; see unirun status --help"),
        (["completion", "csh"], 2, "invalid choice: 'csh'"),
        (["plan", "--roles", "a=1"], 2, "roles.a: nothing to run; name a script, or one for this role"),
        (["plan"], 2, "roles.default: there is nothing to run; name a script: unirun train.py"),
        (["stop", "--signal", "0"], 2, "'0' is no signal"),
        (["stop", "-9"], 2, "-9 is no option of unirun stop; --now kills at once"),
        (["plan", "--trainer", "a:B"], 2, "--trainer has nobody to call without roles"),
        (["plan", "-m", "--roles", "a=1", "--script", "a=train.py"], 2, "-m says what the script is"),
        (["--roles", "", "train.py"], 2, "--roles: it names no role; write --roles actor=4,rollout=4"),
        (["--roles", "actor:2", "train.py"], 2, "--roles: 'actor:2' is no role; write actor=2"),
        (["--roles", "a=1@ppo.Actor"], 2, "not of the form pkg.mod:Class; did you mean 'ppo:Actor'?"),
        (["--roles", "a=1@./ppo.py:Actor"], 2, "did you mean 'ppo:Actor'?"),
        (["--gpus", "2", "train.py"], 2, "unknown option --gpus; did you mean '--nproc-per-node'?"),
        (["--num_processes=2", "train.py"], 2, "did you mean '--nproc-per-node'?"),
        (["-n", "2", "train.py"], 2, "unknown option '-n'; did you mean '--nproc-per-node'?"),
        (["--nprocs", "2", "train.py"], 2, "unknown option --nprocs; did you mean '--nproc-per-node'?"),
        (
            ["--role", "actor=2", "train.py"],
            2,
            "--role has a name, and 'actor=2' is none; write --roles actor=2",
        ),
        (
            ["--roles", "actor", "2", "train.py"],
            2,
            "2 stands where the script is expected; write --roles actor=2",
        ),
        (
            ["--after", "engine", "train.py"],
            2,
            "--after: no role is there that waits for engine; name a service",
        ),
        (["--slurm", "2", "train.py"], 2, "--slurm 2: it has no value; write nodes=2"),
        (["-nproc", "2", "train.py"], 2, "unknown option '-nproc'; did you mean '--nproc-per-node'?"),
        (["--cpus", "2", "train.py"], 2, "unknown option --cpus; a job file has it: roles: {NAME: "),
        (["--verbatim", "train.py"], 2, "unknown option --verbatim; see unirun --help"),
        (
            ["--config.lr=3", "train.py"],
            2,
            "what changes a job file has no dashes: --config FILE config.lr=VALUE",
        ),
        (["job.yaml"], 2, "roles.default: 'job.yaml' is a job file; write --config job.yaml"),
        (["x.sh"], 2, "'x.sh' is a shell script; write --no-python ./x.sh"),
        (["--no-python", "train.py"], 2, "'train.py' is a Python script; leave out --no-python"),
        (["--no-python", "x.sh"], 2, "program 'x.sh' is not on the PATH; write ./x.sh"),
        (["--no-python", "./x.sh"], 2, "program './x.sh' may not be executed; chmod +x ./x.sh"),
        (["-m", "train.py"], 2, "'train.py' is a file and no module; write -m train, or leave out -m"),
        (["-m", "pkg/train.py"], 2, "write -m pkg.train, or leave out -m"),
        (
            ["-m", "ppo:Actor"],
            2,
            "'ppo:Actor' is a class and no module; give it to a role: --roles actor=1@ppo",
        ),
        (["--config", "text.yaml"], 2, "text.yaml: holds a text, expected a mapping with keys like 'roles'"),
        (["--config", "job.yaml", "lr=3"], 2, "lr=3: a job has no 'lr'; did you mean config.lr=3?"),
        (["--config", "tab.yaml"], 2, "tab.yaml: is no YAML: line 2, column 1: found character '\\t'"),
    ],
)
def test_an_error_is_one_line_with_what_to_do(
    capsys: pytest.CaptureFixture[str], scripts: Path, argv: list[str], code: int, says: str
) -> None:
    for name, text in {
        "x.sh": "echo",
        "job.yaml": "{script: train.py, config: {lr: 1}}",
        "text.yaml": "just text",
        "tab.yaml": "roles:\n\tactor: 2",
    }.items():
        (scripts / name).write_text(text)
    assert run_cli(*argv) == code
    output = capsys.readouterr()
    assert says in output.err
    assert len(output.err.splitlines()) == 1
    assert output.out == ""


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("--version") == 0
    assert capsys.readouterr().out.startswith("unirun 0.")
    assert run_cli() == run_cli("-h") == 0
    assert "unirun --roles actor=4,rollout=4" in capsys.readouterr().out


def test_the_help_has_all_commands_on_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_cli("--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    told = {line.split()[1] for line in lines if line.startswith("       unirun ")}
    assert {name.partition(" ")[0] for name in COMMANDS} - told == set()


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_a_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run_cli(name, "--help") == 0
    assert "usage: unirun" in capsys.readouterr().out


class TestStatus:
    def test_status_shows_the_phase_of_a_job_and_its_workers(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ended("train-1")
        assert run_cli("status") == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "job train-1: failed, exit code 7, 8 s"
        assert lines[1] == "reason: why"
        assert lines[-1].split()[:4] == ["actor:0", "exit", "code", "7"]

    def test_status_shows_the_metrics_of_workers(self, capsys: pytest.CaptureFixture[str]) -> None:
        job = ended("train-1")
        assert run_cli("status") == 0
        assert "METRICS" not in capsys.readouterr().out
        status = read_status(job)
        worker = structs.replace(status.roles[0].workers[0], metrics={"loss": 0.12345678, "step": 30.0})
        role = structs.replace(status.roles[0], workers=(worker,))
        write_status(job, structs.replace(status, roles=(role,)))
        assert run_cli("status") == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-2].endswith("  METRICS")
        assert lines[-1].endswith("  loss=0.123457 step=30")

    def test_tells_all_of_it_to_programs(self, capsys: pytest.CaptureFixture[str]) -> None:
        job = ended("train-1")
        assert run_cli("status", "train", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["code"], found["dir"], found["logs"]) == (7, str(job.path), str(job.logs))


class TestLs:
    def test_ls_lists_all_jobs(self, capsys: pytest.CaptureFixture[str]) -> None:
        ended("a-1")
        ended("b-1", "succeeded", 0)
        assert run_cli("ls") == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert rows[0][:4] == ["JOB", "STATE", "EXIT", "ROLES"]
        assert [row[:4] for row in rows[1:]] == [
            ["a-1", "failed", "7", "actor=1"],
            ["b-1", "succeeded", "0", "actor=1"],
        ]

    def test_ls_lists_the_newest_and_those_that_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        for name in ("a-1", "b-1", "c-1"):
            ended(name)
        _, lock = create_job("runs", new_token())
        for argv, names in (
            (("-n", "2"), ["c-1", "runs"]),
            (("-n", "0"), []),
            (("-n", "9"), ["a-1", "b-1", "c-1", "runs"]),
            (("--running",), ["runs"]),
            (("--running", "--newest", "1"), ["runs"]),
        ):
            assert run_cli("ls", *argv) == 0
            assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == names
        os.close(lock)

    def test_ls_lists_a_directory_without_a_state_as_lost(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, lock = create_job("odd", new_token())
        assert run_cli("ls") == 0
        assert "odd  starting" in capsys.readouterr().out
        os.close(lock)
        assert run_cli("ls") == 0
        assert "odd  lost" in capsys.readouterr().out


class TestLogs:
    def test_logs_shows_the_last_incarnation_or_all(self, capfd: pytest.CaptureFixture[str]) -> None:
        ended("train-1")
        assert run_cli("logs") == 0
        assert capfd.readouterr().out == "[actor:0] out 1\n[actor:0] last\n[actor:0] err\n"
        assert run_cli("logs", "train-1", "actor:0", "--all", "--stdout", "-n", "1") == 0
        assert capfd.readouterr().out == "[actor:0] last\n[actor:0] last\n"

    def test_logs_keep_the_colours_of_workers(self, capfd: pytest.CaptureFixture[str]) -> None:
        job = ended("train-1")
        (job.worker_logs(WorkerId("actor", 0, 1)) / "stdout.log").write_text("\x1b[31mred\x1b[0m\n")
        assert run_cli("logs", "--stdout") == 0
        assert capfd.readouterr().out == "[actor:0] \x1b[31mred\x1b[0m\n"

    def test_logs_of_both_streams_are_shown_when_both_are_named(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        ended("train-1")
        assert run_cli("logs", "--stdout", "--stderr") == 0
        assert capfd.readouterr().out == "[actor:0] out 1\n[actor:0] last\n[actor:0] err\n"

    def test_logs_follow_ends_for_a_job_that_has_ended(self, capfd: pytest.CaptureFixture[str]) -> None:
        ended("train-1")
        assert run_cli("logs", "-f", "train-1", "--stderr") == 0
        assert capfd.readouterr().out == "[actor:0] err\n" * 2

    def test_logs_follow_begins_with_the_last_lines(self, capfd: pytest.CaptureFixture[str]) -> None:
        job = ended("train-1")
        (job.worker_logs(WorkerId("actor", 0, 0)) / "stdout.log").write_bytes(b"1\n2\r3\n4")
        assert run_cli("logs", "-f", "train-1", "--stdout", "-n", "2") == 0
        lines = capfd.readouterr().out.splitlines()
        assert sorted(lines) == [f"[actor:0] {each}" for each in ("3", "4", "last", "out 1")]

    @pytest.mark.parametrize("rank", ["1", "00", "x", "0-1"])
    def test_no_rank_is_followed_that_the_job_does_not_have(
        self, rank: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        ended("train-1")
        assert run_cli("logs", "-f", "train-1", f"actor:{rank}") == 2
        assert f"job train-1 has no actor:{rank}; actor has ranks 0 to 0" in capfd.readouterr().err

    def test_logs_of_an_unknown_role_name_the_known_ones(self, capfd: pytest.CaptureFixture[str]) -> None:
        ended("train-1")
        assert run_cli("logs", "train-1", "aktor") == 2
        assert "has no role 'aktor'; it has actor" in capfd.readouterr().err


@pytest.mark.parametrize("signal", [(), ("--signal", "INT"), ("--signal", "sigint"), ("--signal", "9")])
def test_a_job_that_has_ended_needs_no_stop(
    capsys: pytest.CaptureFixture[str], signal: tuple[str, ...]
) -> None:
    ended("train-1")
    assert run_cli("stop", "train-1", *signal) == 0
    assert capsys.readouterr().out == "job train-1 has ended already: failed\n"


class TestAPlan:
    def test_a_plan_is_a_table(self, capsys: pytest.CaptureFixture[str], home: Path) -> None:
        assert run_cli("plan", "--roles", "actor=2,rollout=1", "--rdzv-id", "x", "train.py", "--lr", "1") == 0
        lines = capsys.readouterr().out.rpartition("\n\n")[2].splitlines()
        assert lines[0].split() == ["WORKER", "NODE", "SLOT", "ENV"]
        assert [line.split()[0] for line in lines[1:]] == ["actor:0", "actor:1", "rollout:0"]
        assert lines[2].endswith("  LOCAL_RANK=1")
        assert not home.exists(), "a plan makes nothing"

    def test_a_plan_has_a_row_for_each_role(self, capsys: pytest.CaptureFixture[str]) -> None:
        """With all that its ranks have in common: a row of a rank is short."""
        argv = ("--roles", "actor=2,rollout=1", "--inventory", "fake:devices=4", "train.py", "--lr", "1")
        assert run_cli("plan", *argv) == 0
        rows = capsys.readouterr().out.split("\n\n")[-2].splitlines()
        assert rows[0].split() == ["ROLE", "RANKS", "RESTART", "ENV", "COMMAND"]
        assert rows[1].startswith("actor    2      role×0   CUDA_VISIBLE_DEVICES=0,1 ")
        assert rows[2].startswith("rollout  1      role×0   CUDA_VISIBLE_DEVICES=2 ")
        assert all(row.endswith("  python train.py --lr 1") for row in rows[1:])

    def test_a_plan_has_a_short_header_however_long_the_command_is(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run_cli("plan", "train.py", *("--some-option",) * 50) == 0
        header, row = capsys.readouterr().out.splitlines()[-5:-3]
        assert len(header) < 100 < 700 < len(row)

    def test_a_plan_and_a_status_fit_a_terminal_of_80_columns(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        shape = ("--roles", "actor=16,rollout=8", "--inventory", "fake:nodes=3,devices=8")
        assert run_cli("plan", *shape, "--lost", "node0", "train.py") == 3
        assert run_cli("plan", *shape, "train.py", *("--some-option",) * 50) == 0
        job = ended("train-1")
        status = read_status(job)
        worker = structs.replace(status.roles[0].workers[0], metrics={f"loss{n}": n / 3 for n in range(20)})
        failure = FailureStatus(
            "actor",
            0,
            1,
            "n0",
            1.0,
            "exit code 1",
            cause="words " * 40,
            decision="exit code 1; " + "restart " * 20,
        )
        role = structs.replace(status.roles[0], workers=(worker,))
        more = structs.replace(status, reason="why " * 60, roles=(role,), failures=(failure,) * 3, failed=3)
        write_status(job, more)
        assert run_cli("status") == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("logs: ")]
        assert any(line.startswith("    LIKELY CAUSE words ") for line in lines)
        assert [line for line in lines if len(line) > 80] == []

    def test_a_status_has_one_row_for_ranks_that_only_lost_a_peer(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job = ended("train-1")

        def failed(rank: int, kind: str, decision: str = "", role: str = "actor") -> FailureStatus:
            cause = f"the cause of {role}:{rank}"
            return FailureStatus(
                role, rank, 0, "n0", 1.0, "exit code 1", kind=kind, cause=cause, decision=decision
            )

        peers = [failed(rank, "lost_peer") for rank in (3, 1, 0)]
        others = [
            failed(2, "exception", "restart"),
            failed(5, "lost_peer", "restart"),
            failed(0, "lost_peer", role="b"),
        ]
        failures = (others[0], *peers, *others[1:])
        write_status(job, structs.replace(read_status(job), failures=failures, failed=6))
        assert run_cli("status") == 0
        title, _, *rows = capsys.readouterr().out.split("\n\n")[-1].splitlines()
        assert title == "failures: 6"
        words = [(row.split()[0], row.partition("exit code 1")[2].split()) for row in rows]
        assert words == [
            ("actor:2", ["restart", "the", "cause", "of", "actor:2"]),
            ("actor:0-1,3", ["they", "only", "lost", "a", "connection", "to", "a", "peer"]),
            ("actor:5", ["restart", "the", "cause", "of", "actor:5"]),
            ("b:0", ["the", "cause", "of", "b:0"]),
        ]

    def test_a_plan_is_available_as_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["--roles", "actor=2", "--env", "A=1", "--master-port", "29500", "train.py"]
        assert run_cli("plan", "--json", *argv) == 0
        plan = json.loads(capsys.readouterr().out)
        first, second = plan["workers"]
        assert (first["env"]["MASTER_PORT"], first["env"]["A"], second["env"]["RANK"]) == ("29500", "1", "1")
        assert plan["spec"]["roles"][0]["count"] == 2
        assert run_cli("plan", *argv, "--json") == 0, "what follows the script is the script's"
        assert capsys.readouterr().out.startswith("job train-")

    def test_a_plan_shows_classes_restarts_collocations_and_calls(
        self, capsys: pytest.CaptureFixture[str], scripts: Path
    ) -> None:
        (scripts / "job.yaml").write_text("{collocations: [[actor, rollout]], transport: socket}")
        roles = "actor=1@ppo:Actor,rollout=1@ppo:Rollout"
        argv = ["--roles", roles, "--trainer", "ppo:PPOTrainer", "--config", "job.yaml"]
        assert run_cli("plan", *argv) == 0
        output = capsys.readouterr().out
        assert "collocated, on the same devices: actor, rollout\n" in output
        assert "calls: transport socket, at most 1800 s each\n" in output
        assert "\nactor    1      process×3  " in output
        assert "  workload ppo:Actor\n" in output
        assert "  trainer ppo:PPOTrainer\n" in output
        assert run_cli("plan", "--json", *argv) == 0
        rows = json.loads(capsys.readouterr().out)["workers"]
        assert [(row["role"], row["kind"], row["restart"], row["max_restarts"]) for row in rows] == [
            ("actor", "workload", "process", 3),
            ("rollout", "workload", "process", 3),
            ("trainer", "trainer", "process", 3),
        ]
