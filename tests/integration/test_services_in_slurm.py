"""Jobs with services in allocations of Slurm, whose nodes are free as soon as the job has ended."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..testbed.fixtures import available
from ..testbed.slurm import Slurm
from .harness import Result, Unirun

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

    def run(
        self, *options: str, stub: tuple[str, ...] = (), train: Mapping[str, Any] | None = None, **engine: Any
    ) -> Result:
        """Run a job to its end, after which Slurm has no job and no node is taken."""
        args = [str(STUB), "--host", "{host}", "--port", "{port}", *stub]
        engines = {"program": sys.executable, "args": args, "count": 2, "per_node": 1, "service": True}
        engines |= {"ready": "http://{addr}/health", **engine}
        asks = {"program": "bash", "args": ["-c", TRAIN, "{roles.engine.addr}"], "after": ["engine"]}
        roles = {"engine": engines, "train": {**asks, **(train or {})}}
        file = self.command.root / "job.yaml"
        file.write_text(yaml.safe_dump({"roles": roles, "shutdown_timeout": 1}))
        result = self.command(*options, "--config", file)
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
