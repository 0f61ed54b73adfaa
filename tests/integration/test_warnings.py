"""A job runs with all Python warnings as errors."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping

import pytest

from tests.waiting import eventually

from .harness import EXEC, SCRIPTS, START_TIMEOUT, Script, Unirun, alive

STRICT = {"PYTHONWARNINGS": "error", "PYTHONPATH": str(SCRIPTS / "threaded")}
"""All warnings are errors; some emulate those of later Python versions."""


def assert_no_process_warned(unirun: Unirun) -> None:
    logs = {path: path.read_text() for path in unirun.job_dir().rglob("*.log")}
    assert len(logs) > 2
    assert [path for path, text in logs.items() if "Warning" in text or "Traceback" in text] == []


def test_forked_workers_meet_and_restart_with_warnings_as_errors(unirun: Unirun, script: Script) -> None:
    train = script(
        """
        import os, sys, warnings
        import torch
        import torch.distributed as dist
        import unirun
        ctx = unirun.init()
        dist.init_process_group()
        ones = torch.ones(1)
        dist.all_reduce(ones)
        try:
            warnings.warn("mine")
        except UserWarning as error:
            print(ctx.role, int(ones), error)
        sys.exit(ctx.role == "a" and ctx.rank == 0 and ctx.incarnation == 0)
        """
    )
    argv = ("--roles", "a=2,b=1", "--max-restarts", 1, "--monitor-interval", 0.1, train)
    result = unirun("-q", *argv, env=STRICT)
    assert (result.code, result.err) == (0, ""), result.err
    assert set(result.lines) == {"a 2 mine", "b 1 mine"}
    assert_no_process_warned(unirun)


def test_the_next_master_leads_with_warnings_as_errors(unirun: Unirun, script: Script) -> None:
    train = script("import os, time\nprint('up')\nwhile not os.path.exists('go'): time.sleep(0.01)")
    job = unirun.start(*EXEC, train, env=STRICT)
    job.lines("up after")
    os.kill(unirun.pid_of("unirun-master"), signal.SIGKILL)
    job.lines("another leads")
    eventually(lambda: unirun.status()["epoch"] == 2, "the next one has written", START_TIMEOUT)
    assert alive(unirun.pid_of("unirun-master")), "it has the title of the first"
    (unirun.root / "go").touch()
    assert job.end().code == 0
    assert_no_process_warned(unirun)


@pytest.mark.parametrize("how", [{"PYTHONWARNINGS": "error"}, {}], ids=["variable", "option"])
def test_commands_work_with_warnings_as_errors(
    unirun: Unirun, script: Script, how: Mapping[str, str]
) -> None:
    command = [sys.executable, *([] if how else ["-W", "error"]), "-m", "unirun"]
    for arguments, out in {
        f"-q {' '.join(EXEC)} {script('print(1)')}": "1\n",
        "status": "default:0  exit code 0",
        "logs": "[default:0] 1\n",
        "ls": "succeeded",
        "stop": "no job runs",
        f"plan {unirun.root / 'train.py'}": "RANK=0",
    }.items():
        result = unirun.start_program([*command, *arguments.split()], env=how).end()
        assert (result.code, result.err, out in result.out) == (0, "", True), result
