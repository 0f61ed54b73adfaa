"""torch's handler over the store in memory: nodes are threads here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from importlib.metadata import entry_points

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

from unirun.errors import StoreAway, UsageError
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import Compare, KeyValue, Lease, Outcome, Put
from unirun.rendezvous.torchrun import create_handler, get_handler
from unirun.rendezvous.torchrun import handler as handler_module
from unirun.rendezvous.torchrun.handler import Config, StoreHandler

pytestmark = pytest.mark.leaves

WAIT = 30.0


class Switch(MemoryStore):
    """A store that can be away, and that stays open when a handler closes it."""

    away = False

    def __init__(self) -> None:
        super().__init__()
        self.ttls: list[float] = []

    def grant(self, ttl: float) -> Lease:
        self.ttls.append(ttl)
        return super().grant(ttl)

    def get(self, key: str) -> KeyValue | None:
        if self.away:
            raise StoreAway("gone")
        return super().get(key)

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        if self.away:
            raise StoreAway("gone")
        return super().txn(compares, puts, deletes)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def quick_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks for the names of all its callers at every step. Where many modules are loaded that takes longer than
    the heartbeats here, so that one node could not write for those of another."""
    monkeypatch.setattr(torchs, "get_method_name", lambda depth=2: "")


@pytest.fixture
def store() -> Switch:
    return Switch()


Node = Callable[..., StoreHandler]


@pytest.fixture
def node(store: Switch) -> Iterator[Node]:
    made: list[StoreHandler] = []

    def make(
        run: str = "run1", nodes: tuple[int, int] = (2, 2), config: Config | None = None
    ) -> StoreHandler:
        params = RendezvousParameters("etcd-v3", "", run, *nodes, local_addr="127.0.0.1")
        made.append(StoreHandler(params, config or Config(), store))
        return made[-1]

    yield make
    store.away = False
    for handler in made:
        handler.shutdown()


def meet(*handlers: StoreHandler) -> list[RendezvousInfo]:
    with ThreadPoolExecutor(len(handlers)) as pool:
        joining: list[Future[RendezvousInfo]] = [pool.submit(each.next_rendezvous) for each in handlers]
        return [each.result(WAIT) for each in joining]


def address(info: RendezvousInfo) -> tuple[str, int]:
    there = info.bootstrap_store_info
    assert there is not None
    return there.master_addr, there.master_port


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_torch_finds_the_etcd_v3_handler_by_its_name() -> None:
    (found,) = entry_points(group="torchrun.handlers", name="etcd-v3")
    assert found.load() is get_handler
    assert get_handler() is create_handler
    with pytest.raises(UsageError, match="there are join_timeout"):
        rendezvous_handler_registry.create_handler(
            RendezvousParameters("etcd-v3", "localhost", "run1", 1, 1, wrong="key")
        )


def test_an_unreachable_etcd_is_torchs_connection_error() -> None:
    params = RendezvousParameters(
        "etcd-v3", "127.0.0.1:1", "run1", 1, 1, heartbeat_timeout="0.2", read_timeout="0.2"
    )
    with pytest.raises(RendezvousConnectionError):
        create_handler(params).next_rendezvous()


def test_the_private_names_of_torch_that_the_handler_uses_exist() -> None:
    """Without one of them, torch would silently behave as without this plugin."""
    handler = torchs.DynamicRendezvousHandler
    assert callable(handler._get_store)
    assert {"_shared_tcp_store_server", "_bootstrap_store_info", "_op_executor", "_state_holder"} <= set(
        handler.__init__.__code__.co_names
    )
    assert "_last_sync_time" in torchs._BackendRendezvousStateHolder.sync.__code__.co_names
    assert "_sanitize" in torchs._BackendRendezvousStateHolder.sync.__code__.co_names
    assert "_state" in torchs._DistributedRendezvousOpExecutor.run.__code__.co_names


def test_a_rendezvous_gives_nodes_ranks_and_one_store(node: Node) -> None:
    infos = meet(node(), node())
    assert sorted(info.rank for info in infos) == [0, 1]
    assert {info.world_size for info in infos} == {2}
    assert address(infos[0]) == address(infos[1])
    worker = TCPStore(*address(infos[0]), is_master=False, timeout=timedelta(seconds=WAIT))
    worker.set("key", "value")
    infos[0].store.set("from", "agent")
    assert infos[1].store.get("from") == b"agent"


def test_every_rendezvous_round_has_its_own_stores(node: Node) -> None:
    one, other = node(), node()
    before = meet(one, other)
    TCPStore(*address(before[0]), is_master=False).set("stale", "1")
    before[0].store.set("stale", "1")
    after = meet(one, other)
    assert address(after[0]) == address(after[1]) != address(before[0])
    assert not TCPStore(*address(after[0]), is_master=False).check(["stale"])
    assert not after[1].store.check(["stale"])


