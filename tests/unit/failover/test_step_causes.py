"""The master's reports of a rank that has not failed, and is the cause that its peers have."""

from __future__ import annotations

from tests.unit.failover.job import KILL, TERM, Job
from tests.unit.failover.multi_node import scripts
from unirun.failover.draft import ToWatchers
from unirun.failover.restart_or_end import EVIDENCE_DELAY
from unirun.wire.messages import Drain, StopWorkers
from unirun.wire.reports import Notice, WorkerError

PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242"


def loses_a_peer(job: Job, rank: int) -> Job:
    return job.exits("actor", rank, 1, error=WorkerError(PEER, "", job.now))


def notices(job: Job) -> list[str]:
    said = [command.message for command in job.commands if isinstance(command, ToWatchers)]
    return [message.text for message in said if isinstance(message, Notice)]


class TestARankThatHasNotFailed:
    def test_one_that_left_early_is_the_end_of_the_job_and_its_code_is_1(self) -> None:
        job = loses_a_peer(Job({"actor": 3}).running().exits("actor", 1), 0)
        loses_a_peer(job, 2)
        verdict, cause = (
            job.state.verdict,
            "actor:1 on n0: ended with exit code 0 while actor:0,2 waited for it",
        )
        assert verdict is not None
        assert verdict.code == 1
        assert verdict.reason.startswith(f"{cause}; actor:0 ended with exit code 1")
        assert f"root cause: {cause}" in verdict.report
        assert verdict.error_file == "/logs/actor/0/0/error.json"
        assert verdict.report.endswith("  log: /logs/actor/1/0/stderr.log")
        assert job.state.failures[-1].worker.rank == 1

    def test_one_that_left_early_is_told_when_its_role_starts_again(self) -> None:
        job = loses_a_peer(Job({"actor": 3}, restarts={"actor": 1}).running().exits("actor", 1), 0)
        loses_a_peer(job, 2)
        assert notices(job) == [
            "the cause of its restart: actor:1 on n0: ended with exit code 0 while actor:0,2 waited for it"
        ]

    def test_a_kill_on_another_node_that_is_heard_of_later_is_told_as_the_cause(self) -> None:
        job = loses_a_peer(Job({"actor": 3}, restarts={"actor": 1}).running(), 0)
        job.exits("actor", 2, by=KILL).exits("actor", 1, by=TERM, asked=TERM)
        assert notices(job)[-1] == (
            "the cause of its restart: actor:2 on n0: killed by SIGKILL "
            "(the first of 2 failures that is not about a lost peer)"
        )
        assert "cause: actor:2 on n0: killed by SIGKILL" in job.records
        # It is there once.
        assert [each.worker.rank for each in job.state.failures] == [0, 2]

    def test_none_is_told_when_all_are_about_a_peer_and_the_earlier_one_was_heard_of_later(self) -> None:
        job = loses_a_peer(Job({"actor": 5}, restarts={"actor": 1}).running(), 0)
        job.exits("actor", 1, 1, error=WorkerError(PEER, "", 1.0))
        for rank in (2, 3, 4):
            job.exits("actor", rank, by=TERM, asked=TERM)
        assert not any("the cause" in text for text in notices(job))

    def test_the_first_of_two_with_errors_of_their_own_needs_no_second_word(self) -> None:
        job = Job({"actor": 2}, restarts={"actor": 1}).running().exits("actor", 0, 1).exits("actor", 1, 1)
        assert not any("the cause" in text for text in notices(job))

    def test_one_that_hangs_is_told_when_it_has_obeyed(self) -> None:
        job = loses_a_peer(Job({"actor": 3}, restarts={"actor": 1}).running(), 0)
        loses_a_peer(job, 2).exits("actor", 1, by=TERM, asked=TERM)
        assert "actor:1 on n0: had not failed when actor:0,2 waited for a peer in vain" in notices(job)[-1]

    def test_peers_have_a_moment_to_fail_too(self) -> None:
        for restarts in ({}, {"actor": 1}):
            job = loses_a_peer(Job({"actor": 3}, restarts=restarts).running(), 0)
            assert job.orders(StopWorkers) == [StopWorkers("actor", (1, 2), TERM, 30.0, EVIDENCE_DELAY)]

    def test_peers_that_have_come_back_have_no_moment_more_when_they_move(self) -> None:
        job = loses_a_peer(scripts(4, restarts=1).running(), 0).obey().all_run("actor").on(Drain("n1"))
        assert {order.after for order in job.orders(StopWorkers)} == {0.0}

    def test_other_roles_are_told_at_once(self) -> None:
        job = loses_a_peer(Job({"actor": 2, "rollout": 1}).running(), 0)
        assert {order.role: order.after for order in job.orders(StopWorkers)} == {
            "actor": EVIDENCE_DELAY,
            "rollout": 0.0,
        }

    def test_one_that_has_failed_long_before_has_not_stood_by(self) -> None:
        job = Job({"actor": 2}).running().exits("actor", 0, 7)
        job.now += 8.0
        loses_a_peer(job, 1)
        assert job.state.verdict is not None
        assert "had not failed" not in job.state.verdict.report
        assert job.state.failures[-1].worker.rank == 1

    def test_peers_of_one_that_failed_by_itself_are_told_at_once(self) -> None:
        job = Job({"actor": 3}, restarts={"actor": 1}).running().exits("actor", 0, 1)
        assert job.orders(StopWorkers) == [StopWorkers("actor", (1, 2), TERM, 30.0)]
