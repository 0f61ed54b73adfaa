"""`run_in_process`: workloads and a trainer as threads of this process, for notebooks and debuggers."""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from unirun.errors import ChannelError, UsageError
from unirun.roles.calls.caller import Caller
from unirun.roles.calls.group import RoleGroup, role_group
from unirun.roles.calls.policy import invocations
from unirun.roles.context import Context, acting
from unirun.roles.peers import Peers, RoleInfo
from unirun.roles.transport.protocol import (
    CALLS,
    Connection,
    Handler,
    Inbox,
    Parcel,
    Scheduler,
    await_end,
    own,
)
from unirun.roles.workload import BaseTrainer, BaseWorkload, MasterHandle, bind
from unirun.spec.roles import TRAINER
from unirun.values import WorkerId
from unirun.wire.messages import RoleBrief, RoleView, View, Welcome, WorkerView
from unirun.wire.reporting import report_error
from unirun.wire.reports import Listening, Message, Serving

if TYPE_CHECKING:
    # Its import takes a tenth of a second, also in scripts that need none of it.
    from omegaconf import DictConfig

# Calls between threads of one process, for tests and notebooks. Values are copied as on every other transport.

_servers: dict[str, InprocTransport] = {}
_numbers = itertools.count()
_lock = threading.Lock()
"""Guards `_servers`: a connection is added to a server before its end, which closes all connections, or not at all."""


class _InprocConnection:
    def __init__(
        self,
        caller: InprocTransport,
        server: InprocTransport,
        handler: Handler,
        broken: Callable[[str], None],
    ) -> None:
        self._caller, self._server, self._handler, self._broken = caller, server, handler, broken
        self._executor = caller.executor
        self._open = True
        caller.opened.add(self)
        server.connections.add(self)

    def call(self, parcel: Parcel, done: Callable[[Parcel], None], patience: float | None = None) -> None:
        sent = own(parcel)
        self._server.executor.soon(lambda: self._handler(sent, lambda reply: self._answer(reply, done)))

    def _answer(self, reply: Parcel, done: Callable[[Parcel], None]) -> None:
        answer = own(reply)
        self._executor.soon(lambda: self._take(answer, done))

    def _take(self, answer: Parcel, done: Callable[[Parcel], None]) -> None:
        if self._open:
            try:
                done(answer)
            except BaseException as error:
                self.cut(repr(error))
                raise

    def keep(self) -> None:
        """Do nothing, as everything is sent at once."""

    def close(self) -> None:
        self._open = False
        self._caller.opened.discard(self)
        self._server.connections.discard(self)

    def cut(self, reason: str) -> None:
        if self._open:
            self.close()
            self._executor.soon(lambda: self._broken(reason))


class InprocTransport:
    """The transport of a worker that is a thread of this process. For the others, ``close`` is the worker's death."""

    name = "inproc"

    def __init__(self) -> None:
        self.executor = Scheduler("unirun-inproc")
        self._endpoint = ""
        self._handlers: dict[str, Handler] = {}
        self.connections: set[_InprocConnection] = set()
        """Those of callers."""
        self.opened: set[_InprocConnection] = set()
        """Those to other workers."""

    def inbox(self) -> Inbox:
        """A plain queue."""
        return queue.SimpleQueue()

    def serve(self, me: WorkerId, handler: Handler, name: str = CALLS) -> str:
        """Let `handler` take the requests for `name`. The endpoint is valid in this process only."""
        with _lock:
            self._endpoint = self._endpoint or f"inproc:{next(_numbers)}"
            _servers[self._endpoint] = self
            self._handlers[name] = handler
        return self._endpoint

    def connect(
        self, peer: WorkerId, endpoint: str, broken: Callable[[str], None], name: str = CALLS
    ) -> Connection:
        """A connection to a worker of this process."""
        with _lock:
            server = _servers.get(endpoint)
            if server is None or name not in server._handlers:
                raise ChannelError(f"{peer} is not there", "it has ended")
            return _InprocConnection(self, server, server._handlers[name], broken)

    def is_here(self, endpoint: str) -> bool:
        """Memory is copied here, never lent."""
        return False

    def close(self) -> None:
        """Break every connection to this worker, and close its own."""
        with _lock:
            _servers.pop(self._endpoint, None)
        for connection in list(self.connections):
            connection.cut("the worker has ended")
        for connection in list(self.opened):
            connection.close()
        self.executor.close()


CALL_TIMEOUT = 1800.0


