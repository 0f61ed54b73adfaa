"""The common restart point of a job, which its roles commit together."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.failover.job import Job
from tests.unit.failover.services import Services, program, service
from unirun.failover.context import decode, encode, urgent
from unirun.failover.generations import MAX_PENDING, taking_part
from unirun.failover.status_views import status_of
from unirun.failover.takeover import resume
from unirun.values import WorkerId
from unirun.wire.messages import StartRole
from unirun.wire.reports import CommitJob, FromWorker, MasterReply, Notice


def two_roles(**restarts: int) -> Job:
    """A job with 2 actors and 1 critic, which may restart twice."""
    job = Job({"actor": 2, "critic": 1}, restarts=restarts)
    job.state = replace(job.state, spec=replace(job.state.spec, max_job_restarts=2))
    return job.running()


def commits(job: Job, name: str, rank: int, step: int, *roles: str) -> MasterReply:
    """The answer to a rank that commits `step`."""
    who = WorkerId(name, rank, job.state.roles[name].workers[rank].incarnation)
    job.on(FromWorker(who, CommitJob(7, step, roles)))
    [answer] = job.orders(MasterReply)
    assert (answer.worker, answer.number) == (who, 7)
    return answer


def all_commit(job: Job, step: int) -> Job:
    for role in job.state.roles.values():
        for worker in role.workers:
            commits(job, role.name, worker.rank, step)
    return job


class TestACommit:
    def test_a_commit_stands_when_every_rank_of_every_role_has_it(self) -> None:
        job = two_roles()
        assert commits(job, "actor", 0, 10).data is None
        assert commits(job, "critic", 0, 10).data is None
        assert commits(job, "critic", 0, 20).data is None
        assert commits(job, "actor", 1, 10).data == "10"
        assert (
            "the job can go back to step 10, which every rank of actor, critic has committed" in job.records
        )
        assert [each.step for each in job.state.commits.pending] == [20]
        assert commits(job, "actor", 0, 20).data == "10"
        assert commits(job, "actor", 1, 20).data == "20"
        assert status_of(job.state, {}, {}).committed == 20

    def test_a_commit_that_comes_again_or_late_changes_nothing(self) -> None:
        job = all_commit(two_roles(), 20)
        before = job.state
        assert commits(job, "actor", 0, 20).data == commits(job, "critic", 0, 10).data == "20"
        assert job.state.commits == before.commits
        commits(job, "actor", 0, 30)
        before = job.state
        commits(job, "actor", 0, 30)
        assert not urgent(before, job.state)

    def test_a_late_commit_of_a_job_with_one_rank_does_not_go_back(self) -> None:
        job = Job({"actor": 1}).running()
        assert [commits(job, "actor", 0, step).data for step in (0, 20, 10)] == ["0", "20", "20"]
        assert job.state.commits.step == 20

    def test_a_commit_is_urgent(self) -> None:
        """Its answer waits until it is in the store."""
        job = two_roles()
        before = job.state
        commits(job, "actor", 0, 10)
        assert urgent(before, job.state)

    def test_a_commit_is_known_to_the_next_master(self) -> None:
        job = two_roles()
        commits(job, "actor", 0, 10)
        commits(job, "actor", 1, 10)
        job.state, _ = resume(decode(encode(job.state)), job.now)
        assert commits(job, "critic", 0, 10).data == "10"

    def test_a_commit_with_other_roles_than_those_before_is_refused(self) -> None:
        job = two_roles()
        commits(job, "actor", 0, 10, "actor")
        assert commits(job, "actor", 1, 10).data == "10"
        assert "critic is not one of the roles" in commits(job, "critic", 0, 10).problem
        problem = commits(job, "actor", 0, 20, "critic", "actor").problem
        assert problem == "ranks have committed with the roles actor, and actor:0 with critic, actor"
        assert (
            commits(job, "actor", 0, 20, "actors").problem
            == "this job has no role actors: it has actor, critic"
        )
        assert commits(job, "actor", 0, -1).problem

    def test_a_commit_concerns_all_roles_but_services_and_programs(self) -> None:
        assert taking_part(Services(service(), program()).state) == ()
        assert taking_part(two_roles().state) == ("actor", "critic")

    def test_a_commit_of_a_rank_that_has_ended_is_not_answered(self) -> None:
        job = two_roles().exits("actor", 0).on(FromWorker(WorkerId("actor", 0, 0), CommitJob(1, 5)))
        assert job.orders(MasterReply) == []

    def test_a_role_that_is_far_ahead_keeps_its_latest_steps(self) -> None:
        job = two_roles()
        for step in range(MAX_PENDING + 10):
            commits(job, "critic", 0, step)
        assert [each.step for each in job.state.commits.pending] == [*range(10, MAX_PENDING + 10)]
        for rank in range(2):
            commits(job, "actor", rank, 9)
            commits(job, "actor", rank, 10)
        assert job.state.commits.step == 10


class TestARestart:
    def test_a_restart_of_the_job_goes_back_to_the_step_that_all_have(self) -> None:
        job = all_commit(two_roles(), 10)
        commits(job, "actor", 0, 20)
        job.exits("critic", 0, 1)
        text = "the job goes back to step 10, which all of actor, critic have"
        assert text in [notice.text for notice in job.told(Notice)]
        assert text in job.records
        job.exits("actor", 0, by=15, asked=15).exits("actor", 1, by=15, asked=15)
        assert [order.committed for order in job.orders(StartRole)] == [10, 10]
        # The actor before has saved that step, and this one has not.
        for name in ("actor", "critic"):
            job.all_run(name)
        commits(job, "actor", 1, 20)
        assert commits(job, "critic", 0, 20).data == "10"
        assert commits(job, "actor", 0, 20).data == "20"

    def test_a_rank_that_is_told_to_end_does_not_commit(self) -> None:
        job = all_commit(two_roles(), 10)
        commits(job, "actor", 0, 20)
        commits(job, "critic", 0, 20)
        job.exits("critic", 0, 1)
        assert commits(job, "actor", 1, 20).data == "10"
        assert job.state.commits.pending == ()

    def test_a_restart_of_a_role_forgets_what_only_some_have(self) -> None:
        job = two_roles(actor=1)
        commits(job, "actor", 0, 10)
        commits(job, "critic", 0, 10)
        job.exits("actor", 1, 1).obey().all_run("actor")
        assert commits(job, "actor", 1, 10).data is None
        assert commits(job, "actor", 0, 10).data == "10"

    def test_a_worker_is_told_of_no_step_before_the_first_commit(self) -> None:
        job = Job({"actor": 1}).launched()
        assert [order.committed for order in job.orders(StartRole)] == [-1]


@given(
    st.lists(
        st.tuples(st.sampled_from(["actor:0", "actor:1", "critic:0", "x"]), st.integers(0, 5)), max_size=40
    )
)
def test_a_step_stands_only_if_every_rank_has_committed_it_since_its_role_began(
    what: list[tuple[str, int]],
) -> None:
    """``x``: the actors start again. The step that stands only grows."""
    job = two_roles(actor=50)
    have: dict[str, set[int]] = defaultdict(set)
    for who, step in what:
        before = job.state.commits.step
        if who == "x":
            job.exits("actor", 0, 1).obey().all_run("actor")
            have["actor:0"], have["actor:1"] = set(), set()
            assert job.state.commits.step == before
            continue
        name, _, rank = who.partition(":")
        commits(job, name, int(rank), step)
        have[who].add(step)
        now = job.state.commits.step
        common = have["actor:0"] & have["actor:1"] & have["critic:0"]
        assert now == max([before, *common])
