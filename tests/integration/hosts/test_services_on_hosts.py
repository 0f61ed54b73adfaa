"""Engines and a trainer on hosts of their own: addresses, order, restarts, and the loss of a host and of the master."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.effort import variants
from tests.testbed.warm import is_warm
from tests.waiting import eventually

from ..harness import START_TIMEOUT, Result, Running, gone
from .cluster import UnirunOnHosts, command_line

STUB = Path(__file__).parents[2] / "testbed" / "engine.py"

TRAIN = """
    # Asks each engine for its health, says which answered, and runs until it is told that it is enough.
    import os, pathlib, sys, time, urllib.request
    addrs = sys.argv[1].split(",")
    found = [urllib.request.urlopen(f"http://{addr}/health", timeout=60).status for addr in addrs]
    print("up", *addrs, os.environ["UNIRUN_ADDRS_ENGINE"], *found, os.environ["UNIRUN_NODE"], ".", flush=True)
    while not pathlib.Path("enough").exists():
        time.sleep(0.01)
    print("done", flush=True)
"""


class Train(NamedTuple):
    """A trainer has started on `node`, with these addresses of the engines."""

    addrs: tuple[str, str]
    node: str


class Services:
    """A job of a trainer and of two engines on three hosts, of which h1, the head, has one slot."""

    def __init__(self, cluster: UnirunOnHosts) -> None:
        self.cluster = cluster
        self.job: Running

    def start(
        self,
        *options: object,
        stub: tuple[str, ...] = (),
        spares: int = 0,
        port_range: str = "20000-29999",
        **engine: Any,
    ) -> None:
        """Start the job. `engine` are more keys of the engines, `stub` more options of theirs."""
        work = self.cluster.work
        self.cluster.place("train.py", TRAIN)
        program = {"program": sys.executable, "service": True, "count": 2, "slots": 1}
        program |= {"ready": "http://{addr}/health"}
        args = [str(STUB), "--host", "{host}", "--port", "{port}", *stub]
        train = {"program": sys.executable, "args": ["-S", f"{work}/train.py", "{roles.engine.addrs}"]}
        job = {
            "roles": {"train": {**train, "after": ["engine"]}, "engine": {**program, "args": args, **engine}},
            "separations": [["engine", "train"]],
            "spares": spares,
            "port_range": port_range,
        }
        file = self.cluster.root / "job.yaml"
        file.write_text(yaml.safe_dump(job))
        argv = ["--hosts", "h1:1,h2:2,h3:2", "--rdzv-id", "mine", "--config", file, *options]
        self.job = self.cluster.start(*argv, cwd=work)

    def up(self) -> Train:
        """The trainer, which has had an answer of each engine; it was started once."""
        (line,) = self.job.lines(r"up (.*) \.$")
        first, second, variable, *answers, node = line.split()
        assert variable == f"{first},{second}"
        assert answers == ["200", "200"]
        return Train((first, second), node)

    def worker(self, rank: int, incarnation: int = 0) -> dict[str, Any]:
        """The status of an engine once it is ready in this incarnation."""

        def look() -> dict[str, Any] | None:
            worker = self.cluster.workers()[f"engine:{rank}"]
            return worker if worker["ready"] and worker["incarnation"] == incarnation else None

        return eventually(look, f"engine:{rank} is ready in incarnation {incarnation}", START_TIMEOUT)

    def told(self, node: str, expected: list[tuple[str, int]]) -> None:
        """Wait until the file of addresses of `node` has these addresses and incarnations, of engines that are ready."""
        file = self.cluster.folder(node) / f"addresses.{node}.json"

        def look() -> bool:
            rows = json.loads(file.read_text())["engine"]
            return (
                all(row["ready"] for row in rows)
                and [(row["addr"], row["incarnation"]) for row in rows] == expected
            )

        eventually(look, f"the file of {node} has {expected}")

    def no_torch(self) -> None:
        """No process of the job has loaded torch."""
        for pid in (pid for host in self.cluster.hosts for pid in host.pids() if not is_warm(pid)):
            with suppress(OSError):
                assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text(), command_line(pid)

    def end(self) -> Result:
        """Let the trainer end, and the job with it; it has run all the time. No process and no port is left."""
        self.cluster.enough()
        result = self.job.end()
        assert result.code == 0, result.err
        assert result.out.count("[train:0] up ") == 1
        for host in self.cluster.hosts:
            eventually(partial(self._idle, host.name), f"nothing runs on {host.name}")
            assert "unirun-port" not in host.run(["cat", "/proc/net/unix"]).stdout
        return result

    def _idle(self, node: str) -> bool:
        return not self.cluster.others(node)


@pytest.fixture
def services(cluster: UnirunOnHosts) -> Services:
    return Services(cluster)


def test_an_engine_and_the_master_are_killed_and_only_that_engine_starts_again(services: Services) -> None:
    """
    1. The trainer starts when both engines are ready on hosts of their own, and reaches them at their addresses.
    2. An engine is killed: it starts again alone, on its host, with its port, and the trainer's host is told.
    3. The master is killed: nothing starts again. Then an engine is killed, and does.
    """
    cluster = services.cluster
    services.start(stub=("--ready-after", "0.5", "--leak-child"), per_node=1)
    train = services.up()
    engines = [services.worker(rank) for rank in (0, 1)]
    nodes = [engine["node"] for engine in engines]
    assert len({train.node, *nodes}) == 3
    assert [engine["address"] for engine in engines] == [*train.addrs]
    for node, addr in zip(nodes, train.addrs, strict=True):
        assert addr.startswith(f"{cluster.host(node).address}:")
    services.no_torch()
    os.kill(engines[0]["pid"], signal.SIGKILL)
    again = services.worker(0, 1)
    assert (again["node"], again["address"]) == (nodes[0], train.addrs[0])
    services.told(train.node, [(train.addrs[0], 1), (train.addrs[1], 0)])
    os.kill(cluster.pid_on("h1", "unirun-master"), signal.SIGKILL)
    services.job.lines("another leads")
    assert services.worker(0, 1)["pid"] == again["pid"]
    assert services.worker(1)["pid"] == engines[1]["pid"]
    os.kill(engines[1]["pid"], signal.SIGKILL)
    services.worker(1, 1)
    services.told(train.node, [(train.addrs[0], 1), (train.addrs[1], 1)])
    assert services.worker(0, 1)["pid"] == again["pid"]
    services.end()


@pytest.mark.parametrize("lost", variants("processes", "cable", "drained"))
def test_engines_of_a_host_that_is_lost_have_addresses_on_another_one(services: Services, lost: str) -> None:
    """The host is killed, without a cable, or taken out of the job."""
    cluster = services.cluster
    services.start(per_node=2, spares=1)
    train = services.up()
    engines = [services.worker(rank) for rank in (0, 1)]
    (node,) = {engine["node"] for engine in engines}
    assert node != train.node
    if lost == "cable":
        cluster.host(node).cable(up=False)
    elif lost == "drained":
        assert cluster("agent", "drain", node, "mine").code == 0
    else:
        cluster.host(node).kill_all()
    after = [services.worker(rank, 1) for rank in (0, 1)]
    (spare,) = {engine["node"] for engine in after}
    assert spare not in (node, train.node)
    addrs = [engine["address"] for engine in after]
    assert all(addr.startswith(f"{cluster.host(spare).address}:") for addr in addrs)
    services.told(train.node, [(addr, 1) for addr in addrs])
    assert all(gone(engine["pid"], 0) for engine in engines), "none of them ran twice"
    assert not any("too early" in text for text in cluster.events("exit"))
    services.end()


def test_optional_engines_of_a_lost_host_for_which_there_is_no_room_are_given_up(services: Services) -> None:
    cluster = services.cluster
    services.start(count=4, per_node=2, optional=True)
    services.job.lines(r"up (.*) \.$")
    before = [services.worker(rank) for rank in range(4)]
    lost = next(engine["node"] for engine in before if engine["node"] != "h1")
    cluster.host(lost).kill_all()
    assert services.job.lines(r"it fits nowhere else: (.*); the job goes on without it$")
    for rank, engine in enumerate(before):
        if engine["node"] != lost:
            assert services.worker(rank)["pid"] == engine["pid"]
    services.end()


MEMBER = """
    # Connects to the head of its group, which listens on another host, and runs as long as that does.
    import socket, sys, time
    host, _, port = sys.argv[1].rpartition(":")
    while True:
        try:
            head = socket.create_connection((host, int(port)))
            break
        except OSError:
            time.sleep(0.02)
    print("joined", sys.argv[1], flush=True)
    head.recv(1)
    time.sleep(3600)
