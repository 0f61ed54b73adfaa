"""The masters of a job in sequence, and a job whose trainer makes calls all the time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import StoreError
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.election import Leader, job_prefix, leader_of
from unirun.rendezvous.store.url import open_store

from .harness import SCRIPTS, START_TIMEOUT, Result, Running, Unirun, alive, state_of


class _Over(Exception):
    """The job has ended; there is no further master."""


class Masters:
    """The leaders of the only job in a home. `times` are the seconds from each kill until there is another leader."""

    def __init__(self, unirun: Unirun, within: float = START_TIMEOUT) -> None:
        self._unirun, self._killed = unirun, 0.0
        eventually(lambda: (unirun.home / "jobs").is_dir() and self._has_started(), "a job starts", within)
        self.job = JobDir(unirun.job_dir())
        self._store = open_store(self.job.store_url)
        self.known: Leader
        self.times: list[float] = []
        self.epoch = 0

    def _has_started(self) -> bool:
        return any((path / "state.json").exists() for path in (self._unirun.home / "jobs").iterdir())

    def leader(self) -> Leader | None:
        """The present live leader, once the job's status names it."""
        with contextlib.suppress(StoreError):
            leader = leader_of(self._store, job_prefix(self.job.run_id))
            if (
                leader is not None
                and alive(leader.pid)
                and self.job.read_json("state.json")["epoch"] == leader.epoch
            ):
                return leader
        return None

    def next(self, within: float = START_TIMEOUT) -> Leader:
        """Wait for the next leader."""
        return self._await(None, within)

    def kill(self, unless_over: Running | None = None) -> None:
        """Kill the present or next leader, unless that job is over."""
        with contextlib.suppress(_Over):
            leader = self._await(unless_over, START_TIMEOUT) if self._killed or not self.epoch else self.known
            self._killed = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(leader.pid, signal.SIGKILL)

    def suspend(self) -> Leader:
        """Stop the process of the next one that leads, between two of its transactions: a process that is stopped while
        it holds the lock of an SQLite file keeps the store from all others."""
        leader = self.next()

        def stopped() -> bool:
            os.kill(leader.pid, signal.SIGSTOP)
            # It may finish a system call before that, and lock the file with it.
            eventually(lambda: state_of(leader.pid) == "T", "the master is stopped")
            if self._is_locked():
                os.kill(leader.pid, signal.SIGCONT)
                return False
            return True

        eventually(stopped, "the master is stopped between two transactions")
        return leader

    def _is_locked(self) -> bool:
        """Return True if a process writes to the store's file."""
        url = self.job.store_url
        if not url.startswith("sqlite:"):
            return False
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:"), timeout=0)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return True
        return False

    def _await(self, job: Running | None, within: float) -> Leader:
        def look() -> Leader | None:
            if job is not None and job.popen.poll() is not None:
                raise _Over
            found = self.leader()
            return found if found is not None and found.epoch > self.epoch else None

        leader = eventually(look, f"a master leads after term {self.epoch}", within)
        if self._killed:
            self.times.append(time.monotonic() - self._killed)
        self.known, self._killed, self.epoch = leader, 0.0, leader.epoch
        return leader

    def status(self) -> dict[str, Any]:
        """The job's status, from its file."""
        return self.job.read_json("state.json")

    def restarts(self) -> dict[str, int]:
        """Restarts spent by each role."""
        return {role["name"]: role["restarts"] for role in self.status()["roles"]}

    def close(self) -> None:
        self._store.close()


class SteadyJob:
    """A job whose trainer sums up the results of its calls until it is told to finish."""

    def __init__(self, unirun: Unirun, *args: object, constants: Mapping[str, float] | None = None) -> None:
        self._folder = unirun.root
        config = unirun.root / "steady.yaml"
        config.write_text(f"config: {{folder: {unirun.root}}}\n")
        roles = "adder=2@steady:Adder,thinker=1@steady:Adder"
        trainer = ("--trainer", "steady:Adding")
        argv = ("--cwd", SCRIPTS, "--config", config, "--roles", roles, *trainer, *args)
        self.job = unirun.start(*argv, constants=constants)

    def pids(self) -> list[int]:
        """Pids of the trainer and the workloads, once calls are being made."""
        (line,) = self.job.lines(r"pids ([\d ]+)$")
        return [int(pid) for pid in line.split()]

    @property
    def rounds(self) -> int:
        """Number of rounds of calls done."""
        with contextlib.suppress(OSError, ValueError):
            return int(Path(self._folder, "rounds").read_text())
        return 0

    def goes_on(self, within: float = WAIT_TIMEOUT) -> None:
        """Wait until some more calls were made."""
        before = self.rounds
        eventually(lambda: self.rounds > before + 3, "calls go on", within)

    def finish(self) -> None:
        """Tell the trainer to finish."""
        Path(self._folder, "enough").touch()

    def end(self, within: float = START_TIMEOUT) -> dict[str, Any]:
        """Finish, if not done yet, and wait for the end. Returns the trainer's output."""
        self.finish()
        return said(self.job.end(within))


def said(result: Result) -> dict[str, Any]:
    """The output of the trainer of a `Steady` job; its sums are correct."""
    assert result.code == 0, result.err
    (line,) = (line for line in result.lines if line.startswith("{"))
    row: dict[str, Any] = json.loads(line)
    rounds = row["rounds"]
    assert (row["blocking"], row["flying"]) == (rounds * rounds, rounds * (rounds - 1) // 2)
    return row


def calm(row: dict[str, Any]) -> bool:
    """Return True if no worker was restarted."""
    return not row["lost"] and row["before"] == row["after"] and all(inc == 0 for _, inc in row["after"])
