"""Jobs on several hosts: network namespaces of this machine with sshd, which share only the disk.

The hosts share the machine's two or more processors, so that three of them import torch three times where one does it
once. Times of ranks are this machine's clock.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.figure import Bar, BenchmarkError, Figure, compared, measured
from benchmarks.job import (
    DEADLINE,
    SCRIPT,
    UNIRUN,
    Launcher,
    Point,
    environment,
    parse_points,
    program,
    start_time,
)
from benchmarks.job import started as started_here
from benchmarks.suites.control import ask, large
from benchmarks.tls import large_call, small_call
from tests.testbed.host import Host
from tests.testbed.hosts import Hosts
from tests.testbed.machine import Unavailable

RANKS = 12
ONE_HOST = Bar("start of 12 ranks on 3 hosts over ssh, without ssh's connect, ÷ on one host", "ratio", 1.3)
JOBS_AT_ONCE = Bar(
    "the same ÷ 3 jobs of 4 ranks at once on this machine, which import torch as often", "ratio", 1.3
)
TORCHRUN = Bar("the same ÷ torchrun on the 3 hosts", "ratio", 0.35)
POWER_OFF = Bar("SIGKILL of all on a host → its ranks past an all_reduce on the spare", "s", 2.5)
HUNG = Bar("a host hangs → noticed", "s", 5.0)

JOIN = Bar("join of 256 agents over TLS", "s", 10.0)
AGENTS = 256

TLS_LARGE = Bar("call with 64 MB over TLS ÷ over TCP", "ratio", 1.3)
TLS_SMALL = Bar("small call over TLS ÷ over TCP", "ratio", 1.15)

COLD = Launcher("unirun", UNIRUN.command, UNIRUN.env)

SPARE = """\
roles: {{default: {{count: 4, per_node: 2, device: cpu, max_restarts: 3}}}}
spares: 1
script: {script}
args: [{points}, train]
"""


def figures(runs: int) -> list[Figure]:
    """All figures of this suite, each from `runs` runs; none where hosts cannot be made."""
    anywhere = [
        measured(JOIN, runs, join),
        compared(TLS_LARGE, "us", runs, partial(large_call, "tls"), "TCP", partial(large_call, "insecure")),
        compared(TLS_SMALL, "us", runs, partial(small_call, "tls"), "TCP", partial(small_call, "insecure")),
    ]
    try:
        with Hosts(1):
            pass
    except Unavailable as error:
        bars = (ONE_HOST, JOBS_AT_ONCE, TORCHRUN, POWER_OFF, HUNG)
        missing = [Figure(bar, None, runs, bar.unit, missing=str(error)) for bar in bars]
        return [*missing, *anywhere]
    return [
        compared(ONE_HOST, "s", runs, over_ssh, "one host", partial(start_time, COLD, RANKS)),
        compared(JOBS_AT_ONCE, "s", runs, over_ssh, "3 jobs", at_once),
        compared(TORCHRUN, "s", runs, over_ssh, "torchrun", by_torchrun),
        measured(POWER_OFF, runs, after_power_off),
        measured(HUNG, runs, until_noticed),
        *anywhere,
    ]


def join() -> float:
    """Seconds from the first connection of 256 agents, each with a certificate of its own, until all are told to start
    their workers. The agents are simulated, in one process (`benchmarks.fleet`)."""
    with large(AGENTS, 1, 0, tls=True) as (_, fleet, _):
        began = time.monotonic()
        if ask(fleet, "start")["up"] != AGENTS:
            raise BenchmarkError("not all ranks are up")
        return time.monotonic() - began


@contextlib.contextmanager
def bed() -> Iterator[tuple[Hosts, Path]]:
    """Three hosts, and a directory that they and this machine share."""
    folder = Path(tempfile.mkdtemp(prefix="unirun-bench-"))
    try:
        with Hosts(3, shared=[folder]) as hosts:
            yield hosts, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(points: Path, count: int, restarts: int, commands: list[subprocess.Popen[bytes]]) -> list[Point]:
    """The points of `count` ranks in their group number `restarts`. Raises `BenchmarkError`."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):
            found = [each for each in parse_points(points.read_text()) if each.restarts == restarts]
            if len(found) >= count:
                return found
        if any(command.poll() for command in commands):
            raise BenchmarkError("a command has ended with an error")
        time.sleep(0.005)
    raise BenchmarkError(f"waited {DEADLINE:g} s for {count} ranks past an all_reduce (restart {restarts})")


