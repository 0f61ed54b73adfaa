"""A command does not import modules that it does not need: that is why it answers at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.observe.status import JobStatus, write_status
from unirun.rendezvous.creation import create_job
from unirun.rendezvous.store.url import open_store
from unirun.wire.handshake import new_token

PROBE = """
import json, sys
from unirun.cli import main
try:
    main(sys.argv[1:])
except SystemExit as leave:
    code = leave.code
print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a job that has ended."""
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    monkeypatch.delenv("UNIRUN_STORE", raising=False)
    job, lock = create_job("done-1", new_token())
    write_status(job, JobStatus("done-1", "done", "succeeded", "", 1.0, 2.0, 0, ()))
    os.close(lock)
    return tmp_path


def imported(*argv: str) -> set[str]:
    probe = subprocess.run(
        [sys.executable, "-c", PROBE, *argv], capture_output=True, text=True, timeout=WAIT_TIMEOUT, check=True
    )
    code, modules = json.loads(probe.stderr.splitlines()[-1])
    assert code == 0, probe.stderr
    return set(modules)


@pytest.mark.starts_processes
@pytest.mark.parametrize("argv", [["--help"], ["completion", "bash"], ["completion", "zsh"]], ids=" ".join)
def test_help_and_completion_import_next_to_nothing(argv: list[str]) -> None:
    heavy = {
        "torch",
        "numpy",
        "asyncio",
        "omegaconf",
        "yaml",
        "rich",
        "psutil",
        "pynvml",
        "unirun.wire.frames",
    }
    assert imported(*argv) & heavy == set()


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    "argv",
    [["status"], ["ls"], ["stop"], ["status", "--json"], ["ls", "--json"], ["gc", "--dry-run"]],
    ids=" ".join,
)
def test_commands_about_jobs_import_neither_torch_nor_rich_nor_a_store(home: Path, argv: list[str]) -> None:
    heavy = {"torch", "numpy", "omegaconf", "yaml", "rich", "psutil", "pynvml", "sqlite3", "grpc", "google"}
    assert imported(*argv) & heavy == set()


@pytest.mark.starts_processes
@pytest.mark.parametrize("argv", [["ls"], ["gc"]], ids=" ".join)
def test_commands_with_a_sqlite_store_import_sqlite_only(home: Path, argv: list[str]) -> None:
    url = f"sqlite:{home / 'shared.db'}"
    open_store(url).close()
    modules = imported(*argv, "--store", url)
    assert modules & {"torch", "numpy", "omegaconf", "rich", "psutil", "grpc", "google"} == set()
    assert "sqlite3" in modules


@pytest.mark.starts_processes
def test_trials_are_listed_without_torch(home: Path) -> None:
    assert imported("experiment", "list") & {"torch", "numpy", "transformers"} == set()


@pytest.mark.starts_processes
def test_a_plan_imports_no_torch(home: Path, scripts: Path) -> None:
    assert imported("plan", "--roles", "a=2", "train.py") & {"torch", "numpy", "omegaconf", "rich"} == set()


@pytest.mark.starts_processes
def test_a_plan_of_classes_imports_neither_torch_nor_the_classes(home: Path, scripts: Path) -> None:
    (scripts / "ppo.py").write_text("import torch\nclass Actor: ...\nclass PPOTrainer: ...")
    argv = ("plan", "--roles", "a=2@ppo:Actor", "--trainer", "ppo:PPOTrainer")
    assert imported(*argv) & {"torch", "numpy", "omegaconf", "rich", "ppo"} == set()


@pytest.mark.starts_processes
def test_a_plan_of_a_job_file_imports_no_torch(home: Path, scripts: Path) -> None:
    (scripts / "job.yaml").write_text("{roles: {a: 2}, script: train.py}")
    modules = imported("plan", "--config", "job.yaml")
    assert "torch" not in modules
    assert "omegaconf" in modules


@pytest.mark.starts_processes
def test_run_does_not_import_the_master_the_console_and_the_explanations() -> None:
    code = "import sys, unirun.cli.run; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_TIMEOUT, check=True
    ).stdout
    later = {
        "launcher.master.lead",
        "failover.step",
        "launcher.foreground.session",
        "collocation.planning.offers",
        "collocation.graph.svg",
    }
    assert {f"unirun.{name}" for name in later} & set(output.split()) == set()


@pytest.mark.starts_processes
def test_a_stream_on_one_host_imports_nothing_of_tls() -> None:
    code = "import sys, unirun.wire.blocking; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_TIMEOUT, check=True
    ).stdout
    assert {"unirun.wire.credentials", "unirun.wire.blocking"} <= set(output.split())
    assert {"ssl", "cryptography", "asyncio", "unirun.wire.certificates"} & set(output.split()) == set()


@pytest.mark.starts_processes
def test_the_check_of_a_backend_imports_neither_the_compiler_nor_networks() -> None:
    code = "import sys; from unirun.experiments.models.backends import TrainBackend as B; B(); print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_TIMEOUT, check=True
    ).stdout
    assert {"torch._dynamo", "torch.distributed.tensor", "transformers"} & set(output.split()) == set()


@pytest.mark.starts_processes
def test_the_package_itself_imports_nothing() -> None:
    code = "import sys; before = set(sys.modules); import unirun; print(sorted(set(sys.modules) - before))"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_TIMEOUT, check=True
    ).stdout
    assert "torch" not in output
    assert "unirun.roles" not in output
