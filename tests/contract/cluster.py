"""A cluster for the contract of calls: workers, the directory in which a caller finds them, and a caller.

A worker is a process of its own with its transport and its dispatcher, forked from one that has imported torch; for
`inproc` it is a thread. The test writes into the directory who lives and who is dead, as the job's master does otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.contract.workload import ContractWorkload, Gates
from tests.effort import CHAOS
from tests.unit.wire.endpoints import credentials_in
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import WorkerLost
from unirun.roles import inprocess
from unirun.roles.calls.call import InvocationRef
from unirun.roles.calls.caller import Caller
from unirun.roles.calls.dispatcher import Dispatcher
from unirun.roles.calls.group import RoleGroup, role_group
from unirun.roles.calls.policy import invocations
from unirun.roles.inprocess import InprocTransport
from unirun.roles.peers import Peer, Peers
from unirun.roles.transport.protocol import Transport
from unirun.roles.transport.socket_transport import SocketTransport
from unirun.values import WorkerId
from unirun.wire.credentials import Credentials
from unirun.wire.handshake import Token
from unirun.wire.reports import CallCount, Calls


class FakePeers(Peers):
    """A directory that the test writes. Those who look at it are told of each change."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], Peer] = {}
        self._listeners: list[Callable[[], None]] = []

    def put(self, *peers: Peer) -> None:
        """Write where workers are now, all at once."""
        for peer in peers:
            self._places[peer.address[:2]] = peer
        for listener in self._listeners:
            listener()

    def size(self, role: str) -> int:
        """The number of ranks of a role."""
        return sum(name == role for name, _ in self._places)

    def find(self, role: str, rank: int) -> Peer:
        """The peer that has this rank."""
        return self._places[role, rank]

    def view(self, role: str) -> None:
        """There are no views: roles do not grow."""

    brief = view

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Call `listener` at each `put`."""
        self._listeners.append(listener)


TRANSPORTS = ("inproc", "socket", "tls", "torch", *(["insecure"] if CHAOS else []))
"""Over TLS and TCP (``insecure``) every process is on a node of its own."""


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch.distributed.rpc", "unirun.roles", __name__])

# Here and in every worker, as under unirun: threads of many processes on few cores wait for each other.
torch.set_num_threads(1)

RANKS = 10
"""Room for the ranks of one role in the numbers that torch wants."""

Script = Callable[[RoleGroup, Connection], None]


def open_transport(kind: str, me: WorkerId, folder: Path, token: Token) -> Transport:
    """The transport of one worker. Roles are called ``name7``; torch wants all their ranks numbered."""
    if kind == "inproc":
        return InprocTransport()
    if kind == "socket":
        return SocketTransport(folder, Credentials(token))
    if kind in ("tls", "insecure"):
        node = f"{me.role}-{me.rank}-{os.urandom(4).hex()}"
        home = folder.parent / node
        credentials = credentials_in(home, token, node, insecure=kind == "insecure")
        return SocketTransport(home / "calls", credentials, "127.0.0.1")
    from unirun.roles.transport.torch_rpc import RpcAgent, TorchTransport

    def number(who: WorkerId) -> int:
        return RANKS * int("".join(filter(str.isdigit, who.role))) + who.rank

    return TorchTransport(RpcAgent(me, number, 10_000, polls=False))


def lost_within(ref: InvocationRef[object], seconds: float) -> WorkerLost:
    """The `WorkerLost` with which a call ends, within so many seconds."""
    began = time.monotonic()
    error = ref.exception(WAIT_TIMEOUT)
    assert isinstance(error, WorkerLost), error
    assert time.monotonic() - began < seconds
    return error


class LockedPipe:
    """The end of a pipe in a worker, on which several threads send."""

    def __init__(self, control: Connection) -> None:
        self._control, self._lock = control, threading.Lock()

    def send(self, what: Any) -> None:
        """Tell the test; when it has gone, nobody listens."""
        with self._lock, contextlib.suppress(OSError):
            self._control.send(what)


class Generations:
    """The process group of a role without ranks to meet: a generation is formed as soon as it is ordered."""

    def __init__(self, generation: int, say: Callable[[Any], None]) -> None:
        self.generation, self._say = generation, say

    def catch_up(self, generation: int) -> None:
        """Be in it."""
        if generation > self.generation:
            self.generation = generation
            self._say(("formed", generation))

    def explain(self, error: BaseException) -> bool:
        """Return False: there are no collectives that could fail."""
        return False

    def guard(self, call: Callable[[], Any]) -> Any:
        """Run it."""
        return call()

    def kept_away(self, by: Callable[[], bool]) -> None:
        """Do nothing, as no peer waits to form a group with this worker."""


def worker_main(
    kind: str, me: WorkerId, folder: Path, token: Token, control: Connection, generation: int = 0
) -> None:
    """Run a worker until the test says stop, or has ended."""
    pipe, gates = LockedPipe(control), Gates()
    generations = Generations(generation, pipe.send)
    transport = open_transport(kind, me, folder, token)
    workload = ContractWorkload(me, pipe.send, gates)
    dispatcher = Dispatcher(workload, me, invocations(workload), generations, transport.inbox())
    pipe.send(("serving", transport.serve(me, dispatcher.handle)))

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while (order := control.recv()) is not None:
                match order:
                    case ("open", name):
                        gates.open(name)
                    case ("generation", number):
                        dispatcher.run_first(partial(generations.catch_up, number))
                    case "interrupt":
                        assert isinstance(transport, InprocTransport)
                        for channel in list(inprocess._servers[transport._endpoint].connections):
                            channel.cut("interrupted")
                        pipe.send("interrupted")
                    case "kept":
                        pipe.send(
                            ("kept", sum(len(caller.runs) for caller in list(dispatcher._callers.values())))
                        )
                    case "files":
                        pipe.send(("files", len(os.listdir("/proc/self/fd"))))
        if kind != "inproc":
            os._exit(0)
        transport.close()
        dispatcher.stop()

    threading.Thread(target=listen, daemon=True).start()
    dispatcher.serve()
    dispatcher.close()


def trainer_main(
    kind: str,
    me: WorkerId,
    folder: Path,
    token: Token,
    control: Connection,
    known: list[Peer],
    script: Script,
) -> None:
    """Run `script` as a trainer."""
    peers = FakePeers()
    peers.put(*known)
    transport = open_transport(kind, me, folder, token)
    caller = Caller(me, peers, transport, call_timeout=WAIT_TIMEOUT)
    script(role_group(caller, known[0].address.role, len(known)), control)
    caller.close()
    transport.close()


class WorkerHandle:
    """A worker as the test sees it."""

    def __init__(self, kind: str, main: Callable[..., None], me: WorkerId, *arguments: Any) -> None:
        self.me, self._kind = me, kind
        self._control, theirs = FORKS.Pipe()
        self._heard: list[Any] = []
        given = (kind, me, arguments[0], arguments[1], theirs, *arguments[2:])
        self._process: Any = None
        if kind == "inproc":
            threading.Thread(target=main, args=given, daemon=True).start()
        else:
            self._process = FORKS.Process(target=main, args=given, daemon=True)
            self._process.start()
            theirs.close()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid if self._process else os.getpid()

    def expect(self, what: Any, within: float = WAIT_TIMEOUT) -> Any:
        """Wait until the worker has said `what`, or a pair that begins with it, whose rest is returned."""
        deadline = time.monotonic() + within
        while True:
            for said in self._heard:
                if said == what or (isinstance(said, tuple) and said[0] == what):
                    self._heard.remove(said)
                    return said[1] if isinstance(said, tuple) else said
            assert self._control.poll(max(deadline - time.monotonic(), 0.0)), f"{self.me} did not say {what}"
            self._heard.append(self._control.recv())

    def open(self, gate: str) -> None:
        """Let a method go on that waits there."""
        self._control.send(("open", gate))

    def form(self, generation: int) -> None:
        """Tell it of the next generation of its role."""
        self._control.send(("generation", generation))

    def send(self, what: Any) -> None:
        """Tell a script."""
        self._control.send(what)

    def break_connections(self) -> None:
        """Break the connections to it, where there are no sockets that could be shut down."""
        if self._kind == "inproc":
            self._control.send("interrupt")
            self.expect("interrupted")

    def ask(self, what: str) -> int:
        """``kept``: how many results are not acked. ``files``: how many descriptors are open."""
        self._control.send(what)
        return int(self.expect(what))

    def kill(self) -> None:
        """End it without a word, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.join(WAIT_TIMEOUT)
            assert self._process.exitcode is not None
            self._process.close()
            self._process = None
        self._control.close()

    def await_end(self) -> None:
        """Wait until it has ended of itself."""
        self._process.join(WAIT_TIMEOUT)
        assert self._process.exitcode is not None

    def signal(self, signum: int) -> None:
        """Stop or continue it."""
        os.kill(self._process.pid, signum)


