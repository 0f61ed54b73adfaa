"""The agent's contact with a master on another host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest

from tests.unit.rendezvous.fake_master import FakeJob
from tests.unit.wire.endpoints import NODE, Endpoint, fail_on_refusal
from tests.waiting import WAIT_TIMEOUT, eventually_async
from unirun.errors import ConnectionLost, RendezvousError, UsageError
from unirun.failover import silence, takeover
from unirun.launcher import contact as contacts
from unirun.launcher import contact as fences
from unirun.launcher.contact import Contact, Witness
from unirun.observe.jobdir import job_at
from unirun.rendezvous import masters
from unirun.rendezvous.creation import create_job
from unirun.rendezvous.election import Leader, campaign, is_marked, job_prefix, silent_key
from unirun.rendezvous.masters import Masters, Vacant, call_master
from unirun.rendezvous.store.protocol import Put, clock
from unirun.wire.address import UnixAddress
from unirun.wire.aio import Stream, StreamServer, connect
from unirun.wire.certificates import make_tls
from unirun.wire.messages import Heartbeat
from unirun.wire.reports import Knock
from unirun.wire.sockets import tcp_address


class ContactHarness:
    """A master's side of some streams, and a contact whose other end they are."""

    def __init__(self, endpoint: Endpoint, job: FakeJob) -> None:
        self.endpoint, self.job = endpoint, job
        self.answers = True
        self.failing = 3
        self.beats = 0
        self.attempts: list[tuple[int, float]] = []
        self.expired = asyncio.Event()
        self.contact = Contact(job.job_dir, "n0", self.again, self.expired.set)

    async def again(self, epoch: int, timeout: float) -> tuple[int, Stream]:
        self.attempts.append((epoch, timeout))
        if len(self.attempts) <= self.failing:
            raise RendezvousError("nobody answers")
        return epoch, await self.stream()

    async def stream(self) -> Stream:
        return await connect(self.endpoint.address, self.endpoint.credentials)

    def begin(self, stream: Stream) -> None:
        self.tasks = [asyncio.ensure_future(work) for work in self.contact.begin(stream)]

    async def serve(self, stream: Stream) -> None:
        while True:
            await stream.receive()
            self.beats += 1
            if self.answers:
                stream.send(Heartbeat())

    def run(self, play: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            server = StreamServer(
                self.endpoint.listen(), self.endpoint.credentials, self.serve, lambda *_: None
            )
            try:
                async with asyncio.timeout(WAIT_TIMEOUT):
                    await play()
            finally:
                for task in self.tasks:
                    task.cancel()
                # The kernel would kill this process.
                self.contact.close()
                if self.contact._store is not None:
                    self.contact._store.close()
                server.close()

        asyncio.run(main())

    async def hear(self, stream: Stream) -> None:
        while True:
            message = await stream.receive()
            assert isinstance(message, Heartbeat)
            self.contact.heard()
            self.contact.answered(message)


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    monkeypatch.setattr(contacts, "HEARTBEAT_INTERVAL", 0.01)
    monkeypatch.setattr(contacts, "SILENCE_POLL_INTERVAL", 0.01)
    monkeypatch.setattr(contacts, "MASTER_RECEIVE_TIMEOUT", 0.1)
    monkeypatch.setattr(contacts, "RECONNECT_TIMEOUT", 0.02)
    monkeypatch.setattr(contacts, "KERNEL_KILL_DELAY", 60.0)
    with FakeJob() as job:
        yield ContactHarness(Endpoint("insecure", tmp_path), job)


def test_beats_that_are_answered_renew_the_fence(harness: ContactHarness) -> None:
    async def play() -> None:
        stream = await harness.stream()
        harness.begin(stream)
        first = harness.contact._fence.until
        tasks = [asyncio.ensure_future(do) for do in (harness.contact.keep(1, stream), harness.hear(stream))]
        while harness.contact._fence.until < first + 0.1:
            await asyncio.sleep(0.01)
        assert harness.attempts == []
        for task in tasks:
            task.cancel()
        stream.abort()

    harness.run(play)
    assert harness.beats > 2


def test_an_agent_that_hears_nothing_connects_anew_until_somebody_answers(harness: ContactHarness) -> None:
    harness.answers = False

    async def play() -> None:
        stream = await harness.stream()
        harness.begin(stream)
        epoch, again = await harness.contact.keep(3, stream)
        assert epoch == 3
        assert again is not stream
        stream.abort()
        again.abort()

    harness.run(play)
    assert harness.attempts == [(3, 0.02)] * 3 + [(3, 0.04)]


def test_the_attempts_of_an_agent_are_short_again_when_it_has_heard_its_master(
    harness: ContactHarness,
) -> None:
    harness.answers = False
    harness.failing = 1 << 20

    async def play() -> None:
        stream = await harness.stream()
        harness.begin(stream)
        hearing = asyncio.ensure_future(harness.hear(stream))
        keeping = asyncio.ensure_future(harness.contact.keep(3, stream))
        await eventually_async(lambda: len(harness.attempts) > 3)
        # Longer than the agent waits for a message.
        harness.answers, before = True, harness.beats
        await eventually_async(lambda: harness.beats >= before + 30)
        assert harness.attempts[3] == (3, 0.04)
        harness.answers, harness.failing = False, 0
        _, again = await keeping
        hearing.cancel()
        stream.abort()
        again.abort()

    harness.run(play)
    assert harness.attempts[-1] == (3, 0.02)


def test_an_agent_connects_anew_for_as_long_as_it_takes(
    harness: ContactHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signs that its node is not given up may keep it for hours without a master."""
    monkeypatch.setattr(contacts, "RECONNECT_TIMEOUT", 1e-9)
    harness.answers, harness.failing = False, 3200

    async def play() -> None:
        stream = await harness.stream()
        harness.begin(stream)
        _, again = await harness.contact.keep(3, stream)
        stream.abort()
        again.abort()

    harness.run(play)
    assert harness.attempts[-1] == (3, 8e-9)


def test_there_are_no_beats_to_a_master_on_this_host(harness: ContactHarness, tmp_path: Path) -> None:
    harness.endpoint = Endpoint("unix", tmp_path)

    async def play() -> None:
        stream = await harness.stream()
        harness.begin(stream)
        keeping = asyncio.ensure_future(harness.contact.keep(1, stream))
        done, _ = await asyncio.wait({keeping}, timeout=0.1)
        assert not done
        keeping.cancel()
        stream.abort()

    harness.run(play)
    assert harness.beats == 0
    assert harness.contact._timer is None


def test_an_agent_that_was_stopped_asks_the_store_who_leads(
    harness: ContactHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer counts for some seconds. A master whose successor leads is not obeyed."""
    harness.endpoint = Endpoint("unix", tmp_path)
    now = 100.0
    monkeypatch.setattr(contacts, "clock", lambda: now)
    store, prefix = harness.job.store, job_prefix("run-1")

    def lead(epoch: int) -> None:
        term = campaign(store, prefix, UnixAddress("/m", "h"), 1, ttl=60.0, deposing=epoch - 1)
        assert term is not None
        assert term.epoch == epoch

    async def play() -> None:
        nonlocal now
        lead(1)
        stream = await harness.stream()
        harness.begin(stream)
        now += contacts.TERM_CHECK_INTERVAL + 1.0
        assert await harness.contact.leads(1)
        lead(2)
        assert await harness.contact.leads(1)
        now += contacts.TERM_CHECK_INTERVAL + 1.0
        assert not await harness.contact.leads(1)
        stream.abort()

    harness.run(play)


def test_the_answer_who_leads_counts_for_less_time_than_a_new_master_waits_for_a_node() -> None:
    assert contacts.TERM_CHECK_INTERVAL < takeover.REJOIN_TIMEOUT


def test_an_agent_that_is_not_answered_is_told_to_end_its_workers(
    harness: ContactHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fences, "FENCE_TIMEOUT", 0.05)
    harness.answers = False

    async def play() -> None:
        stream = await harness.stream()
        harness.begin(stream)
        await harness.expired.wait()
        stream.abort()

    harness.run(play)


def test_an_agent_that_is_not_answered_may_go_on_while_its_node_is_not_marked(
    harness: ContactHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fences, "FENCE_TIMEOUT", 0.5)
    monkeypatch.setattr(fences, "UNMARKED_SECONDS", 0.4)

    async def play() -> None:
        stream = await harness.stream()
        harness.begin(stream)
        first = harness.contact._fence.until
        while harness.contact._fence.until < first + 0.5:
            await asyncio.sleep(0.01)
        harness.job.store.txn([], [Put(silent_key("run-1", "n0"), "1")])
        await harness.expired.wait()
        stream.abort()

    harness.run(play)


def test_an_agent_whose_store_cannot_be_opened_any_more_goes_on_until_its_time_is_over(
    harness: ContactHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file with the password of the store is gone, for example."""
    monkeypatch.setattr(fences, "FENCE_TIMEOUT", 0.5)
    looks = 0

    def refuse(*_: object, **__: object) -> NoReturn:
        nonlocal looks
        looks += 1
        raise UsageError("the store's password cannot be read")

    monkeypatch.setattr(contacts, "open_store", refuse)

    async def play() -> None:
        stream = await harness.stream()
        harness.begin(stream)
        await harness.expired.wait()
        assert looks > 1
        stream.abort()

    harness.run(play)


def test_an_agent_that_can_start_no_thread_goes_on_until_its_time_is_over(
    harness: ContactHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def out_of_threads(_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(fences, "FENCE_TIMEOUT", 0.5)
    monkeypatch.setattr(contacts, "TERM_CHECK_INTERVAL", 0.0)
    monkeypatch.setattr(asyncio, "to_thread", out_of_threads)

    async def play() -> None:
        stream = await harness.stream()
        harness.begin(stream)
        assert await harness.contact.leads(1)
        await harness.expired.wait()
        assert not harness.tasks[-1].done(), "it does not look for signs any more"
        stream.abort()

    harness.run(play)


@pytest.fixture
def away(harness: ContactHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """The head's address, for an agent on another host that has no store."""
    monkeypatch.setattr(fences, "FENCE_TIMEOUT", 1.0)
    endpoint = Endpoint("tls", tmp_path / "head")
    with endpoint.listen() as head:
        job, lock = create_job("run-2", endpoint.token, head=tcp_address(head, NODE))
        os.close(lock)
        make_tls(job.path, endpoint.token, "n0")
        harness.contact = Contact(job, "n0", harness.again, harness.expired.set)
        yield endpoint


def test_an_agent_without_the_store_goes_on_while_the_heads_agent_lets_it_in(
    harness: ContactHarness, away: Endpoint
) -> None:
    """The master is stopped: it accepts nothing. The agent on the head has the same socket."""
    told: list[Knock] = []
    witness = Witness(away.listener, away.credentials, told.append, lambda: True, fail_on_refusal)

    async def play() -> None:
        watching = asyncio.ensure_future(witness.watch())
        stream = await harness.stream()
        harness.begin(stream)
        first = harness.contact._fence.until
        while harness.contact._fence.until < first + 1.0:
            await asyncio.sleep(0.01)
        assert {(knock.node, knock.origin) for knock in told} == {("n0", "127.0.0.1")}
        watching.cancel()
        await harness.expired.wait()
        stream.abort()

    harness.run(play)


@pytest.mark.parametrize("where", ["store", "head"])
def test_a_sign_counts_from_the_beginning_of_the_look_for_it(
    harness: ContactHarness, where: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look may take long, and the node may be given up meanwhile."""
    if where == "head":
        request.getfixturevalue("away")
    window = 1.0 if where == "head" else 0.6
    monkeypatch.setattr(fences, "FENCE_TIMEOUT", 1.0)
    monkeypatch.setattr(fences, "UNMARKED_SECONDS", 0.6)
    now = clock()
    monkeypatch.setattr(contacts, "clock", lambda: now)
    looks: list[tuple[float, float]] = []

    def look(*_: object) -> bool:
        nonlocal now
        looks.append((now, harness.contact._fence.until))
        now += 0.2
        return where == "head"

    async def let_in(*_: object) -> bool:
        return look()

    monkeypatch.setattr(contacts, "is_marked", look)
    monkeypatch.setattr(contacts, "_lets_in", let_in)

    async def play() -> None:
        nonlocal now
        stream = await harness.stream()
        harness.begin(stream)
        now += 0.7
        await eventually_async(lambda: len(looks) > 3)
        stream.abort()

    harness.run(play)
    for (began, _), (_, until) in pairwise(looks):
        assert until == pytest.approx(began + window)


def test_the_heads_agent_lets_nobody_in_while_a_master_accepts(away: Endpoint) -> None:
    """A busy master keeps its connections, even if one waits at each look of the agent."""

    async def play() -> int:
        witness = Witness(away.listener, away.credentials, lambda knock: None, lambda: True, fail_on_refusal)
        watching, endpoint = asyncio.ensure_future(witness.watch()), away.listener.getsockname()
        waiting, accepted = [socket.create_connection(endpoint)], 0
        for _ in range(20):
            waiting.append(socket.create_connection(endpoint))
            await asyncio.sleep(0.1)
            with contextlib.suppress(BlockingIOError):
                away.listener.accept()[0].close()
                accepted += 1
        watching.cancel()
        for sock in waiting:
            sock.close()
        return accepted

    # The agent accepts one connection in half a second, to see whether that is old.
    assert asyncio.run(play()) >= 14


@pytest.mark.parametrize("led", [True, False])
def test_a_head_that_has_no_master_says_so_and_one_with_a_busy_master_does_not(
    away: Endpoint, led: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command waits long for a master that is busy or stopped, and not for one that cannot be started."""
    monkeypatch.setattr(masters, "BUSY_TIMEOUT", 0.0)
    witness = Witness(away.listener, away.credentials, lambda knock: None, lambda: led, fail_on_refusal)
    job = job_at("run-2")
    assert job.head is not None
    leader = Leader(0, job.head, 0)

    async def play() -> None:
        watching = asyncio.ensure_future(witness.watch())
        with pytest.raises(ConnectionLost if led else Vacant):
            await Masters(job).reach(leader, WAIT_TIMEOUT)
        with pytest.raises(ConnectionLost, match="closed" if led else "the job has no master now"):
            await asyncio.to_thread(call_master, job)
        watching.cancel()

    asyncio.run(play())


def test_a_machine_that_has_taken_the_heads_address_keeps_no_worker_alive(
    harness: ContactHarness, away: Endpoint
) -> None:
    """The kernel of that machine takes connections and bytes, which is no sign of the job."""
    accepted: list[socket.socket] = []
    away.listener.setblocking(False)

    async def play() -> None:
        accepting = asyncio.ensure_future(accept())
        stream = await harness.stream()
        harness.begin(stream)
        first = harness.contact._fence.until
        await harness.expired.wait()
        assert accepted != []
        assert harness.contact._fence.until == first
        accepting.cancel()
        stream.abort()

    async def accept() -> None:
        loop = asyncio.get_running_loop()
        while True:
            accepted.append((await loop.sock_accept(away.listener))[0])

    harness.run(play)
    for sock in accepted:
        sock.close()


def test_a_mark_is_that_of_one_node(harness: ContactHarness) -> None:
    store = harness.job.store
    assert not is_marked(store, "run-1", "a/b")
    store.txn([], [Put(silent_key("run-1", "a/b"), "1")])
    assert is_marked(store, "run-1", "a/b")
    assert not is_marked(store, "run-1", "a")


def test_a_beat_has_time_in_which_an_agent_may_miss_one_and_connect_anew() -> None:
    """A cable that is out for three seconds: the beat that was answered last may be one period old by then, and the
    proof in its answer as old as the term."""
    proof = silence.HEARTBEAT_INTERVAL + silence.LEASE_SECONDS / 3
    assert proof + 3.0 + contacts.RECONNECT_TIMEOUT < silence.FENCE_TIMEOUT
    assert (
        silence.HEARTBEAT_INTERVAL + contacts.RECONNECT_TIMEOUT
        < silence.FENCE_TIMEOUT - contacts.MASTER_RECEIVE_TIMEOUT
    )