def over_ssh() -> float:
    """Seconds from the command on this machine until all ranks are past an all_reduce, without the time that ssh alone
    needs to reach all hosts."""
    with bed() as (hosts, folder):
        connect = ssh_time(hosts)
        points = folder / "points"
        command = (
            *COLD.command,
            "--hosts",
            "h1,h2,h3",
            f"--nproc-per-node={RANKS // 3}",
            SCRIPT,
            points,
            "once",
        )
        began = time.time()
        with started(hosts, folder, command) as process:
            ready = max(point.time for point in wait_for(points, RANKS, 0, [process]))
            if process.wait(DEADLINE) != 0:
                raise BenchmarkError("the job over ssh did not succeed")
        return ready - began - connect


def at_once() -> float:
    """Seconds from the first of three commands on this machine until all ranks of their jobs are past an all_reduce. As
    three hosts do, they import torch three times on the processors that there are."""
    began = time.time()
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(started_here(COLD, RANKS // 3, "once")) for _ in range(3)]
        ready = max(point.time for job in jobs for point in job.points())
        for job in jobs:
            job.succeed()
    return ready - began


def ssh_time(hosts: Hosts) -> float:
    """Seconds until ssh has run a command on all hosts at once."""
    env = hosts.environment()
    began = time.monotonic()
    commands = [subprocess.Popen(["ssh", f"h{n}", "true"], env=env) for n in range(1, 4)]
    if any(command.wait(DEADLINE) for command in commands):
        raise BenchmarkError("ssh does not reach the hosts")
    return time.monotonic() - began


def by_torchrun() -> float:
    """The same for a torchrun on each host, with its default settings."""
    with bed() as (hosts, folder):
        points = folder / "points"
        meeting = (
            "--nnodes=3",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={hosts[0].address}:29400",
            "--rdzv-id=x",
        )
        command = (program("torchrun"), *meeting, f"--nproc-per-node={RANKS // 3}", SCRIPT, points, "once")
        began = time.time()
        with contextlib.ExitStack() as stack:
            commands = [stack.enter_context(on_host(host, folder, command)) for host in hosts]
            ready = max(point.time for point in wait_for(points, RANKS, 0, commands))
            if any(process.wait(DEADLINE) for process in commands):
                raise BenchmarkError("the job of torchrun did not succeed")
        return ready - began


def after_power_off() -> float:
    """Seconds from SIGKILL of all processes on a host until its ranks are past an all_reduce on the spare."""
    with trained() as (hosts, points, process, _):
        victim = next(host for host in hosts if runs_ranks(host, points))
        killed = time.time()
        victim.kill_all(sshd=True)
        back = max(point.time for point in wait_for(points, 4, 1, [process]))
        return back - killed


def until_noticed() -> float:
    """Seconds from SIGSTOP of all processes on a host until the job reports that it is silent."""
    with trained() as (hosts, points, _, output):
        victim = [host for host in hosts if runs_ranks(host, points)][-1]
        began = time.time()
        victim.freeze()
        try:
            end = time.monotonic() + DEADLINE
            while "silent" not in output.read_text(errors="replace"):
                if time.monotonic() > end:
                    raise BenchmarkError("a host that hangs was not noticed")
                time.sleep(0.005)
            return time.time() - began
        finally:
            victim.thaw()


@contextlib.contextmanager
def trained(*options: str) -> Iterator[tuple[Hosts, Path, subprocess.Popen[bytes], Path]]:
    """A job of four ranks on two of three hosts, past the first all_reduce: hosts, points, command and its output."""
    with bed() as (hosts, folder):
        points, job = folder / "points", folder / "job.yaml"
        job.write_text(SPARE.format(script=SCRIPT, points=points))
        command = (program("unirun"), "--hosts", "h1,h2,h3", "--config", job, *options)
        with started(hosts, folder, command) as process:
            wait_for(points, 4, 0, [process])
            time.sleep(1.0)
            yield hosts, points, process, folder / "output"


def runs_ranks(host: Host, points: Path) -> bool:
    """Return True if ranks run on `host`, which is not the head."""
    pids = set(host.pids())
    here = [point for point in parse_points(points.read_text()) if point.pid in pids]
    return bool(here) and host.name != "h1"


@contextlib.contextmanager
def started(hosts: Hosts, folder: Path, command: tuple[object, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """A command on this machine, for the hosts."""
    env = {**environment(folder), **COLD.env, "PATH": hosts.environment()["PATH"]}
    with (
        (folder / "output").open("wb") as output,
        ended(
            subprocess.Popen(
                [*map(str, command)],
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        ) as process,
    ):
        yield process


@contextlib.contextmanager
def on_host(host: Host, folder: Path, command: tuple[object, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """A command on `host`."""
    with (
        (folder / f"output-{host.name}").open("wb") as output,
        ended(
            host.popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        ) as process,
    ):
        yield process


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Let `process` end, then kill it."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
