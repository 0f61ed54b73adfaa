"""A host without credentials floods the master's port for twenty seconds: the job goes on, peers that prove the token are
let in soon, and the master's memory stays what it was. ``make chaos``."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import START_TIMEOUT
from tests.integration.hosts.ticking_job import TickingJob
from tests.testbed.fixtures import available
from tests.testbed.host import HOME, Host
from tests.testbed.hosts import Hosts
from tests.waiting import eventually

SECONDS = 20.0
MEMORY = 100
"""MiB that the master may take; without a flood it has about 40."""

LET_IN = 3.0
"""Seconds in which a peer that has the token is let in; the present ones are far below that."""

FLOOD = """
# Connects from all addresses of this host in turn, `held` connections at a time, with the beginning of TLS or without.
import collections, itertools, resource, socket, ssl, sys, time
where, port, kind, held, seconds, *origins = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
context = ssl.create_default_context()
incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
try:
    context.wrap_bio(incoming, outgoing, server_hostname="x").do_handshake()
except ssl.SSLWantReadError:
    hello = outgoing.read()
end, open_, count = time.monotonic() + float(seconds), collections.deque(), 0
for origin in itertools.cycle(origins):
    if time.monotonic() > end:
        break
    try:
        sock = socket.create_connection((where, int(port)), 1.0, (origin, 0))
        if kind == "hello":
            sock.send(hello)
        open_.append(sock)
        count += 1
    except OSError:
        pass
    while len(open_) >= int(held):
        if kind == "hello":
            time.sleep(0.02)
            while open_:
                open_.popleft().close()
        else:
            open_.popleft().close()
print(count)
"""

PEER = """
# Connects again and again as a peer that has the token, and says how long it took.
import asyncio, pathlib, sys, time
from unirun.wire.credentials import load_credentials
from unirun.wire.address import TcpAddress
from unirun.wire.aio import connect
folder, where, port, node, seconds = sys.argv[1:]
async def main():
    end, credentials = time.monotonic() + float(seconds), load_credentials(pathlib.Path(folder))
    while time.monotonic() < end:
        began = time.monotonic()
        try:
            await (await connect(TcpAddress(where, int(port), node), credentials)).close()
            print(round(time.monotonic() - began, 3), flush=True)
        except Exception as error:
            print("failed", round(time.monotonic() - began, 3), repr(error), flush=True)
        await asyncio.sleep(0.2)
asyncio.run(main())
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Four hosts, of which the last one is no part of the job."""
    with available(), Hosts(4) as four:
        yield four


def memory(pid: int) -> int:
    """MiB that a process has now."""
    line = next(each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in each)
    return int(line.split()[1]) >> 10


def head_of(host: Host) -> tuple[Path, str, str]:
    """The directory of the job on `host`, as its processes see it, and where masters listen."""
    (file,) = host.path(HOME).rglob("ticking/head")
    found = json.loads(file.read_text())
    return Path("/") / file.parent.relative_to(host.path("/")), found["addr"], str(found["port"])


def give_addresses(hosts: Hosts, count: int) -> list[str]:
    """Give the last host so many addresses, to which the others have a route."""
    found = [f"198.19.{number // 200}.{1 + number % 200}" for number in range(count)]
    for address in found:
        hosts[3].run(["ip", "address", "add", f"{address}/32", "dev", "lo"])
    for number in range(3):
        hosts[number].run(["ip", "route", "add", "198.19.0.0/16", "via", hosts[3].address])
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "held"), [("hello", 60), ("silent", 4000)])
@pytest.mark.parametrize("origins", [1, 200])
def test_a_flood_ends_no_job_and_keeps_nobody_out(
    hosts: Hosts, kind: str, held: int, origins: int, capsys: pytest.CaptureFixture[str]
) -> None:
    job = TickingJob(hosts)
    try:
        job.until_up(hosts[0], 0, 0, 1)
        job.until_up(hosts[1], 0, 2, 3)
        (master,) = job.masters()
        folder, where, port = head_of(hosts[1])
        flooding = [sys.executable, "-c", FLOOD, where, port, kind, held, SECONDS]
        flood = hosts[3].popen([*flooding, *give_addresses(hosts, origins)], stdout=subprocess.PIPE)
        eventually(lambda: job.events("refused"), "the master refuses connections", START_TIMEOUT)
        calling = [sys.executable, "-c", PEER, folder, where, port, "h1", SECONDS - 3]
        peer = hosts[1].popen(calling, stdout=subprocess.PIPE)
        peak = 0
        while flood.poll() is None:
            peak = max(peak, memory(master))
            time.sleep(0.1)
        said = peer.communicate(timeout=START_TIMEOUT)[0].decode()
        assert "failed" not in said, said
        took = [float(line) for line in said.split()]
        made = flood.communicate()[0].decode().strip()
        with capsys.disabled():
            times = f"{statistics.median(took):.2f} s (median), {max(took):.2f} s (worst of {len(took)})"
            print(
                f"\n{made} {kind} from {origins}: the master has {peak} MiB; a peer is let in after {times}"
            )
        job.ends()
        assert job.events("agent_lost") == []
        assert peak < MEMORY
        assert max(took) < LET_IN
    finally:
        job.kill()
