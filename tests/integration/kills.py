"""Two ranks of a job, or its rendezvous store, are killed repeatedly; each time all ranks must soon be up again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.waiting import eventually

from .harness import START_TIMEOUT, Running, Unirun

MAX_KILL_INTERVAL = 0.2
"""Maximum seconds between the two kills of a pair."""

PRINT_AFTER_SECONDS = 2.0
"""Seconds after a pair after which the state of the job is printed."""

Pids = Mapping[str, int]
"""All workers, by ``role:rank``."""

WORKLOADS = """
    import torch.distributed as dist, unirun

    class Worker(unirun.BaseWorkload):
        def setup(self):
            dist.init_process_group("gloo")
"""

SCRIPTS = """
    # Each rank says in a file of its own with whom it has met: the pids of all members of the group, by rank.
    import json, os, torch, torch.distributed as dist, unirun
    ctx = unirun.init()
    dist.init_process_group("gloo")
    name = f"{ctx.role}:{ctx.rank}"
    while True:
        try:
            group = ctx.group("v", "w")
            pids = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size(group))]
            dist.all_gather(pids, torch.tensor([os.getpid()]), group=group)
            with open(name + ".new", "w") as file:
                json.dump([int(pid) for pid in pids], file)
            os.replace(name + ".new", name)
            # Nobody sends: only the end of the group ends this.
            other = (group.rank() + 1) % len(pids)
            dist.recv(torch.zeros(1), src=other, group=group)
        except RuntimeError:
            pass
"""


def workloads_up(unirun: Unirun) -> Pids | None:
    """The workers, when the only role runs and all its ranks take calls."""
    with contextlib.suppress(OSError, ValueError):
        (role,) = json.loads((unirun.job_dir() / "state.json").read_text())["roles"]
        workers = role["workers"]
        if role["phase"] == "running" and all(worker["phase"] == "serving" for worker in workers):
            return {f"{role['name']}:{worker['rank']}": worker["pid"] for worker in workers}
    return None


def scripts_up(met: Path, names: list[str]) -> Pids | None:
    """The workers called `names`, when all are in one group."""
    try:
        views = {tuple(json.loads((met / name).read_text())) for name in names}
    except OSError:
        return None
    return dict(zip(names, views.pop(), strict=True)) if len(views) == 1 else None


def kill_pairs(job: Running, up: Callable[[], Pids | None], pairs: int, rng: random.Random) -> list[float]:
    """Kill `pairs` pairs of ranks. Returns the seconds from each second kill until all were up."""
    seconds = []
    pids = _await(job, up, frozenset(), "at the start")
    for pair in range(pairs):
        first, second = rng.sample(sorted(pids), 2)
        gap = rng.uniform(0.0, MAX_KILL_INTERVAL)
        os.kill(pids[first], signal.SIGKILL)
        time.sleep(gap)
        # Its role may have been started again meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[second], signal.SIGKILL)
        killed = time.monotonic()
        what = f"after pair {pair}: {first}, and {second} {gap * 1000:.0f} ms later"
        pids = _await(job, up, frozenset((pids[first], pids[second])), what)
        seconds.append(time.monotonic() - killed)
    return seconds


def _await(job: Running, up: Callable[[], Pids | None], dead: frozenset[int], what: str) -> Pids:
    began, shown = time.monotonic(), False
    while time.monotonic() < began + START_TIMEOUT:
        pids = up()
        if pids is not None and dead.isdisjoint(pids.values()):
            return pids
        assert job.popen.poll() is None, f"the job has ended {what}:\n{job.text[-3000:]}"
        if dead and time.monotonic() > began + PRINT_AFTER_SECONDS and not shown:
            shown = True
            print(f"late {what}: {_state(job)}")
        time.sleep(0.005)
    raise AssertionError(f"not all ranks are up {what}:\n{_state(job)}")


def _state(job: Running) -> str:
    """The job's state and its latest events."""
    try:
        folder = job.command.job_dir()
        events = (folder / "events.jsonl").read_text().splitlines()
        return "\n".join([(folder / "state.json").read_text(), *events[-20:]])
    except (OSError, ValueError):
        return "it has just been started"


COLLECTIVES = """
import os
import torch, torch.distributed as dist, unirun

class Worker(unirun.BaseWorkload):
    def setup(self):
        dist.init_process_group("gloo")

    @unirun.trainer_invocation(idempotent=True)
    def again(self):
        total = torch.ones(8)
        for _ in range(50):
            dist.all_reduce(total)
            total /= self.world_size
        return float(total.sum())

    def once(self):
        return self.again()

class Trainer(unirun.BaseTrainer):
    def init(self):
        pass

    def fit(self):
        while not os.path.exists("enough"):
            for name in ("again", "once"):
                try:
                    found = getattr(self.RG_W, name)()
                    said = "right" if found == [8.0] * 3 else f"wrong {found}"
                except Exception as error:
                    said = f"{type(error).__name__} {error}"
                print("call", name, said.splitlines()[0], flush=True)
"""
"""A trainer that calls a method of three ranks with many collectives, by a name that is idempotent and one that is not."""


def kill_stores(unirun: Unirun, kills: int, rng: random.Random) -> None:
    """Kill the rendezvous store of the role ``w`` so many times, each time in a call of the generation before."""
    for _ in range(kills):
        before = eventually(lambda: _generation(unirun), "all ranks are in one generation", START_TIMEOUT)
        time.sleep(rng.random() * 0.3)  # at any moment of a call
        os.kill(unirun.pid_of("store:w"), signal.SIGKILL)
        eventually(
            lambda before=before: (_generation(unirun) or 0) > before,  # type: ignore[misc]
            "the next generation is formed",
            START_TIMEOUT,
        )


def _generation(unirun: Unirun) -> int | None:
    """The generation of the role ``w``, counted from 1, when it runs."""
    with contextlib.suppress(OSError, ValueError):
        for role in json.loads((unirun.job_dir() / "state.json").read_text())["roles"]:
            if role["name"] == "w" and role["phase"] == "running":
                return int(role["generation"]) + 1
    return None


def calls_of(text: str, name: str) -> Counter[str]:
    """The results of the calls of `COLLECTIVES` by this name, by the first word."""
    return Counter(re.findall(rf"call {name} (\w+)", text))
