"""Weights from one role to others, in jobs."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.integration.harness import START_TIMEOUT, Script, Unirun
from tests.waiting import eventually

CUT = """
    import os, torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    import unirun

    ctx = unirun.init()
    channel = unirun.WeightsChannel("policy", publisher="actor", receivers=["rollout", "reference"])

    def model(version):
        generator = torch.Generator().manual_seed(version)
        made = torch.nn.Sequential(torch.nn.Linear(7, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 3)).bfloat16()
        for value in made.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator))
        return made

    if ctx.role == "actor":
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        for version in range(3):
            channel.publish(fully_shard(model(version), mesh=mesh), version)
    else:
        mine = {name: torch.zeros_like(value) for name, value in model(0).state_dict().items()}
        if ctx.role == "rollout":
            dist.init_process_group("gloo")
            mesh = init_device_mesh("cpu", (2,))
            mine["0.weight"] = distribute_tensor(mine["0.weight"], mesh, [Shard(1)])
            mine["2.weight"] = distribute_tensor(mine["2.weight"], mesh, [Shard(0)])
        version = channel.receive(into=mine, min_version=2)
        expected = model(version).state_dict()
        whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in mine.items()}
        print("version", version, "exact", all(torch.equal(whole[n], expected[n]) for n in expected), flush=True)
    # An actor that has ended publishes nothing any more.
    dist.barrier(group=ctx.group("actor", "rollout", "reference", backend="gloo"))
