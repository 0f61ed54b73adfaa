"""The nodes that have gone silent, and the time at which one may be given up; for nodes on other hosts than
the master's.

A stream over a network may be silent though nobody has closed it: a cable is out, a host has lost its power or hangs.
So agent and master exchange beats, and both decide by them. A master gives the node up (`Silence`), and its ranks
start elsewhere; the agent kills its workers (`unirun.launcher.contact`), which must always come first. One inequality
says that, for the master that the node was with and for each one after it:

::

    agent    s      sends a beat
    master   m >= s answers it with an *age*: at m - age, no other master led, or none had a node
    agent           kills its workers at                 s - age + FENCE_TIMEOUT
    master          gives the node up, unheard since m,   at m + SILENCE_TIMEOUT + GIVE_UP_DELAY  or later
    another         gives the node up, when its first node has joined at j, at j + REJOIN_SECONDS  or later

The agent counts from when it *sent* the latest beat that was answered, not from when the answer came, and ``j > m -
age``. So whatever is lost or late on any way, what is left is a sum of constants, `gone_after`: the fence, the kill of
an agent that is stopped by the kernel, and the end of the workers, between clocks whose rates differ:

    ``gone_after(FENCE_TIMEOUT)  <=  SILENCE_TIMEOUT + GIVE_UP_DELAY  =  REJOIN_SECONDS``

which is 6.79 s <= 6.8 s. The age (`Echoes`) is that of the younger proof:

- the master had the term when it last began to renew it, as the next term is later. The store may be away for a while;
- each node of the job has read an answer of this master that is so old, and said so in a beat on the same stream. A
  node joins another master after that, and a master without nodes starts nothing. So while all nodes are heard by one
  master the store may be away for any time.

The age is `LEASE_SECONDS` / 3 most of the time, or two beats. A cable that is out for 3 s is no reason to kill workers:
a beat may be `HEARTBEAT_INTERVAL` old when it is pulled, its answer a second more, and the agent connects anew within
half a second of its return, so 5.5 s of the 5.7 are used.

Other ways to know that nobody has given the node up:

- An agent that gets no answer may read in the store (etcd) that its node is not *marked*. It has `UNMARKED_SECONDS`
  seconds from the beginning of that read. A node is given up `GIVE_UP_DELAY` seconds after its mark was written, which
  is the same inequality with another fence: ``gone_after(UNMARKED_SECONDS) <= GIVE_UP_DELAY``, 2.77 s <= 2.8 s.
- Where the store is a file on the head, no other host can read it, and masters run on the head only. An agent that gets
  no answer connects there, and has `FENCE_TIMEOUT` seconds from the beginning of an attempt in which both ends have
  proved the token, and over TLS their nodes. A master counts that as a message of the node, before the node can know of
  it. While no master accepts, because it is stopped or its successor is on the way, the head's agent does
  (`unirun.launcher.contact`), and tells the master that it follows: one that goes on hears of it before it gives a node
  up, as that takes `GIVE_UP_DELAY` seconds more; a new one waits longer for its nodes than where the store is etcd
  (`unirun.failover.takeover.REJOIN_TIMEOUT`). That a connection is made proves nothing: a machine that has taken over
  the address of the head, or of a node, can make one.

The time in which the master itself does not run is not held against the nodes: a look that comes late moves every
deadline by the delay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Iterable

CLOCK_DRIFT = 0.01
"""The most by which a clock runs too fast or too slow."""

HEARTBEAT_INTERVAL = 1.0
"""Seconds between two beats of an agent; the master answers each at once."""

FENCE_TIMEOUT = 5.7
"""Seconds after which an agent kills its workers, from when it sent the latest beat that was answered."""

KERNEL_KILL_DELAY = 0.4
"""Seconds after the end of the fence at which the kernel kills an agent that has not done anything about it."""

KILL_SECONDS = 0.5
"""Seconds in which the workers of an agent that was killed end."""


def gone_after(fence: float) -> float:
    """Seconds, by any clock, after which the workers of an agent with this fence have ended, whatever it does."""
    slowest = (fence * (1 + CLOCK_DRIFT) + KERNEL_KILL_DELAY) / (1 - CLOCK_DRIFT)
    return (slowest + KILL_SECONDS) * (1 + CLOCK_DRIFT)


UNMARKED_SECONDS = 1.8
"""Seconds for which an agent is safe that has found no mark of its node in the store."""

GIVE_UP_DELAY = math.ceil(10 * gone_after(UNMARKED_SECONDS)) / 10
"""Seconds after which a silent node is lost, beginning when the report is in the store: 2.8."""

SILENCE_TIMEOUT = math.ceil(10 * (gone_after(FENCE_TIMEOUT) - GIVE_UP_DELAY)) / 10
"""Seconds without a message after which a node is reported: 4.0."""

REJOIN_SECONDS = SILENCE_TIMEOUT + GIVE_UP_DELAY
"""Seconds that a master which has taken over waits for a node of another host, from when the first one has joined."""

LEASE_SECONDS = 3.0
"""Seconds of a term after which a master that does not renew it is replaced. It renews it three times in that."""

SILENCE_POLL_INTERVAL = 0.25
"""Seconds between two looks at who is silent."""

_STALL_SECONDS = 0.1
"""A look that is later than this by so many seconds means that the master did not run."""


class Silence:
    """The times at which each node was last heard. Times are seconds of the master's own monotonic clock;
    there is no I/O.

    `stalled` is for how long the master has not run, all in all.
    """

    def __init__(self, now: float) -> None:
        self._heard: dict[str, float] = {}
        # When the countdown of a silent node has begun; None while its mark is being written.
        self._silent: dict[str, float | None] = {}
        # The marks of a node that are not written yet. A store may be so slow that a node is heard, and is silent once
        # more, before its first mark is written: that one is removed again before the second is.
        self._unwritten: Counter[str] = Counter()
        self._looked = now
        self.stalled = 0.0

    def heard(self, node: str, now: float) -> None:
        """Note a message of `node`. Its silence is watched from now on."""
        self._heard[node] = now

    def forget(self, node: str) -> None:
        """Stop watching `node`."""
        self._heard.pop(node, None)
        self._silent.pop(node, None)

    def marked(self, nodes: Collection[str], now: float) -> None:
        """Note that the silence of `nodes` is in the store, so that their last `GIVE_UP_DELAY` seconds begin. Called
        once for each time that `look` has returned them as silent, in that order."""
        self._unwritten.subtract(nodes)
        for node in nodes:
            if node in self._silent and not self._unwritten[node]:
                self._silent[node] = now

    def watches(self, node: str) -> bool:
        """Return True if `node` was heard, and is expected to be heard again."""
        return node in self._heard

    def is_silent(self, node: str) -> bool:
        """Return True if `node` was found to be silent, and not to be back."""
        return node in self._silent

    def look(self, now: float) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The nodes that are silent since `now`, those that are lost, and those that were silent and are back; to be
        called every `SILENCE_POLL_INTERVAL` seconds.

        Nodes that are lost together are returned together, as their loss is one decision: the power of a rack fails at
        once, but their last beats came within `HEARTBEAT_INTERVAL`. So the first waits for the others, for that long.
        """
        self._skip_stall(now)
        back = tuple(node for node in self._silent if now - self._heard[node] <= SILENCE_TIMEOUT)
        for node in back:
            del self._silent[node]
        silent = tuple(
            node
            for node, at in self._heard.items()
            if now - at > SILENCE_TIMEOUT and node not in self._silent
        )
        self._silent |= dict.fromkeys(silent)
        self._unwritten.update(silent)
        due = {
            node: at + GIVE_UP_DELAY
            for node, at in self._silent.items()
            if at is not None and now >= at + GIVE_UP_DELAY
        }
        if not due or (len(due) < len(self._silent) and now < min(due.values()) + HEARTBEAT_INTERVAL):
            return silent, (), back
        for node in due:
            self.forget(node)
        return silent, tuple(due), back

    def _skip_stall(self, now: float) -> None:
        late = now - self._looked - SILENCE_POLL_INTERVAL
        self._looked = now
        if late < _STALL_SECONDS:
            return
        self.stalled += late
        self._heard = {node: min(at + late, now) for node, at in self._heard.items()}
        # What has arrived meanwhile is read first.
        self._silent = {node: None if at is None else now for node, at in self._silent.items()}


class Echoes:
    """The latest answer of this master that each node has read, as it says in its next beat on the same stream. Times
    are those of one clock of the master that also counts while the host is suspended; there is no I/O."""

    def __init__(self) -> None:
        self._read: dict[str, float] = {}

    def heard(self, node: str, answered: float) -> None:
        """Note that `node` has read the answer that was sent at the time `answered`; 0 for none yet."""
        self._read[node] = max(self._read.get(node, 0.0), answered)

    def age(self, now: float, renewed: float, nodes: Iterable[str], here: Container[str]) -> float:
        """Seconds since no other master had a node: since the term was `renewed`, or since all `nodes` were with this
        one. Those `here`, on the master's own host, are with it as long as their streams live."""
        together = min((now if node in here else self._read.get(node, 0.0) for node in nodes), default=0.0)
        return now - max(renewed, together)
