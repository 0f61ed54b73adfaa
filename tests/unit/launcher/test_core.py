"""The agent's decisions, one event at a time, and whatever holds for any order of events."""

from __future__ import annotations

import random
import signal

import pytest

from unirun.errors import IllegalTransition
from unirun.launcher.core import LOST_GRACE, step
from unirun.launcher.environment import FRESH, SpawnerKey
from unirun.launcher.events import (
    Abandon,
    After,
    Command,
    Event,
    FromSpawner,
    FromWorker,
    GraceOver,
    Instruction,
    KillGroups,
    Launch,
    Leave,
    LinkClosed,
    Order,
    Phase,
    SpawnerDown,
    StartSpawner,
    StillWithoutLink,
    Store,
    ToMaster,
    ToSpawner,
    ToWorkers,
    Worker,
)
from unirun.launcher.state import AgentState
from unirun.wire.messages import Hello, Message, RoleView, Shutdown, StopWorkers, View
from unirun.wire.reports import (
    GroupFormed,
    Metrics,
    Notice,
    Serving,
    SpawnerReady,
    WorkerError,
    WorkerExited,
    WorkerFormed,
    WorkerMetrics,
    WorkerRunning,
    WorkerServing,
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
    StoreEnded,
    StoreOpened,
)

TERM, KILL, INT = int(signal.SIGTERM), int(signal.SIGKILL), int(signal.SIGINT)
TORCH: SpawnerKey = (("OMP_NUM_THREADS", "1"),)
OTHER: SpawnerKey = (("OMP_NUM_THREADS", "2"),)


def spawn(number: int, role: str, rank: int, kind: str = "script") -> Spawn:
    return Spawn(number, f"{role}:{rank}", kind, "a.py", (), False, {}, "/", "/o", "/e")


def worker(
    number: int, role: str, rank: int, *, key: SpawnerKey = TORCH, incarnation: int = 0, kind: str = "script"
) -> Worker:
    return Worker(number, role, rank, incarnation, key, spawn(number, role, rank, kind))


def launch(
    role: str = "actor", count: int = 2, *, first: int = 1, incarnation: int = 0, **more: object
) -> Launch:
    workers = tuple(worker(first + r, role, r, incarnation=incarnation, **more) for r in range(count))  # type: ignore[arg-type]
    return Launch(workers)


def store(role: str = "actor", generation: int = 0, key: SpawnerKey = TORCH) -> Store:
    return Store(key, ServeStore(role, generation, 9))


class Agent:
    """An agent under test."""

    def __init__(self, **state: object) -> None:
        self.state = AgentState("n0", **state)  # type: ignore[arg-type]
        self.commands: list[Command] = []

    def on(self, *events: Event | Instruction) -> Agent:
        """Apply events; what a master wants comes from the term 1."""
        self.commands = []
        for event in events:
            event = Order(1, event) if isinstance(event, Instruction) else event
            self.state, commands = step(self.state, event)
            self.commands += commands
        return self

    def spawner(self, *messages: Message, key: SpawnerKey = TORCH) -> Agent:
        return self.on(*(FromSpawner(key, message) for message in messages))

    def alive(self, count: int = 2) -> Agent:
        """Workers of role actor, with processes, in the user's code."""
        self.on(store(), launch(count=count)).spawner(Preloaded(1.0))
        for number in range(1, count + 1):
            self.spawner(Forked(number, 100 + number))
            self.on(FromWorker(number, Hello("actor", number - 1, 0, 100 + number, True)))
        return self

    def told(self, kind: type) -> list:
        return [c.message for c in self.commands if isinstance(c, ToMaster) and isinstance(c.message, kind)]

    def sent(self, kind: type, key: SpawnerKey = TORCH) -> list:
        chosen = [c for c in self.commands if isinstance(c, ToSpawner) and c.key == key]
        return [c.message for c in chosen if isinstance(c.message, kind)]

    def has(self, kind: type) -> bool:
        return any(isinstance(c, kind) for c in self.commands)


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
        assert {(w.rank, w.incarnation) for w in agent.state.workers.values()} == {(0, 1), (1, 0)}

    def test_is_refused_while_the_agent_leaves(self) -> None:
        agent = Agent().alive().on(Abandon("x"), launch("rollout", 1, first=9))
        assert agent.told(WorkerExited) == [
            WorkerExited("rollout", 0, 0, 0.0, None, TERM, "leaving", TERM, note="its agent leaves")
        ]
        assert 9 not in agent.state.workers
        assert agent.spawner(Reaped(1, 1.0, 0, None), Reaped(2, 1.0, 0, None)).has(Leave)