class Role:
    """The workers of one role."""

    def __init__(self, cluster: Cluster, role: str, size: int) -> None:
        self._cluster, self.name = cluster, role
        self.workers = [cluster.start(worker_main, WorkerId(role, rank, 0)) for rank in range(size)]
        cluster.peers.put(*(Peer(worker.me) for worker in self.workers))
        self.group: RoleGroup = role_group(cluster.caller, role, size)

    def __getitem__(self, rank: int) -> WorkerHandle:
        return self.workers[rank]

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(self.workers)

    def wait_until_serving(self) -> None:
        """Wait for all, and write their endpoints into the directory."""
        self._cluster.peers.put(*(Peer(worker.me, worker.expect("serving")) for worker in self.workers))

    def peer(self, rank: int) -> Peer:
        """The entry of the directory for a rank."""
        return self._cluster.peers.find(self.name, rank)

    def kill(self, rank: int) -> None:
        """Kill a worker, and write that into the directory, as the job's master does."""
        self.workers[rank].kill()
        self.report_dead(rank)

    def report_dead(self, rank: int) -> None:
        """Write into the directory that it is dead."""
        others = [self.peer(other) for other in range(len(self.workers)) if other != rank]
        gone = replace(self.peer(rank), endpoint="", gone=True, whole=False)
        self._cluster.peers.put(gone, *(replace(peer, whole=False) for peer in others))

    def report_over(self, rank: int) -> None:
        """Write into the directory that it will not serve any more."""
        self._cluster.peers.put(replace(self.peer(rank), endpoint="", over=True))

    def restart(self, rank: int) -> None:
        """Replace a worker; the role is in its next generation."""
        self.begin_restart(rank)
        self.finish_restart(rank)

    def begin_restart(self, rank: int) -> None:
        """Start the next incarnation of a worker."""
        me = self.workers[rank].me
        fresh = WorkerId(me.role, me.rank, me.incarnation + 1)
        others = [other for other in range(len(self.workers)) if other != rank]
        generation = self.peer(rank).generation + 1
        self.workers[rank] = self._cluster.start(worker_main, fresh, generation)
        self._cluster.peers.put(
            Peer(fresh, generation=generation),
            *(replace(self.peer(other), generation=generation, whole=True) for other in others),
        )
        for other in others:
            self.workers[other].form(generation)

    def finish_restart(self, rank: int) -> None:
        """Wait until it serves, and write its endpoint into the directory."""
        peer = self.peer(rank)
        self._cluster.peers.put(replace(peer, endpoint=self.workers[rank].expect("serving")))

    def open(self, gate: str) -> None:
        """Open a gate everywhere."""
        for worker in self.workers:
            worker.open(gate)

    def kept(self) -> list[int]:
        """The number of results that each keeps."""
        return [worker.ask("kept") for worker in self.workers]


