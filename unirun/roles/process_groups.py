"""The process groups of this process: how the default one was made, and which have to end when a rank is lost.

The groups over gloo are known by the store that their constructor is given: see `gloo`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

from unirun.errors import GroupError
from unirun.roles.gloo import GlooGroup, blocked, forgotten, wait_until_stuck

dist: Any = torch.distributed
c10d: Any = distributed_c10d
"""torch's modules of process groups; much that is used of them has no types."""

MIN_ADDRESS_POLL_INTERVAL, MAX_ADDRESS_POLL_INTERVAL = 0.001, 0.1
"""Seconds between two looks whether another rank's address is in the store: they grow from one to the other."""


class ProcessGroups:
    """Watches the process groups that this process makes; holds the gloo groups that are being formed or are open."""

    def __init__(self) -> None:
        self.begin: Callable[[Any], Callable[[], bool]] = lambda store: lambda: False
        """Called with the store of a new group of any backend. Returns a function that tells whether the group's
        generation is over."""
        self.forgot: Callable[[str], None] = lambda stack: None
        """Called with the stack of the main thread when it waits for a collective that gloo has forgotten."""
        self.default: dict[str, Any] | None = None
        """The arguments of ``init_process_group`` for the latest default group; None if there was none."""
        self._groups: list[GlooGroup] = []
        self._kept: list[tuple[Any, list[GlooGroup]]] = []
        """torch's groups that must not be destroyed yet, each with its gloo groups: the default one, and those that
        have ended. Whoever drops the last reference joins gloo's threads, perhaps with the GIL held, as the reducer of
        DistributedDataParallel does. Such a thread may wait for the GIL, as it drops a tensor, or for a collective
        that gloo has forgotten."""
        self._lock = threading.Lock()
        self._mine = threading.local()

    @contextlib.contextmanager
    def forming(self, over: Callable[[], bool]) -> Iterator[list[GlooGroup]]:
        """Groups that this thread makes in the block end when `over` returns True. Yields the list of those that were
        formed."""
        made: list[GlooGroup] = []
        before, self._mine.block = self._block, (over, made)
        try:
            yield made
        finally:
            self._mine.block = before

    @property
    def _name(self) -> str:
        return getattr(self._mine, "name", "")

    @property
    def _block(self) -> tuple[Callable[[], bool], list[GlooGroup]] | None:
        return getattr(self._mine, "block", None)

    def broken(self) -> bool:
        """Return True if a connection of the present default group has ended, if that group uses gloo."""
        if not dist.is_initialized():
            return False
        name = c10d._get_process_group_name(c10d._get_default_group())
        with self._lock:
            mine = [group for group in self._groups if group.name == name and group.formed]
        return any(not group.intact() for group in mine[-1:])

    def end_outdated(self) -> None:
        """End the groups whose generation is over. May be called from any thread."""
        with self._lock:
            groups = [group for group in self._groups if not group.ended and group.over()]
        self._end(groups)
        if any(group.formed for group in groups):
            threading.Thread(target=self._watch, args=(groups,), name="unirun-forgotten", daemon=True).start()

    def end_all(self) -> None:
        """End every group. Called by the main thread, which therefore waits in none of them."""
        with self._lock:
            groups, self._groups = self._groups, []
        self._end(groups)

    def keep(self, group: Any, name: str) -> None:
        """Keep torch's `group` of that name until it is released."""
        with self._lock:
            mine = [each for each in self._groups if each.name == name and not each.ended]
            self._kept.append((group, mine))

    def release(self) -> None:
        """Let the kept groups go in which no collective is under way. Called when what used them is gone."""
        with self._lock:
            gone, self._kept = self._kept, [each for each in self._kept if forgotten(each[1])]
        # Not with the lock held, as this may destroy them.
        gone.clear()

    def _end(self, groups: Sequence[GlooGroup]) -> None:
        names = {group.name for group in groups}
        with self._lock:
            ended = [(group, name) for group, name in list(c10d._world.pg_names.items()) if name in names]
            self._kept += [(each, [group for group in groups if group.name == name]) for each, name in ended]
        for group in groups:
            group.end()

    def _watch(self, groups: Sequence[GlooGroup]) -> None:
        def relevant() -> bool:
            with self._lock:
                left = not any(each in self._groups for each in groups)
            return not left and forgotten(groups)

        stack = wait_until_stuck(relevant, blocked)
        if stack is not None:
            self.forgot(stack)

    @contextlib.contextmanager
    def meeting(self, name: str, store: Any) -> Iterator[None]:
        """A context in which torch makes the group `name` with `store`."""
        before, self._mine.name = self._name, name
        try:
            with contextlib.nullcontext() if self._block else self.forming(self.begin(store)):
                yield
        finally:
            self._mine.name = before

    @contextlib.contextmanager
    def building(self, store: Any, size: int) -> Iterator[Any]:
        """A context for the constructor of a gloo group; yields the store to be given to it. Raises `GroupError` if
        the group was ended meanwhile."""
        block = self._block
        if block is None:
            # Not made by torch.distributed; its owner manages it.
            yield store
            return
        over, made = block
        group = GlooGroup(self._name, size, over)
        with self._lock:
            self._groups = [each for each in self._groups if each.open or not each.formed]
            self._groups.append(group)
        try:
            # A view may have come before the group was in the list.
            self.end_outdated()
            group.store = _watched_store(store, group)
            yield group.store
            group.complete()
        except BaseException:
            with self._lock:
                self._groups = [each for each in self._groups if each is not group]
            raise
        made.append(group)


