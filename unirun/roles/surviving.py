"""`resilient`: a training function of a script that survives the loss of other ranks. `ResilientState`: the values that
its ranks keep in memory, and give to a rank that comes.

When a rank is lost, the main thread of each survivor leaves the function: the groups of the generation that is over
have ended, and `Interrupted` is raised in Python code. All ranks then call the function again, in the next generation.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from unirun.errors import UsageError
from unirun.roles.context import init
from unirun.roles.interruption import Interrupted, MainThread
from unirun.wire.reports import Boundary, Resilient

P = ParamSpec("P")
R = TypeVar("R")

STORE_TIMEOUT = timedelta(seconds=30)
"""For an answer of the role's store."""

MIN_END_POLL_INTERVAL, MAX_END_POLL_INTERVAL = 0.001, 0.05
"""Seconds between two looks whether all ranks have returned: they grow from one to the other."""

NCCL_SETTINGS = {
    # Otherwise the watchdog ends this process when a peer has died, or lets the device go on with wrong numbers.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Milliseconds, of which the watchdog sleeps four times as many after an error. Who destroys the group waits for it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
"""Variables that torch reads when it makes a group over NCCL."""

GROWTH_TIMEOUT = 5.0
"""Seconds that a rank which has returned waits for more ranks, after it has said that they may come."""

SCRIPTS = ("script", "module", "function")
"""The kinds of entries whose workers may survive. Others have their own way to go on after a loss."""


class ResilientState:
    """The values that a resilient function has saved last, in the memory of each rank.

    ::

        saved = state.load(model=model, optimizer=optimizer)
        for step in range(saved.get("step", 0), STEPS):
            ...
            state.save(model=model, optimizer=optimizer, step=step + 1)
    """

    def __init__(self, survivor: Survivor | None = None) -> None:
        self._survivor = survivor
        self._kept: tuple[int, dict[str, Any]] = (0, {})
        """The number of saves, and the values of the last one."""

    @property
    def generation(self) -> int:
        """The number of times that the process group was formed again; 0 for the first one."""
        return self._survivor.generation if self._survivor is not None else 0

    def save(self, **values: Any) -> None:
        """Keep a copy of `values` in the memory of this host: of the ``state_dict()`` of what has one, and of tensors
        and plain data. Every rank saves the same values, equally often. If the function is interrupted meanwhile, those
        before stay.

        Raises `UsageError` for a sharded tensor: no other rank has its values, so it needs a checkpoint in files.
        """
        from unirun.roles.replicas import in_memory

        plain = {name: _state_of(value) for name, value in values.items()}
        # One assignment, between whose parts nothing is interrupted.
        self._kept = self._kept[0] + 1, in_memory(plain)
        if self._survivor is not None:
            self._survivor.at_boundary()

    def load(self, **into: Any) -> dict[str, Any]:
        """Put the values that were saved last into the objects with a ``load_state_dict()``, by name, and return the
        other ones. Every rank calls it, after ``init_process_group``. A rank that was started again gets the values of
        another one. Empty if nothing was saved yet.

        Raises `UsageError` without a process group.
        """
        from unirun.roles.replicas import in_memory, newer

        if self._survivor is not None and self._survivor.world_size > 1:
            self._kept = newer(self._kept[0], lambda: self._kept[1]) or self._kept
        # A copy, as an optimizer goes on with the tensors that it is given.
        saved: dict[str, Any] = in_memory(self._kept[1])
        for name in saved.keys() & into.keys():
            if hasattr(into[name], "load_state_dict"):
                _unwrapped(into[name]).load_state_dict(saved.pop(name))
        return saved


def _unwrapped(value: Any) -> Any:
    """A module without the wrapper of DistributedDataParallel, which is another one in each generation."""
    from torch.nn.parallel import DistributedDataParallel

    return value.module if isinstance(value, DistributedDataParallel) else value


def _state_of(value: Any) -> Any:
    value = _unwrapped(value)
    return value.state_dict() if hasattr(value, "state_dict") else value


class Survivor:
    """This worker, as it survives the loss of other ranks of its role."""

    def __init__(self) -> None:
        from unirun.roles.formation import Formation

        self._peers = init().peers
        self._formation = Formation(self._peers, lambda generation: None)
        self._called = False
        self._boundary = -GROWTH_TIMEOUT
        self.main = MainThread()
        self._formation.before_abort = partial(self.main.wake, self.check)
        self._peers.when_changed(self._formation.news)
        os.environ |= NCCL_SETTINGS

    @property
    def generation(self) -> int:
        """The generation of this worker's group."""
        return self._peers.generation

    @property
    def world_size(self) -> int:
        """The number of ranks of the role."""
        return self._peers.known(self._peers.role).world_size

    def run(self, function: Callable[[], R]) -> R:
        """Call `function` in each generation, until all ranks have returned from it in the same one."""
        from unirun.roles.process_groups import dist, process_groups

        if self._called:
            raise UsageError(
                "a resilient function was called before in this process",
                "call one, once: a rank that is started again would be in another call than the others",
            )
        self._called = True
        before = dist.is_initialized()
        self._peers.tell(Resilient(inside=True))
        while True:
            try:
                if not before:
                    self._formation.leave_to_user()
                self._formation.follow()
                result = self.main.run(function, self.check)
                self.main.run(self._wait_for_all, self.check)
                process_groups().release()
            except Interrupted:
                continue
            except Exception as error:
                if not self._formation.explain(error):
                    raise
            else:
                self._peers.tell(Resilient(inside=False))
                return result

    def check(self) -> None:
        """Raise `Interrupted` when another rank was lost."""
        if self._formation.outdated:
            raise Interrupted("another rank was lost")

    def at_boundary(self) -> None:
        """Tell the master, if more ranks are to come, that they may now: all values are saved."""
        if self._grows:
            self._boundary = time.monotonic()
            self._peers.tell(Boundary())

    @property
    def _grows(self) -> bool:
        view = self._peers.view(self._peers.role)
        return view is not None and view.grows

    def _wait_for_all(self) -> None:
        """Return when every rank has returned from the function. Until then each is needed if one of them is lost, and
        calls the function again."""
        # The store may be that of the next generation already, as all have one address.
        store = self._formation.store(f"unirun/resilient/{self.generation}", STORE_TIMEOUT)
        returned, pause = store.add("returned", 1), MIN_END_POLL_INTERVAL
        while returned < self.world_size or (
            self._grows and time.monotonic() < self._boundary + GROWTH_TIMEOUT
        ):
            time.sleep(pause)
            self.check()
            pause = min(pause * 1.25, MAX_END_POLL_INTERVAL)
            returned = store.add("returned", 0)


@functools.cache
def _survivor() -> Survivor | None:
    """That of this process; None for one that is not restarted alone."""
    if "UNIRUN_SOCKET" not in os.environ or multiprocessing.parent_process() is not None:
        return None
    peers = init().peers
    brief = peers.brief(peers.role)
    if brief is None or brief.kind not in SCRIPTS:
        return None
    from unirun.roles.process_groups import dist

    if dist.is_initialized():
        raise UsageError(
            "the process group was formed before the first function was decorated with resilient",
            "decorate it before init_process_group is called",
        )
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("resilient is used in another thread than the main one", "use it in the main thread")
    return Survivor()


def resilient(function: Callable[Concatenate[ResilientState, P], R]) -> Callable[P, R]:
    """A training function of a script that survives the loss of other ranks of its role::

        @unirun.resilient
        def train(state: unirun.ResilientState) -> None:
            dist.init_process_group()
            model, optimizer = ...
            saved = state.load(model=model, optimizer=optimizer)
            for step in range(saved.get("step", 0), STEPS):
                ...
                state.save(model=model, optimizer=optimizer, step=step + 1)

    It gets a `ResilientState` before its other arguments. When a rank dies, that rank alone is started again. In the
    others the function is interrupted, in a collective or in Python code, and called again: their processes stay.
    `ResilientState.load` then gives all ranks the values that were saved last.

    The process group is formed in the function, or before it is called; then it is formed again before the next call.
    Modules that belong to a group, as `DistributedDataParallel`, are made in the function. The function returns when
    it has returned in all ranks.

    Each process calls one such function once, in its main thread, after the decorator has run without a process group.
    The role restarts as a whole when a rank is lost outside of the function. Without the launcher, and in other
    processes than ranks of scripts, the function is only called.

    Raises `UsageError` when it is called a second time.
    """
    _survivor()

    @functools.wraps(function)
    def survive(*args: P.args, **kwargs: P.kwargs) -> R:
        survivor = _survivor()
        state = ResilientState(survivor)
        if survivor is None:
            return function(state, *args, **kwargs)
        return survivor.run(lambda: function(state, *args, **kwargs))

    return survive
