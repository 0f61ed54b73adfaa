"""The agreement of ranks on the step at which they stop."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import HashStore

from tests.effort import seeds
from unirun.errors import UsageError
from unirun.roles import stopping
from unirun.roles.peers import Peers, RoleInfo
from unirun.roles.process_groups import dist
from unirun.roles.stopping import AHEAD_SECONDS, LOST_TIMEOUT, Agreement, Stopping, has_stopped
from unirun.wire.messages import RoleView, View, WorkerView


class Rank:
    """A rank, whose steps take `seconds`."""

    def __init__(self, store: HashStore, seconds: float = 1.0) -> None:
        self.now, self.seconds = 0.0, seconds
        self.agreement = Agreement(store, lambda: self.now)
        self.step = 0
        self.told = self.stopped = False

    def runs(self) -> None:
        """Ask before a step, and run it."""
        self.stopped = self.agreement.reached(self.step, told=self.told)
        if not self.stopped:
            self.step += 1
            self.now += self.seconds


class TestAgreement:
    def test_a_rank_that_is_told_stops_the_others_after_the_furthest_step_that_has_begun(self) -> None:
        store = HashStore()
        first, second = Rank(store), Rank(store)
        for _ in range(3):
            first.runs()
        second.runs()
        second.told = True
        while not (first.stopped and second.stopped):
            second.runs()
            first.runs()
        assert first.step == second.step == 3

    def test_a_rank_that_is_told_before_its_first_step_runs_none(self) -> None:
        store = HashStore()
        first, second = Rank(store), Rank(store)
        first.told = True
        first.runs()
        second.runs()
        assert (first.stopped, first.step, second.stopped, second.step) == (True, 0, True, 0)

    @pytest.mark.parametrize("long", [0, 20])
    def test_short_steps_seldom_look_at_the_store_however_long_those_before_were(self, long: int) -> None:
        class Counted(HashStore):
            looks = 0

            def compare_set(self, *args: str) -> bytes:
                self.looks += 1
                return super().compare_set(*args)

        store = Counted()
        rank = Rank(store, 1.0)
        for _ in range(long):
            rank.runs()
        rank.seconds = 0.001
        for _ in range(1000):
            rank.runs()
        assert store.looks <= long + 1000 * 0.001 / AHEAD_SECONDS + 3

    @pytest.mark.parametrize("seed", seeds(50))
    def test_all_ranks_stop_at_one_step_whoever_is_told_and_whenever(self, seed: int) -> None:
        rng = random.Random(seed)
        store = HashStore()
        ranks = [Rank(store, rng.choice((0.001, 0.03, 1.0))) for _ in range(4)]
        told = rng.sample(ranks, rng.randint(1, 4))
        begin = rng.randint(0, 200)
        for turn in range(100_000):
            if turn >= begin:
                for rank in told:
                    rank.told = rank.told or rng.random() < 0.05
            # With collectives, no rank is two steps ahead.
            slowest = min(rank.step for rank in ranks)
            rng.choice([rank for rank in ranks if rank.step == slowest or rng.random() < 0.5]).runs()
            if all(rank.stopped for rank in ranks):
                break
        assert len({rank.step for rank in ranks}) == 1


class TestTheSignal:
    """A process that is the only rank of its role."""

    @pytest.fixture(autouse=True)
    def peers(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
        """Its peers. The handler of SIGTERM is that of before when it has ended."""
        found = Peers("actor", 0, {"actor": RoleInfo("actor", 1, 0)}, send=lambda _: None)
        monkeypatch.setattr(stopping, "init", lambda: SimpleNamespace(world_size=1, peers=found))
        before = signal.getsignal(signal.SIGTERM)
        yield found
        signal.signal(signal.SIGTERM, before)

    @pytest.mark.parametrize("asked", [True, False])
    def test_what_came_meanwhile_is_done_at_the_end_though_no_step_was_asked_for(self, asked: bool) -> None:
        heard: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        for _ in range(2):
            heard.clear()
            stops = Stopping(chained=False)
            assert not stops.should_stop(0)
            signal.raise_signal(signal.SIGTERM)
            assert heard == []
            if asked:
                assert stops.should_stop(1)
            stops.close()
            assert heard == [signal.SIGTERM]
        Stopping(chained=False).close()
        assert heard == [signal.SIGTERM], "it has not come again"

    def test_a_handler_of_before_is_called_as_well(self) -> None:
        heard: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        stops = Stopping()
        signal.raise_signal(signal.SIGTERM)
        assert (heard, stops.told) == ([signal.SIGTERM], True)

    def test_a_rank_with_a_handler_of_its_own_ends_as_that_says(
        self, monkeypatch: pytest.MonkeyPatch, peers: Peers
    ) -> None:
        monkeypatch.setattr("unirun.roles.stopping.threading.Timer", lambda *_: pytest.fail("it is to end"))
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        Stopping()
        lost = WorkerView(1, 0, "lost", {})
        peers.update(View((RoleView("actor", 2, 0, "", "restarting", (lost,)),)))

    def test_a_process_knows_whether_it_has_stopped_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A fork does not stop with the process that it is of."""
        monkeypatch.setattr(stopping, "_stopping", {})
        assert not has_stopped()
        assert not stopping.should_stop(0)
        assert not has_stopped()
        signal.raise_signal(signal.SIGTERM)
        assert stopping.should_stop(1)
        assert has_stopped()
        monkeypatch.setattr("unirun.roles.stopping.os.getpid", lambda: -1)
        assert not has_stopped()

    def test_another_thread_cannot_be_the_first_to_ask(self) -> None:
        with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="call it in the main thread"):
            pool.submit(Stopping).result()

    @pytest.mark.parametrize(
        ("role", "worker", "ends"),
        [("restarting", "lost", True), ("restarting", "running", False), ("running", "lost", False)],
    )
    def test_a_rank_ends_by_itself_only_when_its_role_restarts_after_a_loss(
        self, monkeypatch: pytest.MonkeyPatch, peers: Peers, role: str, worker: str, ends: bool
    ) -> None:
        timers: list[Callable[[], None]] = []

        class Timer:
            daemon = False

            def __init__(self, seconds: float, action: Callable[[], None]) -> None:
                assert seconds == LOST_TIMEOUT
                self.action = action

            def start(self) -> None:
                assert self.daemon
                timers.append(self.action)

        codes: list[int] = []
        monkeypatch.setattr("unirun.roles.stopping.threading.Timer", Timer)
        monkeypatch.setattr("unirun.roles.stopping.os._exit", codes.append)
        stops = Stopping()
        view = RoleView(
            "actor", 2, 0, "", role, (WorkerView(0, 0, "running", {}), WorkerView(1, 0, worker, {}))
        )
        peers.update(View((view,)))
        assert len(timers) == ends
        for leave in timers:
            leave()
            assert codes == [stopping.TOLD]
            stops.stopped = True
            leave()
        assert codes == [stopping.TOLD] * ends, "a rank that has stopped ends as it likes"


