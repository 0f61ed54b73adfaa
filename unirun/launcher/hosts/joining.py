"""Hosts that ssh reaches become nodes of a running job."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from unirun.errors import UnirunError
from unirun.failover.offers import Unfit
from unirun.launcher.hosts.connection import carried, reach
from unirun.launcher.hosts.hostlist import Host
from unirun.launcher.hosts.lobby import refusal
from unirun.wire.address import TcpAddress
from unirun.wire.handshake import Token
from unirun.wire.messages import Invite, Ready

JOIN = 60.0
"""Seconds that a host has to join."""


def join_over_ssh(
    hosts: Sequence[Host], masters: TcpAddress, token: Token, *, interface: str, insecure: bool
) -> None:
    """Let `hosts` join the job whose masters listen at `masters`. Their agents do not depend on this process.

    Raises `RendezvousError` with all hosts that have not joined.
    """
    asyncio.run(_join_all(hosts, masters, token, interface, insecure=insecure))


async def _join_all(
    hosts: Sequence[Host], masters: TcpAddress, token: Token, interface: str, *, insecure: bool
) -> None:
    unfit: list[Unfit] = []

    async def one(host: Host) -> None:
        invite = Invite(
            token=token.hex(),
            node=host.name,
            cwd=os.getcwd(),
            env=carried(os.environ),
            masters=masters,
            interface=interface,
            insecure=insecure,
        )
        try:
            async with asyncio.timeout(JOIN):
                await _join(host, invite)
        except TimeoutError:
            unfit.append(Unfit(host.name, f"it has not joined within {JOIN:g} s", f"try: ssh {host.target}"))
        except UnirunError as error:
            unfit.append(Unfit(host.name, error.problem, error.remedy))

    await asyncio.gather(*(one(host) for host in hosts))
    if unfit:
        raise refusal(unfit)


async def _join(host: Host, invite: Invite) -> None:
    remote = await reach(host)
    try:
        remote.stream.send(invite)
        await remote.hear(Ready)
    finally:
        await remote.close()
