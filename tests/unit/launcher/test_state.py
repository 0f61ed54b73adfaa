"""The state that an agent holds for a new master, and its work without a master."""

from __future__ import annotations

from tests.unit.launcher.agent import KILL, TERM, TORCH, Agent, launch, store
from unirun.launcher.events import (
    Abandon,
    Instruction,
    Leave,
    Led,
    LinkMessage,
    Order,
    ToMaster,
    ToSpawner,
    holdings,
)
from unirun.values import WorkerId
from unirun.wire.messages import ExitAck, Hello, RoleView, Shutdown, StopWorkers, View
from unirun.wire.reports import (
    Forked,
    FromWorker,
    GroupFormed,
    HeldWorker,
    Listening,
    Message,
    Metrics,
    OpenStore,
    Reaped,
    Resilient,
    Serving,
    Spawn,
    SpawnerReady,
    SpawnFailed,
    StoreEnded,
    StoreOpened,
    WorkerError,
    WorkerExited,
    WorkerStarted,
)

VIEW = View((RoleView("actor", 2, 1, "127.0.0.1:1", "running", ()),))


def workers(agent: Agent) -> tuple[HeldWorker, ...]:
    return holdings(agent.state)[0]


def stores(agent: Agent) -> tuple[OpenStore | StoreOpened | StoreEnded, ...]:
    return holdings(agent.state)[1]


def says(agent: Agent, number: int, *messages: Message) -> Agent:
    return agent.on(*(LinkMessage(number, message) for message in messages))


class TestAWorkerThatIsHeld:
    def test_a_new_agent_holds_no_worker(self) -> None:
        assert holdings(Agent().state) == ((), ())

    def test_a_worker_is_held_from_its_order_on(self) -> None:
        agent = Agent(spawners={TORCH: False}).on(launch(count=1, incarnation=3))
        assert workers(agent) == (HeldWorker(WorkerId("actor", 0, 3)),)
        agent.spawner(SpawnerReady(1.0), Forked(1, 101))
        assert workers(agent) == (HeldWorker(WorkerId("actor", 0, 3), 101),)

    def test_a_held_worker_runs_in_the_generation_of_its_welcome(self) -> None:
        agent = Agent().on(launch(count=1), VIEW).spawner(SpawnerReady(1.0), Forked(1, 101))
        says(agent, 1, Hello(WorkerId("actor", 0, 0)))
        assert workers(agent) == (HeldWorker(WorkerId("actor", 0, 0), 101, True, 1),)

    def test_a_held_worker_has_the_latest_generation_that_it_formed(self) -> None:
        agent = Agent().alive(1)
        says(agent, 1, GroupFormed(4), GroupFormed(2))
        assert workers(agent)[0].generation == 4

    def test_a_held_worker_is_inside_a_resilient_function_or_has_left_it(self) -> None:
        agent = Agent().alive(1)
        assert workers(agent)[0].resilient is None
        for inside in (True, False):
            told = ToMaster(FromWorker(WorkerId("actor", 0, 0), Resilient(inside)))
            assert says(agent, 1, Resilient(inside)).commands == [told]
            assert workers(agent)[0].resilient is inside

    def test_a_held_worker_has_the_addresses_that_it_reported(self) -> None:
        agent = Agent().alive(1)
        says(agent, 1, Serving({"socket": "a:1"}, True))
        (held,) = workers(agent)
        assert (held.addresses, held.serving, held.recoverable) == ({"socket": "a:1"}, True, True)

    def test_a_held_worker_may_serve_without_addresses(self) -> None:
        agent = Agent().alive(1)
        assert not workers(agent)[0].serving
        says(agent, 1, Serving({}, False))
        assert (workers(agent)[0].serving, workers(agent)[0].addresses) == (True, {})

    def test_a_worker_that_listens_need_not_serve(self) -> None:
        agent = Agent().alive(1)
        says(agent, 1, Listening({"weights": "a:2"}))
        assert (workers(agent)[0].serving, workers(agent)[0].addresses) == (False, {"weights": "a:2"})


class TestAnEnd:
    def test_an_exit_is_kept_until_a_master_acknowledges_it(self) -> None:
        error = WorkerError("ValueError: x", "Traceback", 5.0)
        agent = says(Agent().alive(), 1, error).spawner(Reaped(1, 6.0, 1, None))
        told = agent.told(WorkerExited)
        dead, alive = workers(agent)
        assert (dead.worker.rank, dead.pid, dead.exit) == (0, 101, told[0])
        assert (alive.worker.rank, alive.exit) == (1, None)
        agent.on(ExitAck(WorkerId("actor", 0, 0)))
        assert workers(agent) == (alive,)
        assert agent.commands == []

    def test_an_acknowledged_exit_of_another_incarnation_is_distinct(self) -> None:
        agent = Agent().alive(1).spawner(Reaped(1, 6.0, 1, None))
        agent.on(launch(count=1, first=5, incarnation=1)).spawner(Forked(5, 105), Reaped(5, 7.0, 1, None))
        assert [held.worker.incarnation for held in workers(agent)] == [0, 1]
        agent.on(
            ExitAck(WorkerId("actor", 0, 1)),
            ExitAck(WorkerId("actor", 1, 0)),
            ExitAck(WorkerId("rollout", 0, 0)),
        )
        assert [held.worker.incarnation for held in workers(agent)] == [0]

    def test_the_exit_of_a_worker_without_a_process_is_kept(self) -> None:
        agent = Agent(spawners={TORCH: False}).on(launch(count=1), StopWorkers("actor", (0,), TERM, 5.0))
        assert [held.exit for held in workers(agent)] == agent.told(WorkerExited)
        agent = Agent().on(launch(count=1)).spawner(SpawnerReady(1.0), SpawnFailed(1, 7.0, "no memory"))
        assert [held.exit for held in workers(agent)] == agent.told(WorkerExited)

    def test_an_unacknowledged_exit_does_not_keep_an_agent_from_leaving(self) -> None:
        agent = Agent().alive(1).spawner(Reaped(1, 6.0, 0, None))
        assert agent.on(Shutdown()).commands == [Leave()]

    def test_the_exit_of_a_worker_without_a_master_is_reported_to_the_next(self) -> None:
        """A message is sent to any master; the next one gets it with the held state."""
        agent = Agent().alive(1).spawner(Reaped(1, 6.0, None, KILL)).on(Led(2))
        (held,) = workers(agent)
        assert held.exit is not None
        assert held.exit.signal == KILL


