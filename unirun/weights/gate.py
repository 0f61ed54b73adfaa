"""The decision about who may make one more item of a queue: a pure value, `GateState`.

An item is an episode, or a group of episodes that are trained on together. A producer has an *admission* for each item
that it makes now. An admission ends when its item is put, when it is given back, or with its process. An item that was
put counts until its batch is trained on, or until it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from unirun.values import Value, WorkerId


class Bound(Value):
    """An item is trained on at most `max_head_offpolicyness` versions after the weights that it was made with; each
    version takes `batch` items. At most `max_concurrent_rollouts` are made at the same time; None: as many as that
    allows."""

    batch: int
    max_head_offpolicyness: int
    max_concurrent_rollouts: int | None = None

    def room(self, begun: int, still_open: int, version: int) -> int:
        """The number of items that may be begun now, after `begun` items, of which `still_open` are being made.

        Item ``begun`` will be in batch ``begun // batch``, which is trained on with that version at the earliest. This
        is AReaL's rule (``is_staled`` of its rollout manager).
        """
        room = (version + self.max_head_offpolicyness + 1) * self.batch - begun
        if self.max_concurrent_rollouts is not None:
            room = min(room, self.max_concurrent_rollouts - still_open)
        return max(room, 0)

    def is_stale(self, made_with: int, version: int) -> bool:
        """Return True if an item is too old to be trained on."""
        return version - made_with > self.max_head_offpolicyness


class Counts(Value, tag=True):
    """The items of one producer: those that it makes now (`open`), those that it has `made` without those that were
    dropped, and those of them that consumers have used (`delivered`)."""

    open: int = 0
    made: int = 0
    delivered: int = 0


class Enter(Value, tag=True):
    """The request of a producer to the gate: it tells its counts, and asks for `wants` admissions. Answered with 1 to
    `wants` as soon as there are any; with 0 at once if it wants none, and when the next request comes.

    A producer numbers its requests. Its counts have the admissions of all answers but those to `unanswered` requests,
    which have not come; answers that have been lost are not among them.
    """

    queue: str
    producer: WorkerId
    number: int
    unanswered: tuple[int, ...]
    counts: Counts
    wants: int


class Admitted(Value, tag=True):
    """The answer of the gate: the producer may begin `count` items."""

    count: int = 0


class _Known(Value):
    """A producer: the number of its latest request, its counts in it, the admissions that it wants, and those in
    answers that it had not got then."""

    counts: Counts
    number: int = 0
    wants: int = 0
    sent: Mapping[int, int] = MappingProxyType({})

    @property
    def open(self) -> int:
        return self.counts.open + sum(self.sent.values())


class GateState(Value):
    """The admissions of all producers. Each method returns the state after an event; `admit` lets producers begin.

    A new gate takes it that each version before its own has had its batch, and lets nobody in before it has the counts
    of all producers that were there (`unheard`). So a consumer that was restarted gets no burst of items.
    """

    bound: Bound | None = None
    """None: the gate is not open."""
    version: int = 0
    before: int = 0
    """Items in the batches before, without those that producers count themselves."""
    producers: Mapping[WorkerId, _Known] = MappingProxyType({})
    waiting: tuple[WorkerId, ...] = ()
    """The producers that want admissions, in the order in which they have asked."""
    unheard: frozenset[WorkerId] = frozenset()

    @property
    def open(self) -> int:
        """Items that are being made."""
        return sum(known.open for known in self.producers.values())

    @property
    def begun(self) -> int:
        """Items of all batches so far, and those to come that were put or are being made."""
        return self.before + sum(known.counts.made + known.open for known in self.producers.values())

    @property
    def room(self) -> int:
        """Items that may be begun now."""
        if self.bound is None or self.unheard:
            return 0
        return self.bound.room(self.begun, self.open, self.version)

    def opened(self, bound: Bound, version: int, there: frozenset[WorkerId]) -> GateState:
        """Versions before `version` were trained. The producers that are `there` may have items."""
        if self.bound is not None:
            return self
        before = self.before + version * bound.batch
        return replace(
            self, bound=bound, version=version, before=before, unheard=there - self.producers.keys()
        )

    def counted(self, who: WorkerId, counts: Counts) -> GateState:
        """A producer has told its counts; what it has told with a request is newer."""
        return self if who in self.producers else self._with(who, _Known(counts))

    def asked(self, request: Enter) -> GateState:
        """A producer has told its counts, and asks for admissions in place of its request before."""
        who, known = request.producer, self.producers.get(request.producer)
        if known is not None and request.number <= known.number:
            # It has come over a connection that has ended since.
            return self
        sent = known.sent if known is not None else {}
        sent = {number: count for number, count in sent.items() if number in request.unanswered}
        state = self._with(who, _Known(request.counts, request.number, request.wants, sent))
        waiting = state.waiting
        if request.wants and who not in waiting:
            waiting = (*waiting, who)
        elif not request.wants:
            waiting = tuple(each for each in waiting if each != who)
        return replace(state, waiting=waiting)

    def _with(self, who: WorkerId, known: _Known) -> GateState:
        # What was delivered before this gate was there is in the batches of earlier versions.
        earlier = known.counts.delivered if who not in self.producers else 0
        return replace(
            self,
            before=self.before - earlier,
            producers={**self.producers, who: known},
            unheard=self.unheard - {who},
        )

    def advanced(self, version: int) -> GateState:
        """These weights are trained now."""
        return replace(self, version=max(self.version, version))

    def kept(self, count: int) -> GateState:
        """Consumers have `count` more items than producers know of, which wait for their batch; below 0: so many that
        were used are not trained on, and others take their place."""
        return replace(self, before=self.before + count)

    def lost(self, gone: Callable[[WorkerId], bool]) -> GateState:
        """Producers that are gone have taken with them what they had not delivered."""
        left = {who: known for who, known in self.producers.items() if not gone(who)}
        delivered = sum(known.counts.delivered for who, known in self.producers.items() if who not in left)
        return replace(
            self,
            before=self.before + delivered,
            producers=left,
            waiting=tuple(who for who in self.waiting if who in left),
            unheard=frozenset(who for who in self.unheard if not gone(who)),
        )

    def admit(self) -> tuple[GateState, dict[WorkerId, int]]:
        """Share the room among the producers that wait, in their order. Returns the admissions of those that get any:
        each of their requests is answered."""
        room, waiting = self.room, self.waiting
        if not room or not waiting:
            return self, {}
        producers, answers = {**self.producers}, dict[WorkerId, int]()
        for place, who in enumerate(waiting):
            known = producers[who]
            # Rounded up, so that the first one gets the only one.
            count = min(known.wants, -(-room // (len(waiting) - place)))
            if not count:
                break
            room -= count
            answers[who] = count
            producers[who] = replace(known, wants=0, sent={**known.sent, known.number: count})
        return replace(self, producers=producers, waiting=waiting[len(answers) :]), answers
