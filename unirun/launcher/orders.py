"""Translate the master's orders to the core's: the spawner, the environment and the id of each worker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from unirun.job.offers import AgentTask
from unirun.launcher.environment import (
    FRESH,
    SpawnerKey,
    base_env,
    bound_to,
    is_fresh,
    spawner_env,
    spawner_key,
    worker_env,
)
from unirun.launcher.events import Launch, Store, Worker
from unirun.launcher.timers import ENABLE
from unirun.launcher.warm.borrowing import wish
from unirun.rendezvous import JobDir
from unirun.values import WorkerId
from unirun.wire.messages import OpenStore, StartRole, StartWorker
from unirun.wire.spawning import Borrow, ServeStore, Spawn

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
        self._job, self._task, self._spec = job, task, task.spec
        self._inherited, self._stdin = inherited, stdin
        self._last_id = 0

    @property
    def in_place(self) -> frozenset[str]:
        """The roles whose workers are restarted one by one."""
        return frozenset(role.name for role in self._spec.roles if role.restart == "process")

    @property
    def spawners(self) -> tuple[SpawnerKey, ...]:
        """The keys of all spawners that the job needs, that of the first store first."""
        names = [role.name for role in self._spec.roles]
        return tuple(dict.fromkeys([*map(self._store_key, names), *map(self._key, names)]))

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
        for member in order.members:
            self._last_id += 1
            workers.append(
                Worker(
                    id=self._last_id,
                    who=WorkerId(order.role, member.rank, member.incarnation),
                    spawner=self._key(order.role),
                    request=self._spawn(order, member),
                    grace=self._spec.shutdown_timeout,
                )
            )
        return Launch(tuple(workers))

    def _spawn(self, order: StartRole, member: StartWorker) -> Spawn:
        """The request that starts one worker."""
        role = self._spec.role(order.role)
        logs = self._job.worker_logs(WorkerId(order.role, member.rank, member.incarnation))
        return Spawn(
            id=self._last_id,
            title=f"{order.role}:{member.rank}",
            kind=role.entry.kind,
            target=role.entry.target,
            args=tuple(arg.replace("${local_rank}", str(member.local_rank)) for arg in role.entry.args),
            fresh=is_fresh(self._spec, order.role, self._inherited),
            env=worker_env(self._spec, order, member, self._job, self._task.node, self._inherited),
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

    def _store_key(self, role: str) -> SpawnerKey:
        """The spawner that serves the store of `role`: its own or, when that does not import torch, another role's."""
        forking = [r.name for r in self._spec.roles if not is_fresh(self._spec, r.name, self._inherited)]
        if forking:
            return self._key(role if role in forking else forking[0])
        return spawner_key(self._inherited)
