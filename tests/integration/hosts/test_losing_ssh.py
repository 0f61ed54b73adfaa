"""The connections of the command are lost, or nobody reads from them: ranks go on, and no line of theirs is lost."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path

import psutil

from tests.waiting import eventually

from ..harness import START_TIMEOUT, Running
from .cluster import UnirunOnHosts, title_of

LINES = 70_000
"""Of each of three ranks."""

COUNTING = f"""
    # Numbered lines, half of them when it is told to go on; it ends when it is told to.
    import os, pathlib, sys, time
    def write(first, last):
        for number in range(first, last):
            sys.stdout.write(f"line {{number}} of rank {{os.environ['RANK']}}\\n")
        sys.stdout.flush()
    write(0, {LINES // 2})
    print("half", flush=True)
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
    write({LINES // 2}, {LINES})
    while not pathlib.Path("end").exists():
        time.sleep(0.02)
"""


def start(cluster: UnirunOnHosts) -> tuple[Running, Path]:
    """Three ranks on three hosts that have written half of their lines, and the file with the command's output."""
    shown = cluster.root / "shown"
    with shown.open("wb") as file:
        job = cluster.over_ssh(COUNTING, actor="count: 3, per_node: 1", stdout=file)
    eventually(
        lambda: shown.read_bytes().count(b"] half\n") == 3, "half of all lines is shown", START_TIMEOUT
    )
    return job, shown


def complete(cluster: UnirunOnHosts, job: Running, shown: Path) -> None:
    """The job has succeeded, and every line of each rank is shown and in the log here, once and in order."""
    cluster.place("end", "")
    end = job.end()
    assert end.code == 0, job.text
    lines = shown.read_text().splitlines()
    for rank in range(3):
        wanted = [f"line {number} of rank {rank}" for number in range(LINES)]
        wanted.insert(LINES // 2, "half")
        prefix = f"[actor:{rank}] "
        assert [line.removeprefix(prefix) for line in lines if line.startswith(prefix)] == wanted, job.text
        assert job.command.log("actor", rank).decode().splitlines() == wanted, job.text


def ssh_to(job: Running, node: str) -> int:
    """The pid of the command's ssh to a host."""
    found = [child.pid for child in psutil.Process(job.pid).children() if node in child.cmdline()]
    assert len(found) == 1, found
    return found[0]


def sessions(cluster: UnirunOnHosts, node: str) -> list[int]:
    """The processes of sshd that serve a connection."""
    return [pid for pid in cluster.host(node).pids() if is_session(pid)]


def is_session(pid: int) -> bool:
    """Return True if this is the process of sshd for one connection."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sshd: root@notty")
    except OSError:
        return False


def outlives_its_readers(pid: int) -> bool:
    """Return True if a write to a process that has ended is an error, and not the end of the process `pid`."""
    status = Path(f"/proc/{pid}/status").read_text()
    (ignored,) = re.findall(r"SigIgn:\s*(\w+)", status)
    return bool(int(ignored, 16) >> (signal.SIGPIPE - 1) & 1)


def test_connections_that_are_lost_cost_no_rank_and_no_line(cluster: UnirunOnHosts) -> None:
    """
    1. Three ranks on three hosts have written half of their lines.
    2. The command's ssh to one host is killed, and sshd's process for the connection to another.
    3. The ranks write the rest, which is shown after the reconnect.
    """
    job, shown = start(cluster)
    for node, title in (("h1", "unirun-master"), ("h1", "unirun-agent"), ("h2", "unirun-agent")):
        assert outlives_its_readers(cluster.pid_on(node, title)), title
    os.kill(ssh_to(job, "h1"), signal.SIGKILL)
    for pid in sessions(cluster, "h2"):
        os.kill(pid, signal.SIGKILL)
    job.lines(r"the connection to h[12] is lost; no rank depends on it", 2)
    cluster.place("go", "")
    job.lines(r"the connection to h[12] is back", 2)
    complete(cluster, job, shown)
    assert cluster.events("decision") == []


def test_a_command_that_is_stopped_for_a_while_loses_nothing_and_makes_nothing_grow(
    cluster: UnirunOnHosts,
) -> None:
    """
    1. The command is stopped, and so is its reading of what hosts send.
    2. The ranks write 5 MB each, and no process of the hosts takes more memory for that.
    3. The command goes on, and shows all of it.
    """
    job, shown = start(cluster)
    job.signal(signal.SIGSTOP)
    sending = [pid for host in cluster.hosts for pid in host.pids() if title_of(pid) == "python"]
    assert len(sending) == 3
    before = [psutil.Process(pid).memory_info().rss for pid in sending]
    cluster.place("go", "")

    def is_written(log: Path) -> bool:
        return log.read_bytes().count(b"\n") > LINES

    for rank, host in enumerate(cluster.hosts):
        log = host.path(cluster.folder(host.name)) / "logs" / "actor" / str(rank) / "0" / "stdout.log"
        eventually(partial(is_written, log), "all is written", START_TIMEOUT)
    after = [psutil.Process(pid).memory_info().rss for pid in sending]
    assert all(now < then + (8 << 20) for then, now in zip(before, after, strict=True)), (before, after)
    job.signal(signal.SIGCONT)
    complete(cluster, job, shown)
