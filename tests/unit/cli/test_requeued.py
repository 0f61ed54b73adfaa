"""Followers of a job go on when Slurm requeues it, though it has no status for a moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import Job
from unirun.cli import events, logs
from unirun.cli.commands import call
from unirun.failover.status_views import status_of
from unirun.observe.batchjob import write_batch
from unirun.observe.events import EventLog
from unirun.observe.jobdir import JobDir
from unirun.observe.status import write_status
from unirun.rendezvous.creation import create_job
from unirun.values import WorkerId
from unirun.wire.handshake import new_token

RUNNING = status_of(Job({"actor": 1}).state, {}, {}, epoch=1, trouble="")


class Requeued(JobDir):
    """A job that is looked at: Slurm requeues it before the look of the number `moment`, and its next run begins some
    looks later."""

    left = 0

    @classmethod
    def at(cls, moment: int) -> Requeued:
        """The directory of a job that runs."""
        job, lock = create_job("run-1", new_token(), batch=True)
        os.close(lock)
        job.batch.mkdir()
        write_batch(job, "12")
        cls.left = moment
        found = cls(job.path)
        found.run("first, and longer than the other one")
        return found

    def run(self, text: str) -> None:
        """Let a run begin, whose events and logs have this text."""
        write_status(self, RUNNING)
        log = EventLog(self.events, 1)
        log.write("start", text)
        log.close()
        folder = self.worker_logs(WorkerId("actor", 0, 0))
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(f"{text}\n")

    def look(self) -> None:
        """Count a look."""
        cls = type(self)
        cls.left -= 1
        match cls.left:
            case -1:
                _, lock = create_job("run-1", new_token(), batch=True, restarts=1)
                os.close(lock)
            case -5:
                self.run("second")
            case -12:
                write_status(self, replace(RUNNING, phase="succeeded", ended=2.0, code=0))

    def alive(self) -> bool:
        """Look."""
        self.look()
        return JobDir.alive(self)

    def read_json(self, name: str) -> dict[str, Any]:
        """Look."""
        self.look()
        return JobDir.read_json(self, name)


@pytest.mark.starts_processes
@pytest.mark.parametrize("moment", range(2, 9))
@pytest.mark.parametrize("command", ["events", "logs"])
def test_what_is_followed_goes_on_in_the_next_run(
    command: str,
    moment: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text("#!/bin/sh\necho JobId=12 JobState=PENDING Reason=BeginTime\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    job = Requeued.at(moment)
    monkeypatch.setattr(events, "find_here", lambda *_: job)
    monkeypatch.setattr(logs, "find_here", lambda *_: job)
    monkeypatch.setattr(logs, "_wait_for_change", lambda *_: None)
    assert call(command, ["run-1", "-f"]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert [line for line in shown if "first" not in line] == shown[-1:]
    assert shown[-1].endswith("second")
