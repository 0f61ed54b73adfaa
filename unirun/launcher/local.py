"""The processes of a job on this host, the master and the agents: how they are started, waited for and ended."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from msgspec import to_builtins

from unirun.errors import JobError, RendezvousError, StoreError, UnirunError
from unirun.launcher.agent import Agent, EarlySpawners
from unirun.launcher.process import (
    children,
    collect_orphans,
    die_with_parent,
    ignore_signals,
    kill_children,
    readable,
    set_title,
)
from unirun.observe.jobdir import JobDir
from unirun.observe.status import write_failure
from unirun.rendezvous.creation import command_of
from unirun.rendezvous.election import job_prefix, leader_of
from unirun.rendezvous.endpoints import BIND_TIMEOUT, hold_endpoints
from unirun.rendezvous.store.url import open_store
from unirun.spec.job import JobSpec
from unirun.wire.frames import typed
from unirun.wire.messages import AgentTask
from unirun.wire.reporting import NO_THREAD, flush, gave_up, lacks_threads, report, report_error

# The member of a job's own etcd on this node: a process that lives as long as the node's agent.

MASTER_LEAVE_TIMEOUT = 7.0
"""Seconds that a member waits at the end for the master, which gives up its term last. The master itself waits 5 s for
streams to end (`unirun.launcher.master.shell.STREAM_CLOSE_TIMEOUT`)."""

MEMBER_ANSWER_TIMEOUT = 3.0
"""Seconds in which the store must answer meanwhile: most of its members may be lost."""

MASTER_LEAVE_POLL_INTERVAL = 0.05

ETCD_EXIT_TIMEOUT = 2.0
"""Seconds that etcd has to end."""


@contextmanager
def running_member(job: JobDir, task: AgentTask) -> Iterator[frozenset[int]]:
    """Run the member of the task's node, if it has one; gives its pid. Call it before any thread is started."""
    me = next((each for each in task.etcd if each.node == task.node), None)
    if me is None:
        yield frozenset()
        return
    with open(job.path / "etcd.log", "ab") as log:
        process = subprocess.Popen(
            command_of(task.etcd, me, job, insecure=(job.path / "tls" / "insecure").exists()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    try:
        yield frozenset((process.pid,))
        with suppress(StoreError):
            _wait_for_the_master(job)
    finally:
        process.terminate()
        try:
            process.wait(ETCD_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            gave_up("the end of etcd", ETCD_EXIT_TIMEOUT)
            process.kill()
            process.wait()


def _wait_for_the_master(job: JobDir) -> None:
    """Wait until nobody leads the job. Raises `StoreError`."""
    store = open_store(job.store_url, timeout=MEMBER_ANSWER_TIMEOUT)
    try:
        end = time.monotonic() + MASTER_LEAVE_TIMEOUT
        while leader_of(store, job_prefix(job.run_id)) is not None:
            if time.monotonic() > end:
                gave_up("the master to leave the store", MASTER_LEAVE_TIMEOUT)
                break
            time.sleep(MASTER_LEAVE_POLL_INTERVAL)
    finally:
        store.close()


JOB_EXIT_TIMEOUT = 10.0
"""Seconds that the master and the agents have to leave after the job's end: more than `MASTER_LEAVE_TIMEOUT`."""

ORPHANED_MASTER_TIMEOUT = 1.0
"""Seconds after the end of the last agent in which a master may still be heard."""

TAKE_UP_POLL_INTERVAL = 0.01
"""Seconds between two looks whether the job has been taken up."""

_SAYS = "unirun-master: "


class AgentProcess:
    """The process of an agent, from before it has a task: it waits for one, and imports meanwhile what its workers most
    likely need. As a context it is ended unless it has begun.
    """

    def __init__(self, log: Path, early: AgentTask | None = None, *, stdin: bool = False) -> None:
        """Fork it. Call it before any thread is started. It writes to the file `log`, and with `stdin` alone keeps this
        process's stdin, for a worker. `early` is what is known of its task; None for nothing."""
        self._log = self._final_log = log
        self._node = ""
        self._stream, theirs = socket.socketpair()
        self._stream.settimeout(BIND_TIMEOUT)

        def run(stdin: int | None) -> None:
            self._stream.close()
            if not _be_agent(theirs, early, stdin):
                log.unlink(missing_ok=True)

        self.pid = _fork("unirun-agent", log, run, stdin=stdin)
        theirs.close()

    def __enter__(self) -> AgentProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def assign(
        self, job: JobDir, task: AgentTask, lock: int, owner: int | None, tcp: socket.socket | None = None
    ) -> None:
        """Give it its task in `job`: it binds its endpoints, and waits (`begin`). It has the environment of this
        process then, and ends with the process `owner`; without one, with its job. Masters that it starts listen on
        `tcp`."""
        self._node, self._final_log = task.node, job.agent_log(task.node)
        told = {"job": str(job.path), "task": to_builtins(task), "owner": owner, "environ": dict(os.environ)}
        handles = [lock] if tcp is None else [lock, tcp.fileno()]
        try:
            socket.send_fds(self._stream, [b"!"], handles)
            self._stream.sendall(json.dumps(told).encode() + b"\n")
        except OSError as error:
            raise self._gone() from error

    def wait_until_bound(self, deadline: float) -> None:
        """Wait until it has bound its endpoints. Raises `RendezvousError` when it cannot, or has not by `deadline`."""
        if not readable(self._stream, deadline - time.monotonic()):
            problem = f"the agent of node {self._node} has not bound its endpoints within {BIND_TIMEOUT:g} s"
            raise RendezvousError(problem, "does a name server answer? see --master-addr")
        with suppress(OSError):
            if answer := self._stream.recv(select.PIPE_BUF):
                if refusal := json.loads(answer):
                    raise RendezvousError(*refusal)
                return
        raise self._gone()

    def begin(self) -> None:
        """Let it begin."""
        with suppress(OSError):
            if self._log != self._final_log:
                self._log.rename(self._final_log)
            self._stream.sendall(b"\n")
        self._stream.close()

    def end(self) -> None:
        """End it, unless it has begun: the job starts without it, or not at all."""
        if self._stream.fileno() < 0:
            return
        self._stream.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._log.unlink(missing_ok=True)

    def _gone(self) -> RendezvousError:
        return RendezvousError(f"the agent of node {self._node} has ended before the job began")


def _be_agent(stream: socket.socket, early: AgentTask | None, stdin: int | None) -> bool:
    """Run in the process of an agent: wait for the task, bind the endpoints, start the spawners, and begin when told.
    Returns False when the other end is gone before."""
    spawners = EarlySpawners(early)
    with stream, stream.makefile("r") as lines:
        _, handles, _, _ = socket.recv_fds(stream, 1, 2, socket.MSG_CMSG_CLOEXEC)
        if not (line := lines.readline()):
            return False
        told = json.loads(line)
        os.environ.clear()
        os.environ.update(told["environ"])
        job, task = JobDir(Path(told["job"])), typed(AgentTask, told["task"])
        try:
            enter(task.cwd)
            endpoints = hold_endpoints(task.spec, task.addr, task.port, spawners.sockets)
        except RendezvousError as error:
            stream.sendall(json.dumps([error.problem, error.remedy]).encode())
            raise
        stream.sendall(b"[]")
        # While the others bind theirs, and the first master starts.
        spawners.start(task, [endpoint.socket for endpoint in endpoints.values()], stdin)
        if not lines.readline():
            return False
    tcp = socket.socket(fileno=handles[1]) if len(handles) > 1 else None
    with running_member(job, task) as kept:
        agent = Agent(job, task, endpoints, handles[0], stdin, tcp, kept, spawners)
        agent.fork_spawner()
        asyncio.run(agent.run(told["owner"]))
    return True


def enter(folder: str) -> None:
    """Make `folder`, that of a job, the directory of this process, as masters have it that are started here. Raises
    `RendezvousError`."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise RendezvousError(
            f"{folder} cannot be entered: {(error.strerror or str(error)).lower()}"
        ) from error


def bind(
    job: JobDir,
    agents: Mapping[str, AgentProcess],
    tasks: Sequence[AgentTask],
    lock: int,
    owner: int | None,
    tcp: socket.socket | None = None,
) -> None:
    """Give `agents`, by node, their `tasks`, as for `AgentProcess.assign`, and wait until they have bound their
    endpoints. Raises `RendezvousError`, and leaves no agent, when one cannot."""
    try:
        deadline = time.monotonic() + BIND_TIMEOUT
        for task in tasks:
            agents[task.node].assign(job, task, lock, owner, tcp)
        for agent in agents.values():
            agent.wait_until_bound(deadline)
    except BaseException:
        for agent in agents.values():
            agent.end()
        raise


def begin(
    job: JobDir,
    agents: Mapping[str, AgentProcess],
    lock: int,
    run_master: Callable[[Mapping[str, int]], None] | None = None,
) -> tuple[int | None, tuple[int, ...]]:
    """Let `agents`, by node, begin, and fork the first master of `job` unless another host has it. Returns the pid of
    the master and those of the agents.

    `run_master` is called in the master's process with the pids of the agents, whose end it must notice even before
    they have joined. All hold the `lock`, as long as one of them lives. Forking shares what is imported already. Call
    it before any thread is started.
    """
    for agent in agents.values():
        agent.begin()
    pids = {node: agent.pid for node, agent in agents.items()}
    master = run_master and _fork("unirun-master", job.master_log, lambda _: run_master(pids))
    os.close(lock)
    return master, tuple(pids.values())


def _fork(title: str, log: Path, run: Callable[[int | None], None], *, stdin: bool = False) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(title, log, run, stdin)
    return pid


def _become(title: str, log: Path, run: Callable[[int | None], None], stdin: bool) -> NoReturn:
    """In the child: leave the terminal, write to `log`, run, and end without the parent's clean-up.

    `run` gets a descriptor of the parent's stdin where `stdin` is true.
    """
    code = 1
    try:
        kept = os.dup(0) if stdin else None
        os.setsid()
        set_title(title)
        ignore_signals(signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (file, 1), (file, 2)):
            os.dup2(source, target)
        run(kept)
        code = 0
    except UnirunError as error:
        code = error.exit_code
        report(f"{title}: {error}")
    except BaseException as error:  # noqa: BLE001 - the last frame of a process: what is not written here is lost
        if lacks_threads(error):
            report(f"{title}: {NO_THREAD}")
        else:
            report_error(error)
    finally:
        flush()
        os._exit(code)


class RunningJob:
    """A job that this process follows, with its processes on this host: the agents, and the masters one after another.

    Only the output of `node` is shown, if one is named.
    """

    copied = False
    """True if the files of the job's directory are copied from other hosts, a little later than messages tell of
    them."""

    def __init__(
        self, job: JobDir, spec: JobSpec, master: int | None, agents: Sequence[int], node: str = ""
    ) -> None:
        """`master` is the first one, unless it runs on another host."""
        self.job, self.spec, self.node = job, spec, node
        self.owned = master is not None
        """True if the job ends with this process. One that takes part in the job of another host is a member."""
        self._first, self._agents = master, tuple(agents)
        self._exits: dict[int, int] = {}
        self._agents_gone: float | None = None
        self._stopping = False
        self._master = master or 0

    def led_by(self, master: int) -> None:
        """The master that leads now was reached; this is its pid, where it runs."""
        self._master = master

    def refusal(self, led: bool) -> int | None:
        """The exit code of the first master when it has refused to lead (`led`: one has led already)."""
        first = self._first_exit()
        return first if not led and first is not None and 0 < first < 128 else None

    def given_up(self, led: bool, busy: bool | None = None) -> bool:
        """Return True if no master will be found any more: no process is left to start one, or the first has refused
        to lead (`led`: one has led already).

        `busy` is what the last attempt to reach one says: a connection to its address was made and came to nothing
        (True), or an agent there follows none (False); None for neither.
        """
        if self.refusal(led) is not None:
            return True
        if any(self._wait(agent, 0.0) is None for agent in self._agents):
            return False
        self._agents_gone = self._agents_gone or time.monotonic()
        return time.monotonic() > self._agents_gone + ORPHANED_MASTER_TIMEOUT

    def taken_up(self) -> bool:
        """Wait until a master has brought the job to its store; False when the first has refused to lead, or nobody is
        left to lead. A store that is away is given up by the master."""
        while self.job.first_context() is not None:
            if self.given_up(led=False):
                return False
            time.sleep(TAKE_UP_POLL_INTERVAL)
        return True

    def reap(self) -> None:
        """Collect ended children: an agent without which the job goes on, the first master, and adopted processes. The
        first process of a container adopts those of ``docker exec``."""
        for pid in (*self._agents, self._first):
            if pid is not None:
                self._wait(pid, 0.0)
        collect_orphans({*self._agents, self._first or 0})

    def wake_agents(self) -> None:
        """Continue agents that were stopped (SIGSTOP), as the job is to end or has no master."""
        self._signal(signal.SIGCONT)

    def stop_agents(self) -> None:
        """Let the agents end their workers and themselves."""
        if not self._stopping:
            self._stopping = True
            self._signal(signal.SIGTERM)

    def kill_agents(self) -> None:
        """End the agents that do not end; their workers end with them."""
        self._signal(signal.SIGKILL)

    def end(self, led: bool = True, farewell: float | None = None) -> int | None:
        """Leave nothing behind: wait for the processes, each kind `farewell` seconds, then kill what is left.
        Returns the first master's exit.

        As long as nobody has `led` the job, there is nothing that could end in order.
        """
        farewell = JOB_EXIT_TIMEOUT if farewell is None else farewell
        code = self._first_exit()
        if self.refusal(led) is not None:
            self._signal(signal.SIGKILL)
        elif code:
            self.stop_agents()
        for pids in (self._agents, (self._first, self._master)):
            deadline = time.monotonic() + farewell
            waits = (
                pid for pid in filter(None, pids) if self._wait(pid, deadline - time.monotonic()) is None
            )
            # A master may be on another host.
            if {*waits} & {*children()} and farewell:
                gave_up(f"the end of {'an agent' if pids is self._agents else 'a master'}", farewell)
        kill_children()
        return code

    def _first_exit(self) -> int | None:
        return self._wait(self._first, 0.0) if self._first is not None else None

    def _signal(self, signum: signal.Signals) -> None:
        """Send it to every agent that lives."""
        for agent in self._agents:
            if self._wait(agent, 0.0) is None:
                os.kill(agent, signum)

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


def last_line_of_masters(job: JobDir) -> str:
    """The line that a master has written last."""
    try:
        lines = job.master_log.read_text(errors="backslashreplace").splitlines()
    except OSError:
        return ""
    return next((line.removeprefix(_SAYS) for line in reversed(lines) if line.startswith(_SAYS)), "")


def output_of_first_master(job: JobDir) -> str:
    """The output of the first master before it ended."""
    try:
        text = job.master_log.read_text(errors="backslashreplace")
    except OSError:
        return ""
    return text.removeprefix(_SAYS).partition(f"\n{_SAYS}")[0].rstrip()


def end_unled(job: JobDir, code: int) -> str:
    """Write that `job` has failed, as its first master has ended with `code` and led nothing. Returns that master's
    output."""
    words = output_of_first_master(job)
    # The caller prints the output in any case; without the end, the job is listed as lost.
    with suppress(JobError, OSError):
        write_failure(job, words.partition("\n")[0], code)
    return words
