"""Follow a job in the foreground: show its output, forward signals, and wait for its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import convert
from msgspec.structs import replace

from unirun import atomic
from unirun.errors import (
    EXIT_FAILURE,
    EXIT_RENDEZVOUS,
    AuthError,
    RendezvousError,
    StoreError,
    UnirunError,
    WireError,
)
from unirun.failover.context import load
from unirun.failover.silence import SILENCE_TIMEOUT
from unirun.failover.state import JobState
from unirun.failover.status_views import farewell, present
from unirun.launcher.foreground.console import Console, prefix_of, shown
from unirun.launcher.foreground.terminal import warn
from unirun.launcher.local import (
    JOB_EXIT_TIMEOUT,
    RunningJob,
    end_unled,
    last_line_of_masters,
    output_of_first_master,
)
from unirun.launcher.logs import LogFollower
from unirun.observe.ownership import make_private
from unirun.rendezvous.election import Leader
from unirun.rendezvous.masters import Masters, Vacant
from unirun.rendezvous.store.url import open_store
from unirun.spec.job import RoleSpec
from unirun.values import WorkerId
from unirun.wire.aio import Stream
from unirun.wire.messages import Attach, Ended, Heartbeat, PassOn, RoleChanged, Stop, WorkerOutput
from unirun.wire.reports import Message, Notice

# Show a job in the foreground: output of its workers, the live line, notes, and its end.


SCREEN = 40
"""The last lines of output that the user still sees."""

SCREEN_SIZE = 16_384
"""The most bytes of these lines."""


def without_repetition(report: str, above: Sequence[str]) -> str:
    """The report of a failure, without a traceback that is in the lines `above` it; its last lines stay."""
    lines = report.splitlines()
    first = next((n for n, line in enumerate(lines, 1) if line.startswith("root cause: ")), len(lines))
    traceback = [line.removeprefix("  ") for line in lines[first:-1]]
    if TRACEBACK not in traceback:
        return report
    rest = iter(above)
    # Lines of other ranks may be between them, torch writes the rank before each, and the report may be shorter.
    if not all(
        any(shown.endswith(line) for shown in rest) for line in traceback if not line.lstrip().startswith("…")
    ):
        return report
    last = max((n for n, line in enumerate(traceback) if not line or line.startswith("  ")), default=-1)
    words = [f"  {line}" for line in traceback[last + 1 :]]
    return "\n".join([*lines[:first], *words, "  its traceback is above", *lines[-1:]])


TRACEBACK = "Traceback (most recent call last):"


class Display:
    """Shows one job on a console. `roles` has the latest `RoleChanged` of each role."""

    def __init__(self, running: RunningJob, console: Console) -> None:
        self._running, self._job, self._spec = running, running.job, running.spec
        self._console = console
        spec = running.spec
        template = spec.log.line_prefix_template or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        self._prefix = partial(prefix_of, spec, template, console.colour)
        self._follower = LogFollower()
        self._followed: dict[WorkerId, bool] = {}
        self._spawner = "importing torch"
        self._began = time.monotonic()
        self._up = False
        self._latest = b""
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
                if self._running.node in ("", node):
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
            if self._running.owned:
                above = self._latest.decode(errors="replace").splitlines()[-SCREEN:]
                self._console.error(without_repetition(ended.report, above))
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
                if self._running.copied:
                    make_private(logs)
                    (logs / f"{name}.log").touch(mode=0o600)
                self._follower.follow(
                    logs / f"{name}.log",
                    partial(self._output, stream, prefix),
                    parts=not prefix,
                )

    def _output(self, stream: int, prefix: bytes, data: bytes) -> None:
        if self._console.beside_notes(stream):
            self._latest = (self._latest + data)[-SCREEN_SIZE:]
        self._console.lines(stream, prefix, data)

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
        error = convert(json.loads(Path(ended.error_file).read_text()), dict[str, Any])
    except (OSError, ValueError):
        # A worker killed by a signal has no error file; use the report.
        extra = {"py_callstack": ended.report, "timestamp": str(int(time.time()))}
        error = {"message": {"message": ended.report.partition("\n")[0], "extraInfo": extra}}
    if isinstance(error.get("message"), dict):
        error["message"]["errorCode"] = ended.code
    try:
        atomic.replace(Path(path), json.dumps(error), private=False)
    except OSError as failed:
        warn(f"the error file {path} cannot be written: {failed.strerror}")


NO_MASTER_POLL_INTERVAL = 0.03
"""Seconds between two attempts to reach a master while there is none."""

JOB_END_READ_TIMEOUT = 2.0
"""Seconds in which a store must tell whether a master that is gone has written the job's end there."""