class TestAWorker:
    def test_is_told_of_when_it_has_a_process(self) -> None:
        agent = Agent().on(launch()).spawner(Preloaded(1.0), Forked(1, 101))
        assert agent.told(WorkerStarted) == [WorkerStarted("n0", "actor", 0, 0, 101)]
        assert agent.state.workers[1].phase is Phase.ALIVE

    def test_runs_when_it_says_so_once(self) -> None:
        agent = Agent().on(launch()).spawner(Preloaded(1.0), Forked(1, 101))
        hello = FromWorker(1, Hello("actor", 0, 0, 101, True))
        assert agent.on(hello).told(WorkerRunning) == [WorkerRunning("actor", 0, 0, 0)]
        assert agent.on(hello).commands == []

    def test_that_was_started_for_one_generation_may_be_welcomed_in_the_next(self) -> None:
        agent = Agent().on(store(), launch()).spawner(Preloaded(1.0), Forked(1, 101))
        agent.on(View((RoleView("actor", 2, 1, "127.0.0.1:1", "reforming", ()),)))
        agent.on(FromWorker(1, Hello("actor", 0, 0, 101, True)))
        assert agent.told(WorkerRunning) == [WorkerRunning("actor", 0, 0, 1)]

    def test_that_is_a_program_runs_when_it_is_forked(self) -> None:
        agent = Agent().on(launch(kind="program")).spawner(Preloaded(1.0), Forked(1, 101))
        assert agent.told(WorkerRunning) == [WorkerRunning("actor", 0, 0, 0)]

    def test_that_ends_is_told_of_with_its_error(self) -> None:
        error = WorkerError("ValueError: x", "Trace", 5.0)
        agent = Agent().alive().on(FromWorker(1, error))
        agent.on(FromSpawner(TORCH, Reaped(1, 6.0, 1, None), note="n", tail="the end"))
        assert agent.told(WorkerExited) == [
            WorkerExited("actor", 0, 0, 6.0, 1, None, "own", None, error, "n", "")
        ]
        assert [*agent.state.workers] == [2]

    def test_that_has_failed_has_a_grace_to_end_and_stays_a_failure_when_it_is_killed(self) -> None:
        error = WorkerError("ValueError: x", "Trace", 5.0)
        agent = Agent().alive().on(FromWorker(1, error))
        assert agent.commands == [After(30.0, GraceOver(1))]
        assert agent.on(GraceOver(1)).sent(Kill) == [Kill(1, KILL)]
        (end,) = agent.spawner(Reaped(1, 36.0, None, KILL)).told(WorkerExited)
        assert (end.signal, end.cause, end.sent, end.error) == (KILL, "own", None, error)

    def test_that_ends_without_a_word_is_told_of_with_its_tail(self) -> None:
        agent = Agent().alive().on(FromSpawner(TORCH, Reaped(1, 6.0, None, 11), tail="the end"))
        assert agent.told(WorkerExited)[0].tail == "the end"

    def test_that_could_not_be_made_has_failed(self) -> None:
        agent = Agent().on(launch()).spawner(Preloaded(1.0), SpawnFailed(1, 7.0, "no memory"))
        assert agent.told(WorkerExited) == [WorkerExited("actor", 0, 0, 7.0, 1, None, note="no memory")]

    def test_whose_link_ends_and_who_lives_on_is_noticed(self) -> None:
        agent = Agent().alive().on(LinkClosed(1))
        assert agent.commands == [After(0.5, StillWithoutLink(1))]
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
            FromWorker(1, WorkerError("x", "y", 1.0)),
            FromWorker(1, Notice("a", "b")),
        )
        assert agent.on(*late, StopWorkers("actor", (0,), TERM, 1.0)).commands == []

    @pytest.mark.parametrize(
        ("said", "told"),
        [
            (Serving({"torch": "a:1"}, True), WorkerServing("actor", 1, 0, {"torch": "a:1"}, True)),
            (GroupFormed(3), WorkerFormed("actor", 1, 0, 3)),
            (Metrics({"loss": 0.5}, 7.0), WorkerMetrics("actor", 1, 0, {"loss": 0.5}, 7.0)),
        ],
    )
    def test_is_quoted_with_its_name(self, said: Message, told: Message) -> None:
        assert Agent().alive().on(FromWorker(2, said)).commands == [ToMaster(told)]

    def test_that_nobody_knows_is_a_notice(self) -> None:
        strangers = (Forked(9, 1), SpawnFailed(9, 1.0, "x"), Reaped(9, 1.0, 0, None))
        agent = Agent().alive().spawner(*strangers)
        assert len(agent.told(Notice)) == len(agent.commands) == 3
        assert "a spawner speaks of worker 9, which is not there" in agent.told(Notice)[0].text


