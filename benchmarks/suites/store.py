"""The cost of a job that survives its master: failover, writes, large contexts, many agents.

etcd is one member on loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import psutil
from msgspec.structs import replace

from benchmarks.calibration import bar, in_units
from benchmarks.etcd import etcd
from benchmarks.figure import Bar, BenchmarkError, Figure, ProgramMissing, measured
from benchmarks.job import UNIRUN, Job, Launcher, environment, started
from unirun.collocation import Assignment, Placement
from unirun.failover.context import ContextStore, encode, load
from unirun.failover.state import JobState, Ranks, RolePhase, WorkerPhase, new_job
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.creation import create_job
from unirun.rendezvous.election import campaign, job_prefix, leader_of
from unirun.rendezvous.store.protocol import Store
from unirun.rendezvous.store.url import open_store
from unirun.spec.job import Entry, JobSpec, RoleSpec
from unirun.wire.address import UnixAddress
from unirun.wire.handshake import new_token

FAILOVER = {
    "sqlite": bar("master killed → the next one has decided (SQLite)", 1.0),
    "etcd": bar("master killed → the next one has decided (etcd)", 2.0),
}
WRITES = Bar("store writes for a worker's failure and restart", "writes", 4)
LARGE = bar("persist and load a context of 10 000 ranks", 1.0)
JOIN = bar("1 000 agents join", 5.0)
IDLE = Bar("master of 1 000 agents, idle: share of a core", "%", 10.0)

RANKS, AGENTS = 10_000, 1_000
IDLE_FOR = 10.0
"""Seconds over which an idle master's processor time is counted."""


def figures(runs: int) -> list[Figure]:
    """All figures of this suite; what needs many processes is measured with few runs."""
    found = [in_units(FAILOVER["sqlite"], runs, partial(failover_time, None)), failover_with_etcd(runs)]
    found.append(measured(WRITES, runs, failure_writes))
    found.append(in_units(LARGE, runs, large_context))
    shares: list[float] = []

    def join_time() -> float:
        seconds, share = crowd_costs()
        shares.append(share)
        return seconds

    found.append(in_units(JOIN, min(runs, 3), join_time))
    share = median(shares) if shares else None
    found.append(Figure(IDLE, share, len(shares), IDLE.unit, tuple(shares), fault=found[-1].fault))
    return found


def failover_with_etcd(runs: int) -> Figure:
    """The figure with etcd, or the reason why it is missing."""
    try:
        with etcd() as endpoint:
            return in_units(FAILOVER["etcd"], runs, partial(failover_time, f"etcd://{endpoint}"))
    except ProgramMissing as error:
        return Figure(FAILOVER["etcd"], None, runs, "s", missing=str(error))
    except BenchmarkError as error:
        return Figure(FAILOVER["etcd"], None, runs, "s", fault=str(error))


def failover_time(url: str | None) -> float:
    """Seconds from SIGKILL of a worker and its master until the next master has written its decision."""
    launcher = UNIRUN if url is None else Launcher("unirun", (*UNIRUN.command, "--store", url))
    with started(launcher, 2, "train", max_restarts=1) as job:
        points = job.points()
        with _store_of(job) as (store, folder):
            leader = leader_of(store, job_prefix(folder.run_id))
            if leader is None:
                raise BenchmarkError("the job has no master")
            began = time.monotonic()
            os.kill(leader.pid, signal.SIGKILL)
            os.kill(points[0].pid, signal.SIGKILL)

            def decided() -> float | None:
                state = load(store, folder.run_id)
                restarted = state is not None and any(role.restarts for role in state.roles.values())
                return time.monotonic() - began if restarted else None

            seconds = job.wait(decided, "the next master's decision")
        job.points(restarts=1)
        return seconds


def failure_writes() -> float:
    """Transactions of the master from a worker's end until all ranks run again, and a moment longer."""
    with started(UNIRUN, 2, "train", max_restarts=1) as job:
        points = job.points()
        with _store_of(job) as (store, folder):
            time.sleep(1.5)
            before = _writes(store, folder)
            os.kill(points[0].pid, signal.SIGKILL)
            job.points(restarts=1)
            time.sleep(1.5)
            return float(_writes(store, folder) - before)


