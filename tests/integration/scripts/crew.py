"""Workloads and trainers for the tests of calls, which read the trainers' output."""

import contextlib
import json
import os
import signal
import sys
import time

import psutil
import torch
import torch.distributed as dist

import unirun
from unirun import BaseTrainer, BaseWorkload, WorkerLost, trainer_invocation


def ports():
    """Number of TCP ports on which this process listens."""
    return sum(
        each.pid == os.getpid() and each.status == psutil.CONN_LISTEN
        for each in psutil.net_connections("tcp")
    )


def say(**row):
    sys.stdout.write(json.dumps(row) + "\n")


class Actor(BaseWorkload):
    """Has a process group, and a counter that must survive the deaths of other workers."""

    def setup(self):
        dist.init_process_group("gloo")
        self.count, self.generations = 0, []

    def on_generation(self, generation):
        self.generations.append(generation)
        best = torch.tensor([self.count])
        dist.all_reduce(best, op=dist.ReduceOp.MAX)
        self.count = int(best)

    def teardown(self):
        print(f"torn down {self.name}", flush=True)

    @trainer_invocation(idempotent=True)
    def who(self):
        return {
            "name": self.name, "pid": os.getpid(), "count": self.count, "generations": self.generations,
            "rank": [self.rank, self.world_size, self.word_size, self.local_rank, self.local_world_size],
            "actor": self.is_actor_role(), "shared": self.get_device_collocation(),
            "port": self.torch_master_port == int(os.environ["MASTER_PORT"]),
            "env": os.environ.get("FLAVOUR", ""), "config": dict(self.config),
        }  # fmt: skip

    @trainer_invocation()
    def add(self, amount):
        total = torch.tensor([float(amount)])
        dist.all_reduce(total)
        self.count += 1
        return float(total)

    @trainer_invocation(idempotent=True, timeout=60)
    def add_or_die(self, amount, marker):
        if self.rank == 1 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.add(amount)

    @trainer_invocation(blocking=False)
    def slow(self, seconds):
        time.sleep(seconds)
        return self.name

    def fail(self):
        raise ValueError("größer", self.rank)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    @trainer_invocation(target="RANK0")
    def info(self):
        self.master_handle.report({"loss": 0.5})
        return self.master_handle.job_info()


class Rollout(BaseWorkload):
    def ports(self):
        return ports()

    @trainer_invocation(blocking=False)
    def generate(self, prompts):
        return [f"{self.rank}:{prompt}" for prompt in prompts]

    @trainer_invocation(blocking=False)
    def slow(self, seconds):
        time.sleep(seconds)
        return self.name


class Plain(BaseTrainer):
    """The main path."""

    def init(self):
        say(
            groups=self.get_role_groups(),
            resource=self.get_workload_resource("actor"),
            config=dict(self.config),
        )

    def fit(self):
        say(sums=self.RG_ACTOR.add(2), one=self.RG_ACTOR[1].who()["name"], part=len(self.RG_ACTOR[0:1].who()))
        say(who=self.RG_ACTOR.who(), handles={r: len(h) for r, h in self.actor_handles.items()})
        ref = self.RG_ROLLOUT.generate(unirun.shard(["a", "b", "c"]))
        say(texts=ref.result(), sharding={str(k): v for k, v in ref.sharding.items()})
        try:
            self.RG_ACTOR.fail()
        except ValueError as error:
            say(error=list(error.args), worker=error.__cause__.worker, trace=error.__cause__.traceback)
        try:
            self.RG_ACTOR.no_such_method()
        except AttributeError as error:
            say(unknown=str(error))
        say(info=self.RG_ACTOR.info())
        return {"done": True}


class Raw(BaseTrainer):
    """Uses torch.distributed.rpc beside calls."""

    def init(self):
        pass

    def fit(self):
        from torch.distributed import rpc

        def listening():
            there = self.RG_ROLLOUT.ports()
            return [ports(), *there]

        before = listening()
        say(said=self.RG_ROLLOUT.generate(["x"]).result())
        first = rpc.rpc_sync(unirun.rpc_name("rollout", 0), os.getpid)
        say(before=before, listening=listening())
        second = rpc.rpc_sync(unirun.rpc_name("rollout", 1), os.getpid)
        say(pids=[first, second, rpc.rpc_sync(unirun.rpc_name("rollout", 0), os.getpid)])
        say(remote=rpc.remote(unirun.rpc_name("rollout", 1), os.getpid).to_here())
        with contextlib.suppress(RuntimeError):
            rpc.rpc_sync(unirun.rpc_name("rollout", 1), os._exit, args=(3,))
        with contextlib.suppress(WorkerLost):
            self.RG_ROLLOUT.ports()
        say(after=rpc.rpc_sync(unirun.rpc_name("rollout", 1), os.getpid))


