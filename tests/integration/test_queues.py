"""Queues between the roles of a job."""

from __future__ import annotations

import os
import re
import signal

from tests.integration.harness import START_TIMEOUT, Script, Unirun
from tests.waiting import eventually

DYING = """
    import os, time, torch, unirun

    HELD = os.path.join(os.path.dirname(__file__), "held")
    ctx = unirun.init()
    queue = unirun.Queue("experience", producer="rollout", consumer="actor", maxsize=3)
    if ctx.role == "rollout":
        for number in range(12):
            queue.put({"of": (ctx.rank, number), "tokens": torch.full((30_000,), number)}, timeout=60)
        queue.join(timeout=60)
    else:
        if ctx.incarnation == 0 and ctx.rank == 1:
            held = queue.get_batch(2, timeout=60)
            open(HELD, "w").close()
            print("pid", os.getpid(), flush=True)
            time.sleep(600)
        while not os.path.exists(HELD):
            time.sleep(0.01)
        while True:
            try:
                item = queue.get(timeout=0.5)
            except unirun.QueueTimeout:
                continue
            except unirun.QueueEnded as error:
                print(error, flush=True)
                break
            assert (item.value["tokens"] == item.value["of"][1]).all()
            print("item", item.id, *item.value["of"], flush=True)
"""

AGED = """
    import os, time, torch, unirun

    ctx = unirun.init()
    queue = unirun.Queue(
        "experience", producer="rollout", consumer="actor", batch=4, max_head_offpolicyness=1
    )
    channel = unirun.WeightsChannel("policy", publisher="actor", receivers=["rollout"])
    weights = {"version": torch.zeros((), dtype=torch.int64)}
    if ctx.role == "rollout":
        held_back = 0
        while not os.path.exists("done"):
            try:
                queue.admit(timeout=0.5)
            except unirun.QueueTimeout:
                held_back += 1
                continue
            version = channel.receive(into=weights)
            queue.put(int(weights["version"]), version=version)
        print("held back", held_back, flush=True)
    else:
        for version in range(8):
            weights["version"].fill_(version)
            channel.publish(weights, version)
            queue.advance(version)
            print("batch", version, sorted(item.value for item in queue.get_batch(4, timeout=60)), flush=True)
        queue.done()
        time.sleep(1.2)
        open("done", "w").close()
    torch.distributed.barrier(group=ctx.group("actor", "rollout", backend="gloo"))
"""

HELD = """
    import contextlib, os, time, torch, unirun

    ctx = unirun.init()
    queue = unirun.Queue(
        "experience", producer="rollout", consumer="actor", batch=2, max_head_offpolicyness=0
    )
    if ctx.role == "actor":
        queue.advance(0)
        print("batch", sorted(item.value for item in queue.get_batch(2, timeout=90)), flush=True)
        queue.advance(1)
        print("batch", sorted(item.value for item in queue.get_batch(2, timeout=90)), flush=True)
        queue.done()
    elif ctx.incarnation == 0:
        # Both admissions of the first batch, and no item.
        if ctx.rank == 0:
            queue.admit(), queue.admit()
            try:
                queue.admit(timeout=0.1)
            except unirun.QueueTimeout as error:
                print(error, flush=True)
            print("pid", os.getpid(), flush=True)
        time.sleep(600)
    elif ctx.rank == 1:
        for version in range(2):
            for _ in range(3):
                with contextlib.suppress(ValueError), queue.admit():
                    raise ValueError
                queue.admit().reject()
            for number in range(2):
                with queue.admit():
                    queue.put(number, version=version)
        queue.join()
        with contextlib.suppress(unirun.QueueTimeout):
            queue.admit(timeout=0.2)
    torch.distributed.barrier(group=ctx.group("actor", "rollout", backend="gloo"))
"""


def test_every_item_is_used_though_a_consumer_is_killed_with_some(unirun: Unirun, script: Script) -> None:
    job = unirun.start("--roles", "rollout=2,actor=2", "--max-restarts", "1", script(DYING))
    (pid,) = job.lines(r"pid (\d+)")
    os.kill(int(pid), signal.SIGKILL)
    eventually(lambda: unirun.events("restart"), "the actor is started again")
    result = job.end(within=2 * START_TIMEOUT)
    assert result.code == 0, result.err
    items = re.findall(r"item (\S+) (\d) (\d+)", result.out)
    assert {(int(rank), int(number)) for _, rank, number in items} == {
        (rank, number) for rank in range(2) for number in range(12)
    }
    ids = {(identity, rank, number) for identity, rank, number in items}
    assert len(ids) == 24, "an item that is taken twice has the same id"
    assert result.out.count("all ranks of rollout have ended, and queue 'experience' is empty") == 2


def test_nothing_is_trained_on_that_is_too_old_and_producers_are_held_back(
    unirun: Unirun, script: Script
) -> None:
    result = unirun("--roles", "rollout=2,actor=1", script(AGED), within=2 * START_TIMEOUT)
    assert result.code == 0, result.err
    batches = re.findall(r"batch (\d) \[(.*)\]", result.out)
    assert len(batches) == 8
    for version, made_with in batches:
        assert all(int(version) - int(each) <= 1 for each in made_with.split(", ")), batches
    assert [int(count) > 0 for count in re.findall(r"held back (\d+)", result.out)] == [True, True]


def test_an_admission_is_given_back_by_an_exception_a_rejection_and_the_death_of_its_process(
    unirun: Unirun, script: Script
) -> None:
    job = unirun.start("--roles", "rollout=2,actor=1", "--max-restarts", "1", script(HELD))
    (pid,) = job.lines(r"pid (\d+)")
    os.kill(int(pid), signal.SIGKILL)
    result = job.end(within=2 * START_TIMEOUT)
    assert result.code == 0, result.err
    assert result.out.count("batch [0, 1]") == 2
    assert "this process has 2 admissions for which it has put nothing" in result.out
