"""`Peers`: the table of the job's roles and workers in each worker, which the agent keeps up to date."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from unirun.errors import FrameError, JobError, StoreAway, UsageError, WireError
from unirun.values import Engine, WorkerId
from unirun.wire.blocking import BlockingStream, open_link, out_of_the_way
from unirun.wire.messages import RoleBrief, RoleView, View, Welcome, updated
from unirun.wire.progress import page
from unirun.wire.reports import (
    DEBUGGER,
    CommitJob,
    LocalEngines,
    MasterReply,
    MasterRequest,
    MasterRequestKind,
    Message,
    ViewWanted,
)

WELCOME_TIMEOUT = 30.0
"""Seconds in which the agent must answer."""


@dataclass(frozen=True, slots=True)
class RoleInfo:
    """A role as the other roles see it: `name`, `world_size`, `generation`, and `endpoint` (``host:port``), where the
    rendezvous store of that generation listens. `addrs` are the addresses (``host:port``) of the ranks of a role that
    has ports, of groups those of the first ranks; `ready` are those of them that are ready."""

    name: str
    world_size: int
    generation: int
    endpoint: str = ""
    addrs: tuple[str, ...] = ()
    ready: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """The worker that holds a rank now.

    `endpoint` is empty unless it serves calls; `gone`: it has died; `over`: it will not serve any more. `generation` is
    that of its role's process group, and `whole` says whether no rank of the role is without a worker. `held`: it is
    debugged.
    """

    address: WorkerId
    endpoint: str = ""
    generation: int = 0
    gone: bool = False
    over: bool = False
    whole: bool = True
    held: bool = False


class Peers:
    """The roles of the job and their workers. Thread-safe: the link's thread updates what others read.

    `generation` is the one of this worker's own group, which may be behind that of its role until it has formed
    the next. A process outside the job has no `role` of it. `welcome` is None without a launcher. `send` sends a
    message to the agent or, from a process outside the job, to the master.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        roles: Mapping[str, RoleInfo],
        *,
        welcome: Welcome | None = None,
        send: Callable[[Message], None] | None = None,
    ) -> None:
        self.role, self.rank, self.welcome = role, rank, welcome
        self.config: Mapping[str, Any] = json.loads(welcome.config) if welcome else {}
        self.linked = send is not None
        self.generation = roles[role].generation if role in roles else 0
        self._send, self._pid = send, os.getpid()
        self._transport = welcome.transport if welcome else ""
        self._roles = dict(roles)
        self._view = updated(None, welcome.view if welcome else View(())) or View(())
        self._views = {view.name: view for view in self._view.roles}
        self._found: dict[tuple[str, int], Peer] = {}
        self._whole: dict[str, bool] = {}
        # The most ranks that a role has had: calls to those that it has no more are lost, and no mistakes.
        self._most = {name: each.world_size for name, each in self._roles.items()}
        self.updates = 0
        """The number of updates that have come."""
        self.engines: tuple[Engine, ...] = ()
        """The servers of this host that this process brings weights into."""
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._numbers = itertools.count(1)
        self._asked: dict[int, MasterReply | None] = {}
        """The questions to the master that are waited for, by number, and its answers."""

    def roles(self) -> Mapping[str, RoleInfo]:
        """All roles as they are now."""
        with self._changed:
            return MappingProxyType(self._roles)

    def known(self, role: str) -> RoleInfo:
        """The role of that name, as it is now. Raises `UsageError` when the job has none."""
        found = self.roles().get(role)
        if found is None:
            raise UsageError(f"this job has no role {role!r}", f"it has {', '.join(self.roles())}")
        return found

    def view(self, role: str) -> RoleView | None:
        """The latest view of a role and its workers; None without a launcher."""
        self.known(role)
        with self._changed:
            return self._views.get(role)

    def views(self) -> tuple[RoleView, ...]:
        """The latest view of every role."""
        with self._changed:
            return tuple(self._views.values())

    def brief(self, role: str) -> RoleBrief | None:
        """The spec's description of a role; None without a launcher."""
        self.known(role)
        briefs = self.welcome.roles if self.welcome else ()
        return next((brief for brief in briefs if brief.name == role), None)

    def may_have_several(self, role: str) -> bool:
        """Return True if a role may have several ranks at some time, however many it has now."""
        brief = self.brief(role)
        return brief is not None and max(brief.count, brief.most or 0) > 1

    def collocation(self, role: str) -> str:
        """The roles that share the devices of a role, itself among them: ``ACTOR,ROLLOUT``. Empty if none do."""
        groups = self.welcome.collocations if self.welcome else ()
        return ",".join(each.upper() for each in next((group for group in groups if role in group), ()))

    def count(self, role: str) -> int:
        """The most ranks that a role has had since this process came: it may have become smaller."""
        brief, size = self.brief(role), self.size(role)
        return max(brief.count if brief else 0, self._most[role], size)

    def size(self, role: str) -> int:
        """The number of ranks of a role now. Raises `UsageError` when there is no such role."""
        return self.known(role).world_size

    def find(self, role: str, rank: int) -> Peer:
        """The worker that holds a rank now. Raises `UsageError` for a rank that the role never had."""
        found = self._found
        peer = found.get((role, rank))
        if peer is None:
            # Kept with what was known when the view was read; a view that comes meanwhile has another table.
            peer = found[role, rank] = self._find(role, rank)
        return peer

    def _find(self, role: str, rank: int) -> Peer:
        # The table of this view, or of one before: it is taken first.
        whole = self._whole
        view, count = self.view(role), self.count(role)
        if not 0 <= rank < count:
            raise UsageError(f"role {role} has no rank {rank}", f"it has ranks 0 to {count - 1}")
        if view is None:
            return Peer(WorkerId(role, rank, 0))
        if rank >= len(view.workers):
            # The role has become smaller since somebody has asked for its ranks.
            return Peer(WorkerId(role, rank, 0), over=True)
        worker = view.workers[rank]
        if role not in whole:
            whole[role] = all(each.phase != "lost" for each in view.workers)
        return Peer(
            WorkerId(role, rank, worker.incarnation),
            worker.addresses.get(self._transport, "") if worker.phase == "serving" else "",
            view.generation,
            gone=worker.phase == "lost",
            over=worker.phase == "ended",
            whole=whole[role],
            held=bool(worker.addresses.get(DEBUGGER)),
        )

    def tell(self, message: Message) -> None:
        """Send `message` to the agent; without a launcher, do nothing. Raises `ConnectionLost`, and `UsageError` in a
        fork of the worker."""
        if self._send is None:
            return
        if self._pid != os.getpid():
            raise UsageError(
                "the connection to the agent belongs to the worker's own process, this is a fork of it",
                "use it there",
            )
        self._send(message)

    def ask(self, kind: MasterRequestKind, name: str = "", data: str = "", *, timeout: float) -> str | None:
        """Ask the master that leads now, or the next one. Raises `JobError` if it cannot do it, `StoreAway` if there
        is no answer within `timeout` seconds, `ConnectionLost`."""
        if not self.linked:
            raise UsageError(
                f"{kind} asks the job's master, and this process has none", "start it with unirun"
            )
        return self._answer_to(MasterRequest(next(self._numbers), kind, name, data), kind, timeout)

    def commit(self, step: int, roles: tuple[str, ...], *, timeout: float) -> int | None:
        """Commit a step with all ranks of `roles`. Returns the last one that all have. Raises as `ask`."""
        ask = CommitJob(next(self._numbers), step, roles)
        found = self._answer_to(ask, "commit_job", timeout)
        return None if found is None else int(found)

    def _answer_to(self, ask: MasterRequest | CommitJob, kind: str, timeout: float) -> str | None:
        number, deadline = ask.number, time.monotonic() + timeout
        self._asked[number] = None
        try:
            self.tell(ask)
            with self._changed:
                while (answer := self._asked[number]) is None:
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        raise StoreAway(
                            f"{kind} was not answered within {timeout:g} s", "see the store in unirun status"
                        )
        finally:
            del self._asked[number]
        if answer.problem:
            raise JobError(answer.problem)
        return answer.data

    def answered(self, answer: MasterReply) -> None:
        """Take the answer of the master, which the agent has passed on."""
        with self._changed:
            if answer.number in self._asked:
                self._asked[answer.number] = answer
                self._changed.notify_all()

    def update(self, news: View) -> None:
        """Take over what the agent tells; ask for all of it when something before is missing."""
        view = updated(self._view, news)
        if view is None:
            self.tell(ViewWanted())
            return
        with self._changed:
            self._view = view
            self._roles = role_infos(view, self.welcome.roles if self.welcome else ())
            self._views = {role.name: role for role in view.roles}
            # In this order: who has the new table of workers has the other one, too.
            self._whole, self._found = {}, {}
            for name, each in self._roles.items():
                self._most[name] = max(self._most.get(name, 0), each.world_size)
            listeners = self._updated()
        for listener in listeners:
            listener()

    def found(self, engines: tuple[Engine, ...]) -> None:
        """Take over the servers that this process brings weights into."""
        with self._changed:
            self.engines = engines
            listeners = self._updated()
        for listener in listeners:
            listener()

    def _updated(self) -> list[Callable[[], None]]:
        """Count an update, and wake those that wait for one. Returns the listeners, to be called without the lock."""
        self.updates += 1
        self._changed.notify_all()
        return [*self._listeners]

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each update, in the link's thread."""
        with self._changed:
            self._listeners.append(listener)

    def wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Look at `condition` now and after each update, for `timeout` seconds; return what it said last."""
        with page().idle(), self._changed:
            return self._changed.wait_for(condition, max(timeout, 0.0))

    def wait(self, since: int, timeout: float) -> None:
        """Return when there have been more `updates` than `since`, or after `timeout` seconds."""
        self.wait_for(lambda: self.updates > since, timeout)


def lone_peers(environ: Mapping[str, str]) -> Peers:
    """Without unirun: one role with the ranks of torchrun's variables, or with one rank."""
    role = environ.get("ROLE_NAME", "default")
    size = int(environ.get("WORLD_SIZE", "1"))
    generation = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    info = RoleInfo(role, size, generation)
    return Peers(role, int(environ.get("RANK", "0")), {role: info})


