"""A rank whose wait in native code cannot be ended is killed when its generation is over, and the others go on."""

from __future__ import annotations

import os
import re
import signal
import textwrap

import pytest

from tests.effort import variants
from tests.waiting import WAIT_TIMEOUT

from .harness import Script, Unirun

WORKLOADS = """
import os
import re
import torch, torch.distributed as dist, unirun
from torch.nn.parallel import DistributedDataParallel
from unirun.roles.gloo import GlooGroup

class Worker(unirun.BaseWorkload):
    def setup(self):
        dist.init_process_group("gloo")

    def reduce(self):
        # Rank 0 waits for rank 1, which lives, does nothing, and keeps its end of the group.
        self.group = dist.new_group([0, 1])
        GlooGroup.end = lambda self: None
        if self.rank < 2:
            self.kept = self.group._get_backend(torch.device("cpu"))
            model = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=self.group, init_sync=False)
            loss = model(torch.ones(1)).sum()
            print("formed", flush=True)
        if self.rank == 0:
            WAIT

    def pid(self):
        dist.barrier()
        return os.getpid()

class Trainer(unirun.BaseTrainer):
    def init(self):
        pass

    def fit(self):
        try:
            self.RG_W.reduce()
        except unirun.WorkerLost:
            print("pids", *self.RG_W.pid.options(idempotent=True, retries=10).call(), flush=True)
"""


SCRIPT = """
import signal
import torch, torch.distributed as dist, unirun
from unirun.roles.gloo import GlooGroup

ctx = unirun.init()
if ctx.incarnation == 0:
    group = ctx.group("v", "w")
    GlooGroup.end = lambda self: None
    print("formed", flush=True)
    if (ctx.role, ctx.rank) == ("v", 0):
        dist.broadcast(torch.zeros(1), src=1, group=group)
    signal.pause()
"""


@pytest.mark.parametrize(
    ("wait", "why"),
    [
        pytest.param(
            "dist.irecv(torch.zeros(1), 1, group=self.group).wait()",
            "it still waited in the process group of generation 0, which was over",
            id="a message",
        ),
        pytest.param(
            "loss.backward()",
            "it waited for a collective that gloo has forgotten",
            id="a backward pass",
        ),
    ],
)
def test_a_rank_that_waits_for_ever_is_killed_and_all_meet_again(
    unirun: Unirun, script: Script, wait: str, why: str
) -> None:
    folder = script(textwrap.dedent(WORKLOADS).replace("WAIT", wait), "waiting.py").parent
    job = unirun.start("--roles", "w=3@waiting:Worker", "--trainer", "waiting:Trainer", "--cwd", folder)
    job.lines(r"^\[w:[01]\] formed", 2)
    before = [unirun.pid_of(f"w:{rank}") for rank in range(3)]
    os.kill(before[2], signal.SIGKILL)
    (pids,) = job.lines(r"pids (.*)")
    after = [int(pid) for pid in pids.split()]
    assert job.end(WAIT_TIMEOUT).code == 0
    assert re.search(f"w:0.* is killed: {why}", job.text), job.text
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True, False]


def test_a_script_that_waits_for_ever_in_a_group_with_a_role_that_died_is_started_again(
    unirun: Unirun, script: Script
) -> None:
    job = unirun.start("--roles", "v=2,w=1", "--max-restarts", 3, script(SCRIPT))
    job.lines(r"^\[[vw]:[01]\] formed", 3)
    os.kill(unirun.pid_of("w:0"), signal.SIGKILL)
    job.lines(
        "v:0: is killed: it waited for a collective that gloo has forgotten, as a peer died in that moment"
    )
    assert job.end(WAIT_TIMEOUT).code == 0
    assert "restart 1 of 3 of role v" in job.text


SLEEPING = """
import os
import time
import torch, torch.distributed as dist, unirun
import unirun.roles.gloo

class Worker(unirun.BaseWorkload):
    def setup(self):
        unirun.roles.gloo.WORKER_IDLE_TIMEOUT = 1.0
        dist.init_process_group("gloo")

    def reduce(self):
        print("begun", flush=True)
        if self.rank == 0:
            time.sleep(600)
        if self.rank == 1:
            while not os.path.exists("enough"):
                sum(range(1000))
        if self.rank == 2:
            time.sleep(600)

    def pid(self):
        dist.barrier()
        return os.getpid()

class Trainer(unirun.BaseTrainer):
    def init(self):
        pass

    def fit(self):
        try:
            self.RG_W.reduce()
        except unirun.WorkerLost as error:
            print("lost", error.worker, flush=True)
        print("pids", *self.RG_W.pid.options(idempotent=True).call(), flush=True)
"""


@pytest.mark.parametrize("transport", variants("socket", "torch"))
def test_a_rank_that_sleeps_in_a_call_that_was_lost_is_killed_and_one_that_computes_is_not(
    unirun: Unirun, script: Script, transport: str
) -> None:
    folder = script(textwrap.dedent(SLEEPING), "sleeping.py").parent
    roles = ("--roles", "w=3@sleeping:Worker", "--trainer", "sleeping:Trainer", "--transport", transport)
    job = unirun.start(*roles, "--cwd", folder)
    job.lines(r"^\[w:\d\] begun", 3)
    before = [unirun.pid_of(f"w:{rank}") for rank in range(3)]
    os.kill(before[2], signal.SIGKILL)
    job.lines(r"w:0: is killed: generation 1 could not be formed without it")
    (folder / "enough").touch()
    (pids,) = job.lines(r"pids (.*)")
    after = [int(pid) for pid in pids.split()]
    assert job.end(WAIT_TIMEOUT).code == 0
    assert "lost w:2" in job.text
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True, False]