AGENT_CHECK_INTERVAL = 1.0
"""Seconds of silence after which the agents are checked, once the user has sent a second signal."""

FORCED_KILL_DELAY = 2.0
"""Seconds that the master has after the second signal. Then the agents on this host are killed, and their workers with
them."""

STOPS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
"""Signals that stop the job. Others that the user names are passed on, and the job goes on."""

KEYS = frozenset((signal.SIGINT, signal.SIGQUIT))
"""Signals of the keyboard. Only they say "now" when they come after another: batch systems, service managers and
closing terminals send SIGTERM and SIGHUP more than once, and to a group as well as to each of its processes."""

_NO_READER = 128 + signal.SIGPIPE
"""The exit code when the reader of stdout is gone: a shell's code for a program ended by SIGPIPE."""

INTERRUPTED_OUTPUT_TIMEOUT = 0.5
"""Seconds to show the rest of the output after a signal at the end of the job."""

NO_MASTER_NOTICE_DELAY = 3.0
"""Seconds without a master after which the reason is shown."""


class StopRequests:
    """The user's requests to stop. They are kept for the next master, as one may die before it has written them.

    The first stops the job with its grace period; one of `KEYS` after it at once.
    """

    def __init__(self) -> None:
        self._asked: list[Stop] = []
        self._hurry: Stop | None = None

    @property
    def first(self) -> Stop | None:
        """The first request, or None."""
        return self._asked[0] if self._asked else None

    @property
    def urgent(self) -> bool:
        """True if the job should end at once."""
        return self._hurry is not None

    def add(self, stop: Stop) -> Stop:
        """Add a request. Returns it as it is sent."""
        stop = replace(stop, urgent=self.first is not None and stop.signal in KEYS)
        self._asked.append(stop)
        if stop.urgent and self._hurry is None:
            self._hurry = stop
        return stop

    def answer(self, name: str, grace: float) -> str:
        """The message to the user after the signal `name`; `grace` is in seconds."""
        if self.urgent:
            return f"{name}: killing the workers now"
        if len(self._asked) > 1:
            return f"{name}: stopping already; SIGINT (Ctrl-C) kills the workers now"
        now = "when it comes again" if self._asked[0].signal in KEYS else "at SIGINT (Ctrl-C)"
        return f"{name}: stopping; SIGKILL follows after {grace:g} s, or at once {now}"

    @property
    def for_next(self) -> list[Stop]:
        """The requests to send to the next master. One that it knows changes nothing."""
        return [stop for stop in (self.first, self._hurry) if stop is not None]


def follow(running: RunningJob, *, quiet: bool) -> int:
    """Follow a job that this process has launched until it ends. Returns its exit code."""
    return asyncio.run(JobFollower(running, Console(quiet=quiet)).run())


