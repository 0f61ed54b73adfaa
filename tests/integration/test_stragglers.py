"""A slow rank, for which the others wait in each step: it is told, and replaced where its role wants that."""

from __future__ import annotations

from .harness import Script, Unirun

STEPS = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    numbers, ends = torch.ones(1), time.monotonic() + 120
    print("line", os.environ["RANK"], flush=True)
    while time.monotonic() < ends and os.environ["UNIRUN_INCARNATION"] == "0":
        began = time.thread_time()
        while time.thread_time() < began + 0.005:
            pass
        dist.all_reduce(numbers)
    dist.barrier()
    dist.destroy_process_group()
"""

OPTIONS = (
    *("--inventory", "fake:nodes=4,devices=1", "--roles", "actor=3", "--rdzv-id", "slow"),
    *("--hang-timeout", 4, "--first-step-timeout", 60, "--stragglers", "replace"),
)


def test_a_slow_rank_is_told_with_its_node_and_moves_to_the_idle_one(unirun: Unirun, script: Script) -> None:
    """
    1. Three ranks do steps of 5 ms on three of four nodes.
    2. Rank 1 has a fourth of its time from now on.
    3. The console and the events name it; all ranks start again, and rank 1 is on the idle node. That costs no restart.
    """
    job = unirun.start(*OPTIONS, script(STEPS))
    job.lines(r"line \d", 3)
    node = unirun.workers()["actor:1"]["node"]
    assert unirun("inject", "slow", "actor:1", "--fault", "slow=4x").code == 0
    job.lines(r"line \d", 6, within=90)
    result = job.end()
    assert result.code == 0, result.err
    (told,) = unirun.events("straggler")
    assert told.startswith(
        f"actor:1 on {node}, slot 0 is a straggler: the other ranks wait for it in collectives "
    )
    assert f"unirun: actor:1: {told}\n" in result.err
    (moved,) = unirun.events("move")
    assert moved.startswith(f"actor:1 from {node} to ")
    assert "make room" not in result.err
    assert unirun.status()["failures"] == []
    assert [role["restarts"] for role in unirun.status()["roles"]] == [0]
