"""The end of warm processes that ``unirun warm stop`` has asked to end."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.cli.in_process import run_cli
from unirun.cli import warm


@pytest.mark.starts_processes
def test_each_process_has_ended_when_it_is_told_so_and_one_that_is_not_warm_any_more_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm, "WARM_STOP_TIMEOUT", 0.05)
    commands = ("echo; exec sleep 100", "trap '' TERM; echo; exec sleep 100", "echo; exec sleep 100")
    found = [subprocess.Popen(["sh", "-c", each], stdout=subprocess.PIPE) for each in commands]
    for each in found:
        assert each.stdout is not None
        with each.stdout as out:
            out.readline()
    other = found[-1]
    described = [SimpleNamespace(folder=Path(str(each.pid)), description=each) for each in found]
    monkeypatch.setattr(warm, "running", lambda: described)
    monkeypatch.setattr(warm, "is_alive", lambda folder: folder != Path(str(other.pid)))
    monkeypatch.setattr(warm, "abandon_starting", lambda: 0)
    assert warm.main(SimpleNamespace(idle="30m", action="stop")) == 0
    assert other.poll() is None
    try:
        ends = [each.wait(10.0) for each in found[:-1]]
    finally:
        for each in found:
            each.kill()
            each.wait()
    assert ends == [-signal.SIGTERM, -signal.SIGKILL]
    told = [f"process {each.pid} has ended" for each in found[:-1]]
    assert capsys.readouterr().out.splitlines() == told


def test_a_warm_process_that_would_end_at_once_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("warm", "--idle", "0s") == 2
    assert "--idle 0s: a warm process would end before a job can use it" in capsys.readouterr().err
