"""DLRover's proposal of a unified control plane: its four scenarios as jobs, its graph, affinities and failover levels.

It has pictures and no programs. So each scenario is described by the builder, one of them runs, and what the proposal
says about running jobs is proven by the tests of `PROVEN`.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT
from tests.unit.failover.test_policy import role
from unirun import RLJobBuilder
from unirun.collocation.graph import RoleGraph, affected, graph_of
from unirun.failover.policy import Budget, Loss, decide
from unirun.train import DLJobBuilder
from unirun.train.job import Job

from ..harness import Unirun

CLASSES = """
from unirun import BaseTrainer, BaseWorkload


class Source(BaseWorkload):
    def read(self, number):
        return [number * 4 + each for each in range(4)]


class Extract(BaseWorkload):
    def features(self, samples):
        return [2.0 * each for each in samples]


class Train(BaseWorkload):
    def setup(self):
        self.seen = 0

    def step(self, rows):
        self.seen += len(rows)
        return self.seen


class Flow(BaseTrainer):
    def init(self): ...

    def fit(self):
        # The next samples are read and prepared while others are trained on.
        refs = []
        for number in range(3):
            samples = self.RG_SOURCE.read.rank0(number)
            (rows, *_) = self.RG_EXTRACT.features(samples)
            refs.append(self.RG_WORKER.step.call_async(rows))
        print("trained on", [ref.result() for ref in refs][-1])
"""
"""The first of the proposal's two core steps: workloads. The second, the flow between them, is `fit`."""


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module of the workloads, where the builder finds it."""
    (tmp_path / "flow.py").write_text(CLASSES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flow", raising=False)
    return tmp_path


def builder(kind: str, *roles: str) -> Any:
    """A job of this type on a node of eight devices, with two ranks of each role."""
    made: Any = DLJobBuilder().dl_type(kind).node_num(1).device_per_node(8).config({}).trainer("flow", "Flow")
    for name in roles:
        made = made.workload(name, "flow", "Train").total(2).per_node(2)
    return made


def graph(job: Job) -> RoleGraph:
    """The computation graph of a job."""
    return graph_of({each.name: each.count for each in job.spec.roles}, job.spec.edges)


@pytest.mark.usefixtures("flow")
class TestScenarios:
    def test_pre_training_and_sft_are_one_group(self) -> None:
        for kind in ("PRE", "SFT"):
            job = builder(kind, "worker").build()
            assert [(each.name, each.count) for each in job.spec.roles if each.name != "trainer"] == [
                ("worker", 2)
            ]

    def test_online_decision_learning_is_a_stream(self) -> None:
        made = builder("SFT", "source", "extract", "worker")
        job = (
            made.edge("source", "extract", asynchronous=True)
            .edge("extract", "worker", asynchronous=True)
            .build()
        )
        assert [(each.source, each.target) for each in graph(job).edges] == [
            ("source", "extract"),
            ("extract", "worker"),
        ]

    def test_multimodal_training_has_several_parts(self) -> None:
        made = builder("MULTIMODAL", "vision", "text", "fusion")
        job = made.edge("vision", "fusion", "embed").edge("text", "fusion", "embed").build()
        # Who waits when one part fails is read off the graph.
        waits = affected(graph(job), ["fusion:0"])
        assert {each.role for each in waits if each.side == "upstream"} == {"vision", "text"}

    def test_ppo_has_a_role_for_each_model(self) -> None:
        made: Any = RLJobBuilder().node_num(1).device_per_node(8).config({}).trainer("flow", "Flow")
        for name in ("actor", "rollout", "reference", "reward", "critic"):
            made = getattr(made, name)("flow", "Train").total(1).per_node(1)
        job = (
            made.with_collocation("actor", "rollout")
            .edge("rollout", "reward")
            .edge("reward", "actor")
            .build()
        )
        assert len({each.name for each in job.spec.roles} - {"trainer"}) == 5


def test_a_stream_runs(unirun: Unirun, flow: Path) -> None:
    (flow / "submit.py").write_text(
        "from unirun.train import DLJobBuilder\n\n"
        "(\n"
        '    DLJobBuilder().dl_type("SFT").node_num(1).device_per_node(3).config({})\n'
        '    .trainer("flow", "Flow")\n'
        '    .workload("source", "flow", "Source").total(1).per_node(1)\n'
        '    .workload("extract", "flow", "Extract").total(1).per_node(1)\n'
        '    .workload("worker", "flow", "Train").total(1).per_node(1)\n'
        '    .edge("source", "extract", asynchronous=True)\n'
        '    .edge("extract", "worker", asynchronous=True)\n'
        "    .build()\n"
        "    .submit()\n"
        ")\n"
    )
    end = unirun.start_program([sys.executable, "submit.py"], cwd=flow).end()
    assert end.code == 0, end.err
    assert "trained on [12]" in end.out


@pytest.mark.usefixtures("flow")
def test_three_affinities_can_be_combined() -> None:
    """Roles on the same devices, on the same nodes, and apart. Here they may be apart on NUMA nodes of one node, too."""
    made = builder("SFT", "train", "sample", "score", "judge").node_num(2)
    made = made.with_collocation("train", "sample").with_separation("train", "score")
    spec = made.with_host_collocation("score", "judge").build().spec
    assert (spec.collocations, spec.separations) == ((("train", "sample"),), (("train", "score"),))
    assert spec.host_collocations == (("score", "judge"),)
    assert made.with_isolation("train", "score").build().spec.isolations == (("train", "score"),)


class TestFailover:
    """A failure is handled in the least scope that mends it, and goes up when that one's restarts are used up."""

    def test_process_level(self) -> None:
        """CAT3"""
        lost = Loss("actor:1 was killed", "actor", "1")
        assert decide(lost, role("workload", "process", 1, 1), Budget(3)).action == "restart_worker"

    def test_node_level(self) -> None:
        """CAT2: all ranks of the node, together and elsewhere."""
        lost = Loss("node n1 was lost", "actor", "0-1", elsewhere=True)
        found = decide(lost, role("workload", "process", 1, 1), Budget(3))
        assert found.action == "restart_worker"
        assert "actor:0-1 elsewhere" in found.reason

    def test_job_level(self) -> None:
        """CAT1: the last line of defense."""
        lost = Loss("actor:1 was killed", "actor", "1")
        spent = decide(lost, role("workload", "process", 1, 1), Budget(3, 3), job=Budget(1))
        assert spent.action == "restart_job"
        over = decide(lost, role("workload", "process", 1, 1), Budget(3, 3), job=Budget(1, 1))
        assert over.action == "end_job"


