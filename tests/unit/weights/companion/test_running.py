"""A companion brings the versions of a channel into stand-ins of vLLM."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.weights.integrations import fake_servers
from tests.unit.weights.test_moving import noise, same
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import PeerLost, WeightsError, WeightsTimeout
from unirun.roles.peers import Peers
from unirun.values import Engine
from unirun.weights.channel import WeightsChannel
from unirun.weights.companion import running
from unirun.weights.companion.running import FINAL_LOAD_TIMEOUT, Companion
from unirun.weights.publishing import Blocks, Packing
from unirun.weights.sources import VersionFile
from unirun.weights.tensors import layout_of
from unirun.wire.progress import IDLE, page
from unirun.wire.reports import EngineWeights

Tensors = dict[str, torch.Tensor]


class Channel:
    """A `WeightsChannel` of which the publisher is the test. It `lends` its memory, or has it received."""

    name = "policy"

    def __init__(self, *, lends: bool) -> None:
        self.lends, self.intact, self.lent = lends, True, Blocks()
        self._changed = threading.Condition()
        self._now: tuple[int, Tensors] | None = None
        self._restarts, self.away = 0, False
        self.elsewhere = self.closed = False
        """The publisher knows nothing of the latest version, which another receiver has."""

    def publish(self, version: int, tensors: Tensors) -> None:
        with self._changed:
            self._now, self.away, self.elsewhere = (version, tensors), False, False
            self._changed.notify_all()

    def restart(self, *, elsewhere: bool = False) -> None:
        """The publisher has died, and its successor has published nothing yet."""
        with self._changed:
            self._now, self._restarts = self._now if elsewhere else None, self._restarts + 1
            self.elsewhere = elsewhere
            self._changed.notify_all()

    def close(self) -> None:
        """Let those that wait for a version go."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self.lent.close()

    def latest(self) -> tuple[int, int | None]:
        if self.away:
            raise PeerLost("actor:0 is started again", worker="actor:0")
        return self._restarts, self._now[0] if self._now is not None and not self.elsewhere else None

    def _wait(self, version: int, timeout: float | None) -> tuple[int, Tensors]:
        with self._changed:
            restarts = self._restarts

            def there() -> bool:
                return (
                    self.closed
                    or self._restarts != restarts
                    or (self._now is not None and self._now[0] >= version)
                )

            if not self._changed.wait_for(there, timeout):
                raise WeightsTimeout("nothing is published", "publish", channel=self.name)
            if self.closed or self._now is None or self._restarts != restarts:
                raise PeerLost("actor:0 has died", worker="actor:0")
            return self._now

    def describe(self, timeout: float | None = None) -> Tensors:
        return {name: value.to("meta") for name, value in self._wait(0, timeout)[1].items()}

    def borrow(
        self, *, min_version: int | None = None, timeout: float | None = None
    ) -> tuple[int, VersionFile] | None:
        if not self.lends:
            return None
        version, tensors = self._wait(min_version or 0, timeout)
        packing = Packing(layout_of(tensors), 0)
        if not packing.is_file:
            return None
        block = self.lent.take(packing.size, "companion")
        packing.pack(tensors, block)
        return version, VersionFile(
            block.path, block.token, block.readers.clear, is_intact=lambda: self.intact
        )

    def receive(self, into: Any, *, min_version: int | None = None, timeout: float | None = None) -> int:
        version, tensors = self._wait(min_version or 0, timeout)
        if {n: v.shape for n, v in into.items()} != {n: tensors[n].shape for n in into if n in tensors}:
            raise WeightsError("the weights do not fit the receiver", faults=[])
        for name, value in into.items():
            value.copy_(tensors[name])
        return version


