"""``unirun.init()``: the role and rank of this worker, the other roles, calls and process groups across roles.

It also works under torchrun and under plain ``python script.py``: then there is one role, with the ranks of the
environment's variables or with one rank. So a script can be debugged without any launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from unirun.errors import ChannelError, FrameError, UnirunError, UsageError, WireError
from unirun.observe.spans import spans
from unirun.roles.calls.caller import Caller
from unirun.roles.calls.dispatcher import Dispatcher, Generations
from unirun.roles.calls.group import RoleGroup, role_group
from unirun.roles.calls.policy import Invocation, invocations
from unirun.roles.peers import Peers, RoleInfo, linked_peers, lone_peers
from unirun.roles.rank_sets import RankSet, group_rank
from unirun.roles.transport.protocol import LendingTransport, Transport
from unirun.values import WorkerId, split_endpoint
from unirun.wire.credentials import load_credentials
from unirun.wire.messages import RoleView
from unirun.wire.reporting import report_error
from unirun.wire.reports import Boundary, Notice, Serving, WorkerError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from unirun.roles.transport.torch_rpc import RpcAgent


class CallSession:
    """The transport, the caller and the role groups of one process, made when they are first used."""

    def __init__(
        self,
        peers: Peers,
        environ: Mapping[str, str],
        sockets: LendingTransport | None = None,
    ) -> None:
        """`sockets` is used in place of a `SocketTransport`."""
        self._peers, self._sockets = peers, sockets
        self.folder = Path(environ["UNIRUN_SOCKET"]).parent if "UNIRUN_SOCKET" in environ else None
        """The directory of this worker's job; None without a launcher."""
        self.me = WorkerId(peers.role, peers.rank, int(environ.get("UNIRUN_INCARNATION", "0")))
        # The address of this host that others can connect to, in a job of several hosts.
        self._addr = environ.get("UNIRUN_ADDR", "")
        self._lock = threading.RLock()
        self._transport: Transport | None = None
        self._agent: RpcAgent | None = None
        self._caller: Caller | None = None
        self._groups: dict[str, RoleGroup] = {}
        self._pid = os.getpid()
        # The number of the latest update that was read, and the addresses of the job's hosts in it.
        self._hosts: tuple[int, frozenset[str]] = (-1, frozenset())
        self.synced: dict[str, Callable[[int, float | None], int]] = {}
        """By the name of a channel, what publishes or receives a version of its weights in this worker."""

    @property
    def transport(self) -> Transport:
        """The transport of this process. Raises `UsageError` without a launcher, and in a fork of the worker."""
        with self._lock:
            if self._pid != os.getpid():
                raise UsageError(
                    "calls belong to the worker's own process, this is a fork of it", "call from there"
                )
            if self._transport is None:
                self._transport = self._open()
            return self._transport

    def _open(self) -> Transport:
        welcome = self._peers.welcome
        if welcome is None:
            raise UsageError(
                "calls need other roles, and this process has none", "start it with unirun --roles …"
            )
        if welcome.transport != "torch":
            return self.sockets
        from unirun.roles.transport.torch_rpc import TorchTransport

        return TorchTransport(self._rpc_agent())

    @property
    def sockets(self) -> LendingTransport:
        """The transport with the only listener of this process, for calls, weights and queues. Raises `UsageError`
        without a launcher."""
        with self._lock:
            if self._sockets is None:
                if self.folder is None:
                    raise UsageError("this process has no peers", "start it with unirun --roles …")
                from unirun.roles.transport.socket_transport import SocketTransport

                credentials = load_credentials(self.folder)
                self._sockets = SocketTransport(
                    self.folder / "calls", credentials, self._addr, self._refused, self._is_host
                )
            return self._sockets

    def _is_host(self, addr: str) -> bool:
        """Return True if a role's store or a worker of the job is at `addr`."""
        updates = self._peers.updates
        if self._hosts[0] != updates:
            self._hosts = updates, frozenset(hosts_in(self._peers.views()))
        return addr in self._hosts[1]

    def _refused(self, text: str, count: int) -> None:
        """Connections are refused in threads; the end of this process must not show."""
        with contextlib.suppress(WireError):
            self._peers.tell(Notice(str(self.me), f"{text} ({count} so far)", "refused"))

    def _rpc_agent(self) -> RpcAgent:
        """The agent of torch.distributed.rpc of this process; it listens from its first use on."""
        from unirun.roles.transport.torch_rpc import RpcAgent

        with self._lock:
            if self._agent is None:
                # torch wants a number for each worker, the same in all processes.
                bases, total = {}, 0
                for role in self._peers.roles():
                    bases[role], total = total, total + self._peers.count(role)
                welcome = self._peers.welcome
                polls = (
                    welcome is not None and welcome.transport == "torch" and total <= (os.cpu_count() or 1)
                )
                self._agent = RpcAgent(self.me, lambda who: bases[who.role] + who.rank, total, polls=polls)
            return self._agent

    def dispatcher(
        self, target: Any, methods: Mapping[str, Invocation], generations: Generations | None = None
    ) -> Dispatcher:
        """The dispatcher of the calls of `target` that come to this process, once `serve` was called."""
        return Dispatcher(
            target, self.me, methods, generations, self.transport.inbox(), open_rpc=self.open_rpc
        )

    def serve(self, dispatcher: Dispatcher) -> None:
        """Listen, and tell the agent where."""
        endpoint = self.transport.serve(self.me, dispatcher.handle)
        self._peers.tell(Serving({self.transport.name: endpoint}, recoverable=True))

    def open_rpc(self) -> tuple[WorkerId, str]:
        """Let this process be called by torch.distributed.rpc. Returns who it is, and the endpoint of its agent."""
        return self.me, self._rpc_agent().start()

    @property
    def caller(self) -> Caller:
        """The `Caller` of this process."""
        with self._lock:
            if self._caller is None:
                welcome = self._peers.welcome
                timeout = welcome.call_timeout if welcome else 0.0
                brief = self._peers.brief(self._peers.role)
                trains = brief is not None and brief.kind == "trainer"
                self._caller = Caller(
                    self.me,
                    self._peers,
                    self.transport,
                    call_timeout=timeout,
                    tell=self._peers.tell,
                    boundary=(lambda role: self._peers.tell(Boundary(role))) if trains else None,
                )
                at_exit(self._report)
            return self._caller

    def _report(self) -> None:
        """Report the last calls at the exit of this process, and not at that of a fork."""
        if self._caller is not None and self._pid == os.getpid():
            self._caller.report()

    def role_group(self, role: str) -> RoleGroup:
        """The handle on all workers of a role."""
        size = self._peers.known(role).world_size
        with self._lock:
            if role not in self._groups:
                self._groups[role] = role_group(self.caller, role, size, self._methods(role))
            return self._groups[role]

    def _methods(self, role: str) -> Mapping[str, Invocation] | None:
        """The methods of a role's workload class if its module is imported here already. Then the first call need not
        wait until a worker can be asked."""
        brief = self._peers.brief(role)
        if brief is None or brief.kind != "workload":
            return None
        module, _, name = brief.target.partition(":")
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        return invocations(found) if isinstance(found, type) else None

    def rpc_name(self, role: str, rank: int) -> str:
        """The name of a rank's worker in torch.distributed.rpc. Starts the RPC agents of both processes."""
        address, endpoint = self.caller.open_rpc(role, rank)
        try:
            return self._rpc_agent().known(address, endpoint)
        except RuntimeError as error:
            raise ChannelError(f"{address} cannot be reached: {error}") from error


