"""The nodes that have gone silent, and the time at which one may be given up; for nodes on other hosts than
the master's.

A stream over a network may be silent though nobody has closed it: a cable is out, a host has lost its power or hangs.
So agent and master exchange beats, and both decide by them. The master gives the node up (`Silence`), and its ranks
start elsewhere; the agent kills its workers (`unirun.launcher.contact`), which must always come first.

::

    agent    s  sends a beat               kills its workers at  s + FENCE_TIMEOUT
    master      m  gets it, answers it     gives the node up at  m + SILENCE_TIMEOUT + GIVE_UP_DELAY  or later

The agent counts from when it *sent* the latest beat that the master has answered, not from when the answer came.
Whatever is lost or late on either way, the master got that beat at ``m >= s``. Two clocks that run at rates of
``1 + d`` and ``1 - d`` give

    ``FENCE_TIMEOUT / (1 - d)  <  (SILENCE_TIMEOUT + GIVE_UP_DELAY) / (1 + d)``

which is 5.56 s < 6.73 s for d = 1 %. In the rest the workers end; an agent that is stopped is killed by the kernel, 0.4
s later. A cable that is out for 3 s is no reason to kill them: the beat that was answered may be `HEARTBEAT_INTERVAL`
old when it is pulled, and the agent connects anew within half a second of its return, so 5.0 s of the 5.5 are used.

Other masters, and other ways to know that nobody has given the node up:

- A new master waits 15 s for nodes that do not join it (`unirun.failover.takeover.REJOIN_TIMEOUT`). The one that it has
  replaced may not know that, and answers beats for `AUTHORITY_SECONDS` seconds after it last renewed its term
  (`may_answer`); the renewal was before the new term. ``(AUTHORITY_SECONDS + FENCE_TIMEOUT) / (1 - d) < 15 / (1 + d)``:
  11.6 s < 14.9 s.
- An agent that gets no answer may read in the store (etcd) that its node is not *marked*. It has `UNMARKED_SECONDS`
  seconds from the beginning of that read, because a node is given up `GIVE_UP_DELAY` seconds after its mark was
  written.
- Where the store is a file on the head, no other host can read it, and masters run on the head only. An agent that gets
  no answer connects there, and has `FENCE_TIMEOUT` seconds from the beginning of an attempt in which both ends have
  proved the token, and over TLS their nodes. A master counts that as a message of the node, before the node can know of
  it. While no master accepts, because it is stopped or its successor is on the way, the head's agent does
  (`unirun.launcher.contact`), and tells the master that it follows: one that goes on hears of it before it gives a node
  up, as that takes `GIVE_UP_DELAY` seconds more; a new one waits 15 s for nodes in any case. That a connection is made
  proves nothing: a machine that has taken over the address of the head, or of a node, can make one.

The time in which the master itself does not run is not held against the nodes: a look that comes late moves every
deadline by the delay.
"""

from __future__ import annotations

from collections.abc import Iterable

HEARTBEAT_INTERVAL = 1.5
"""Seconds between two beats of an agent; the master answers each at once."""

SILENCE_TIMEOUT = 4.8
"""Seconds without a message after which a node is reported: three beats, and the way of one."""

GIVE_UP_DELAY = 2.0
"""Seconds that follow before it is lost, beginning when the report is in the store."""

FENCE_TIMEOUT = 5.5
"""Seconds after which an agent kills its workers, from when it sent the latest beat that was answered."""

UNMARKED_SECONDS = 1.8
"""Seconds for which an agent is safe that has found no mark of its node in the store."""

AUTHORITY_SECONDS = 6.0
"""Seconds for which a master that has renewed its term answers beats. The lease of the term is as long."""

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
        self._looked = now
        self.stalled = 0.0

    def heard(self, node: str, now: float) -> None:
        """Note a message of `node`. Its silence is watched from now on."""
        self._heard[node] = now

    def forget(self, node: str) -> None:
        """Stop watching `node`."""
        self._heard.pop(node, None)
        self._silent.pop(node, None)

    def marked(self, nodes: Iterable[str], now: float) -> None:
        """Note that the silence of `nodes` is in the store, so that their last `GIVE_UP_DELAY` seconds begin."""
        for node in nodes:
            if node in self._silent:
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


def may_answer(renewed: float, now: float, *, alone: bool) -> bool:
    """Return True if a master may tell agents that no master has given them up. `renewed` is the time at
    which it last began to renew its term, on a clock that also counts while the host is suspended.

    Later another master may lead. It can start nothing if no node is with it, so `alone`, while every node of the job
    is heard by this one, the store may be away for any time.
    """
    return alone or now < renewed + AUTHORITY_SECONDS