class Agent:
    """The part of `Peers` that a companion needs: the engines, and what hears of their versions."""

    def __init__(self) -> None:
        self.engines: tuple[Engine, ...] = ()
        self.versions: dict[tuple[int, int], int | None] = {}
        self.problems: dict[tuple[int, int], str] = {}
        self._listeners: list[Callable[[], None]] = []
        self._told = threading.Condition()

    def set(self, *engines: Engine) -> None:
        """These are all engines now."""
        self.engines = engines
        for listener in self._listeners:
            listener()

    def when_changed(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def tell(self, told: EngineWeights) -> None:
        whose = told.rank, told.incarnation
        with self._told:
            if told.problem:
                self.versions.pop(whose, None)
                self.problems[whose] = told.problem
            else:
                self.versions[whose] = told.version
            self._told.notify_all()

    def have(self, versions: dict[tuple[int, int], int | None]) -> None:
        """Wait until exactly these processes serve, with these versions."""
        with self._told:
            assert self._told.wait_for(lambda: self.versions == versions, WAIT_TIMEOUT), self.versions


class Host:
    """Stand-ins for engines, and the companion beside them."""

    def __init__(self, *, lends: bool, clear_cache: bool = True) -> None:
        self.channel, self.engines = Channel(lends=lends), Agent()
        channel, peers = cast(WeightsChannel, self.channel), cast(Peers, self.engines)
        self.companion = Companion(channel, peers, timeout=WAIT_TIMEOUT, clear_cache=clear_cache)
        self.servers: list[fake_servers.FakeVllm] = []
        self._thread = threading.Thread(target=self.companion.run)

    def server(
        self, like: Tensors, before: Callable[[str], Any] = lambda path: None
    ) -> fake_servers.FakeVllm:
        """An engine with tensors like these."""
        self.servers.append(fake_servers.FakeVllm(like, before=before))
        return self.servers[-1]

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.companion.stop()
        if self._thread.ident is not None:
            self._thread.join(WAIT_TIMEOUT)
        for server in self.servers:
            server.close()
        self.channel.close()


@pytest.fixture(params=["lent", "received"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    for name, module in fake_servers.vllm_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "unirun.weights.integrations.vllm_worker", raising=False)
    lends, _, kept = request.param.partition(", ")
    made = Host(lends=lends == "lent", clear_cache=not kept)
    yield made
    made.close()


def weights() -> Tensors:
    return {"a": noise(3, 5), "b": noise(7, dtype=torch.bfloat16)}


def has(server: fake_servers.FakeVllm, wanted: Tensors) -> bool:
    return all(same(server.weights[name], value) for name, value in wanted.items())


def engine(
    server: fake_servers.FakeVllm, rank: int = 0, incarnation: int = 0, *, alive: bool = True
) -> Engine:
    return Engine(rank, incarnation, server.url, alive)


def test_versions_are_brought_into_each_engine_that_answers(host: Host) -> None:
    first, second = weights(), weights()
    one, other = host.server(first), host.server(first)
    host.engines.set(engine(one), engine(other, 1, alive=False))
    host.start()
    host.engines.have({(0, 0): None})
    host.channel.publish(1, first)
    host.engines.have({(0, 0): 1})
    assert has(one, first)
    assert other.seen == []
    host.engines.set(engine(one), engine(other, 1))
    host.engines.have({(0, 0): 1, (1, 0): 1})
    host.channel.publish(2, second)
    host.engines.have({(0, 0): 2, (1, 0): 2})
    assert has(one, second)
    assert has(other, second)
    assert (one.version, one.paused, one.transfer.cleared) == ("2", "", True)
    assert (one.seen.count("/update_weights"), other.seen.count("/update_weights")) == (2, 2)


@pytest.mark.parametrize("host", ["lent, kept"], indirect=True)
def test_the_cache_of_an_engine_may_be_kept(host: Host) -> None:
    tensors = weights()
    server = host.server(tensors)
    host.engines.set(engine(server))
    host.channel.publish(1, tensors)
    host.start()
    host.engines.have({(0, 0): 1})
    assert (server.version, server.transfer.cleared) == ("1", False)


def test_an_engine_that_was_started_again_gets_the_version_from_here(host: Host) -> None:
    now = weights()
    server = host.server(now)
    host.engines.set(engine(server))
    host.start()
    host.channel.publish(4, now)
    host.engines.have({(0, 0): 4})
    server.start_again()
    host.engines.set(engine(server, incarnation=1, alive=False))
    host.engines.set(engine(server, incarnation=1))
    host.engines.have({(0, 0): 4, (0, 1): 4})
    assert has(server, now)
    assert server.seen.count("/init_weight_transfer_engine") == 2, (
        "the new process is asked whether it can read"
    )


def test_an_engine_that_fails_in_an_update_is_told_and_the_others_go_on(host: Host) -> None:
    now = weights()
    broken = {"now": False}

    def before(path: str) -> Any:
        return (
            (500, {"error": {"message": "no memory"}})
            if broken["now"] and path == "/update_weights"
            else None
        )

    bad, good = host.server(now, before), host.server(now)
    host.engines.set(engine(bad), engine(good, 1))
    host.start()
    host.channel.publish(1, now)
    host.engines.have({(0, 0): 1, (1, 0): 1})
    broken["now"] = True
    host.channel.publish(2, now)
    host.engines.have({(1, 0): 2})
    assert "no memory" in host.engines.problems[0, 0]
    assert bad.paused == "keep"
    host.channel.publish(3, now)
    host.engines.have({(1, 0): 3})
    broken["now"] = False
    bad.start_again()
    host.engines.set(engine(bad, incarnation=1), engine(good, 1))
    host.engines.have({(1, 0): 3, (0, 1): 3})


def test_an_engine_that_another_companion_has_left_in_an_update_is_started_again(host: Host) -> None:
    now = weights()
    server = host.server(now)
    server.transfer.answer("/pause", {"mode": ["keep"]}, {})
    server.transfer.answer("/start_weight_update", {}, {})
    host.engines.set(engine(server))
    host.start()
    host.engines.have({(0, 0): None})
    host.channel.publish(1, now)
    host.engines.have({})
    assert "already active" in host.engines.problems[0, 0]


def test_a_slow_engine_keeps_its_version_while_others_get_later_ones(host: Host) -> None:
    held = threading.Event()
    versions = [weights() for _ in range(5)]

    def before(path: str) -> Any:
        return held.wait(WAIT_TIMEOUT) and None if path == "/update_weights" else None

    slow, fast = host.server(versions[0], before), host.server(versions[0])
    host.engines.set(engine(slow), engine(fast, 1))
    host.channel.publish(0, versions[0])
    host.start()
    for version, tensors in enumerate(versions):
        host.channel.publish(version, tensors)
        host.engines.have({(1, 0): version})
        assert has(fast, tensors)
    assert (0, 0) not in host.engines.versions
    held.set()
    host.engines.have({(0, 0): 4, (1, 0): 4})
    assert has(slow, versions[4])
    assert slow.seen.count("/update_weights") == 2


def test_other_tensors_may_be_published_later(host: Host) -> None:
    server = host.server({"a": noise(3), "b": noise(4)})
    host.engines.set(engine(server))
    host.start()
    one, two = {"a": noise(3), "b": noise(4)}, {"b": noise(4), "a": noise(3)}
    for version, tensors in enumerate((one, two, one)):
        host.channel.publish(version, tensors)
        host.engines.have({(0, 0): version})
        assert has(server, tensors)


def test_tensors_that_no_engine_can_be_given_end_the_companion(host: Host) -> None:
    host.channel.publish(1, {"a": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(WeightsError, match="a: safetensors has no torch.complex128"):
        host.companion.run()


def test_it_is_idle_while_nothing_happens(host: Host) -> None:
    """Otherwise the console would say after ten minutes that it makes no progress."""
    page().fields[IDLE] = 0
    seen = list[int]()

    def look() -> None:
        seen.append(eventually(lambda: page().fields[IDLE]))
        host.companion.stop()

    looks = threading.Thread(target=look)
    looks.start()
    # In the main thread, as in a worker.
    host.companion.run()
    looks.join(WAIT_TIMEOUT)
    assert seen == [1]
    assert not page().fields[IDLE]


def test_it_ends_at_once_when_it_is_told(host: Host) -> None:
    host.start()
    began = time.monotonic()
    host.close()
    assert time.monotonic() - began < WAIT_TIMEOUT


def test_a_publisher_that_begins_anew_with_lower_numbers_is_followed(host: Host) -> None:
    first, second, third = weights(), weights(), weights()
    server = host.server(first)
    host.engines.set(engine(server))
    host.channel.publish(5, first)
    host.start()
    host.engines.have({(0, 0): 5})
    host.channel.restart()
    again = host.server(first)
    host.engines.set(engine(again, incarnation=1))
    host.engines.have({(0, 0): 5, (0, 1): 5})
    assert has(again, first), "the latest is that of the one before"
    host.channel.publish(3, second)
    host.engines.have({(0, 0): 5, (0, 1): 3})
    assert has(again, second)
    host.channel.publish(4, third)
    host.engines.have({(0, 0): 5, (0, 1): 4})


def test_a_version_that_another_receiver_has_is_of_the_publisher_before(host: Host) -> None:
    first, second = weights(), weights()
    server = host.server(first)
    host.channel.publish(5, first)
    host.channel.restart(elsewhere=True)
    host.engines.set(engine(server))
    host.start()
    host.engines.have({(0, 0): 5})
    host.channel.publish(3, second)
    host.engines.have({(0, 0): 3})
    assert has(server, second)


def test_an_engine_waits_while_it_is_not_known_whether_there_is_a_version(host: Host) -> None:
    first = weights()
    server = host.server(first)
    host.channel.away = True
    host.engines.set(engine(server))
    host.start()
    host.channel.publish(1, first)
    host.engines.have({(0, 0): 1})


def test_a_companion_that_is_told_to_end_finishes_what_it_brings(host: Host) -> None:
    first = weights()
    loads, goes_on = threading.Event(), threading.Event()

    def slow(path: str) -> None:
        if path == "/update_weights":
            loads.set()
            assert goes_on.wait(WAIT_TIMEOUT)

    server = host.server(first, slow)
    host.engines.set(engine(server))
    host.channel.publish(1, first)
    host.start()
    assert loads.wait(WAIT_TIMEOUT)
    host.companion.stop()
    goes_on.set()
    host.close()
    assert server.seen[-1] == "/resume"
    assert has(server, first)


class Clock:
    """A clock that stands still by itself."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Loading:
    """A thread that brings weights into an engine for so long, on a clock that runs while it is waited for."""

    def __init__(self, clock: Clock, until: float) -> None:
        self._clock, self._until = clock, until

    def join(self, timeout: float) -> None:
        self._clock.now = max(self._clock.now, min(self._until, self._clock.now + timeout))

    def is_alive(self) -> bool:
        return self._clock.now < self._until


@given(st.lists(st.floats(0.0, 60.0), max_size=4))
def test_a_companion_ends_in_time_however_many_engines_load_for_long(seconds: list[float]) -> None:
    clock = Clock()
    channel, peers = cast(WeightsChannel, Channel(lends=True)), cast(Peers, Agent())
    companion = Companion(channel, peers, timeout=WAIT_TIMEOUT)
    companion._loading += [cast(threading.Thread, Loading(clock, 100.0 + each)) for each in seconds]
    companion.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "time", clock)
        companion.run()
    assert clock.now == 100.0 + min(max(seconds, default=0.0), FINAL_LOAD_TIMEOUT)


def test_the_host_has_two_versions_however_many_there_were(host: Host) -> None:
    now = weights()
    server = host.server(now)
    host.engines.set(engine(server))
    host.start()
    for version in range(5):
        host.channel.publish(version, now)
        host.engines.have({(0, 0): version})
    blocks = host.channel.lent if host.channel.lends else host.companion._blocks
    assert len(blocks._blocks) == 2


@pytest.mark.parametrize("host", ["lent"], indirect=True)
def test_an_engine_has_to_start_again_if_the_publisher_may_have_written_to_what_it_loaded(host: Host) -> None:
    now = weights()
    server = host.server(now)
    host.channel.intact = False
    host.engines.set(engine(server))
    host.channel.publish(1, now)
    host.start()
    eventually(lambda: (0, 0) in host.engines.problems, "the engine is told")
    assert "half new: the publisher may have written" in host.engines.problems[0, 0]
    assert server.paused == "keep"
