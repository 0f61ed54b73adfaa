"""A channel of weights in any history: two publishers, three receivers, of which two are neighbours on another host.

Publishers publish one after the other, cut their tensors in other ways, die, and begin anew from an older checkpoint.
Receivers come late, copy, assign or blend, accept old versions, and lose connections. Anything may happen at each request
and answer. The reference is the list of all versions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.effort import examples, variants
from tests.unit.weights.job import Job, Worker
from unirun.errors import PeerLost, WeightsError, WeightsTimeout
from unirun.weights.channel import WeightsChannel
from unirun.weights.publishing import CURRENT
from unirun.weights.receiving import NEIGHBOR_ANSWER_TIMEOUT
from unirun.weights.tensors import LocalShard, Piecewise
from unirun.wire.reports import VERSION

pytestmark = pytest.mark.long  # a third of a minute, and near the end of all files by its name

Tensors = dict[str, torch.Tensor]

PUBLISHERS = (0, 1)
RECEIVERS = (0, 1, 2)
HERE, THERE = "a", "b"
NODES = (HERE, THERE, THERE)
TIMEOUT = 12.0
"""Seconds in simulated time. A receiver looks twice a second, so that a wait in vain costs many looks."""
ETA = 0.25
ROWS = 6
BLOCKS = 8
"""Blocks that a publisher has at most, with three receivers: two, and two for each that holds one or has assigned one."""

LAST_MOMENT = 20
"""Moments of a receive in which nothing fails, and some more."""

RANK, READER = st.sampled_from(PUBLISHERS), st.sampled_from((0, *RECEIVERS))
RARELY = st.integers(0, 3).map(lambda number: number == 0)
MOMENTS = st.lists(
    st.tuples(
        st.integers(0, 16),
        st.sampled_from(["publish", "break", "overwrite", "overwrite", "die", "withdraw", "withdraw"]),
        RANK,
    ),
    max_size=2,
)
"""Things that happen, each after so many moments in which nothing does."""


def content(epoch: int, version: int) -> Tensors:
    """The tensors of a version."""
    base = 1000.0 * epoch + 10.0 * version
    return {
        "w": base + torch.arange(ROWS * 4.0).view(ROWS, 4) / 100,
        "b": base + torch.arange(4.0),
        "n": torch.arange(3) + int(base),
    }


def cut(whole: Tensors, rank: int, way: int) -> dict[str, Piecewise]:
    """The part of a rank: all, or some rows of the first tensor, and the second one if it is this rank's. Negative ways
    are the same from below."""
    if not way:
        return {**whole}
    rows = slice(0, way) if rank == 0 else slice(way, ROWS)
    if way < 0:
        rows = slice(-way, ROWS) if rank else slice(0, -way)
        rows = slice(ROWS - rows.stop, ROWS - rows.start)
    shard = LocalShard(whole["w"][rows], shape=(ROWS, 4), start=(rows.start, 0))
    found: dict[str, Piecewise] = {"w": shard, "n": whole["n"]}
    return found | {"b": whole["b"]} if way % 2 == rank else found


def same(one: Tensors, other: Tensors) -> bool:
    return all(equal(one[name], other[name]) for name in other)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if they are the same numbers but for rounding; most are the same bits, which takes less to see."""
    return torch.equal(one, other) or torch.allclose(one.double(), other.double(), atol=1e-3)


def blended(before: Tensors, version: Tensors) -> Tensors:
    return {
        name: before[name].lerp(new, ETA) if new.is_floating_point() else new for name, new in version.items()
    }


@pytest.fixture(autouse=True)
def writable(monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory may be written, without a look at its thousands of mappings at each receipt; test_memory.py has others."""
    monkeypatch.setattr("unirun.weights.tensors._mapped", lambda: [(0, sys.maxsize)])


class Unreadable(torch.Tensor):
    """A tensor whose device fails when it is copied."""

    def resolve_conj(self) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Reader:
    """A receiver, and what should be in its tensors."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.channel: WeightsChannel = worker.makes(
            WeightsChannel, "policy", publisher="actor", receivers=["rollout"]
        )
        self.tensors = {name: torch.zeros_like(each) for name, each in content(0, 0).items()}
        self.expected = self.copy()
        self.cut = False
        """A connection to a publisher has ended since it has received."""

    def copy(self) -> Tensors:
        return {name: each.clone() for name, each in self.tensors.items()}


