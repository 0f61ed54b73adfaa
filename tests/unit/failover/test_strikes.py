"""A rank that fails again and again on one node goes elsewhere, and a node on which several roles fail gets no more."""

from __future__ import annotations

from msgspec.structs import replace

from tests.unit.failover.job import TERM, Job
from tests.unit.failover.multi_node import gone, nodes, places, ranks
from tests.unit.failover.services import Services, program
from unirun.failover.draft import AgentLost, ToAgent
from unirun.failover.policy import STRIKE_SECONDS
from unirun.failover.state import RolePhase
from unirun.spec.job import EntryKind
from unirun.values import WorkerId
from unirun.wire.messages import Drain, StopWorkers
from unirun.wire.reports import FromWorker, GroupFormed, Notice, OpenStore, Resilient, Sick, WorkerError

PEER = WorkerError("RuntimeError: Connection closed by peer [127.0.0.1]:3776", "", 100.0)


def running(
    counts: dict[str, int], *, of: int = 2, devices: int = 2, kinds: dict[str, EntryKind] | None = None
) -> Job:
    """A job with many restarts on so many nodes."""
    job = Job(counts, restarts=dict.fromkeys(counts, 99), inventory=nodes(of, devices), kinds=kinds)
    return job.running()


def on_three_nodes_in_pairs() -> Job:
    """Four ranks, of which each node has two or none."""
    job = Job({"actor": 4}, restarts={"actor": 99}, inventory=nodes(3))
    spec = job.state.spec
    role = replace(spec.role("actor"), per_node=2)
    job.state = replace(job.state, spec=replace(spec, roles=(role,)))
    job.running()
    assert places(job) == ["n0", "n0", "n1", "n1"]
    return job


def fails(job: Job, rank: int, *, role: str = "actor", error: WorkerError | None = None) -> list[str]:
    """A rank fails, and its role is up again. Returns what people were told."""
    notices = [notice.text for notice in job.exits(role, rank, 1, error=error).told(Notice)]
    job.obey().all_run(role)
    return notices


class TestARank:
    def test_a_rank_that_fails_three_times_on_one_node_goes_to_another(self) -> None:
        job = running({"actor": 2})
        assert [fails(job, 1) and places(job) for _ in range(2)] == [["n0", "n0"]] * 2
        told = fails(job, 1)
        assert places(job) == ["n0", "n1"]
        assert told == [
            "actor:1 ended with exit code 1; it has failed 3 times on n0 within an hour; restart 3 of 99 of role actor, "
            "with actor:1 elsewhere",
            "actor:1 from n0 to n1",
        ]
        assert [worker.node for worker in job.state.roles["actor"].workers] == ["n0", "n1"]

    def test_a_rank_that_goes_has_no_failures_where_it_comes(self) -> None:
        job = running({"actor": 2})
        for _ in range(5):
            fails(job, 1)
        assert places(job) == ["n0", "n1"]
        fails(job, 1)
        assert places(job) == ["n0", "n0"]

    def test_a_rank_that_goes_alone_leaves_its_peers_their_memory(self) -> None:
        job = running({"actor": 2}, kinds={"actor": "workload"})
        fails(job, 0)
        fails(job, 0)
        job.exits("actor", 0, 1)
        assert job.state.roles["actor"].phase is RolePhase.REFORMING
        assert ranks(job) == {"n1": [0]}
        assert [worker.node for worker in job.state.roles["actor"].workers] == ["n1", "n0"]

    def test_a_rank_that_goes_takes_the_store_of_its_role_with_it_if_it_is_the_first(self) -> None:
        job = running({"actor": 1})
        fails(job, 0)
        fails(job, 0)
        job.stores_open = False
        job.exits("actor", 0, 1)
        ordered = [
            c.node for c in job.commands if isinstance(c, ToAgent) and isinstance(c.message, OpenStore)
        ]
        assert ordered == ["n1"]

    def test_a_rank_that_goes_takes_the_ranks_with_it_that_a_node_has_together(self) -> None:
        job = on_three_nodes_in_pairs()
        for _ in range(3):
            fails(job, 0)
        assert places(job) == ["n2", "n2", "n1", "n1"]
        assert job.phases() == {"actor": "running"}

    def test_a_rank_takes_none_with_it_that_keeps_its_memory(self) -> None:
        """Scripts in a function that survives: the others of the node would have to end, too. So the rank stays."""
        job = on_three_nodes_in_pairs()
        for rank in range(4):
            job.on(FromWorker(WorkerId("actor", rank, 0), Resilient(inside=True)))
        for generation in (1, 2, 3):
            job.exits("actor", 0, 1).all_run("actor")
            for worker in job.state.roles["actor"].workers:
                who = WorkerId("actor", worker.rank, worker.incarnation)
                job.on(FromWorker(who, GroupFormed(generation)), FromWorker(who, Resilient(inside=True)))
        assert places(job) == ["n0", "n0", "n1", "n1"]
        assert job.phases() == {"actor": "running"}

    def test_a_rank_stays_when_there_is_no_room_and_that_is_told(self) -> None:
        job = running({"actor": 4})
        told = [fails(job, 1) for _ in range(3)][-1]
        assert places(job) == ["n0", "n0", "n1", "n1"]
        assert told[0].startswith(
            "actor:1 ended with exit code 1; it has failed 3 times on n0 within an hour, and no other node has room for "
            "it; restart 3 of 99 of role actor"
        )

    def test_a_rank_stays_on_the_only_node(self) -> None:
        job = running({"actor": 1}, of=1)
        assert fails(job, 0) == ["actor:0 ended with exit code 1; restart 1 of 99 of role actor"]
        fails(job, 0)
        assert fails(job, 0) == ["actor:0 ended with exit code 1; restart 3 of 99 of role actor"]

    def test_a_rank_stays_if_it_fails_seldom(self) -> None:
        job = running({"actor": 1})
        for _ in range(4):
            fails(job, 0)
            job.now += STRIKE_SECONDS / 2
        assert places(job) == ["n0"]

    def test_a_rank_stays_if_it_fails_because_of_a_peer(self) -> None:
        job = running({"actor": 2})
        for _ in range(4):
            fails(job, 1, error=PEER)
        assert places(job) == ["n0", "n0"]

    def test_a_rank_stays_on_nodes_of_which_nothing_is_known(self) -> None:
        job = Services(program(count=1, max_restarts=9), nodes=("n0", "n1"))
        job.up()
        for _ in range(3):
            job.exits("train", 0, 1).all_run("train")
        assert [worker.node for worker in job.state.roles["train"].workers] == ["n0"]


