"""The agent's state machine when something ends: a stop, its own leaving, a dead store or spawner."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.launcher.agent import INT, KILL, OTHER, TERM, TORCH, Agent, launch, spawn, store, worker
from unirun.failover.state import OWNER_LOST_GRACE_SECONDS
from unirun.launcher.core import IMPORT_LOOK_INTERVAL, IMPORT_TIMEOUT, MAX_STACK, WORKER_EXIT_TIMEOUT
from unirun.launcher.environment import FRESH
from unirun.launcher.events import (
    Abandon,
    CallLater,
    GraceOver,
    KillGroups,
    Launch,
    Leave,
    LinkMessage,
    SendFault,
    Signal,
    SignalSpawner,
    SpawnerDown,
    StartSpawner,
    StillEnding,
    StillImporting,
    StopDue,
    Throttle,
    ToMaster,
    ToSpawner,
)
from unirun.values import WorkerId
from unirun.wire.messages import Fault, Inject, PassOn, Shutdown, StopWorkers
from unirun.wire.reports import (
    Ending,
    Forked,
    GroupMeets,
    Kill,
    Notice,
    OpenStore,
    Reaped,
    Resilient,
    Serving,
    Spawn,
    SpawnerReady,
    StoreEnded,
    StoreOpened,
    Stuck,
    WorkerError,
    WorkerExited,
)


class TestAnInjectedFault:
    @pytest.mark.parametrize(("fault", "signum"), [("sigkill", 9), ("sigstop", 19), ("segv", 11)])
    def test_it_is_a_signal_that_counts_as_no_order(self, fault: Fault, signum: int) -> None:
        agent = Agent().alive().on(Inject("actor", 1, fault, incarnation=0))
        assert agent.commands == [ToSpawner(TORCH, Kill(2, signum))]
        agent.spawner(Reaped(2, 1.0, None, signum))
        assert [(each.cause, each.sent) for each in agent.told(WorkerExited)] == [("own", None)]

    def test_one_that_needs_the_workers_own_code_is_left_in_its_directory(self) -> None:
        agent = Agent().alive().on(Inject("actor", 1, "exit", 3.0, incarnation=0))
        (sent,) = agent.commands
        assert isinstance(sent, SendFault)
        assert (str(sent.worker), sent.pid, sent.text) == ("actor:1", 102, "exit=3")
        assert sent.folder.endswith("actor/1/0")

    @pytest.mark.parametrize(("amount", "stops"), [(0.0, 0.0), (1.0, 0.0), (1.25, 0.02), (10.0, 0.09)])
    def test_a_slow_worker_is_so_many_times_as_slow_and_never_faster(
        self, amount: float, stops: float
    ) -> None:
        agent = Agent().alive().on(Inject("actor", 1, "slow", amount, incarnation=0))
        assert [round(each.delay, 6) for each in found(agent, CallLater)] == [stops]

    def test_a_slow_worker_stops_and_goes_on_until_it_is_told_to_end(self) -> None:
        agent = Agent().alive().on(Inject("actor", 1, "slow", 4.0, incarnation=0))
        for stop, delay in ((True, 0.075), (False, 0.025), (True, 0.075)):
            assert agent.sent(Kill) == [Kill(2, 19 if stop else 18)]
            (later,) = [each for each in agent.commands if isinstance(each, CallLater)]
            assert (later.event, round(later.delay, 6)) == (Throttle(2, 4.0, stop=not stop), delay)
            agent.on(later.event)
        agent.on(StopWorkers("actor", (1,), TERM, 5.0))
        assert agent.on(Throttle(2, 4.0, stop=False)).commands == [ToSpawner(TORCH, Kill(2, 18))]
        assert agent.on(Throttle(2, 4.0, stop=True)).commands == []

    def test_a_successor_and_a_worker_that_was_told_to_end_get_none(self) -> None:
        agent = Agent().alive().on(Inject("actor", 1, "sigkill", incarnation=1))
        assert agent.commands == []
        agent.on(StopWorkers("actor", (1,), TERM, 5.0))
        assert agent.on(Inject("actor", 1, "sigkill", incarnation=0)).commands == []


class TestAWorkerThatIsStuck:
    """The worker waits in an earlier generation, which no other rank enters any more."""

    STUCK = LinkMessage(2, Stuck("it waits for ever", "x" * MAX_STACK + " in wait"))

    def test_it_is_killed_and_said_to_be_so_with_the_end_of_its_stack(self) -> None:
        agent = Agent().alive().on(self.STUCK)
        assert agent.sent(Kill) == [Kill(2, KILL)]
        (told,) = agent.told(Notice)
        assert told.source == "actor:1"
        assert told.text == f"is killed: it waits for ever; it was at\n{'x' * (MAX_STACK - 8)} in wait"
        agent.spawner(Reaped(2, 1.0, None, KILL))
        (end,) = agent.told(WorkerExited)
        assert (end.cause, end.sent, end.note) == ("stuck", None, "it waits for ever")

    def test_it_is_killed_once_and_not_when_it_was_told_to_end(self) -> None:
        assert Agent().alive().on(self.STUCK).on(self.STUCK).commands == []
        assert Agent().alive().on(StopWorkers("actor", (1,), TERM, 5.0)).on(self.STUCK).commands == []

    def test_its_end_has_the_last_generation_that_it_was_about_to_meet_in(self) -> None:
        agent = Agent().alive().on(*(LinkMessage(2, GroupMeets(number)) for number in (1, 3, 2)))
        assert agent.commands == []
        assert agent.spawner(Reaped(2, 1.0, None, KILL)).told(WorkerExited)[0].met == 3


class TestAStop:
    def test_a_stop_is_sigterm_then_sigkill_after_the_grace(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (0, 1), TERM, 5.0))
        assert agent.sent(Kill) == [Kill(1, TERM), Kill(2, TERM)]
        assert [c for c in agent.commands if isinstance(c, CallLater)] == [
            CallLater(5.0, GraceOver(1)),
            CallLater(5.0, GraceOver(2)),
        ]
        agent.spawner(Reaped(1, 1.0, None, TERM))
        assert [(e.cause, e.sent) for e in agent.told(WorkerExited)] == [("order", TERM)]
        agent.on(GraceOver(1), GraceOver(2))
        assert agent.sent(Kill) == [Kill(2, KILL)]
        assert "did not end in its grace period" in agent.told(Notice)[0].text
        assert agent.spawner(Reaped(2, 2.0, None, KILL)).told(WorkerExited)[0].sent == KILL

    def test_a_stop_with_sigkill_has_no_grace(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (1,), KILL, 0.0))
        assert agent.commands == [ToSpawner(TORCH, Kill(2, KILL))]

    def test_a_repeated_stop_sends_no_second_signal_but_may_shorten_the_grace(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (0,), TERM, 5.0))
        agent.on(StopWorkers("actor", (0,), TERM, 1.0))
        assert agent.commands == [CallLater(1.0, GraceOver(1))]
        assert agent.on(StopWorkers("actor", (0,), INT, 1.0)).sent(Kill) == [Kill(1, INT)]

    def test_a_stop_of_a_killed_worker_does_nothing(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (0,), KILL, 0.0))
        assert agent.on(StopWorkers("actor", (0,), TERM, 5.0)).commands == []
        assert agent.spawner(Reaped(1, 1.0, None, KILL)).told(WorkerExited)[0].sent == KILL

    def test_a_stop_of_a_killed_worker_and_others_ends_the_others(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (0,), KILL, 0.0))
        assert agent.on(StopWorkers("actor", (0, 1), TERM, 5.0)).sent(Kill) == [Kill(2, TERM)]

    def test_a_stop_of_a_queued_worker_needs_no_signal(self) -> None:
        agent = Agent(spawners={TORCH: False}).on(launch(), StopWorkers("actor", (0,), TERM, 5.0))
        assert agent.told(WorkerExited) == [
            WorkerExited(WorkerId("actor", 0, 0), 0.0, None, TERM, "order", TERM, note="it had not started")
        ]
        assert [m.id for m in agent.spawner(SpawnerReady(1.0)).sent(Spawn)] == [2]

    def test_a_stop_of_a_forking_worker_follows_its_spawn_request(self) -> None:
        agent = Agent(spawners={TORCH: True}).on(launch(count=1), StopWorkers("actor", (0,), TERM, 5.0))
        orders = [c.message for c in agent.commands if isinstance(c, ToSpawner)]
        assert orders == [spawn(1, "actor", 0), Kill(1, TERM)]
        assert agent.spawner(Forked(1, 101)).state.workers[1].sent == TERM

    def test_a_stop_of_an_unknown_rank_does_nothing(self) -> None:
        assert Agent().alive().on(StopWorkers("rollout", (0, 7), TERM, 5.0)).commands == []


class TestAWorkerThatHasFailed:
    """The code has failed; exit handlers and threads still run."""

    ERROR = LinkMessage(1, WorkerError("ValueError: x", "Trace", 5.0))

    def test_a_failed_worker_has_the_exit_limit_while_no_stop_is_ordered(self) -> None:
        agent = Agent().alive().on(self.ERROR)
        assert agent.commands == [CallLater(30.0, StillEnding(1, 30.0))]
        agent.on(StillEnding(1, 30.0))
        assert agent.sent(Kill) == []
        (told,) = agent.told(Notice)
        assert told.source == "actor:0"
        assert "has failed 30 s ago, and its exit handlers or threads still run" in told.text
        assert "if it has not ended in another 570 s" in told.text
        assert CallLater(570.0, StillEnding(1, WORKER_EXIT_TIMEOUT)) in agent.commands
        (end,) = agent.spawner(Reaped(1, 50.0, 1, None)).told(WorkerExited)
        assert (end.code, end.cause, end.sent) == (1, "own", None)
        assert end.error is not None

    def test_a_failed_worker_killed_at_the_exit_limit_counts_as_failed(self) -> None:
        agent = Agent().alive().on(self.ERROR, StillEnding(1, WORKER_EXIT_TIMEOUT))
        assert agent.sent(Kill) == [Kill(1, KILL)]
        (end,) = agent.spawner(Reaped(1, 606.0, None, KILL)).told(WorkerExited)
        assert (end.signal, end.cause, end.sent) == (KILL, "own", None)

    def test_a_failed_worker_that_is_stopped_has_its_grace_from_the_order_on(self) -> None:
        agent = Agent().alive().on(self.ERROR, StopWorkers("actor", (0,), TERM, 5.0))
        assert CallLater(5.0, GraceOver(1)) in agent.commands
        assert agent.on(StillEnding(1, 30.0), StillEnding(1, WORKER_EXIT_TIMEOUT)).commands == []
        assert agent.on(GraceOver(1)).sent(Kill) == [Kill(1, KILL)]

    def test_a_worker_that_fails_after_a_stop_gets_no_extra_time(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (0,), TERM, 5.0), self.ERROR)
        assert [c for c in agent.commands if isinstance(c, CallLater)] == [CallLater(5.0, GraceOver(1))]

    def test_a_failed_worker_that_reports_twice_is_timed_once(self) -> None:
        assert Agent().alive().on(self.ERROR).on(self.ERROR).commands == []

    def test_a_failed_worker_is_killed_after_the_grace_when_its_peers_wait(self) -> None:
        agent = Agent(in_place=frozenset({"actor"})).alive().on(self.ERROR, StillEnding(1, 30.0))
        assert agent.sent(Kill) == [Kill(1, KILL)]
        (told,) = agent.told(Notice)
        assert told.text.endswith("still run; it is killed")

    @pytest.mark.parametrize(("recoverable", "killed"), [(None, False), (False, False), (True, True)])
    def test_a_failed_trainer_is_killed_after_the_grace_only_if_recoverable(
        self, recoverable: bool | None, killed: bool
    ) -> None:
        agent = Agent(in_place=frozenset({"actor"}), spawners={TORCH: True})
        agent.on(launch(count=1, kind="trainer")).spawner(Forked(1, 101))
        if recoverable is not None:
            agent.on(LinkMessage(1, Serving({}, recoverable)))
        assert bool(agent.on(self.ERROR, StillEnding(1, 30.0)).sent(Kill)) is killed


class TestLeaving:
    def test_leaving_without_workers_is_immediate(self) -> None:
        assert Agent(spawners={TORCH: False}).on(Shutdown()).commands == [Leave()]

    def test_leaving_at_the_jobs_end_kills_workers(self) -> None:
        agent = Agent().alive().on(Shutdown())
        assert agent.sent(Kill) == [Kill(1, KILL), Kill(2, KILL)]
        assert not agent.has(Leave)
        assert agent.spawner(Reaped(1, 1.0, None, 9), Reaped(2, 1.0, None, 9)).commands[-1] == Leave()

    def test_leaving_before_the_jobs_end_gives_workers_their_grace(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (0,), INT, 5.0)).on(Shutdown(30.0))
        assert agent.commands == [ToSpawner(TORCH, Kill(2, TERM)), CallLater(30.0, GraceOver(2))], (
            "who was told already is not told again"
        )
        assert agent.state.leaving
        assert agent.on(Shutdown()).sent(Kill) == [Kill(1, KILL), Kill(2, KILL)]
        assert agent.spawner(Reaped(1, 1.0, None, 9), Reaped(2, 1.0, None, 9)).commands[-1] == Leave()

    def test_leaving_keeps_the_decided_end_of_the_job(self) -> None:
        ending = Ending("stopped", 130, "got SIGINT")
        agent = Agent().alive().on(Shutdown(30.0, ending))
        assert agent.state.ending == ending
        assert agent.on(Shutdown()).state.ending == ending

    def test_leaving_without_a_master_gives_a_short_grace(self) -> None:
        agent = Agent().alive(1).on(Abandon("gone"))
        assert agent.commands == [
            ToSpawner(TORCH, Kill(1, TERM)),
            CallLater(OWNER_LOST_GRACE_SECONDS, GraceOver(1)),
        ]
        assert OWNER_LOST_GRACE_SECONDS < 1.0

    def test_leaving_by_a_signal_passes_it_on_once_with_the_jobs_grace(self) -> None:
        told = Abandon("the agent got a signal", 30.0, INT)
        agent = Agent().alive(1).on(told)
        assert agent.commands == [ToSpawner(TORCH, Kill(1, INT)), CallLater(30.0, GraceOver(1))]
        assert agent.on(told).sent(Kill) == []
        assert agent.on(StopWorkers("actor", (0,), INT, 30.0)).sent(Kill) == []

    def test_leaving_without_a_grace_kills(self) -> None:
        agent = Agent().alive(1).on(Abandon("given up", grace=0.0))
        assert agent.commands == [ToSpawner(TORCH, Kill(1, KILL))]

    def test_leaving_drops_queued_workers(self) -> None:
        agent = Agent(spawners={TORCH: False}).on(launch(), Abandon("gone"))
        assert len(agent.told(WorkerExited)) == 2
        assert agent.commands[-1] == Leave()


class TestAStopThatIsDueLater:
    def test_workers_that_live_then_get_the_signal(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (0, 1), TERM, 5.0, after=1.0))
        assert agent.commands == [
            CallLater(1.0, StopDue(1, TERM, 5.0)),
            CallLater(1.0, StopDue(2, TERM, 5.0)),
        ]
        agent.spawner(Reaped(1, 1.0, 1, None)).on(StopDue(1, TERM, 5.0), StopDue(2, TERM, 5.0))
        assert agent.commands == [ToSpawner(TORCH, Kill(2, TERM)), CallLater(5.0, GraceOver(2))]

    def test_a_worker_that_was_told_before_is_not_told_again(self) -> None:
        agent = Agent().alive(1).on(StopWorkers("actor", (0,), TERM, 5.0, after=1.0))
        agent.on(StopWorkers("actor", (0,), INT, 5.0)).on(StopDue(1, TERM, 5.0))
        assert agent.commands == []

    def test_a_successor_is_not_told(self) -> None:
        agent = Agent().alive(1).on(StopWorkers("actor", (0,), TERM, 5.0, after=1.0))
        agent.spawner(Reaped(1, 1.0, 1, None)).on(launch(first=2, count=1, incarnation=1))
        assert agent.on(StopDue(1, TERM, 5.0)).commands == []


class TestASignalThatEndsNothing:
    def test_all_workers_get_it_that_have_a_handler(self) -> None:
        agent = Agent().alive(1).on(launch(role="rollout", first=2, count=1)).spawner(Forked(2, 102))
        assert agent.on(PassOn(10)).commands == [Signal(pid, 10, handled=True) for pid in (101, 102)]

    def test_it_is_not_the_signal_of_a_stop(self) -> None:
        agent = Agent().alive(1).on(PassOn(TERM), StopWorkers("actor", (0,), TERM, 5.0))
        assert agent.sent(Kill) == [Kill(1, TERM)]


class TestAStoreThatDies:
    def test_a_store_that_dies_fails_the_workers_of_its_role(self) -> None:
        agent = Agent().alive().spawner(StoreEnded("actor", 0, 5.0, "its process was killed"))
        assert agent.sent(Kill) == [Kill(1, KILL), Kill(2, KILL)]
        (end,) = agent.spawner(Reaped(1, 6.0, None, KILL)).told(WorkerExited)
        assert (end.cause, end.sent) == ("lost_dependency", None)
        assert end.note == "the store of its role is gone: its process was killed"

    def test_a_store_that_dies_spares_stopped_workers_and_other_roles(self) -> None:
        agent = Agent().alive().on(StopWorkers("actor", (0, 1), TERM, 5.0))
        agent.spawner(StoreEnded("actor", 0, 5.0, "x"), StoreEnded("rollout", 0, 5.0, "x"))
        assert agent.commands == [ToMaster(StoreEnded("actor", 0, 5.0, "x"))]

    def test_a_store_that_died_before_the_launch_fails_the_workers(self) -> None:
        agent = Agent(spawners={TORCH: True}).on(store()).spawner(StoreEnded("actor", 0, 5.0, "x"))
        agent.on(launch(count=1))
        assert [type(c.message) for c in agent.commands if isinstance(c, ToSpawner)] == [Spawn, Kill]
        assert agent.state.workers[1].cause == "lost_dependency"
        agent = Agent(spawners={TORCH: True, OTHER: False}).on(store())
        agent.spawner(StoreEnded("actor", 0, 5.0, "x")).on(launch(count=1, key=OTHER))
        (end,) = agent.told(WorkerExited)
        assert (end.worker, end.time, end.code) == (("actor", 0, 0), 5.0, 1)
        assert end.note == "the store of its role is gone: x"

    def test_a_store_that_dies_is_reported_and_spares_workers_restarted_in_place(self) -> None:
        agent = Agent(in_place=frozenset({"actor"})).alive()
        assert agent.spawner(StoreEnded("actor", 0, 5.0, "x")).commands == [
            ToMaster(StoreEnded("actor", 0, 5.0, "x"))
        ]
        agent.on(store(generation=1)).spawner(StoreOpened("actor", 1))
        assert agent.commands == [ToMaster(StoreOpened("actor", 1))]
        assert agent.spawner(StoreEnded("actor", 0, 5.0, "late")).commands == []

    def test_a_store_that_dies_spares_the_workers_when_some_are_in_a_resilient_function(self) -> None:
        agent = Agent().alive().on(LinkMessage(1, Resilient(inside=True)))
        assert agent.spawner(StoreEnded("actor", 0, 5.0, "x")).sent(Kill) == []
        agent = (
            Agent()
            .alive()
            .on(LinkMessage(1, Resilient(inside=True)), LinkMessage(1, Resilient(inside=False)))
        )
        assert agent.spawner(StoreEnded("actor", 0, 5.0, "x")).sent(Kill) == [Kill(1, KILL), Kill(2, KILL)]

    def test_a_store_that_died_is_opened_again_by_the_ready_spawner(self) -> None:
        agent = Agent(in_place=frozenset({"actor"})).alive().on(SpawnerDown(TORCH, "x", 5.0))
        assert agent.told(StoreEnded) == [StoreEnded("actor", 0, 5.0, "x")]
        agent.on(store(generation=1), store(generation=2))
        assert [c.key for c in agent.commands if isinstance(c, StartSpawner)] == [TORCH]
        assert agent.spawner(SpawnerReady(1.0)).sent(OpenStore) == [OpenStore("actor", 2, 9)]

    def test_a_leaving_agent_opens_no_store(self) -> None:
        assert Agent().alive().on(Shutdown(), store(generation=1)).sent(OpenStore) == []


def found(agent: Agent, kind: type) -> list[Any]:
    """The commands of a kind."""
    return [each for each in agent.commands if isinstance(each, kind)]


class TestASpawnerThatDies:
    def test_a_spawner_that_dies_takes_its_workers_with_it(self) -> None:
        agent = Agent().alive().on(SpawnerDown(TORCH, "its spawner was killed", 5.0))
        assert agent.commands[0] == KillGroups((101, 102))
        assert [(e.signal, e.sent, e.note) for e in agent.told(WorkerExited)] == [
            (KILL, None, "its spawner was killed")
        ] * 2
        assert agent.state.workers == {}
        assert TORCH not in agent.state.spawners

    def test_a_spawner_that_died_is_started_again_when_needed(self) -> None:
        agent = Agent().alive().on(SpawnerDown(TORCH, "x", 5.0))
        agent.on(store(generation=1), launch(first=5, incarnation=1))
        assert agent.has(StartSpawner)
        assert [m.id for m in agent.spawner(SpawnerReady(1.0)).sent(Spawn)] == [5, 6]

    def test_a_spawner_that_was_stopped_while_it_imports_is_let_go_on(self) -> None:
        agent = Agent().on(launch())
        (later,) = found(agent, CallLater)
        agent.on(later.event)
        assert found(agent, SignalSpawner) == [SignalSpawner(TORCH, int(signal.SIGCONT))]
        (again,) = found(agent, CallLater)
        assert again.event == replace(later.event, waited=2 * IMPORT_LOOK_INTERVAL)
        assert agent.spawner(SpawnerReady(3.0)).on(again.event).commands == []
        assert agent.on(SpawnerDown(TORCH, "it is gone", 5.0)).on(again.event).commands == []

    def test_a_spawner_that_never_ends_its_imports_is_killed(self) -> None:
        agent = Agent(spawners={TORCH: False}).on(StillImporting(TORCH, IMPORT_TIMEOUT))
        assert found(agent, SignalSpawner) == [SignalSpawner(TORCH, KILL)]
        (told,) = agent.told(Notice)
        assert told.text == "a spawner has not ended its imports within 900 s and is killed"
        assert not agent.has(CallLater)

    def test_a_spawner_has_its_own_time_for_its_imports_after_one_that_has_died(self) -> None:
        agent = Agent().on(launch())
        (of_first,) = found(agent, CallLater)
        agent.on(SpawnerDown(TORCH, "it is gone", 5.0)).on(launch(first=5, incarnation=1))
        (of_second,) = found(agent, CallLater)
        assert agent.on(replace(of_first.event, waited=IMPORT_TIMEOUT)).commands == []
        assert agent.on(of_second.event).has(CallLater)

    def test_a_spawner_that_dies_before_it_is_ready_fails_its_workers(self) -> None:
        agent = Agent(spawners={TORCH: False}).on(launch(), SpawnerDown(TORCH, "cannot import x", 5.0))
        assert [(e.code, e.signal, e.note) for e in agent.told(WorkerExited)] == [
            (1, None, "cannot import x")
        ] * 2

    def test_a_spawner_that_dies_spares_the_workers_of_others(self) -> None:
        rollout = Launch((worker(9, "rollout", 0, key=OTHER),))
        agent = Agent(spawners={TORCH: True, OTHER: True}).on(launch(), rollout, store("rollout", key=OTHER))
        agent.on(SpawnerDown(TORCH, "x", 5.0))
        assert [*agent.state.workers] == [9]
        assert agent.sent(Kill, OTHER) == []

    def test_a_spawner_that_dies_fails_the_roles_whose_store_it_served(self) -> None:
        """The store of a role of fresh interpreters is served by a spawner that has imported torch."""
        agent = (
            Agent(spawners={TORCH: True, FRESH: True})
            .on(launch(key=FRESH), store())
            .spawner(Forked(1, 101), key=FRESH)
        )
        agent.on(SpawnerDown(TORCH, "it was killed", 5.0))
        assert agent.sent(Kill, FRESH) == [Kill(1, KILL), Kill(2, KILL)]
        (end,) = agent.spawner(Reaped(1, 6.0, None, 9), key=FRESH).told(WorkerExited)
        assert end.cause == "lost_dependency"
        assert end.note == "the store of its role is gone: it was killed"

    def test_a_spawner_that_dies_fails_the_roles_whose_store_it_should_have_opened(self) -> None:
        agent = Agent(spawners={TORCH: False, FRESH: False}).on(launch(key=FRESH), store())
        agent.on(SpawnerDown(TORCH, "cannot import torch", 5.0))
        assert [e.note for e in agent.told(WorkerExited)] == [
            "the store of its role is gone: cannot import torch"
        ] * 2
        assert agent.state.stores["actor"].ended is not None
        assert agent.spawner(SpawnerReady(1.0)).sent(OpenStore) == []

    def test_a_spawner_that_dies_while_leaving_ends_the_agent(self) -> None:
        assert Agent().alive().on(Shutdown(), SpawnerDown(TORCH, "x", 1.0)).commands[-1] == Leave()
