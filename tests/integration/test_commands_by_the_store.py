"""``status``, ``ls``, ``stop`` and ``gc`` of jobs that are found by their store."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import eventually

from .harness import EXEC, Script, Unirun
from .serving import COMMAND_TIMEOUT, SERVE_SCRIPT, end_well


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

    def test_status_by_the_store_survives_the_death_of_the_master(
        self, unirun: Unirun, elsewhere: Unirun, script: Script, url: str
    ) -> None:
        job = unirun.start(*EXEC, "--store", url, "--rdzv-id", "mine", "--role", "a", script(SERVE_SCRIPT))
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
        eventually(lambda: unirun.status()["epoch"] == 2, "the status has it")
        (row,) = elsewhere("ls", env={"UNIRUN_STORE": url}, within=COMMAND_TIMEOUT).out.splitlines()[1:]
        assert row.split()[0:2] == ["mine", "running"]
        assert row.endswith(f"  {socket.gethostname()}:{second['pid']}")
        for command in ("stop", "logs"):
            refused = elsewhere(command, "mine", "--store", url, within=COMMAND_TIMEOUT)
            assert (refused.code, f"runs on host {socket.gethostname()}" in refused.err) == (2, True)
        end_well(unirun, job)
        ended = seen()
        assert (ended["phase"], ended["code"], ended["leader"]) == ("succeeded", 0, None)

    def test_gc_by_the_store_clears_only_a_finished_job(
        self, unirun: Unirun, elsewhere: Unirun, script: Script, url: str
    ) -> None:
        job = unirun.start(
            *EXEC,
            "--store",
            url,
            "--rdzv-id",
            "mine",
            "--log-dir",
            unirun.root / "logs",
            script(SERVE_SCRIPT),
        )
        job.lines("line")
        for command in (unirun, elsewhere):
            refused = command("gc", "mine", "--store", url)
            assert (refused.code, "job mine is running" in refused.err) == (2, True), refused.err
        end_well(unirun, job)
        unirun(*EXEC, "--store", url, "--rdzv-id", "mine2", script(""))
        assert "0 jobs removed" in unirun("gc", within=COMMAND_TIMEOUT).out
        cleared = unirun("gc", "mine", within=COMMAND_TIMEOUT)
        assert (cleared.code, "1 job removed" in cleared.out) == (0, True), cleared.err
        assert unirun.job_dir().name == "mine2"
        assert [*(unirun.root / "logs").iterdir()] == []
        (row,) = elsewhere("ls", "--store", url).out.splitlines()[1:]
        assert row.startswith("mine2  succeeded")
        assert "1 job removed" in elsewhere("gc", "--store", url, "--older-than", "0s").out
        assert len(elsewhere("ls", "--store", url).out.splitlines()) == 1

    def test_a_relative_store_path_is_the_same_file_in_every_directory(
        self, unirun: Unirun, script: Script
    ) -> None:
        started = unirun("-d", *EXEC, "--store", "sqlite:relative.db", script(SERVE_SCRIPT))
        assert started.code == 0, started.err
        eventually(lambda: unirun.status()["roles"][0]["phase"] == "running", "the rank runs")
        folder = unirun.root / "folder"
        folder.mkdir()
        assert unirun("stop", cwd=folder).code == 0
        assert [*folder.iterdir()] == []
