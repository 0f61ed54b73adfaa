"""The processes of a job that this command has started, or whose parent it has become."""

from __future__ import annotations

import os
import signal
import time

from unirun.launcher.local import Launched
from unirun.launcher.process import kill_children
from unirun.rendezvous import JobDir

FAREWELL = 5.0
"""Seconds that the master and the agents have to leave after the job's end."""

LAST_WORDS = 1.0
"""Seconds after the end of the last agent in which a master may still be heard."""

LOOK_AGAIN = 0.01
"""Seconds between two looks whether the job has been taken up."""

_SAYS = "unirun-master: "


class Processes:
    """The agents, and the masters one after another. `master` is the one that leads now."""

    def __init__(self, launched: Launched) -> None:
        self._launched = launched
        self._exits: dict[int, int] = {}
        self._agents_gone: float | None = None
        self._stopping = False
        self.master = launched.master

    def refusal(self, led: bool) -> int | None:
        """The exit code of the first master when it has refused to lead (`led`: one has led already)."""
        first = self._wait(self._launched.master, 0.0)
        return first if not led and first is not None and 0 < first < 128 else None

    def given_up(self, led: bool) -> bool:
        """Whether no master will be found any more: nobody is left to start one, or the first has refused to lead
        (`led`: one has led already)."""
        if self.refusal(led) is not None:
            return True
        if any(self._wait(agent, 0.0) is None for agent in self._launched.agents):
            return False
        self._agents_gone = self._agents_gone or time.monotonic()
        return time.monotonic() > self._agents_gone + LAST_WORDS

    def taken_up(self, job: JobDir) -> bool:
        """Wait until a master has brought the job to its store; False when the first has refused to lead, or nobody is
        left to lead. A store that is away is given up by the master."""
        while job.first_context() is not None:
            if self.given_up(led=False):
                return False
            time.sleep(LOOK_AGAIN)
        return True

    def reap(self) -> None:
        """Leave no zombie of an agent that is gone while the job goes on without it."""
        for agent in self._launched.agents:
            self._wait(agent, 0.0)

    def stop_agents(self) -> None:
        """Let the agents end their workers and themselves."""
        if not self._stopping:
            self._stopping = self._signal(signal.SIGTERM)

    def kill_agents(self) -> None:
        """End the agents that do not end; their workers end with them."""
        self._signal(signal.SIGKILL)

    def end(self, led: bool = True, farewell: float | None = None) -> int | None:
        """Leave nothing behind: wait for the processes, each kind `farewell` seconds, then kill what is left.
        Returns the first master's exit.

        As long as nobody has `led` the job, there is nothing that could end in order.
        """
        farewell = FAREWELL if farewell is None else farewell
        code = self._wait(self._launched.master, 0.0)
        if self.refusal(led) is not None:
            self._signal(signal.SIGKILL)
        elif code:
            self.stop_agents()
        for pids in (self._launched.agents, (self._launched.master, self.master)):
            deadline = time.monotonic() + farewell
            for pid in pids:
                self._wait(pid, deadline - time.monotonic())
        kill_children()
        return code

    def _signal(self, signum: signal.Signals) -> bool:
        """Send it to every agent that lives; whether there is one."""
        living = [agent for agent in self._launched.agents if self._wait(agent, 0.0) is None]
        for agent in living:
            os.kill(agent, signum)
        return bool(living)

    def _wait(self, pid: int, timeout: float) -> int | None:
        """Wait for a child; its exit as a shell gives it, None while it lives."""
        end = time.monotonic() + timeout
        while pid not in self._exits:
            try:
                found, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                return None
            if found:
                code = os.waitstatus_to_exitcode(status)
                self._exits[pid] = 128 - code if code < 0 else code
            elif time.monotonic() >= end:
                return None
            else:
                time.sleep(0.005)
        return self._exits[pid]


def last_words(job: JobDir) -> str:
    """The line that a master has written last."""
    try:
        lines = job.master_log.read_text(errors="backslashreplace").splitlines()
    except OSError:
        return ""
    return next((line.removeprefix(_SAYS) for line in reversed(lines) if line.startswith(_SAYS)), "")


def masters_words(job: JobDir) -> str:
    """What the first master has written before it ended."""
    try:
        text = job.master_log.read_text()
    except OSError:
        return ""
    return text.removeprefix(_SAYS).partition(f"\n{_SAYS}")[0].rstrip()
