"""A command on each host, as under torchrun and srun: the first one is the head, to which the others connect.

The head hears what each node offers, plans the job, and runs the first master. Each command shows the output of its own
ranks, and leaves with the job's exit code.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from msgspec.structs import replace

from unirun import atomic
from unirun.collocation import Inventory
from unirun.errors import AuthError, JobError, RendezvousError, WireError
from unirun.failover.offers import AgentTask
from unirun.launcher.foreground.terminal import warn
from unirun.launcher.hosts.lobby import Lobby, early_agent, offer, take_part
from unirun.launcher.interfaces import choose, is_own, resolve, route_to
from unirun.launcher.launch import Head, launch, leave, stay
from unirun.launcher.planned import PlannedJob
from unirun.launcher.process import adopt_orphans
from unirun.observe.jobdir import unirun_home
from unirun.observe.ownership import make_private
from unirun.rendezvous.creation import new_uid, store_for
from unirun.spec.job import JobSpec
from unirun.values import Value
from unirun.wire.address import TcpAddress
from unirun.wire.aio import StreamServer
from unirun.wire.blocking import BlockingStream
from unirun.wire.certificates import temporary
from unirun.wire.credentials import Credentials
from unirun.wire.handshake import Token, load_token, new_token
from unirun.wire.messages import Assigned, Dismissed, Ready
from unirun.wire.sockets import listen_tcp

HEAD_INTERVAL = 0.2
"""Seconds after which a node that the head does not answer yet tries again."""


class Meeting(Value):
    """The place and the manner in which the nodes of a job meet.

    This host is `node`, with the node rank `rank` (-1: any); it is the head if `head`. The head listens at `host`, a
    name or an address, and `port`, and waits for `least` to `most` nodes, `timeout` seconds at most; once there are
    `least`, `last_call` seconds for the others. `names` are those of the nodes, by rank, where they are known.
    `interface` is the user's choice, empty for none.
    """

    node: str
    host: str
    port: int
    token: Token
    timeout: float
    rank: int = -1
    head: bool = False
    least: int = 1
    most: int = 1
    last_call: float = 0.0
    names: tuple[str, ...] = ()
    interface: str = ""
    insecure: bool = False


def run_head(
    meeting: Meeting,
    spec: JobSpec,
    make_plan: Callable[[Inventory], PlannedJob],
    *,
    store: str | None,
    quiet: bool,
    detach: bool = False,
    publish: Callable[[TcpAddress], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> int:
    """Run the job of all nodes as their head. `spec` is the job as far as it is known without them; `make_plan` plans
    it for those that have come; `publish` tells the others where they meet, if they cannot know. Returns its exit
    code, with `detach` 0 when it has begun.

    Raises `RendezvousError`, also with all nodes that cannot take part, and what `make_plan` raises.
    """
    addr = choose(meeting.interface) if meeting.interface else resolve(meeting.host)
    with (
        listen_tcp(addr, meeting.port) as listener,
        early_agent(AgentTask(spec, meeting.node, (), os.getcwd(), addr)) as agent,
        temporary(meeting.token, meeting.node, insecure=meeting.insecure) as credentials,
        asyncio.Runner() as runner,
    ):
        address = TcpAddress(addr, listener.getsockname()[1], meeting.node)
        here = offer(meeting.node, meeting.rank, addr=addr)
        lobby = Lobby(meeting.most, here, meeting.names)
        try:
            with publish(address):
                runner.run(_gather(lobby, meeting, listener, credentials))
            planned = runner.run(lobby.plan(make_plan))
            url, members = store_for(store, lobby.offers, insecure=meeting.insecure)
            head = Head(
                *(meeting.node, meeting.token, new_uid(), listener, address, agent),
                insecure=meeting.insecure,
                etcd=members,
            )
            common = Assigned(planned.spec.run_id, head.uid, head=address, store=url or "", etcd=members)
            runner.run(lobby.assign(planned, common, cwd=""))
            running = launch(planned, store=url, head=head, detach=detach)
            runner.run(lobby.part(Ready()))
        except BaseException as error:
            runner.run(lobby.part(Dismissed(f"the job was not started: {error}")))
            raise
    return leave(running) if detach else stay(replace(running, node=meeting.node), quiet=quiet)


def run_member(meeting: Meeting, spec: JobSpec | None, *, quiet: bool, detach: bool = False) -> int:
    """Take part in the job of the head at `meeting`, which may have begun. `spec` is the job as far as it is known
    here. Returns the job's exit code, and 0 at once with `detach`. Raises `RendezvousError`."""
    early = AgentTask(spec, meeting.node, (), os.getcwd(), meeting.host) if spec is not None else None
    with (
        early_agent(early) as agent,
        temporary(meeting.token, meeting.node, insecure=meeting.insecure) as credentials,
        _reach_head(meeting, credentials) as stream,
    ):
        addr = choose(meeting.interface) if meeting.interface else route_to(resolve(meeting.host))
        running = take_part(
            stream,
            offer(meeting.node, meeting.rank, addr=addr),
            agent,
            meeting.token,
            insecure=meeting.insecure,
            interface=meeting.interface,
            owner=None if detach else os.getpid(),
        )
    if detach:
        return 0
    adopt_orphans()
    return stay(running, quiet=quiet)