def hosts_in(views: Iterable[RoleView]) -> Iterator[str]:
    """The addresses in `views`: those of stores, and of workers that listen for other hosts. Texts that are
    no address are left out."""
    from unirun.roles.transport.socket_transport import CallAddress

    for view in views:
        with contextlib.suppress(ValueError):
            yield split_endpoint(view.endpoint)[0]
        for worker in view.workers:
            for text in worker.addresses.values():
                with contextlib.suppress(FrameError):
                    if (tcp := CallAddress.parse(text).tcp) is not None:
                        yield tcp.addr


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
        sockets: LendingTransport | None = None,
    ) -> None:
        """`sockets` is the transport of a worker that is a thread."""
        self.peers = peers
        """The roles as the agent reports them. For unirun's own use, like `session`."""
        self.session = CallSession(peers, environ, sockets)
        """The calls of this process."""
        self.hub: Any = None
        """The weights and queues of this process, once `unirun.weights` has made it."""
        from unirun.roles.formation import GroupForge

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
        committed = environ.get("UNIRUN_COMMITTED_STEP")
        self.committed_step: int | None = None if committed is None else int(committed)
        """The last step that the roles of the job had committed together (`commit_job`) when this worker was started;
        None if there was none."""
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
        ``torch.distributed`` with this group, `src` and `dst` are these ranks. `group_rank`, ``group.rank()`` and
        ``torch.distributed.get_rank(group)`` tell one's own.

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