class TestAStop:
    def test_is_term_then_kill(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (0, 1), TERM, 5.0))
        assert agent.sent(Kill) == [Kill(1, TERM), Kill(2, TERM)]
        assert [c for c in agent.commands if isinstance(c, After)] == [
            After(5.0, GraceOver(1)),
            After(5.0, GraceOver(2)),
        ]
        agent.spawner(Reaped(1, 1.0, None, TERM))
        assert [(e.cause, e.sent) for e in agent.told(WorkerExited)] == [("order", TERM)]
        agent.on(GraceOver(1), GraceOver(2))
        assert agent.sent(Kill) == [Kill(2, KILL)]
        assert "did not end in its grace period" in agent.told(Notice)[0].text
        assert agent.spawner(Reaped(2, 2.0, None, KILL)).told(WorkerExited)[0].sent == KILL

    def test_with_kill_waits_for_nothing(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (1,), KILL, 0.0))
        assert agent.commands == [ToSpawner(TORCH, Kill(2, KILL))]

    def test_that_comes_again_sends_no_second_signal_and_may_leave_less_time(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (0,), TERM, 5.0))
        agent.on(StopWorkers("actor", (0,), TERM, 1.0))
        assert agent.commands == [After(1.0, GraceOver(1))]
        assert agent.on(StopWorkers("actor", (0,), INT, 1.0)).sent(Kill) == [Kill(1, INT)]

    def test_of_a_worker_that_was_killed_does_nothing(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (0,), KILL, 0.0))
        assert agent.on(StopWorkers("actor", (0,), TERM, 5.0)).commands == []
        assert agent.spawner(Reaped(1, 1.0, None, KILL)).told(WorkerExited)[0].sent == KILL

    def test_of_a_worker_that_waits_for_its_spawner_needs_no_signal(self) -> None:
        agent = Agent(spawners={TORCH: False}).on(launch(), StopWorkers("actor", (0,), TERM, 5.0))
        assert agent.told(WorkerExited) == [
            WorkerExited("actor", 0, 0, 0.0, None, TERM, "order", TERM, note="it had not started")
        ]
        assert [m.id for m in agent.spawner(Preloaded(1.0)).sent(Spawn)] == [2]

    def test_of_a_worker_that_is_being_forked_follows_its_order(self) -> None:
        agent = Agent(spawners={TORCH: True}).on(launch(count=1), StopWorkers("actor", (0,), TERM, 5.0))
        orders = [c.message for c in agent.commands if isinstance(c, ToSpawner)]
        assert orders == [spawn(1, "actor", 0), Kill(1, TERM)]
        assert agent.spawner(Forked(1, 101)).state.workers[1].sent == TERM

    def test_of_a_rank_that_is_not_here_does_nothing(self) -> None:
        assert Agent().alive().on(StopWorkers("rollout", (0, 7), TERM, 5.0)).commands == []


