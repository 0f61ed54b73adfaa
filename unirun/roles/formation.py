"""The formation of process groups in one worker: of its role's group, again in place after a loss, and of groups across
roles."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup

from unirun.errors import GroupError
from unirun.rendezvous.endpoints import GENERATION_KEY
from unirun.roles.gloo import WORKER_IDLE_TIMEOUT, GlooGroup, in_group, wait_until_idle, wait_until_stuck
from unirun.roles.interruption import Interrupted, MainThread
from unirun.roles.peers import Peers, RoleInfo
from unirun.roles.process_groups import c10d, dist, end_outdated, process_groups
from unirun.roles.rank_sets import Infos, RankSet, RankSets, group_rank
from unirun.values import split_endpoint
from unirun.wire.messages import RoleView
from unirun.wire.reports import GroupFormed, GroupMeets, Stuck

T = TypeVar("T")

LOSS_VIEW_TIMEOUT = 5.0
"""Seconds in which the view with a loss must arrive that explains why forming a group, or a collective, failed."""
CONNECT_TIMEOUT = timedelta(milliseconds=500)
"""For one attempt to connect to a store; more attempts follow."""
KEY_TIMEOUT = timedelta(seconds=10)
"""For the first key of a store, which its process sets when it starts."""


# The default process group.


class Formation:
    """Keeps the default process group of this worker at the generation that the master has ordered.

    The main thread forms groups (`enter`, `follow`). The link's thread calls `news` after each view: if there is a
    later generation, every wait of the main thread in the earlier one fails.
    """

    def __init__(self, peers: Peers, formed: Callable[[int], None], main: MainThread | None = None) -> None:
        """`formed` is called with each generation, in the main thread, before it is told to the agent. `main` runs the
        calls of a workload."""
        self._peers, self._formed = peers, formed
        self._told = -1
        self._groups = process_groups()
        self._groups.begin, self._groups.forgot = self._begin, forgot(peers)
        self._main = main
        self.before_abort: Callable[[], None] = self._interrupt
        """Called before the groups over NCCL of a generation that is over are aborted. What has waited for their
        collectives then goes on, with wrong numbers."""
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
        self.before_abort()
        # All groups of this process have ranks of its role. NCCL has other connections than sockets.
        for group in _over_nccl():
            threading.Thread(target=group.abort, name="unirun-abort", daemon=True).start()
        if self._watching.acquire(blocking=False):
            threading.Thread(target=self._watch, name="unirun-stuck", daemon=True).start()

    def guard(self, call: Callable[[], T]) -> T:
        """Run a call in the main thread. One whose collectives over NCCL are aborted is interrupted, and raises
        `GroupError`; gloo's raise by themselves, and a call without any goes on."""
        if self._main is None:
            return call()
        try:
            return self._main.run(call, self._check)
        except Interrupted:
            raise GroupError(
                "the call was interrupted, as a rank of its process group was lost",
                "the ranks meet again before the next call",
            ) from None

    def _check(self) -> None:
        if self.outdated and _over_nccl():
            raise Interrupted("another rank was lost")

    def _interrupt(self) -> None:
        if self._main is not None and _over_nccl():
            self._main.wake(self._check)

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

    def leave_to_user(self) -> None:
        """Let the user's code form the default group of the next generation, and not `follow`."""
        self._groups.default = None

    def store(self, prefix: str, timeout: timedelta) -> Any:
        """A client of the role's store, in which it has its own keys. Raises torch's `DistError`."""
        address, port = split_endpoint(self._peers.known(self._peers.role).endpoint)
        return dist.PrefixStore(prefix, self._connect(address, port, timeout))

    def _meet(self, prefix: str) -> None:
        self._groups.end_all()
        if dist.is_initialized():
            # The end of a communicator would wait for peers that are gone.
            for group in _over_nccl():
                group.abort()
            dist.destroy_process_group()
        info = self._peers.known(self._peers.role)
        address, port = split_endpoint(info.endpoint)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
        # The role may have grown.
        os.environ["WORLD_SIZE"] = os.environ["ROLE_WORLD_SIZE"] = str(info.world_size)
        # torch names a group after the number of groups so far, failed ones included. A rank that has failed once would
        # wait for the others under another name.
        c10d._world.group_count = 0
        made = self._groups.default
        if made is None:
            return
        store = dist.PrefixStore(prefix, self._connect(address, port, made["timeout"]))
        dist.init_process_group(**made, store=store, rank=self._peers.rank, world_size=info.world_size)

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