PROVEN = {
    "the graph is known while a job runs": "test_graph_of_a_job.py::test_the_graph_of_a_job_is_shown_while_it_runs_and_after_its_end",
    "those that a failure affects are told": "test_graph_of_a_job.py::test_the_event_of_a_dead_worker_names_the_roles_that_wait_for_it",
    "roles share devices": "test_placement.py::test_two_roles_share_two_devices",
    "roles are on different nodes": "test_placement.py::test_separated_roles_run_on_different_nodes",
    "the runtime context outlives the master": "test_durability_crash_points.py::test_a_master_may_crash_before_and_after_each_of_its_writes",
    "a restarted master goes on": "test_durability_kills.py::test_repeated_deaths_of_the_master_cost_no_worker_call_or_result",
    "process-level failover": "test_durability_failures.py::test_a_workload_that_dies_without_a_master_restarts_alone",
    "node-level failover": "test_losing_a_node.py::test_ranks_of_a_lost_node_restart_on_a_free_one",
    "job-level failover": "test_restarting_a_role.py::test_a_failure_restarts_all_roles_when_its_own_has_no_restart_left",
    "running jobs are diagnosed": "test_hangs.py::test_the_rank_for_which_the_others_wait_is_killed_and_named",
}
"""Claims of the proposal, and the test with real processes that proves each."""

DIFFERS = {
    "sub-graphs are scheduled": "placement takes the bytes of each edge instead: roles that exchange much share a node",
    "a Ray actor is the master": "a process of its own, which any agent starts again",
}


@pytest.mark.parametrize("claim", PROVEN)
def test_what_is_proven_elsewhere(claim: str) -> None:
    file, _, name = PROVEN[claim].partition("::")
    tree = ast.parse((ROOT / "tests" / "integration" / file).read_text())
    assert name in {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}


def test_edges_with_much_data_bring_roles_together(flow: Path) -> None:
    """In place of scheduling by sub-graphs (`DIFFERS`)."""
    assert DIFFERS
    job = builder("SFT", "a", "b").edge("a", "b", weight="64MB").build()
    assert job.spec.edges[0].weight == 64_000_000
