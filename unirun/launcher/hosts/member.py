"""This host as a node of a job: it makes an offer, takes its task, and binds what the task needs."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

from msgspec.json import encode as to_json
from msgspec.structs import replace

from unirun.collocation import local_inventory
from unirun.errors import RendezvousError, UnirunError
from unirun.failover.offers import AgentTask, versions
from unirun.launcher.hosts.interfaces import choose, route_to
from unirun.launcher.local import JoinedNode
from unirun.launcher.orders import on_host
from unirun.launcher.process import check_host
from unirun.launcher.slurm.allocation import component_here
from unirun.observe.batchjob import own_batch
from unirun.rendezvous.creation import create_job, discard_job, possible_member
from unirun.rendezvous.endpoints import hold_endpoints
from unirun.spec.job import JobSpec, RoleSpec
from unirun.spec.programs import variables_of
from unirun.wire.address import TcpAddress
from unirun.wire.blocking import BlockingStream
from unirun.wire.certificates import make_tls
from unirun.wire.frames import from_json
from unirun.wire.handshake import Token
from unirun.wire.messages import Appointed, Assigned, Dismissed, Go, Offer, Ready, expected
from unirun.wire.sockets import listen_tcp

LAUNCHER_ANSWER_TIMEOUT = 600.0
"""Seconds that a node waits for the launcher's next word; the launcher has the deadline, and its end is noticed."""


def offer(
    node: str,
    rank: int = -1,
    masters: TcpAddress | None = None,
    faults: tuple[tuple[str, str], ...] = (),
    *,
    addr: str,
) -> Offer:
    """The resources that this host brings into a job as `node`; others reach it at `addr`."""
    inventory = replace(local_inventory().nodes[0], name=node, component=component_here(os.environ))
    about = to_json(inventory).decode(), versions()
    return Offer(node, socket.gethostname(), rank, *about, masters, faults, possible_member(node, addr))


def take_part(
    stream: BlockingStream, offered: Offer, token: Token, *, insecure: bool = False, interface: str = ""
) -> JoinedNode:
    """Make the offer, take the task, and be ready. Returns when the launcher says that the job starts.

    Raises `RendezvousError` when this node is dismissed or its endpoints cannot be bound, `JobError`, `WireError`.
    """
    stream.send(offered)
    word = stream.receive(LAUNCHER_ANSWER_TIMEOUT)
    if isinstance(word, Appointed):
        # The job has begun, and a master answers where the lobby was.
        word = stream.receive(LAUNCHER_ANSWER_TIMEOUT)
    assigned = expected(word, Assigned)
    try:
        member = settle(assigned, offered.node, token, insecure=insecure, interface=interface)
    except UnirunError as error:
        stream.send(Dismissed(error.problem, error.remedy))
        raise
    stream.send(Ready())
    try:
        await_go(stream)
    except BaseException:
        member.discard()
        raise
    return member


def await_go(stream: BlockingStream) -> None:
    """Wait until the launcher says that the job starts. Raises `RendezvousError`, `WireError`."""
    expected(stream.receive(LAUNCHER_ANSWER_TIMEOUT), Go)


def settle(assigned: Assigned, node: str, token: Token, *, insecure: bool, interface: str) -> JoinedNode:
    """Make this node's directory of the job and bind its endpoints. Raises `RendezvousError`, `JobError`."""
    task = from_json(AgentTask, assigned.task)
    addr = choose(interface) if interface else route_to(assigned.head.addr)
    cwd = task.cwd or os.getcwd()
    for problem, remedy in missing(needs(task.spec, cwd, component_here(os.environ))):
        raise RendezvousError(problem, remedy)
    check_host(task.spec)
    job, lock = create_job(
        assigned.run_id,
        token,
        task.spec.log.dir,
        assigned.store or None,
        uid=assigned.uid,
        node=node,
        restarts=own_batch(assigned.run_id, os.environ)[1],
        head=None if assigned.store else assigned.head,
    )
    task = on_host(task, addr, cwd)
    try:
        make_tls(job.path, token, node, insecure=insecure, addrs=certified(task, addr))
        endpoints = hold_endpoints(task.spec, addr, task.port)
        listener = listen_tcp(addr) if assigned.store else None
    except BaseException:
        discard_job(job, lock)
        raise
    return JoinedNode(job, lock, task, endpoints, listener)


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
