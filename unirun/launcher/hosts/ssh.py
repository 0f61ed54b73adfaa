"""A job on hosts that one command reaches by ssh: ``--hosts`` and ``--hostfile``.

The first host is the head, on which the first master runs. The command follows it from here, and keeps a copy of the
job's directory (`mirror`), so that ``unirun status`` and ``logs`` work here as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from unirun.collocation import Inventory
from unirun.errors import Fault, JobError, RendezvousError
from unirun.failover.offers import misfits, versions
from unirun.launcher.environment import carried
from unirun.launcher.hostlist import Host
from unirun.launcher.hosts.connection import RemoteNode, reach
from unirun.launcher.hosts.copying import Mirror, copy_on, record_hosts, send_tree
from unirun.launcher.hosts.lobby import Lobby, from_all, refusal
from unirun.launcher.hosts.node import needs
from unirun.launcher.local import RunningJob
from unirun.launcher.planned import PlannedJob
from unirun.observe.jobdir import JobDir
from unirun.observe.status import read_status
from unirun.rendezvous.creation import create_job, new_uid
from unirun.spec.job import JobSpec
from unirun.wire.address import TcpAddress
from unirun.wire.certificates import make_tls
from unirun.wire.handshake import Token, new_token
from unirun.wire.messages import AgentTask, Dismissed, Invite, Offer, Ready, W
from unirun.wire.reporting import gave_up

COMMAND = "command"
"""The name in the certificate of a command that is no node."""

NO_MASTER_TIMEOUT = 15.0
"""Seconds without a master after which a job on other hosts is given up. A master that dies has a successor in one or
two."""

NO_MASTER_STORE_TIMEOUT = 60.0
"""The same when masters may run on several hosts: one whose host falls silent has a successor when its term is over and
the hosts have noticed."""

NO_MASTER_BUSY_TIMEOUT = 300.0
"""The same while connections to the master's address are made, but come to nothing: its host is there, and busy. An
agent there that has no master says so, and is not busy."""

OUTPUT_DRAIN_TIMEOUT = 10.0
"""Seconds that hosts have to send the rest of their output after the job's end."""


async def invite_all(
    hosts: Sequence[Host],
    invitation: Callable[[Host], Invite],
    kind: type[W],
    timeout: float,
    faults: Callable[[list[W]], list[Fault]] = lambda _: [],
) -> list[tuple[RemoteNode, W]]:
    """Start the process of a node on each of `hosts`, send it its invitation, and hear its answer, a `kind`.

    Raises `RendezvousError` with all that went wrong and, in that case, the `faults` that the answers of the others
    tell: all that has to be mended, at once. Then no connection is left.
    """
    named = {host.name: host for host in hosts}
    remotes: dict[str, RemoteNode] = {}

    async def ask(name: str) -> W:
        remote = remotes[name] = await reach(named[name])
        remote.stream.send(invitation(remote.host))
        return await remote.hear(kind)

    try:
        answers, unfit = await from_all([*named], ask, timeout, lambda name: f"try: ssh {named[name].target}")
        if unfit:
            raise refusal([*unfit, *faults([*answers.values()])])
    except BaseException:
        await asyncio.gather(*(remote.close() for remote in remotes.values()))
        raise
    return [(remotes[name], answers[name]) for name in named]


HOST_JOIN_TIMEOUT = 60.0
"""Seconds that a host has to join a running job."""


def join_over_ssh(
    hosts: Sequence[Host], masters: TcpAddress, token: Token, *, interface: str, insecure: bool
) -> list[Host]:
    """Let `hosts` join the job whose masters listen at `masters`. Their agents do not depend on this process. Returns
    them with their names in the job.

    Raises `RendezvousError` with all hosts that have not joined.
    """

    def invitation(host: Host) -> Invite:
        return Invite(
            token.hex(),
            host.name,
            head=masters,
            interface=interface,
            insecure=insecure,
            cwd=os.getcwd(),
            env=carried(os.environ),
        )

    async def join() -> list[Host]:
        joined = await invite_all(hosts, invitation, Ready, HOST_JOIN_TIMEOUT)
        await asyncio.gather(*(remote.close() for remote, _ in joined))
        return [replace(remote.host, name=ready.node) for remote, ready in joined]

    return asyncio.run(join())