class TestLeaving:
    def test_without_workers_is_immediate(self) -> None:
        assert Agent(spawners={TORCH: False}).on(Shutdown()).commands == [Leave()]

    def test_at_the_jobs_end_kills(self) -> None:
        agent = Agent().alive().on(Shutdown())
        assert agent.sent(Kill) == [Kill(1, KILL), Kill(2, KILL)]
        assert not agent.has(Leave)
        assert agent.spawner(Reaped(1, 1.0, None, 9), Reaped(2, 1.0, None, 9)).commands[-1] == Leave()

    def test_without_a_master_gives_a_short_grace(self) -> None:
        agent = Agent().alive(1).on(Abandon("gone"))
        assert agent.commands == [ToSpawner(TORCH, Kill(1, TERM)), After(LOST_GRACE, GraceOver(1))]
        assert LOST_GRACE < 1.0

    def test_drops_what_has_not_started(self) -> None:
        agent = Agent(spawners={TORCH: False}).on(launch(), Abandon("gone"))
        assert len(agent.told(WorkerExited)) == 2
        assert agent.commands[-1] == Leave()


class TestAStoreThatDies:
    def test_makes_its_role_fail_as_nobody_could_come_late(self) -> None:
        agent = Agent().alive().spawner(StoreEnded("actor", 0, 5.0, "its process was killed"))
        assert agent.sent(Kill) == [Kill(1, KILL), Kill(2, KILL)]
        (end,) = agent.spawner(Reaped(1, 6.0, None, KILL)).told(WorkerExited)
        assert (end.cause, end.sent) == ("doom", None)
        assert end.note == "the store of its role is gone: its process was killed"

    def test_is_of_no_interest_to_workers_that_are_told_to_end_or_to_other_roles(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (0, 1), TERM, 5.0))
        agent.spawner(StoreEnded("actor", 0, 5.0, "x"), StoreEnded("rollout", 0, 5.0, "x"))
        assert agent.commands == [ToMaster(StoreEnded("actor", 0, 5.0, "x"))]

    def test_before_they_are_ordered_makes_workers_fail_too(self) -> None:
        agent = Agent(spawners={TORCH: True}).on(store()).spawner(StoreEnded("actor", 0, 5.0, "x"))
        agent.on(launch(count=1))
        assert [type(c.message) for c in agent.commands if isinstance(c, ToSpawner)] == [Spawn, Kill]
        assert agent.state.workers[1].cause == "doom"
        agent = Agent(spawners={TORCH: True, OTHER: False}).on(store())
        agent.spawner(StoreEnded("actor", 0, 5.0, "x")).on(launch(count=1, key=OTHER))
        assert [e.note for e in agent.told(WorkerExited)] == ["the store of its role is gone: x"]

    def test_is_told_to_the_master_and_leaves_workers_alone_that_can_meet_in_another(self) -> None:
        agent = Agent(in_place=frozenset({"actor"})).alive()
        assert agent.spawner(StoreEnded("actor", 0, 5.0, "x")).commands == [
            ToMaster(StoreEnded("actor", 0, 5.0, "x"))
        ]
        agent.on(store(generation=1)).spawner(StoreOpened("actor", 1))
        assert agent.commands == [ToMaster(StoreOpened("actor", 1))]
        assert agent.spawner(StoreEnded("actor", 0, 5.0, "late")).commands == []

    def test_is_ordered_anew_from_the_spawner_that_is_ready_by_then(self) -> None:
        agent = Agent(in_place=frozenset({"actor"})).alive().on(SpawnerDown(TORCH, "x", 5.0))
        assert agent.told(StoreEnded) == [StoreEnded("actor", 0, 5.0, "x")]
        agent.on(store(generation=1), store(generation=2))
        assert [c.key for c in agent.commands if isinstance(c, StartSpawner)] == [TORCH]
        assert agent.spawner(Preloaded(1.0)).sent(ServeStore) == [ServeStore("actor", 2, 9)]

    def test_is_not_opened_any_more_by_an_agent_that_leaves(self) -> None:
        assert Agent().alive().on(Shutdown(), store(generation=1)).sent(ServeStore) == []