def _over_nccl() -> list[Any]:
    """torch's groups of this process that use NCCL."""
    return [group for group, (backend, _) in list(c10d._world.pg_map.items()) if "nccl" in str(backend)]


def forgot(peers: Peers) -> Callable[[str], None]:
    """A function that tells the agent that the main thread, with this stack, waits for what gloo has forgotten."""
    why = "it waited for a collective that gloo has forgotten, as a peer died in that moment"
    return lambda stack: peers.tell(Stuck(why, stack))


def _in_a_group(error: BaseException) -> bool:
    """Return True if `error` was raised inside torch.distributed."""
    return any("torch/distributed/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


# Process groups across roles, of all their ranks or of some.
#
# The members meet in the rendezvous store of the first role that is named, under a prefix with the generations of all
# roles. A restarted role has another generation, so no key of an earlier group is read. Members with different views of
# the generations wait under different prefixes until their agents have sent them the same view.

MEMBERS_POLL_INTERVAL = 0.02
"""Seconds between two reads of the store while members are missing."""
STORE_TIMEOUT = timedelta(seconds=2)
"""For one attempt to connect to a store; more attempts follow."""

Formed = tuple[tuple[RoleInfo, ...], ProcessGroup, list[GlooGroup]]
"""The generations of the roles of a group, the group, and its gloo groups, one for each device that gloo serves."""


class GroupForge:
    """Forms groups and keeps them as long as their generations last."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._groups: dict[tuple[tuple[RankSet, ...], str], Formed] = {}
        self._aborted: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        peers.when_changed(self._end_outdated)

    def group(self, rank_sets: tuple[RankSet, ...], backend: str | None, timeout: timedelta) -> ProcessGroup:
        """The group of these ranks in the present generations of their roles."""
        backend = backend or default_backend()
        deadline = time.monotonic() + timeout.total_seconds()
        kept = self._groups.get((rank_sets, backend))
        if kept is not None:
            infos, pg, parts = kept
            if infos == self._infos(rank_sets) and all(each.intact() for each in parts):
                return pg
            del self._groups[rank_sets, backend]
            for each in parts:
                each.end()
            # Remove it from torch's registry without waiting.
            c10d._abort_process_group(pg)
            self._await_change(rank_sets, infos, deadline)
        while True:
            infos, store = self._meet(rank_sets, backend, deadline)
            try:
                pg, parts = self._form(rank_sets, infos, store, backend, timeout)
            except GroupError:
                if self._infos(rank_sets) == infos:
                    raise
                # A member was started again meanwhile; the next group has another prefix.
                continue
            self._groups[rank_sets, backend] = infos, pg, parts
            return pg

    def _form(
        self,
        rank_sets: tuple[RankSet, ...],
        infos: tuple[RoleInfo, ...],
        store: Store,
        backend: str,
        timeout: timedelta,
    ) -> tuple[ProcessGroup, list[GlooGroup]]:
        """Connect with the other members. Raises `GroupError`, also as soon as a role has another generation."""
        size, name = _size(rank_sets, infos), _name(rank_sets, infos, backend)
        store.set_timeout(timeout)
        groups = process_groups()
        groups.forgot = forgot(self._peers)
        with groups.forming(lambda: self._outdated(infos)) as made:
            pg = _build(self._rank(rank_sets, infos), size, name, store, backend, timeout)
        return pg, made

    def _end_outdated(self) -> None:
        """Called after each view: end groups of earlier generations, so that threads that wait in them fail."""
        end_outdated()
        for (_, backend), (infos, pg, _) in list(self._groups.items()):
            if self._outdated(infos) and "nccl" in backend and pg not in self._aborted:
                # NCCL has other connections than sockets; `abort` ends all of them.
                self._aborted.add(pg)
                threading.Thread(target=pg.abort, name="unirun-abort", daemon=True).start()

    def _outdated(self, infos: Infos) -> bool:
        return infos != tuple(self._peers.roles().get(info.name) for info in infos)

    def _await_change(self, rank_sets: RankSets, infos: Infos, deadline: float) -> None:
        """A member of a broken group is gone; wait until its role is started again."""

        def changed() -> bool:
            if self._infos(rank_sets) != infos:
                return True
            self._raise_if_hopeless(rank_sets, None)
            return False

        if not self._peers.wait_for(changed, deadline - time.monotonic()):
            raise GroupError(
                f"a member of group {_words(rank_sets)} is gone and its role was not started again",
                "did it end before the others?",
            )

    def _raise_if_hopeless(self, rank_sets: RankSets, store: Store | None) -> None:
        """Raise `GroupError` when a member that is not in `store` has ended and is not started again."""
        infos = self._infos(rank_sets)

        def missing(role: str, rank: int) -> bool:
            number = group_rank(rank_sets, infos, role, rank)
            return number is not None and (store is None or not _all_here(store, [f"here/{number}"]))

        views = [view for rank_set in rank_sets if (view := self._peers.view(rank_set.role)) is not None]
        if words := missing_for_good(views, missing):
            raise GroupError(
                f"group {_words(rank_sets)} cannot be formed: {words}, and is waited for",
                "every member must call ctx.group with the same roles in the same order",
            )

    def _infos(self, rank_sets: RankSets) -> tuple[RoleInfo, ...]:
        return tuple(self._peers.known(rank_set.role) for rank_set in rank_sets)

    def _rank(self, rank_sets: RankSets, infos: Infos) -> int:
        number = group_rank(rank_sets, infos, self._peers.role, self._peers.rank)
        if number is None:
            raise GroupError(
                f"{self._peers.role}:{self._peers.rank} is no member of group {_words(rank_sets)}"
            )
        return number

    def _meet(self, rank_sets: RankSets, backend: str, deadline: float) -> tuple[tuple[RoleInfo, ...], Store]:
        """Wait until every member is there, in one view of the generations. Returns that view and the store."""
        while True:
            infos = self._infos(rank_sets)
            keys = [f"here/{rank}" for rank in range(_size(rank_sets, infos))]
            store = self._arrive(rank_sets, infos, backend)
            while self._infos(rank_sets) == infos:
                updates = self._peers.updates
                if store is not None and _all_here(store, keys):
                    return infos, store
                self._raise_if_hopeless(rank_sets, store)
                if time.monotonic() >= deadline:
                    raise GroupError(
                        f"group {_name(rank_sets, infos, backend)}: {_missing(store, keys)} did not come in time",
                        "every member must call ctx.group with the same roles in the same order",
                    )
                self._peers.wait(updates, MEMBERS_POLL_INTERVAL)
                store = store or self._arrive(rank_sets, infos, backend)

    def _arrive(self, rank_sets: RankSets, infos: Infos, backend: str) -> Store | None:
        """Write into the store that this member is there. None if the store is being replaced."""
        try:
            prefix = f"unirun/{_name(rank_sets, infos, backend)}"
            store: Store = dist.PrefixStore(prefix, self._store(rank_sets, infos))
            store.set(f"here/{self._rank(rank_sets, infos)}", "1")
        except dist.DistError:
            return None
        return store

    def _store(self, rank_sets: RankSets, infos: Infos) -> Any:
        if self._peers.linked:
            return store_of(infos[0])
        if _size(rank_sets, infos) == 1:
            return dist.HashStore()
        if not dist.is_initialized():
            raise GroupError(
                "without unirun, ctx.group needs the default group",
                "call torch.distributed.init_process_group",
            )
        return c10d._get_default_store()


def store_of(role: RoleInfo) -> Any:
    """A connection to the rendezvous store of this generation of the role. Raises `torch.distributed.DistError`."""
    addr, port = split_endpoint(role.endpoint)
    return dist.TCPStore(addr, port, is_master=False, timeout=STORE_TIMEOUT)


_SETTLED = ("starting", "running", "succeeded")
"""Phases of a role in which a rank that has exited with code 0 is not about to be restarted."""


def missing_for_good(views: Sequence[RoleView], missing: Callable[[str, int], bool]) -> str:
    """The reason why the ranks of these roles can no longer all join one group, in words; empty as long as
    they can.

    `missing` says whether a rank of a role has not joined yet. A rank that has exited with code 0 joins again only if
    its role is restarted, and then another group.
    """
    for role in views:
        if role.phase in ("failed", "stopped"):
            return f"role {role.name} has {role.phase}"
        if role.phase not in _SETTLED:
            continue
        ended = [worker for worker in role.workers if worker.phase == "ended"]
        absent = [worker.rank for worker in ended if missing(role.name, worker.rank)]
        if absent and len(ended) == role.world_size:
            return f"role {role.name} has ended with exit code 0"
        if absent:
            return f"{role.name}:{absent[0]} has ended with exit code 0"
    return ""


def default_backend() -> str:
    """The backend of the default group; without one, gloo, and nccl for CUDA tensors."""
    if dist.is_initialized():
        return str(dist.get_backend_config())
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _size(rank_sets: RankSets, infos: Infos) -> int:
    return sum(len(rank_set.members(info)) for rank_set, info in zip(rank_sets, infos, strict=True))


def _words(rank_sets: RankSets) -> str:
    return "+".join(map(str, rank_sets))


def _name(rank_sets: RankSets, infos: Infos, backend: str) -> str:
    pairs = zip(rank_sets, infos, strict=True)
    return "+".join(f"{rank_set}.{info.generation}" for rank_set, info in pairs) + f"/{backend}"


def _all_here(store: Store, keys: list[str]) -> bool:
    try:
        return bool(store.check(keys))
    except dist.DistError:
        return False


def _missing(store: Store | None, keys: list[str]) -> str:
    if store is None:
        return "the store"
    absent = [key.removeprefix("here/") for key in keys if not _all_here(store, [key])]
    return f"group rank {', '.join(absent)}" if absent else "the store"


def _build(rank: int, size: int, name: str, store: Store, backend: str, timeout: timedelta) -> ProcessGroup:
    """A process group beside the default one, known to `torch.distributed`, with its own ranks as global ranks.

    torch has no public call for a group whose members are not all in the default group; this is the function that
    ``init_process_group`` and ``new_group`` use themselves.
    """
    default = c10d._get_default_group() if dist.is_initialized() else None
    device = default.bound_device_id if default is not None else None
    if default is not None and device is not None:
        # NCCL would split the new communicator off the default one, which has other members.
        default.bound_device_id = None
    try:
        pg, _ = c10d._new_process_group_helper(
            size, rank, [], backend, store, group_name=c10d.GroupName(name), timeout=timeout
        )
    except (dist.DistError, RuntimeError) as error:
        raise GroupError(f"group {name} could not be formed: {error}", "did a member die?") from error
    finally:
        if default is not None and device is not None:
            default.bound_device_id = device
    c10d._world.pg_group_ranks[pg] = _OwnRanks(rank, size)
    formed: ProcessGroup = pg
    return formed


class _OwnRanks(dict[int, int]):
    """The ranks of a group, each its own global rank, and the right answer for ``get_rank(group)``.

    torch looks up the rank of this process in the default group there, which is another member here: rollout:0 would
    get the rank of actor:0. This lookup is recognised by the calling function.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__({each: each for each in range(size)})
        self._rank = rank

    def __getitem__(self, key: int) -> int:
        asking = sys._getframe(1).f_back
        if asking is not None and asking.f_code is c10d.get_rank.__code__:
            return self._rank
        return super().__getitem__(key)