class Channel(RuleBasedStateMachine):
    """The job, and all that was published in it."""

    def __init__(self) -> None:
        super().__init__()
        self.job = Job(actor=len(PUBLISHERS), rollout=len(RECEIVERS))
        self.epoch = 0
        self.versions: list[tuple[int, int]] = []
        """Those that some publisher has published, by their epoch and number."""
        self.latest: dict[int, int] = {}
        """The version of each publisher that has published since it was started."""
        self.ways: dict[int, int] = {}
        self.publishers: dict[int, WeightsChannel] = {}
        self.readers: dict[int, Reader] = {}
        self.away = False
        """The publishers are dead."""

    @initialize()
    def begins(self) -> None:
        for rank in PUBLISHERS:
            self.start_publisher(rank)
        for rank in RECEIVERS:
            self.start_reader(rank)

    def start_publisher(self, rank: int) -> None:
        worker = self.job.starts("actor", rank, HERE)
        self.publishers[rank] = worker.makes(
            WeightsChannel, "policy", publisher="actor", receivers=["rollout"]
        )

    def start_reader(self, rank: int) -> None:
        self.readers[rank] = Reader(self.job.starts("rollout", rank, NODES[rank]))

    # Publishers

    def publish(self, rank: int) -> None:
        """The next version of this rank, cut as the others cut it."""
        version = self.latest.get(rank, self.begins_with - 1) + 1
        whole = content(self.epoch, version)
        self.publishers[rank].publish(cut(whole, rank, self.ways.get(version, self.way)), version)
        self.latest[rank] = version
        self.versions.append((self.epoch, version))

    begins_with = 1
    way = 0
    calm = False
    """All that has happened since all have published were receivers that have received."""

    @precondition(lambda self: not self.away)
    @rule(rank=RANK)
    def publishes(self, rank: int) -> None:
        self.publish(rank)

    @precondition(lambda self: not self.away)
    @rule(rank=RANK)
    def fails_to_publish(self, rank: int) -> None:
        """The memory of a tensor cannot be read. Receivers go on with the version before."""
        version = self.latest.get(rank, self.begins_with - 1) + 1
        whole = {name: each.as_subclass(Unreadable) for name, each in content(self.epoch, version).items()}
        with pytest.raises(RuntimeError, match="illegal memory access"):
            self.publishers[rank].publish(whole, version)

    @precondition(lambda self: not self.away)
    @rule(rank=RANK)
    def publishes_while_a_version_is_saved(self, rank: int) -> None:
        """Another thread writes it to a file meanwhile."""
        publisher = self.publishers[rank]._publisher
        if rank in self.latest and publisher is not None:
            version = self.latest[rank]
            with publisher.current() as (number, _, block):
                before = block.memory.clone()
                for _ in range(2):
                    self.publish(rank)
                assert number == version
                assert torch.equal(block.memory, before)

    @precondition(lambda self: not self.away)
    @rule(anew=RARELY, way=st.integers(1 - ROWS, ROWS - 1))
    def all_publish(self, anew: bool, way: int) -> None:
        """All have the same version then. With another layout from now on, if `anew`."""
        top = max(self.latest.values(), default=self.begins_with - 1)
        for rank in PUBLISHERS:
            while self.latest.get(rank, self.begins_with - 1) < top:
                self.publish(rank)
        self.way = way if anew else self.way
        for rank in PUBLISHERS:
            self.publish(rank)
        self.calm = True

    def withdraw(self) -> None:
        """Publishers go back to an earlier state, and publish it with the number of the last version."""
        for publisher in self.publishers.values():
            publisher.withdraw()
        self.epoch += 1
        self.begins_with = max(self.latest.values(), default=self.begins_with)
        self.latest.clear()
        for rank in PUBLISHERS:
            self.publish(rank)

    @precondition(lambda self: not self.away)
    @rule(really=RARELY)
    def publishers_withdraw(self, really: bool) -> None:
        if really:
            self.calm = False
            self.withdraw()

    def die(self) -> None:
        self.away = True
        for reader in self.readers.values():
            if reader.cut and reader.channel._holder is not None:
                # Its connection has ended before its publisher did, which a process that is asked later cannot know.
                reader.channel._holder.close()
        for rank in PUBLISHERS:
            self.job.dies(self.job.workers["actor", rank])
        self.latest.clear()

    @precondition(lambda self: not self.away)
    @rule(really=RARELY, back=st.sampled_from([None, 1, 2]), rank=READER)
    def publishers_die(self, really: bool, back: int | None, rank: int) -> None:
        """They are started again at once, and this receiver is the first to see it, unless `back` is None."""
        if really:
            self.die()
            if back is not None:
                self.begin_anew(back, 1)
                self.receive(rank, "copy", None, 1, ())

    @precondition(lambda self: self.away)
    @rule(back=st.integers(-1, 3), count=st.integers(0, 1))
    def publishers_begin_anew(self, back: int, count: int) -> None:
        """They begin with an older checkpoint, or a newer one, and have published so many versions."""
        self.begin_anew(back, count)

    def begin_anew(self, back: int, count: int) -> None:
        self.away, self.epoch = False, self.epoch + 1
        last = max((version for _, version in self.versions), default=0)
        self.begins_with = max(last - back, 1)
        for rank in PUBLISHERS:
            self.start_publisher(rank)
        for _ in range(count):
            self.all_publish(False, 0)

    # Receivers

    @rule(rank=READER, really=RARELY)
    def a_receiver_is_started_again(self, rank: int, really: bool) -> None:
        if really:
            self.calm = False
            self.job.dies(self.readers[rank].worker)
            self.start_reader(rank)

    @rule(
        rank=READER,
        how=st.sampled_from(["copy", "assign", "blend"]),
        stalled=st.sampled_from([None, 1, 2]),
        timeout=st.sampled_from([TIMEOUT, TIMEOUT, NEIGHBOR_ANSWER_TIMEOUT / 2]),
    )
    def receives(self, rank: int, how: str, stalled: int | None, timeout: float) -> None:
        """While nothing else happens, but for another receiver that does not answer."""
        if stalled is not None and stalled != rank:
            self.job.stalled.add(self.readers[stalled].worker)
            self.calm = False
        self.receive(rank, how, None, None, (), timeout)
        self.job.stalled.clear()

    @precondition(lambda self: not self.away)
    @rule(rank=READER)
    def assigns_twice(self, rank: int) -> None:
        """The tensors of the first time are freed by the second, and then the publishers go on."""
        for _ in range(2):
            self.receive(rank, "assign", None, None, ())
        for _ in range(2):
            self.all_publish(False, 0)

    @precondition(lambda self: not self.away)
    @rule(rank=READER)
    def learns_the_layouts_anew(self, rank: int) -> None:
        """As after a plan that did not fit. It maps a block that it holds once more."""
        self.receive(rank, "copy", None, None, ())
        for source in self.readers[rank].channel._sources.values():
            source.describe(None)
        self.receive(rank, "copy", None, None, ())

    @precondition(lambda self: not self.away)
    @rule(rank=READER)
    def publishers_turn_their_cut(self, rank: int) -> None:
        """The blocks of the next layout are as large as those of this one, so that they are the same memory."""
        for way in (self.way, -self.way, -self.way):
            self.way = way
            self.all_publish(False, way)
            self.receive(rank, "copy", None, None, ())

    @rule(
        rank=READER,
        back=st.sampled_from([None, None, None, -1, -1]),
        staleness=st.sampled_from([0, 1]),
    )
    def receives_if_it_is_far_behind(self, rank: int, back: int | None, staleness: int) -> None:
        self.receive(rank, "copy", back, staleness, ())

    @rule(rank=READER, how=st.sampled_from(["copy", "blend"]), moments=MOMENTS)
    def receives_while_things_happen(self, rank: int, how: str, moments: list[tuple[int, str, int]]) -> None:
        self.receive(rank, how, None, None, moments)

    def receive(
        self,
        rank: int,
        how: str,
        back: int | None,
        staleness: int | None,
        moments: Sequence[tuple[int, str, int]],
        timeout: float = TIMEOUT,
    ) -> None:
        """`back`: how far the least version is behind the one that this receiver has; None: any will do."""
        reader = self.readers[rank]
        if moments:
            # Memory of a publisher that was assigned lasts as long as the connection.
            reader.tensors = reader.copy()
        have = reader.channel.version
        least = None if back is None or have is None else have - back
        there = self.there(least)
        died = self.away
        self.job.later(1.0)
        self.versions_are_told()
        began = self.job.now
        self.eventful = False
        for nothing, what, who in moments:
            self.job.meanwhile.extend([lambda: None] * nothing)
            self.job.meanwhile.append(self.moment(what, who, rank))
        try:
            options: dict[str, Any] = {"assign": how == "assign", "eta": ETA if how == "blend" else 1.0}
            version = reader.channel.receive(
                reader.tensors, min_version=least, max_staleness=staleness, timeout=timeout, **options
            )
        except (WeightsTimeout, PeerLost, WeightsError) as error:
            self.calm = False
            # Nothing can be wrong but what has happened meanwhile.
            assert not isinstance(error, WeightsError) or self.eventful, error
            if not self.eventful:
                assert not there or timeout < NEIGHBOR_ANSWER_TIMEOUT, error
                assert same(reader.tensors, reader.expected)
                assert not (died and self.held(least)) or self.job.stalled, error
            elif how != "copy":
                assert same(reader.tensors, reader.expected)
            reader.expected = reader.copy()
        else:
            assert least is None or version >= least
            # It may have kept what it has, and the connection may have ended at the last moment.
            reader.cut &= version == have or self.eventful
            if not self.eventful and there:
                assert self.job.now - began <= (0.0 if self.calm else NEIGHBOR_ANSWER_TIMEOUT)
            elif not self.eventful and not self.job.stalled and died:
                assert self.job.now == began, "another receiver has it"
            if not self.eventful and there:
                near = staleness is not None and have is not None and (least is None or have >= least)
                newest = max(self.latest.values())
                kept = near and 0 <= newest - have <= staleness  # type: ignore[operator]
                assert version == (have if kept else newest)
            unchanged = staleness is not None and version == have
            if not (unchanged and same(reader.tensors, reader.expected)):
                made: Callable[[Tensors], Tensors] = (
                    (lambda whole: blended(reader.expected, whole)) if how == "blend" else dict
                )
                some = [made(content(*each)) for each in self.versions if each[1] == version]
                assert any(same(reader.tensors, each) for each in some), (reader.tensors, some)
            reader.expected = reader.copy()
        finally:
            self.job.meanwhile.clear()
        assert self.job.now - began <= timeout + 0.001

    def versions_are_told(self) -> None:
        """The console shows the version that each rank has, a moment after it has got it."""
        ends = [(reader.worker, reader.channel) for reader in self.readers.values()]
        if not self.away:
            ends += [(self.job.workers["actor", rank], each) for rank, each in self.publishers.items()]
        for worker, channel in ends:
            assert channel.version in (None, worker.told.get(f"policy{VERSION}"))

    @rule(rank=READER)
    def asks_for_the_latest(self, rank: int) -> None:
        """All publishers have it."""
        try:
            restarts, version = self.readers[rank].channel.latest()
        except PeerLost:
            assert self.away
            return
        assert version == (min(self.latest.values()) if len(self.latest) == len(PUBLISHERS) else None)
        assert restarts == max(self.job.workers["actor", each].who.incarnation for each in PUBLISHERS)

    def there(self, least: int | None) -> bool:
        """All publishers have the same version, and it is new enough."""
        latest = {self.latest.get(rank) for rank in PUBLISHERS}
        return len(latest) == 1 and None not in latest and (least is None or self.latest[0] >= least)

    def held(self, least: int | None) -> bool:
        """Some receiver has what another one could get from it."""
        versions = [reader.channel.version for reader in self.readers.values() if not reader.cut]
        return any(each is not None and (least is None or each >= least) for each in versions)

    def moment(self, what: str, rank: int, reader: int) -> Callable[[], None]:
        def happens() -> None:
            self.eventful, self.calm = True, False
            if what == "publish" and not self.away:
                self.publish(rank)
            elif what in ("break", "overwrite"):
                self.readers[reader].cut = True
                self.job.breaks(self.readers[reader].worker, self.job.workers["actor", rank])
                for _ in range(2 * (what == "overwrite" and not self.away)):
                    self.publish(rank)
            elif what == "die" and not self.away:
                self.die()
            elif what == "withdraw" and not self.away:
                self.withdraw()

        return happens

    # What holds at any time

    @invariant()
    def tensors_are_those_of_the_version_that_was_received(self) -> None:
        for reader in self.readers.values():
            assert same(reader.tensors, reader.expected)

    @invariant()
    def blocks_are_lent_to_those_who_hold_them(self) -> None:
        if self.away:
            return
        for rank, publisher in self.publishers.items():
            assert publisher._publisher is not None
            blocks = publisher._publisher._blocks._blocks
            assert len(blocks) <= BLOCKS
            current = publisher._publisher._current
            current_blocks = [current.block] if current is not None else []
            assert [block for block in blocks if CURRENT in block.readers] == current_blocks
            who = self.job.workers["actor", rank].who
            lent = {(block.number, name) for block in blocks for name in block.readers if name != CURRENT}
            held = set()
            for reader in self.readers.values():
                assert reader.channel._holder is not None
                version = reader.channel._holder._held
                for source, block in version.leases if version is not None else ():
                    if source.who == who and block is not None and not source.line.lost:
                        held.add((block, reader.channel._name))
                kept = [name for _, name in lent if name.startswith(f"{reader.channel._name} ")]
                assert len(kept) <= 2
                lent -= {each for each in lent if each[1] in kept}
            assert lent == held, (lent, held, [b.number for b in blocks])

    def teardown(self) -> None:
        """No connection is left of those that have closed the channel."""
        for channel in (*(reader.channel for reader in self.readers.values()), *self.publishers.values()):
            channel.close()
        assert not self.job.links
        self.job.close()


