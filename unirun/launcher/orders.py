"""Translate the master's orders to the core's: the spawner, the environment and the id of each worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from unirun.failover.offers import AgentTask
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
from unirun.launcher.events import Launch, Store, Worker
from unirun.launcher.ports import PortBook
from unirun.launcher.timers import ENABLE
from unirun.launcher.warm.borrowing import wish
from unirun.observe.jobdir import JobDir
from unirun.spec.job import Probe
from unirun.spec.templates import Own, fill, fill_roles
from unirun.values import WorkerId
from unirun.wire.messages import OpenStore, Reserve, StartRole, StartWorker
from unirun.wire.reports import Placed
from unirun.wire.spawning import Borrow, ServeStore, Spawn


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

    def wish(self, key: SpawnerKey, descriptors: int = 0, inherited: Sequence[int] = ()) -> Borrow:
        """The parameters of the spawner with this key."""
        env = spawner_env(key, self._inherited)
        return wish(env, self.modules(key), self._task.cwd, descriptors, (*inherited, *self.stdin_for(key)))

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

    def store(self, order: OpenStore, fd: int) -> Store:
        """The store to serve on the listening socket `fd`."""
        return Store(self._store_key(order.role), ServeStore(order.role, order.generation, fd))

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