class Killer(BaseTrainer):
    """Lets an actor die, and continues with its successor."""

    def init(self):
        pass

    def fit(self):
        self.RG_ACTOR.add(1)
        before = self.RG_ACTOR.who()
        started = time.monotonic()
        try:
            self.RG_ACTOR[1].die()
        except WorkerLost as lost:
            say(lost=lost.worker, seconds=time.monotonic() - started)
        say(sums=self.RG_ACTOR.add(5), before=before, after=self.RG_ACTOR.who())


class Silent(BaseTrainer):
    """An actor dies while it is not called; the trainer must not mistake its successor for it."""

    def init(self):
        pass

    def fit(self):
        self.RG_ACTOR.add(1)
        first = self.RG_ACTOR[1].who()["pid"]
        os.kill(first, signal.SIGKILL)
        while self.RG_ACTOR[1].who()["pid"] == first:
            pass
        try:
            self.RG_ACTOR.add(1)
        except WorkerLost as lost:
            say(lost=lost.worker, counts=[w["count"] for w in self.RG_ACTOR.who()])
        say(sums=self.RG_ACTOR.add(1))


class InCollective(BaseTrainer):
    """An actor dies while the others wait for it in a collective; the call is idempotent."""

    def init(self):
        pass

    def fit(self):
        self.RG_ACTOR.add(1)
        say(sums=self.RG_ACTOR.add_or_die(3, self.config.marker), after=self.RG_ACTOR.who())


class Deaths(BaseTrainer):
    """One rollout dies repeatedly while calls of the other continue."""

    def init(self):
        pass

    def fit(self):
        rollouts = self.RG_ROLLOUT
        pids = {self.RG_ACTOR[0].who()["pid"]}
        long = rollouts[0].slow(float(self.config.seconds))
        for _ in range(int(self.config.deaths)):
            before = self.RG_ACTOR[0].who()["pid"]
            pids.add(before)
            with contextlib.suppress(WorkerLost):
                self.RG_ACTOR[0].die()
        say(deaths=len(pids), done=long.done())
        say(long=long.result(), last=self.RG_ACTOR.who()[0]["generations"])


class Phoenix(BaseTrainer):
    """Dies half-way and is restarted."""

    def is_recoverable(self):
        return True

    def init(self):
        pass

    def fit(self):
        state = self.load_state()
        if state is None:
            self.RG_ACTOR.add(1)
            self.save_state(json.dumps([w["pid"] for w in self.RG_ACTOR.who()]).encode())
            self.RG_ACTOR.slow(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        say(
            before=json.loads(state), after=[w["pid"] for w in self.RG_ACTOR.who()], sums=self.RG_ACTOR.add(4)
        )


class Mortal(Phoenix):
    """The same, but it may not be restarted."""

    def is_recoverable(self):
        return False


class Wrong(BaseTrainer):
    def init(self):
        raise RuntimeError("no tokenizer")

    def fit(self):
        pass


class NoSetup(Actor):
    def setup(self):
        raise OSError("no such model")


if __name__ == "__main__":
    # A script job: the rollouts serve an object, the others call it.
    class Model:
        def __init__(self, rank):
            self.rank = rank

        def generate(self, prompt):
            return f"{self.rank} says {prompt}"

        @trainer_invocation(target="RANK0", timeout=20)
        def first(self):
            return self.rank

    ctx = unirun.init()
    if ctx.role == "rollout":
        unirun.serve(Model(ctx.rank))
        say(role=ctx.role, rank=ctx.rank, served=True)
    else:
        group = ctx.role_group("rollout")
        say(role=ctx.role, rank=ctx.rank, texts=group.generate("hi"), first=group.first())
