"""The master's use of the beats of agents and commands on other hosts, and of their silence."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import Job
from tests.unit.launcher.master.harness import MasterHarness, end_well, receive_all, receive_until
from tests.unit.wire.endpoints import credentials_in
from tests.waiting import WAIT_TIMEOUT, eventually_async
from unirun.collocation import Device, Inventory, Node
from unirun.errors import ConnectionLost
from unirun.failover import silence
from unirun.failover.draft import Due
from unirun.failover.takeover import resume
from unirun.launcher.master import beats
from unirun.launcher.master.beats import unheard
from unirun.rendezvous.election import silent_key
from unirun.values import WorkerId
from unirun.wire.aio import Stream, connect
from unirun.wire.credentials import Credentials
from unirun.wire.messages import Attach, Ended, Heartbeat, Shutdown
from unirun.wire.reports import HeldWorker, Knock, Message, Notice

TWO = Inventory(tuple(Node(name, (0,), (Device("0", ""), Device("1", ""))) for name in ("n0", "n1")))


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become twentieths."""
    for name in ("SILENCE_TIMEOUT", "GIVE_UP_DELAY", "HEARTBEAT_INTERVAL", "SILENCE_POLL_INTERVAL"):
        monkeypatch.setattr(silence, name, getattr(silence, name) / 20)
    for name in (
        "SILENCE_TIMEOUT",
        "GIVE_UP_DELAY",
        "HEARTBEAT_INTERVAL",
        "SILENCE_POLL_INTERVAL",
        "OWNER_TIMEOUT",
        "REJOIN_TIMEOUT",
    ):
        monkeypatch.setattr(beats, name, getattr(beats, name) / 20)


@pytest.fixture
def harness(tmp_path: Path) -> MasterHarness:
    return MasterHarness(tmp_path, tcp=True)


@pytest.fixture
def n0(tmp_path: Path, harness: MasterHarness) -> Credentials:
    return credentials_in(tmp_path / "n0", harness.token, "n0")


async def answer(stream: Stream, read: float = 0.0) -> Heartbeat:
    stream.send(Heartbeat(read))
    told = (await receive_until(stream, Heartbeat))[-1]
    assert isinstance(told, Heartbeat)
    return told


def texts(told: list[Message]) -> list[str]:
    return [each.text for each in told if isinstance(each, Notice)]


class TestAnAnswer:
    def test_each_beat_of_an_agent_is_answered(self, harness: MasterHarness, n0: Credentials) -> None:
        async def others() -> None:
            agent = await harness.agent(n0)
            assert [(await answer(agent)).age < WAIT_TIMEOUT for _ in range(3)] == [True] * 3
            await end_well(agent)

        assert harness.run(others) == []

    def test_a_master_whose_term_is_old_is_sure_while_all_nodes_read_its_answers(
        self, harness: MasterHarness, n0: Credentials
    ) -> None:
        harness.term.renewed = 0.0

        async def others() -> None:
            agent = await harness.agent(n0)
            first = await answer(agent)
            assert first.age == first.at
            second = await answer(agent, first.at)
            assert second.age == second.at - first.at
            await end_well(agent)

        assert harness.run(others) == []

    def test_a_master_whose_term_is_old_is_not_sure_without_all_nodes(self, tmp_path: Path) -> None:
        harness = MasterHarness(tmp_path, Job({"actor": 2}, inventory=TWO, restarts={"actor": 1}), tcp=True)
        n0 = credentials_in(tmp_path / "n0", harness.token, "n0")

        async def others() -> None:
            agent = await harness.greet(harness.model.join("n0"), n0)
            first = await answer(agent)
            harness.term.renewed = 0.0
            second = await answer(agent, first.at)
            assert second.age == second.at
            await agent.close()

        assert harness.run(others) == []

    def test_a_master_whose_term_is_old_needs_no_answer_to_be_read_by_a_node_that_is_given_up(
        self, tmp_path: Path
    ) -> None:
        model = Job({"actor": 2}, inventory=TWO, restarts={"actor": 1})
        model.state = replace(model.state, placement=replace(model.state.placement, lost=("n1",)))
        harness = MasterHarness(tmp_path, model, tcp=True)
        n0 = credentials_in(tmp_path / "n0", harness.token, "n0")

        async def others() -> None:
            agent = await harness.greet(model.join("n0"), n0)
            first = await answer(agent)
            harness.term.renewed = 0.0
            second = await answer(agent, first.at)
            assert second.age == second.at - first.at
            await agent.close()

        assert harness.run(others) == []


