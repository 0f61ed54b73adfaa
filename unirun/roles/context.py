"""``unirun.init()``: the role and rank of this worker, the other roles, and process groups across roles.

It also works under torchrun and under plain ``python script.py``: then there is one role, with the ranks of the
environment's variables or with one rank. So a script can be debugged without any launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from unirun.errors import UsageError
from unirun.roles.groups import GroupForge, RankSet, group_rank
from unirun.roles.peers import Peers, RoleInfo, linked_peers, lone_peers
from unirun.roles.session import CallSession

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from unirun.roles.calls.group import RoleGroup
    from unirun.roles.transport.protocol import LendingTransport

GROUP_TIMEOUT = timedelta(minutes=30)
"""torch's default for a process group."""


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A position in a role; printed as ``actor:2``."""

    role: str
    rank: int

    def __str__(self) -> str:
        return f"{self.role}:{self.rank}"


class Context:
    """This worker and the roles of its job. `init` returns it; there is one per process.

    ::

        ctx = unirun.init()
        both = ctx.group("actor", "rollout")  # called by every worker of both roles
        torch.distributed.broadcast(weights, src=0, group=both)  # from actor:0, its rank 0
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        peers: Peers,
        listener: Callable[[str], LendingTransport] | None = None,
    ) -> None:
        """`listener` makes transports in place of those of a process, for workers that are threads."""
        self.peers = peers
        """The roles as the agent reports them. For unirun's own use, like `session`."""
        self.session = CallSession(peers, environ, listener)
        """The calls of this process."""
        self._forge = GroupForge(peers)
        self.role: str = peers.role
        """The name of this worker's role."""
        self.rank: int = peers.rank
        """The rank in the role and in its default process group, 0..world_size-1."""
        self.local_rank: int = int(environ.get("LOCAL_RANK", "0"))
        """The rank among the role's workers on this node."""
        self.local_world_size: int = int(environ.get("LOCAL_WORLD_SIZE", "1"))
        """The number of workers of the role on this node."""
        self.incarnation: int = int(environ.get("UNIRUN_INCARNATION", "0"))
        """The number of times that this rank was started again; 0 at first."""
        self.node: str = environ.get("UNIRUN_NODE", "localhost")
        """The name of this node."""
        self.job: str = environ.get("UNIRUN_JOB", environ.get("TORCHELASTIC_RUN_ID", ""))
        """The job's id; empty without a launcher."""
        self.config: Mapping[str, Any] = MappingProxyType(peers.config)
        """The ``config:`` section of the job file."""

    @property
    def roles(self) -> Mapping[str, RoleInfo]:
        """Every role of the job as it is now, by name: ``ctx.roles["rollout"].world_size``."""
        return self.peers.roles()

    @property
    def world_size(self) -> int:
        """The number of ranks of this worker's role."""
        return self.roles[self.role].world_size

    @property
    def generation(self) -> int:
        """The number of times that the process group of this worker's role was formed again; 0 for the first one."""
        return self.peers.generation

    def members(self, role: str) -> tuple[Member, ...]:
        """Every member of `role` in rank order. Raises `UsageError` for a role that the job does not have."""
        return tuple(Member(role, rank) for rank in range(self.peers.known(role).world_size))

    def group(
        self, *roles: str, backend: str | None = None, timeout: timedelta = GROUP_TIMEOUT
    ) -> ProcessGroup:
        """The process group of `roles`, beside each role's default group: of all of their ranks, or of those that are
        named, as in ``group("actor:0", "rollout:0-3,7")``.

        Its ranks are ordered by role as named, then by rank: with 2 actors and 3 rollouts, ``group("actor",
        "rollout")`` has actor:0, actor:1, rollout:0, rollout:1, rollout:2 as its ranks 0..4. In collectives of
        ``torch.distributed`` with this group, `src` and `dst` are these ranks. Use `group_rank` or ``group.rank()``
        to get one's own; ``torch.distributed.get_rank(group)`` is wrong here, as it translates the rank in the
        default group.

        Every member must call it, with the same names in the same order. As long as no role was restarted, later calls
        return the same group. When one of the roles is restarted, operations on the old group fail in every member;
        call `group` again to form the next one with the new workers. `backend` is by default that of the default
        group, else gloo (and nccl for CUDA tensors). `timeout` is 30 minutes by default and holds for the group's
        operations too.

        Raises `GroupError` when the members do not meet within `timeout`, `UsageError` for wrong names.
        """
        rank_sets = self._rank_sets(roles)
        named = [rank_set.role for rank_set in rank_sets]
        mine = group_rank(rank_sets, [self.peers.known(role) for role in named], self.role, self.rank)
        if mine is None or len(set(named)) != len(named):
            raise UsageError(
                f"group({', '.join(map(repr, roles))}) is called by {self.role}:{self.rank}",
                "name each role once, the caller's among them",
            )
        return self._forge.group(rank_sets, backend, timeout)

    def _rank_sets(self, roles: tuple[str, ...]) -> tuple[RankSet, ...]:
        rank_sets = tuple(map(RankSet.parse, roles))
        for rank_set in rank_sets:
            rank_set.members(self.peers.known(rank_set.role))
        return rank_sets

    def group_rank(self, *roles: str, member: Member | None = None) -> int:
        """The rank of `member` (default: this worker) in ``group(*roles)``.

        Raises ValueError if it is no member.
        """
        who = member or Member(self.role, self.rank)
        rank_sets = self._rank_sets(roles)
        found = group_rank(rank_sets, [self.peers.known(p.role) for p in rank_sets], who.role, who.rank)
        if found is None:
            raise ValueError(f"{who} is not in group({', '.join(map(repr, roles))})")
        return found

    def role_group(self, role: str) -> RoleGroup:
        """The `RoleGroup` of `role`, whose workers call `unirun.serve` or are workloads.

        Raises `UsageError` for a role that the job does not have, and without a launcher.
        """
        return self.session.role_group(role)

    def __repr__(self) -> str:
        return (
            f"<{self.role}:{self.rank} of {self.world_size}, generation {self.generation}, job {self.job!r}>"
        )


