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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from unirun import atomic
from unirun.collocation import Inventory
from unirun.errors import JobError
from unirun.launcher.foreground.terminal import warn
from unirun.launcher.hosts.lobby import Lobby
from unirun.launcher.hosts.node import (
    credentials_of,
    early_agent,
    offer,
    own_address,
    settle,
    start,
    take_part,
)
from unirun.launcher.interfaces import is_own, resolve
from unirun.launcher.launch import leave, stay
from unirun.launcher.planned import PlannedJob
from unirun.observe.jobdir import unirun_home
from unirun.observe.ownership import make_private
from unirun.rendezvous.creation import new_uid
from unirun.spec.roles import NodeCount
from unirun.wire.address import TcpAddress
from unirun.wire.aio import StreamServer
from unirun.wire.credentials import Credentials
from unirun.wire.handshake import Token, load_token, new_token
from unirun.wire.messages import Dismissed, Invite, Ready
from unirun.wire.sockets import listen_tcp


def run_head(
    invite: Invite,
    count: NodeCount,
    make_plan: Callable[[Inventory], PlannedJob],
    *,
    timeout: float,
    store: str | None,
    quiet: bool,
    last_call: float = 0.0,
    names: Sequence[str] = (),
    publish: Callable[[TcpAddress], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> int:
    """Run the job of all nodes as their head, as `invite` says; `make_plan` plans it for those that have come.

    Wait for the least to the most nodes of `count`, `timeout` seconds at most; once the least number is there,
    `last_call` seconds for the others. `names` are those of the nodes, by rank, where they are known; `publish` tells
    the others where they meet, if they cannot know. Returns the job's exit code; when it is to detach, 0 when it has
    begun.

    Raises `RendezvousError`, also with all nodes that cannot take part, and what `make_plan` raises.
    """
    assert invite.head is not None
    addr = own_address(invite)
    with (
        listen_tcp(addr, invite.head.port) as listener,
        early_agent(invite) as agent,
        credentials_of(invite) as credentials,
        asyncio.Runner() as runner,
    ):
        here = offer(invite, addr, listener)
        assert here.masters is not None
        lobby = Lobby(count[1], here, names)
        try:
            with publish(here.masters):
                runner.run(_gather(lobby, count[0], timeout, last_call, listener, credentials))
            _, tasks = runner.run(
                lobby.assign(make_plan, uid=new_uid(), store=store, insecure=invite.insecure)
            )
            owner = None if invite.detach else os.getpid()
            settled = settle(invite, tasks[here.node], agent, listener, owner=owner, launches=True)
            running = start(*settled, agent, listener)
            runner.run(lobby.part(Ready()))
        except BaseException as error:
            runner.run(lobby.part(Dismissed(f"the job was not started: {error}")))
            raise
    return leave(running) if invite.detach else stay(running, quiet=quiet)


def run_member(
    invite: Invite,
    *,
    timeout: float,
    quiet: bool,
    complete: Callable[[Invite], Invite] = lambda invite: invite,
) -> int:
    """Take part in the job of a head elsewhere, which answers within `timeout` seconds; it may have begun. `complete`
    is as for `take_part`. Returns the job's exit code, and 0 at once when it is to detach. Raises `RendezvousError`."""
    owner = None if invite.detach else os.getpid()
    running = take_part(invite, timeout=timeout, owner=owner, complete=complete)
    return 0 if invite.detach else stay(running, quiet=quiet)


async def _gather(
    lobby: Lobby,
    least: int,
    timeout: float,
    last_call: float,
    listener: socket.socket,
    credentials: Credentials,
) -> None:
    # A copy: the master listens on the socket itself later.
    server = StreamServer(listener.dup(), credentials, lobby.admit, lambda text, _: warn(text))
    try:
        await lobby.gather(least, timeout, last_call)
    finally:
        server.close()
        await server.closed()


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
    remedy = "make one with: (umask 077; openssl rand -hex 32 >token), and copy it to all nodes"
    if path is not None:
        return load_token(Path(path), remedy)
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
    return load_token(file, remedy)


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