TestChannel = Channel.TestCase
TestChannel.settings = examples(200)


@pytest.mark.parametrize("how", variants("blend", "copy"))
@pytest.mark.parametrize("what", ["break", "overwrite", "die", "withdraw"])
def test_a_version_is_whole_whatever_happens_at_any_moment(what: str, how: str) -> None:
    history = Channel()
    try:
        history.begins()
        history.all_publish(True, 2)
        for rank, source in ((0, 0), (0, 1), (1, 0)):
            for moment in range(LAST_MOMENT):
                if history.away:
                    history.begin_anew(0, 1)
                history.all_publish(False, 0)
                history.receive(rank, "copy", None, None, ())
                history.all_publish(False, 0)
                history.receive(rank, how, None, None, [(moment, what, source)])
                history.tensors_are_those_of_the_version_that_was_received()
                history.blocks_are_lent_to_those_who_hold_them()
    finally:
        history.teardown()


@pytest.mark.parametrize("rank", RECEIVERS)
def test_a_version_is_whole_after_each_second_time(rank: int) -> None:
    """Each rule that does something twice, also where no random history has tried it."""
    history = Channel()
    try:
        history.begins()
        history.all_publish(True, 2)
        for again in (
            history.assigns_twice,
            history.learns_the_layouts_anew,
            history.publishers_turn_their_cut,
        ):
            for _ in range(2):
                again(rank)
                history.tensors_are_those_of_the_version_that_was_received()
                history.blocks_are_lent_to_those_who_hold_them()
    finally:
        history.teardown()


def test_a_neighbour_that_hangs_costs_no_time_after_the_deadline() -> None:
    history = Channel()
    try:
        history.begins()
        history.all_publish(True, 2)
        history.receives(1, "copy", None, TIMEOUT)
        history.receives(2, "copy", 1, NEIGHBOR_ANSWER_TIMEOUT / 2)
    finally:
        history.teardown()
