"""The command of ``--notify-command``, which the master runs when something has failed, has recovered, or is over.

The job waits for none of them while it runs. At its end, when its ranks are gone, the master waits a few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterable
from functools import partial
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from unirun.observe.events import LoggedEvent, role_of
from unirun.observe.jobdir import ProcessWatch
from unirun.wire.reporting import report

COMMAND_TIMEOUT = 60
"""Seconds that a command may take."""

END_TIMEOUT = 4.0
"""The same at the end of the job, for all that run then."""

MOST = 16
"""Commands about failures that run at a time. Many ranks fail together."""

MAX_VARIABLE = 100_000
"""Bytes of an event in an environment variable: the kernel takes 128 KiB. Of a longer one the details are left out."""


class Occasions:
    """The events that people want to know of. It is told all events, also those of the masters before."""

    def __init__(self, before: Iterable[LoggedEvent] = ()) -> None:
        self._failed: set[str] = set()
        for event in before:
            self.occasion(event)

    def occasion(self, event: LoggedEvent) -> str:
        """``failure``, ``recovery`` (all ranks of a role run again after a failure), ``end``, or nothing."""
        if event.kind == "failure":
            self._failed.add(role_of(event))
        elif event.kind == "running" and role_of(event) in self._failed:
            self._failed.remove(role_of(event))
            return "recovery"
        return event.kind if event.kind in ("failure", "end") else ""


class Notifier:
    """Runs `command` for the events of job `run_id` that are an occasion; `before` are those of earlier masters."""

    def __init__(self, command: str, run_id: str, before: Iterable[LoggedEvent]) -> None:
        self._command, self._run_id = command, run_id
        self._occasions = Occasions(before if command else ())
        self._running: dict[int, ProcessWatch] = {}
        self._none_runs = asyncio.Event()

    def tell(self, event: LoggedEvent) -> None:
        """Run the command if `event` is an occasion for it."""
        if not self._command or not (occasion := self._occasions.occasion(event)):
            return
        if occasion == "failure" and len(self._running) >= MOST:
            report(f"unirun-master: {MOST} notify commands run; there is none for: {event.text}")
            return
        try:
            process = self._start(occasion, event)
        except OSError as error:
            report(f"unirun-master: the notify command cannot be run: {error}")
            return
        self._none_runs.clear()
        self._running[process.pid] = ProcessWatch(process.pid, partial(self._ended, process))

    def _start(self, occasion: str, event: LoggedEvent) -> subprocess.Popen[bytes]:
        whole, short = (
            _as_json(self._run_id, occasion, each) for each in (event, replace(event, details={}))
        )
        variable = whole if len(whole) <= MAX_VARIABLE else short
        # The kernel keeps the text, however long it is and whether or not the command reads it.
        stdin = os.memfd_create("unirun-event")
        try:
            os.write(stdin, whole)
            os.lseek(stdin, 0, os.SEEK_SET)
            return subprocess.Popen(
                ["timeout", "-k", "5", str(COMMAND_TIMEOUT), "/bin/sh", "-c", self._command],
                env={**os.environ, "UNIRUN_EVENT": variable.decode()},
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(stdin)

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        del self._running[process.pid]
        if not self._running:
            self._none_runs.set()
        if (code := process.wait()) != 0:
            why = f"was ended after {COMMAND_TIMEOUT} s" if code == 124 else f"ended with exit code {code}"
            report(f"unirun-master: the notify command {why}")

    async def close(self) -> None:
        """Wait for the commands that run, and kill what is left at the deadline."""
        if self._running:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_TIMEOUT):
                    await self._none_runs.wait()
        for pid, watch in self._running.items():
            watch.close()
            report(f"unirun-master: a notify command has not ended within {END_TIMEOUT:g} s of the end")
            # `timeout` leads a session of its own.
            os.killpg(pid, signal.SIGKILL)


def _as_json(run_id: str, occasion: str, event: LoggedEvent) -> bytes:
    value: dict[str, Any] = {"job": run_id, "occasion": occasion, **to_builtins(event)}
    return json.dumps(value).encode()
