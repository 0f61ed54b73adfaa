"""Engines that receive weights: the versions that a role publishes are brought into a stub of vLLM, and an engine that
was started again is ready only when it has the latest one."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.waiting import eventually

from .harness import Running, Script, Unirun, gone

STUB = Path(__file__).parents[1] / "testbed" / "engine.py"

ACTOR = """
    import os, sys, time
    import torch
    import unirun

    channel, model, folder = unirun.WeightsChannel("policy"), torch.nn.Linear(4, 4), sys.argv[1]
    version = 1
    while not os.path.exists(f"{folder}/end"):
        if os.path.exists(f"{folder}/publish-{version}"):
            channel.publish(model, version)
            print("published", version, flush=True)
            version += 1
        time.sleep(0.01)
"""


class JobWithEngines:
    """A job with an actor that publishes, and two engines."""

    def __init__(self, unirun: Unirun, script: Script) -> None:
        self.unirun, self.folder = unirun, unirun.root
        program = self.folder / "bin" / "vllm"
        program.parent.mkdir()
        # Slow updates, so that an engine that is up is not up to date at once.
        program.write_text(
            f'#!/bin/sh\nexec {sys.executable} {STUB} "$@" --update 0.3 --tear {self.folder}/tear\n'
        )
        program.chmod(0o755)
        engine = {
            "kind": "vllm",
            "model": "none",
            "count": 2,
            "env": {"PATH": f"{program.parent}:/usr/bin:/bin"},
        }
        roles = {"actor": {"script": str(script(ACTOR)), "args": [str(self.folder)]}, "engine": engine}
        channels = {"policy": {"publisher": "actor", "receivers": ["engine"]}}
        file = self.folder / "job.yaml"
        file.write_text(yaml.safe_dump({"roles": roles, "channels": channels}))
        self.job: Running = unirun.start("--config", file)
        self.job.lines(r"ranks of 3 roles up")

    def publish(self, version: int) -> None:
        (self.folder / f"publish-{version}").touch()

    def ready(self, rank: int, incarnation: int = 0) -> str:
        """Wait until an engine is ready. Returns its address."""

        def look() -> str | None:
            engine = self.unirun.workers()[f"engine:{rank}"]
            return (
                str(engine["address"]) if engine["ready"] and engine["incarnation"] == incarnation else None
            )

        return eventually(look, f"engine:{rank} is ready in incarnation {incarnation}")

    def versions(self) -> dict[str, float]:
        """The versions that the job knows of each rank."""
        found = {
            who: worker["metrics"].get("policy/version") for who, worker in self.unirun.workers().items()
        }
        return {who: version for who, version in found.items() if version is not None}

    def have(self, version: int) -> None:
        who = {"actor:0", "engine-weights:0", "engine:0", "engine:1"}
        eventually(
            lambda: self.versions() == dict.fromkeys(who, version), f"all ranks have version {version}"
        )

    def pid(self, who: str) -> int:
        return int(self.unirun.workers()[who]["pid"])

    def end(self) -> None:
        (self.folder / "end").touch()
        assert self.job.end().code == 0


def label(address: str) -> str:
    """The label of the weights that an engine has."""
    with urllib.request.urlopen(f"http://{address}/weight_info", timeout=10) as response:
        return str(json.load(response)["weight_version"])


@pytest.fixture
def job_with_engines(unirun: Unirun, script: Script) -> JobWithEngines:
    return JobWithEngines(unirun, script)


def test_an_engine_is_ready_only_when_it_has_the_latest_version(job_with_engines: JobWithEngines) -> None:
    addresses = [job_with_engines.ready(rank) for rank in (0, 1)]
    assert {label(each) for each in addresses} == {"default"}, "nothing was published"
    job_with_engines.publish(1)
    job_with_engines.have(1)
    assert {label(each) for each in addresses} == {"1"}

    os.kill(job_with_engines.pid("engine:1"), signal.SIGKILL)
    assert label(job_with_engines.ready(1, 1)) == "1", "ready was not told before"

    (job_with_engines.folder / "tear").touch()
    job_with_engines.publish(2)
    (line,) = job_with_engines.job.lines(r"(engine:. has weights that are half new: .*)")
    torn = int(line.partition(":")[2][0])
    assert label(job_with_engines.ready(torn, 1 if torn == 0 else 2)) == "2"
    job_with_engines.have(2)
    assert "engine:0-1" in job_with_engines.unirun("weights").out

    companion = job_with_engines.pid("engine-weights:0")
    os.kill(companion, signal.SIGKILL)
    assert gone(companion, 10)
    job_with_engines.publish(3)
    job_with_engines.have(3)
    assert {label(each) for each in addresses} == {"3"}, "a companion was started again"
    job_with_engines.end()
