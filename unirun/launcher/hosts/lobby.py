"""Both sides of the lobby: nodes make offers and bind what their task needs; the launcher lets all start at once.

Whatever is wrong is told of all nodes at once, before anything starts.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

from msgspec.json import encode as to_json
from msgspec.structs import replace

from unirun.collocation import Inventory, local_inventory
from unirun.errors import Fault, JobError, RendezvousError, UnirunError, WireError
from unirun.failover.offers import AgentTask, inventory_of, misfits, versions
from unirun.launcher.environment import joined
from unirun.launcher.interfaces import choose, route_to
from unirun.launcher.launch import agents_of, check_host, task_of
from unirun.launcher.local import AgentProcess, Processes, RunningJob
from unirun.launcher.orders import on_host
from unirun.launcher.planned import PlannedJob
from unirun.launcher.slurm.allocation import component_here
from unirun.observe.batchjob import own_batch
from unirun.observe.jobdir import JobDir, unirun_home
from unirun.observe.ownership import make_private
from unirun.rendezvous.creation import create_job, discard_job, possible_member
from unirun.rendezvous.endpoints import BIND_TIMEOUT
from unirun.spec.job import JobSpec, RoleSpec
from unirun.spec.programs import variables_of
from unirun.wire.address import TcpAddress
from unirun.wire.aio import Stream
from unirun.wire.blocking import BlockingStream
from unirun.wire.certificates import make_tls
from unirun.wire.frames import from_json
from unirun.wire.handshake import Token
from unirun.wire.messages import Appointed, Assigned, Dismissed, Offer, Ready, expected
from unirun.wire.reports import Message
from unirun.wire.sockets import listen_tcp

T = TypeVar("T")


def refusal(unfit: Sequence[Fault]) -> RendezvousError:
    """One error for all nodes that cannot take part."""
    if len(unfit) == 1:
        return RendezvousError(f"{unfit[0].where}: {unfit[0].problem}", unfit[0].remedy)
    return RendezvousError(
        f"{len(unfit)} nodes cannot take part\n" + "\n".join(f"  {each}" for each in unfit)
    )


async def from_all(
    nodes: Sequence[str],
    ask: Callable[[str], Awaitable[T]],
    timeout: float,
    remedy: Callable[[str], str] = lambda _: "",
) -> tuple[dict[str, T], list[Fault]]:
    """Ask all `nodes` at once. Returns the answers, and what went wrong with the others; `remedy` is for those that
    have not answered within `timeout` seconds."""
    answers: dict[str, T] = {}
    unfit: dict[str, Fault] = {}

    async def one(node: str) -> None:
        try:
            async with asyncio.timeout(timeout):
                answers[node] = await ask(node)
        except TimeoutError:
            unfit[node] = Fault(node, f"it has not answered within {timeout:g} s", remedy(node))
        except UnirunError as error:
            unfit[node] = Fault(node, error.problem, error.remedy)

    await asyncio.gather(*map(one, nodes))
    return answers, [unfit[node] for node in nodes if node in unfit]


class Lobby:
    """The nodes of a job that has not begun: their offers, and the streams to all but the one that is `here`.

    There are `most` of them; `names` are theirs by rank, where they are known.
    """

    def __init__(self, most: int, here: Offer | None = None, names: Sequence[str] = ()) -> None:
        self._most, self._names = most, names
        self._offers = {} if here is None else {here.node: here}
        self._streams: dict[str, Stream] = {}
        self._news = asyncio.Event()

    @property
    def offers(self) -> list[Offer]:
        """That of the node here first, then in the order of their ranks; those without one follow in the order of their
        arrival."""
        return sorted(
            self._offers.values(),
            key=lambda each: (each.node in self._streams, each.rank if each.rank >= 0 else self._most),
        )

    def enter(self, offer: Offer, stream: Stream) -> None:
        """A node has made an offer."""
        self._offers[offer.node], self._streams[offer.node] = offer, stream
        self._news.set()

    async def admit(self, stream: Stream) -> None:
        """Hear one node that has connected by itself, and keep its stream open."""
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
        self.enter(first, stream)

    async def gather(self, least: int, timeout: float, last_call: float) -> None:
        """Wait until all have come; or, once `least` are there, `last_call` seconds for the others.

        Raises `RendezvousError` when fewer than `least` have come after `timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        end, began_last = loop.time() + timeout, 0.0
        while len(self._offers) < self._most:
            if len(self._offers) >= least and not began_last:
                began_last = loop.time()
                end = min(end, began_last + last_call)
            self._news.clear()
            try:
                async with asyncio.timeout_at(end):
                    await self._news.wait()
            except TimeoutError:
                if len(self._offers) < least:
                    raise self._missing(least, timeout) from None
                return

    async def plan(self, make_plan: Callable[[Inventory], PlannedJob]) -> PlannedJob:
        """Plan the job for all nodes, and let those go that it excludes. Raises `RendezvousError` when some cannot take
        part, and what `make_plan` raises."""
        if found := misfits(self.offers, versions()):
            raise refusal(found)
        planned = make_plan(inventory_of(self.offers))
        excluded = [node for node in self._streams if node in planned.placement.excluded]
        await self._part(excluded, Dismissed("the job excludes this node", "see --exclude"))
        for node in excluded:
            del self._offers[node]
        return planned

    async def assign(self, planned: PlannedJob, common: Assigned, cwd: str) -> None:
        """Give each node its task, with what is `common` to all, in the directory `cwd`, empty for its own; the first
        node of the job gets the plan instead. Wait until all are ready. Raises `RendezvousError`: then nobody may
        start."""
        names = agents_of(planned)

        async def ask(node: str) -> None:
            if node == names[0]:
                word = replace(common, planned=planned.to_json())
            else:
                task = replace(task_of(planned, names, node), cwd=cwd, etcd=common.etcd)
                word = replace(common, task=task.to_json())
            self._streams[node].send(word)
            expected(await self._streams[node].receive(), Ready)

        _, unfit = await from_all([node for node in names if node in self._streams], ask, BIND_TIMEOUT)
        if unfit:
            raise refusal(unfit)

    def tell(self, word: Message) -> None:
        """Send `word` to all nodes; one that is gone will be missed by the master."""
        for stream in self._streams.values():
            stream.send(word)

    async def part(self, word: Message) -> None:
        """Send the last `word` to all nodes and close their streams."""
        await self._part([*self._streams], word)

    async def _part(self, nodes: Sequence[str], word: Message) -> None:
        for node in nodes:
            self._streams[node].send(word)
        await asyncio.gather(*(self._streams.pop(node).close() for node in nodes))

    def _trouble(self, first: Message, peer: str) -> Dismissed | None:
        if not isinstance(first, Offer):
            return Dismissed(f"the job has not begun, and {type(first).__name__} comes too early")
        if peer and first.node != peer:
            return Dismissed(f"its certificate is that of node {peer}, and it says that it is {first.node}")
        if first.node in self._offers:
            return Dismissed(
                f"a node called {first.node} is there already", "give it another name: --node-name"
            )
        if first.rank >= 0 and first.rank in (each.rank for each in self._offers.values()):
            return Dismissed(f"node rank {first.rank} is taken", "give each node a --node-rank of its own")
        if first.rank >= self._most or len(self._offers) >= self._most:
            return Dismissed(f"the job has {self._most} nodes", "see --nnodes")
        return None

    def _missing(self, least: int, timeout: float) -> RendezvousError:
        ranks = {each.rank for each in self._offers.values()}
        gone = [rank for rank in range(self._most) if rank not in ranks]
        names = ", ".join(self._names[rank] if self._names else f"node rank {rank}" for rank in gone)
        missing = f"; missing: {names}" if -1 not in ranks else ""
        came = ", ".join(each.node for each in self.offers)
        return RendezvousError(
            f"{len(self._offers)} of {least} nodes have come within {timeout:g} s: {came}{missing}",
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
    return AgentProcess(home / f".agent.{secrets.token_hex(8)}.log", task)


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
    expected(stream.receive(LAUNCHER_ANSWER_TIMEOUT), Ready)


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
