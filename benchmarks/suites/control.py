"""The cost of the control plane in a large job, and in a small one at rest.

The master of 10 000 ranks is the real one with its streams, its ledger and its status; only its agents are made up
(`benchmarks.fleet`). What it takes is counted in processor time, in units of `benchmarks.calibration`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import psutil

from benchmarks.calibration import bar, calibrate
from benchmarks.encodings import agent_encodings
from benchmarks.figure import Bar, BenchmarkError, Figure, load_of_others, measured, ratio, say
from benchmarks.job import DEADLINE, environment, program
from benchmarks.suites.rpc import BARS as CALL_BARS
from benchmarks.suites.rpc import figure, foreign, rounds
from unirun.collocation import Device, Inventory, Node, place
from unirun.failover.context import encode
from unirun.failover.state import new_job
from unirun.observe.jobdir import JobDir
from unirun.observe.status import read_status
from unirun.rendezvous.creation import create_job
from unirun.spec.job import Entry, JobSpec, RoleSpec
from unirun.wire.certificates import make_tls
from unirun.wire.handshake import load_token, new_token

START = bar("10 000 ranks start: processor time of the master", 5.0)
WORKER_STEP = bar("10 000 ranks, one worker restarted: longest step of the master", 0.020)
WORKER_BYTES = Bar("10 000 ranks, one worker restarted: bytes sent to each agent", "bytes", 2000)
NODE_STEP = bar("10 000 ranks, one node of 8 lost: longest step of the master", 0.300)
ENCODINGS = Bar("messages to all 8 workers of a node: encodings", "encodings", 1)
IDLE = Bar("8 idle workers of a job that makes calls: share of a core", "%", 2.0)
BLOCKING = next(bar for transport, what, _, bar in CALL_BARS if (transport, what) == ("socket", "blocking"))

NODES, PER_NODE, SPARES = 1250, 8, 2
LOST_RANK, LOST_NODE = 4321, "n77"

PATIENCE = 600.0
"""Seconds until a large job has settled."""

IDLE_WORKERS = 8
IDLE_FOR = 5.0
"""Seconds over which the processor time of idle workers is counted."""


def figures(runs: int) -> list[Figure]:
    """All figures of this suite; the large job is run once or twice, as it is much work for the machine."""
    return [
        *large_job(min(runs, 2)),
        measured(ENCODINGS, 1, lambda: agent_encodings(PER_NODE)),
        measured(IDLE, min(runs, 3), idle_share),
        *calls(runs),
    ]


def large_job(runs: int) -> list[Figure]:
    """The figures of a job of 10 000 ranks."""
    say(START.name)
    found: list[tuple[float, ...]] = []
    units: list[float] = []
    busy: list[float] = []
    fault = ""
    try:
        while len(found) < runs:
            busy.append(load_of_others())
            before = calibrate(time.process_time)
            found.append(large_costs())
            units.append((before + calibrate(time.process_time)) / 2)
    except BenchmarkError as error:
        fault = str(error)
    start, worker, received, node = list(zip(*found, strict=True)) or [()] * 4
    others = median(busy)
    whole = median(received) if received else None
    peer = "pure Python"
    return [
        Figure(START, ratio(start, units), runs, "s", start, peer, tuple(units), fault, others),
        Figure(WORKER_STEP, ratio(worker, units), runs, "s", worker, peer, tuple(units), fault, others),
        Figure(WORKER_BYTES, whole, runs, "bytes", received, fault=fault, busy=others),
        Figure(NODE_STEP, ratio(node, units), runs, "s", node, peer, tuple(units), fault, others),
    ]


def large_costs() -> tuple[float, ...]:
    """Run the large job once: the values of the figures, in seconds and bytes, in the order of `large_job`."""
    with large() as (master, fleet, job):
        settle(fleet, "start", job, restarts=0)
        ask(fleet, "bytes")
        start = ask(master, "")["processor"]
        settle(fleet, f"worker {LOST_RANK}", job, restarts=1)
        worker = ask(master, "")["longest"]
        received = ask(fleet, "bytes")["received"]
        settle(fleet, f"node {LOST_NODE}", job, restarts=2)
        node = ask(master, "")["longest"]
        return start, worker, received, node


def settle(fleet: subprocess.Popen[str], command: str, job: JobDir, *, restarts: int) -> None:
    """Run an action, and wait until all ranks run again and the master sends no more messages."""
    if ask(fleet, command)["up"] != NODES * PER_NODE:
        raise BenchmarkError(f"not all ranks are up after {command!r}")
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        time.sleep(1.0)
        role = read_status(job).roles[0]
        formed = {worker.generation for worker in role.workers} == {role.generation}
        if role.phase == "running" and role.restarts == restarts and formed:
            return
    raise BenchmarkError(f"the role is {role.phase} after {command!r}")


@contextlib.contextmanager
def large(
    hosts: int = NODES, per_node: int = PER_NODE, spares: int = SPARES, *, tls: bool = False
) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str], JobDir]]:
    """The processes of a master and of its agents, and the directory of their job. With `tls` agents connect over TCP
    with TLS, each with a certificate of its own."""
    home = Path(tempfile.mkdtemp(prefix="unirun-bench-"))
    before = os.environ.get("UNIRUN_HOME")
    os.environ["UNIRUN_HOME"] = str(home)
    processes: list[subprocess.Popen[str]] = []
    try:
        job, lock = create_job("large", new_token())
        os.close(lock)
        if tls:
            make_tls(job.path, load_token(job.token), "n0")
        devices = tuple(Device(str(n), "gpu") for n in range(per_node))
        nodes = [f"n{n}" for n in range(hosts + spares)]
        inventory = Inventory(tuple(Node(name, tuple(range(per_node)), devices) for name in nodes))
        role = RoleSpec(
            "rollout", hosts * per_node, Entry("workload", "a:B"), max_restarts=10, restart="process"
        )
        spec = JobSpec("large", "large", (role,), ("rollout",), join_timeout=120.0, spares=spares)
        spec, placement = place(spec, inventory)
        state = new_job(spec, placement, started=time.time(), logs="/logs", inventory=inventory, uid=job.uid)
        job.write_first_context(encode(state))
        plan = home / "plan.json"
        plan.write_text(json.dumps({"nodes": nodes, "role": role.name, "ranks": role.count}))
        for module, *more in (("benchmarks.clocked",), ("benchmarks.fleet", str(plan))):
            command = (sys.executable, "-m", module, str(job.path), *more)
            pipe = subprocess.PIPE
            processes.append(
                subprocess.Popen(command, env=environment(home), text=True, stdin=pipe, stdout=pipe)
            )
        yield processes[0], processes[1], job
    finally:
        for process in reversed(processes):
            process.kill()
            process.communicate()
        if before is None:
            del os.environ["UNIRUN_HOME"]
        else:
            os.environ["UNIRUN_HOME"] = before
        shutil.rmtree(home)


def ask(process: subprocess.Popen[str], command: str) -> dict[str, float]:
    """Send one command. Returns its answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{command}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise BenchmarkError(f"{process.args!r} has ended at {command!r}")
    answer: dict[str, float] = json.loads(line)
    return answer


