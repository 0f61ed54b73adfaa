"""A client of engines in any history: requests, answers, failures, engines that come and go, time, cancelled calls.

The event loop has a clock of its own, and the connections are futures that the history completes. A reference knows where
each request should be.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import httpx2
import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.effort import examples
from unirun import atomic
from unirun.errors import ServerError, ServerTimeout, UsageError
from unirun.rollout import Engine, EngineClient, EngineList, client
from unirun.rollout.choosing import MAX_PAUSE_SECONDS, MIN_PAUSE_SECONDS, Answer
from unirun.rollout.client import ADDRESSES_POLL_INTERVAL, CLIENT_IDLE_TIMEOUT, AddressFile

RANKS = st.integers(0, 2)
ATTEMPTS = 3
STEP = 0.5
"""Seconds that pass at once, at most."""

TURNS = 25
"""Turns of the event loop in which everything happens that needs no time."""


TOKENS = 7
"""Those of each request."""


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time passes when it is told to."""

    at = 0.0

    def time(self) -> float:
        return self.at

    def settle(self) -> None:
        """Let everything happen that needs no time."""

        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.run_until_complete(turns())


class Arrival:
    """A request that an engine has got, and not answered."""

    def __init__(self, url: str, number: int, answer: asyncio.Future[httpx2.Response]) -> None:
        self.url, self.number, self.answer = url, number, answer


class Transport:
    """Connections that are futures."""

    arrivals: ClassVar[list[Arrival]]
    opened: ClassVar[list[Transport]]

    def __init__(self, **_: Any) -> None:
        self.closed = False
        self.opened.append(self)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        assert not self.closed
        number = msgspec.json.decode(request.content)["number"]
        future: asyncio.Future[httpx2.Response] = asyncio.get_running_loop().create_future()
        arrival = Arrival(f"http://{request.url.host}", number, future)
        self.arrivals.append(arrival)
        try:
            return await future
        finally:
            self.arrivals.remove(arrival)

    async def aclose(self) -> None:
        self.closed = True


class Doubts:
    """The reference of the time for which an engine gets no request."""

    def __init__(self) -> None:
        self.row, self.until = 0, 0.0

    def failed(self, now: float) -> None:
        if self.until <= now:
            self.until = now + min(MIN_PAUSE_SECONDS * 2**self.row, MAX_PAUSE_SECONDS)
            self.row += 1

    def answered(self) -> None:
        self.row, self.until = 0, 0.0


class Call:
    """A request of the program."""

    def __init__(self, number: int, deadline: float, task: asyncio.Task[Answer]) -> None:
        self.number, self.deadline, self.task = number, deadline, task
        self.failures: list[tuple[str, bool]] = []
        """The engines that have failed on it, and whether it may be because of it."""
        self.ends: str = ""
        """The end that it should have: ``answer``, ``refused`` or ``cancelled``."""


OUTCOMES = {
    "ok": (200, b'{"choices": [{"text": "%d"}]}'),
    "wrong": (400, b"no"),
    "broken": (500, b"oh"),
    "not there": (503, b"wait"),
    "aborted": (200, b'{"choices": [{"text": "", "finish_reason": "abort"}]}'),
}
LOST = {"lost": httpx2.ReadError, "refused": httpx2.ConnectError}
TRIED = {"broken", "lost"}
OUTCOME = st.sampled_from(["ok", *OUTCOMES, *LOST])


