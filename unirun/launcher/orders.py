"""Translate the master's orders to the core's: the spawner, the environment and the id of each worker."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from unirun.errors import RendezvousError
from unirun.launcher.environment import (
    FRESH,
    SpawnerKey,
    base_env,
    bound_to,
    is_fresh,
    spawner_env,
    spawner_key,
    with_env_files,
    worker_env,
)
from unirun.launcher.events import Launch, RendezvousStore, Worker
from unirun.launcher.timers import ENABLE
from unirun.observe.jobdir import JobDir
from unirun.spec.job import Probe
from unirun.spec.programs import Own, fill, fill_roles
from unirun.values import RankAddress, WorkerId
from unirun.wire.messages import AgentTask, Reserve, StartRole, StartWorker
from unirun.wire.reports import Borrow, OpenStore, Placed, Spawn

# The ports of ranks: an agent chooses them, and no other agent of this host chooses the same ones.
#
# A port cannot be held for a program, which binds it itself. So it is taken from a range in which no client gets ports,
# and each agent shows which it has given away: it holds a socket with the name ``unirun-port-N`` in Linux's abstract
# namespace of unix sockets. There is one such namespace for each network namespace, as for ports, and a name is free
# again as soon as its process has ended.


class PortBook:
    """The ports that one agent has given to ranks on this host."""

    def __init__(self, host: str, low: int, high: int) -> None:
        """Give away ports from `low` to `high`, of programs that listen at `host`."""
        self._host, self._low, self._high = host, low, high
        self._held: dict[int, socket.socket] = {}
        self._places: dict[tuple[str, int], RankAddress] = {}
        # Jobs that begin at the same moment look at different ports first.
        self._next = random.randint(low, high)

    def place(self, role: str, rank: int, count: int) -> RankAddress:
        """The place of a rank with `count` ports, the same each time. Raises `RendezvousError` when none is free."""
        found = self._places.get((role, rank))
        if found is None or len(found.ports) != count:
            before = {*self._held}
            try:
                ports = tuple(self._choose() for _ in range(count))
            except RendezvousError:
                for port in self._held.keys() - before:
                    self._held.pop(port).close()
                raise
            found = self._places[role, rank] = RankAddress(self._host, ports)
        return found

    def release_taken(self, role: str, rank: int) -> bool:
        """Forget the ports of a rank that has ended if a process listens on one of them. Returns whether it does.

        That port stays out of use here.
        """
        place = self._places.get((role, rank))
        if place is None or all(map(is_free, place.ports)):
            return False
        del self._places[role, rank]
        for port in filter(is_free, place.ports):
            self._held.pop(port).close()
        return True

    def _choose(self) -> int:
        size = self._high - self._low + 1
        for _ in range(size):
            port, self._next = self._next, self._low + (self._next + 1 - self._low) % size
            if port not in self._held and (name := _claimed(port)) is not None:
                if is_free(port):
                    self._held[port] = name
                    return port
                name.close()
        raise RendezvousError(
            f"no port from {self._low} to {self._high} is free on this host", "widen port_range: 20000-29999"
        )

    def close(self) -> None:
        """Give all ports back."""
        for name in self._held.values():
            name.close()
        self._held.clear()


def _claimed(port: int) -> socket.socket | None:
    """A socket with the name of `port`; None when another process has it."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0unirun-port-{port}")
    except OSError:
        name.close()
        return None
    return name


def is_free(port: int) -> bool:
    """Return True if no process of this host listens on `port`, at whatever address."""
    for family, anywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family) as probe:
                # Connections that have ended do not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((anywhere, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
    return True


def _probe(probe: Probe | None, filled: Callable[[str], str]) -> Probe | None:
    """`probe` of one worker, without names; a TCP probe without an address is about its first port."""
    if probe is None:
        return None
    words = probe.words or (("{addr}",) if probe.kind == "tcp" else ())
    return replace(probe, words=tuple(map(filled, words)))


PRELOAD = ("torch", "torch.distributed", "torch.distributed.elastic.multiprocessing.errors")
"""Modules that every spawner imports; ``--preload`` adds to them."""

PRELOAD_CALLS = ("unirun.roles.worker_main",)
"""Modules that a spawner imports in addition when a role of it may serve or make calls."""

CALLS = ("workload", "trainer", "function")
"""The kinds of entries that `unirun.roles.worker_main` runs, which may serve or make calls."""


def on_host(task: AgentTask, addr: str, cwd: str) -> AgentTask:
    """The task of an agent on one of several hosts: there stores, process groups and calls are at `addr`."""
    env = {**bound_to(addr, os.environ), **task.spec.env}
    return replace(task, cwd=cwd, addr=addr, spec=replace(task.spec, master_addr=addr, env=env))


def spawner_request(
    env: Mapping[str, str],
    modules: Sequence[str],
    cwd: str,
    descriptors: int = 0,
    inherited: Sequence[int] = (),
) -> Borrow:
    """The parameters of a spawner as this process would start it."""
    umask = next(
        line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("Umask")
    )
    return Borrow(
        cwd=cwd,
        modules=tuple(modules),
        env=dict(env),
        umask=int(umask, 8),
        descriptors=descriptors,
        inherited=tuple(inherited),
    )


