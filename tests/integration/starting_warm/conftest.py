"""Fixtures of these tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import Running, Unirun, gone, processes_of, swept
from tests.integration.warm import ONE_THREAD, Borrowing, Warm, warm_in
from tests.waiting import WAIT_TIMEOUT


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """As users start them: these tests are about them."""
    with warm_in(tmp_path_factory.mktemp("warm")) as processes:
        yield processes


@pytest.fixture
def unirun(warm: Warm, tmp_path: Path) -> Iterator[Unirun]:
    """The command, for jobs that tell that they are warm. The warm processes are to be as they were."""
    before = set(warm.pids)
    command = Borrowing(tmp_path, warm)
    with swept(command):
        yield command

    def tells(job: Running) -> bool:
        assert isinstance(job.popen.args, list | tuple)
        return "-v" in job.popen.args

    jobs = [job for job in command.started if tells(job)]
    assert all("start: warm" in job.text for job in jobs if "start: " in job.text), jobs[0].text
    assert set(warm.pids) == before


@pytest.fixture
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """A warm process of one test."""
    with warm_in(tmp_path_factory.mktemp("own"), env=ONE_THREAD) as process:
        yield process


@pytest.fixture
def light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment in which to start warm processes that import nothing: the same in a tenth of the time."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("UNIRUN_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("UNIRUN_WARM", raising=False)
    home = tmp_path / "home"
    yield {**os.environ, "UNIRUN_HOME": str(home)}
    deadline = time.monotonic() + WAIT_TIMEOUT
    while (left := processes_of(home)) and time.monotonic() < deadline:
        gone(next(iter(left)), deadline - time.monotonic())
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
