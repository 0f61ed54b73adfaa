"""Weights that go from two publishers to four receivers on three hosts, which have no directory in common."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.effort import variants
from tests.testbed.host import Host
from tests.waiting import eventually

from ..harness import START_TIMEOUT
from .cluster import UnirunOnHosts

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
@pytest.mark.parametrize("backend", variants("", "gloo"), ids=variants("sockets", "gloo"))
@pytest.mark.chaos
def test_stages_arrive_whole_over_a_bad_cable_and_again_when_a_publisher_was_killed(
    cluster: UnirunOnHosts, backend: str
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


LARGE = """
    import torch, unirun

    ctx = unirun.init()
    channel = unirun.WeightsChannel("policy", publisher="actor", receivers=["rollout"])

    def weights(version):
        generator = torch.Generator().manual_seed(version)
        return torch.rand(10_000_000, generator=generator)

    if ctx.role == "actor":
        print("publishes on", ctx.node, flush=True)
        channel.publish({"w": weights(ctx.incarnation)}, ctx.incarnation)
        ctx.peers.wait_for(lambda: False, 300.0)
    else:
        got = {"w": torch.full((10_000_000,), -1.0)}
        print("receives on", ctx.node, flush=True)
        while True:
            try:
                version = channel.receive(into=got, timeout=200)
                break
            except unirun.PeerLost as error:
                print("lost", error.worker, "torn", not bool((got["w"] == -1).all()), flush=True)
        print("version", version, "exact", torch.equal(got["w"], weights(version)), flush=True)
"""

SENT = 2 << 20
"""Bytes of the 40 MB that are on their way when the host is lost."""


def sent_by(host: Host) -> int:
    """Bytes that a host has sent, over a cable that is not bad."""
    return int(Path(f"/sys/class/net/{host.namespace}/statistics/rx_bytes").read_text())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lost", variants("power", "processes"))
def test_a_host_that_is_lost_in_the_middle_of_a_transfer_leaves_no_half_of_a_version(
    cluster: UnirunOnHosts, lost: str
) -> None:
    """
    1. The publisher's host sends 40 MB over a bad cable. Two of them have arrived when it is lost.
    2. The receiver is told who is lost, and its tensors are as they were.
    3. The publisher starts on the spare, and its version arrives.
    """
    cluster.place("train.py", LARGE)
    roles = "{rollout: {count: 1}, actor: {count: 1, max_restarts: 1}}"
    job_file = f"script: {cluster.work}/train.py\nspares: 1\nprimary: [rollout]\nroles: {roles}\n"
    cluster.place("job.yaml", job_file)
    _, second, _ = cluster.hosts
    second.netem(delay_ms=20, loss=0.01)
    argv = ("--hosts", "h1:1,h2:1,h3:1", "--rdzv-id", "mine", "--config", cluster.work / "job.yaml")
    job = cluster.start(*argv, cwd=cluster.work)
    assert job.lines(r"receives on (\w+)") == ["h1"]
    assert job.lines(r"publishes on (\w+)") == ["h2"]
    before = sent_by(second)
    eventually(lambda: sent_by(second) > before + SENT, "some of it is sent", START_TIMEOUT)
    second.cable(up=lost != "power")
    second.kill_all(sshd=lost == "power")
    assert job.lines(r"(lost actor:0 torn \w+)") == ["lost actor:0 torn False"]
    assert job.lines(r"publishes on (\w+)", 2)[1] == "h3"
    end = job.end()
    assert end.code == 0, end.err
    assert re.findall(r"version (\d) exact (\w+)", end.out) == [("1", "True")]
