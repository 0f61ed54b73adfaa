"""Scripts whose training function survives the loss of other ranks."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.documents import ROOT
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.train.setup import PRELOAD

from .harness import START_TIMEOUT, Running, Script, Unirun

EXAMPLES = ROOT / "examples"

KILLED = """
    import os, pathlib, signal, sys, torch, torch.distributed as dist, unirun
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    KILLS = [line.split() for line in sys.argv[1].split(",") if line]

    def dies(step, where):
        # Once: the next incarnation finds the mark.
        mark = pathlib.Path(f"{step}-{dist.get_rank()}-{where}")
        if [str(step), str(dist.get_rank()), where] in KILLS and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    @unirun.resilient
    def train(state):
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        print("begin", rank, os.getpid(), flush=True)
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        # Otherwise it makes other buckets after its first step, in which sums have another order.
        model = DistributedDataParallel(network, find_unused_parameters=True)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        saved = state.load(model=model, optimizer=optimizer)
        for step in range(saved.get("step", 0), 40):
            torch.manual_seed(1000 * step + rank)
            dies(step, "before")
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            dies(step, "reduced")
            optimizer.step()
            optimizer.zero_grad()
            dies(step, "stepped")
            state.save(model=model, optimizer=optimizer, step=step + 1)
        dies(40, "after")
        total = sum(each.double().sum() for each in model.parameters())
        print("end", rank, total.item().hex(), os.getpid(), flush=True)
        dist.destroy_process_group()

    train()
