"""The agent's decisions, one event at a time: launches, and what becomes of their workers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.launcher.agent import KILL, OTHER, TERM, TORCH, Agent, launch, spawn, store, worker
from unirun.errors import Refused
from unirun.launcher.environment import FRESH
from unirun.launcher.events import (
    Abandon,
    After,
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
from unirun.launcher.worker_messages import ENDING
from unirun.values import WorkerId
from unirun.wire.messages import Hello, Message, RoleView, Shutdown, StopWorkers, View, WorkerView
from unirun.wire.reports import (
    FromWorker,
    GroupFormed,
    Metrics,
    Notice,
    Serving,
    SpawnerReady,
    ViewWanted,
    WorkerError,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)
from unirun.wire.spawning import (
    Forked,
    Kill,
    Preloaded,
    Reaped,
    ServeStore,
    Spawn,
    SpawnFailed,
)


class TestALaunch:
    def test_waits_for_a_spawner_that_still_imports(self) -> None:
        agent = Agent(spawners={TORCH: False}).on(launch())
        assert agent.commands == []
        assert {w.phase for w in agent.state.workers.values()} == {Phase.QUEUED}

    def test_goes_on_when_the_spawner_is_ready_the_store_first(self) -> None:
        agent = Agent(spawners={TORCH: False}).on(launch(), store()).spawner(Preloaded(1.3))
        assert agent.told(SpawnerReady) == [SpawnerReady("n0", 1.3)]
        orders = [c.message for c in agent.commands if isinstance(c, ToSpawner)]
        assert orders == [ServeStore("actor", 0, 9), spawn(1, "actor", 0), spawn(2, "actor", 1)]
        assert {w.phase for w in agent.state.workers.values()} == {Phase.FORKING}

    def test_goes_on_at_once_when_it_is_ready_already(self) -> None:
        agent = Agent(spawners={TORCH: True}).on(store(), launch())
        assert agent.sent(ServeStore) == [ServeStore("actor", 0, 9)]
        assert len(agent.sent(Spawn)) == 2

    def test_starts_the_spawners_that_are_missing_once(self) -> None:
        agent = Agent().on(launch(key=OTHER), store())
        assert [c.key for c in agent.commands if isinstance(c, StartSpawner)] == [OTHER, TORCH]
        assert not agent.on(launch("rollout", first=5, key=OTHER)).has(StartSpawner)

    def test_says_nothing_about_a_spawner_that_imports_nothing(self) -> None:
        assert Agent(spawners={FRESH: False}).spawner(Preloaded(0.001), key=FRESH).commands == []

    def test_of_a_rank_whose_worker_lives_is_refused_with_a_notice(self) -> None:
        agent = Agent().alive().on(launch(count=3, first=5, incarnation=1))
        assert agent.told(Notice) == [
            Notice("actor:0", "incarnation 1 is not started: 0 lives"),
            Notice("actor:1", "incarnation 1 is not started: 0 lives"),
        ]
        assert agent.sent(Spawn) == [spawn(7, "actor", 2)]

    def test_that_comes_again_starts_only_whom_it_has_not_started_before(self) -> None:
        agent = Agent().alive().on(launch(count=3, first=5))
        assert agent.commands == [ToSpawner(TORCH, spawn(7, "actor", 2))]
        agent.spawner(Reaped(1, 1.0, 0, None)).on(launch(count=3, first=9))
        assert agent.commands == [], "nor anybody who has ended since"

    def test_of_a_part_of_a_role_leaves_the_others_alone(self) -> None:
        agent = Agent(in_place=frozenset({"actor"})).alive().spawner(Reaped(1, 1.0, None, KILL))
        assert agent.sent(Kill) == []
        agent.on(store(generation=1), Launch((worker(5, "actor", 0, incarnation=1),)))
        assert [type(c.message) for c in agent.commands if isinstance(c, ToSpawner)] == [ServeStore, Spawn]
        assert {w.who[1:] for w in agent.state.workers.values()} == {(0, 1), (1, 0)}

    def test_is_refused_while_the_agent_leaves(self) -> None:
        agent = Agent().alive().on(Abandon("x"), launch("rollout", 1, first=9))
        assert agent.told(WorkerExited) == [
            WorkerExited(WorkerId("rollout", 0, 0), 0.0, None, TERM, "leaving", TERM, note="its agent leaves")
        ]
        assert 9 not in agent.state.workers
        assert agent.spawner(Reaped(1, 1.0, 0, None), Reaped(2, 1.0, 0, None)).has(Leave)


class TestAWorker:
    def test_is_told_of_when_it_has_a_process(self) -> None:
        agent = Agent().on(launch()).spawner(Preloaded(1.0), Forked(1, 101))
        assert agent.told(WorkerStarted) == [WorkerStarted(WorkerId("actor", 0, 0), 101)]
        assert agent.state.workers[1].phase is Phase.ALIVE

    def test_runs_when_it_says_so_once(self) -> None:
        agent = Agent().on(launch()).spawner(Preloaded(1.0), Forked(1, 101))
        hello = LinkMessage(1, Hello(WorkerId("actor", 0, 0), 101, True))
        assert agent.on(hello).told(WorkerRunning) == [WorkerRunning(WorkerId("actor", 0, 0), 0)]
        assert agent.on(hello).commands == []

    def test_that_was_started_for_one_generation_may_be_welcomed_in_the_next(self) -> None:
        agent = Agent().on(store(), launch()).spawner(Preloaded(1.0), Forked(1, 101))
        agent.on(View((RoleView("actor", 2, 1, "127.0.0.1:1", "reforming", ()),)))
        agent.on(LinkMessage(1, Hello(WorkerId("actor", 0, 0), 101, True)))
        assert agent.told(WorkerRunning) == [WorkerRunning(WorkerId("actor", 0, 0), 1)]

    def test_that_is_a_program_runs_when_it_is_forked(self) -> None:
        agent = Agent().on(launch(kind="program")).spawner(Preloaded(1.0), Forked(1, 101))
        assert agent.told(WorkerRunning) == [WorkerRunning(WorkerId("actor", 0, 0), 0)]

    def test_that_ends_is_told_of_with_its_error(self) -> None:
        error = WorkerError("ValueError: x", "Trace", 5.0)
        agent = Agent().alive().on(LinkMessage(1, error))
        agent.on(FromSpawner(TORCH, Reaped(1, 6.0, 1, None), note="n", tail="the end"))
        assert agent.told(WorkerExited) == [
            WorkerExited(WorkerId("actor", 0, 0), 6.0, 1, None, "own", None, error, "n", "")
        ]
        assert [*agent.state.workers] == [2]

    def test_that_ends_without_a_word_is_told_of_with_its_tail(self) -> None:
        agent = Agent().alive().on(FromSpawner(TORCH, Reaped(1, 6.0, None, 11), tail="the end"))
        assert agent.told(WorkerExited)[0].tail == "the end"

    def test_that_could_not_be_made_has_failed(self) -> None:
        agent = Agent().on(launch()).spawner(Preloaded(1.0), SpawnFailed(1, 7.0, "no memory"))
        assert agent.told(WorkerExited) == [
            WorkerExited(WorkerId("actor", 0, 0), 7.0, 1, None, note="no memory")
        ]

    def test_whose_link_ends_and_who_lives_on_is_noticed(self) -> None:
        agent = Agent().alive().on(LinkClosed(1))
        assert agent.commands == [After(ENDING, StillWithoutLink(1))]
        assert agent.on(StillWithoutLink(1)).told(Notice)[0].source == "actor:0"
        assert agent.spawner(Reaped(1, 1.0, 0, None)).on(StillWithoutLink(1)).commands == []

    def test_whose_link_ends_because_it_was_told_to_end_is_not(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (0,), TERM, 5.0), LinkClosed(1))
        assert not any(isinstance(c, After) and isinstance(c.event, StillWithoutLink) for c in agent.commands)

    def test_that_is_gone_may_be_heard_of_late(self) -> None:
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
        ],
    )
    def test_is_quoted_with_its_name(self, said: Message, told: Message) -> None:
        assert Agent().alive().on(LinkMessage(2, said)).commands == [ToMaster(told)]

    def test_that_nobody_knows_is_a_notice(self) -> None:
        strangers = (Forked(9, 1), SpawnFailed(9, 1.0, "x"), Reaped(9, 1.0, 0, None))
        agent = Agent().alive().spawner(*strangers)
        assert len(agent.told(Notice)) == len(agent.commands) == 3
        assert "a spawner speaks of worker 9, which is not there" in agent.told(Notice)[0].text


def test_a_view_is_kept_with_all_workers_and_passed_on_as_it_came() -> None:
    view = View((RoleView("actor", 2, 0, "127.0.0.1:1", "running", ()),))
    agent = Agent().on(view)
    assert agent.commands == [ToLinks(view)]
    (actor,) = agent.state.view.roles
    assert actor.workers == (WorkerView(0, 0, "starting", {}), WorkerView(1, 0, "starting", {}))


def test_changes_of_a_view_are_put_together_and_passed_on_as_they_came() -> None:
    agent = Agent().on(View((RoleView("actor", 2, 0, "a:1", "starting", ()),), 4))
    lost = View((RoleView("actor", 2, 1, "a:1", "reforming", (WorkerView(1, 0, "lost", {}),)),), 5, 4)
    assert agent.on(lost).commands == [ToLinks(lost)]
    (actor,) = agent.state.view.roles
    assert (actor.generation, actor.phase) == (1, "reforming")
    assert actor.workers == (WorkerView(0, 0, "starting", {}), WorkerView(1, 0, "lost", {}))


@pytest.mark.parametrize("since", [2, 4, 5], ids=["of one before", "of one that was lost", "come twice"])
def test_changes_of_another_view_are_not_taken_and_a_whole_view_is_asked_for(since: int) -> None:
    role = RoleView("actor", 2, 0, "a:1", "running", ())
    agent = Agent().on(View((role,), 3))
    before = agent.state
    assert agent.on(View((replace(role, phase="starting"),), since + 1, since)).commands == [
        ToMaster(ViewWanted("n0"))
    ]
    assert agent.state == before
    again = View((replace(role, phase="starting"),), 6)
    assert agent.on(again).commands == [ToLinks(again)]


def test_a_worker_that_has_missed_something_gets_a_whole_view_of_its_agent() -> None:
    workers = (WorkerView(0, 0, "starting", {}), WorkerView(1, 1, "serving", {"socket": "a"}))
    view = View((RoleView("actor", 2, 0, "a:1", "running", workers),), 3)
    agent = Agent().alive().on(view, LinkMessage(2, ViewWanted()))
    (told,) = [c for c in agent.commands if isinstance(c, ToLink)]
    assert told == ToLink(2, replace(view, roles=(replace(view.roles[0], workers=workers[1:]),)))


def test_a_spawner_that_talks_nonsense_is_refused() -> None:
    with pytest.raises(Refused, match="a spawner sent Shutdown"):
        Agent().spawner(Shutdown())
