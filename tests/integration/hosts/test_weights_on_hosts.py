"""Weights that go from two publishers to four receivers on three hosts, which have no directory in common."""

from __future__ import annotations

import os
import re
import signal

import pytest

from .cluster import OnHosts

MOVES = """
    import os, pathlib, sys, time
    import torch, unirun

    ctx = unirun.init()
    backend = sys.argv[1] if len(sys.argv) > 1 else ""
    channel = unirun.WeightsChannel("policy", publisher="actor", receivers=["rollout"], backend=backend)
    SIZES = {"stage 0": 600_000, "stage 1": 200_003}

    def weights(version):
        generator = torch.Generator().manual_seed(version)
        return {name: torch.rand(size, generator=generator) for name, size in SIZES.items()}

    if ctx.role == "actor":
        mine = f"stage {ctx.rank}"
        first = 10 * (ctx.generation + 1)
        print("pid", ctx.rank, os.getpid(), flush=True)
        for version in (first, first + 1):
            channel.publish({mine: weights(version)[mine]}, version)
        while not pathlib.Path("enough").exists():
            time.sleep(0.01)
    else:
        got = {name: torch.zeros(size) for name, size in SIZES.items()}
        for least in (11, 21):
            while True:
                try:
                    version = channel.receive(into=got, min_version=least, timeout=100)
                    break
                except unirun.PeerLost as error:
                    print("lost", error.worker, flush=True)
            exact = all(torch.equal(got[name], value) for name, value in weights(version).items())
            print("version", version, "exact", exact, "on", ctx.node, flush=True)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["", "gloo"], ids=["sockets", "gloo"])
def test_stages_arrive_whole_over_a_bad_cable_and_again_when_a_publisher_was_killed(
    cluster: OnHosts, backend: str
) -> None:
    """
    1. Packets are late by 20 ms, and one of a hundred is lost.
    2. Two stages of two actors arrive at four rollouts, bit for bit.
    3. An actor is killed while the rollouts wait for the next version: they are told which one.
    4. The role starts again, and its next version arrives.
    """
    cluster.place("train.py", MOVES)
    roles = "{actor: {count: 2, per_node: 1, max_restarts: 1}, rollout: {count: 4}}"
    job_file = f"script: {cluster.work}/train.py\nargs: [{backend}]\nprimary: [rollout]\nroles: {roles}\n"
    cluster.place("job.yaml", job_file)
    for host in cluster.hosts:
        host.netem(delay_ms=20, loss=0.01)
    argv = ("--hosts", "h1:2,h2:2,h3:2", "--rdzv-id", "mine", "--config", cluster.work / "job.yaml")
    job = cluster.start(*argv, cwd=cluster.work)
    assert job.lines(r"version 11 exact (\w+)", 4) == ["True"] * 4
    (pid,) = job.lines(r"pid 1 (\d+)")
    os.kill(int(pid), signal.SIGKILL)
    assert {*job.lines(r"lost (\S+)", 4)} <= {"actor:0", "actor:1"}
    assert job.lines(r"version 21 exact (\w+)", 4) == ["True"] * 4
    end = job.end()
    assert end.code == 0, end.err
    assert len({*job.lines(r"version 21 .* on (h\d)", 4)}) > 1
    metrics = (cluster.home / "jobs" / "mine" / "metrics.jsonl").read_text()
    assert (backend or "socket") in re.findall(r"policy/from/actor:1/(\w+)", metrics)
