"""``unirun stacks``: the stacks of the ranks of a running job, in which one hangs and the others wait."""

from __future__ import annotations

import json
import os
import signal

from tests.waiting import eventually

from .harness import Script, Unirun, state_of

TRAINING = """
    import ctypes, os, time
    import torch, torch.distributed as dist

    how = os.environ["ROLE_NAME"]
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


HANGS = ("gil", "other", "skip", "spin", "stop")
"""The roles of the job, each with another hang of its rank 1."""


def test_the_rank_for_which_the_others_wait_is_first_and_missing_in_their_collective(
    unirun: Unirun, script: Script
) -> None:
    """
    1. Five roles of three ranks train. Rank 1 of each holds the GIL, is in another collective, skips one, spins, or is
       stopped.
    2. Its stack is before that of the others, which is shown once.
    3. The collective of the others is shown with its shape, and with the rank that is not there.
    """
    roles = ",".join(f"{how}=3" for how in HANGS)
    job = unirun.start("--roles", roles, "--hang-timeout", "600", script(TRAINING))
    for how in HANGS:
        job.lines(rf"begins to ({how})")
    pid = unirun.workers()["stop:1"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: state_of(pid) == "T", "a rank is stopped")

    name = unirun.job_dir().name

    def met() -> dict[str, list[str]] | None:
        found = unirun("stacks", name)
        assert found.code == 0, found.err
        rows = of_roles(found.out)
        return rows if all(meeting(how) in rows[how] for how in HANGS) else None

    for how, rows in eventually(met, "the others are in the collective").items():
        assert rows[0] == f"role {how}: 3 ranks, 2 different stacks"
        assert rows[1].split()[0] == f"{how}:1"
        others = rows.index(f"{how}:0,2")
        assert others > 1
        if how == "stop":
            assert "is stopped" in rows[1]
        else:
            assert any("train.py:" in row for row in rows[2:others])

    one = [json.loads(row) for row in unirun("stacks", name, "gil:0", "--json").out.splitlines()]
    assert [each["worker"] for each in one] == ["gil:0"]
    assert unirun("stop", name, "--now").code == 0
    job.end()
    assert "has ended" in unirun("stacks", name).err


def meeting(how: str) -> str:
    """The line about the collective in which the ranks of a role wait."""
    return f"all_reduce 4 of default_pg: {how}:0,2; not there: {how}:1; [4, 2] Float in {how}:0,2"


def of_roles(text: str) -> dict[str, list[str]]:
    """The lines about each role."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("role "):
            found[line.split()[1].rstrip(":")] = rows = []
        rows.append(line.strip())
    return found
