"""`CallSession`: the transport, the caller and the role groups of one process, made at their first use."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirun.errors import ChannelError, FrameError, UsageError, WireError
from unirun.rendezvous.endpoints import split_endpoint
from unirun.roles.calls.caller import Caller
from unirun.roles.calls.dispatcher import Dispatcher, Generations
from unirun.roles.calls.group import RoleGroup, role_group
from unirun.roles.calls.policy import Invocation, invocations
from unirun.roles.peers import Peers
from unirun.roles.transport.protocol import LendingTransport, Transport
from unirun.values import WorkerId
from unirun.wire.credentials import load_credentials
from unirun.wire.messages import RoleView
from unirun.wire.reports import Notice, Serving

if TYPE_CHECKING:
    from unirun.roles.transport.torch_rpc import RpcAgent


class CallSession:
    """One per process. Its parts are made when they are first used."""

    def __init__(
        self,
        peers: Peers,
        environ: Mapping[str, str],
        listener: Callable[[str], LendingTransport] | None = None,
    ) -> None:
        """`listener` is called in place of `CallSession.listener`."""
        self._peers, self._listener = peers, listener
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
            return self.listener("calls")
        from unirun.roles.transport.torch_rpc import TorchTransport

        return TorchTransport(self._rpc_agent())

    def listener(self, name: str) -> LendingTransport:
        """A transport with a listener of its own. Raises `UsageError` without a launcher."""
        if self._listener is not None:
            return self._listener(name)
        if self.folder is None:
            raise UsageError("this process has no peers", "start it with unirun --roles …")
        from unirun.roles.transport.socket_transport import SocketTransport

        credentials = load_credentials(self.folder)
        return SocketTransport(self.folder / name, credentials, self._addr, self._refused, self._is_host)

    def _is_host(self, addr: str) -> bool:
        """Return True if a role's store or a worker of the job is at `addr`."""
        updates = self._peers.updates
        if self._hosts[0] != updates:
            self._hosts = updates, frozenset(hosts_in(self._peers.views()))
        return addr in self._hosts[1]

    def _refused(self, text: str, count: int) -> None:
        """Connections for calls are refused in threads; the end of this process must not show."""
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
                self._caller = Caller(
                    self.me, self._peers, self.transport, call_timeout=timeout, tell=self._peers.tell
                )
                atexit.register(self._report)
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