def run_over_ssh(
    hosts: Sequence[Host],
    spec: JobSpec,
    make_plan: Callable[[Inventory], PlannedJob],
    *,
    store: str | None,
    interface: str,
    insecure: bool,
    quiet: bool,
    sync: bool,
    detach: bool,
) -> int:
    """Run a job on `hosts`; `make_plan` plans it for what they have. With `sync` they get the working tree before.
    Returns the job's exit code, with `detach` 0 when it has begun.

    Raises `RendezvousError` with all hosts that cannot take part, and what `make_plan` raises.
    """

    invite = Invite(
        new_token().hex(),
        COMMAND,
        spec=spec,
        interface=interface,
        insecure=insecure,
        detach=detach,
        cwd=os.getcwd(),
        env=carried(os.environ),
    )

    async def play() -> int:
        if sync:
            await send_tree(hosts, Path.cwd(), needs(spec, os.getcwd()))
        return await _play(hosts, invite, spec, make_plan, store=store, quiet=quiet)

    return asyncio.run(play())


async def _play(
    hosts: Sequence[Host],
    invite: Invite,
    spec: JobSpec,
    make_plan: Callable[[Inventory], PlannedJob],
    *,
    store: str | None,
    quiet: bool,
) -> int:
    """Launch and follow a job to which all `hosts` get the same `invite`, with their names in it."""
    lobby, remotes, uid = Lobby(len(hosts)), dict[str, RemoteNode](), new_uid()

    def plan(inventory: Inventory) -> PlannedJob:
        planned = make_plan(allowed(hosts, inventory))
        # Each host logs in the node's own directory, and this one keeps a copy of all where the user wants it.
        return replace(planned, spec=replace(planned.spec, log=replace(planned.spec.log, dir=None)))

    try:
        found = await invite_all(
            hosts,
            lambda host: replace(invite, node=host.name, leads=host is hosts[0]),
            Offer,
            spec.join_timeout,
            lambda offers: misfits(offers, versions()),
        )
        for remote, offer in found:
            remotes[remote.host.name] = remote
            lobby.enter(offer, remote.stream)
        planned, tasks = await lobby.assign(
            plan, uid=uid, store=store, insecure=invite.insecure, cwd=invite.cwd
        )
        for node in remotes.keys() - tasks.keys():
            await remotes.pop(node).close()
        head = next(iter(tasks.values()))
        with _own_directory(invite, head, spec.log.dir) as (job, lock):
            lobby.tell(Ready())
            record_hosts(job, [remote.host for remote in remotes.values()])
            if invite.detach:
                return await _leave(job, lock, remotes[head.node])
            return await _follow(job, planned.spec, remotes, quiet=quiet)
    except BaseException as error:
        await lobby.part(Dismissed(f"the job was not started: {error}"))
        raise
    finally:
        await asyncio.gather(*(remote.close() for remote in remotes.values()))


def allowed(hosts: Sequence[Host], inventory: Inventory) -> Inventory:
    """The slots of `hosts`, cut to those that the user allows."""
    slots = {host.name: host.slots for host in hosts}
    nodes = []
    for node in inventory.nodes:
        count = slots[node.name]
        if count is not None and node.devices:
            node = replace(node, devices=node.devices[:count])
        elif count is not None:
            node = replace(node, cpus=node.cpus[:count])
        nodes.append(node)
    return Inventory(tuple(nodes))


@contextlib.contextmanager
def _own_directory(invite: Invite, head: AgentTask, logs: str | None) -> Iterator[tuple[JobDir, int]]:
    """The command's directory of the job, with its lock."""
    token, store = Token(bytes.fromhex(invite.token)), head.store or None
    address = None if store else head.head
    job, lock = create_job(head.spec.run_id, token, logs, store, uid=head.uid, head=address)
    try:
        make_tls(job.path, token, COMMAND, insecure=invite.insecure)
        yield job, lock
    finally:
        os.close(lock)


