"""A job on several nodes loses some of them: their ranks go on elsewhere, and everybody else stays.

The nodes are parts of this host, each with an agent; a node is lost when its agent is killed.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import eventually

from .harness import START_TIMEOUT, Running, Script, Unirun
from .masters import Masters

WAITING = """
    import os, pathlib, time
    names = ("ROLE_NAME", "RANK", "UNIRUN_INCARNATION", "UNIRUN_NODE", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE")
    print("up", *(os.environ.get(name, "-") for name in names), flush=True)
    while not pathlib.Path("enough").exists():
        time.sleep(0.02)
"""

JOINING = """
    import os, pathlib, time
    names = ("UNIRUN_GENERATION", "UNIRUN_NODE", "OF_THE_JOB", "OF_THE_SHELL")
    print("has", *(os.environ.get(name, "-") for name in names), os.getcwd(), flush=True)
    while not pathlib.Path("enough").exists():
        time.sleep(0.02)
"""

SURVIVING = """
    import os, time, torch, torch.distributed as dist, unirun

    @unirun.resilient
    def train(state):
        dist.init_process_group("gloo")
        step = state.load().get("step", 0)
        print("begin", dist.get_world_size(), dist.get_rank(), os.getpid(), step, flush=True)
        while True:
            enough = torch.tensor([float(os.path.exists("enough"))])
            dist.all_reduce(enough)
            if enough:
                break
            step += 1
            state.save(step=step)
            time.sleep(0.05)
        print("end", dist.get_rank(), os.environ["WORLD_SIZE"], os.getpid(), step, flush=True)

    train()
"""

SAVING = (
    """
    import os, signal, sys, time

    def save(*_):
        print("asked", os.environ["UNIRUN_NODE"], flush=True)
        while not os.path.exists("go"):
            time.sleep(0.02)
        print("saved", os.environ["UNIRUN_NODE"], flush=True)
        sys.exit(143)

    signal.signal(signal.SIGTERM, save)
"""
    + WAITING
)

CLASSES = """
    import os, pathlib, time
    from unirun import BaseTrainer, BaseWorkload, WorkerLost, trainer_invocation

    class Adder(BaseWorkload):
        total = 0

        def setup(self):
            import torch.distributed
            torch.distributed.init_process_group("gloo")

        @trainer_invocation()
        def add(self):
            import torch
            self.total += 1
            peers = torch.ones(1)
            torch.distributed.all_reduce(peers)
            return os.environ["UNIRUN_NODE"], os.getpid(), self.total, int(peers.item())

    class Asker(BaseTrainer):
        def init(self):
            pass

        def fit(self):
            import json
            told = None
            while not pathlib.Path("enough").exists():
                try:
                    rows = [self.RG_ACTOR.add(), self.RG_CRITIC.add()]
                except WorkerLost:
                    time.sleep(0.05)
                    continue
                nodes = [[row[0] for row in rows[0]], [row[0] for row in rows[1]]]
                if nodes != told:
                    told = nodes
                    print("rows", json.dumps(rows), flush=True)
                time.sleep(0.02)
"""

GROWING = """
    import os, pathlib, time
    from unirun import BaseTrainer, BaseWorkload, WorkerLost

    class Adder(BaseWorkload):
        total = 0

        def setup(self):
            import torch.distributed
            torch.distributed.init_process_group("gloo")

        def get_state(self):
            return {"total": self.total}

        def set_state(self, state):
            self.total = state["total"]

        def on_generation(self, generation):
            self.formed = generation

        def add(self):
            import torch
            self.total += 1
            peers = torch.ones(1)
            torch.distributed.all_reduce(peers)
            return os.getpid(), self.total, int(peers.item()), self.world_size, self.formed

    class Asker(BaseTrainer):
        def init(self):
            pass

        def fit(self):
            import json
            told = 0
            while not pathlib.Path("enough").exists():
                try:
                    rows = self.RG_ACTOR.add()
                except WorkerLost:
                    told = 0
                    time.sleep(0.05)
                    continue
                if len(rows) != told:
                    told = len(rows)
                    print("rows", told, json.dumps(rows), flush=True)
                time.sleep(0.02)
"""


def job_file(
    unirun: Unirun, path: Path, *, nodes: int = 3, spares: int = 1, actor: str = "count: 4"
) -> list[str]:
    """The options of a job of scripts on nodes with two devices each."""
    job = unirun.root / "job.yaml"
    text = f"spares: {spares}\nroles: {{actor: {{{actor}, script: {path}, max_restarts: 2}}}}\n"
    job.write_text(text)
    return ["--config", str(job), "--inventory", f"fake:nodes={nodes},devices=2"]


def agents(unirun: Unirun, *nodes: str) -> list[int]:
    """The pids of the agents of `nodes`, once they have joined."""

    def joined() -> dict[str, int]:
        words = [text.split() for text in unirun.events("join")]
        return {name: int(pid.rstrip(")")) for name, _, _, pid in words}

    eventually(lambda: {*nodes} <= {*joined()}, f"{nodes} have joined", START_TIMEOUT)
    return [joined()[node] for node in nodes]


def up(job: Running, incarnation: int, count: int) -> list[tuple[str, str, str, str]]:
    """Rank, node, mask and world size of `count` actors of one incarnation, in rank order."""
    lines = job.lines(rf"up actor \d+ {incarnation} .*$", count)
    found = [line.split() for line in lines]
    return sorted((rank, node, mask, size) for _, _, rank, _, node, mask, size in found)


def one_lost(unirun: Unirun, path: Path, first: str, second: str) -> tuple[Running, int]:
    """A job on two of four nodes that has lost the node `first` and continues; with the agent of `second`."""
    job = unirun.start(*job_file(unirun, path, nodes=4, spares=2))
    up(job, 0, 4)
    lost, other = agents(unirun, first, second)
    agents(unirun, "node3")
    os.kill(lost, signal.SIGKILL)
    up(job, 1, 4)
    return job, other


def enough(unirun: Unirun) -> None:
    (unirun.root / "enough").touch()


class TestANodeOfSeveral:
    def test_a_node_of_several_has_the_ranks_and_masks_of_its_devices(
        self, unirun: Unirun, script: Script
    ) -> None:
        job = unirun.start(*job_file(unirun, script(WAITING), nodes=2, spares=0))
        assert up(job, 0, 4) == [(str(rank), f"node{rank // 2}", "0,1", "4") for rank in range(4)], (
            "two devices on each of two nodes"
        )
        enough(unirun)
        assert job.end().code == 0

    @pytest.mark.parametrize(
        ("signum", "spares"), [(signal.SIGKILL, 1), (signal.SIGTERM, 1), (signal.SIGKILL, 0)]
    )
    def test_ranks_of_a_lost_node_restart_on_a_free_one(
        self, unirun: Unirun, script: Script, signum: int, spares: int
    ) -> None:
        """
        1. Four ranks run on two of three nodes.
        2. The agent of the second node gets a signal: its ranks restart on the third node, with the same
           device mask.
        3. The status shows the lost node and the new placement; the agent leaves no zombie.
        4. The workers end, and the command ends with 0 and has reported the move.
        """
        job = unirun.start(*job_file(unirun, script(WAITING), spares=spares))
        up(job, 0, 4)
        (agent,) = agents(unirun, "node1")
        agents(unirun, "node2")
        os.kill(agent, signum)
        nodes = ["node0", "node0", "node2", "node2"]
        assert up(job, 1, 4) == [(str(n), node, "0,1", "4") for n, node in enumerate(nodes)]
        assert unirun.events("move") == ["actor:2-3 from node1 to node2"]
        # The status is written a moment after what it tells of.
        eventually(
            lambda: [worker["node"] for worker in unirun.workers().values()] == nodes,
            "the status knows the nodes",
        )
        assert "nodes: node1 lost" in unirun("status").out
        # Its handle tells of its end before the command has reaped it.
        eventually(lambda: not Path(f"/proc/{agent}").exists(), "the agent leaves no zombie")
        enough(unirun)
        end = job.end()
        assert end.code == 0, end.err
        assert "the agent of node node1 is gone" in end.err
        assert "restart 1 of 2 of role actor, with actor:2-3 elsewhere" in end.err

    def test_a_node_that_is_told_to_leave_lets_its_workers_save_before_their_ranks_move(
        self, unirun: Unirun, script: Script
    ) -> None:
        """Nothing starts in the place of a worker that may still write its checkpoint."""
        job = unirun.start(*job_file(unirun, script(SAVING)))
        up(job, 0, 4)
        (agent,) = agents(unirun, "node1")
        agents(unirun, "node2")
        os.kill(agent, signal.SIGTERM)
        job.lines("asked node1", 2)
        assert unirun.events("move") == []
        assert "asked node0" not in job.text
        (unirun.root / "go").touch()
        assert [node for _, node, _, _ in up(job, 1, 4)] == ["node0", "node0", "node2", "node2"]
        lines = job.text.splitlines()
        saved = [number for number, line in enumerate(lines) if "saved node1" in line]
        assert len(saved) == 2
        assert max(saved) < min(number for number, line in enumerate(lines) if "asked node0" in line)
        enough(unirun)
        assert job.end().code == 0

    def test_nodes_may_be_lost_one_after_the_other(self, unirun: Unirun, script: Script) -> None:
        """
        1. A job on two of four nodes loses one, and continues on a spare.
        2. It loses that spare, and continues on the other one.
        3. The workers end, and the command ends with 0.
        """
        job, second = one_lost(unirun, script(WAITING), "node0", "node2")
        os.kill(second, signal.SIGKILL)
        assert {node for _, node, _, _ in up(job, 2, 4)} == {"node1", "node3"}
        enough(unirun)
        assert job.end().code == 0

    def test_an_unused_node_may_be_lost(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start(*job_file(unirun, script(WAITING)))
        up(job, 0, 4)
        (agent,) = agents(unirun, "node2")
        os.kill(agent, signal.SIGKILL)
        job.lines("the agent of node node2 is gone.*; the job goes on without it")
        enough(unirun)
        assert job.end().code == 0
        assert unirun.status()["roles"][0]["restarts"] == 0

    def test_a_lost_node_without_a_replacement_ends_the_job_with_the_shortage(
        self, unirun: Unirun, script: Script
    ) -> None:
        job = unirun.start(*job_file(unirun, script(WAITING), nodes=2, spares=0))
        up(job, 0, 4)
        (agent,) = agents(unirun, "node1")
        os.kill(agent, signal.SIGKILL)
        end = job.end()
        assert end.code == 3, end.err
        assert "its ranks fit nowhere else: actor needs room for 4 ranks" in end.err

    def test_a_lost_node_shrinks_a_role_with_a_minimum_count(self, unirun: Unirun, script: Script) -> None:
        """
        1. A role of two to four ranks runs with four on two nodes.
        2. One node is lost: the role restarts with two ranks on the other.
        3. The workers end, and the command ends with 0.
        """
        options = job_file(unirun, script(WAITING), nodes=2, spares=0, actor='count: "2:4"')
        job = unirun.start(*options)
        up(job, 0, 4)
        (agent,) = agents(unirun, "node0")
        os.kill(agent, signal.SIGKILL)
        assert up(job, 1, 2) == [("0", "node1", "0,1", "2"), ("1", "node1", "0,1", "2")]
        eventually(lambda: len(unirun.workers()) == 2, "the status knows the smaller role")
        enough(unirun)
        end = job.end()
        assert end.code == 0, end.err
        assert "actor has room for 2 of 4 ranks" in end.err

    def test_a_lost_node_comes_again_with_another_number_and_the_environment_of_the_job(
        self, unirun: Unirun, script: Script
    ) -> None:
        """
        1. A role of two to four ranks shrinks, as one of two nodes is lost.
        2. The node joins again, from another directory with other variables: the role grows to four ranks, in the
           directory and with the variables of the job.
        3. Life 2 is lost, and life 3 joins. The first node is drained and joins. The role has four ranks each time.
        4. A node whose name the job has is refused.
        """
        options = job_file(unirun, script(JOINING), nodes=2, spares=0, actor='count: "2:4"')
        job = unirun.start(*options, env={"OF_THE_JOB": "1"})

        def nodes(generation: int, count: int) -> list[str]:
            return sorted(job.lines(rf"has {generation} (\S+) 1 - {unirun.root}$", count))

        def joins(node: str) -> str:
            name = unirun.status()["run_id"]
            shell: dict[str, Any] = {"cwd": Path("/"), "env": {"OF_THE_SHELL": "1"}}
            result = unirun("agent", "join", name, "--node-name", node, **shell)
            assert result.code == 0, result.err
            return result.out

        assert nodes(0, 4) == ["node0", "node0", "node1", "node1"]
        for generation, name, after in ((1, "node0", "node0.2"), (3, "node0.2", "node0.3")):
            os.kill(agents(unirun, name)[0], signal.SIGKILL)
            assert nodes(generation, 2) == ["node1", "node1"]
            assert f"{after} joined" in joins("node0")
            assert nodes(generation + 1, 4) == [after, after, "node1", "node1"]
        refused = unirun("agent", "join", unirun.status()["run_id"], "--node-name", "node1")
        assert "the job has a node called node1" in refused.err
        assert unirun("agent", "drain", "node1").code == 0
        assert "node1.2 joined" in joins("node1")
        assert nodes(6, 4) == ["node0.3", "node0.3", "node1.2", "node1.2"]
        enough(unirun)
        assert job.end().code == 0

    @pytest.mark.chaos
    def test_a_node_that_comes_again_makes_elastic_workloads_more_between_two_calls(
        self, unirun: Unirun, script: Script
    ) -> None:
        """
        1. Four workloads run on two nodes. One is lost, and the role starts again with two ranks, to which calls go.
        2. The node joins again: two ranks come between two calls, with the state of the others, which keep their
           processes. No call is lost for that, and all ranks are told the generation.
        """
        script(GROWING, name="growing.py")
        actor = {"count": "2:4", "workload": "growing:Adder", "elastic": True, "max_restarts": 2}
        config = unirun.root / "job.json"
        config.write_text(json.dumps({"trainer": "growing:Asker", "roles": {"actor": actor}}))
        job = unirun.start("--config", config, "--inventory", "fake:nodes=2,devices=2")
        job.lines(r"rows 4 (.*)")
        os.kill(agents(unirun, "node1")[0], signal.SIGKILL)
        (few,) = (json.loads(text) for text in job.lines(r"rows 2 (.*)"))
        name = unirun.status()["run_id"]
        assert unirun("agent", "join", name, "--node-name", "node1").code == 0
        *_, rows = (json.loads(text) for text in job.lines(r"rows 4 (.*)", 2))
        enough(unirun)
        end = job.end()
        assert end.code == 0, end.err
        assert [row[0] for row in rows[:2]] == [row[0] for row in few]
        assert {tuple(row[2:4]) for row in rows} == {(4, 4)}
        assert len({(row[1], row[4]) for row in rows}) == 1
        assert "actor grows from 2 to 4 ranks, and those that it has keep their memory" in end.err
        assert {role["name"]: role["restarts"] for role in unirun.status()["roles"]}["actor"] == 1

    def test_a_lost_node_that_comes_again_makes_resilient_ranks_more_and_they_keep_their_processes(
        self, unirun: Unirun, script: Script
    ) -> None:
        """
        1. Four resilient ranks run on two nodes. One is lost, and two ranks start again on the other node.
        2. The node joins again: two ranks come and take the step of the others, which keep their processes.
        """
        options = job_file(unirun, script(SURVIVING), nodes=2, spares=0, actor='count: "2:4"')
        job = unirun.start(*options)
        job.lines(r"begin 4 (\d) \d+ 0$", 4)
        os.kill(agents(unirun, "node0")[0], signal.SIGKILL)
        before = {*job.lines(r"begin 2 \d (\d+) 0$", 2)}
        # A node that comes before they are in the function makes them start again.
        eventually(lambda: unirun.status()["roles"][0]["phase"] == "running", "two ranks run")
        name = unirun.status()["run_id"]
        assert unirun("agent", "join", name, "--node-name", "node0").code == 0
        steps = job.lines(r"begin 4 \d \d+ ([1-9]\d*)$", 4)
        assert len({*steps}) == 1, job.text
        enough(unirun)
        end = job.end()
        assert end.code == 0, end.err
        ends = [line.split() for line in job.lines(r"end (\d 4 \d+ \d+)$", 4)]
        assert len({step for *_, step in ends}) == 1
        assert before < {pid for _, _, pid, _ in ends}
        assert "actor grows from 2 to 4 ranks, and those that it has keep their memory" in end.err

    def test_a_lost_node_stays_lost_for_the_next_master(self, unirun: Unirun, script: Script) -> None:
        """
        1. A job on two of four nodes loses one, and continues on a spare.
        2. The master is killed, and all agents join the next one.
        3. The spare is lost: the ranks move to the last free node, not to the first lost one.
        4. The workers end, and the command ends with 0.
        """
        job, second = one_lost(unirun, script(WAITING), "node1", "node2")
        masters = Masters(unirun)
        masters.kill()
        # A node that dies before it has joined the next master is waited for until its time is over.
        joined = f"node2 joined (pid {second})"
        eventually(
            lambda: unirun.events("join").count(joined) == 2, "it has joined another master", START_TIMEOUT
        )
        eventually(lambda: masters.status()["epoch"] > 1, "the status has it")
        os.kill(second, signal.SIGKILL)
        assert {node for _, node, _, _ in up(job, 2, 4)} == {"node0", "node3"}
        enough(unirun)
        assert job.end().code == 0


class TestWorkloads:
    def start(self, unirun: Unirun) -> tuple[Running, list[list[list[Any]]]]:
        """A trainer calls four actors on two nodes and two critics on another; returns the first results."""
        unirun.root.joinpath("steps.py").write_text(
            "\n".join(line[4:] for line in CLASSES.splitlines()) + "\n"
        )
        config = unirun.root / "job.yaml"
        config.write_text(
            "spares: 1\ntrainer: steps:Asker\nroles:\n"
            "  actor: {count: 4, workload: 'steps:Adder', max_restarts: 2}\n"
            "  critic: {count: 2, workload: 'steps:Adder', max_restarts: 2}\n"
        )
        job = unirun.start("--config", config, "--inventory", "fake:nodes=4,devices=2")
        (line,) = job.lines("rows (.*)$")
        return job, json.loads(line)

    def test_workloads_on_other_nodes_keep_their_memory_and_meet_the_new_ones(self, unirun: Unirun) -> None:
        """
        1. A trainer calls four actors on two nodes and two critics on a third.
        2. The node of actor rank 0, and of the actors' rendezvous store, is lost.
        3. Its actors restart on the spare node and form a group with the other two, which keep process and
           memory.
        4. The critics are untouched, and the event log names the trainer as waiting.
        """
        job, (actors, critics) = self.start(unirun)
        assert [node for node, *_ in actors] == ["node0", "node0", "node1", "node1"]
        # Where rank 0 is, and with it the store in which they meet.
        (agent,) = agents(unirun, "node0")
        agents(unirun, "node3")
        os.kill(agent, signal.SIGKILL)
        after, others = json.loads(job.lines("rows (.*)$", 2)[1])
        assert [node for node, *_ in after] == ["node3", "node3", "node1", "node1"]
        assert [pid for _, pid, *_ in after[2:]] == [pid for _, pid, *_ in actors[2:]]
        assert min(total for _, _, total, _ in after[2:]) > max(total for _, _, total, _ in after[:2])
        assert {peers for *_, peers in after} == {4}, "all four are in one group"
        assert [pid for _, pid, *_ in others] == [pid for _, pid, *_ in critics], "nobody has touched them"
        enough(unirun)
        assert job.end().code == 0
        (waits,) = unirun.events("affected")
        assert waits.startswith("trainer:0 waits for actor:0-1")
        generations = {role["name"]: role["generation"] for role in unirun.status()["roles"]}
        assert generations == {"trainer": 0, "actor": 1, "critic": 0}

    def test_losing_the_node_of_an_unrecoverable_trainer_ends_the_job(self, unirun: Unirun) -> None:
        job, _ = self.start(unirun)
        (agent,) = agents(unirun, unirun.workers()["trainer:0"]["node"])
        os.kill(agent, signal.SIGKILL)
        end = job.end()
        assert end.code == 137, end.err
        assert "trainer:0 is not recoverable" in end.err


def test_a_rank_that_fails_three_times_on_one_node_is_started_on_another(
    unirun: Unirun, script: Script
) -> None:
    """
    1. A rank fails on its node, and each restart there does. The third one is on the other node.
    2. It ends well there. The move is told with its reason.
    """
    code = script(
        "import os, sys; print('on', os.environ['UNIRUN_NODE']); sys.exit(os.environ['UNIRUN_NODE'] == 'node0')"
    )
    result = unirun("--inventory", "fake:nodes=2,devices=1", "--max-restarts", "5", code)
    assert result.code == 0, result.err
    assert [line.split()[-1] for line in result.out.splitlines() if " on " in f" {line}"] == [
        *["node0"] * 3,
        "node1",
    ]
    assert (
        "it has failed 3 times on node0 within an hour; restart 3 of 5 of role default, with default:0 elsewhere"
        in result.err
    )
    assert "default:0 from node0 to node1" in result.err
