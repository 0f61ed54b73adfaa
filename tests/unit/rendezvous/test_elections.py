"""Elections with a store that fails and with rivals, and the watch of them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.effort import examples
from tests.waiting import eventually
from unirun.errors import Fenced, LeaseExpired, OutcomeUnknown, StoreAway, StoreError
from unirun.rendezvous import election
from unirun.rendezvous.election import Leader, Seat, SeatWatch, Term, campaign, leader_of, seat_prefix
from unirun.rendezvous.store.memory import MemoryStore, MemoryWatch
from unirun.rendezvous.store.protocol import Change, Compare, KeyValue, Lease, Listing, Outcome, Put
from unirun.values import Value
from unirun.wire.address import UnixAddress

T = TypeVar("T")

JOB, TTL = "jobs/run1/", 10.0
PATIENCE = 20.0
"""Seconds until a watch must have told of a change, or have ended; a watch that does not look takes for ever."""


class Clock:
    """The time of all hosts."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Moment(Value):
    """A call to the store: the seconds until the store has it (`before`) and from there to the answer (`after`), how it
    fails, and what a rival does just before it or while its answer is on the way (`late`). A write whose request is
    lost was not done, one whose answer is lost was."""

    before: float = 0.0
    after: float = 0.0
    fails: Literal["", "away", "request", "answer"] = ""
    rival: Literal["", "campaigns", "deposes"] = ""
    late: bool = False


SECONDS = st.sampled_from([0.0, 0.0, 0.0, 1.0, 6.0, TTL + 1.0])
STEADY = st.lists(st.builds(Moment, before=SECONDS, after=SECONDS), max_size=5)
MOMENTS = STEADY | st.lists(
    st.builds(
        Moment,
        before=SECONDS,
        after=SECONDS,
        fails=st.sampled_from([*[""] * 9, "away", "request", "answer"]),
        rival=st.sampled_from(["", "", "campaigns", "deposes"]),
        late=st.booleans(),
    ),
    max_size=5,
)


class Reign(NamedTuple):
    """A term that the store has seen begin: when, whose, and the term that was to be deposed."""

    began: float
    who: str
    deposing: int


class Candidate:
    """A process that wants to lead, and its way to the `store`: each call takes the next of its `moments`."""

    url = "memory:"

    def __init__(self, name: str, store: MemoryStore, clock: Clock, reigns: dict[int, Reign]) -> None:
        self.name = name
        self._store, self._clock, self._reigns = store, clock, reigns
        self.term: Term | None = None
        self._ends: dict[int, float] = {}
        self._lost: set[int] = set()
        """Leases that nobody can end: of calls that have failed, and of terms that have died."""
        self._moments: list[Moment] = []
        self._rival: Callable[[bool], None] = lambda _: None
        self._deposing = 0
        self.failed = self.disturbed = False

    def prepare(self, moments: Sequence[Moment], rival: Callable[[bool], None]) -> None:
        self._moments, self._rival = [*moments], rival
        self.failed = self.disturbed = False

    @property
    def address(self) -> UnixAddress:
        return UnixAddress(f"/{self.name}", self.name)

    @property
    def leases(self) -> set[int]:
        """The leases that live and are its own to end."""
        return {lease for lease, end in self._ends.items() if end > self._clock()} - self._lost

    def lose(self, leases: set[int]) -> None:
        self._lost |= leases

    def campaign(self, deposing: int) -> Term | None:
        self._deposing = deposing
        self.term = campaign(self, JOB, self.address, 7, ttl=TTL, deposing=deposing)
        return self.term

    def get(self, key: str) -> KeyValue | None:
        return self._ask(lambda: self._store.get(key))

    def get_prefix(self, prefix: str) -> Listing:
        return self._ask(lambda: self._store.get_prefix(prefix))

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        return self._ask(lambda: self._write(compares, puts, deletes), writes=True)

    def grant(self, ttl: float) -> Lease:
        return self._ask(lambda: self._renewed(self._store.grant(ttl)))

    def keep_alive(self, lease: Lease) -> None:
        def renew() -> None:
            self._store.keep_alive(lease)
            self._renewed(lease)

        self._ask(renew)

    def revoke(self, lease: Lease) -> None:
        def end() -> None:
            self._store.revoke(lease)
            self._ends.pop(lease.id, None)

        self._ask(end)

    def watch(self, prefix: str, from_revision: int) -> MemoryWatch:
        return self._store.watch(prefix, from_revision)

    def close(self) -> None:
        """The store is shared."""

    def _renewed(self, lease: Lease) -> Lease:
        self._ends[lease.id] = self._clock() + lease.ttl
        return lease

    def _write(self, compares: Sequence[Compare], puts: Sequence[Put], deletes: Sequence[str]) -> Outcome:
        outcome = self._store.txn(compares, puts, deletes)
        for put in puts:
            if put.key == f"{seat_prefix(JOB)}epoch" and outcome.succeeded:
                epoch = int(put.value)
                assert epoch == max(self._reigns, default=0) + 1
                self._reigns[epoch] = Reign(self._clock(), self.name, self._deposing)
        return outcome

    def _ask(self, call: Callable[[], T], *, writes: bool = False) -> T:
        moment = self._moments.pop(0) if self._moments else Moment()
        self.disturbed |= bool(moment.rival)
        if moment.rival and not moment.late:
            self._rival(moment.rival == "deposes")
        self._clock.now += moment.before
        self.failed |= bool(moment.fails)
        if moment.fails == "away" or (moment.fails and not writes):
            raise StoreAway("the store does not answer")
        if moment.fails == "request":
            raise OutcomeUnknown("nobody has heard it")
        answer = call()
        self._clock.now += moment.after
        if moment.rival and moment.late:
            self._rival(moment.rival == "deposes")
        if moment.fails:
            raise OutcomeUnknown("the answer is lost")
        return answer