def linked_peers(environ: Mapping[str, str]) -> Peers:
    """Under unirun: what the agent sends, from now on in a thread. Raises `WireError` or `RendezvousError`."""
    link = open_link(environ)
    welcome = link.receive(timeout=WELCOME_TIMEOUT)
    while isinstance(welcome, View):
        welcome = link.receive(timeout=WELCOME_TIMEOUT)
    if not isinstance(welcome, Welcome):
        raise FrameError(f"the agent sent {type(welcome).__name__} where a Welcome was expected")
    role, rank = environ["UNIRUN_ROLE"], int(environ["UNIRUN_RANK"])
    peers = Peers(role, rank, role_infos(welcome.view, welcome.roles), welcome=welcome, send=link.send)
    for message in link.buffered():
        _take(peers, message)
    # Read before the script runs, which may close these descriptors.
    agent = _agent_handle(link.socket)
    watched = {n: _file_behind(n) for n in (agent, link.socket.fileno()) if n is not None}
    thread = threading.Thread(
        target=_listen, args=(link, peers, agent, watched), name="unirun-link", daemon=True
    )
    thread.start()
    return peers


def role_infos(view: View, briefs: Sequence[RoleBrief] = ()) -> dict[str, RoleInfo]:
    """The roles in a view, by name."""
    groups = {brief.name: brief.group for brief in briefs}
    return {role.name: _info(role, groups.get(role.name, 1)) for role in view.roles}


