"""The stage on which the contract is played: workers, a board that tells where they are, and a caller.

A worker is a process of its own with its transport and its dispatcher, forked from one that has imported torch; for
`inproc` it is a thread. The test says who lives and who is dead, on the board, as the job's master does otherwise.
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
from typing import Any, cast

import torch

from tests.contract.board import Board
from tests.contract.desk import Desk, Gates
from tests.effort import CHAOS
from tests.effort import SOON as SOON
from tests.unit.wire.places import credentials_in
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

KINDS = ("inproc", "socket", "tls", "torch", *(["insecure"] if CHAOS else []))
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


def eventually(look: Callable[[], Any], what: str, within: float = SOON) -> Any:
    """The first truthy value of `look()`."""
    deadline = time.monotonic() + within
    while not (value := look()):
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        time.sleep(0.005)
    return value


def lost_within(ref: InvocationRef[object], seconds: float) -> WorkerLost:
    """The `WorkerLost` with which a call ends, within so many seconds."""
    began = time.monotonic()
    error = ref.exception(SOON)
    assert isinstance(error, WorkerLost), error
    assert time.monotonic() - began < seconds
    return error


class Voice:
    """The end of a pipe in a worker: several threads talk."""

    def __init__(self, control: Connection) -> None:
        self._control, self._lock = control, threading.Lock()

    def say(self, what: Any) -> None:
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

    def kept_away(self, by: Callable[[], bool]) -> None:
        """Do nothing, as no peer waits to form a group with this worker."""


def work(
    kind: str, me: WorkerId, folder: Path, token: Token, control: Connection, generation: int = 0
) -> None:
    """Be a worker, until the test says stop, or is gone."""
    voice, gates = Voice(control), Gates()
    generations = Generations(generation, voice.say)
    transport = open_transport(kind, me, folder, token)
    desk = Desk(me, voice.say, gates)
    dispatcher = Dispatcher(desk, me, invocations(desk), generations, transport.inbox())
    voice.say(("serving", transport.serve(me, dispatcher.handle)))

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
                        voice.say("interrupted")
                    case "kept":
                        voice.say(
                            ("kept", sum(len(caller.runs) for caller in list(dispatcher._callers.values())))
                        )
                    case "files":
                        voice.say(("files", len(os.listdir("/proc/self/fd"))))
        if kind != "inproc":
            os._exit(0)
        transport.close()
        dispatcher.stop()

    threading.Thread(target=listen, daemon=True).start()
    dispatcher.serve()
    dispatcher.close()


def call(
    kind: str,
    me: WorkerId,
    folder: Path,
    token: Token,
    control: Connection,
    places: list[Peer],
    script: Script,
) -> None:
    """Be a trainer that runs `script`."""
    board = Board()
    board.put(*places)
    transport = open_transport(kind, me, folder, token)
    caller = Caller(me, cast(Peers, board), transport, call_timeout=SOON)
    script(role_group(caller, places[0].address.role, len(places)), control)
    caller.close()
    transport.close()


class Player:
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

    def hear(self, what: Any, within: float = SOON) -> Any:
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

    def say(self, what: Any) -> None:
        """Tell a script."""
        self._control.send(what)

    def interrupt(self) -> None:
        """Break the connections to it, where there are no sockets that could be shut down."""
        if self._kind == "inproc":
            self._control.send("interrupt")
            self.hear("interrupted")

    def ask(self, what: str) -> int:
        """``kept``: how many results are not acked. ``files``: how many descriptors are open."""
        self._control.send(what)
        return int(self.hear(what))

    def kill(self) -> None:
        """End it without a word, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.join(SOON)
            assert self._process.exitcode is not None
            self._process.close()
            self._process = None
        self._control.close()

    def await_end(self) -> None:
        """Wait until it has ended of itself."""
        self._process.join(SOON)
        assert self._process.exitcode is not None

    def signal(self, signum: int) -> None:
        """Stop or continue it."""
        os.kill(self._process.pid, signum)


