"""Both sides of the lobby: nodes make offers and bind what their task needs; the launcher lets all start at once.

Whatever is wrong is told of all nodes at once, before anything starts.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from msgspec.json import encode as to_json
from msgspec.structs import replace

from unirun.collocation import local_inventory
from unirun.errors import JobError, RendezvousError, UnirunError, WireError
from unirun.failover.offers import AgentTask, NodeFault, versions
from unirun.launcher.environment import joined
from unirun.launcher.interfaces import choose, route_to
from unirun.launcher.launch import check_host
from unirun.launcher.local import AgentProcess, Processes, RunningJob
from unirun.launcher.orders import on_host
from unirun.launcher.slurm.allocation import component_here
from unirun.observe.batchjob import own_batch
from unirun.observe.jobdir import JobDir, unirun_home
from unirun.observe.ownership import make_private
from unirun.rendezvous.creation import create_job, discard_job, possible_member
from unirun.rendezvous.endpoints import BIND_TIMEOUT
from unirun.spec.job import JobSpec, RoleSpec
from unirun.spec.programs import variables_of
from unirun.values import Value
from unirun.wire.address import TcpAddress
from unirun.wire.aio import Stream
from unirun.wire.blocking import BlockingStream
from unirun.wire.certificates import make_tls
from unirun.wire.frames import from_json
from unirun.wire.handshake import Token
from unirun.wire.messages import Appointed, Assigned, Dismissed, Go, Message, Offer, Ready, expected
from unirun.wire.sockets import listen_tcp


class Guest(Value):
    """A node that has made an offer."""

    stream: Stream
    offer: Offer

    @property
    def node(self) -> str:
        """Its name."""
        return self.offer.node


def refusal(unfit: Sequence[NodeFault]) -> RendezvousError:
    """One error for all nodes that cannot take part."""
    if len(unfit) == 1:
        return RendezvousError(f"{unfit[0].node}: {unfit[0].problem}", unfit[0].remedy)
    return RendezvousError(
        f"{len(unfit)} nodes cannot take part\n" + "\n".join(f"  {each}" for each in unfit)
    )


async def each(
    guests: Sequence[Guest], talk: Callable[[Guest], Coroutine[Any, Any, None]], timeout: float
) -> None:
    """Talk to all `guests` at once. Raises `RendezvousError` with everything that went wrong."""
    unfit: list[NodeFault] = []

    async def one(guest: Guest) -> None:
        try:
            async with asyncio.timeout(timeout):
                await talk(guest)
        except TimeoutError:
            unfit.append(NodeFault(guest.node, f"it has not answered within {timeout:g} s"))
        except UnirunError as error:
            unfit.append(NodeFault(guest.node, error.problem, error.remedy))

    await asyncio.gather(*(one(guest) for guest in guests))
    if unfit:
        raise refusal(sorted(unfit, key=lambda each: [guest.node for guest in guests].index(each.node)))


async def assign(guests: Sequence[Guest], tasks: Mapping[str, Assigned]) -> None:
    """Give each node its task, and wait until all are ready. Raises `RendezvousError`: then nobody may start."""

    async def talk(guest: Guest) -> None:
        guest.stream.send(tasks[guest.node])
        expected(await guest.stream.receive(), Ready)

    await each(guests, talk, BIND_TIMEOUT)


async def tell(guests: Sequence[Guest], word: Message) -> None:
    """Send `word` to all `guests`; one that is gone will be missed by the master."""
    for guest in guests:
        guest.stream.send(word)


async def part(guests: Sequence[Guest], word: Message) -> None:
    """Send the last `word` to all `guests` and close their streams."""
    await tell(guests, word)
    await asyncio.gather(*(guest.stream.close() for guest in guests))


class Lobby:
    """Nodes that connect by themselves, until there are `most` with the one that is `here`. `names` are those of all
    nodes by rank, where they are known."""

    def __init__(self, most: int, here: Offer, names: Sequence[str] = ()) -> None:
        self._most, self._here, self._names = most, here, names
        self._guests: dict[str, Guest] = {}
        self._news = asyncio.Event()

    @property
    def guests(self) -> list[Guest]:
        """In the order of their ranks; those without one follow in the order of their arrival."""
        found = list(self._guests.values())
        ranked = sorted((each for each in found if each.offer.rank >= 0), key=lambda each: each.offer.rank)
        return [*ranked, *(each for each in found if each.offer.rank < 0)]

    async def admit(self, stream: Stream) -> None:
        """Hear one node, and keep its stream open."""
        try:
            first = await stream.receive()
        except WireError:
            await stream.close()
            return
        trouble = self._trouble(first, stream.peer)
        if trouble is not None:
            stream.send(trouble)
            await stream.close()
            return
        assert isinstance(first, Offer)
        # The caller that lets the nodes go closes their streams.
        self._guests[first.node] = Guest(stream, first)
        self._news.set()

    async def gather(self, least: int, timeout: float, last_call: float) -> None:
        """Wait until all have come; or, once `least` are there, `last_call` seconds for the others.

        Raises `RendezvousError` when fewer than `least` have come after `timeout` seconds. This node counts as one.
        """
        loop = asyncio.get_running_loop()
        end, began_last = loop.time() + timeout, 0.0
        while len(self._guests) + 1 < self._most:
            if len(self._guests) + 1 >= least and not began_last:
                began_last = loop.time()
                end = min(end, began_last + last_call)
            self._news.clear()
            try:
                async with asyncio.timeout_at(end):
                    await self._news.wait()
            except TimeoutError:
                if len(self._guests) + 1 < least:
                    raise self._missing(least, timeout) from None
                return

    def _trouble(self, first: Message, peer: str) -> Dismissed | None:
        if not isinstance(first, Offer):
            return Dismissed(f"the job has not begun, and {type(first).__name__} comes too early")
        others = [self._here, *(guest.offer for guest in self._guests.values())]
        if peer and first.node != peer:
            return Dismissed(f"its certificate is that of node {peer}, and it says that it is {first.node}")
        if first.node in (each.node for each in others):
            return Dismissed(
                f"a node called {first.node} is there already", "give it another name: --node-name"
            )
        if first.rank >= 0 and first.rank in (each.rank for each in others):
            return Dismissed(f"node rank {first.rank} is taken", "give each node a --node-rank of its own")
        if first.rank >= self._most or len(others) >= self._most:
            return Dismissed(f"the job has {self._most} nodes", "see --nnodes")
        return None

    def _missing(self, least: int, timeout: float) -> RendezvousError:
        here = [self._here, *(guest.offer for guest in self._guests.values())]
        ranks = {each.rank for each in here}
        gone = [rank for rank in range(self._most) if rank not in ranks]
        names = ", ".join(self._names[rank] if self._names else f"node rank {rank}" for rank in gone)
        missing = f"; missing: {names}" if -1 not in ranks else ""
        came = ", ".join(each.node for each in here)
        return RendezvousError(
            f"{len(here)} of {least} nodes have come within {timeout:g} s: {came}{missing}",
            "start the command on the others, or raise --rdzv-conf join_timeout=SECONDS",
        )


# This host as a node of a job: it makes an offer, takes its task, and binds what the task needs.

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


def early_agent(task: AgentTask | None) -> AgentProcess:
    """Fork the agent of this host; `task` is what is known of its task. Call it before any thread is started. Raises
    `JobError`."""
    home = unirun_home()
    try:
        make_private(home)
    except OSError as error:
        raise JobError(
            f"{home} cannot be made: {(error.strerror or str(error)).lower()}",
            "set UNIRUN_HOME to a directory that you may write",
        ) from error
    return AgentProcess(home / f".agent.{os.getpid()}.log", task)


def take_part(
    stream: BlockingStream,
    offered: Offer,
    agent: AgentProcess,
    token: Token,
    *,
    insecure: bool = False,
    interface: str = "",
    owner: int | None = None,
) -> RunningJob:
    """Make the offer, take the task, and be ready. Returns when the launcher says that the job starts, and `agent` has
    begun; it ends with the process `owner`, without one with its job.

    Raises `RendezvousError` when this node is dismissed or its endpoints cannot be bound, `JobError`, `WireError`.
    """
    stream.send(offered)
    word = stream.receive(LAUNCHER_ANSWER_TIMEOUT)
    if isinstance(word, Appointed):
        # The job has begun, and a master answers where the lobby was.
        word = stream.receive(LAUNCHER_ANSWER_TIMEOUT)
    assigned = expected(word, Assigned)
    try:
        job, lock, task = settle(assigned, agent, token, insecure=insecure, interface=interface, owner=owner)
    except UnirunError as error:
        stream.send(Dismissed(error.problem, error.remedy))
        raise
    stream.send(Ready())
    try:
        await_go(stream)
    except BaseException:
        discard_job(job, lock)
        raise
    agent.begin()
    os.close(lock)
    return RunningJob(job, task.spec, Processes(None, (agent.pid,)), task.node, member=True)


def await_go(stream: BlockingStream) -> None:
    """Wait until the launcher says that the job starts. Raises `RendezvousError`, `WireError`."""
    expected(stream.receive(LAUNCHER_ANSWER_TIMEOUT), Go)


def settle(
    assigned: Assigned,
    agent: AgentProcess,
    token: Token,
    *,
    insecure: bool,
    interface: str,
    owner: int | None,
) -> tuple[JobDir, int, AgentTask]:
    """Make this node's directory of the job, and let `agent` bind its endpoints. Returns the directory with its lock,
    and the task. This process has the environment of a job that has begun from then on. Raises `RendezvousError`,
    `JobError`."""
    if assigned.env is not None:
        env = joined(os.environ, assigned.env)
        os.environ.clear()
        os.environ.update(env)
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
        node=task.node,
        restarts=own_batch(assigned.run_id, os.environ)[1],
        head=None if assigned.store else assigned.head,
    )
    try:
        task = on_host(task, addr, cwd)
        make_tls(job.path, token, task.node, insecure=insecure, addrs=certified(task, addr))
        with listen_tcp(addr) if assigned.store else nullcontext() as listener:
            agent.assign(job, task, lock, owner, listener)
        agent.wait_until_bound(time.monotonic() + BIND_TIMEOUT)
    except BaseException:
        discard_job(job, lock)
        raise
    return job, lock, task


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