def _info(role: RoleView, group: int) -> RoleInfo:
    heads = [w for w in role.workers if w.place is not None and w.rank % group == 0]
    addrs = tuple(w.place.addr() for w in heads if w.place is not None)
    ready = tuple(w.place.addr() for w in heads if w.place is not None and w.phase == "serving")
    return RoleInfo(role.name, role.world_size, role.generation, role.endpoint, addrs, ready)


def _take(peers: Peers, message: Message) -> None:
    match message:
        case View():
            peers.update(message)
        case MasterReply():
            peers.answered(message)
        case LocalEngines(engines):
            peers.found(engines)


def _listen(link: BlockingStream, peers: Peers, agent: int | None, watched: Mapping[int, str]) -> None:
    """Take updates until the link ends. When the agent's process has ended, end this worker: no orphan survives."""
    if agent is None:
        _end()
        return
    poll = select.poll()
    poll.register(agent, select.POLLIN)
    poll.register(link.socket, select.POLLIN)
    while True:
        ready = {handle for handle, _ in poll.poll()}
        if any(_file_behind(number) != watched[number] for number in ready):
            # The script has closed these descriptors, as daemons do, and their numbers may be other files now.
            # The parent-death signal still ends this worker.
            return
        if agent in ready:
            _end()
            return
        try:
            for message in link.drain():
                _take(peers, message)
        except WireError:
            # The script may have closed the link. From now on only the end of the agent's process is watched.
            poll.unregister(link.socket)


def _file_behind(number: int) -> str:
    """The kernel's name of an open file; empty if the descriptor is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


def _agent_handle(sock: socket.socket) -> int | None:
    """A pidfd of the agent's process; None if it has ended."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", raw)[0]
    try:
        return out_of_the_way(os.pidfd_open(pid))
    except ProcessLookupError:
        return None


def _end() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)