async def _leave(job: JobDir, lock: int, head: RemoteNode) -> int:
    """Leave the job to itself when its first master leads. Another process goes on copying its files."""
    word = await head.stream.receive()
    if isinstance(word, Dismissed):
        raise RendezvousError(word.problem, word.remedy)
    copy_on(job, lock)
    return 0


async def _follow(job: JobDir, spec: JobSpec, remotes: Mapping[str, RemoteNode], *, quiet: bool) -> int:
    # Imported while the agents start.
    from unirun.launcher.foreground.console import Console
    from unirun.launcher.foreground.session import JobFollower

    console = Console(quiet=quiet)
    running = RemoteJob(job, spec, remotes)
    copy = Mirror(job, remotes, console.note, running.came, running.complete, running.silent)
    copying = asyncio.create_task(copy.run())
    try:
        return await JobFollower(running, console).run()
    finally:
        copying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await copying


class RemoteJob(RunningJob):
    """A job on other hosts, which tell of their agents. This process reaches none of them: when it is gone, their
    master ends them."""

    copied = True

    def __init__(
        self, job: JobDir, spec: JobSpec, nodes: Iterable[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(job, spec, None, ())
        self.owned, self._clock = True, clock
        # The nodes whose agents live, as far as is known, or whose files are not here yet.
        self._nodes = set(nodes)
        self._silent: set[str] = set()
        # Whether an agent has ended while no master was known.
        self._ended_alone = False
        self._changed = threading.Condition()
        self._alone_since: float | None = None
        # The last time at which the kernel of a master's host accepted a connection.
        self._taken = 0.0

    def led_by(self, master: int) -> None:
        """A master was reached."""
        self._alone_since, self._ended_alone = None, False

    def came(self, node: str) -> None:
        """Files of `node` are copied."""
        with self._changed:
            self._nodes.add(node)

    def complete(self, node: str) -> None:
        """The agent of `node` has ended, and all its files are here."""
        with self._changed:
            self._nodes.discard(node)
            self._ended_alone |= self._alone_since is not None
            self._changed.notify_all()

    def silent(self, node: str, lost: bool) -> None:
        """Note that `node` has fallen silent, or is back."""
        with self._changed:
            (self._silent.add if lost else self._silent.discard)(node)
            self._changed.notify_all()

    def given_up(self, led: bool, busy: bool | None = None) -> bool:
        """Return True to stop looking for a master; `busy` as for any job.

        Stop also when only hosts answer whose agents have ended without a master: then too many are lost.
        """
        self._alone_since = self._alone_since or self._clock()
        if self._ended_alone and self._nodes <= self._silent:
            return True
        now = self._clock()
        if busy is not None:
            # A head without a master may break off connections, too.
            self._taken = now if busy else 0.0
        limit = NO_MASTER_TIMEOUT if self.job.head is not None else NO_MASTER_STORE_TIMEOUT
        return (
            not self._nodes
            or now > max(self._alone_since, self._taken) + limit
            or now > self._alone_since + NO_MASTER_BUSY_TIMEOUT
        )

    def reap(self) -> None:
        """Do nothing: the only children are those of ssh, whose ends asyncio waits for."""

    def end(self, led: bool = True, farewell: float | None = None) -> int | None:
        """Wait for the rest of the nodes' files; those that are lost are not waited for."""
        patience = OUTPUT_DRAIN_TIMEOUT if farewell is None else min(farewell, OUTPUT_DRAIN_TIMEOUT)
        with self._changed:
            came = self._changed.wait_for(lambda: self._nodes <= self._lost() | self._silent, patience)
        if not came and patience:
            gave_up("the rest of the nodes' files", patience)
        return None

    def _lost(self) -> set[str]:
        """The nodes that have been given up or drained, by the copy of the job's status."""
        try:
            status = read_status(self.job)
        except JobError:
            return set()
        return {*status.lost, *status.left}
