"""`Visitor`: a process outside the job that calls its workers. It goes through restarts and deaths of masters, and
leaves nothing behind."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time

from msgspec.structs import replace

from unirun.errors import FrameError, JobError, RendezvousError, StoreError, UsageError, WireError
from unirun.observe.jobdir import JobDir
from unirun.observe.status import ENDED, read_status, read_summary
from unirun.rendezvous.masters import MASTER_POLL_INTERVAL, call_master, hear
from unirun.roles.calls.caller import Caller
from unirun.roles.calls.codec import VISITOR
from unirun.roles.calls.group import RoleGroup, role_group
from unirun.roles.peers import Peers, role_infos
from unirun.roles.transport.socket_transport import SocketTransport
from unirun.values import WorkerId
from unirun.wire.blocking import BlockingStream
from unirun.wire.credentials import load_credentials
from unirun.wire.messages import Ended, Grow, View, Visit, Welcome
from unirun.wire.reporting import gave_up
from unirun.wire.reports import Message
from unirun.wire.sockets import shut

VISIT_TIMEOUT = 10.0
"""Seconds in which a master must answer."""


class Visitor:
    """The calls of this process to the workers of one job. Thread-safe."""

    def __init__(self, job: JobDir) -> None:
        """Raises `JobError` when the job has ended, `RendezvousError`, `WireError` or `StoreError` when no master
        answers, `UsageError` for a job whose calls go over torch.distributed.rpc."""
        self._job = job
        self._epoch = _term(job)
        self._stream, welcome = _visit(job)
        if welcome.transport != "socket":
            self._stream.close()
            raise UsageError(
                f"the workers of job {job.run_id} are called over {welcome.transport}, which lets in nobody else",
                "start it with --transport socket",
            )
        me = WorkerId(f"{VISITOR}{secrets.token_hex(8)}", 0, 0)
        infos = role_infos(welcome.view, welcome.roles)
        self._peers = Peers(me.role, 0, infos, welcome=welcome, send=self._tell)
        # It only connects, so it needs no folder for sockets of its own.
        self._transport = SocketTransport(job.path, load_credentials(job.path))
        self._caller = Caller(
            me, self._peers, self._transport, call_timeout=welcome.call_timeout, tell=lambda _: None
        )
        self._groups: dict[str, RoleGroup] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="unirun-visitor", daemon=True)
        self._thread.start()

    @property
    def peers(self) -> Peers:
        """The roles of the job as they are now."""
        return self._peers

    def role_group(self, role: str) -> RoleGroup:
        """All workers that a role has now. Raises `UsageError` for a role that the job does not have."""
        size = self._peers.size(role)
        if role not in self._groups or len(self._groups[role]) != size:
            self._groups[role] = role_group(self._caller, role, size)
        return self._groups[role]

    def grow(self, role: str) -> None:
        """Ask for more workers of an elastic role. If there is room for some, all of them start again."""
        self._tell(Grow(role))

    def close(self) -> None:
        """Leave. Calls that are open, or are made later, fail."""
        self._closed = True
        self._caller.close()
        self._transport.close()
        shut(self._stream.socket)
        if threading.current_thread() is not self._thread:
            self._thread.join(VISIT_TIMEOUT)
            if self._thread.is_alive():
                gave_up("the end of what a trainer hears", VISIT_TIMEOUT)

    def _tell(self, message: Message) -> None:
        with contextlib.suppress(WireError):
            self._stream.send(message)

    def _listen(self) -> None:
        """Take what one master after another tells."""
        while not self._closed:
            try:
                with self._stream:
                    while not self._closed:
                        self._take(hear(self._stream, self._job, self._epoch, None))
            except (WireError, RendezvousError, JobError):
                self._go_on()
        # It may have been let in by the next master when it left.
        self._stream.close()

    def _take(self, message: Message) -> None:
        if isinstance(message, View):
            self._peers.update(message)
        elif isinstance(message, Ended):
            self._end()

    def _go_on(self) -> None:
        """Find the next master, until the job is over."""
        while not self._closed:
            try:
                self._epoch = _term(self._job)
                self._stream, welcome = _visit(self._job)
                self._peers.update(welcome.view)
                return
            except JobError:
                self._end()
            except (WireError, RendezvousError, StoreError):
                time.sleep(MASTER_POLL_INTERVAL)

    def _end(self) -> None:
        """The job is over: nobody answers any more. The stream is closed, since the master waits for that."""
        self._closed = True
        ended = (
            replace(role, workers=tuple(replace(worker, phase="ended") for worker in role.workers))
            for role in self._peers.views()
        )
        self._peers.update(View(tuple(ended)))


def _term(job: JobDir) -> int:
    """The term of the master that is visited next. It is read before: one that is too old costs another visit, one that
    is too new would be kept for ever with a master that hangs. 0 when no master has written it yet."""
    try:
        return read_status(job).epoch
    except JobError:
        return 0


def _visit(job: JobDir) -> tuple[BlockingStream, Welcome]:
    """A stream to the master, and its welcome. Raises `JobError` when the job has ended."""
    phase = read_summary(job).phase
    if phase in ENDED:
        raise JobError(f"job {job.run_id} has {phase}, so it has no workers", "attach to one that runs")
    stream = call_master(job)
    try:
        stream.send(Visit())
        welcome = stream.receive(VISIT_TIMEOUT)
        if not isinstance(welcome, Welcome):
            raise FrameError(f"the master sent {type(welcome).__name__} where a Welcome was expected")
    except BaseException:
        stream.close()
        raise
    return stream, welcome
