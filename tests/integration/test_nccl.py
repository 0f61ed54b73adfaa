"""Groups of NCCL, where there is a GPU: one rank on each, two at most, or two on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from .harness import START_TIMEOUT, Script, Unirun

pytestmark = pytest.mark.gpu

SUM = """
    import os, signal
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    tensor = torch.full((1 << 20,), rank + 1.0, device=device)
    dist.all_reduce(tensor)
    print("sum", tensor.unique().tolist(), flush=True)
    if os.environ["UNIRUN_GENERATION"] == "0" and "ENDS" in os.environ:
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            dist.all_reduce(tensor)
            tensor.sum().item()
    print("generation", os.environ["UNIRUN_GENERATION"], flush=True)
    dist.destroy_process_group()
"""


@pytest.fixture
def ranks() -> int:
    return max(1, min(2, torch.cuda.device_count()))


def test_all_ranks_of_a_role_add_up(unirun: Unirun, script: Script, ranks: int) -> None:
    result = unirun("--nproc-per-node", ranks, script(SUM), within=3 * START_TIMEOUT)
    assert result.code == 0, result.err
    total = [float(sum(range(1, ranks + 1)))]
    assert result.lines == sorted([*["generation 0"] * ranks, *[f"sum {total}"] * ranks])


def test_a_role_is_formed_again_when_a_rank_is_killed_between_collectives(
    unirun: Unirun, script: Script, ranks: int
) -> None:
    options = ("--nproc-per-node", ranks, "--max-restarts", 1, "--env", "ENDS=1")
    result = unirun(*options, script(SUM), within=3 * START_TIMEOUT)
    assert result.code == 0, result.err
    assert [line for line in result.lines if "generation" in line] == ["generation 1"] * ranks


SURVIVING = """
    import os
    # NCCL refuses two ranks of one host on one device, so each says that it is a host of its own.
    os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    import pathlib, signal, sys, torch, torch.distributed as dist, unirun

    how = sys.argv[1]
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)

    from torch.nn.parallel import DistributedDataParallel

    def dies(step, rank):
        mark = pathlib.Path(f"died-{step}")
        if rank == 1 and step in (3, 7) and not mark.exists() and how != "unbroken":
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    @unirun.resilient
    def train(state):
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        print("begin", rank, os.getpid(), flush=True)
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(64, 64, device=device), device_ids=[0])
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        saved = state.load(model=model, optimizer=optimizer)
        for step in range(saved.get("step", 0), 10):
            torch.manual_seed(1000 * step + rank)
            loss = model(torch.randn(4, 64, device=device)).square().mean()
            dies(step, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state.save(model=model, optimizer=optimizer, step=step + 1)
        total = sum(each.double().sum() for each in model.parameters())
        print("end", rank, total.item().hex(), os.getpid(), flush=True)
        dist.destroy_process_group()

    train()
"""


def job_of(train: Path) -> Path:
    """A job file for two ranks on one device."""
    path = train.with_name("job.yaml")
    path.write_text(f"script: {train}\nroles: {{default: {{count: 2, slots: 0.5}}}}\n")
    return path


def test_a_survivor_leaves_a_collective_of_nccl_and_keeps_its_process(unirun: Unirun, script: Script) -> None:
    ends, begun = [], []
    for how in ("unbroken", "killed"):
        train = script(SURVIVING, f"{how}/train.py")
        options = ("--config", job_of(train), "--max-restarts", 5, "--", how)
        result = unirun(*options, cwd=train.parent, within=3 * START_TIMEOUT)
        assert result.code == 0, result.err
        ends.append(dict(re.findall(r"end (\d) (\S+)", result.out)))
        begun = [len({*re.findall(rf"begin {rank} (\d+)", result.out)}) for rank in range(2)]
    assert ends[0] == ends[1]
    assert begun == [1, 3]