class TestASpawnerThatDies:
    def test_takes_its_workers_with_it(self) -> None:
        agent = Agent().alive().on(SpawnerDown(TORCH, "its spawner was killed", 5.0))
        assert agent.commands[0] == KillGroups((101, 102))
        assert [(e.signal, e.sent, e.note) for e in agent.told(WorkerExited)] == [
            (KILL, None, "its spawner was killed")
        ] * 2
        assert agent.state.workers == {}
        assert TORCH not in agent.state.spawners

    def test_is_started_again_when_it_is_needed(self) -> None:
        agent = Agent().alive().on(SpawnerDown(TORCH, "x", 5.0))
        agent.on(store(generation=1), launch(first=5, incarnation=1))
        assert agent.has(StartSpawner)
        assert [m.id for m in agent.spawner(Preloaded(1.0)).sent(Spawn)] == [5, 6]

    def test_before_it_was_ready_makes_its_workers_fail(self) -> None:
        agent = Agent(spawners={TORCH: False}).on(launch(), SpawnerDown(TORCH, "cannot import x", 5.0))
        assert [(e.code, e.signal, e.note) for e in agent.told(WorkerExited)] == [
            (1, None, "cannot import x")
        ] * 2

    def test_leaves_the_workers_of_others_alone(self) -> None:
        rollout = Launch((worker(9, "rollout", 0, key=OTHER),))
        agent = Agent(spawners={TORCH: True, OTHER: True}).on(launch(), rollout, store("rollout", key=OTHER))
        agent.on(SpawnerDown(TORCH, "x", 5.0))
        assert [*agent.state.workers] == [9]
        assert agent.sent(Kill, OTHER) == []

    def test_takes_roles_with_it_whose_store_it_served(self) -> None:
        """A role of fresh interpreters has its store in a spawner that has torch."""
        agent = (
            Agent(spawners={TORCH: True, FRESH: True})
            .on(launch(key=FRESH), store())
            .spawner(Forked(1, 101), key=FRESH)
        )
        agent.on(SpawnerDown(TORCH, "it was killed", 5.0))
        assert agent.sent(Kill, FRESH) == [Kill(1, KILL), Kill(2, KILL)]
        (end,) = agent.spawner(Reaped(1, 6.0, None, 9), key=FRESH).told(WorkerExited)
        assert end.cause == "doom"
        assert end.note == "the store of its role is gone: it was killed"

    def test_takes_roles_with_it_whose_store_it_should_have_served(self) -> None:
        agent = Agent(spawners={TORCH: False, FRESH: False}).on(launch(key=FRESH), store())
        agent.on(SpawnerDown(TORCH, "cannot import torch", 5.0))
        assert [e.note for e in agent.told(WorkerExited)] == [
            "the store of its role is gone: cannot import torch"
        ] * 2
        assert agent.state.stores["actor"].ended is not None
        assert agent.spawner(Preloaded(1.0)).sent(ServeStore) == []

    def test_while_leaving_is_the_end(self) -> None:
        assert Agent().alive().on(Shutdown(), SpawnerDown(TORCH, "x", 1.0)).commands[-1] == Leave()


def test_a_view_is_kept_and_passed_on() -> None:
    view = View((RoleView("actor", 2, 0, "127.0.0.1:1", "running", ()),))
    agent = Agent().on(view)
    assert agent.commands == [ToWorkers(view)]
    assert agent.state.view == view


def test_a_spawner_that_talks_nonsense_is_refused() -> None:
    with pytest.raises(IllegalTransition, match="a spawner sent Shutdown"):
        Agent().spawner(Shutdown())


