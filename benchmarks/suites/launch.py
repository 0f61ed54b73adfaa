"""Start, restart, memory and end of a job on one host, beside torchrun with the same script.

The ranks run `benchmarks.ranks` on gloo and write the times themselves; they and this process share one clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil

from benchmarks import warm
from benchmarks.calibration import bar, in_units
from benchmarks.figure import Bar, BenchmarkError, Figure, compared, say
from benchmarks.job import (
    DEADLINE,
    TORCHRUN,
    TORCHRUN_OWN_STORE,
    UNIRUN,
    Job,
    Launcher,
    environment,
    program,
    proportional_set_size,
    start_time,
    started,
    timed,
)

STARTS = (
    (4, Bar("start of 4 ranks ÷ torchrun", "ratio", 0.55)),
    (16, Bar("start of 16 ranks ÷ torchrun", "ratio", 0.20)),
)
RESTART = Bar("restart of 4 ranks after SIGKILL of one ÷ torchrun", "ratio", 0.15)
NODE = Bar("restart of 4 ranks after SIGKILL of a node's agent ÷ of one rank", "ratio", 3.0)
MEMORY = Bar("memory per rank of 8 (PSS) ÷ torchrun", "ratio", 0.40)
HELP = bar("unirun --help", 0.2)
STATUS = bar("unirun status", 0.3)
ORPHANS = Bar("processes left 1 s after SIGKILL of a part of unirun", "processes", 0)

VICTIMS = ("unirun", "unirun-agent", "unirun-spawner")
"""The names of the processes that are killed in turn: the command, the agent and the spawner. A master's end ends
nothing."""

NODES = Launcher(
    "a node's agent",
    (
        *UNIRUN.command,
        f"--config={Path(__file__).parents[1] / 'spare.yaml'}",
        "--inventory=fake:nodes=3,devices=2",
    ),
    UNIRUN.env,
)
"""Two nodes for four ranks, and a spare."""

SETTLE = 0.3
"""Seconds between the last rank's all_reduce and the kill. A launcher polls at most twice in that time."""


def figures(runs: int) -> list[Figure]:
    """All figures of this suite, each from `runs` runs (of the orphans: from `runs` rounds per victim)."""
    found = [
        compared(bar, "s", runs, partial(start_time, UNIRUN, n), "torchrun", partial(start_time, TORCHRUN, n))
        for n, bar in STARTS
    ]
    restart = partial(restart_time, UNIRUN), partial(restart_time, TORCHRUN_OWN_STORE)
    found.append(compared(RESTART, "s", runs, restart[0], "torchrun", restart[1]))
    found.append(compared(NODE, "s", runs, node_loss_time, "one rank", restart[0]))
    memory = partial(rank_memory, UNIRUN, 8), partial(rank_memory, TORCHRUN, 8)
    found.append(compared(MEMORY, "MB", runs, memory[0], "torchrun", memory[1]))
    found.append(in_units(HELP, runs, help_time))
    found.append(in_units(STATUS, runs, status_time))
    found += warm.figures(runs)
    found.append(orphans(runs))
    return found


def restart_time(launcher: Launcher) -> float:
    """Seconds from SIGKILL of rank 1 of 4, amid all_reduces, until all 4 ranks of the next group are past one."""
    with started(launcher, 4, "train", max_restarts=3) as job:
        victim = job.points()[1].pid
        time.sleep(SETTLE)
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        back = max(point.time for point in job.points(restarts=1))
    return back - killed


def node_loss_time() -> float:
    """The same for SIGKILL of the agent of two of the ranks, which go on at the spare."""
    with started(NODES, 4, "train", max_restarts=3) as job:
        points = job.points()
        job.wait(lambda: "node2: torch is imported" in events(job) or None, "the spare has imported torch")
        time.sleep(SETTLE)
        above = psutil.Process(points[2].pid).parents()
        agent = next(process for process in above if process.name() == "unirun-agent")
        killed = time.time()
        agent.kill()
        back = max(point.time for point in job.points(restarts=1))
    return back - killed


def events(job: Job) -> str:
    """The events of a job, as they are logged."""
    return "".join(path.read_text() for path in job.home.glob("jobs/*/events.jsonl"))