async def _gather(lobby: Lobby, meeting: Meeting, listener: socket.socket, credentials: Credentials) -> None:
    # A copy: the master listens on the socket itself later.
    server = StreamServer(listener.dup(), credentials, lobby.admit, lambda text, _: warn(text))
    try:
        await lobby.gather(meeting.least, meeting.timeout, meeting.last_call)
    finally:
        server.close()
        await server.closed()


def _reach_head(meeting: Meeting, credentials: Credentials) -> BlockingStream:
    """Connect to the head, which may start later than this command. Raises `RendezvousError`, `WireError`."""
    end = time.monotonic() + meeting.timeout
    told = False
    while True:
        try:
            return BlockingStream.connect(TcpAddress(resolve(meeting.host), meeting.port, ""), credentials)
        except (RendezvousError, WireError) as error:
            # A wrong secret stays wrong, while a connection that was cut may succeed at the next attempt.
            refused = isinstance(error, WireError) and not isinstance(error.__cause__, OSError)
            if refused or isinstance(error, AuthError):
                raise
            if time.monotonic() > end:
                raise RendezvousError(
                    f"the head at {meeting.host}:{meeting.port} has not answered within {meeting.timeout:g} s: {error}",
                    "start the command on the first node too, and see --rdzv-endpoint",
                ) from error
        if not told and time.monotonic() > end - meeting.timeout + 3.0:
            told = True
            warn(f"waiting for the head at {meeting.host}:{meeting.port}")
        time.sleep(HEAD_INTERVAL)


def is_here(host: str) -> bool:
    """Return True if the name or address `host` is this host. Raises `RendezvousError` when it has no address."""
    return host in (socket.gethostname(), "localhost") or is_own(resolve(host))


# The secret that commands on several hosts share: a file that each of them can read, and no other user.

TOKEN_INTERVAL = 0.1
"""Seconds between two looks whether the head has made the file."""


def shared_secret(path: str | None, *, make: bool, timeout: float) -> Token:
    """The secret in the file at `path`, by default ``token`` in unirun's directory.

    The head makes the default file when it is missing (`make`); the other nodes, which may share the directory, wait
    for it for `timeout` seconds. Raises `JobError`, also when others can read the file.
    """
    if path is not None:
        return load_token(Path(path))
    file = unirun_home() / "token"
    if make:
        _make(file)
    end = time.monotonic() + timeout
    while not _is_there(file) and time.monotonic() < end:
        time.sleep(TOKEN_INTERVAL)
    if not file.exists():
        raise JobError(
            f"{file} is missing, the secret that this node proves to the head",
            "copy it from the head (mode 600), or name one with --token-file",
        )
    return load_token(file)


def token_of_job(secret: Token, name: str) -> Token:
    """The token of one job among those whose nodes share `secret`: `name` is its id, or where its nodes meet."""
    return Token(hmac.digest(secret, f"unirun job {name}".encode(), "sha256"))


def _make(file: Path) -> None:
    """Write a new token, unless there is one. It appears whole."""
    if file.exists():
        return
    try:
        make_private(file.parent)
        # Another head may be faster.
        atomic.create(file, new_token().hex())
    except OSError as error:
        raise JobError(
            f"{file} cannot be written: {error.strerror}", "name a file with --token-file"
        ) from error


def _is_there(file: Path) -> bool:
    # Listing the directory makes a network file system look again.
    try:
        return file.name in os.listdir(file.parent)
    except OSError:
        return False