FULL = WorkerError("OSError: [Errno 28] No space left on device: 'model.pt'", "", 100.0)


class TestASickNode:
    def test_ranks_that_find_its_disk_full_leave_it_together_at_the_first_failure(self) -> None:
        job = running({"actor": 2}, devices=4)
        told = fails(job, 1, error=FULL)
        assert places(job) == ["n1", "n1"]
        assert told[0] == "n0 is sick: actor:1 has found a disk full; it gets no more ranks"
        assert "actor:1 ended with exit code 1; n0 is sick; restart 1 of 99" in told[1]
        assert job.state.sick == {"n0": "actor:1 has found a disk full"}
        assert job.state.tainted == ("n0",)

    def test_a_disk_that_is_full_on_a_second_node_may_be_shared(self) -> None:
        job = running({"actor": 1}, of=3)
        fails(job, 0, error=FULL)
        told = fails(job, 0, error=FULL)
        assert told[0] == "n1 is sick: actor:0 has found a disk full"
        assert (places(job), job.state.tainted, [*job.state.sick]) == (["n1"], ("n0",), ["n0"])

    def test_a_workload_leaves_a_node_with_a_broken_device_when_it_fails_and_its_peer_stays(self) -> None:
        job = running({"actor": 2}, kinds={"actor": "workload"})
        job.on(Sick("n0", "device", "GPU 1 is lost"))
        assert [notice.text for notice in job.told(Notice)] == [
            "n0 is sick: GPU 1 is lost; it gets no more ranks"
        ]
        assert "taint: n0 is sick: GPU 1 is lost" in job.records
        assert job.on(Sick("n0", "device", "GPU 1 is lost")).told(Notice) == []
        job.exits("actor", 1, 1)
        assert places(job) == ["n0", "n1"]

    def test_a_rank_of_a_function_that_survives_leaves_it_when_it_fails_and_its_peer_stays(self) -> None:
        job = running({"actor": 2})
        for rank in (0, 1):
            job.on(FromWorker(WorkerId("actor", rank, 0), Resilient(inside=True)))
        job.on(Sick("n0", "device", "GPU 1 is lost")).exits("actor", 1, 1)
        assert (places(job), job.orders(StopWorkers)) == (["n0", "n1"], [])

    def test_the_last_one_is_told_and_keeps_its_ranks(self) -> None:
        job = running({"actor": 1}, of=1).on(Sick("n0", "disk", "the disk of /x is full"))
        assert job.told(Notice)[0].text == "n0 is sick: the disk of /x is full"
        assert job.state.tainted == ()
        fails(job, 0)
        assert places(job) == ["n0"]


class TestANode:
    def tainted(self) -> Job:
        """Two roles fail on n0 of three nodes, which have room for more."""
        job = running({"actor": 1, "rollout": 1}, of=3, devices=4)
        assert places(job) == places(job, "rollout") == ["n0"]
        fails(job, 0)
        assert job.state.tainted == ()
        told = fails(job, 0, role="rollout")
        assert told[0] == "n0 gets no more ranks, as ranks of actor and rollout have failed there"
        return job

    def test_a_node_on_which_ranks_of_two_roles_have_failed_is_tainted(self) -> None:
        job = self.tainted()
        assert job.state.tainted == ("n0",)
        assert places(job) == places(job, "rollout") == ["n0"]

    def test_a_node_that_is_tainted_gets_no_more_ranks(self) -> None:
        job = self.tainted()
        for _ in range(2):
            fails(job, 0)
        (node,) = places(job)
        assert node != "n0"
        job.on(gone(node)).obey()
        assert places(job) == [({"n1", "n2"} - {node}).pop()]

    def test_a_node_that_is_tainted_gets_ranks_when_there_is_no_room_elsewhere(self) -> None:
        job = self.tainted()
        for _ in range(2):
            fails(job, 0)
        for node in ("n1", "n2"):
            job.on(AgentLost(node, "the peer closed the stream")).obey()
        assert places(job) == ["n0"]

    def test_a_node_that_is_tainted_may_be_drained(self) -> None:
        job = self.tainted().on(Drain("n0"))
        for role in ("actor", "rollout"):
            job.exits(role, 0, by=TERM, asked=TERM)
        assert "n0" not in (*places(job), *places(job, "rollout"))
        assert job.state.tainted == ()

    def test_a_node_is_not_tainted_if_it_is_the_last_that_is_not(self) -> None:
        job = running({"actor": 1, "rollout": 1}, of=1)
        fails(job, 0)
        fails(job, 0, role="rollout")
        assert job.state.tainted == ()
