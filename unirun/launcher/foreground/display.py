"""Show a job in the foreground: output of its workers, the live line, notes, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

from unirun.launcher.foreground.console import Console, Prefixer, shown
from unirun.launcher.foreground.terminal import warn
from unirun.launcher.local import RunningJob
from unirun.launcher.logs import LogFollower
from unirun.spec.job import RoleSpec
from unirun.values import WorkerId
from unirun.wire.messages import Ended, Message, RoleChanged, WorkerOutput
from unirun.wire.reports import Notice


class Display:
    """Shows one job on a console. `roles` has the latest `RoleChanged` of each role."""

    def __init__(self, running: RunningJob, console: Console) -> None:
        self._job, self._spec, self._console = running.job, running.spec, console
        self._node, self._member, self._copied = running.node, running.member, running.copied
        spec = running.spec
        template = spec.log.line_prefix_template or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        self._prefix = Prefixer(spec, console.colour, template)
        self._follower = LogFollower()
        self._followed: dict[WorkerId, bool] = {}
        self._spawner = "importing torch"
        self._began = time.monotonic()
        self._up = False
        self.roles: dict[str, RoleChanged] = {}

    def begin(self) -> None:
        """Print the job's id and log directory, and follow its event log with ``event_log=console``."""
        self._console.note(f"job {self._spec.run_id}, logs in {self._job.logs.resolve()}")
        if self._spec.event_log == "console":
            self._follower.follow(self._job.events, lambda data: self._console.lines(2, b"", data))

    def show(self, message: Message) -> None:
        """Show a message of the master."""
        match message:
            case WorkerOutput(node=node):
                if self._node in ("", node):
                    self._follow(message)
            case RoleChanged():
                self.roles[message.role] = message
            case Notice(source, text):
                if text.startswith("spawner ready"):
                    self._spawner = text
                else:
                    self._console.note(f"{source}: {text}")
        self._draw()

    async def tick(self) -> None:
        """Keep the time in the live line up to date, until all ranks run."""
        while not self._up:
            self._draw()
            await asyncio.sleep(0.2)

    def finish(self, timeout: float | None = None) -> None:
        """Show the rest of the workers' output, for at most `timeout` seconds."""
        self._follower.finish(timeout)

    def tell_end(self, ended: Ended) -> None:
        """Print how the job has ended."""
        seconds = time.monotonic() - self._began
        if ended.code == 0:
            self._console.note(f"job {self._spec.run_id} succeeded after {seconds:.1f} s")
        elif ended.phase == "stopped":
            self._console.note(f"job {self._spec.run_id} stopped ({ended.report}), exit code {ended.code}")
        else:
            if not self._member:
                self._console.error(ended.report)
            self._console.error(f"job {self._spec.run_id} {ended.phase}, exit code {ended.code}")

    def _follow(self, output: WorkerOutput) -> None:
        worker, before = output.worker, self._followed.get(output.worker)
        self._followed[worker] = output.quiet
        if output.quiet:
            if before is False:
                self._release(worker)
            return
        if before is not None:
            return
        logs = self._job.worker_logs(worker)
        prefix = self._prefix(worker, output.local_rank, output.node)
        if (predecessor := worker.before) is not None and self._followed.get(predecessor) is not True:
            self._release(predecessor)
        for stream, name in ((1, "stdout"), (2, "stderr")):
            if shown(self._spec.log, output.local_rank, stream):
                if self._copied:
                    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
                    (logs / f"{name}.log").touch(mode=0o600)
                self._follower.follow(
                    logs / f"{name}.log",
                    lambda data, stream=stream: self._console.lines(stream, prefix, data),  # type: ignore[misc]
                    parts=not prefix,
                )

    def _release(self, worker: WorkerId) -> None:
        """Show the rest of the output of a worker, and no more."""
        for name in ("stdout", "stderr"):
            self._follower.release(self._job.worker_logs(worker) / f"{name}.log")

    def _draw(self) -> None:
        """Draw the live line until all ranks run, then remove it."""
        up = len(self.roles) == len(self._spec.roles) and all(
            role.running == role.total for role in self.roles.values()
        )
        if up:
            if not self._up:
                seconds = time.monotonic() - self._began
                total = sum(role.total for role in self.roles.values())
                self._console.live("")
                ranks = f"{total} rank{'s' * (total != 1)}"
                roles = f"{len(self.roles)} role{'s' * (len(self.roles) != 1)}"
                self._console.note(f"{ranks} of {roles} up after {seconds:.1f} s")
            self._up = True
            return
        if not self._up:
            parts = [
                progress(role, self.roles[role.name].running if role.name in self.roles else 0)
                for role in self._spec.roles
            ]
            joined = any(role.phase != "waiting" for role in self.roles.values())
            seconds = time.monotonic() - self._began
            # The most important first, as a narrow terminal cuts the rest.
            words = [f"{seconds:.1f} s", *parts, self._spawner if joined else "waiting for the nodes"]
            self._console.live("  ".join(words))


def progress(role: RoleSpec, up: int) -> str:
    """``actor 3/4``, or ``engine 1 of 2 ready``."""
    return f"{role.name} {up} of {role.count} ready" if role.ready else f"{role.name} {up}/{role.count}"


def pass_on_error(ended: Ended, path: str | None) -> None:
    """Write the root cause to the error file `path` of the caller of `unirun`, as torchrun does."""
    if path is None:
        return
    try:
        error = json.loads(Path(ended.error_file).read_text())
    except (OSError, ValueError):
        # A worker killed by a signal has no error file; use the report.
        extra = {"py_callstack": ended.report, "timestamp": str(int(time.time()))}
        error = {"message": {"message": ended.report.partition("\n")[0], "extraInfo": extra}}
    if isinstance(error.get("message"), dict):
        error["message"]["errorCode"] = ended.code
    try:
        Path(path).write_text(json.dumps(error))
    except OSError as failed:
        warn(f"the error file {path} cannot be written: {failed.strerror}")