class Orders:
    """Translates the orders for one node. `inherited` is the environment of its agent, `stdin` a descriptor for the
    job's reader."""

    def __init__(
        self, job: JobDir, task: AgentTask, inherited: Mapping[str, str], stdin: int | None = None
    ) -> None:
        self._job, self._task, self._spec = job, task, with_env_files(task.spec)
        self._inherited, self._stdin = inherited, stdin
        self._last_id = 0

    @property
    def in_place(self) -> frozenset[str]:
        """The roles whose workers are restarted one by one."""
        return frozenset(role.name for role in self._spec.roles if role.restart == "process")

    @property
    def companions(self) -> frozenset[str]:
        """The roles that bring weights into engines."""
        return frozenset(role.name for role in self._spec.roles if role.beside)

    @property
    def spawners(self) -> tuple[SpawnerKey, ...]:
        """The keys of all spawners that the job needs, that of the first store first."""
        names = [role.name for role in self._spec.roles]
        stores = [self._store_key(role.name) for role in self._spec.roles if not role.is_program]
        return tuple(dict.fromkeys([*stores, *map(self._key, names)]))

    @property
    def timers(self) -> bool:
        """True if a role enables torch's timers."""
        roles = (base_env(self._spec, role.name, self._inherited) for role in self._spec.roles)
        return any(env.get(ENABLE) == "1" for env in roles)

    def modules(self, key: SpawnerKey) -> tuple[str, ...]:
        """Modules that a spawner imports before it forks; only torch's if it just serves stores."""
        if key == FRESH:
            return ()
        roles = [role for role in self._spec.roles if self._key(role.name) == key]
        calls = PRELOAD_CALLS if any(role.entry.kind in CALLS for role in roles) else ()
        return (*PRELOAD, *calls, *(self._spec.preload if roles else ()))

    def spawner_request(self, key: SpawnerKey, descriptors: int = 0, inherited: Sequence[int] = ()) -> Borrow:
        """The parameters of the spawner with this key."""
        env = spawner_env(key, self._inherited)
        return spawner_request(
            env, self.modules(key), self._task.cwd, descriptors, (*inherited, *self.stdin_for(key))
        )

    def launch(self, order: StartRole) -> Launch:
        """The workers to start, each with a new id."""
        workers = []
        companion = next((each.name for each in self._spec.roles if each.beside == order.role), "")
        for member in order.members:
            self._last_id += 1
            role, filled = self._spec.role(order.role), self._filler(order, member)
            probed = role.head(member.rank) == member.rank
            workers.append(
                Worker(
                    id=self._last_id,
                    who=WorkerId(order.role, member.rank, member.incarnation),
                    spawner=self._key(order.role),
                    request=self._spawn(order, member, filled),
                    grace=self._spec.shutdown_timeout,
                    ready=_probe(role.ready, filled) if probed else None,
                    ready_timeout=role.ready_timeout,
                    alive=_probe(role.alive, filled) if probed else None,
                    url=filled("http://{addr}") if probed and companion else "",
                    companion=companion if probed else "",
                )
            )
        return Launch(tuple(workers))

    def _filler(self, order: StartRole, member: StartWorker) -> Callable[[str], str]:
        """A function that replaces the names in a text of one worker."""
        roles = {role.name: role for role in self._spec.roles}
        own = Own(
            *(order.role, member.rank, order.world_size, self._task.addr),
            node_rank=order.group_rank,
            nodes=order.group_world_size,
        )
        return lambda text: fill(text, own, roles, order.places)

    def _with_roles(self, text: str, order: StartRole) -> str:
        """A text of all roles, in which only addresses of roles are filled in."""
        return fill_roles(text, {role.name: role for role in self._spec.roles}, order.places)

    def _spawn(self, order: StartRole, member: StartWorker, filled: Callable[[str], str]) -> Spawn:
        """The request that starts one worker."""
        role = self._spec.role(order.role)
        env = worker_env(self._spec, order, member, self._job, self._task.node, self._inherited)
        env |= {name: filled(text) for name, text in role.env.items() if env.get(name) == text}
        env |= {
            name: self._with_roles(text, order)
            for name, text in self._spec.env.items()
            if name not in role.env and env.get(name) == text
        }
        logs = self._job.worker_logs(WorkerId(order.role, member.rank, member.incarnation))
        return Spawn(
            id=self._last_id,
            title=f"{order.role}:{member.rank}",
            kind=role.entry.kind,
            target=role.entry.target,
            args=tuple(
                filled(arg.replace("${local_rank}", str(member.local_rank))) for arg in role.entry.args
            ),
            fresh=is_fresh(self._spec, order.role, self._inherited),
            env=env,
            cwd=role.cwd or self._task.cwd,
            logs=str(self._job.logs),
            folder=str(logs.relative_to(self._job.logs)),
            cpus=member.cpus,
            stdin=self._stdin if (order.role, member.rank) == self._spec.reader else None,
        )

    def store(self, order: OpenStore, fd: int) -> RendezvousStore:
        """The store to serve on the listening socket `fd`."""
        return RendezvousStore(self._store_key(order.role), replace(order, fd=fd))

    def stdin_for(self, key: SpawnerKey) -> list[int]:
        """The descriptors, one or none, that the spawner with this key must inherit for the job's reader."""
        reader = self._spec.reader
        if self._stdin is None or reader is None or key != self._key(reader[0]):
            return []
        return [self._stdin]

    def _key(self, role: str) -> SpawnerKey:
        if is_fresh(self._spec, role, self._inherited):
            return FRESH
        return spawner_key(base_env(self._spec, role, self._inherited))

    def place(self, book: PortBook, order: Reserve) -> Placed:
        """The answer to the order for ports. Raises `RendezvousError`."""
        count = len(self._spec.role(order.role).ports)
        places = tuple(book.place(order.role, rank, count) for rank in order.ranks)
        return Placed(self._task.node, order.role, order.ranks, places)

    def _store_key(self, role: str) -> SpawnerKey:
        """The spawner that serves the store of `role`: its own or, when that does not import torch, another role's."""
        forking = [r.name for r in self._spec.roles if not is_fresh(self._spec, r.name, self._inherited)]
        if forking:
            return self._key(role if role in forking else forking[0])
        return spawner_key(self._inherited)