class Requests(RuleBasedStateMachine):
    """One client of three engines."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop()
        Transport.arrivals, Transport.opened = [], []
        self.patches = mock.patch.multiple(
            httpx2, AsyncHTTPTransport=Transport, create_ssl_context=lambda **_: None
        )
        self.patches.start()
        self.engines = [Engine(rank, 0, f"http://e{rank}-0", True) for rank in range(3)]
        self.source = self.run(self.made())
        self.client = EngineClient("engine", engines=self.source, attempts=ATTEMPTS)
        self.calls: list[Call] = []
        self.doubts: dict[str, Doubts] = {}
        self.number = 0
        self.quiet_since = 0.0

    async def made(self) -> EngineList:
        return EngineList(self.engines)

    def run(self, what: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(what)

    def at(self, url: str) -> list[Arrival]:
        return [each for each in Transport.arrivals if each.url == url]

    def open(self) -> list[Call]:
        return [call for call in self.calls if not call.ends]

    def eligible(self) -> list[Engine]:
        now = self.loop.time()
        return [
            each
            for each in self.engines
            if each.ready and (each.url not in self.doubts or self.doubts[each.url].until <= now)
        ]

    @rule(seconds=st.sampled_from([0.3, 5.0, 60.0]))
    def asks(self, seconds: float) -> None:
        self.number += 1
        there = {each.url: len(self.at(each.url)) for each in self.eligible()}
        body = {"number": self.number}
        task = self.loop.create_task(
            self.client.post("/v1/completions", body, timeout=seconds, tokens=TOKENS)
        )
        self.calls.append(Call(self.number, self.loop.time() + seconds, task))
        self.loop.settle()
        if there:
            (arrival,) = (each for each in Transport.arrivals if each.number == self.number)
            assert there[arrival.url] == min(there.values()), "another engine has fewer requests"

    @precondition(lambda _: bool(Transport.arrivals))
    @rule(data=st.data(), how=OUTCOME)
    def ends(self, data: st.DataObject, how: str) -> None:
        """An engine answers a request, or its connection ends."""
        arrival = data.draw(st.sampled_from(Transport.arrivals))
        (call,) = (each for each in self.open() if each.number == arrival.number)
        doubts = self.doubts.setdefault(arrival.url, Doubts())
        if how in ("ok", "wrong"):
            doubts.answered()
            call.ends = "answer" if how == "ok" else "refused"
        else:
            doubts.failed(self.loop.time())
            self.fails(call, arrival.url, how in TRIED)
        if how in LOST:
            arrival.answer.set_exception(LOST[how](how))
        else:
            status, body = OUTCOMES[how]
            raw = body % arrival.number if b"%d" in body else body
            arrival.answer.set_result(httpx2.Response(status, content=raw))
        self.loop.settle()

    def fails(self, call: Call, url: str, tried: bool) -> None:
        call.failures.append((url, tried))
        if sum(each[1] for each in call.failures) >= ATTEMPTS:
            call.ends = "refused"

    @precondition(lambda self: bool(self.open()))
    @rule(data=st.data())
    def cancels(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.open()))
        call.task.cancel()
        call.ends = "cancelled"
        self.loop.settle()

    @rule(rank=RANKS, ready=st.booleans(), again=st.booleans())
    def changes(self, rank: int, ready: bool, again: bool) -> None:
        """An engine becomes ready or is no longer, or is started again."""
        engine = self.engines[rank]
        incarnation = engine.incarnation + again
        self.engines[rank] = Engine(rank, incarnation, f"http://e{rank}-{incarnation}", ready)
        if self.engines[rank] == engine:
            return
        for arrival in self.at(engine.url):
            (call,) = (each for each in self.open() if each.number == arrival.number)
            self.fails(call, engine.url, True)
        # What is known of an engine is that of the time for which it is ready.
        self.doubts.pop(engine.url, None)
        self.source.set(self.engines)
        self.loop.settle()

    @rule(seconds=st.sampled_from([0.04, 0.11, 0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        end = self.loop.at + seconds
        while self.loop.at < end:
            self.loop.at = min(self.loop.at + STEP, end)
            self.loop.settle()

    @invariant()
    def each_call_has_its_end(self) -> None:
        for call in self.calls:
            # A loop takes a timer that is due within the resolution of its clock.
            late = not call.ends and self.loop.time() >= call.deadline - 1e-6
            assert call.task.done() == bool(call.ends or late), f"{call.number} {call.ends}"
            if late:
                assert isinstance(call.task.exception(), ServerTimeout)
                call.ends = "late"
            elif call.ends == "answer":
                assert call.task.result().text == str(call.number)
            elif call.ends == "refused":
                assert type(call.task.exception()) is ServerError
            elif call.ends == "cancelled":
                assert call.task.cancelled()
        if any(call.task.done() for call in self.calls):
            self.quiet_since = self.loop.time()
            self.calls = [call for call in self.calls if not call.task.done()]

    @invariant()
    def each_call_is_at_one_engine_that_is_ready_or_waits_as_there_is_none(self) -> None:
        numbers = [arrival.number for arrival in Transport.arrivals]
        assert len(set(numbers)) == len(numbers)
        assert {*numbers} <= {call.number for call in self.calls}
        ready = {each.url for each in self.engines if each.ready}
        assert {arrival.url for arrival in Transport.arrivals} <= ready
        if len(numbers) < len(self.calls):
            assert not self.eligible()

    @invariant()
    def nothing_else_is_kept(self) -> None:
        lines = self.client._lines
        for engine, line in lines.items():
            there = len(self.at(engine.url))
            assert (line.load.in_flight, sum(line._pools.values()), len(line._scopes)) == (there,) * 3
            assert line.load.tokens == there * TOKENS
        assert sum(not each.closed for each in Transport.opened) == sum(
            len(each._pools) for each in lines.values()
        )
        if self.calls:
            assert set(lines) == {each for each in self.engines if each.ready}
        elif self.loop.time() > self.quiet_since + 2 * CLIENT_IDLE_TIMEOUT + STEP:
            assert self.client._watch is None or self.client._watch.done()

    def teardown(self) -> None:
        try:
            self.run(self.client.close())
            self.loop.settle()
            errors = [call.task.exception() for call in self.calls]
            assert all(isinstance(error, UsageError) for error in errors), errors
            assert all(each.closed for each in Transport.opened)
            assert not asyncio.all_tasks(self.loop)
        finally:
            self.patches.stop()
            self.loop.close()


class Addresses(RuleBasedStateMachine):
    """The file of addresses is replaced and removed, and looked at in between."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        clock = mock.Mock(monotonic=lambda: self.now)
        self.patch = mock.patch.object(client, "time", clock)
        self.patch.start()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name, "addresses")
        self.file = AddressFile(str(self.path), "engine")
        self.there: tuple[Engine, ...] = ()

    @rule(ports=st.lists(st.tuples(st.integers(8000, 8002), st.booleans()), max_size=2))
    def is_replaced(self, ports: list[tuple[int, bool]]) -> None:
        self.there = tuple(
            Engine(rank, 0, f"http://h:{port}", ready) for rank, (port, ready) in enumerate(ports)
        )
        entries = [
            {
                "rank": each.rank,
                "incarnation": 0,
                "addr": each.url.removeprefix("http://"),
                "ready": each.ready,
            }
            for each in self.there
        ]
        atomic.replace(self.path, msgspec.json.encode({"engine": entries}))

    @rule()
    def is_removed(self) -> None:
        self.path.unlink(missing_ok=True)
        self.there = ()

    @invariant()
    def a_look_shows_what_is_there(self) -> None:
        self.now += ADDRESSES_POLL_INTERVAL
        found = self.file.engines()
        assert found == self.there
        self.now += ADDRESSES_POLL_INTERVAL
        assert self.file.engines() is found, "nothing has changed"

    def teardown(self) -> None:
        self.patch.stop()
        self.folder.cleanup()


TestRequests = Requests.TestCase
TestRequests.settings = examples(200)
TestAddresses = Addresses.TestCase