def test_keys_of_earlier_rendezvous_rounds_are_deleted(node: Node, store: Switch) -> None:
    one, other = node(), node()
    meet(one, other)
    sizes = []
    for _ in range(3):
        meet(one, other)
        sizes.append(len(store.get_prefix("run1/rounds/").items))
    assert sizes == [sizes[0]] * 3


def test_no_node_sleeps_during_a_rendezvous(node: Node) -> None:
    """torch spreads the first arrivals over 0.3 s; after that it would poll once a second."""
    one, other = node(), node()
    meet(one, other)
    took = []
    for _ in range(10):
        started = time.monotonic()
        meet(one, other)
        took.append(time.monotonic() - started)
    # The quickest: a busy machine delays others.
    assert min(took) < 0.9


def test_a_late_node_is_counted_as_waiting_by_the_present_round(node: Node) -> None:
    one = node(nodes=(1, 2), config=Config(last_call_timeout=0.05))
    (info,) = meet(one)
    assert info.world_size == 1
    # Long enough for both to be in the next round, whichever is there first: it begins when both are.
    one._settings.timeout._last_call = timedelta(seconds=WAIT)
    other = node(nodes=(1, 2), config=Config(last_call_timeout=WAIT))
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(other.next_rendezvous)
        until(lambda: one.num_nodes_waiting() == 1)
        again = one.next_rendezvous()
        assert again.world_size == joining.result(WAIT).world_size == 2


def test_a_node_without_heartbeats_is_lost_from_its_round(node: Node) -> None:
    config = Config(keep_alive_interval=0.2, keep_alive_max_attempt=5)
    one, other = node(config=config), node(config=config)
    meet(one, other)
    assert one.num_nodes_waiting() == 0
    other._stop_heartbeats()
    until(lambda: one.num_nodes_waiting() == 1)
    assert {info.world_size for info in meet(one, node(config=config))} == {2}


def test_a_torchrun_run_whose_nodes_were_all_killed_can_be_restarted(node: Node) -> None:
    config = Config(keep_alive_interval=0.2, keep_alive_max_attempt=5)
    killed = [node(config=config), node(config=config)]
    meet(*killed)
    for each in killed:
        each._stop_heartbeats()
    assert {info.world_size for info in meet(node(config=config), node(config=config))} == {2}


def test_an_outage_of_the_rendezvous_store_loses_no_node(node: Node, store: Switch) -> None:
    config = Config(keep_alive_interval=0.1, keep_alive_max_attempt=5)
    one, other = node(config=config), node(config=config)
    meet(one, other)
    store.away = True
    until(lambda: one._backend.away and other._backend.away)
    gone = time.monotonic()
    while time.monotonic() - gone < 3 * config.silence:
        assert (one.num_nodes_waiting(), other.num_nodes_waiting()) == (0, 0)
        time.sleep(0.02)
    store.away = False
    until(lambda: not one._backend.blinded and not other._backend.blinded)
    assert (one.num_nodes_waiting(), other.num_nodes_waiting()) == (0, 0)


def test_a_rendezvous_waits_for_a_store_that_is_away(node: Node, store: Switch) -> None:
    one, other = node(), node()
    store.away = True
    with ThreadPoolExecutor() as pool:
        joining = [pool.submit(each.next_rendezvous) for each in (one, other)]
        until(lambda: one._backend.away and other._backend.away)
        store.away = False
        assert {each.result(WAIT).world_size for each in joining} == {2}


def test_closing_a_torchrun_run_lets_the_other_nodes_finish(node: Node) -> None:
    config = Config(keep_alive_interval=0.2, keep_alive_max_attempt=2)
    one, other = node(config=config), node(config=config)
    meet(one, other)
    assert one.shutdown()
    until(lambda: other.is_closed())
    silent_since = time.monotonic()
    while time.monotonic() - silent_since < 2 * config.silence:
        assert other.num_nodes_waiting() == 0
        time.sleep(0.05)


def test_a_closed_torchrun_run_admits_no_node(node: Node) -> None:
    one, other = node(), node()
    meet(one, other)
    one.set_closed()
    with pytest.raises(RendezvousClosedError, match="'run1' is over, as one of its nodes.*--rdzv-id"):
        other.next_rendezvous()


def test_the_last_node_deletes_the_runs_keys_so_that_its_id_can_be_reused(node: Node, store: Switch) -> None:
    first = [node(), node()]
    meet(*first)
    bystanders = [node("run10"), node("run1/a")]
    for handler in first:
        assert handler.shutdown()
        assert handler.shutdown()
    assert store.get_prefix("run1/").items == ()
    assert {info.world_size for info in meet(node(), node())} == {2}
    assert bystanders


def test_a_node_that_is_left_over_ends_with_the_run_and_does_not_begin_it_anew(
    node: Node, store: Switch
) -> None:
    one, left_over = node(nodes=(1, 1)), node(nodes=(1, 1))
    meet(one)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(left_over.next_rendezvous)
        until(lambda: len(store.get_prefix("run1/nodes/").items) == 2)
        one.shutdown()
        assert store.get("run1/state/current") is not None
        assert isinstance(joining.exception(WAIT), RendezvousGracefulExitError)
    left_over.shutdown()
    assert store.get_prefix("run1/").items == ()


