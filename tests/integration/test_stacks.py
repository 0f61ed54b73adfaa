"""``unirun stacks``: the stacks of the ranks of a running job, in which one hangs and the others wait."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.waiting import eventually

from .harness import Script, Unirun, state_of

TRAINING = """
    import ctypes, sys, time
    import torch, torch.distributed as dist

    how = sys.argv[1]
    dist.init_process_group("gloo")
    rank, numbers = dist.get_rank(), torch.ones(4, 2)
    for step in range(6):
        if rank == 1 and step == 3:
            print("begins to", how, flush=True)
            if how == "spin":
                while True:
                    pass
            if how == "gil":
                # A lock that is taken twice, in C: not even a signal ends the wait.
                libc, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
                libc.pthread_mutex_lock(lock)
                libc.pthread_mutex_lock(lock)
            if how in ("skip", "stop"):
                time.sleep(600)
            if how == "other":
                dist.broadcast(numbers, 0)
        dist.all_reduce(numbers)
"""


@pytest.mark.parametrize("how", ["gil", "other", "stop"])
def test_the_rank_for_which_the_others_wait_is_first_and_missing_in_their_collective(
    unirun: Unirun, script: Script, how: str
) -> None:
    """
    1. Three ranks train. Rank 1 holds the GIL, is in another collective, or is stopped.
    2. Its stack is before that of the others, which is shown once.
    3. The collective of the others is shown with its shape, and with the rank that is not there.
    """
    job = unirun.start("--nproc-per-node", "3", "--hang-timeout", "600", script(TRAINING), how)
    job.lines(rf"begins to ({how})")
    if how == "stop":
        pid = unirun.workers()["default:1"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: state_of(pid) == "T", "rank 1 is stopped")

    name = unirun.job_dir().name
    meeting = "all_reduce 4 of default_pg: default:0,2; not there: default:1; [4, 2] Float in default:0,2"

    def met() -> list[str] | None:
        found = unirun("stacks", name)
        assert found.code == 0, found.err
        rows = [line.strip() for line in found.out.splitlines()]
        return rows if meeting in rows else None

    rows = eventually(met, "the others are in the collective")
    assert rows[0] == "role default: 3 ranks, 2 different stacks"
    assert rows[1].split()[0] == "default:1"
    assert "default:0,2" in rows
    if how == "stop":
        assert "is stopped" in rows[1]
    else:
        assert any("train.py:" in row for row in rows[2 : rows.index("default:0,2")])

    one = [json.loads(row) for row in unirun("stacks", name, "default:0", "--json").out.splitlines()]
    assert [each["worker"] for each in one] == ["default:0"]
    assert unirun("stop", name, "--now").code == 0
    job.end()
    assert "has ended" in unirun("stacks", name).err