def idle_share() -> float:
    """The percentage of one core that 8 idle workers use together after they were called."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        job = {
            "roles": {"worker": {"count": IDLE_WORKERS, "workload": "benchmarks.calls:Worker"}},
            "trainer": "benchmarks.calls:Rest",
            "config": {"result": str(home / "result.json")},
            "cwd": str(Path(__file__).parents[2]),
        }
        (home / "job.yaml").write_text(json.dumps(job))
        command = [program("unirun"), "--quiet", "--config", str(home / "job.yaml")]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            command, env=environment(home), stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, text=True
        )
        try:
            workers = [psutil.Process(pid) for pid in wait_for_pids(home / "result.json", process)]
            time.sleep(1.0)
            spent, began = used(workers), time.monotonic()
            time.sleep(IDLE_FOR)
            return 100 * (used(workers) - spent) / (time.monotonic() - began)
        finally:
            process.terminate()
            process.communicate(timeout=DEADLINE)


def wait_for_pids(file: Path, process: subprocess.Popen[str]) -> list[int]:
    """The pids of the workers, which the trainer writes when it has called all of them."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end and process.poll() is None:
        if file.exists():
            pids: list[int] = json.loads(file.read_text())
            return pids
        time.sleep(0.02)
    process.terminate()
    raise BenchmarkError(f"the trainer did not call its workers\n{process.communicate()[1][-2000:]}")


def used(processes: list[psutil.Process]) -> float:
    """Processor seconds of all these processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def calls(runs: int) -> list[Figure]:
    """A blocking call over sockets beside torch's rpc_sync and Ray."""
    found: dict[str, list[float]] = {"own": [], "raw": []}
    busy, fault = load_of_others(), ""
    try:
        for number in range(runs):
            say(f"{BLOCKING.name}, run {number + 1} of {runs}")
            found["own"].append(median(rounds("socket", 1)["blocking"]["own"]))
            found["raw"].append(median(rounds("torch", 1)["blocking"]["raw"]))
    except BenchmarkError as error:
        fault = str(error)
    own = figure(BLOCKING, "us", runs, found["own"], "torch rpc", found["raw"], fault, busy)
    return [own, *foreign(runs, {"socket": found["own"]}, busy, ("ray",))]