class Cluster:
    """One transport, one caller in this process, and as many roles as tests want."""

    _numbers = itertools.count(1)

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self._folder = kind, folder
        self.token = Token(os.urandom(32))
        self.peers = FakePeers()
        self.me = WorkerId("trainer0", 0, 0)
        self.transport = open_transport(kind, self.me, folder, self.token)
        self.told: list[Calls] = []
        self.caller = Caller(
            self.me,
            self.peers,
            self.transport,
            call_timeout=2 * WAIT_TIMEOUT,
            tell=self.told.append,
        )
        self.workers: tuple[WorkerHandle, ...] = ()

    def start(self, main: Callable[..., None], me: WorkerId, *arguments: Any) -> WorkerHandle:
        """Start a worker or a trainer."""
        worker = WorkerHandle(self.kind, main, me, self._folder, self.token, *arguments)
        self.workers += (worker,)
        return worker

    def role(self, size: int) -> Role:
        """A role of its own."""
        role = self.role_that_starts(size)
        role.wait_until_serving()
        return role

    def role_that_starts(self, size: int) -> Role:
        """The same, before its workers serve."""
        return Role(self, f"worker{next(self._numbers)}", size)

    def trainer(self, incarnation: int, script: Script, role: Role) -> WorkerHandle:
        """Another caller, in a process of its own."""
        peers = [role.peer(rank) for rank in range(len(role.workers))]
        return self.start(trainer_main, WorkerId("other999", 0, incarnation), peers, script)

    def counts_of(self, role: Role) -> dict[tuple[str, bool], CallCount]:
        """The calls of this caller to a role: by method, and whether the caller does not wait."""
        self.caller.report()
        counts = self.told[-1].counts if self.told else ()
        return {(each.method, each.asynchronous): each for each in counts if each.role == role.name}

    def end_workers(self, but: Collection[WorkerHandle] = ()) -> None:
        """End all workers and trainers but these."""
        for worker in self.workers:
            if worker not in but:
                worker.kill()
        self.workers = tuple(but)

    def close(self) -> None:
        """End the workers and the caller."""
        self.caller.close()
        self.end_workers()
        self.transport.close()


STOP, CONTINUE = signal.SIGSTOP, signal.SIGCONT