class RandomHistory:
    """A spawner and a master that are always within their rights, and do anything in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.agent = Agent(spawners={TORCH: False, OTHER: False}, in_place=frozenset({"rollout"}))
        self.ids = 0
        self.incarnations: dict[tuple[str, int], int] = {}
        self.launched: set[tuple[str, int, int]] = set()
        self.ended: list[tuple[str, int, int]] = []
        self.timers: list[Event] = []
        self.left = False

    def feed(self, event: Event) -> None:
        if isinstance(event, Launch):
            for one in event.workers:
                self.incarnations[one.role, one.rank] = one.incarnation
                self.launched.add((one.role, one.rank, one.incarnation))
        self.agent.on(event)
        for command in self.agent.commands:
            if isinstance(command, ToMaster) and isinstance(command.message, WorkerExited):
                self.ended.append((command.message.role, command.message.rank, command.message.incarnation))
            elif isinstance(command, After):
                self.timers.append(command.event)
            elif isinstance(command, Leave):
                assert not self.agent.state.workers, "it leaves workers behind"
                self.left = True
        self.check()

    def check(self) -> None:
        assert len(set(self.ended)) == len(self.ended), "an end is told twice"
        alive = {(w.role, w.rank, w.incarnation) for w in self.agent.state.workers.values()}
        assert not alive & set(self.ended), "a worker has ended and is kept"
        assert alive | set(self.ended) == self.launched, "a worker was forgotten"

    def launch(self) -> Launch | None:
        role = self.rng.choice(["actor", "rollout"])
        ranks = [r for r in range(3) if self.agent.state.find(role, r) is None]
        if not ranks:
            return None
        key = self.rng.choice([TORCH, OTHER, FRESH])
        workers = []
        for rank in ranks:
            self.ids += 1
            incarnation = self.incarnations.get((role, rank), -1) + 1
            workers.append(worker(self.ids, role, rank, key=key, incarnation=incarnation))
        return Launch(tuple(workers))

    def next_event(self) -> Event | None:
        rng, state = self.rng, self.agent.state
        forking = [w for w in state.workers.values() if w.phase is Phase.FORKING]
        alive = [w for w in state.workers.values() if w.phase is Phase.ALIVE]
        choices: list[Event | None] = [
            self.launch() if rng.random() < 0.3 else None,
            StopWorkers(rng.choice(["actor", "rollout"]), (0, 2), rng.choice([TERM, KILL]), 1.0),
            View(()),
            store(rng.choice(["actor", "rollout"]), rng.randrange(3), rng.choice([TORCH, OTHER])),
        ]
        for role, kept in state.stores.items():
            if kept.sent:
                end = StoreEnded(role, kept.request.generation - rng.randrange(2), 1.0, "gone")
                choices.append(FromSpawner(kept.spawner, end))
        choices += [FromSpawner(key, Preloaded(1.0)) for key, ready in state.spawners.items() if not ready]
        choices += [SpawnerDown(key, "down", 1.0) for key in state.spawners if rng.random() < 0.1]
        if forking:
            one = rng.choice(forking)
            choices.append(FromSpawner(one.spawner, Forked(one.id, 1000 + one.id)))
            choices.append(FromSpawner(one.spawner, SpawnFailed(one.id, 1.0, "no")))
        if alive:
            one = rng.choice(alive)
            choices.append(FromSpawner(one.spawner, Reaped(one.id, 1.0, rng.choice([0, 1]), None)))
            choices += [FromWorker(one.id, Hello(one.role, one.rank, 0, 1, True)), LinkClosed(one.id)]
        if self.timers:
            choices.append(self.timers.pop(rng.randrange(len(self.timers))))
        return rng.choice(choices)

    def run(self) -> None:
        for _ in range(150):
            event = self.next_event()
            if event is not None:
                self.feed(event)
        self.feed(self.rng.choice([Shutdown(), Abandon("gone")]))
        late = self.launch()
        if late is not None:
            self.feed(late)
        for one in list(self.agent.state.workers.values()):
            self.feed(FromSpawner(one.spawner, Reaped(one.id, 2.0, None, 9)))
        assert self.left, "it does not leave"
        assert set(self.ended) == self.launched


@pytest.mark.parametrize("block", range(4))
def test_in_any_order_each_worker_ends_once_and_the_agent_leaves_when_none_is_left(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        RandomHistory(seed).run()
