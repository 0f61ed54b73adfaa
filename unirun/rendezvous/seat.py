"""Follow the election of a job by a watch of the store, without polling it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from unirun.errors import UnirunError
from unirun.rendezvous.election import Leader, read_seat, seat_prefix
from unirun.rendezvous.store.protocol import Listing, Store, Watch
from unirun.values import Value

WAIT = 1.0
"""Seconds for which an eager watch waits for one change. A store that is away for longer is reported."""

CALM = 1.0
"""Seconds between two looks at the changes that a calm watch has received."""

RETRY = 0.5
"""Seconds after which an unreadable store is opened again."""

_JOIN = 0.5
"""Seconds to wait for the thread when the watch is closed. A store that is away holds it for longer."""


class Seat(Value):
    """The leader of a job, as last seen.

    `epoch` is the number of the latest term and `since` the time (``time.monotonic``) at which this state was first
    seen. While the store cannot be read, `trouble` has the reason, and the other fields are as seen last. `known` is
    false until the store was read once.
    """

    leader: Leader | None = None
    epoch: int = 0
    since: float = 0.0
    known: bool = False
    trouble: str = ""


class SeatWatch:
    """Follows the election under `prefix` in a thread, which calls `tell` with each change.

    An eager watch, and any watch while there is no leader, reports a change at once. A calm one looks every `CALM`
    seconds: it is for processes that have a stream to the master.
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
        """Make the watch eager or calm."""
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
        # Opened once: a file that was deleted since must not be created again.
        store: Store | None = None
        while not self._closed.is_set():
            try:
                store = store or self._open()
                self._follow(store)
            except UnirunError as error:
                # Also a store that cannot be opened, e.g. without a password: waiters get the reason.
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