_known: ProcessGroups | None = None


def process_groups() -> ProcessGroups:
    """The groups that this process makes after the first call of this function.

    torch has no hook for this, so two functions are wrapped: the one with which `torch.distributed` makes any group,
    and the constructor of gloo groups. `Work.wait` is wrapped so that a wait in the user's code has a frame of this
    file, by which `gloo.in_group` knows it.
    """
    global _known
    if _known is None:
        _known = ProcessGroups()
        c10d._new_process_group_helper = _wrapped_helper(_known, c10d._new_process_group_helper)
        kind = c10d.ProcessGroupGloo
        kind.__init__ = _wrapped_constructor(_known, kind.__init__)
        c10d.Work.wait = _wrapped_wait(c10d.Work.wait)
    return _known


def end_outdated() -> None:
    """End the known groups whose generation is over."""
    if _known is not None:
        _known.end_outdated()


def _wrapped_helper(groups: ProcessGroups, helper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(helper)
    def make(
        size: int, rank: int, ranks: Any, backend: Any, store: Any, group_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("group_desc") == "default_pg":
            groups.default = {
                "backend": str(backend),
                "timeout": kwargs["timeout"],
                "device_id": kwargs.get("device_id"),
            }
        with groups.meeting(group_name, store):
            made = helper(size, rank, ranks, backend, store, group_name, *args, **kwargs)
        if kwargs.get("group_desc") == "default_pg":
            groups.release()
            groups.keep(made[0], group_name)
        return made

    return make


def _wrapped_constructor(groups: ProcessGroups, construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def __init__(self: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        with groups.building(store, size) as watched:
            construct(self, watched, rank, size, *args, **kwargs)

    return __init__


def _wrapped_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wait)
    def wait_for(*args: Any, **kwargs: Any) -> Any:
        return wait(*args, **kwargs)

    return wait_for


def _watched_store(store: Any, group: GlooGroup) -> Any:
    """A store over `store` that records the addresses of the ranks, and whose waits fail when the group is ended."""

    class Watched(dist.Store):  # type: ignore[misc]
        def set(self, key: str, value: Any) -> None:
            group.published(value.encode() if isinstance(value, str) else value)
            store.set(key, value)

        def get(self, key: str) -> bytes:
            self.wait([key])
            return self._found(store.get(key))

        def multi_get(self, keys: list[str]) -> list[bytes]:
            self.wait(keys)
            return [self._found(value) for value in store.multi_get(keys)]

        def _found(self, value: bytes) -> bytes:
            group.found(value)
            return value

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            # `store.wait` cannot be ended, and with a short timeout it warns of each.
            patience = timeout or store.timeout
            deadline = time.monotonic() + patience.total_seconds()
            pause = MIN_ADDRESS_POLL_INTERVAL
            while True:
                if group.ended:
                    raise GroupError(
                        "the process group was ended while it was formed", "a rank was started again"
                    )
                if store.check(keys):
                    return
                if time.monotonic() >= deadline:
                    raise dist.DistStoreError(f"{', '.join(keys)} not there after {patience}")
                time.sleep(pause)
                pause = min(pause * 1.25, MAX_ADDRESS_POLL_INTERVAL)

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def multi_set(self, keys: list[str], values: list[bytes]) -> None:
            for value in values:
                group.published(value)
            store.multi_set(keys, values)

        check, add, append, has_extended_api = store.check, store.add, store.append, store.has_extended_api
        compare_set, delete_key, num_keys = store.compare_set, store.delete_key, store.num_keys

    return Watched()
