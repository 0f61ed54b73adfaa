"""This host as a node of a job: it makes an offer, takes its task, binds what the task needs, and starts the agent.

Also a process: ``python -m unirun.launcher.hosts.node``, which a command elsewhere starts over ssh. It takes part in
the job, then sends the command what the files of the node's directory get. The agent does not depend on it: when ssh is
lost, another one is started, which sends the rest (`Resume`).
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

from msgspec.json import encode as to_json
from msgspec.structs import replace

from unirun.collocation import local_inventory
from unirun.errors import AuthError, JobError, RendezvousError, UnirunError, WireError
from unirun.failover.offers import versions
from unirun.launcher.environment import joined
from unirun.launcher.foreground.terminal import warn
from unirun.launcher.hosts.feed import feed, over_stdio
from unirun.launcher.interfaces import choose, reachable_address, resolve, route_to
from unirun.launcher.launch import check_host, first_master, make_directory, refuse_excess, write_first_state
from unirun.launcher.local import AgentProcess, RunningJob, begin, bind, output_of_first_master
from unirun.launcher.orders import on_host
from unirun.launcher.planned import PlannedJob
from unirun.launcher.process import ignore_signals
from unirun.launcher.slurm.allocation import component_here
from unirun.observe.jobdir import JobDir, job_at, unirun_home
from unirun.observe.ownership import make_private
from unirun.rendezvous.creation import discard_job, possible_member
from unirun.spec.job import JobSpec, RoleSpec
from unirun.spec.programs import variables_of
from unirun.wire.address import TcpAddress
from unirun.wire.blocking import BlockingStream
from unirun.wire.certificates import make_tls, temporary
from unirun.wire.credentials import Credentials
from unirun.wire.handshake import Token
from unirun.wire.messages import AgentTask, Appointed, Dismissed, Invite, Offer, Ready, Resume, expected
from unirun.wire.sockets import listen_tcp

LAUNCHER_ANSWER_TIMEOUT = 600.0
"""Seconds that a node waits for the launcher's next word; the launcher has the deadline, and its end is noticed."""

HEAD_TIMEOUT = 10.0
"""Seconds in which a master must answer a node that comes late over ssh."""

HEAD_INTERVAL = 0.2
"""Seconds after which a node that the head does not answer yet tries again."""


def take_part(
    invite: Invite,
    command: BlockingStream | None = None,
    *,
    timeout: float = 0.0,
    owner: int | None = None,
    complete: Callable[[Invite], Invite] = lambda invite: invite,
) -> RunningJob:
    """Take part in a job: make the offer, to the head within `timeout` seconds, or over the stream to the `command`;
    take the task, and be ready. Returns when the launcher says that the job starts, and the agent has begun; it ends
    with the process `owner`, without one with its job.

    `complete` adds to the invitation what this node may have to wait for, while its agent imports.

    Raises `RendezvousError` when this node is dismissed or its endpoints cannot be bound, `JobError`, `WireError`.
    """
    with ExitStack() as stack:
        agent = stack.enter_context(early_agent(invite))
        invite = complete(invite)
        stream = command
        if invite.head is not None:
            credentials = stack.enter_context(credentials_of(invite))
            stream = stack.enter_context(_reach(invite.head, credentials, timeout))
        assert stream is not None
        addr = own_address(invite)
        tcp = stack.enter_context(listen_tcp(addr)) if invite.leads else None
        stream.send(offer(invite, addr, tcp))
        word = stream.receive(LAUNCHER_ANSWER_TIMEOUT)
        if isinstance(word, Appointed):
            # The job has begun, and a master answers where the lobby was.
            word = stream.receive(LAUNCHER_ANSWER_TIMEOUT)
        task = expected(word, AgentTask)
        try:
            job, lock, task = settle(invite, task, agent, tcp, owner=owner)
        except UnirunError as error:
            stream.send(Dismissed(error.problem, error.remedy))
            raise
        try:
            stream.send(Ready())
            expected(stream.receive(LAUNCHER_ANSWER_TIMEOUT), Ready)
        except BaseException:
            discard_job(job, lock)
            raise
        return start(job, lock, task, agent, tcp)


def early_agent(invite: Invite) -> AgentProcess:
    """Fork the agent of this host, which imports what it most likely needs. Call it before any thread is started.
    Raises `JobError`."""
    home = unirun_home()
    try:
        make_private(home)
    except OSError as error:
        raise JobError(
            f"{home} cannot be made: {(error.strerror or str(error)).lower()}",
            "set UNIRUN_HOME to a directory that you may write",
        ) from error
    early = None
    if invite.spec is not None:
        # A guess, too: the head may not be known yet, and its name may have no address.
        addr = "" if invite.head is None else invite.head.addr
        if invite.leads or invite.head is None:
            with suppress(RendezvousError):
                addr = own_address(invite)
        early = AgentTask(invite.spec, invite.node, (), os.getcwd(), addr)
    return AgentProcess(home / f".agent.{secrets.token_hex(8)}.log", early)


