"""This host as a node of a job: it makes an offer, takes its task, and binds what the task needs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from msgspec.json import encode as to_json
from msgspec.structs import replace

from unirun.collocation import local_inventory
from unirun.errors import RendezvousError, UnirunError
from unirun.job.offers import AgentTask, versions
from unirun.launcher.hosts.interfaces import choose, route_to
from unirun.launcher.local import Member
from unirun.launcher.orders import on_host
from unirun.launcher.requirements import check_host
from unirun.launcher.slurm.allocation import component_here
from unirun.observe.batchjob import own_batch
from unirun.rendezvous import create_job
from unirun.rendezvous.creation import discard_job
from unirun.rendezvous.endpoints import hold_endpoints
from unirun.rendezvous.ownetcd import possible_member
from unirun.spec import JobSpec
from unirun.wire.address import TcpAddress
from unirun.wire.blocking import BlockingStream
from unirun.wire.certificates import make_tls
from unirun.wire.codec import from_json
from unirun.wire.handshake import Token
from unirun.wire.lobby import Assigned, Dismissed, Go, Offer, Ready, expected
from unirun.wire.messages import Appointed
from unirun.wire.sockets import listen_tcp

ANSWER = 600.0
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
) -> Member:
    """Make the offer, take the task, and be ready. Returns when the launcher says that the job starts.

    Raises `RendezvousError` when this node is dismissed or its endpoints cannot be bound, `JobError`, `WireError`.
    """
    stream.send(offered)
    word = stream.receive(ANSWER)
    if isinstance(word, Appointed):
        # The job has begun, and a master answers where the lobby was.
        word = stream.receive(ANSWER)
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
    expected(stream.receive(ANSWER), Go)


def settle(assigned: Assigned, node: str, token: Token, *, insecure: bool, interface: str) -> Member:
    """Make this node's directory of the job and bind its endpoints. Raises `RendezvousError`, `JobError`."""
    task = from_json(AgentTask, assigned.task)
    addr = choose(interface) if interface else route_to(assigned.head.addr)
    cwd = task.cwd or os.getcwd()
    for problem, remedy in missing(needs(task.spec, cwd)):
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
    return Member(job, lock, task, endpoints, listener)


def certified(task: AgentTask, addr: str) -> tuple[str, ...]:
    """The addresses that the certificate of the task's node has to name: clients of etcd know no names."""
    return tuple({addr, *(each.addr for each in task.etcd if each.node == task.node)})


def needs(spec: JobSpec, cwd: str) -> list[str]:
    """The directories and scripts that every host of a job in `cwd` must have."""
    found = [cwd]
    for role in spec.roles:
        at = Path(cwd, role.cwd or "")
        found.append(str(at))
        if role.entry.kind == "script":
            found.append(str(Path(at, role.entry.target)))
    return list(dict.fromkeys(found))


def missing(paths: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """The problem and its remedy when this host does not have all of `paths`."""
    gone = [path for path in paths if not os.path.exists(path)]
    if not gone:
        return ()
    remedy = "put it there, share the directory, or use --sync"
    return ((f"{socket.gethostname()} has no {', '.join(gone)}", remedy),)