"""

META = """
    import torch
    import unirun

    class Rotary(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("frequencies", torch.ones(2), persistent=False)

    ctx = unirun.init()
    channel = unirun.WeightsChannel("policy", publisher="actor", receivers=["rollout"])
    if ctx.role == "actor":
        channel.publish(Rotary(), 1)
    else:
        with torch.device("meta"):
            model = Rotary()
        try:
            channel.receive(into=model)
        except unirun.WeightsError as error:
            print("refused:", [fault.where for fault in error.faults], flush=True)
        model.to_empty(device="cpu")
        for _ in range(2):
            channel.receive(into=model)
        print("received:", model.weight.tolist(), flush=True)
    torch.distributed.barrier(group=ctx.group("actor", "rollout"))
"""

HELD = """
    import os, signal, time, torch
    import unirun

    ctx = unirun.init()
    channel = unirun.WeightsChannel("policy", publisher="actor", receivers=["rollout", "reference"])
    model = torch.nn.Linear(4, 4)

    def seen(name):
        while not os.path.exists(name):
            time.sleep(0.01)

    def told(name):
        open(name, "w").close()

    if ctx.role == "actor":
        if ctx.incarnation == 0:
            torch.nn.init.constant_(model.weight, 7.0)
            channel.publish(model, 7)
            seen("received by rollout")
            seen("received by reference")
            os.kill(os.getpid(), signal.SIGKILL)
        # It has nothing to publish before it has learnt something.
        seen("again")
    else:
        version = channel.receive(into=model)
        told(f"received by {ctx.role}")
        if ctx.role == "reference":
            seen("again")
        elif ctx.incarnation == 0:
            ctx.peers.wait_for(lambda: ctx.peers.find("actor", 0).address.incarnation > 0, 60.0)
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            print("version", version, "sum", int(model.weight.sum()), flush=True)
            told("again")
"""

ON_A_GPU = """
    import torch
    import torch.distributed as dist
    import unirun

    ctx = unirun.init()
    channel = unirun.WeightsChannel("policy", publisher="actor", receivers=["rollout"])
    both = ctx.group("actor", "rollout", backend="gloo")
    torch.cuda.set_device(0)
    heavy = torch.randn(4096, 4096, device="cuda")
    weights = {"w": torch.zeros(50_000_000, device="cuda"), "b": torch.zeros(3, 5, dtype=torch.bfloat16, device="cuda")}

    def busy():
        # What follows in this stream begins a while later.
        for _ in range(20):
            heavy.copy_(heavy @ heavy)

    def values(tensors):
        return sorted({value for tensor in tensors.values() for value in tensor.float().unique().tolist()})

    for version in range(1, 6):
        dist.barrier(group=both)
        if ctx.role == "actor":
            busy()
            for tensor in weights.values():
                tensor.fill_(version)
            channel.publish(weights, version)
            for tensor in weights.values():
                tensor.fill_(-1)
        else:
            busy()
            before = {name: tensor.clone() for name, tensor in weights.items()}
            channel.receive(weights, min_version=version)
            print("version", version, "before", values(before), "after", values(weights), flush=True)
    dist.barrier(group=both)
    used = torch.cuda.mem_get_info()[0]
    if ctx.role == "rollout":
        channel.close()
    dist.barrier(group=both)
    if ctx.role == "actor":
        channel.close()
        print("freed", torch.cuda.mem_get_info()[0] - used >= 2 * 200_000_000, flush=True)
    dist.barrier(group=both)
"""

SYNCED = """
    import os, time, torch
    from unirun import BaseTrainer, BaseWorkload, WeightsChannel, trainer_invocation

    class Held(BaseWorkload):
        def setup(self):
            self.model = torch.nn.Linear(4, 4)
            WeightsChannel("policy").attach(self.model)

    class Actor(Held):
        def update(self, value):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(value)

    class Rollout(Held):
        @trainer_invocation(idempotent=True)
        def values(self):
            return sorted({value for p in self.model.parameters() for value in p.unique().tolist()})

        def pid(self):
            return os.getpid()

    class Trainer(BaseTrainer):
        def init(self):
            pass

        def sync(self, value):
            self.RG_ACTOR.update(value)
            version = self.sync_weights("policy", timeout=60)
            print("version", version, "values", self.RG_ROLLOUT.values(), flush=True)

        def fit(self):
            self.sync(1.5)
            self.sync(2.5)
            print("pid", self.RG_ROLLOUT.pid()[1], flush=True)
            while not os.path.exists("go"):
                time.sleep(0.02)
            self.sync(3.5)
"""

KILLED = """
    import os, time, torch
    from unirun import BaseTrainer, BaseWorkload, PeerLost, WeightsChannel, trainer_invocation

    SIZE = 200_000

    class Held(BaseWorkload):
        def setup(self):
            self.channel = WeightsChannel("policy", publisher="actor", receivers=["rollout"])
            self.tensors = {name: torch.zeros(SIZE) for name in ("first", "last")}
            self.tell("pid")

        def tell(self, what):
            path = f"{what}.{self.name.replace(':', '.')}"
            with open(path + ".part", "w") as file:
                file.write(str(os.getpid()))
            os.rename(path + ".part", path)

    class Actor(Held):
        def on_generation(self, generation):
            kept = self.master_handle.load_state()
            if kept is not None:
                self.publish(int(kept))

        @trainer_invocation(idempotent=True)
        def publish(self, version):
            if self.channel.version == version:
                return
            for tensor in self.tensors.values():
                tensor.fill_(version)
            self.master_handle.save_state(str(version).encode())
            self.channel.publish(self.tensors, version)

    class Rollout(Held):
        @trainer_invocation(idempotent=True)
        def check(self, version):
            while True:
                try:
                    got = self.channel.receive(into=self.tensors, min_version=version)
                    break
                except PeerLost:
                    continue
            found = {value for tensor in self.tensors.values() for value in tensor.unique().tolist()}
            return got == version and found == {float(version)}

    class Trainer(BaseTrainer):
        def init(self):
            pass

        def fit(self):
            version = wrong = 0
            while not os.path.exists("enough"):
                version += 1
                self.RG_ACTOR.publish(version)
                wrong += self.RG_ROLLOUT.check(version) != [True, True]
                with open("steps", "a") as file:
                    file.write(".")
            print("wrong", wrong, flush=True)
"""

TO_KILL = """
roles:
  actor: {count: 1, workload: "killed:Actor", max_restarts: 20}
  rollout: {count: 2, workload: "killed:Rollout", max_restarts: 20}
trainer: {class: "killed:Trainer"}
"""

JOB = """
roles:
  actor: {count: 1, workload: "held:Actor"}
  rollout: {count: 2, workload: "held:Rollout", max_restarts: 1}
trainer: {class: "held:Trainer"}
channels:
  policy: {publisher: actor, receivers: [rollout]}
"""


def test_a_module_of_the_meta_device_is_refused_and_its_other_buffers_are_named_once(
    unirun: Unirun, script: Script
) -> None:
    done = unirun("--roles", "actor=1,rollout=1", script(META, "meta.py"))
    assert "refused: ['weight', 'frequencies']" in done.out
    assert "received: [1.0, 1.0, 1.0]" in done.out
    assert (done.out + done.err).count(
        "do not have these buffers, as no state dict has them: frequencies"
    ) == 1


def test_fsdp_parameters_become_tensor_parallel_and_whole_ones_bit_for_bit(
    unirun: Unirun, script: Script
) -> None:
    result = unirun("--roles", "actor=2,rollout=2,reference=1", script(CUT), within=2 * START_TIMEOUT)
    assert result.code == 0, result.err
    assert re.findall(r"\[(\S+)\] version (\d) exact (\w+)", "\n".join(sorted(result.out.splitlines()))) == [
        ("reference:0", "2", "True"),
        ("rollout:0", "2", "True"),
        ("rollout:1", "2", "True"),
    ]


@pytest.mark.gpu
def test_on_a_gpu_versions_are_whole_in_the_order_of_streams_and_their_memory_is_freed(
    unirun: Unirun, script: Script
) -> None:
    result = unirun("--roles", "actor=1,rollout=1", script(ON_A_GPU), within=2 * START_TIMEOUT)
    assert result.code == 0, result.err
    assert re.findall(r"version (\d) before (\S+) after (\S+)", result.out) == [
        (str(n), f"[{n - 1:.1f}]", f"[{n:.1f}]") for n in range(1, 6)
    ]
    assert "freed True" in result.out
    assert "device memory" in unirun("weights", "--plan").out


def test_a_trainer_syncs_weights_also_with_a_rollout_that_was_started_again(
    unirun: Unirun, script: Script
) -> None:
    script(SYNCED, "held.py")
    job = unirun.start("--config", script(JOB, "job.yaml"))
    (pid,) = job.lines(r"pid (\d+)")
    os.kill(int(pid), signal.SIGKILL)
    eventually(lambda: unirun.events("restart"), "the rollout is started again")
    script("", "go")
    result = job.end()
    assert result.code == 0, result.err
    assert re.findall(r"version (\d) values (.*)", result.out) == [
        ("0", "[[1.5], [1.5]]"),
        ("1", "[[2.5], [2.5]]"),
        ("2", "[[3.5], [3.5]]"),
    ]


def test_a_rollout_that_was_started_again_gets_the_last_version_from_another_one(
    unirun: Unirun, script: Script
) -> None:
    roles = "actor=1,rollout=1,reference=1"
    result = unirun("--roles", roles, "--max-restarts", "1", script(HELD), within=2 * START_TIMEOUT)
    assert result.code == 0, result.err
    assert re.findall(r"\[(\S+)\] version (\d) sum (\d+)", result.out) == [("rollout:0", "7", "112")]


def test_publisher_and_receivers_that_are_killed_at_any_time_never_have_half_a_version(
    unirun: Unirun, script: Script
) -> None:
    """
    1. A trainer publishes and has everything checked, again and again.
    2. Nine times, one or two of three workers are killed at a time that is drawn.
    3. After every other time, versions that are published after it are received; the next kill may come before that.
    4. All that was received was whole, and no memory has a name that could be left behind.
    """
    script(KILLED, "killed.py")
    made = Path(script("", "steps"))
    draw = random.Random(17)
    before = set(os.listdir("/dev/shm"))
    job = unirun.start("--config", script(TO_KILL, "job.yaml"))
    names = ("actor.0", "rollout.0", "rollout.1")
    pids = dict.fromkeys(names, 0)
    for number in range(9):
        for name in names:
            pids[name] = _next_pid(unirun.root / f"pid.{name}", pids[name])
        time.sleep(draw.uniform(0.0, 0.3))
        for name in draw.sample(names, draw.choice((1, 1, 2))):
            os.kill(pids[name], signal.SIGKILL)
            (unirun.root / f"pid.{name}").unlink()
            pids[name] = -pids[name]
        if number % 2 == 0:
            _see_steps(made)
    script("", "enough")
    end = job.end(within=2 * START_TIMEOUT)
    assert end.code == 0, end.err
    assert re.findall("wrong .*", end.out) == ["wrong 0"]
    assert set(os.listdir("/dev/shm")) <= before


def _see_steps(made: Path) -> None:
    """Wait for the step that was interrupted, and for one that begins after it."""
    enough = made.stat().st_size + 2
    eventually(lambda: made.stat().st_size >= enough, "two steps are made", within=START_TIMEOUT)


def _next_pid(path: Path, known: int) -> int:
    """The pid of the worker that lives now; a new one when the one before was killed."""
    if known > 0:
        return known
    eventually(path.exists, f"{path.name} is written", within=START_TIMEOUT)
    return int(path.read_text())


def test_a_channel_of_unknown_roles_is_told_before_anything_starts(unirun: Unirun, script: Script) -> None:
    script(SYNCED, "held.py")
    result = unirun("--config", script(JOB.replace("[rollout]", "[rolout, actor]"), "job.yaml"))
    assert result.code == 2
    assert "channels.policy.receivers: no role is called 'rolout'; did you mean 'rollout'?" in result.err
    assert "channels.policy.receivers: a role is named twice" in result.err