def run_in_process(
    trainer: type[BaseTrainer],
    workloads: Mapping[str, tuple[type[BaseWorkload], int]],
    config: Mapping[str, Any] | None = None,
) -> Any:
    """Run a job in this process, for notebooks and debuggers, and return what the trainer's `fit` returns.

    `workloads` has a class and a number of ranks for each role:
    ``run_in_process(PPOTrainer, {"actor": (Actor, 2)}, {"steps": 3})``. Each worker is a thread, so breakpoints work.
    Arguments and results are copied as in a real job, and so is what goes through a `WeightsChannel` or a `Queue` that
    names its roles. There are no process groups (torch has one per process), no restarts, and no environment per role.
    Raises what `setup`, `init` or `fit` raises, and `UsageError` for a role without ranks or one called ``trainer``.
    """
    from omegaconf import OmegaConf

    for role, (_, count) in workloads.items():
        if role == TRAINER or count < 1:
            problem = "is that of the trainer" if role == TRAINER else f"has {count} ranks"
            raise UsageError(
                f"role {role!r} {problem}", "rename it" if role == TRAINER else "give it 1 or more"
            )
    settings = OmegaConf.create(dict(config or {}))
    job = _Job(workloads, json.dumps(OmegaConf.to_container(settings), default=str))
    transport, peers = InprocTransport(), job.peers(TRAINER, 0)
    caller = Caller(WorkerId(TRAINER, 0, 0), peers, transport, call_timeout=CALL_TIMEOUT)
    with contextlib.ExitStack() as ends:
        ends.callback(transport.close)
        ends.callback(caller.close)
        for role, (kind, count) in workloads.items():
            for rank in range(count):
                worker = _Worker(kind, settings, job.peers(role, rank), partial(job.ended, role, rank))
                ends.callback(worker.stop)
                worker.start()
        groups = {role: role_group(caller, role, count) for role, (_, count) in workloads.items()}
        made = trainer(_handles(groups), {role: kind for role, (kind, _) in workloads.items()}, settings)
        resources = {role: {"role": role, "total": count} for role, (_, count) in workloads.items()}
        bind(made, groups, MasterHandle(Context({}, peers)), resources, {})
        made.init()
        return made.fit()


def _handles(groups: Mapping[str, RoleGroup]) -> dict[str, list[Any]]:
    return {role: list(group) for role, group in groups.items()}


class _Job:
    """The workers of the job, as all of its threads see them."""

    def __init__(self, workloads: Mapping[str, tuple[type[BaseWorkload], int]], config: str) -> None:
        counts = {role: count for role, (_, count) in workloads.items()} | {TRAINER: 1}
        self._lock = threading.RLock()
        self._views = {
            role: RoleView(
                role, count, 0, "", "running", tuple(WorkerView(n, 0, "starting", {}) for n in range(count))
            )
            for role, count in counts.items()
        }
        briefs = tuple(
            RoleBrief(role, "workload", f"{kind.__module__}:{kind.__qualname__}", count, None)
            for role, (kind, count) in workloads.items()
        )
        self._welcome = Welcome(
            View(()), config, "", briefs, (), CALL_TIMEOUT, transport=InprocTransport.name
        )
        self._all: list[Peers] = []

    def peers(self, role: str, rank: int) -> Peers:
        """The peers as one worker sees them."""
        infos = {each.name: RoleInfo(each.name, each.world_size, 0) for each in self._views.values()}
        welcome = replace(self._welcome, view=self._view())
        made = Peers(role, rank, infos, welcome=welcome, send=partial(self._told, role, rank))
        # There is no agent, and no master to ask.
        made.linked = False
        self._all.append(made)
        return made

    def _view(self) -> View:
        return View(tuple(self._views.values()))

    def _told(self, role: str, rank: int, message: Message) -> None:
        if isinstance(message, Serving):
            self._change(role, rank, message.addresses, "serving")
        elif isinstance(message, Listening):
            self._change(role, rank, message.addresses)

    def ended(self, role: str, rank: int) -> None:
        """A worker has ended before the job: its answers are not waited for any more."""
        self._change(role, rank, {}, "ended")

    def _change(self, role: str, rank: int, addresses: Mapping[str, str], phase: str = "") -> None:
        with self._lock:
            view = self._views[role]
            worker = view.workers[rank]
            news = replace(worker, phase=phase or worker.phase, addresses={**worker.addresses, **addresses})
            workers = (*view.workers[:rank], news, *view.workers[rank + 1 :])
            self._views[role] = replace(view, workers=workers)
            for peers in self._all:
                peers.update(self._view())


class _Worker:
    """A workload and the thread that serves it."""

    def __init__(
        self, kind: type[BaseWorkload], config: DictConfig, peers: Peers, ended: Callable[[], None]
    ) -> None:
        """`ended` is called when a method has ended the worker, as SystemExit does."""
        self._ended = ended
        self._transport = InprocTransport()
        environ = {"LOCAL_RANK": str(peers.rank), "LOCAL_WORLD_SIZE": str(peers.size(peers.role))}
        self._context = Context(environ, peers, self._transport)
        session = self._context.session
        self._workload = kind(MasterHandle(self._context), config)
        self._workload._synced = session.synced
        self._dispatcher = session.dispatcher(self._workload, invocations(self._workload))
        self._thread = threading.Thread(target=self._serve, name=str(session.me), daemon=True)

    def start(self) -> None:
        """Run `setup` in this thread, then serve in the worker's own."""
        with acting(self._context):
            self._workload.setup()
            self._workload.on_generation(0)
        self._thread.start()
        self._context.session.serve(self._dispatcher)

    def _serve(self) -> None:
        with acting(self._context):
            try:
                self._dispatcher.serve()
            except BaseException as error:  # noqa: BLE001 - there is no process that it could end
                report_error(error)
                self._ended()

    def stop(self) -> None:
        """Stop serving and run `teardown`. A call that still runs is not waited for."""
        self._dispatcher.stop()
        self._dispatcher.close()
        self._transport.close()
        if self._thread.ident is not None:
            await_end(self._thread)
            with acting(self._context):
                self._workload.teardown()