@pytest.mark.usefixtures("hurried")
class TestSilence:
    def test_a_silent_agent_is_reported_then_lost_and_sent_away_when_it_comes_back(
        self, harness: MasterHarness, n0: Credentials
    ) -> None:
        async def others() -> None:
            watcher, agent = await harness.greet(Attach()), await harness.agent(n0)
            await answer(agent)
            told = await receive_until(watcher, Ended)
            assert (
                "node n0 has been silent for 0.2 s; its ranks start elsewhere in 0.14 s unless it is heard"
                in (texts(told))
            )
            (end,) = [each for each in told if isinstance(each, Ended)]
            assert (end.code, end.phase) == (137, "failed")
            assert "the agent of node n0 is gone: it has been silent for more than 0.34 s" in end.report
            await receive_all(agent)
            again = await harness.greet(harness.model.join("n0"), n0)
            assert await again.receive() == Shutdown()
            await again.close()
            await watcher.close()

        assert harness.run(others) == []
        (event,) = harness.events("silence")
        assert event.startswith("node n0 has been silent")
        assert harness.store.get(silent_key("job-1", "n0")) is not None

    def test_an_agent_that_is_heard_again_goes_on(self, harness: MasterHarness, n0: Credentials) -> None:
        async def others() -> None:
            watcher, agent = await harness.greet(Attach()), await harness.agent(n0)
            await answer(agent)
            while "silent" not in "".join(texts(told := await receive_until(watcher, Notice))):
                pass
            await answer(agent)
            while "is heard again" not in "".join(texts(told)):
                told = await receive_until(watcher, Notice)
            await eventually_async(lambda: harness.store.get(silent_key("job-1", "n0")) is None)
            await end_well(agent)
            await watcher.close()

        assert harness.run(others) == []
        assert harness.status()["phase"] == "succeeded"

    def test_an_agent_that_beats_is_never_silent(self, harness: MasterHarness, n0: Credentials) -> None:
        answered: list[float] = []

        async def others() -> None:
            agent = await harness.agent(n0)
            for _ in range(20):
                await answer(agent)
                answered.append(time.monotonic())
                await asyncio.sleep(silence.HEARTBEAT_INTERVAL / 2)
            await end_well(agent)

        assert harness.run(others) == []
        # On a busy machine its beats may come late.
        longest = max(later - earlier for earlier, later in pairwise(answered))
        assert harness.events("silence") == [] or longest > silence.SILENCE_TIMEOUT / 2

    def test_an_agent_that_has_heard_nothing_connects_anew_and_goes_on(
        self, harness: MasterHarness, n0: Credentials
    ) -> None:
        held = tuple(HeldWorker(WorkerId("actor", rank, 0), 100 + rank, True, 0) for rank in (0, 1))

        async def others() -> None:
            old = await harness.agent(n0)
            await answer(old)
            await eventually_async(lambda: harness.events("silence") != [])
            new = await harness.greet(replace(harness.model.join("n0"), workers=held), n0)
            await answer(new)
            await eventually_async(lambda: len(harness.events("silence")) > 1)
            await receive_all(old)
            await end_well(new)

        assert harness.run(others) == []
        # On a busy machine it may be silent once more.
        assert [text.partition(" has")[0] for text in harness.events("silence")[:2]] == [
            "node n0",
            "node n0 is heard again",
        ]
        assert harness.status()["phase"] == "succeeded"

    def test_a_node_that_proves_the_token_and_says_nothing_is_not_silent(
        self, harness: MasterHarness, n0: Credentials
    ) -> None:
        """The agent of that node takes the answer for a sign that no master has given it up."""

        async def others() -> None:
            agent = await harness.agent(n0)
            await answer(agent)
            assert harness.tcp is not None
            for _ in range(10):
                await asyncio.sleep(silence.SILENCE_TIMEOUT / 4)
                (await connect(harness.tcp, n0)).abort()
            assert harness.events("silence") == []
            await end_well(agent)

        assert harness.run(others) == []

    def test_a_node_is_not_silent_that_has_come_to_the_agent_on_the_head(
        self, harness: MasterHarness, n0: Credentials
    ) -> None:
        async def others() -> None:
            agent = await harness.agent(n0)
            await answer(agent)
            # Without TLS only the address is known.
            for node, origin in [("n0", "192.0.2.1")] * 5 + [("", "127.0.0.1")] * 6:
                await asyncio.sleep(silence.SILENCE_TIMEOUT / 4)
                agent.send(Knock(node, origin))
            assert harness.events("silence") == []
            await end_well(agent)

        assert harness.run(others) == []

    @pytest.mark.parametrize("who", ["nobody", "another node"])
    def test_a_connection_from_the_address_of_a_lost_node_does_not_stop_its_failover(
        self, harness: MasterHarness, n0: Credentials, tmp_path: Path, who: str
    ) -> None:
        n1 = credentials_in(tmp_path / "n1", harness.token, "n1")

        async def others() -> None:
            agent = await harness.agent(n0)
            await answer(agent)
            assert harness.tcp is not None
            while not harness.events("silence"):
                if who == "nobody":
                    _, writer = await asyncio.open_connection(harness.tcp.addr, harness.tcp.port)
                    writer.transport.abort()
                else:
                    (await connect(harness.tcp, n1)).abort()
                await asyncio.sleep(silence.SILENCE_TIMEOUT / 4)
            agent.abort()

        assert harness.run(others) == []
        (text, *_) = harness.events("silence")
        assert text.startswith("node n0 has been silent")

    def test_a_command_that_beats_gets_beats_until_it_is_silent(
        self, harness: MasterHarness, n0: Credentials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(beats, "OWNER_TIMEOUT", 0.3)

        async def others() -> None:
            agent, watcher = await harness.agent(), await harness.greet(Attach(), n0)
            watcher.send(Heartbeat())
            assert len([each for each in await receive_all(watcher) if isinstance(each, Heartbeat)]) >= 2
            await end_well(agent)

        assert harness.run(others) == []


def test_a_node_that_is_gone_is_not_waited_for_though_it_proves_the_token_once_more(tmp_path: Path) -> None:
    harness = MasterHarness(tmp_path, Job({"actor": 2}, inventory=TWO), tcp=True)
    n0, n1 = (credentials_in(tmp_path / name, harness.token, name) for name in ("n0", "n1"))

    async def others() -> None:
        agent = await harness.greet(harness.model.join("n0"), n0)
        await answer(agent)
        began = harness.master._beats._joined
        assert began is not None
        spare = await harness.greet(harness.model.join("n1"), n1)
        await answer(spare)
        assert harness.master._beats._joined == began, "the time of the others counts from the first one on"
        assert harness.master._beats.watches("n1")
        await spare.close()
        await eventually_async(lambda: harness.events("agent_lost") != [])
        for origin in ("n1", ""):
            agent.send(Knock(origin, "127.0.0.1"))
        await answer(agent)
        assert not harness.master._beats.watches("n1")
        assert harness.master._beats.watches("n0")
        await end_well(agent)

    assert harness.run(others) == []


def taking_over(tmp_path: Path) -> MasterHarness:
    """A master that has taken over from one with two nodes, which have to join soon."""
    harness = MasterHarness(tmp_path, Job({"actor": 2}, inventory=TWO, restarts={"actor": 1}), tcp=True)
    harness.model.on(*(harness.model.join(node) for node in ("n0", "n1")))
    _, term, contexts = harness._parts
    harness._parts = replace(harness.model.state, epoch=1), term, contexts

    def begin(state, now):  # type: ignore[no-untyped-def]
        state, commands = resume(state, now)
        return state, [
            replace(each, delay=0.05) if getattr(each, "event", None) == Due.REJOIN else each
            for each in commands
        ]

    harness.core = replace(harness.core, begin=begin)
    return harness


@pytest.mark.usefixtures("hurried")
def test_nodes_that_do_not_join_another_master_are_marked_before_they_are_given_up(tmp_path: Path) -> None:
    harness = taking_over(tmp_path)
    seen = []

    async def others() -> None:
        await eventually_async(lambda: harness.store.get(silent_key("job-1", "n1")) is not None)
        seen.append(harness.events("agent_lost"))
        await eventually_async(lambda: harness.status()["phase"] == "failed")

    assert harness.run(others) == []
    assert seen == [[]]
    assert len(harness.events("agent_lost")) == 2


@pytest.mark.usefixtures("hurried")
def test_a_node_that_joins_another_master_after_it_was_marked_is_marked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent would end its workers for the mark when it hears no master for a moment."""
    monkeypatch.setattr(beats, "GIVE_UP_DELAY", 1.0)
    harness = taking_over(tmp_path)
    n0 = credentials_in(tmp_path / "n0", harness.token, "n0")

    async def others() -> None:
        marked = [lambda node=node: harness.store.get(silent_key("job-1", node)) for node in ("n0", "n1")]
        await eventually_async(lambda: marked[0]() is not None)
        agent = await harness.greet(harness.model.join("n0"), n0)
        await eventually_async(lambda: len(harness.events("agent_lost")) == 1)
        await eventually_async(lambda: marked[0]() is None)
        assert marked[1]() is not None
        await end_well(agent)

    assert harness.run(others) == []


def test_a_stream_whose_peer_has_closed_it_is_gone_and_one_without_an_answer_is_silent() -> None:
    def lost(cause: OSError | None) -> ConnectionLost:
        error = ConnectionLost("x")
        error.__cause__ = cause
        return error

    assert not unheard(lost(None))
    assert not unheard(lost(ConnectionResetError()))
    assert not unheard(lost(BrokenPipeError()))
    assert unheard(lost(TimeoutError(errno.ETIMEDOUT, "")))
    assert unheard(lost(OSError(errno.EHOSTUNREACH, "")))


def test_agents_that_somebody_has_stopped_go_on_and_those_that_a_debugger_holds_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = {1: ("T", False), 2: ("S", False), 3: ("t", True)}
    sent: list[tuple[int, int]] = []
    said: list[tuple[str, str]] = []

    def kill(pid: int, signum: int) -> None:
        sent.append((pid, signum))
        states[pid] = ("S", False)

    monkeypatch.setattr(beats, "state_of", states.__getitem__)
    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(beats, "STOPPED_POLL_INTERVAL", 0.001)

    async def look() -> None:
        task = asyncio.create_task(
            beats.wake_stopped(
                lambda: {"n0": 1, "n1": 2, "n2": 3}, lambda node, text: said.append((node, text))
            )
        )
        await asyncio.sleep(0.05)
        task.cancel()

    asyncio.run(look())
    assert sent == [(1, signal.SIGCONT)]
    assert said == [
        ("n0", "the agent of n0 was stopped (SIGSTOP); it goes on, as the job is to end"),
        ("n2", "a debugger holds the agent of n2 (pid 3); the job ends when it lets go"),
    ]