def large_context() -> float:
    """Make, write and load the context of a job of `RANKS` ranks, in SQLite."""
    home = Path(tempfile.mkdtemp(prefix="unirun-bench-"))
    store = open_store(f"sqlite:{home / 'store.db'}")
    try:
        began = time.monotonic()
        state = _running(_large_job(RANKS // 8, 8))
        term = campaign(store, job_prefix("large"), UnixAddress("/x", "h"), 1, ttl=60.0)
        if term is None:
            raise BenchmarkError("nobody was elected")
        ContextStore(store, "large", term).create(state)
        loaded = load(store, "large")
        seconds = time.monotonic() - began
        if loaded is None or encode(loaded) != encode(state):
            raise BenchmarkError("what was loaded is not what was written")
        return seconds
    finally:
        store.close()
        shutil.rmtree(home)


def crowd_costs() -> tuple[float, float]:
    """Seconds until `AGENTS` agents have joined a master, and the percentage of a core that it takes afterwards."""
    home = Path(tempfile.mkdtemp(prefix="unirun-bench-"))
    processes: list[subprocess.Popen[str]] = []
    before = os.environ.get("UNIRUN_HOME")
    os.environ["UNIRUN_HOME"] = str(home)
    try:
        job, lock = create_job("crowd", new_token())
        os.close(lock)
        job.write_first_context(encode(replace(_large_job(AGENTS, 1), uid=job.uid)))
        env = environment(home)
        command = (sys.executable, "-m", "unirun.launcher.master", str(job.path), "0")
        master = subprocess.Popen(command, env=env, text=True)
        processes.append(master)
        command = (sys.executable, "-m", "benchmarks.crowd", str(job.path), str(AGENTS))
        crowd = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE)
        processes.append(crowd)
        if crowd.stdout is None or not (line := crowd.stdout.readline()):
            raise BenchmarkError("the agents did not join")
        time.sleep(3.0)
        usage = psutil.Process(master.pid)
        spent, began = sum(usage.cpu_times()[:2]), time.monotonic()
        time.sleep(IDLE_FOR)
        share = (sum(usage.cpu_times()[:2]) - spent) / (time.monotonic() - began)
        return float(line), 100 * share
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()
        if before is None:
            del os.environ["UNIRUN_HOME"]
        else:
            os.environ["UNIRUN_HOME"] = before
        shutil.rmtree(home)


def _large_job(nodes: int, per_node: int) -> JobState:
    role = RoleSpec("actor", nodes * per_node, Entry("script", "train.py"))
    spec = JobSpec("large", "large" if per_node > 1 else "crowd", (role,), ("actor",), join_timeout=120.0)
    places = (
        Assignment("actor", node * per_node + slot, f"n{node}", slot, slot, (str(slot),))
        for node in range(nodes)
        for slot in range(per_node)
    )
    return new_job(spec, Placement(tuple(places), ""), started=time.time(), logs="/logs")


def _running(state: JobState) -> JobState:
    """The state with all workers up, which is the usual one."""
    role = state.roles["actor"]
    workers = Ranks(
        replace(worker, phase=WorkerPhase.RUNNING, pid=100_000 + worker.rank) for worker in role.workers
    )
    return state.with_role(replace(role, workers=workers, phase=RolePhase.RUNNING))


@contextlib.contextmanager
def _store_of(job: Job) -> Iterator[tuple[Store, JobDir]]:
    (folder,) = (JobDir(path) for path in (job.home / "jobs").iterdir())
    store = open_store(folder.store_url)
    try:
        yield store, folder
    finally:
        store.close()


def _writes(store: Store, job: JobDir) -> int:
    head = store.get(f"{job_prefix(job.run_id)}head")
    return int(json.loads(head.value)["write"]) if head else 0
