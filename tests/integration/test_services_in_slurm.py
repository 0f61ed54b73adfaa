"""Jobs with services in allocations of Slurm, whose nodes are free as soon as the job has ended."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import eventually

from ..testbed.fixtures import available
from ..testbed.slurm import Slurm
from .harness import START_TIMEOUT, Result, Running, Unirun

pytestmark = pytest.mark.long

STUB = Path(__file__).parents[1] / "testbed" / "engine.py"

TRAIN = 'curl --silent --output /dev/null --write-out "%{http_code}\\n" "http://$0/health"'


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    """One for all tests: each leaves it idle."""
    with available(), Slurm() as slurm:
        yield slurm


class Services:
    """Jobs of two engines, each on a node of its own, and of a trainer."""

    def __init__(self, command: Unirun, cluster: Slurm) -> None:
        self.command, self.cluster = command, cluster

    def start(
        self,
        *options: str,
        stub: tuple[str, ...] = (),
        train: Mapping[str, Any] | None = None,
        how: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> Running:
        """Start a job; `how` is for `Unirun.start`."""
        args = [str(STUB), "--host", "{host}", "--port", "{port}", *stub]
        engines = {"program": sys.executable, "args": args, "count": 2, "per_node": 1, "service": True}
        engines |= {"ready": "http://{addr}/health", **engine}
        asks = {"program": "bash", "args": ["-c", TRAIN, "{roles.engine.addr}"], "after": ["engine"]}
        roles = {"engine": engines, "train": {**asks, **(train or {})}}
        file = self.command.root / "job.yaml"
        file.write_text(yaml.safe_dump({"roles": roles, "shutdown_timeout": 1}))
        return self.command.start(*options, "--config", file, **(how or {}))

    def run(self, *options: str, **roles: Any) -> Result:
        """Run a job to its end."""
        return self.end(self.start(*options, **roles))

    def end(self, job: Running) -> Result:
        """The end of a job, after which Slurm has no job and no node is taken."""
        result = job.end()
        assert self.cluster.run("squeue", "--noheader") == ""
        assert set(self.cluster.run("sinfo", "--noheader", "--format=%T").split()) == {"idle"}
        return result

    def nodes(self) -> dict[str, str]:
        """The node of each worker."""
        return {who: worker["node"] for who, worker in self.command.workers().items()}


@pytest.fixture
def services(unirun: Unirun, cluster: Slurm, monkeypatch: pytest.MonkeyPatch) -> Services:
    """With the command on a login node."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    return Services(unirun, cluster)


def test_the_nodes_are_free_when_the_trainer_has_ended_although_engines_ignore_sigterm(
    services: Services,
) -> None:
    result = services.run("--slurm", "nodes=2,cpus_per_task=2", stub=("--ignore-term", "--leak-child"))
    assert result.code == 0, result.err
    assert "[train:0] 200" in result.out
    nodes = services.nodes()
    assert nodes["engine:0"] != nodes["engine:1"]


def test_engines_and_trainer_are_on_their_components_of_a_heterogeneous_job(services: Services) -> None:
    components = ("--slurm", "nodes=2", "--slurm", "nodes=1")
    result = services.run(*components, component=0, train={"component": 1})
    assert result.code == 0, result.err
    assert "[train:0] 200" in result.out
    assert services.nodes() == {"engine:0": "n1", "engine:1": "n2", "train:0": "n3"}


def test_an_engine_without_restarts_left_ends_the_job_with_the_cause(services: Services) -> None:
    crash = ("--crash-after", "0.5", "--exit-code", "7")
    waits = {"program": "sleep", "args": ["600"]}
    result = services.run("--slurm", "nodes=2", stub=crash, train=waits, max_restarts=1, restart_delay=0)
    assert result.code == 5, result.err
    said = result.out + result.err
    assert re.search(r"engine:\d ended with exit code 7.*; all 1 restarts of role engine .*are used up", said)
    assert "EngineDeadError" in said, "the last lines of its output"
    assert services.command.status()["code"] == 5


LIVES = """
    while [ ! -e enough ]; do sleep 0.05; done
    echo "$UNIRUN_ADDRS_ENGINE then $(cat "$UNIRUN_ADDRS_FILE")"
"""


def test_an_engine_of_a_lost_node_starts_on_another_one_and_an_optional_one_without_room_is_given_up(
    services: Services, cluster: Slurm
) -> None:
    """
    1. Two optional engines serve on nodes of their own, and a trainer asks them once on the first node; a third node
       is free.
    2. The second node is lost: its engine is ready on the third, with an address that status and file tell. Nothing
       else starts again.
    3. The third node is lost, and the engine is given up. The job ends with 0 when the trainer does.
    """
    command = services.command
    lives = {"program": "sh", "args": ["-c", LIVES]}
    how = {"env": {"UNIRUN_WARM": "0"}, "constants": {"unirun.launcher.slurm.submit.TASK_END_TIMEOUT": 2}}
    job = services.start("--slurm", "nodes=3", train=lives, how=how, optional=True)
    job.lines("ranks of 2 roles up")

    def ready(incarnation: int) -> dict[str, dict[str, Any]] | None:
        now = command.workers()
        up = now["train:0"]["pid"] and all(now[f"engine:{rank}"]["ready"] for rank in (0, 1))
        return now if up and now["engine:1"]["incarnation"] == incarnation else None

    def told(now: dict[str, dict[str, Any]], *ready: bool) -> None:
        """Wait until the trainer's file has the addresses of the status, and whether they are ready."""
        expected = [(now[f"engine:{rank}"]["address"], is_ready) for rank, is_ready in enumerate(ready)]
        (file,) = command.home.rglob(f"addresses.{now['train:0']['node']}.json")

        def look() -> bool:
            return [(row["addr"], row["ready"]) for row in json.loads(file.read_text())["engine"]] == expected

        eventually(look, f"the file has {expected}")

    before = eventually(partial(ready, 0), "both engines are ready", START_TIMEOUT)
    lost = []

    def lose(node: str) -> None:
        cluster.kill_node(node)
        lost.append(node)

    try:
        lose(before["engine:1"]["node"])
        after = eventually(partial(ready, 1), "the engine is ready on another node", START_TIMEOUT)
        assert len({now["engine:1"]["address"] for now in (before, after)}) == 2
        told(after, True, True)
        lose(after["engine:1"]["node"])
        job.lines("it fits nowhere else: .*; the job goes on without it$")
        told(after, True, False)
        for who in ("engine:0", "train:0"):
            assert command.workers()[who]["pid"] == before[who]["pid"] == after[who]["pid"]
        (command.root / "enough").touch()
        job.lines("succeeded after")
    finally:
        for node in lost:
            cluster.start_node(node)
    result = services.end(job)
    assert result.code == 0, result.err
    addrs = ",".join(before[f"engine:{rank}"]["address"] for rank in (0, 1))
    assert f"[train:0] {addrs} then {{" in result.out, "the environment is that of the start"