class Cast:
    """The workers of one role, on their places."""

    def __init__(self, stage: Stage, role: str, size: int) -> None:
        self._stage, self.role = stage, role
        self.players = [stage.player(work, WorkerId(role, rank, 0)) for rank in range(size)]
        stage.board.put(*(Peer(player.me) for player in self.players))
        self.group: RoleGroup = role_group(stage.caller, role, size)

    def __getitem__(self, rank: int) -> Player:
        return self.players[rank]

    def __iter__(self) -> Iterator[Player]:
        return iter(self.players)

    def enter(self) -> None:
        """Wait for all, and tell where they are."""
        self._stage.board.put(*(Peer(player.me, player.hear("serving")) for player in self.players))

    def place(self, rank: int) -> Peer:
        """The entry of the board for a rank."""
        return self._stage.board.find(self.role, rank)

    def kill(self, rank: int) -> None:
        """End a worker without a word, and let the board say so, as the job's master does."""
        self.players[rank].kill()
        self.tell_gone(rank)

    def tell_gone(self, rank: int) -> None:
        """The board says that it is dead."""
        others = [self.place(other) for other in range(len(self.players)) if other != rank]
        gone = replace(self.place(rank), endpoint="", gone=True, whole=False)
        self._stage.board.put(gone, *(replace(place, whole=False) for place in others))

    def tell_over(self, rank: int) -> None:
        """The board says that it will not serve any more."""
        self._stage.board.put(replace(self.place(rank), endpoint="", over=True))

    def start_again(self, rank: int) -> None:
        """Another one takes the place; the role is in its next generation."""
        self.prepare_again(rank)
        self.announce_again(rank)

    def prepare_again(self, rank: int) -> None:
        """It is on its way."""
        me = self.players[rank].me
        fresh = WorkerId(me.role, me.rank, me.incarnation + 1)
        others = [other for other in range(len(self.players)) if other != rank]
        generation = self.place(rank).generation + 1
        self.players[rank] = self._stage.player(work, fresh, generation)
        self._stage.board.put(
            Peer(fresh, generation=generation),
            *(replace(self.place(other), generation=generation, whole=True) for other in others),
        )
        for other in others:
            self.players[other].form(generation)

    def announce_again(self, rank: int) -> None:
        """It serves."""
        place = self.place(rank)
        self._stage.board.put(replace(place, endpoint=self.players[rank].hear("serving")))

    def open(self, gate: str) -> None:
        """Open a gate everywhere."""
        for player in self.players:
            player.open(gate)

    def kept(self) -> list[int]:
        """The number of results that each keeps."""
        return [player.ask("kept") for player in self.players]


class Stage:
    """One transport, one caller in this process, and as many roles as tests want."""

    _numbers = itertools.count(1)

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self._folder = kind, folder
        self.token = Token(os.urandom(32))
        self.board = Board()
        self.me = WorkerId("trainer0", 0, 0)
        self.transport = open_transport(kind, self.me, folder, self.token)
        self.told: list[Calls] = []
        self.caller = Caller(
            self.me, cast(Peers, self.board), self.transport, call_timeout=2 * SOON, tell=self.told.append
        )
        self.players: tuple[Player, ...] = ()

    def player(self, main: Callable[..., None], me: WorkerId, *arguments: Any) -> Player:
        """Start a worker or a trainer."""
        player = Player(self.kind, main, me, self._folder, self.token, *arguments)
        self.players += (player,)
        return player

    def role(self, size: int) -> Cast:
        """A role of its own."""
        cast = self.role_to_come(size)
        cast.enter()
        return cast

    def role_to_come(self, size: int) -> Cast:
        """The same, not yet on its places."""
        return Cast(self, f"desk{next(self._numbers)}", size)

    def trainer(self, incarnation: int, script: Script, cast: Cast) -> Player:
        """Another caller, in a process of its own."""
        places = [cast.place(rank) for rank in range(len(cast.players))]
        return self.player(call, WorkerId("other999", 0, incarnation), places, script)

    def counted(self, cast: Cast) -> dict[tuple[str, bool], CallCount]:
        """The calls of this caller to a role: by method, and whether the caller does not wait."""
        self.caller.report()
        counts = self.told[-1].counts if self.told else ()
        return {(each.method, each.asynchronous): each for each in counts if each.role == cast.role}

    def end_players(self, but: Collection[Player] = ()) -> None:
        """End all workers and trainers but these."""
        for player in self.players:
            if player not in but:
                player.kill()
        self.players = tuple(but)

    def close(self) -> None:
        """Everybody leaves."""
        self.caller.close()
        self.end_players()
        self.transport.close()


STOP, GO_ON = signal.SIGSTOP, signal.SIGCONT
