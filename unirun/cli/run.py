"""``unirun script.py``: check, launch, show, pass signals on, and leave with the job's exit code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from unirun.cli.compose import plan_job
from unirun.cli.console import Console, Prefixer, shown
from unirun.cli.options import CommandLine, parse
from unirun.collocation import Placement
from unirun.errors import EXIT_FAILURE, JobError, RendezvousError, UnirunError, WireError
from unirun.launcher import Launched, launch
from unirun.launcher.agent import hold_endpoints
from unirun.launcher.logs import LogFollower
from unirun.launcher.process import adopt_orphans, kill_children
from unirun.master.shell import Master
from unirun.rendezvous import JobDir, create_job
from unirun.spec import JobSpec
from unirun.wire import Stream, connect, listen, load_token, new_token
from unirun.wire.messages import Attach, Ended, Message, Notice, RoleChanged, Stop, WorkerStarted

FAREWELL = 5.0
"""Seconds that the master and the agent have to leave after the job's end."""


def main(argv: Sequence[str]) -> int:
    """Run the job that `argv` describes. Returns the exit code."""
    line = parse(argv)
    spec, placement = plan_job(line)
    return start(line, spec, placement)


def start(line: CommandLine, spec: JobSpec, placement: Placement) -> int:
    """Launch a planned job; in the foreground follow it to its end."""
    detach = bool(line.options.get("detach"))
    endpoints = hold_endpoints(spec)
    job, lock = create_job(spec.run_id, new_token(), spec.log.dir)
    try:
        job.write_json("spec.json", spec.to_json())
        listener = listen(job.master_socket)
    except OSError as error:
        raise JobError(
            f"the job's directory {job.path} cannot be written: {error.strerror}",
            "free some space, or set UNIRUN_HOME to another directory",
        ) from error

    def run_master(owner: int | None, agent: int) -> None:
        asyncio.run(Master(job, spec, placement, socket.socket(fileno=of_master[1])).run(owner, agent))

    if not detach:
        adopt_orphans()
    of_master = [lock, listener.detach()]
    launched = launch(
        job, spec, placement.nodes[0], endpoints, run_master, of_master=of_master, detach=detach
    )
    if detach:
        print(spec.run_id)
        print(f"unirun: started; follow it with: unirun logs -f {spec.run_id}", file=sys.stderr)
        return 0
    console = Console(quiet=bool(line.options.get("quiet")))
    return asyncio.run(_Session(job, spec, placement, console, launched).run())