class TestAStore:
    def test_a_store_is_held_with_its_progress(self) -> None:
        agent = Agent(spawners={TORCH: True}).on(store(generation=2))
        assert stores(agent) == (OpenStore("actor", 2),)
        agent.spawner(StoreOpened("actor", 1))
        assert stores(agent) == (OpenStore("actor", 2),), "that is another's"
        agent.spawner(StoreOpened("actor", 2))
        assert stores(agent) == (StoreOpened("actor", 2),)
        gone = StoreEnded("actor", 2, 5.0, "killed")
        agent.spawner(gone)
        assert stores(agent) == (gone,)

    def test_a_store_that_is_ordered_again_is_reported_but_not_reopened(self) -> None:
        agent = Agent(spawners={TORCH: True}).on(store(), store())
        assert agent.sent(OpenStore) == [OpenStore("actor", 0, 9)]
        assert agent.on(store()).commands == []
        opened = agent.spawner(StoreOpened("actor", 0)).on(store())
        assert opened.commands == [ToMaster(StoreOpened("actor", 0))]
        gone = StoreEnded("actor", 0, 5.0, "killed")
        assert agent.spawner(gone).on(store()).commands == [ToMaster(gone)]

    def test_a_store_of_a_later_generation_replaces_the_held_one(self) -> None:
        agent = Agent(spawners={TORCH: True}).on(store(), store(generation=1))
        assert stores(agent) == (OpenStore("actor", 1),)
        assert agent.on(store()).sent(OpenStore) == []
        assert stores(agent) == (OpenStore("actor", 1),)


class TestAMasterOfAnEarlierTerm:
    def test_an_order_of_an_earlier_term_is_ignored(self) -> None:
        agent = Agent().alive().on(Led(3))
        state = agent.state
        orders: list[Instruction] = [
            launch("rollout", first=7),
            store("rollout"),
            StopWorkers("actor", (0, 1), KILL, 0.0),
            ExitAck(WorkerId("actor", 0, 0)),
            VIEW,
            Shutdown(),
        ]
        assert agent.on(*(Order(2, what) for what in orders)).commands == []
        assert agent.state == state

    def test_a_master_of_an_earlier_term_does_not_lower_the_epoch(self) -> None:
        agent = Agent().on(Led(3), Led(2))
        assert agent.state.epoch == 3
        assert agent.commands == []

    def test_orders_of_the_present_and_a_later_term_are_carried_out(self) -> None:
        agent = Agent(spawners={TORCH: True}).on(Led(3), Order(3, launch(count=1)))
        assert len(agent.sent(Spawn)) == 1
        assert agent.on(Order(4, launch("rollout", 1, first=9))).has(ToSpawner)


class TestWithoutAMaster:
    def test_an_agent_without_a_master_keeps_running_its_workers(self) -> None:
        """The loss of a master is no event for the core: workers start, report and end."""
        agent = Agent().on(store(), launch(), VIEW).spawner(SpawnerReady(1.0), Forked(1, 101), Forked(2, 102))
        assert len(agent.told(WorkerStarted)) == 2
        says(agent, 1, Hello(WorkerId("actor", 0, 0)), Metrics({"loss": 1.0}, 1.0), GroupFormed(1))
        agent.spawner(Reaped(2, 9.0, 0, None)).on(Led(2))
        assert {(held.worker.rank, held.running, held.exit is not None) for held in workers(agent)} == {
            (0, True, False),
            (1, False, True),
        }

    def test_an_order_repeated_by_the_next_master_is_not_carried_out_twice(self) -> None:
        agent = Agent().alive().spawner(Reaped(1, 9.0, 1, None))
        again = launch(first=11)
        assert agent.on(Led(2), Order(2, store()), Order(2, again)).sent(Spawn) == []
        assert agent.sent(OpenStore) == []
        agent.on(ExitAck(WorkerId("actor", 0, 0)), Order(2, again))
        assert agent.sent(Spawn) == [], "nor when the end is forgotten"

    def test_an_agent_that_leaves_without_a_master_keeps_the_exits(self) -> None:
        agent = Agent().alive(1).on(Abandon("the command is gone"))
        agent.spawner(Reaped(1, 9.0, None, TERM))
        (held,) = workers(agent)
        assert held.exit is not None
        assert (held.exit.cause, held.exit.sent) == ("leaving", TERM)
        assert agent.commands[-1] == Leave()
