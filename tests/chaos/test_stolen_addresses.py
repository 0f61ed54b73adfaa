"""A machine without credentials takes over the address of the head, or of a host that is lost, as by forged ARP: no worker
lives longer for it, and none is moved later. ``make chaos``."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.integration.hosts.ticking_job import TickingJob
from tests.testbed.fixtures import available
from tests.testbed.host import Host
from tests.testbed.hosts import Hosts
from tests.waiting import eventually

from .test_floods import head_of

ACCEPTING = """
# Takes connections at the port of the head's masters, and says nothing.
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=4096)
held = []
while True:
    held.append(listener.accept())
"""

CONNECTING = """
# Connects to the master from the address of another host every second, and closes.
import socket, sys, time
while True:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), 1.0, (sys.argv[3], 0)).close()
    except OSError as error:
        print(error, flush=True)
    time.sleep(1.0)
"""

FENCE = 8.0
"""Seconds in which the workers of a host that is cut off must have ended: 5.9 by the rule, and the way there."""

MOVED = 30.0
"""Seconds in which the ranks of a lost host must run elsewhere."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Hosts of which the last one is no part of the job."""
    with available(), Hosts(4) as four:
        yield four


@pytest.fixture
def job(hosts: Hosts) -> Iterator[TickingJob]:
    ticking = TickingJob(hosts)
    try:
        ticking.until_up(hosts[0], 0, 0, 1)
        ticking.until_up(hosts[1], 0, 2, 3)
        yield ticking
    finally:
        ticking.kill()


def steal(address: str, thief: Host, victims: list[Host]) -> None:
    """Let `victims` believe that `address` is that of `thief`, which has it."""
    thief.run(["ip", "address", "add", f"{address}/32", "dev", "lo"])
    mac = thief.run(["cat", "/sys/class/net/eth0/address"]).stdout.strip()
    for victim in victims:
        victim.run(["ip", "neigh", "replace", address, "lladdr", mac, "dev", "eth0", "nud", "permanent"])


@pytest.mark.timeout(200)
def test_a_machine_with_the_heads_address_keeps_no_worker_of_a_host_alive_that_is_cut_off(
    job: TickingJob,
) -> None:
    hosts = job.hosts
    _, where, port = head_of(hosts[1])
    thief = hosts[3].popen([sys.executable, "-c", ACCEPTING, "0.0.0.0", port], stdout=subprocess.PIPE)
    began = time.monotonic()
    steal(where, hosts[3], [hosts[1]])
    # The others have heard of the thief's address, too.
    job.until_up(hosts[0], 1, 2, 3, within=MOVED)
    for rank in (2, 3):
        last, first = job.ticks(hosts[1], rank, 0)[-1], job.ticks(hosts[0], rank, 1)[0]
        assert last < began + FENCE
        assert last < first
    thief.kill()
    thief.communicate()
    job.ends()


@pytest.mark.timeout(200)
def test_connections_from_the_address_of_a_lost_host_do_not_keep_its_ranks_there(job: TickingJob) -> None:
    hosts = job.hosts
    _, where, port = head_of(hosts[1])
    hosts[1].cable(up=False)
    steal(hosts[1].address, hosts[3], [hosts[0]])
    thief = hosts[3].popen(
        [sys.executable, "-c", CONNECTING, where, port, hosts[1].address], stdout=subprocess.PIPE
    )
    eventually(lambda: job.events("refused"), "the master has refused the thief")
    job.until_up(hosts[2], 1, 2, 3, within=MOVED)
    thief.kill()
    thief.communicate()
    job.ends()
