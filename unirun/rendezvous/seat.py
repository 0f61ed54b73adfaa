"""Who leads a job, followed by a watch of the store: no look at the store as long as nothing changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from unirun.errors import UnirunError
from unirun.rendezvous.election import Leader, read_seat, seat_prefix
from unirun.rendezvous.store.protocol import Listing, Store, Watch
from unirun.values import Value

WAIT = 1.0
"""Seconds for which an eager watch waits for one change. A store that is away for so long is told."""

CALM = 1.0
"""Seconds between two looks at what a calm watch has received."""

RETRY = 0.5
"""Seconds after which a store that could not be read is opened again."""

_JOIN = 2.0


class Seat(Value):
    """Who leads a job, as far as that is known.

    `epoch` is the number of the latest term and `since` the time (``time.monotonic``) at which this was seen. As long
    as the store cannot be read, `trouble` says why, and the rest is what was seen last. Before the first look at the
    store `known` is false.
    """

    leader: Leader | None = None
    epoch: int = 0
    since: float = 0.0
    known: bool = False
    trouble: str = ""


class SeatWatch:
    """Follows the election under `prefix` in a thread, which calls `tell` with each change.

    A watch that is eager, or has seen that nobody leads, tells of a change at once. Otherwise it looks every `CALM`
    seconds: that is for who has a stream to a master.
    """

    def __init__(self, open_store: Callable[[], Store], prefix: str, tell: Callable[[Seat], None]) -> None:
        self._open, self._prefix, self._tell = open_store, prefix, tell
        self._seat = Seat()
        self._watch: Watch | None = None
        self._eager, self._closed = threading.Event(), threading.Event()
        self._eager.set()
        self._thread = threading.Thread(target=self._run, name="unirun-seat", daemon=True)
        self._thread.start()

    def hurry(self, eager: bool) -> None:
        """Be eager from now on, or be calm."""
        if eager:
            self._eager.set()
        else:
            self._eager.clear()

    def close(self) -> None:
        """Stop watching. Safe to call twice."""
        self._closed.set()
        self._eager.set()
        if self._watch is not None:
            self._watch.close()
        self._thread.join(_JOIN)

    def _run(self) -> None:
        # Opened once: a file that was deleted since must not be made anew.
        store: Store | None = None
        while not self._closed.is_set():
            try:
                store = store or self._open()
                self._follow(store)
            except UnirunError as error:
                # Also a store that cannot be opened, for want of a password perhaps: whoever waits hears why.
                self._change(self._seat.leader, self._seat.epoch, trouble=str(error))
                self._closed.wait(RETRY)
        if store is not None:
            store.close()

    def _follow(self, store: Store) -> None:
        below = seat_prefix(self._prefix)
        listing = store.get_prefix(below)
        values = {item.key: item.value for item in listing.items}
        self._watch = watch = store.watch(below, listing.revision + 1)
        try:
            while not self._closed.is_set():
                epoch, leader = read_seat(self._prefix, values)
                self._change(leader, epoch)
                eager = leader is None or self._eager.is_set()
                news = watch.changes(WAIT if eager else 0.0)
                if isinstance(news, Listing):
                    values = {item.key: item.value for item in news.items}
                else:
                    for change in news:
                        if change.kind == "put":
                            values[change.key] = change.value
                        else:
                            values.pop(change.key, None)
                if not news and not eager:
                    self._eager.wait(CALM)
        finally:
            self._watch = None
            watch.close()

    def _change(self, leader: Leader | None, epoch: int, trouble: str = "") -> None:
        before = self._seat
        same = before.known and (before.leader, before.epoch) == (leader, epoch)
        if same and before.trouble == trouble:
            return
        since = before.since if same else time.monotonic()
        self._seat = Seat(leader, epoch, since, known=before.known or not trouble, trouble=trouble)
        self._tell(self._seat)