def test_torchrun_runs_with_similar_ids_do_not_meet(node: Node, store: Switch) -> None:
    alone = {"run1": node("run1", (1, 1)), "run10": node("run10", (1, 1)), "run1/a": node("run1/a", (1, 1))}
    assert {info.world_size for info in meet(*alone.values())} == {1}
    alone["run1"].shutdown()
    states = {item.key for item in store.get_prefix("").items if item.key.endswith("state/current")}
    assert states == {"run10/state/current", "run1%2Fa/state/current"}
    assert alone["run10"].num_nodes_waiting() == alone["run1/a"].num_nodes_waiting() == 0
    assert not alone["run10"].is_closed()


def test_a_rendezvous_timeout_states_how_many_nodes_came(node: Node) -> None:
    with pytest.raises(
        RendezvousTimeoutError, match="of at least 2 nodes of the run 'run1' came within 0.3 s"
    ):
        node(config=Config(join_timeout=0.3)).next_rendezvous()


def test_an_outage_of_etcd_is_logged_once(
    node: Node, store: Switch, caplog: pytest.LogCaptureFixture
) -> None:
    one = node(nodes=(1, 1))
    meet(one)
    store.away = True
    # Otherwise torch would take what it has read less than a second ago.
    one._state_holder._last_sync_time = -1  # type: ignore[attr-defined]
    assert [one.num_nodes_waiting() for _ in range(3)] == [0, 0, 0]
    assert caplog.text.count("etcd is away; workers go on meanwhile: gone") == 1


def test_shutdown_after_leaving_does_not_touch_the_next_run_of_the_same_id(node: Node, store: Switch) -> None:
    one, next_one = node(nodes=(1, 1)), node(nodes=(1, 1))
    meet(one)
    assert one.shutdown()
    meet(next_one)
    assert one.shutdown()
    assert store.get("run1/state/current") is not None


def test_keys_of_the_present_round_are_kept_when_those_of_earlier_ones_are_deleted(
    node: Node, store: Switch
) -> None:
    one = node(nodes=(1, 1))
    for number in range(3):
        (info,) = meet(one)
        info.store.set("key", str(number))
        one._get_store()
        rounds = {item.key.split("/")[2] for item in store.get_prefix("run1/rounds/").items}
        assert rounds == {f"{one._backend.meeting}.{number}"}
        assert info.store.get("key") == str(number).encode()


def test_rdzv_conf_options_reach_torchs_settings(node: Node, store: Switch) -> None:
    config = Config(
        join_timeout=1,
        last_call_timeout=2,
        close_timeout=3,
        heartbeat_timeout=4,
        keep_alive_interval=6,
        keep_alive_max_attempt=7,
    )
    handler = node("a/b", (2, 3), config)
    settings = handler._settings
    assert (settings.run_id, settings.min_nodes, settings.max_nodes) == ("a/b", 2, 3)
    timeouts = settings.timeout
    assert [
        each.total_seconds()
        for each in (timeouts.join, timeouts.last_call, timeouts.close, timeouts.heartbeat)
    ] == [1, 2, 3, 4]
    assert settings.keep_alive_interval == timedelta(seconds=6)
    assert settings.keep_alive_max_attempt == 7
    assert handler.get_run_id() == "a/b"
    assert handler._this_node.addr == "127.0.0.1"
    assert handler.get_backend() == "etcd-v3"


def test_rdzv_conf_options_set_lease_and_grace(node: Node, store: Switch) -> None:
    """A run's keys outlive its last node by nine heartbeats here; after an outage, silence is ignored for three."""
    config = Config(keep_alive_interval=1000, keep_alive_max_attempt=3)
    one = node(nodes=(1, 1), config=config)
    meet(one)
    assert set(store.ttls) == {9000}
    store.away = True
    with pytest.raises(RendezvousConnectionError):
        one._backend.get_state()
    store.away = False
    one._backend.get_state()
    assert one._backend.blinded
    ends = one._backend._grace_ends - time.monotonic()
    assert 3000 - WAIT < ends <= 3000


class TestWaitingNode:
    def test_a_waiting_node_continues_after_the_last_call(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handler_module, "LOST_NODES_POLL_INTERVAL", 100 * WAIT)
        alone = node(nodes=(1, 2), config=Config(last_call_timeout=0.05, keep_alive_interval=100 * WAIT))
        assert meet(alone)[0].world_size == 1

    def test_a_waiting_node_writes_nothing_when_it_only_reads(
        self, node: Node, store: Switch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handler_module, "LOST_NODES_POLL_INTERVAL", 0.01)
        with pytest.raises(RendezvousTimeoutError):
            node(config=Config(join_timeout=0.6)).next_rendezvous()
        assert store.get_prefix("").revision <= 4, "its arrival and its departure"
