"""An agent tells what probes of its programs say, and kills programs that are not ready in time or answer no more."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.launcher.agent import KILL, TERM, Agent, worker
from unirun.launcher.environment import FRESH
from unirun.launcher.events import (
    CallLater,
    Launch,
    LinkMessage,
    Probed,
    ReadyDue,
    StartProbing,
    StopProbing,
    ToLink,
    ToMaster,
    ToSpawner,
)
from unirun.spec.job import Probe
from unirun.values import Engine, WorkerId
from unirun.wire.messages import Hello, StopWorkers
from unirun.wire.reports import (
    EngineWeights,
    Forked,
    FromWorker,
    Health,
    Kill,
    LocalEngines,
    Metrics,
    Reaped,
    SpawnFailed,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)

WHO = WorkerId("engine", 0, 0)
READY = Probe("http", ("http://h:1/",))
ALIVE = Probe("http", ("http://h:1/",), misses=3)


def launched(**more: Any) -> Agent:
    """An agent that has told its spawner to start one program, whose probe has an hour."""
    usual = {"ready": READY, "ready_timeout": 3600.0, "alive": ALIVE}
    program = replace(worker(1, "engine", 0, key=FRESH, kind="program"), **{**usual, **more})
    companions = frozenset({"engine-weights"})
    return Agent(spawners={FRESH: True}, companions=companions).on(Launch((program,)))


def started(**more: Any) -> Agent:
    agent = launched(**more)
    return agent.spawner(Forked(1, 101), key=FRESH)


def says(agent: Agent, *answers: str) -> Agent:
    """The probe answers: an empty text for yes, else the reason for no."""
    return agent.on(*(Probed(1, not why, why, 9.0 + number) for number, why in enumerate(answers)))


def told(agent: Agent) -> list[Health]:
    messages = [c.message for c in agent.commands if isinstance(c, ToMaster)]
    said = [message.message for message in messages if isinstance(message, FromWorker)]
    return [each for each in said if isinstance(each, Health)]


def killed(agent: Agent) -> bool:
    return ToSpawner(FRESH, Kill(1, KILL)) in agent.commands


def ends(agent: Agent, signal: int = KILL) -> WorkerExited:
    agent.spawner(Reaped(1, 20.0, None, signal), key=FRESH)
    (end,) = [c.message for c in agent.commands if isinstance(c, ToMaster)]
    assert isinstance(end, WorkerExited)
    return end


class TestWatching:
    def test_watching_begins_with_the_process_and_has_its_time(self) -> None:
        agent = launched()
        assert StartProbing(1) not in agent.commands
        agent.spawner(Forked(1, 101), key=FRESH)
        assert agent.commands == [
            ToMaster(WorkerStarted(WHO, 101)),
            ToMaster(WorkerRunning(WHO, 0)),
            StartProbing(1),
            CallLater(3600.0, ReadyDue(1)),
        ]

    def test_watching_is_left_out_without_a_probe(self) -> None:
        agent = started(ready=None, alive=None)
        assert StartProbing(1) not in agent.commands
        agent.spawner(Reaped(1, 9.0, 0, None), key=FRESH)
        assert StopProbing(1) not in agent.commands

    def test_watching_ends_with_the_process(self) -> None:
        for end in (Reaped(1, 9.0, 1, None), SpawnFailed(1, 9.0, "no such file")):
            assert StopProbing(1) in started().spawner(end, key=FRESH).commands


class TestAnswers:
    def test_answers_are_told_when_they_change(self) -> None:
        agent = started()
        assert told(says(agent, "nothing listens yet")) == [Health(False, 9.0, "nothing listens yet")]
        assert says(agent, "nothing listens yet").commands == []
        assert told(says(agent, "status 503")) == [Health(False, 9.0, "status 503")]
        assert told(says(agent, "")) == [Health(True, 9.0)]
        assert says(agent, "", "").commands == []
        missed = "did not answer 1 of 3 times: status 500"
        assert told(says(agent, "status 500")) == [Health(True, 9.0, missed)], (
            "it is ready until it is given up"
        )
        assert told(says(agent, "")) == [Health(True, 9.0)]

    def test_answers_of_a_worker_that_is_gone_are_ignored(self) -> None:
        agent = started()
        ends(agent)
        assert says(agent, "").commands == []
        assert agent.on(ReadyDue(1)).commands == []

    def test_answers_of_a_worker_that_was_told_to_end_are_ignored(self) -> None:
        agent = says(started(), "").on(StopWorkers("engine", (0,), TERM, 30.0))
        assert says(agent, "closed", "closed", "closed", "closed").commands == []
        assert ends(agent, TERM).cause == "order"


class TestMisses:
    def test_misses_in_a_row_end_a_program_that_was_ready(self) -> None:
        agent = says(started(), "", "status 500", "status 500")
        assert not killed(agent)
        assert killed(says(agent, "status 500"))
        end = ends(agent)
        assert (end.cause, end.note) == ("silent", "did not answer 3 times in a row: status 500")

    def test_misses_are_forgotten_after_an_answer(self) -> None:
        agent = says(started(), "", "a", "a", "", "a", "a", "")
        assert not killed(agent)
        assert agent.state.workers[1].misses == 0

    def test_misses_before_it_is_ready_do_not_count(self) -> None:
        agent = says(started(), *["not yet"] * 10, "", "slow", "slow")
        assert not killed(agent)
        assert killed(says(agent, "slow"))

    @pytest.mark.parametrize(("misses", "times"), [(1, "once"), (2, "2 times in a row")])
    def test_misses_may_be_few(self, misses: int, times: str) -> None:
        agent = says(started(alive=replace(ALIVE, misses=misses)), "", *["closed"] * misses)
        assert killed(agent)
        assert ends(agent).note == f"did not answer {times}: closed"

    def test_misses_without_alive_are_told_and_nothing_more(self) -> None:
        agent = says(started(alive=None), "", "a", "a", "a", "a")
        assert not killed(agent)

    def test_more_missed_probes_do_not_kill_again(self) -> None:
        agent = says(started(), "", "a", "a", "a")
        assert says(agent, "a", "a", "").commands == []


class TestTheTime:
    def test_the_time_ends_a_program_that_was_never_ready(self) -> None:
        agent = says(started(), "status 503").on(ReadyDue(1))
        assert killed(agent)
        end = ends(agent)
        assert (end.cause, end.note) == ("unready", "was not ready within 3600 s: status 503")

    def test_the_time_of_a_program_that_was_not_asked_is_over_as_well(self) -> None:
        agent = started().on(ReadyDue(1))
        assert ends(agent).note == "was not ready within 3600 s: it was not asked yet"

    def test_the_time_does_not_count_once_it_was_ready(self) -> None:
        agent = says(started(), "", "status 500")
        assert agent.on(ReadyDue(1)).commands == []

    def test_the_time_does_not_count_for_its_successor_or_while_it_ends(self) -> None:
        agent = started().on(StopWorkers("engine", (0,), TERM, 30.0))
        assert agent.on(ReadyDue(1)).commands == []


NOT_YET = "it waits for its weights"


def with_companion(**more: Any) -> Agent:
    """An agent with an engine, which answers nothing yet, and with the worker that brings weights into it."""
    agent = started(url="http://h:1", companion="engine-weights", **more)
    companion = replace(worker(2, "engine-weights", 0, key=FRESH))
    agent.on(Launch((companion,))).spawner(Forked(2, 102), key=FRESH)
    return agent.on(LinkMessage(2, Hello(companion.who)))


def news(agent: Agent) -> list[LocalEngines]:
    """The engines as the companion was told."""
    sent = [c for c in agent.commands if isinstance(c, ToLink) and c.id == 2]
    return [each.message for each in sent if isinstance(each.message, LocalEngines)]


def engines(*, alive: bool, incarnation: int = 0) -> list[LocalEngines]:
    return [LocalEngines((Engine(0, incarnation, "http://h:1", alive),))]


def brings(agent: Agent, version: int | None, problem: str = "", incarnation: int = 0) -> Agent:
    """The companion tells what it has brought into the engine."""
    return agent.on(LinkMessage(2, EngineWeights("policy", 0, incarnation, version, 30.0, problem)))


class TestWeights:
    def test_weights_are_waited_for_by_an_engine_that_answers(self) -> None:
        agent = with_companion()
        assert told(says(agent, "")) == [Health(False, 9.0, NOT_YET)]
        assert told(brings(agent, 3)) == [Health(True, 30.0)]
        metrics = FromWorker(WHO, Metrics({"policy/version": 3.0}, 30.0))
        assert ToMaster(metrics) in agent.commands

    def test_weights_that_nobody_has_published_are_those_of_the_start(self) -> None:
        agent = says(with_companion(), "")
        assert told(brings(agent, None)) == [Health(True, 30.0)]
        assert len(agent.commands) == 1

    def test_weights_before_its_first_answer_do_not_make_it_ready(self) -> None:
        agent = brings(with_companion(), 3)
        assert told(agent) == [Health(False, 30.0)]
        assert told(says(agent, "")) == [Health(True, 9.0)]

    def test_weights_of_a_process_that_is_gone_are_ignored(self) -> None:
        agent = says(with_companion(), "")
        assert not brings(agent, 3, incarnation=1).commands
        assert not killed(brings(agent, None, "it refused", incarnation=1))

    def test_weights_that_are_half_new_end_it(self) -> None:
        agent = brings(says(with_companion(), ""), 3)
        assert killed(brings(agent, None, "it refused"))
        end = ends(agent)
        assert (end.cause, end.note) == ("torn", "it refused")

    def test_weights_count_in_the_time_for_its_start(self) -> None:
        agent = says(with_companion(), "")
        assert killed(agent.on(ReadyDue(1)))
        assert ends(agent).note == f"was not ready within 3600 s: {NOT_YET}"
        assert not brings(says(with_companion(), ""), 3).on(ReadyDue(1)).commands

    def test_weights_come_by_one_companion_where_there_are_two(self) -> None:
        agent = with_companion()
        second = worker(3, "engine-weights", 1, key=FRESH)
        agent.on(Launch((second,))).spawner(Forked(3, 103), key=FRESH)
        agent.on(LinkMessage(3, Hello(second.who)))
        assert [c.message for c in agent.commands if isinstance(c, ToLink)] == [LocalEngines(())]
        agent.spawner(Reaped(2, 20.0, None, KILL), key=FRESH)
        told = [c.message for c in agent.commands if isinstance(c, ToLink) and c.id == 3]
        assert told == engines(alive=False), "the other one takes over"

    def test_weights_of_another_role_are_not_taken(self) -> None:
        agent = says(started(url="http://h:1", companion="other"), "")
        agent.on(Launch((worker(2, "engine-weights", 0, key=FRESH),))).spawner(Forked(2, 102), key=FRESH)
        assert not brings(agent, 3).commands

    def test_the_companion_learns_of_each_engine_and_when_it_answers(self) -> None:
        agent = with_companion()
        assert news(agent) == engines(alive=False)
        assert news(says(agent, "")) == engines(alive=True)
        assert news(says(agent, "")) == []
        ends(agent)
        assert news(agent) == [LocalEngines(())]

    def test_a_companion_that_starts_again_learns_of_all(self) -> None:
        agent = says(with_companion(), "")
        agent.on(LinkMessage(2, Hello(WorkerId("engine-weights", 0, 1))))
        assert news(agent) == engines(alive=True)