def credentials_of(invite: Invite) -> AbstractContextManager[Credentials]:
    """The credentials of this node until it has a directory of the job. Raises `JobError`."""
    return temporary(Token(bytes.fromhex(invite.token)), invite.node, insecure=invite.insecure)


def _reach(head: TcpAddress, credentials: Credentials, timeout: float) -> BlockingStream:
    """Connect to the head, which may start later than this command. Raises `RendezvousError`, `WireError`."""
    end = time.monotonic() + timeout
    told = False
    while True:
        try:
            return BlockingStream.connect(TcpAddress(resolve(head.addr), head.port, ""), credentials)
        except (RendezvousError, WireError) as error:
            # A wrong secret stays wrong, while a connection that was cut may succeed at the next attempt.
            refused = isinstance(error, WireError) and not isinstance(error.__cause__, OSError)
            if refused or isinstance(error, AuthError):
                raise
            if time.monotonic() > end:
                raise RendezvousError(
                    f"the head at {head.addr}:{head.port} has not answered within {timeout:g} s: {error}",
                    "start the command on the first node too, and see --rdzv-endpoint",
                ) from error
        if not told and time.monotonic() > end - timeout + 3.0:
            told = True
            warn(f"waiting for the head at {head.addr}:{head.port}")
        time.sleep(HEAD_INTERVAL)


def own_address(invite: Invite) -> str:
    """The address by which others most likely reach this host. Raises `RendezvousError`."""
    if invite.interface:
        return choose(invite.interface)
    if invite.head is not None:
        found = resolve(invite.head.addr)
        return found if invite.leads else route_to(found)
    return _seen_by_ssh() or reachable_address()


def _seen_by_ssh() -> str:
    """The address by which the command has reached this host; empty without ssh, or when it is loopback."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    addr = words[2].partition("%")[0] if len(words) == 4 else ""
    return "" if addr.startswith("127.") or addr == "::1" else addr


def offer(invite: Invite, addr: str, tcp: socket.socket | None = None) -> Offer:
    """The resources that this host brings into the job; others reach it at `addr`. Masters listen at `tcp` when it is
    the head."""
    component = component_here(os.environ)
    inventory = replace(local_inventory().nodes[0], name=invite.node, component=component)
    # A node that is not asked over ssh says what it lacks when it has its task.
    names = needs(invite.spec, os.getcwd(), component) if invite.spec and invite.head is None else []
    return Offer(
        invite.node,
        socket.gethostname(),
        invite.rank,
        to_json(inventory).decode(),
        versions(),
        None if tcp is None else TcpAddress(addr, tcp.getsockname()[1], invite.node),
        missing(names),
        possible_member(invite.node, addr),
    )


def settle(
    invite: Invite,
    task: AgentTask,
    agent: AgentProcess,
    tcp: socket.socket | None = None,
    *,
    owner: int | None = None,
    launches: bool = False,
) -> tuple[JobDir, int, AgentTask]:
    """Make this node's directory of the job, and let `agent` bind its endpoints; on the head, leave the state for the
    first master, which listens at `tcp`. `launches` is whether this process is the command that launches the job.
    Returns the directory with its lock, and the task. This process has the environment of a job that has begun from
    then on. Raises `RendezvousError`, `JobError`, `PlacementError`."""
    assert task.head is not None
    if task.env is not None:
        env = joined(os.environ, task.env)
        os.environ.clear()
        os.environ.update(env)
    planned = PlannedJob.from_json(task.planned) if task.planned else None
    cwd = task.cwd or os.getcwd()
    if planned is not None:
        addr = task.head.addr
        refuse_excess(planned, (task.node,))
    else:
        addr = choose(invite.interface) if invite.interface else route_to(task.head.addr)
        for problem, remedy in missing(needs(task.spec, cwd, component_here(os.environ))):
            raise RendezvousError(problem, remedy)
    check_host(task.spec)
    job, lock = make_directory(
        task.spec,
        token := Token(bytes.fromhex(invite.token)),
        task.store or None,
        uid=task.uid,
        node="" if launches else task.node,
        head=None if planned or task.store else task.head,
    )
    try:
        task = on_host(task, addr, cwd)
        make_tls(job.path, token, task.node, insecure=invite.insecure, addrs=certified(task, addr))
        if planned is not None:
            keepers = [each.node for each in task.etcd] if task.store else [task.node]
            write_first_state(job, planned, keepers=keepers, owned=not invite.detach)
        with ExitStack() as stack:
            if task.store and tcp is None:
                tcp = stack.enter_context(listen_tcp(addr))
            bind(job, {task.node: agent}, [task], lock, owner, tcp)
    except BaseException:
        discard_job(job, lock)
        raise
    return job, lock, task


def start(
    job: JobDir, lock: int, task: AgentTask, agent: AgentProcess, tcp: socket.socket | None
) -> RunningJob:
    """Let the agent begin, and on the head the first master, which listens at `tcp`."""
    master = first_master(job, tcp, etcd=bool(task.etcd)) if task.planned else None
    return RunningJob(job, task.spec, *begin(job, {task.node: agent}, lock, master), task.node)


def certified(task: AgentTask, addr: str) -> tuple[str, ...]:
    """The addresses that the certificate of the task's node has to name: clients of etcd know no names."""
    return tuple({addr, *(each.addr for each in task.etcd if each.node == task.node)})


