"""A job that cannot be launched leaves nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from unirun.collocation import parse_fake
from unirun.collocation.host import told_topology
from unirun.errors import JobError
from unirun.launcher import launch as launching
from unirun.launcher.launch import launch
from unirun.launcher.local import AgentProcess
from unirun.launcher.planned import plan
from unirun.observe.jobdir import job_at
from unirun.spec.parse import parse_job


class FakeAgent(AgentProcess):
    """The process of an agent; the second one cannot be started if it is `alone`."""

    made: list[FakeAgent]
    alone = False

    def __init__(self, log: Path, early: object = None, *, stdin: bool = False) -> None:
        if self.alone and self.made:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.made.append(self)
        self.ended = False

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("trouble", ["the disk is full", "no process is left", "Ctrl-C"])
def test_a_job_that_is_not_launched_leaves_neither_directory_nor_agent(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    monkeypatch.setattr(launching, "AgentProcess", FakeAgent)
    FakeAgent.made, FakeAgent.alone = [], trouble == "no process is left"

    def fail(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if "disk" in trouble else KeyboardInterrupt

    monkeypatch.setattr(launching, "write_status" if "disk" in trouble else "bind", fail)
    roles = {"actor": {"count": 2, "program": "true", "slots": 1}}
    spec = parse_job({"roles": roles}, count_slots=lambda _: 1, run_id="job-1")
    planned = plan(spec, parse_fake("fake:nodes=2,devices=1"), told_topology)
    before = os.listdir("/proc/self/fd")
    with pytest.raises((JobError, OSError, KeyboardInterrupt)):
        launch(planned)
    assert not job_at("job-1").path.exists()
    assert all(agent.ended for agent in FakeAgent.made)
    assert len(os.listdir("/proc/self/fd")) == len(before)