_contexts: dict[int, Context] = {}
_of_thread: ContextVar[Context | None] = ContextVar("unirun-context", default=None)


@contextmanager
def acting(context: Context) -> Iterator[None]:
    """In this thread, `init` returns `context`: it is that of a worker which is no process."""
    token = _of_thread.set(context)
    try:
        yield
    finally:
        _of_thread.reset(token)


def init(environ: Mapping[str, str] | None = None) -> Context:
    """The context of this process: its role and rank, the other roles, groups with them. Every call returns the same
    one.

    It works under unirun, under torchrun and under plain ``python script.py``. Without unirun there is one role, with
    the ranks that the environment tells. `environ` replaces ``os.environ``.

    Raises `WireError` or `RendezvousError` when the agent of this node does not answer.
    """
    context = _of_thread.get()
    if context is not None:
        return context
    pid = os.getpid()
    if pid not in _contexts:
        environ = os.environ if environ is None else environ
        peers = linked_peers(environ) if "UNIRUN_SOCKET" in environ else lone_peers(environ)
        _contexts[pid] = Context(environ, peers)
    return _contexts[pid]


def rpc_name(role: str, rank: int) -> str:
    """The name of a worker in ``torch.distributed.rpc``: ``rpc.rpc_sync(unirun.rpc_name("rollout", 0), fn)``.

    The first call for a worker starts the RPC agent of both processes; a job that never asks has none. It waits until
    the worker serves calls. The name belongs to the process, so ask again after the worker was started again. Raises
    `InvocationTimeout`, `WorkerLost` if the worker has ended, `ChannelError` if torch cannot reach it.
    """
    return init().session.rpc_name(role, rank)
