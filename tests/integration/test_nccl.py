"""Groups of NCCL, where there is a GPU: one rank on each, two at most."""

from __future__ import annotations

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