"""

TEN = (
    "3 1 before,6 2 reduced,9 0 stepped,12 1 reduced,12 2 before,18 1 stepped,22 0 before,"
    "27 0 reduced,33 2 stepped,40 1 after"
)
"""Ten kills: each at a step, of a rank, at a place. Rank 3 is never killed."""


SHARDED = """
    import os, pathlib, signal, sys, torch, torch.distributed as dist, unirun
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    KILLS = [line.split() for line in sys.argv[1].split(",") if line]
    SAVED = pathlib.Path("saved")

    def dies(step):
        mark = pathlib.Path(f"{step}-{dist.get_rank()}")
        if [str(step), str(dist.get_rank())] in KILLS and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    @unirun.resilient
    def train(state):
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        print("begin", rank, os.getpid(), flush=True)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        steps = sorted(SAVED.glob("*/.metadata"), key=lambda path: int(path.parent.name))
        step = 0
        if steps:
            step = int(steps[-1].parent.name)
            m, o = get_state_dict(model, optimizer)
            dcp.load({"m": m, "o": o}, checkpoint_id=str(steps[-1].parent))
            set_state_dict(model, optimizer, model_state_dict=m, optim_state_dict=o)
        while step < 12:
            torch.manual_seed(1000 * step + rank)
            loss = model(torch.randn(4, 8)).square().mean()
            dies(step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 2 == 0:
                m, o = get_state_dict(model, optimizer)
                dcp.save({"m": m, "o": o}, checkpoint_id=str(SAVED / str(step)))
        total = sum(each.full_tensor().double().sum() for each in model.parameters())
        print("end", rank, total.item().hex(), os.getpid(), flush=True)
        dist.destroy_process_group()

    train()
"""


def ends(out: str) -> dict[int, tuple[str, int]]:
    """The sum of the parameters and the pid of each rank, as they were printed last."""
    found = re.findall(r"end (\d) (\S+) (\d+)", out)
    return {int(rank): (total, int(pid)) for rank, total, pid in found}


class TestResilient:
    @pytest.mark.chaos
    def test_a_run_with_ten_kills_ends_as_an_unbroken_run_to_the_bit(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(KILLED)
        expected = ends(unirun("--nproc-per-node", 4, train, "", cwd=train.parent).out)
        assert len({total for total, _ in expected.values()}) == 1
        job = unirun.start(*("--nproc-per-node", 4, "--max-restarts", 20), train, TEN, cwd=train.parent)
        result = job.end(START_TIMEOUT)
        assert result.code == 0, result.err
        found = ends(result.out)
        assert {rank: total for rank, (total, _) in found.items()} == {
            rank: total for rank, (total, _) in expected.items()
        }
        begun = [re.findall(rf"begin {rank} (\d+)", result.out) for rank in range(4)]
        # A rank whose main thread waits for a collective that gloo has forgotten cannot go on.
        forgotten = [
            len(re.findall(rf"default:{rank}: is killed: .* gloo has forgotten", result.err))
            for rank in range(4)
        ]
        assert [len({*pids}) for pids in begun] == [
            n + m for n, m in zip([4, 5, 4, 1], forgotten, strict=True)
        ]
        assert len(list(train.parent.glob("*-*-*"))) == 10

    @pytest.mark.chaos
    def test_fsdp2_goes_on_from_checkpoints_in_files(self, unirun: Unirun, script: Script) -> None:
        found = []
        for name, kills in (("plain", ""), ("killed", "3 1,7 0,9 1")):
            train = script(SHARDED, f"{name}/train.py")
            result = unirun("--nproc-per-node", 3, "--max-restarts", 5, train, kills, cwd=train.parent)
            assert result.code == 0, result.err
            found.append(ends(result.out))
            assert len(list(train.parent.glob("*-*"))) == len(kills.split(",")) * bool(kills)
        assert {rank: total for rank, (total, _) in found[0].items()} == {
            rank: total for rank, (total, _) in found[1].items()
        }
        assert len({*re.findall(r"begin 2 (\d+)", result.out)}) == 1

    @pytest.mark.long
    @pytest.mark.usefixtures("warm_functions")
    def test_the_example_ends_with_the_loss_of_the_plain_script_though_a_rank_is_killed(
        self, unirun: Unirun
    ) -> None:
        two = ("--preload", ",".join(PRELOAD), "--nproc-per-node", 2)
        plain = unirun(*two, EXAMPLES / "ddp_digits" / "train.py")
        job = unirun.start(*two, "--max-restarts", 1, EXAMPLES / "resilient_ddp" / "train.py")
        job.lines("epoch 2 ")
        os.kill(unirun.workers()["default:1"]["pid"], signal.SIGKILL)
        result = job.end(START_TIMEOUT)
        assert result.code == 0, result.err
        assert [line for line in result.lines if line.startswith("final")] == plain.lines
        assert "default's other rank keeps its memory" in result.err

    @pytest.mark.parametrize("group", ["in", "before"])
    def test_survivors_leave_collectives_python_and_system_calls(
        self, unirun: Unirun, script: Script, group: str
    ) -> None:
        """Rank 0 spins in Python, rank 1 sleeps, rank 2 is in a collective, rank 3 is killed."""
        train = script(
            """
            import os, sys, time, torch, torch.distributed as dist, unirun

            @unirun.resilient
            def train(state):
                if sys.argv[1] == "in":
                    dist.init_process_group("gloo")
                rank, total = dist.get_rank(), torch.ones(1)
                dist.all_reduce(total)
                print("up", state.generation, rank, os.getpid(), int(total), flush=True)
                if state.generation == 1:
                    return
                if rank == 0:
                    while True:
                        pass
                if rank == 1:
                    time.sleep(600)
                if rank == 2:
                    dist.all_reduce(total)
                time.sleep(600)

            if sys.argv[1] == "before":
                dist.init_process_group("gloo")
            train()
            """
        )
        job = unirun.start("--nproc-per-node", 4, "--max-restarts", 1, train, group)
        job.lines(r"up 0 \d \d+ 4", 4)
        os.kill(unirun.workers()["default:3"]["pid"], signal.SIGKILL)
        result = job.end(START_TIMEOUT)
        assert result.code == 0, result.err
        pids = {n: dict(re.findall(rf"up {n} (\d) (\d+) 4", result.out)) for n in (0, 1)}
        assert len(pids[1]) == 4
        assert {rank for rank in "0123" if pids[0][rank] == pids[1][rank]} == {"0", "1", "2"}

    def test_a_store_that_ends_costs_no_restart(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start("--nproc-per-node", 2, script(MEETING))
        job.lines("up 0", 2)
        os.kill(unirun.pid_of("store:default"), signal.SIGKILL)
        result = job.end(START_TIMEOUT)
        assert result.code == 0, result.err
        assert pids_in(result.out, 0) == pids_in(result.out, 1)


MEETING = """
    import os, torch, torch.distributed as dist, unirun

    @unirun.resilient
    def train(state):
        dist.init_process_group("gloo")
        dist.barrier()
        print("up", state.generation, os.getpid(), flush=True)
        if not state.generation:
            dist.recv(torch.zeros(1), src=1 - dist.get_rank())
        dist.destroy_process_group()

    train()
"""


def pids_in(out: str, generation: int) -> set[str]:
    """The pids that a generation of `MEETING` has printed."""
    return set(re.findall(rf"up {generation} (\d+)", out))


class TestOutsideOfTheFunction:
    def test_a_death_before_it_or_after_it_starts_all_ranks_again(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import os, sys, time, unirun

            def wait(where):
                print(where, os.environ["RANK"], os.environ["UNIRUN_GENERATION"], flush=True)
                if os.environ["UNIRUN_GENERATION"] == sys.argv[1 if where == "before" else 2]:
                    time.sleep(600)

            @unirun.resilient
            def train(state):
                pass

            wait("before")
            train()
            wait("after")
            """
        )
        job = unirun.start("--nproc-per-node", 2, "--max-restarts", 2, train, 0, 1)
        job.lines(r"before \d 0", 2)
        self._killed(job, unirun, 0)
        job.lines(r"after \d 1", 2)
        self._killed(job, unirun, 1)
        result = job.end(WAIT_TIMEOUT)
        assert result.code == 0, result.err
        assert len(re.findall(r"after \d 2", result.out)) == 2
        assert unirun.events("decision") == [
            f"default:{rank} was killed by SIGKILL; restart {rank + 1} of 2 of role default"
            for rank in (0, 1)
        ]

    def _killed(self, job: Running, unirun: Unirun, rank: int) -> None:
        def pid() -> int | None:
            found = unirun.workers()[f"default:{rank}"]
            return int(found["pid"]) if found["incarnation"] == rank else None

        os.kill(eventually(pid, "the worker is known"), signal.SIGKILL)

    def test_it_is_called_once(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import unirun

            @unirun.resilient
            def train(state):
                return "done"

            print(train(), flush=True)
            train()
            """
        )
        result = unirun("--nproc-per-node", 1, train)
        assert result.code == 1
        assert result.lines == ["done"]
        assert "a resilient function was called before in this process" in result.err


class TestAWorkload:
    def test_a_rank_that_comes_has_the_state_of_another_one_before_on_generation(
        self, unirun: Unirun, script: Script
    ) -> None:
        """Two of three ranks are killed, one after the other; the state has come through both."""
        folder = script(
            """
            import os, signal, torch, torch.distributed as dist, unirun

            class Worker(unirun.BaseWorkload):
                def setup(self):
                    dist.init_process_group("gloo")
                    self.state = {"weights": torch.zeros(3), "steps": 0}

                def get_state(self):
                    return self.state

                def set_state(self, state):
                    self.state = state

                def on_generation(self, generation):
                    print("has", generation, self.rank, self.state["steps"], flush=True)

                def learn(self):
                    self.state["weights"] += 1
                    self.state["steps"] += 1
                    return [*self.state["weights"].tolist(), self.state["steps"]]

                def die(self):
                    os.kill(os.getpid(), signal.SIGKILL)

            class Trainer(unirun.BaseTrainer):
                def init(self):
                    pass

                def fit(self):
                    for rank in (0, 2):
                        self.RG_W.learn()
                        try:
                            self.RG_W[rank].die()
                        except unirun.WorkerLost:
                            pass
                    print("learnt", self.RG_W.learn.options(idempotent=True).call(), flush=True)
            """,
            "stateful.py",
        ).parent
        result = unirun("--roles", "w=3@stateful:Worker", "--trainer", "stateful:Trainer", "--cwd", folder)
        assert result.code == 0, result.err
        assert f"learnt {[[3.0, 3.0, 3.0, 3]] * 3}" in result.out
        assert sorted(re.findall(r"has (\d \d \d)", result.out)) == [
            f"{generation} {rank} {generation}" for generation in range(3) for rank in range(3)
        ]