class JobFollower:
    """Follows one job through all its masters."""

    def __init__(self, running: RunningJob, console: Console) -> None:
        self._running, self._job, self._spec = running, running.job, running.spec
        self._console = console
        self._display = Display(running, console)
        self._masters = Masters(self._job)
        self._master: Stream | None = None
        self._requests = StopRequests()
        self._to_pass_on: list[PassOn] = []
        self._forcing: asyncio.Task[None] | None = None
        self._led, self._epoch = False, 0
        self._heard = 0.0
        self._silent: Stream | None = None
        self._alone_since = time.monotonic()
        self._told = ""
        self._trouble = "it has left no end"
        self._over: asyncio.Event | None = None
        self._unwritten: OSError | None = None

    async def run(self) -> int:
        """Follow the job until it ends. Returns its exit code."""
        self._catch_signals()
        loop = asyncio.get_running_loop()
        self._console.when_lost(lambda error: _soon(loop, self._output_lost, error))
        self._display.begin()
        ticker = asyncio.create_task(self._display.tick())
        try:
            ended = await self._follow_to_end()
        finally:
            ticker.cancel()
            if self._forcing is not None:
                self._forcing.cancel()
            self._console.live("")
            self._masters.close()
        if ended is None:
            return await self._lost()
        self._over = asyncio.Event()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        await asyncio.to_thread(self._running.end)
        await self._show_rest(ended, self._over)
        return ended.code or self._code_of_output()

    async def _follow_to_end(self) -> Ended | None:
        """Follow one master after another. Returns None when there is no other and the store has no end of the job."""
        while True:
            seat, busy = self._masters.seat, None
            self._trouble = seat.trouble or self._trouble
            if seat.leader is not None:
                try:
                    return await self._follow_master(seat.leader)
                except (RendezvousError, WireError) as error:
                    self._trouble = str(error)
                    busy = _busy(error)
            self._bear_without_master()
            if self._running.given_up(self._led, busy):
                # The first master may have led, and ended with the job, before this process has reached it.
                led = self._led or self._job.first_context() is None
                known = led and not self._requests.urgent
                state = await asyncio.to_thread(self._state_in_store) if known else None
                if state is None or (end := farewell(state)) is None:
                    return None
                for message in present(state):
                    self._display.show(message)
                return end
            await self._masters.news(NO_MASTER_POLL_INTERVAL)

    async def _follow_master(self, leader: Leader) -> Ended:
        """Follow one master until the job ends. Raises `WireError` when the master is gone before that."""
        master = await self._masters.reach(leader)
        if leader.epoch > 1 and not self._led and not self._job.uid_before:
            # (Terms go on from those of the run before in a job that Slurm has requeued.)
            self._console.note("the job's first master has died; another leads")
        elif self._silent is not None and leader.epoch == self._epoch:
            self._console.note("the job's master answers again")
        elif self._led:
            # Where the store is on another host, terms are not known.
            term = f" (term {leader.epoch})" if leader.epoch else ""
            self._console.note(f"the job's master has died; another leads{term}")
        self._led, self._epoch = True, leader.epoch
        self._heard = time.monotonic()
        self._running.led_by(leader.pid)
        master.send(Attach(self._running.owned, self._running.node))
        if master.remote:
            master.send(Heartbeat())
        if self._silent is not None:
            # Not before, as the end of the owner's stream ends the job.
            await self._silent.close()
            self._silent = None
        requests: list[Message] = [*self._requests.for_next, *self._to_pass_on]
        for request in requests:
            master.send(request)
        self._to_pass_on.clear()
        self._master = master
        leaving = asyncio.create_task(self._leave_when_replaced(master, leader))
        try:
            while not isinstance(message := await self._hear(master), Ended):
                self._display.show(message)
            return message
        except _Silent:
            self._silent = master
            raise
        finally:
            leaving.cancel()
            self._master = None
            self._alone_since = time.monotonic()
            if self._silent is not master:
                await master.close()

    async def _leave_when_replaced(self, master: Stream, leader: Leader) -> None:
        """Close the stream when there is a later term, as a hanging master does not."""
        while self._masters.seat.epoch <= leader.epoch:
            await self._masters.news(eager=False)
        await master.close()

    async def _hear(self, master: Stream) -> Message:
        """Receive from `master`. Raises `WireError` when it is gone, or when the wait is given up.

        A master on another host may be silent though its stream has not ended: it sends beats, which are answered.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGENT_CHECK_INTERVAL):
                    message = await master.receive()
                    self._heard = time.monotonic()
                    if not isinstance(message, Heartbeat):
                        return message
                    master.send(message)
            if master.remote and time.monotonic() > self._heard + SILENCE_TIMEOUT:
                text = f"the job's master has been silent for {SILENCE_TIMEOUT:g} s"
                self._console.note(text)
                raise _Silent(text)
            if self._requests.urgent and not self._running.copied and self._running.given_up(self._led):
                raise WireError("the master does not end a job that has no agent any more")

    def _bear_without_master(self) -> None:
        """While there is no master, let agents go on that could start one, and show the last message of the latest."""
        if time.monotonic() < self._alone_since + NO_MASTER_NOTICE_DELAY:
            return
        self._alone_since = time.monotonic()
        self._running.wake_agents()
        words = last_line_of_masters(self._job)
        if words and words != self._told:
            self._told = words
            self._console.note(f"nobody leads the job: {words}")

    async def _force(self) -> None:
        """End the job on this host without its master."""
        await asyncio.sleep(FORCED_KILL_DELAY)
        self._running.kill_agents()

    def _state_in_store(self) -> JobState | None:
        """Read the job from the store, where a master has written its end before it died."""
        if self._job.head is not None:
            return None
        try:
            store = open_store(self._job.store_url, timeout=JOB_END_READ_TIMEOUT)
            try:
                state = load(store, self._spec.run_id)
            finally:
                store.close()
        except StoreError as error:
            self._trouble = str(error)
            return None
        return state if state is not None and state.uid == self._job.uid else None

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()

        def asked_to_stop(signum: signal.Signals) -> None:
            if self._over is not None:
                self._over.set()
                return
            self._stop(Stop(int(signum), f"got {signum.name}"))
            self._running.wake_agents()
            if self._requests.urgent and self._forcing is None:
                self._forcing = loop.create_task(self._force())
            self._console.note(self._requests.answer(signum.name, self._spec.shutdown_timeout))

        # Reap agents that end before the job does.
        loop.add_signal_handler(signal.SIGCHLD, self._running.reap)
        self._running.reap()
        for name in self._spec.signals:
            signum = signal.Signals[name]
            # Signals ignored by nohup or a shell's & stay ignored.
            if signal.getsignal(signum) != signal.SIG_IGN:
                answer = asked_to_stop if signum in STOPS else self._pass_on
                loop.add_signal_handler(signum, answer, signum)

    def _stop(self, stop: Stop) -> None:
        stop = self._requests.add(stop)
        if self._master is not None:
            self._master.send(stop)

    def _pass_on(self, signum: signal.Signals) -> None:
        """Pass on a signal that does not stop the job. In a job with a command on each host, each command
        passes it on to its own host, as a batch system signals all commands."""
        message = PassOn(int(signum), self._running.node)
        if self._master is not None:
            self._master.send(message)
        else:
            self._to_pass_on.append(message)
        self._console.note(f"{signum.name}: passed on to the workers")

    def _output_lost(self, error: OSError) -> None:
        """Stdout cannot be written. Stop the job when its reader is gone (``| head``), but not on a full disk, as all
        output is in the logs."""
        self._unwritten = error
        if not isinstance(error, ConnectionError):
            where = self._job.logs.resolve()
            self._console.error(
                f"stdout cannot be written: {error.strerror}; all output of the job is in {where}"
            )
        elif self._over is None and self._requests.first is None:
            self._console.note("nobody reads the output any more: stopping")
            self._stop(Stop(int(signal.SIGTERM), "the reader of its output is gone", code=_NO_READER))

    def _code_of_output(self) -> int:
        """The exit code of the command after a successful job."""
        if self._unwritten is None:
            return 0
        return _NO_READER if isinstance(self._unwritten, ConnectionError) else EXIT_FAILURE

    async def _lost(self) -> int:
        """There will be no more master: end the remaining processes and report what is known."""
        refused = self._running.refusal(self._led)
        farewell = 0.0 if self._requests.urgent else JOB_EXIT_TIMEOUT
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        code = await asyncio.to_thread(self._running.end, self._led, farewell)
        self._display.finish(JOB_EXIT_TIMEOUT)
        words = output_of_first_master(self._job) if refused is None else end_unled(self._job, refused)
        if refused is not None and words:
            # The first master could not lead, and has logged why.
            self._console.error(words)
        elif (request := self._requests.first) is not None:
            self._console.error(f"job {self._spec.run_id} was stopped without its master: {self._trouble}")
            code = request.exit_code
        else:
            self._console.error(f"the master of job {self._spec.run_id} is gone: {self._trouble}")
            if words:
                self._console.error(words)
            if self._job.head is not None:
                self._console.error(
                    f"its state was on node {self._job.head.node} alone; with --store etcd://… the job would go on"
                )
            elif self._running.copied:
                self._console.error(
                    "too many of its nodes do not answer, or the store does not: nobody can lead it"
                )
            if self._running.copied or self._job.head is not None:
                code = EXIT_RENDEZVOUS
        self._console.close(JOB_EXIT_TIMEOUT)
        return code or EXIT_FAILURE

    async def _show_rest(self, ended: Ended, signalled: asyncio.Event) -> None:
        """Show the rest of the output and the end of the job. After a signal, do not wait for a reader that blocks."""
        if ended.phase == "failed":
            pass_on_error(ended, os.environ.get("TORCHELASTIC_ERROR_FILE"))
        loop, shown = asyncio.get_running_loop(), asyncio.Event()

        def show() -> None:
            self._display.finish()
            self._display.tell_end(ended)
            self._console.close()
            _soon(loop, shown.set)

        threading.Thread(target=show, name="unirun-end", daemon=True).start()
        events = [asyncio.create_task(event.wait()) for event in (shown, signalled)]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        with contextlib.suppress(TimeoutError):
            # The signal may have come before anything was shown, so wait a little.
            async with asyncio.timeout(INTERRUPTED_OUTPUT_TIMEOUT):
                await shown.wait()


def _busy(error: UnirunError) -> bool | None:
    """Return True if a master that could not be reached may be busy, as for `RunningJob.given_up`."""
    if isinstance(error, Vacant):
        return False
    # Its kernel has taken the connection, but its place there may be taken by strangers.
    return True if isinstance(error, WireError) and not isinstance(error, AuthError) else None


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> None:
    """Call in the thread of `loop`, unless the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


class _Silent(WireError):
    """The master does not say anything any more, and its stream has not ended."""