"""


def test_an_engine_on_two_hosts_is_addressed_and_started_again_as_one(services: Services) -> None:
    """
    1. Rank 0 serves on one host, rank 1 finds it there from another host; the trainer starts when rank 0 is ready, and
       has one address.
    2. Rank 1 is killed: both start again, at the same addresses.
    """
    cluster = services.cluster
    cluster.place("member.py", MEMBER)
    member = f"exec {sys.executable} -S {cluster.work}/member.py {{group.head}}"
    head = f"exec {sys.executable} {STUB} --host {{host}} --port {{port}}"
    text = f"if [ {{rank}} = 0 ]; then {head}; else {member}; fi"
    services.start(program="bash", args=["-c", text], per_node=1, group=2, restart_delay=0)
    (line,) = services.job.lines(r"up (.*) \.$")
    addr, variable, answer, _ = line.split()
    assert (variable, answer) == (addr, "200")
    first = [cluster.workers()[f"engine:{rank}"] for rank in (0, 1)]
    assert len({engine["node"] for engine in first}) == 2
    assert first[0]["address"] == addr
    services.job.lines(rf"joined {addr}")
    os.kill(first[1]["pid"], signal.SIGKILL)
    again = services.worker(0, 1)
    assert gone(first[0]["pid"], 0)
    assert again["address"] == addr

    def member_again() -> bool:
        engine = cluster.workers()["engine:1"]
        return (engine["incarnation"], engine["node"]) == (1, first[1]["node"]) and bool(engine["pid"])

    eventually(member_again, "rank 1 runs again on its host", START_TIMEOUT)
    services.end()


def test_engines_are_reached_over_ipv6(services: Services) -> None:
    cluster = services.cluster
    services.start("--interface", f"{cluster.hosts.network6}::/64", per_node=1)
    train = services.up()
    engines = [services.worker(rank) for rank in (0, 1)]
    for engine, addr in zip(engines, train.addrs, strict=True):
        assert engine["address"] == addr
        assert addr.startswith(f"[{cluster.host(engine['node']).address6}]:")
    services.end()


def test_an_engine_that_is_never_ready_ends_the_job_on_all_hosts(services: Services) -> None:
    services.start(stub=("--never-ready",), per_node=1, ready_timeout=2)
    result = services.job.end()
    assert result.code == 4
    assert "was not ready within 2 s: http://198.18." in result.err
    assert "answers with status 503" in result.err
    assert "[train:0] up" not in result.out


def test_an_engine_without_a_port_ends_the_job_on_all_hosts(services: Services) -> None:
    services.start(per_node=2, port_range="20000-20000")
    result = services.job.end()
    assert result.code == 3
    assert "no port from 20000 to 20000 is free on this host; widen port_range" in result.err
    assert result.err.count("engine:0-1 cannot start on h") == 1
    assert "is gone" not in result.err


ACTOR = """
    import pathlib, time
    import torch
    import unirun
    channel, model, version = unirun.WeightsChannel("policy"), torch.nn.Linear(4, 4), 1
    while not pathlib.Path("enough").exists():
        if pathlib.Path(f"publish-{version}").exists():
            channel.publish(model, version)
            version += 1
        time.sleep(0.01)
