"""``unirun warm``: keep torch imported between jobs."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

from unirun.cli.commandline import items
from unirun.cli.output import age, duration, megabytes, print_table
from unirun.errors import JobError, UsageError
from unirun.launcher.environment import for_workers
from unirun.launcher.foreground.terminal import say
from unirun.launcher.orders import PRELOAD, spawner_request
from unirun.launcher.warm.borrowing import (
    LOG,
    Warm,
    abandon_starting,
    choose,
    is_alive,
    running,
    start,
)

WARM_START_TIMEOUT = 300.0
"""Seconds that `start` waits for the imports."""

WARM_STOP_TIMEOUT = 10.0
"""Seconds that `stop` waits."""


def main(options: Any) -> int:
    """Start, show or stop this user's warm processes."""
    idle = duration("--idle", options.idle)
    if idle == 0:
        raise UsageError(
            "--idle 0s: a warm process would end before a job can use it", "for example --idle 30m"
        )
    if options.action == "status":
        return _status()
    if options.action == "stop":
        return _stop()
    until = os.getsid(0) if options.until_logout else 0
    return _start(tuple(items(options.preload)), idle, until)


def _start(preload: tuple[str, ...], idle: float, until: int) -> int:
    """Start one for jobs of one rank and one for jobs of several: OMP_NUM_THREADS, read at import, differs."""
    modules = (*PRELOAD, *preload)
    alone = for_workers(os.environ)
    several = {"OMP_NUM_THREADS": "1"} | alone
    folders = []
    for env in [alone] if alone == several else [several, alone]:
        warm = choose(spawner_request(env, modules, os.getcwd())).warm
        if warm is not None and set(warm.description.modules) == set(modules):
            say(f"process {warm.description.pid} is there")
        else:
            folders.append(start(env, modules, idle, until))
    for folder in folders:
        ready = _await(folder)
        say(f"process {ready.description.pid} is ready: {_purpose(ready)}")
    return 0


def _await(folder: Path) -> Warm:
    deadline = time.monotonic() + WARM_START_TIMEOUT
    # Opened first: a process that ends removes its folder.
    with (folder / LOG).open() as log:
        while True:
            alive = is_alive(folder)
            for warm in running():
                if warm.folder == folder:
                    return warm
            if not alive or time.monotonic() > deadline:
                raise JobError("the warm process does not start", log.read()[-2000:].strip())
            time.sleep(0.02)


def _purpose(warm: Warm) -> str:
    threads = warm.description.variables.get("OMP_NUM_THREADS")
    return (
        "for jobs of one rank"
        if threads is None
        else f"OMP_NUM_THREADS={threads}, as in jobs of several ranks"
    )


def _status() -> int:
    found = running()
    if not found:
        say("no warm process runs")
        return 1
    rows = []
    for warm in found:
        told = warm.description
        extra = [name for name in told.modules if name not in PRELOAD]
        rows.append(
            [
                str(told.pid),
                _purpose(warm),
                ", ".join(extra) or "torch",
                age(time.time() - told.began),
                age(told.idle),
                str(_jobs(told.pid)),
                megabytes(_memory(told.pid)),
            ]
        )
    print_table(["PID", "FOR", "PRELOADED", "UP", "IDLE LIMIT", "JOBS", "MEMORY"], rows)
    return 0


def _jobs(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return 0


def _memory(pid: int) -> int | None:
    """The proportional set size of a process in bytes; None when it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None


def _stop() -> int:
    """Stop all warm processes. Running jobs are not affected."""
    for warm in running():
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(warm.description.pid)
            try:
                if not is_alive(warm.folder):
                    continue
                signal.pidfd_send_signal(handle, signal.SIGTERM)
                if not select.select([handle], [], [], WARM_STOP_TIMEOUT)[0]:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)
            say(f"process {warm.description.pid} has ended")
    if starting := abandon_starting():
        say(f"{starting} that still import end when they have done so")
    return 0