class _Session:
    """The command in the foreground: it follows one job."""

    def __init__(
        self, job: JobDir, spec: JobSpec, placement: Placement, console: Console, launched: Launched
    ) -> None:
        self._job, self._spec, self._placement = job, spec, placement
        self._console, self._launched = console, launched
        template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        self._prefix = Prefixer(spec, console.colour, template)
        self._local_ranks = {(a.role, a.rank): a.local_rank for a in placement.assignments}
        self._follower = LogFollower()
        self._roles: dict[str, RoleChanged] = {}
        self._spawner = "importing torch"
        self._began = time.monotonic()
        self._up = False
        self._followed: set[WorkerStarted] = set()
        self._over: asyncio.Event | None = None

    async def run(self) -> int:
        """Follow the job to its end. Returns its exit code."""
        try:
            master = await connect(self._job.master_socket, load_token(self._job.token))
        except (WireError, RendezvousError) as error:
            return self._master_failed(error)
        self._catch_signals(master)
        master.send(Attach())
        self._console.note(f"job {self._spec.run_id}, logs in {self._job.logs.resolve()}")
        if self._spec.event_log == "console":
            self._follower.follow(self._job.events, lambda data: self._console.lines(2, b"", data))
        ticker = asyncio.create_task(self._tick())
        try:
            while True:
                message = await master.receive()
                if isinstance(message, Ended):
                    break
                self._show(message)
        except WireError as error:
            return self._master_failed(error)
        finally:
            ticker.cancel()
            self._console.live("")
        await master.close()
        _reap(self._launched)
        await self._show_rest(message)
        return message.code

    def _catch_signals(self, master: Stream) -> None:
        loop = asyncio.get_running_loop()

        def passed_on(signum: signal.Signals) -> None:
            if self._over is not None:
                self._over.set()
                return
            master.send(Stop(int(signum), f"got {signum.name}"))
            self._console.note(
                f"{signum.name}: stopping; SIGKILL follows after {self._spec.shutdown_timeout:g} s, "
                "or at once when it comes again"
            )

        for name in self._spec.signals:
            signum = signal.Signals[name]
            # What nohup or a shell's & has set to be ignored stays ignored.
            if signal.getsignal(signum) != signal.SIG_IGN:
                loop.add_signal_handler(signum, passed_on, signum)

    def _show(self, message: Message) -> None:
        match message:
            case WorkerStarted():
                self._follow(message)
            case RoleChanged():
                self._roles[message.role] = message
            case Notice(source, text):
                if text.startswith("spawner ready"):
                    self._spawner = text
                else:
                    self._console.note(f"{source}: {text}")
        self._draw()

    def _follow(self, worker: WorkerStarted) -> None:
        if worker in self._followed:
            return
        self._followed.add(worker)
        logs = self._job.worker_logs(worker.role, worker.rank, worker.incarnation)
        local_rank = self._local_ranks[worker.role, worker.rank]
        prefix = self._prefix(worker.role, worker.rank, local_rank)
        for stream, name in ((1, "stdout"), (2, "stderr")):
            if worker.incarnation > 0:
                before = self._job.worker_logs(worker.role, worker.rank, worker.incarnation - 1)
                self._follower.release(before / f"{name}.log")
            if shown(self._spec.log, local_rank, stream):
                self._follower.follow(
                    logs / f"{name}.log",
                    lambda data, stream=stream: self._console.lines(stream, prefix, data),  # type: ignore[misc]
                )

    async def _tick(self) -> None:
        while not self._up:
            self._draw()
            await asyncio.sleep(0.2)

    def _draw(self) -> None:
        """The live line while roles come up; it goes away once all ranks run."""
        up = len(self._roles) == len(self._spec.roles) and all(
            role.running == role.total for role in self._roles.values()
        )
        if up:
            if not self._up:
                seconds = time.monotonic() - self._began
                total = sum(role.total for role in self._roles.values())
                self._console.live("")
                ranks = f"{total} rank{'s' * (total != 1)}"
                roles = f"{len(self._roles)} role{'s' * (len(self._roles) != 1)}"
                self._console.note(f"{ranks} of {roles} up after {seconds:.1f} s")
            self._up = True
            return
        if not self._up:
            parts = [
                f"{name} {self._roles[name].running if name in self._roles else 0}/{total}"
                for name, total in ((role.name, role.count) for role in self._spec.roles)
            ]
            joined = any(role.phase != "waiting" for role in self._roles.values())
            rendezvous = "rendezvous done" if joined else "rendezvous …"
            seconds = time.monotonic() - self._began
            words = [self._spec.run_id, f"{seconds:.1f} s", self._spawner, rendezvous, *parts]
            self._console.live("  ".join(words))

    def _master_failed(self, error: UnirunError) -> int:
        """The master is gone: the agent ends the workers; see that it did, and say what is known."""
        deadline = time.monotonic() + FAREWELL
        while time.monotonic() < deadline and _wait(self._launched.agent, 0.05) is None:
            continue
        # Asked before the rest is killed: that reaps everything there is.
        status = _wait(self._launched.master, FAREWELL)
        kill_children()
        self._follower.finish(FAREWELL)
        self._console.error(f"the master of job {self._spec.run_id} is gone: {error}")
        with contextlib.suppress(OSError):
            text = (self._job.path / "master.log").read_text().rstrip()
            if text:
                self._console.error(text)
        self._console.close(FAREWELL)
        return status or EXIT_FAILURE

    async def _show_rest(self, ended: Ended) -> None:
        """Show what is left and how the job ended; a signal ends the wait for a reader that does not read."""
        if ended.phase == "failed":
            pass_on_error(ended, os.environ.get("TORCHELASTIC_ERROR_FILE"))
        loop = asyncio.get_running_loop()
        over = self._over = asyncio.Event()

        def show() -> None:
            self._follower.finish()
            self._tell_end(ended)
            self._console.close()
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(over.set)

        threading.Thread(target=show, name="unirun-end", daemon=True).start()
        await over.wait()

    def _tell_end(self, ended: Ended) -> None:
        seconds = time.monotonic() - self._began
        if ended.code == 0:
            self._console.note(f"job {self._spec.run_id} succeeded after {seconds:.1f} s")
        elif ended.phase == "stopped":
            self._console.note(f"job {self._spec.run_id} stopped ({ended.report}), exit code {ended.code}")
        else:
            self._console.error(ended.report)
            self._console.error(f"job {self._spec.run_id} {ended.phase}, exit code {ended.code}")


def pass_on_error(ended: Ended, path: str | None) -> None:
    """Write the root cause to the error file that whoever started `unirun` has asked for, as torchrun does."""
    if path is None:
        return
    try:
        error = json.loads(Path(ended.error_file).read_text())
    except (OSError, ValueError):
        # A signal leaves no error file; the report says what there is to say.
        extra = {"py_callstack": ended.report, "timestamp": str(int(time.time()))}
        error = {"message": {"message": ended.report.splitlines()[0], "extraInfo": extra}}
    if isinstance(error.get("message"), dict):
        error["message"]["errorCode"] = ended.code
    try:
        Path(path).write_text(json.dumps(error))
    except OSError as failed:
        print(f"unirun: the error file {path} cannot be written: {failed.strerror}", file=sys.stderr)


_exits: dict[int, int] = {}


def _wait(pid: int, timeout: float) -> int | None:
    """Wait for a child; its exit as a shell gives it, None while it lives."""
    if pid in _exits:
        return _exits[pid]
    end = time.monotonic() + timeout
    while True:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if found:
            code = os.waitstatus_to_exitcode(status)
            _exits[pid] = 128 - code if code < 0 else code
            return _exits[pid]
        if time.monotonic() >= end:
            return None
        time.sleep(0.005)


def _reap(launched: Launched) -> None:
    """Leave nothing behind: wait for both processes, then kill whatever is left."""
    for pid in (launched.master, launched.agent):
        _wait(pid, FAREWELL)
    kill_children()