@pytest.mark.parametrize("seed", seeds(20))
def test_ranks_that_count_again_and_ask_twice_stop_at_one_step(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Two ranks of a role run the same steps, several times, and ask before each of them once or twice."""
    rng, store, before = random.Random(seed), HashStore(), signal.getsignal(signal.SIGTERM)
    peers = Peers("actor", 0, {"actor": RoleInfo("actor", 2, 0)}, send=lambda _: None)
    monkeypatch.setattr(stopping, "init", lambda: SimpleNamespace(world_size=2, peers=peers))
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **kwargs: store)
    monkeypatch.setattr(stopping, "AHEAD_SECONDS", 0.0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    try:
        ranks = [Stopping(), Stopping()]
        told, at = rng.choice(ranks), rng.randrange(20)
        for number, step in enumerate([*range(5)] * 5):
            told.told = number >= at
            asked = [rank for rank in ranks for _ in range(rng.randint(1, 2))]
            rng.shuffle(asked)
            answers = {(rank is told, rank.should_stop(step)) for rank in asked}
            stopped = {each for _, each in answers}
            if True in stopped:
                assert stopped == {True}
                assert at <= number <= at + 2
                return
        pytest.fail("they have not stopped")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_each_run_has_an_agreement_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that runs again in the same workers counts its steps anew."""
    store, before = HashStore(), signal.getsignal(signal.SIGTERM)
    peers = Peers("actor", 0, {"actor": RoleInfo("actor", 2, 0)}, send=lambda _: None)
    monkeypatch.setattr(stopping, "init", lambda: SimpleNamespace(world_size=2, peers=peers))
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **kwargs: store)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    try:
        first, other = Stopping(), Stopping()
        first.told = True
        assert first.should_stop(3, run=1)
        assert other.should_stop(0, run=1)
        assert not other.should_stop(0, run=2)
    finally:
        signal.signal(signal.SIGTERM, before)