def rank_memory(launcher: Launcher, ranks: int) -> float:
    """The mean PSS of the ranks in MB (2**20 bytes), read while all of them sleep after an all_reduce.

    PSS counts a page that n processes share as 1/n of a page in each; the launcher's own processes are left out.
    """
    with started(launcher, ranks, "sit") as job:
        points = job.points()
        time.sleep(SETTLE)
        return sum(proportional_set_size(point.pid) for point in points) / ranks


def help_time() -> float:
    """Seconds from exec of ``unirun --help`` to its exit. It must not import torch."""
    env = environment(Path(os.devnull))
    seconds, _ = timed([program("unirun"), "--help"], env)
    refuse_torch(["--help"], env)
    return seconds


def status_time() -> float:
    """Seconds from exec of ``unirun status``, of a running job with 4 ranks, to its exit, without torch."""
    with started(UNIRUN, 4, "sit") as job:
        job.points()
        time.sleep(SETTLE)
        env = environment(job.home)
        seconds, _ = timed([program("unirun"), "status"], env)
        refuse_torch(["status"], env)
    return seconds


def refuse_torch(arguments: list[str], env: dict[str, str]) -> None:
    """Raise `BenchmarkError` when ``unirun`` with these arguments imports torch."""
    command = [sys.executable, "-X", "importtime", program("unirun"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)
    imported = imported_modules(done.stderr)
    if "unirun.cli" not in imported:
        raise BenchmarkError(f"the imports of unirun {' '.join(arguments)} cannot be seen\n{done.stderr}")
    if "torch" in imported:
        raise BenchmarkError(f"unirun {' '.join(arguments)} imports torch")


def imported_modules(report: str) -> set[str]:
    """The modules named in what ``python -X importtime`` writes."""
    lines = (line.split("|") for line in report.splitlines() if line.startswith("import time:"))
    return {fields[2].strip() for fields in lines if len(fields) == 3}


def orphans(rounds: int) -> Figure:
    """The number of processes of a job alive 1 s after SIGKILL of one of its parts, over all rounds.

    A round starts 2 ranks that ignore SIGTERM and hold a child each in a session of its own, and kills one of
    `VICTIMS`, in turn. Every process counts: the command, the master, the agent, the spawner, the store, the
    ranks, their children, and any that was started meanwhile.
    """
    say(ORPHANS.name)
    left: list[float] = []
    faults: list[str] = []
    try:
        for number in range(rounds * len(VICTIMS)):
            victim = VICTIMS[number % len(VICTIMS)]
            found = left_after_kill(victim)
            left.append(len(found))
            if found:
                faults.append(f"round {number + 1}, SIGKILL of {victim}: {', '.join(found)}")
    except BenchmarkError as error:
        faults.append(str(error))
    value = sum(left) if left else None
    return Figure(ORPHANS, value, len(left), ORPHANS.unit, tuple(left), fault="\n".join(faults))


def left_after_kill(victim: str) -> list[str]:
    """Start a job, kill the process called `victim`, and name what is alive a second later."""
    with started(UNIRUN, 2, "stubborn") as job:
        points = job.points()
        shown = job.wait(partial(shown_pids, job), "unirun status --json shows the pids of all ranks")
        members = job.members()
        if not {point.pid for point in points} == shown <= {member.pid for member in members}:
            raise BenchmarkError(f"status shows the ranks as {shown}, they are {points}, of {members}")
        by_name = {member.name(): member for member in members}
        if not by_name.keys() >= set(VICTIMS):
            raise BenchmarkError(f"the job has no {set(VICTIMS) - by_name.keys()}, only {sorted(by_name)}")
        by_name[victim].kill()
        wake = time.monotonic() + 1.0
        # The command is a child of this process and would stay as a zombie, which is no live process.
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(1.0)
        time.sleep(max(wake - time.monotonic(), 0.0))
        return sorted({described(process) for process in [*job.members(), *filter(alive, members)]})


def shown_pids(job: Job) -> set[int] | None:
    """The pids of the ranks in ``unirun status --json``, once it shows them all."""
    _, text = timed([program("unirun"), "status", "--json"], environment(job.home))
    pids = {worker["pid"] for role in json.loads(text)["roles"] for worker in role["workers"]}
    return pids if len(pids) == job.ranks and None not in pids else None


def alive(process: psutil.Process) -> bool:
    """Return True if a process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def described(process: psutil.Process) -> str:
    """``sleep (pid 17)``"""
    try:
        return f"{process.name()} (pid {process.pid})"
    except psutil.Error:
        return f"pid {process.pid}"
