"""The generations of a role's process group in one worker: the group is formed again in place after a loss."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from unirun.rendezvous.endpoints import GENERATION_KEY, split_endpoint
from unirun.roles.gloo import WORKER_IDLE_TIMEOUT, in_group, wait_until_idle, wait_until_stuck
from unirun.roles.peers import Peers
from unirun.roles.process_groups import c10d, dist, process_groups
from unirun.wire.reports import GroupFormed, GroupMeets, Stuck

LOSS_VIEW_TIMEOUT = 5.0
"""Seconds in which the view with a loss must arrive that explains why forming a group, or a collective, failed."""
CONNECT_TIMEOUT = timedelta(milliseconds=500)
"""For one attempt to connect to a store; more attempts follow."""
KEY_TIMEOUT = timedelta(seconds=10)
"""For the first key of a store, which its process sets when it starts."""


class Formation:
    """Keeps the default process group of this worker at the generation that the master has ordered.

    The main thread forms groups (`enter`, `follow`). The link's thread calls `news` after each view: if there is a
    later generation, every wait of the main thread in the earlier one fails.
    """

    def __init__(self, peers: Peers, formed: Callable[[int], None]) -> None:
        """`formed` is called with each generation, in the main thread, before it is told to the agent."""
        self._peers, self._formed = peers, formed
        self._told = -1
        self._groups = process_groups()
        self._groups.begin, self._groups.forgot = self._begin, forgot(peers)
        self._watching, self._idling = threading.Lock(), threading.Lock()

    @property
    def generation(self) -> int:
        """The generation of this worker's group, or the one that it is being formed in."""
        return self._peers.generation

    @property
    def outdated(self) -> bool:
        """True if the role has a later generation than this worker's group."""
        return self._wanted() > self._peers.generation

    def news(self) -> None:
        """Take a new view: end every wait in a generation that is over."""
        if not self.outdated:
            return
        self._groups.end_outdated()
        # All groups of this process have ranks of its role. NCCL has other connections than sockets.
        for group, (backend, _) in list(c10d._world.pg_map.items()):
            if "nccl" in str(backend):
                threading.Thread(target=group.abort, name="unirun-abort", daemon=True).start()
        if self._watching.acquire(blocking=False):
            threading.Thread(target=self._watch, name="unirun-stuck", daemon=True).start()

    def enter(self, setup: Callable[[], None]) -> None:
        """Run `setup`, which forms the first group, and be in the present generation.

        Raises what `setup` or the user's `on_generation` raises, when no loss explains it after
        `LOSS_VIEW_TIMEOUT` seconds.
        """
        try:
            setup()
        except Exception as error:
            # Wait for the view with the loss that caused this error. If this worker exited before, the master would
            # count a failure of its own.
            if _in_a_group(error):
                self._changes(self._peers.generation)
            raise
        self._announce()
        self.follow()

    def catch_up(self, generation: int) -> None:
        """Form the group of `generation`, of which a caller has heard before this worker's agent."""
        self._peers.wait_for(lambda: self._wanted() >= generation, LOSS_VIEW_TIMEOUT)
        self.follow()

    def explain(self, error: BaseException) -> bool:
        """Return True if a call has raised `error` because the group has ended: the role has a later generation, or
        gets one within `LOSS_VIEW_TIMEOUT` seconds. A peer may have died, or have left the group because it knew of a
        death earlier.

        Waits for the news only if a connection of the default group has ended, or torch says that one to a store has.
        """
        broken = isinstance(error, dist.DistError) or self._groups.broken()
        return self.outdated or (broken and self._changes(self._peers.generation))

    def kept_away(self, by: Callable[[], bool]) -> None:
        """Watch the main thread, which is in a call that was given up as long as `by` returns True. If it idles there
        while the others form a group, the agent gets a report."""
        if self._idling.acquire(blocking=False):
            threading.Thread(target=self._watch_idle, args=(by,), name="unirun-idle", daemon=True).start()

    def _watch_idle(self, by: Callable[[], bool]) -> None:
        stack = None
        try:
            stack = wait_until_idle(by, lambda: self.outdated)
            if stack is not None:
                why = (
                    f"generation {self._wanted()} could not be formed without it, and it waited for "
                    f"{WORKER_IDLE_TIMEOUT:g} s in a call that its caller has given up"
                )
                self._peers.tell(Stuck(why, stack))
        finally:
            self._idling.release()
        if stack is None and by():
            # It began while this thread was about to end.
            self.kept_away(by)

    def follow(self) -> None:
        """Form the group of the present generation, again when another loss comes meanwhile.

        Raises what forming or the user's `on_generation` raises when no loss explains it.
        """
        while self.outdated:
            try:
                self._form()
            except Exception:
                if not self._changes(self._peers.generation):
                    raise
                continue
            self._announce()

    def _announce(self) -> None:
        """The group is formed: call `formed`, then tell the agent."""
        generation = self._peers.generation
        try:
            self._formed(generation)
        except Exception:
            if not self._changes(generation):
                raise
            return
        self._peers.tell(GroupFormed(generation))

    def _form(self) -> None:
        """Leave the old default group, if there is one, and meet in the store of the present generation.

        Its address is another one when the node of rank 0 was lost.
        """
        self._peers.generation = self._wanted()
        # The prefix is the one that new ranks get from ``env://``.
        self._meet("default_pg")

    def anew(self, name: str) -> None:
        """Leave the default group, and meet the others again in the same generation, under a `name` that was not used
        before. For an error in a collective that has cost no rank; every rank calls it.

        Raises what forming raises, a loss of a rank included.
        """
        self._meet(name)

    def _meet(self, prefix: str) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self._groups.end_all()
        info = self._peers.known(self._peers.role)
        address, port = split_endpoint(info.endpoint)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
        made = self._groups.default
        if made is None:
            return
        # torch names a group after the number of groups so far, failed ones included. A rank that has failed once would
        # wait for the others under another name.
        c10d._world.group_count = 0
        store = dist.PrefixStore(prefix, self._connect(address, port, made.timeout))
        dist.init_process_group(
            made.backend,
            store=store,
            rank=self._peers.rank,
            world_size=info.world_size,
            timeout=made.timeout,
            device_id=made.device_id,
        )

    def _connect(self, address: str, port: int, timeout: timedelta) -> Any:
        """A client of the role's store. Raises torch's `DistError`.

        Each attempt has a short timeout: torch sleeps for seconds before it reconnects within one attempt.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            try:
                store = dist.TCPStore(address, port, is_master=False, timeout=CONNECT_TIMEOUT)
            except dist.DistError:
                if self.outdated or time.monotonic() > deadline:
                    raise
            else:
                store.set_timeout(timeout)
                return store

    def _begin(self, store: Any) -> Callable[[], bool]:
        """Called before a group is formed in `store`. Returns a function that tells whether its generation is over."""
        generation = self._peers.generation = max(self._peers.generation, self._generation_of(store))
        if generation != self._told:
            # Before anything is written to the store.
            self._told = generation
            self._peers.tell(GroupMeets(generation))
        return lambda: self._wanted() > generation

    def _generation_of(self, store: Any) -> int:
        """The generation of a store; 0 for a store that is not the role's.

        All generations of a role use one address, so a worker that connects late may meet the next generation.
        Raises torch's `DistError` when the store is gone.
        """
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if not isinstance(store, dist.TCPStore):
            return 0
        endpoint = self._peers.known(self._peers.role).endpoint
        if endpoint and (store.host, store.port) == split_endpoint(endpoint):
            # A store accepts connections a moment before it has this key.
            store.wait([GENERATION_KEY], KEY_TIMEOUT)
        return int(store.get(GENERATION_KEY)) if store.check([GENERATION_KEY]) else 0

    def _wanted(self) -> int:
        return self._peers.known(self._peers.role).generation

    def _changes(self, generation: int) -> bool:
        """Return True if the role has a later generation than `generation`, or gets one within
        `LOSS_VIEW_TIMEOUT` seconds."""
        return self._peers.wait_for(lambda: self._wanted() > generation, LOSS_VIEW_TIMEOUT)

    def _watch(self) -> None:
        """Tell the agent if the main thread is stuck in a group that is over.

        All waits that can be interrupted have failed by then. Others end with the process only, like the constructor of
        an NCCL communicator.
        """
        try:
            stack = wait_until_stuck(lambda: self.outdated, in_group)
            if stack is not None:
                generation = self._peers.generation
                why = f"it still waited in the process group of generation {generation}, which was over"
                self._peers.tell(Stuck(why, stack))
        finally:
            self._watching.release()


def forgot(peers: Peers) -> Callable[[str], None]:
    """A function that tells the agent that the main thread, with this stack, waits for what gloo has forgotten."""
    why = "it waited for a collective that gloo has forgotten, as a peer died in that moment"
    return lambda stack: peers.tell(Stuck(why, stack))


def _in_a_group(error: BaseException) -> bool:
    """Return True if `error` was raised inside torch.distributed."""
    return any("torch/distributed/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))