LEADING = precondition(lambda self: self.leading)
WAITING = precondition(lambda self: self.waiting)
WHICH = st.integers(0, 2)


class Elections(RuleBasedStateMachine):
    """Three candidates. The reference: each term that the store has seen begin, and the leases that live."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = MemoryStore(self.clock)
        self.reigns: dict[int, Reign] = {}
        self.all = {name: Candidate(name, self.store, self.clock, self.reigns) for name in "abc"}
        self.terms: list[Term] = []
        self.resigned: set[int] = set()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(election, "clock", self.clock)

    def teardown(self) -> None:
        self._patch.undo()
        self.store.close()

    @property
    def leader(self) -> Leader | None:
        return leader_of(self.store, JOB)

    @property
    def leading(self) -> list[Candidate]:
        """Those who take themselves for the leader."""
        return [each for each in self.all.values() if each.term is not None]

    @property
    def waiting(self) -> list[Candidate]:
        return [each for each in self.all.values() if each.term is None]

    def rival_of(self, name: str) -> Callable[[bool], None]:
        def act(deposes: bool) -> None:
            other = next((each for each in self.waiting if each.name != name), None)
            if other is not None:
                leader = self.leader
                other.prepare([], lambda _: None)
                if (term := other.campaign(leader.epoch if leader and deposes else 0)) is not None:
                    self.terms.append(term)

        return act

    @WAITING
    @rule(
        which=WHICH,
        deposing=st.sampled_from(["nobody", "nobody", "the leader", "one before"]),
        moments=MOMENTS,
    )
    def campaign(self, which: int, deposing: str, moments: list[Moment]) -> None:
        """One that does not win has a reason, and keeps no lease."""
        self._campaign(self.waiting[which % len(self.waiting)], deposing, moments)

    def _campaign(self, me: Candidate, deposing: str, moments: list[Moment]) -> None:
        leader, began = self.leader, self.clock()
        dead = {"nobody": 0, "the leader": leader.epoch if leader else 0}.get(
            deposing, leader.epoch - 1 if leader else 0
        )
        me.prepare(moments, self.rival_of(me.name))
        try:
            term = me.campaign(dead)
        except StoreError as error:
            assert me.failed or isinstance(error, LeaseExpired)
            me.lose(me.leases)
            return
        if term is not None:
            assert self.reigns[term.epoch].who == me.name
            self.terms.append(term)
        elif not me.failed and not me.disturbed:
            assert leader is not None
            assert leader.epoch != dead or self.clock() > began
        assert len(me.leases) <= (term is not None)

    @LEADING
    @rule(which=WHICH, moments=MOMENTS)
    def keep(self, which: int, moments: list[Moment]) -> None:
        """A leader is told that another leads when that is so, and leads with one lease otherwise."""
        me, began = self.leading[which % len(self.leading)], self.clock()
        assert me.term is not None
        term, renewed, leases = me.term, me.term.renewed, me.leases
        me.prepare(moments, self.rival_of(me.name))
        try:
            term.keep()
        except Fenced:
            assert max(self.reigns) > term.epoch
            me.term = None
            me.lose(me.leases)
        except StoreError as error:
            assert me.failed or isinstance(error, LeaseExpired)
            assert term.renewed == renewed
            me.lose(me.leases - leases)
        else:
            assert len(me.leases) <= 1
            if not me.disturbed and self.clock() < began + TTL:
                assert self.leader == Leader(term.epoch, me.address, 7)

    @LEADING
    @rule(which=WHICH, moments=STEADY)
    def resign(self, which: int, moments: list[Moment]) -> None:
        """A leader that resigns leaves no lease, and so not the seat."""
        me = self.leading[which % len(self.leading)]
        assert me.term is not None
        me.prepare(moments, self.rival_of(me.name))
        me.term.resign()
        assert not me.leases
        self.resigned.add(me.term.epoch)
        me.term = None

    @LEADING
    @rule(which=WHICH)
    def die(self, which: int) -> None:
        """A leader is killed. Another process takes its place."""
        me = self.leading[which % len(self.leading)]
        me.lose(me.leases)
        me.term = None

    @WAITING
    @rule(which=WHICH)
    def stand_by(self, which: int) -> None:
        """A candidate waits for the end of the present term, whose leader does nothing meanwhile."""
        me = self.waiting[which % len(self.waiting)]
        end = self.clock() + TTL
        while me.term is None:
            assert self.clock() <= end
            self._campaign(me, "nobody", [])
            self.clock.now += 1.0

    @rule(seconds=st.sampled_from([1.0, 4.0, TTL - 1.0, 2 * TTL]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def nobody_else_had_led_when_a_term_was_renewed(self) -> None:
        """Nor does somebody for the time of a lease, but who deposes it."""
        for term in self.terms:
            for epoch, reign in self.reigns.items():
                if epoch > term.epoch:
                    assert reign.began >= term.renewed
            after = self.reigns.get(term.epoch + 1)
            if after is not None and after.deposing != term.epoch and term.epoch not in self.resigned:
                assert after.began >= term.renewed + TTL


TestElections = Elections.TestCase
TestElections.settings = settings(examples(100), stateful_step_count=30)


class FragileWatch:
    """A watch of the store, which is `away` at times."""

    def __init__(self, watch: MemoryWatch, away: threading.Event) -> None:
        self._watch, self._away = watch, away

    def changes(self, timeout: float) -> tuple[Change, ...] | Listing:
        if self._away.is_set():
            raise StoreAway("the store does not answer")
        return self._watch.changes(timeout)

    def close(self) -> None:
        self._watch.close()


class FragileStore(MemoryStore):
    """A store that is `away` at times for those who watch it, and outlives them."""

    def __init__(self) -> None:
        super().__init__()
        self.away = threading.Event()

    def watch(self, prefix: str, from_revision: int) -> FragileWatch:  # type: ignore[override]
        return FragileWatch(super().watch(prefix, from_revision), self.away)

    def close(self) -> None:
        """The machine has it until its end."""


class Seats(RuleBasedStateMachine):
    """A watch of an election. The reference is the election itself, and when it has changed.

    A calm watch does not look within the time of a test.
    """

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(election, "CALM_POLL_INTERVAL", 3600.0)
        self._patch.setattr(election, "EAGER_WATCH_TIMEOUT", 0.002)
        self._patch.setattr(election, "ELECTION_RETRY_INTERVAL", 0.002)
        self.store, self.seats = FragileStore(), list[Seat]()
        self.watch = SeatWatch(lambda: self.store, JOB, self.seats.append)
        self.term: Term | None = None
        self.epoch, self.changed, self.eager = 0, 0.0, True
        self.told()

    def teardown(self) -> None:
        """A watch that is closed has ended, whatever it was waiting for."""
        try:
            self.watch.close()
            eventually(lambda: not self.watch._thread.is_alive(), within=PATIENCE)
        finally:
            self._patch.undo()

    def told(self) -> None:
        """The watch has told how the election stands, and since when."""
        leader = leader_of(self.store, JOB)

        def news() -> bool:
            last = self.seats[-1] if self.seats else Seat()
            return last.known and (last.leader, last.epoch, bool(last.trouble)) == (
                leader,
                self.epoch,
                self.store.away.is_set(),
            )

        eventually(news, within=PATIENCE)
        assert self.seats[-1].since >= self.changed

    def _changes(self) -> None:
        self.changed = time.monotonic()

    @property
    def looks(self) -> bool:
        """True if the watch sees a change at once."""
        return not self.store.away.is_set() and (self.eager or self.seats[-1].leader is None)

    @rule()
    def elect(self) -> None:
        looks = self.looks
        self._changes()
        self.term = campaign(self.store, JOB, UnixAddress("/m", "host"), 7, ttl=TTL, deposing=self.epoch)
        assert self.term is not None
        self.epoch = self.term.epoch
        if looks:
            self.told()

    @precondition(lambda self: self.term is not None)
    @rule()
    def resign(self) -> None:
        looks = self.looks
        self._changes()
        assert self.term is not None
        self.term.resign()
        self.term = None
        if looks:
            self.told()

    @precondition(lambda self: self.eager)
    @rule(away=st.booleans())
    def go_away(self, away: bool) -> None:
        """The store is away, or back. Who leads is known as before, and since when."""
        if away:
            self.store.away.set()
        else:
            self.store.away.clear()
        self.told()

    @precondition(lambda self: not self.store.away.is_set())
    @rule(eager=st.booleans())
    def hurry(self, eager: bool) -> None:
        self.watch.hurry(eager)
        self.eager = eager
        if eager:
            self.told()

    @invariant()
    def a_state_is_told_once_with_its_time(self) -> None:
        for before, after in itertools.pairwise([*self.seats]):
            same = (before.leader, before.epoch) == (after.leader, after.epoch)
            assert before != after
            if before.known:
                assert (before.since == after.since) == same
            assert not (same and before.trouble == after.trouble)


TestSeats = Seats.TestCase
# A failure is not made smaller: each attempt waits for what does not come.
TestSeats.settings = settings(examples(40), stateful_step_count=20, phases=[Phase.generate])