"""


def test_engines_of_a_host_that_is_lost_have_the_latest_weights_on_another_one(
    cluster: UnirunOnHosts,
) -> None:
    """The companion follows them: it is where they are, and gets versions from the host of the actor."""
    cluster.place("vllm", f'#!/bin/sh\nexec {sys.executable} {STUB} "$@"\n')
    for folder in (cluster.work, *(host.path(cluster.work) for host in cluster.hosts)):
        (folder / "vllm").chmod(0o755)
    engine: dict[str, Any] = {
        "kind": "vllm",
        "model": "none",
        "count": 2,
        "slots": 1,
        "device": "cpu",
        "per_node": 2,
    }
    engine["env"] = {"PATH": f"{cluster.work}:/usr/bin:/bin"}
    cluster.place("actor.py", ACTOR)
    job = {
        "roles": {"actor": {"script": f"{cluster.work}/actor.py", "count": 1}, "engine": engine},
        "channels": {"policy": {"publisher": "actor", "receivers": ["engine"]}},
        "separations": [["engine", "actor"]],
        "spares": 1,
    }
    file = cluster.root / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    running = cluster.start(
        "--hosts", "h1:1,h2:2,h3:2", "--rdzv-id", "mine", "--config", file, cwd=cluster.work
    )
    running.lines("ranks of 3 roles up")

    def have(version: int, incarnation: int) -> str:
        """Wait until engines and companion are on one node, ready and with this version. Returns the node."""

        def look() -> str | None:
            workers = cluster.workers()
            engines = [workers[f"engine:{rank}"] for rank in (0, 1)]
            there = [*engines, workers["engine-weights:0"]]
            nodes = {worker["node"] for worker in there}
            versions = [worker["metrics"].get("policy/version") for worker in there]
            ready = all(e["ready"] and e["incarnation"] == incarnation for e in engines)
            return nodes.pop() if ready and versions == [version] * 3 and len(nodes) == 1 else None

        return eventually(look, f"the engines have version {version}", START_TIMEOUT)

    cluster.place("publish-1", "")
    first = have(1, 0)
    cluster.host(first).kill_all()
    second = have(1, 1)
    assert second not in (first, "h1")
    cluster.place("publish-2", "")
    assert have(2, 1) == second
    cluster.enough()
    assert running.end().code == 0