def needs(spec: JobSpec, cwd: str, component: int | None = None) -> list[str]:
    """The directories, scripts, interpreters, programs and env files that every host of a job in `cwd` must have, or
    those of one `component` of a heterogeneous Slurm job. A program that is searched in the host's own PATH is named
    without a path."""
    # An agent reads the env files of all roles.
    env_files = (spec.env_file, *(role.env_file for role in spec.roles))
    found = [cwd, *(str(Path(cwd, path)) for path in env_files if path)]
    for role in spec.roles:
        if component is not None and role.component not in (None, component):
            continue
        at = Path(cwd, role.cwd or "")
        found.append(str(at))
        if role.python is not None:
            found.append(role.python)
        if role.entry.kind == "program":
            found.append(_program(spec, role, at))
        elif role.entry.kind == "script":
            found.append(str(Path(at, role.entry.target)))
    return list(dict.fromkeys(found))


def _program(spec: JobSpec, role: RoleSpec, at: Path) -> str:
    """The path of a role's program if the spec says where it is, else its name."""
    name = role.entry.target
    if "/" in name:
        return str(Path(at, name))
    path = role.env.get("PATH") or spec.env.get("PATH")
    folders = [variables_of(role.python).get("PATH"), path]
    return shutil.which(name, path=os.pathsep.join(filter(None, folders))) or name


def missing(names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """The problems and their remedies when this host does not have all files and programs of these names."""
    names, host = [*names], socket.gethostname()
    files = [name for name in names if "/" in name and not os.path.exists(name)]
    programs = [name for name in names if "/" not in name and shutil.which(name) is None]
    faults = []
    if files:
        remedy = "put it there, share the directory, or use --sync, which leaves out what git ignores"
        faults.append((f"{host} has no {', '.join(files)}", remedy))
    if programs:
        remedy = "install it there, or give its path"
        faults.append((f"{host} has no {', '.join(programs)} on its PATH", remedy))
    return tuple(faults)


# The process that is started over ssh.


def main() -> int:
    """Take part in the job that stdin tells of. Returns the exit code."""
    ignore_signals()
    stream = over_stdio()
    try:
        first = stream.receive(LAUNCHER_ANSWER_TIMEOUT)
        match first:
            case Resume():
                os.environ.update(first.env)
                feed(_resumed(first), stream, dict(first.offsets))
            case Invite():
                feed(_invited(first, stream), stream, {})
            case _:
                raise RendezvousError(f"the command said {type(first).__name__} at first")
    except UnirunError as error:
        # The command may be gone.
        with suppress(WireError):
            stream.send(Dismissed(error.problem, error.remedy))
        return error.exit_code
    return 0


def _resumed(resume: Resume) -> JobDir:
    job = job_at(resume.run_id, resume.node)
    if not job.path.is_dir():
        raise RendezvousError(f"its files are gone: {job.path}")
    return job


def _invited(invite: Invite, stream: BlockingStream) -> JobDir:
    """Take part in a job. Returns its directory here, with the agent running."""
    os.environ.update(invite.env)
    with suppress(OSError):
        # Told with all that is missing.
        os.chdir(invite.cwd)
    running = take_part(invite, stream, timeout=HEAD_TIMEOUT)
    if invite.head is not None:
        stream.send(Ready(running.node))
    if invite.leads and invite.detach and not running.taken_up():
        raise RendezvousError(output_of_first_master(running.job) or "the job's processes are gone")
    return running.job


if __name__ == "__main__":
    sys.exit(main())
