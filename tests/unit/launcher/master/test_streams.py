"""The master's reactions to the messages of its streams: agents, commands, and others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import TERM, Job
from tests.unit.failover.multi_node import nodes
from tests.unit.launcher.master.harness import (
    ELECTION_PREFIX,
    MasterHarness,
    end_well,
    receive_all,
    receive_until,
    worker_exited,
)
from tests.waiting import eventually_async
from unirun.errors import StoreAway, WireError
from unirun.launcher.master import writer as writing
from unirun.observe.events import read_lines
from unirun.rendezvous.election import leader_of
from unirun.values import WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.aio import connect
from unirun.wire.certificates import make_tls
from unirun.wire.credentials import Credentials, load_credentials
from unirun.wire.handshake import new_token
from unirun.wire.messages import (
    Attach,
    Dismissed,
    Ended,
    Offer,
    RoleChanged,
    Shutdown,
    StartRole,
    Stop,
    StopWorkers,
    View,
    WorkerOutput,
)
from unirun.wire.reports import (
    Ending,
    FromWorker,
    GroupFormed,
    MasterReply,
    MasterRequest,
    Metrics,
    Notice,
    Sample,
    Unanswered,
    WorkerRunning,
)

METRICS = {"loss": 0.5, "norm": None}
"""As JSON has them."""


class TestAnAgent:
    def test_an_agent_makes_the_address_of_its_host_known_as_long_as_it_is_a_part_of_the_job(
        self, tmp_path: Path
    ) -> None:
        harness = MasterHarness(tmp_path, Job({"actor": 2}, inventory=nodes(2)))
        first, second = "192.0.2.1", "192.0.2.2"

        async def others() -> None:
            known = harness.master._is_host
            agent = await harness.greet(replace(harness.model.join("n0"), addr=first))
            await eventually_async(lambda: len(harness.events("join")) == 1)
            assert (known(first), known(second)) == (True, False)
            spare = await harness.greet(replace(harness.model.join("n1"), addr=second))
            await eventually_async(lambda: len(harness.events("join")) == 2)
            assert (known(first), known(second)) == (True, True)
            await spare.close()
            await eventually_async(lambda: harness.events("agent_lost") != [])
            assert (known(first), known(second)) == (True, False)
            await receive_until(agent, StartRole)
            await end_well(agent)

        assert harness.run(others) == []

    def test_an_agent_is_heard_by_who_follows_the_job_and_by_who_reads(self, harness: MasterHarness) -> None:
        async def others() -> None:
            watcher, agent = await harness.greet(Attach()), await harness.agent()
            agent.send(Notice("actor:0", "is slow"))
            agent.send(Sample("n0", {"actor:0": 5_000}, {"actor:0": 1.5}))
            agent.send(FromWorker(WorkerId("actor", 1, 0), Metrics({"loss": 0.5, "norm": None}, 3.0)))
            told = await receive_until(watcher, Notice)
            assert WorkerOutput(WorkerId("actor", 1, 0), 1, "n0") in told
            assert RoleChanged("actor", "running", 0, 2, 2) in told
            assert told[-1] == Notice("actor:0", "is slow")
            await eventually_async(lambda: harness.status()["roles"][0]["workers"][1]["metrics"] == METRICS)
            worker = harness.status()["roles"][0]["workers"][0]
            assert (worker["memory"], worker["cpu"], worker["pid"]) == (5_000, 1.5, 100)
            await end_well(agent)
            await watcher.close()

        assert harness.run(others) == []
        (measured,) = read_lines(harness.job.metrics)
        assert measured == {"time": 3.0, "role": "actor", "rank": 1, "values": METRICS}
        assert harness.events("notice") == ["actor:0: is slow"]
        assert (harness.status()["phase"], harness.status()["epoch"], harness.status()["trouble"]) == (
            "succeeded",
            1,
            "",
        )

    def test_an_agent_gets_what_its_workers_ask_of_the_store(self, harness: MasterHarness) -> None:
        async def others() -> None:
            agent = await harness.agent()
            agent.send(FromWorker(WorkerId("actor", 0, 0), MasterRequest(1, "save_state", "", "aGk=")))
            agent.send(FromWorker(WorkerId("actor", 0, 0), MasterRequest(2, "load_state", "", "")))
            answers = [(await receive_until(agent, MasterReply))[-1] for _ in range(2)]
            assert answers == [
                MasterReply(WorkerId("actor", 0, 0), 1),
                MasterReply(WorkerId("actor", 0, 0), 2, "aGk="),
            ]
            await end_well(agent)

        assert harness.run(others) == []

    def test_an_agent_is_told_of_its_peers_in_a_moment(self, harness: MasterHarness) -> None:
        """News that waits for more news is sent by itself."""

        async def others() -> None:
            agent = await harness.agent()
            view = (await receive_until(agent, View))[-1]
            assert isinstance(view, View)
            assert [worker.phase for worker in view.roles[0].workers] == ["running", "running"]
            await end_well(agent)

        assert harness.run(others) == []

    def test_an_agent_whose_stream_ends_is_gone(self, harness: MasterHarness) -> None:
        async def others() -> None:
            watcher, agent = await harness.greet(Attach()), await harness.agent()
            await agent.close()
            (end,) = [each for each in await receive_until(watcher, Ended) if isinstance(each, Ended)]
            assert (end.code, end.phase) == (137, "failed")
            assert "the agent of node n0 is gone: " in end.report
            await watcher.close()

        assert harness.run(others) == []
        assert harness.events("agent_lost") == ["n0: the peer closed the stream"]

    def test_an_agent_on_the_masters_host_has_a_command_that_is_not_waited_for(
        self, harness: MasterHarness
    ) -> None:
        async def others() -> None:
            await end_well(await harness.agent(followed=True))

        assert harness.run(others) == []

    def test_an_agent_that_comes_back_on_another_stream_is_not_gone(self, harness: MasterHarness) -> None:
        async def others() -> None:
            first = await harness.agent()
            again = await harness.greet(harness.model.join("n0"))
            await receive_until(again, View)
            await first.close()
            again.send(WorkerRunning(WorkerId("actor", 0, 0), 0))
            await end_well(again)

        assert harness.run(others) == []
        assert harness.status()["phase"] != "launching"

    def test_an_agent_of_another_process_is_sent_away_while_the_first_is_there(
        self, harness: MasterHarness
    ) -> None:
        async def others() -> None:
            agent = await harness.agent()
            second = await harness.greet(replace(harness.model.join("n0"), pid=2))
            assert await second.receive() == Shutdown()
            await second.close()
            agent.send(Notice("actor:0", "is still heard"))
            await end_well(agent)

        assert harness.run(others) == []
        assert harness.events("refused")[0] == "a second agent says that it is n0"
        assert harness.events("notice") == ["actor:0: is still heard"]

    def test_an_agent_of_no_node_of_the_job_is_sent_away(self, harness: MasterHarness) -> None:
        async def others() -> None:
            stranger = await harness.greet(replace(harness.model.join("n0"), node="n9"))
            assert await stranger.receive() == Shutdown()
            stranger.send(Notice("n9", "is not heard"))
            agent = await harness.agent()
            await end_well(agent)
            await stranger.close()

        assert harness.run(others) == []
        assert harness.events("notice") == []

    def test_an_agent_that_says_what_cannot_be_is_not_believed_and_everybody_hears_why(
        self, harness: MasterHarness
    ) -> None:
        async def others() -> None:
            watcher, agent = await harness.greet(Attach()), await harness.agent()
            agent.send(FromWorker(WorkerId("actor", 0, 0), GroupFormed(9)))
            notice = (await receive_until(watcher, Notice))[-1]
            assert notice == Notice("master", "refused GroupFormed: actor has no generation 9 yet")
            await end_well(agent)
            await watcher.close()

        assert harness.run(others) == []
        (text,) = harness.events("refused")
        assert text.startswith(
            "FromWorker(worker=WorkerId(role='actor', rank=0, incarnation=0), message=GroupFormed(generation=9)): actor has"
        )

    def test_an_agent_that_has_not_heard_of_the_end_hears_it_of_the_next_master(self, tmp_path: Path) -> None:
        harness = MasterHarness(tmp_path, Job({"actor": 1}).running().exits("actor", 0))

        async def others() -> None:
            agent = await harness.greet(harness.model.join("n0"))
            assert await agent.receive() == Shutdown()
            await agent.close()

        assert harness.run(others) == []
        assert leader_of(harness.store, ELECTION_PREFIX) is None

    def test_an_agent_that_gets_no_answer_from_another_host_is_believed(self, tmp_path: Path) -> None:
        """Its own address, and that of a node that has left, say nothing."""
        harness = MasterHarness(tmp_path, Job({"actor": 2}, inventory=nodes(4)))
        addrs = {f"n{number}": f"192.0.2.{number + 1}" for number in range(4)}

        async def others() -> None:
            joins = [replace(harness.model.join(node), addr=addr) for node, addr in addrs.items()]
            agent, other, left, _ = [await harness.greet(join) for join in joins]
            await left.close()
            await eventually_async(lambda: harness.events("agent_lost") != [])
            other.send(Unanswered("n1", (addrs["n0"], addrs["n1"], addrs["n2"], "192.0.2.99")))
            await eventually_async(lambda: harness.events("cut_off") != [])
            await receive_until(agent, StartRole)
            await end_well(agent)

        assert harness.run(others) == []
        text = (
            "n0 and n1 do not hear each other, though both are heard: connections between them get no answer"
        )
        assert harness.events("cut_off") == [text]


class TestACommand:
    def test_a_command_may_stop_the_job_and_is_told_how_it_ends(self, harness: MasterHarness) -> None:
        async def others() -> None:
            agent = await harness.agent()
            command = await harness.greet(Stop(TERM, "unirun stop", 7.0))
            assert (await receive_until(agent, StopWorkers))[-1] == StopWorkers("actor", (0, 1), TERM, 7.0)
            for rank in (0, 1):
                agent.send(worker_exited(rank, None, TERM, TERM))
            assert (await receive_until(command, Ended))[-1] == Ended(143, "stopped", "unirun stop", "")
            await receive_until(agent, Shutdown)
            await command.close()
            await agent.close()

        assert harness.run(others) == []

    def test_a_command_that_follows_the_job_may_stop_it_later_and_leave_a_note(
        self, harness: MasterHarness
    ) -> None:
        async def others() -> None:
            agent, command = await harness.agent(), await harness.greet(Attach())
            command.send(Notice("cli", "a key was pressed"))
            command.send(Stop(TERM, "got SIGTERM"))
            await receive_until(agent, StopWorkers)
            for rank in (0, 1):
                agent.send(worker_exited(rank, None, TERM, TERM))
            await receive_until(command, Ended)
            await command.close()
            await receive_until(agent, Shutdown)
            await agent.close()

        assert harness.run(others) == []
        assert harness.events("notice") == ["a key was pressed"]

    def test_a_command_that_leaves_is_not_missed(self, harness: MasterHarness) -> None:
        async def others() -> None:
            watcher = await harness.greet(Attach())
            agent = await harness.agent()
            await watcher.close()
            await end_well(agent)

        assert harness.run(others) == []

    def test_a_command_that_begins_with_something_else_is_refused(self, harness: MasterHarness) -> None:
        async def others() -> None:
            other = await harness.greet(Notice("x", "y"))
            await receive_all(other)
            await end_well(await harness.agent())

        assert harness.run(others) == []
        assert harness.events("refused") == ["a connection began with Notice"]

    def test_a_command_that_comes_when_the_job_has_ended_is_told_how(self, harness: MasterHarness) -> None:
        async def others() -> None:
            agent = await harness.agent()
            for rank in (0, 1):
                agent.send(worker_exited(rank))
            await receive_until(agent, Shutdown)
            late = await harness.greet(Attach())
            assert (await receive_until(late, Ended))[-1] == Ended(0, "succeeded", "actor succeeded", "")
            await late.close()
            await agent.close()

        assert harness.run(others) == []


class TestANodeThatOffersItself:
    def test_a_node_that_offers_itself_to_a_job_on_one_host_is_told_why_not(
        self, harness: MasterHarness
    ) -> None:
        async def others() -> None:
            node = await harness.greet(Offer("n9", "h9", -1, "", {}))
            dismissed = await node.receive()
            assert isinstance(dismissed, Dismissed)
            assert dismissed.problem == "the job runs on one host"
            await node.close()
            await end_well(await harness.agent())

        assert harness.run(others) == []


class TestAStranger:
    def test_a_stranger_is_refused_before_it_is_heard(self, harness: MasterHarness) -> None:
        async def others() -> None:
            with pytest.raises(WireError):
                await connect(UnixAddress.here(harness.path), Credentials(new_token()))
            await end_well(await harness.agent())

        assert harness.run(others) == []
        (text,) = harness.events("refused")
        assert text.startswith("a connection was refused: ")

    def test_a_stranger_that_leaves_without_a_word_is_noted(self, harness: MasterHarness) -> None:
        async def others() -> None:
            other = await connect(UnixAddress.here(harness.path), Credentials(harness.token))
            await other.close()
            await end_well(await harness.agent())

        assert harness.run(others) == []
        (text,) = harness.events("refused")
        assert text.startswith("a connection ended early: ")


class TestAnotherHost:
    """Its agent comes over TLS, with a certificate of its node."""

    def agent_on(self, harness: MasterHarness, folder: Path, node: str) -> Credentials:
        folder.mkdir()
        (folder / "token").write_text(harness.token.hex())
        (folder / "token").chmod(0o600)
        make_tls(folder, harness.token, node)
        return load_credentials(folder)

    def test_an_agent_on_another_host_joins_as_the_node_of_its_certificate(self, tmp_path: Path) -> None:
        harness = MasterHarness(tmp_path, tcp=True)
        ours = self.agent_on(harness, tmp_path / "n0", "n0")

        async def others() -> None:
            await end_well(await harness.agent(ours))

        assert harness.run(others) == []
        assert harness.events("refused") == []

    def test_an_agent_that_says_it_is_another_node_than_its_certificate_is_sent_away(
        self, tmp_path: Path
    ) -> None:
        harness = MasterHarness(tmp_path, tcp=True)
        ours = self.agent_on(harness, tmp_path / "n1", "n1")

        async def others() -> None:
            agent = await harness.greet(harness.model.join("n0"), ours)
            assert (await receive_until(agent, Shutdown))[-1] == Shutdown()
            await agent.close()
            await end_well(await harness.agent())

        assert harness.run(others) == []
        assert harness.events("refused") == ["an agent on node n1 says that it is n0"]

    def test_a_command_of_another_node_that_comes_after_the_end_is_told_of_it(self, tmp_path: Path) -> None:
        harness = MasterHarness(tmp_path, tcp=True)
        ours = self.agent_on(harness, tmp_path / "n0", "n0")

        async def others() -> None:
            await end_well(await harness.agent(ours, followed=True))
            await eventually_async(lambda: not harness.master._tasks, "it waits for the command alone")
            watcher = await harness.greet(Attach(node="n0"), ours)
            assert (await receive_until(watcher, Ended))[-1] == Ended(0, "succeeded", "actor succeeded", "")
            await watcher.close()

        assert harness.run(others) == []

    def test_a_command_comes_from_any_node(self, tmp_path: Path) -> None:
        harness = MasterHarness(tmp_path, tcp=True)
        ours = self.agent_on(harness, tmp_path / "n1", "n1")

        async def others() -> None:
            watcher = await harness.greet(Attach(), ours)
            await end_well(await harness.agent())
            assert (await receive_until(watcher, Ended))[-1] == Ended(0, "succeeded", "actor succeeded", "")
            await watcher.close()

        assert harness.run(others) == []


def test_a_status_that_cannot_be_written_is_written_with_the_next_change(harness: MasterHarness) -> None:
    in_the_way = harness.job.state
    in_the_way.unlink(missing_ok=True)
    in_the_way.mkdir()

    async def others() -> None:
        agent = await harness.agent()
        await eventually_async(lambda: harness.events("error") != [])
        in_the_way.rmdir()
        await end_well(agent)

    assert harness.run(others) == []
    assert harness.events("error")[0].startswith("the state cannot be written: ")
    assert harness.status()["phase"] == "succeeded"


class TestAStoreThatIsAway:
    def test_an_unreachable_store_is_told_of_once_and_so_is_its_return(
        self, harness: MasterHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writing, "RETRY_DELAY", 0.001)
        troubles = []

        async def others() -> None:
            watcher, agent = await harness.greet(Attach()), await harness.agent()
            await eventually_async(lambda: harness.status()["roles"][0]["phase"] == "running")
            harness.store.faults.extend(["away", "lost", "lost", "lost", "away"])
            agent.send(worker_exited(0))
            troubles.extend([(await receive_until(watcher, Notice))[-1] for _ in range(2)])
            await end_well(agent)
            await watcher.close()

        assert harness.run(others) == []
        words = "it is away; decisions wait until it can be written"
        assert troubles == [Notice("store", words), Notice("store", "it is back")]

    def test_an_unreachable_store_does_not_hold_up_an_end_which_agents_tell_the_next_master(
        self, harness: MasterHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writing, "STOP_WRITE_TIMEOUT", 0.02)
        monkeypatch.setattr(writing, "RETRY_DELAY", 0.001)
        back = asyncio.Event()

        def away() -> None:
            if not back.is_set():
                raise StoreAway("it is away")

        async def others() -> None:
            agent = await harness.agent()
            await eventually_async(lambda: harness.status()["roles"][0]["phase"] == "running")
            harness.store.interfere = away
            await harness.greet(Stop(TERM, "enough"))
            order = (await receive_until(agent, Shutdown))[-1]
            assert order == Shutdown(30.0, Ending("stopped", 143, "enough", False))
            late = await harness.greet(harness.model.join("n0"))
            assert order in await receive_until(late, Shutdown)
            back.set()
            for rank in (0, 1):
                late.send(worker_exited(rank, None, TERM, TERM))
            await agent.close()
            assert (await receive_until(late, Shutdown))[-1] == Shutdown()
            await late.close()

        assert harness.run(others) == []
        assert (harness.status()["phase"], harness.status()["code"]) == ("stopped", 143)