def at_exit(method: Callable[[], object]) -> None:
    """Call a method at the exit of this process, if its object lives until then."""
    kept = weakref.WeakMethod(method)

    def call() -> None:
        if (found := kept()) is not None:
            found()

    atexit.register(call)


_contexts: dict[int, Context] = {}
_of_thread: ContextVar[Context | None] = ContextVar("unirun-context", default=None)


@contextlib.contextmanager
def acting(context: Context) -> Iterator[None]:
    """A block in which `init` returns `context` in this thread, for a worker that is a thread."""
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


COMMIT_TIMEOUT = 120.0
"""Seconds within which the master must have answered `commit_job`: it may have died, and its successor comes."""


def commit_job(step: int, roles: Sequence[str] = ()) -> int | None:
    """Tell the job that this rank has saved what it needs to go on from `step`. Returns the last step that all ranks
    of all roles that take part have committed, None if there is none yet::

        for step in range(unirun.init().committed_step or 0, STEPS):
            ...
            if step % 100 == 99:
                save(step + 1)
                kept = unirun.commit_job(step + 1)

    Every rank of every role that takes part calls it after the same steps, and does not wait for the others. `roles`
    take part; by default all but services and programs. When the job restarts, all roles find the step in
    ``init().committed_step``, and in the environment as ``UNIRUN_COMMITTED_STEP``. Older checkpoints may be removed.

    A step that is not after the last common one changes nothing. Without the launcher nothing restarts, and it returns
    None. Raises `UsageError` for a negative step, `JobError` if ranks name different roles, `StoreAway` if the master
    does not answer.
    """
    if step < 0:
        raise UsageError(f"step {step} is negative", "count from 0")
    peers = init().peers
    return peers.commit(int(step), (*roles,), timeout=COMMIT_TIMEOUT) if peers.linked else None


# `unirun.serve`: a script serves an object, whose methods other roles call.


class Server:
    """An object that is being served in a thread."""

    def __init__(self, dispatcher: Dispatcher, thread: threading.Thread) -> None:
        self._dispatcher, self._thread = dispatcher, thread

    def close(self) -> None:
        """Stop serving. The current call is waited for."""
        self._dispatcher.stop()
        self._thread.join()
        self._dispatcher.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(target: Any, *, block: bool = True) -> Server | None:
    """Let other roles call the public methods of `target`: ``ctx.role_group("rollout").generate(x)``.

    Calls run in this thread, one at a time, until every role that does not serve has ended; then `serve` returns None.
    With ``block=False`` it returns a `Server` at once, and calls run in a thread of their own until its `close`. May be
    called once per process. Raises `UsageError` without a launcher.
    """
    context = init()
    peers, session = context.peers, context.session
    dispatcher = session.dispatcher(target, invocations(target))
    session.serve(dispatcher)
    if not block:
        thread = threading.Thread(target=_serve_beside, args=(dispatcher, peers), daemon=True)
        thread.name = "unirun-serve"
        thread.start()
        return Server(dispatcher, thread)

    def changed() -> None:
        if callers_are_gone(peers):
            dispatcher.stop()

    peers.when_changed(changed)
    changed()
    dispatcher.serve()
    dispatcher.close()
    return None


def _serve_beside(dispatcher: Dispatcher, peers: Peers) -> None:
    """Serve in this thread. If nobody can connect to this process any more, it ends with an error. SystemExit in a
    method ends the program, as SIGTERM does."""
    try:
        dispatcher.serve()
    except SystemExit:
        signal.raise_signal(signal.SIGTERM)
    except ChannelError as error:
        trace = traceback.format_exc()
        report_error(error)
        with contextlib.suppress(UnirunError):
            peers.tell(WorkerError(f"{type(error).__name__}: {error}", trace, time.time()))
        spans().close()
        os._exit(1)


def callers_are_gone(peers: Peers) -> bool:
    """Return True if there are workers that do not serve calls, and all of them have exited with code 0."""
    silent = [
        worker
        for role in peers.views()
        if not any(worker.phase == "serving" for worker in role.workers)
        for worker in role.workers
    ]
    return bool(silent) and all(worker.phase == "ended" for worker in silent)
