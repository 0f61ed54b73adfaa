"""The agent's state machine, one event at a time: launches and workers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.launcher.agent import KILL, OTHER, TERM, TORCH, Agent, launch, spawn, store, worker
from unirun.errors import Refused
from unirun.launcher.core import UNLINKED_TIMEOUT
from unirun.launcher.environment import FRESH
from unirun.launcher.events import (
    Abandon,
    CallLater,
    FromSpawner,
    GraceOver,
    Launch,
    Leave,
    LinkClosed,
    LinkMessage,
    Phase,
    StartSpawner,
    StillEnding,
    StillWithoutLink,
    ToLink,
    ToLinks,
    ToMaster,
    ToSpawner,
)
from unirun.values import WorkerId
from unirun.wire.messages import Hello, RoleView, Shutdown, StopWorkers, View, WorkerView
from unirun.wire.reports import (
    Boundary,
    CommitJob,
    Forked,
    FromWorker,
    GroupFormed,
    Kill,
    Message,
    Metrics,
    Notice,
    OpenStore,
    Reaped,
    Serving,
    Spawn,
    SpawnerReady,
    SpawnFailed,
    ViewWanted,
    WorkerError,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)


class TestALaunch:
    def test_a_launch_waits_for_a_spawner_that_still_imports(self) -> None:
        agent = Agent(spawners={TORCH: False}).on(launch())
        assert agent.commands == []
        assert {w.phase for w in agent.state.workers.values()} == {Phase.QUEUED}

    def test_a_launch_continues_with_the_store_when_the_spawner_is_ready(self) -> None:
        agent = Agent(spawners={TORCH: False}).on(launch(), store()).spawner(SpawnerReady(1.3))
        assert agent.told(SpawnerReady) == [SpawnerReady(1.3, "n0")]
        orders = [c.message for c in agent.commands if isinstance(c, ToSpawner)]
        assert orders == [OpenStore("actor", 0, 9), spawn(1, "actor", 0), spawn(2, "actor", 1)]
        assert {w.phase for w in agent.state.workers.values()} == {Phase.FORKING}

    def test_a_launch_continues_at_once_with_a_ready_spawner(self) -> None:
        agent = Agent(spawners={TORCH: True}).on(store(), launch())
        assert agent.sent(OpenStore) == [OpenStore("actor", 0, 9)]
        assert len(agent.sent(Spawn)) == 2

    def test_a_launch_starts_missing_spawners_once(self) -> None:
        agent = Agent().on(launch(key=OTHER), store())
        assert [c.key for c in agent.commands if isinstance(c, StartSpawner)] == [OTHER, TORCH]
        assert not agent.on(launch("rollout", first=5, key=OTHER)).has(StartSpawner)

    def test_a_spawner_without_imports_is_not_reported(self) -> None:
        assert Agent(spawners={FRESH: False}).spawner(SpawnerReady(0.001), key=FRESH).commands == []
        for seconds in (0.1, 0.5):
            ready = Agent(spawners={TORCH: False}).spawner(SpawnerReady(seconds))
            assert ready.told(SpawnerReady) == [SpawnerReady(seconds, "n0")]

    def test_a_launch_of_a_live_rank_is_refused_with_a_notice(self) -> None:
        agent = Agent().alive().on(launch(count=3, first=5, incarnation=1))
        assert agent.told(Notice) == [
            Notice("actor:0", "incarnation 1 is not started: 0 lives"),
            Notice("actor:1", "incarnation 1 is not started: 0 lives"),
        ]
        assert agent.sent(Spawn) == [spawn(7, "actor", 2)]

    def test_a_repeated_launch_starts_only_new_incarnations(self) -> None:
        agent = Agent().alive().on(launch(count=3, first=5))
        assert agent.commands == [ToSpawner(TORCH, spawn(7, "actor", 2))]
        agent.spawner(Reaped(1, 1.0, 0, None)).on(launch(count=3, first=9))
        assert agent.commands == [], "nor anybody who has ended since"

    def test_a_launch_of_a_part_of_a_role_leaves_the_other_ranks_alone(self) -> None:
        agent = Agent(in_place=frozenset({"actor"})).alive().spawner(Reaped(1, 1.0, None, KILL))
        assert agent.sent(Kill) == []
        agent.on(store(generation=1), Launch((worker(5, "actor", 0, incarnation=1),)))
        assert [type(c.message) for c in agent.commands if isinstance(c, ToSpawner)] == [OpenStore, Spawn]
        assert {w.who[1:] for w in agent.state.workers.values()} == {(0, 1), (1, 0)}

    def test_a_launch_is_refused_while_the_agent_leaves(self) -> None:
        agent = Agent().alive().on(Abandon("x"), launch("rollout", 1, first=9))
        assert agent.told(WorkerExited) == [
            WorkerExited(WorkerId("rollout", 0, 0), 0.0, None, TERM, "leaving", TERM, note="its agent leaves")
        ]
        assert 9 not in agent.state.workers
        assert agent.spawner(Reaped(1, 1.0, 0, None), Reaped(2, 1.0, 0, None)).has(Leave)


class TestAWorker:
    def test_a_worker_is_reported_when_it_has_a_process(self) -> None:
        agent = Agent().on(launch()).spawner(SpawnerReady(1.0), Forked(1, 101))
        assert agent.told(WorkerStarted) == [WorkerStarted(WorkerId("actor", 0, 0), 101)]
        assert agent.state.workers[1].phase is Phase.ALIVE

    def test_a_worker_is_reported_as_running_once(self) -> None:
        agent = Agent().on(launch()).spawner(SpawnerReady(1.0), Forked(1, 101))
        hello = LinkMessage(1, Hello(WorkerId("actor", 0, 0)))
        assert agent.on(hello).told(WorkerRunning) == [WorkerRunning(WorkerId("actor", 0, 0), 0)]
        assert agent.on(hello).commands == []

    def test_a_worker_may_start_in_a_later_generation_than_ordered(self) -> None:
        agent = Agent().on(store(), launch()).spawner(SpawnerReady(1.0), Forked(1, 101))
        agent.on(View((RoleView("actor", 2, 1, "127.0.0.1:1", "reforming", ()),)))
        agent.on(LinkMessage(1, Hello(WorkerId("actor", 0, 0))))
        assert agent.told(WorkerRunning) == [WorkerRunning(WorkerId("actor", 0, 0), 1)]

    def test_a_program_counts_as_running_when_it_is_forked(self) -> None:
        agent = Agent().on(launch(kind="program")).spawner(SpawnerReady(1.0), Forked(1, 101))
        assert agent.told(WorkerRunning) == [WorkerRunning(WorkerId("actor", 0, 0), 0)]

    def test_a_workers_exit_is_reported_with_its_error(self) -> None:
        error = WorkerError("ValueError: x", "Trace", 5.0)
        agent = Agent().alive().on(LinkMessage(1, error))
        agent.on(FromSpawner(TORCH, Reaped(1, 6.0, 1, None), note="n", tail="the end"))
        assert agent.told(WorkerExited) == [
            WorkerExited(WorkerId("actor", 0, 0), 6.0, 1, None, "own", None, error, "n", "")
        ]
        assert [*agent.state.workers] == [2]

    def test_a_workers_exit_without_an_error_is_reported_with_its_tail(self) -> None:
        agent = Agent().alive().on(FromSpawner(TORCH, Reaped(1, 6.0, None, 11), tail="the end"))
        assert agent.told(WorkerExited)[0].tail == "the end"

    def test_a_worker_that_could_not_be_spawned_has_failed(self) -> None:
        agent = Agent().on(launch()).spawner(SpawnerReady(1.0), SpawnFailed(1, 7.0, "no memory"))
        assert agent.told(WorkerExited) == [
            WorkerExited(WorkerId("actor", 0, 0), 7.0, 1, None, note="no memory")
        ]

    def test_a_worker_that_outlives_its_link_is_reported(self) -> None:
        agent = Agent().alive().on(LinkClosed(1))
        assert agent.commands == [CallLater(UNLINKED_TIMEOUT, StillWithoutLink(1))]
        assert agent.on(StillWithoutLink(1)).told(Notice)[0].source == "actor:0"
        assert agent.spawner(Reaped(1, 1.0, 0, None)).on(StillWithoutLink(1)).commands == []

    def test_a_stopped_worker_whose_link_ends_is_not_reported(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (0,), TERM, 5.0), LinkClosed(1))
        assert not any(
            isinstance(c, CallLater) and isinstance(c.event, StillWithoutLink) for c in agent.commands
        )

    def test_late_messages_about_an_ended_worker_are_ignored(self) -> None:
        agent = Agent().alive().spawner(Reaped(1, 1.0, 0, None))
        late = (
            LinkClosed(1),
            GraceOver(1),
            StillEnding(1, 30.0),
            LinkMessage(1, WorkerError("x", "y", 1.0)),
            LinkMessage(1, Notice("a", "b")),
        )
        assert agent.on(*late, StopWorkers("actor", (0,), TERM, 1.0)).commands == []

    @pytest.mark.parametrize(
        ("said", "told"),
        [
            (
                Serving({"torch": "a:1"}, True),
                FromWorker(WorkerId("actor", 1, 0), Serving({"torch": "a:1"}, True)),
            ),
            (GroupFormed(3), FromWorker(WorkerId("actor", 1, 0), GroupFormed(3))),
            (Metrics({"loss": 0.5}, 7.0), FromWorker(WorkerId("actor", 1, 0), Metrics({"loss": 0.5}, 7.0))),
            (Boundary(), FromWorker(WorkerId("actor", 1, 0), Boundary())),
            (CommitJob(1, 5), FromWorker(WorkerId("actor", 1, 0), CommitJob(1, 5))),
        ],
    )
    def test_a_workers_message_is_forwarded_with_its_name(self, said: Message, told: Message) -> None:
        assert Agent().alive().on(LinkMessage(2, said)).commands == [ToMaster(told)]

    def test_a_spawner_message_about_an_unknown_worker_is_a_notice(self) -> None:
        strangers = (Forked(9, 1), SpawnFailed(9, 1.0, "x"), Reaped(9, 1.0, 0, None))
        agent = Agent().alive().spawner(*strangers)
        assert len(agent.told(Notice)) == len(agent.commands) == 3
        assert "a spawner sent a message about worker 9, which does not exist" in agent.told(Notice)[0].text


def test_an_agent_keeps_a_whole_view_and_forwards_it_unchanged() -> None:
    view = View((RoleView("actor", 2, 0, "127.0.0.1:1", "running", ()),))
    agent = Agent().on(view)
    assert agent.commands == [ToLinks(view)]
    assert agent.state.view is not None
    (actor,) = agent.state.view.roles
    assert actor.workers == (WorkerView(0, 0, "starting", {}), WorkerView(1, 0, "starting", {}))


def test_an_agent_applies_view_changes_and_forwards_them_unchanged() -> None:
    agent = Agent().on(View((RoleView("actor", 2, 0, "a:1", "starting", ()),), 4))
    lost = View((RoleView("actor", 2, 1, "a:1", "reforming", (WorkerView(1, 0, "lost", {}),)),), 5, 4)
    assert agent.on(lost).commands == [ToLinks(lost)]
    assert agent.state.view is not None
    (actor,) = agent.state.view.roles
    assert (actor.generation, actor.phase) == (1, "reforming")
    assert actor.workers == (WorkerView(0, 0, "starting", {}), WorkerView(1, 0, "lost", {}))


@pytest.mark.parametrize("since", [2, 4, 5], ids=["of one before", "of one that was lost", "come twice"])
def test_an_agent_requests_a_whole_view_after_a_gap(since: int) -> None:
    role = RoleView("actor", 2, 0, "a:1", "running", ())
    agent = Agent().on(View((role,), 3))
    before = agent.state
    assert agent.on(View((replace(role, phase="starting"),), since + 1, since)).commands == [
        ToMaster(ViewWanted("n0"))
    ]
    assert agent.state == before
    again = View((replace(role, phase="starting"),), 6)
    assert agent.on(again).commands == [ToLinks(again)]


def test_a_worker_that_requests_a_whole_view_gets_it_from_its_agent() -> None:
    workers = (WorkerView(0, 0, "starting", {}), WorkerView(1, 1, "serving", {"socket": "a"}))
    view = View((RoleView("actor", 2, 0, "a:1", "running", workers),), 3)
    agent = Agent().alive().on(view, LinkMessage(2, ViewWanted()))
    (told,) = [c for c in agent.commands if isinstance(c, ToLink)]
    assert told == ToLink(2, replace(view, roles=(replace(view.roles[0], workers=workers[1:]),)))


def test_an_invalid_message_of_a_spawner_is_refused() -> None:
    with pytest.raises(Refused, match="a spawner sent Shutdown"):
        Agent().spawner(Shutdown())
