"""Weights from one role through another into an inference server, as the documents show it."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.documents import files
from tests.integration.harness import Script, Unirun
from tests.unit.weights.integrations import fake_servers

COMPANION = """
    import sys
    import torch
    import unirun
    from unirun.values import Engine
    from unirun.weights.companion.running import Companion

    ctx = unirun.init()
    channel = unirun.WeightsChannel("policy", publisher="actor", receivers=["companion"])

    class Told:
        engines = tuple(Engine(rank, 0, url, True) for rank, url in enumerate(sys.argv[1:]))
        versions = {}

        def when_changed(self, listener):
            pass

        def tell(self, told):
            self.versions[told.rank] = told.version
            print(f"engine {told.rank} has {told.version}, of {channel.latest()[1]}", flush=True)
            if [*self.versions.values()] == [2, 2]:
                companion.stop()

    if ctx.role == "actor":
        for version in (1, 2):
            part = torch.full((1, 2), float(version + 10 * ctx.rank))
            weights = {"weight": unirun.LocalShard(part, shape=(1, 4), start=(0, 2 * ctx.rank))}
            channel.publish(weights | ({"bias": torch.ones(1)} if ctx.rank else {}), version)
            torch.distributed.barrier(group=ctx.group("actor", "companion"))
    else:
        companion = Companion(channel, Told(), timeout=60.0)
        torch.distributed.barrier(group=ctx.group("actor", "companion"))
        companion.run()
        torch.distributed.barrier(group=ctx.group("actor", "companion"))
"""

RESTARTED = """
    import os, signal, sys, threading, time, torch
    import unirun
    from unirun.values import Engine
    from unirun.weights.companion.running import Companion

    ctx = unirun.init()
    channel = unirun.WeightsChannel("policy", publisher="actor", receivers=["companion"])

    def seen(name):
        while not os.path.exists(name):
            time.sleep(0.01)

    def say(name):
        open(name, "w").close()

    class Told:
        engines = (Engine(0, 0, sys.argv[1], True),)

        def when_changed(self, listener):
            self.changed = listener

        def tell(self, told):
            print(f"engine {told.rank} {told.incarnation} has {told.version}", flush=True)
            if (told.incarnation, told.version) == (0, 1):
                say("first")
                threading.Thread(target=another).start()
            elif (told.incarnation, told.version) == (1, 1):
                say("again")
            elif told.version == 2:
                say("done")
                companion.stop()

    def another():
        ctx.peers.wait_for(lambda: ctx.peers.find("actor", 0).address.incarnation > 0, 60.0)
        engines.engines = (Engine(0, 1, sys.argv[1], True),)
        engines.changed()

    weights = {"weight": torch.full((1, 4), float(ctx.incarnation)), "bias": torch.zeros(1)}
    if ctx.role == "actor" and ctx.incarnation == 0:
        channel.publish(weights, 1)
        seen("first")
        os.kill(os.getpid(), signal.SIGKILL)
    elif ctx.role == "actor":
        # The companion has to have version 1 for the engine that was started again.
        seen("again")
        channel.publish(weights, 2)
        seen("done")
    else:
        engines = Told()
        companion = Companion(channel, engines, timeout=60.0)
        companion.run()
"""

MODEL = {"weight": torch.zeros(1, 4), "bias": torch.zeros(1)}


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fake_servers.vllm_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "unirun.weights.integrations.vllm_worker", raising=False)


def test_the_example_of_the_documents_brings_weights_into_a_server(unirun: Unirun, script: Script) -> None:
    server = fake_servers.FakeVllm(MODEL)
    try:
        result = unirun(
            "--roles",
            "actor=1,rollout=1",
            script(files("docs/weights.md")["rollouts.py"]),
            env={"SERVER": server.url},
        )
        assert result.code == 0, result.err
    finally:
        server.close()
    assert server.version == "1"
    assert server.seen[-1] == "/resume"
    assert all(value.any() for value in server.weights.values())


def test_a_companion_brings_what_ranks_have_parts_of_into_all_servers(unirun: Unirun, script: Script) -> None:
    servers = [fake_servers.FakeVllm(MODEL) for _ in range(2)]
    try:
        urls = [server.url for server in servers]
        result = unirun("--roles", "actor=2,companion=1", script(COMPANION), *urls)
        assert result.code == 0, result.err
    finally:
        for server in servers:
            server.close()
    assert {line for line in result.lines if " has 2" in line} == {
        f"engine {rank} has 2, of 2" for rank in range(2)
    }
    for server in servers:
        assert server.version == "2"
        assert server.weights["weight"].tolist() == [[2, 2, 12, 12]]
        assert server.weights["bias"].tolist() == [1]
        assert server.seen[-1] == "/resume"


def test_an_engine_gets_the_version_of_a_publisher_that_has_died(unirun: Unirun, script: Script) -> None:
    server = fake_servers.FakeVllm(MODEL)
    try:
        result = unirun(
            "--roles", "actor=1,companion=1", "--max-restarts", "actor=1", script(RESTARTED), server.url
        )
        assert result.code == 0, result.err
    finally:
        server.close()
    has = [line for line in result.lines if line.startswith("engine")]
    assert {"engine 0 0 has 1", "engine 0 1 has 1", "engine 0 1 has 2"} <= set(has)
    assert server.weights["weight"].tolist() == [[1, 1, 1, 1]]
