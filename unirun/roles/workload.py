"""`BaseWorkload`: a class whose methods a trainer calls, one object in each worker of a role."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import ClassVar

from omegaconf import DictConfig

from unirun.errors import UsageError
from unirun.roles.calls.group import trainer_invocation
from unirun.roles.handle import MasterHandle


class BaseWorkload:
    """The base class of a job's actors, rollouts, critics and so on. unirun makes one object in each worker of a role.

    A trainer can call every public method, decorated with `trainer_invocation` or not. unirun calls the others, in
    this order::

        __init__(master_handle, config)     definitions only
        setup()                             models, data, torch.distributed.init_process_group(…)
        on_generation(generation)           in all ranks, each time the role's process group was formed
        …calls…                             one at a time, in the same thread
        teardown()                          before the worker is stopped

    When another rank of the role dies, that rank is started again alone, and this object keeps its memory. A call
    that waits for the dead rank in a collective fails. Before the next call unirun forms the default process group
    again, with the same backend, and calls `on_generation` in every rank. Work that all ranks do together after a
    restart, such as sending the weights to the new rank, belongs there.
    """

    __unirun_kind__: ClassVar[str] = "workload"

    def __init__(self, master_handle: MasterHandle, config: DictConfig) -> None:
        self._master_handle, self._config = master_handle, config
        self._synced: Mapping[str, Callable[[int, float | None], int]] = {}
        self._anew: Callable[[str], None] = lambda name: None
        """Has all ranks form the default process group again, when each of them calls it with the same new name."""

    @property
    def master_handle(self) -> MasterHandle:
        """The job, for ``job_info()``, ``report(metrics)``, ``save_state(bytes)``, ``load_state()`` and more."""
        return self._master_handle

    @property
    def config(self) -> DictConfig:
        """The job's ``config:`` section."""
        return self._config

    @property
    def name(self) -> str:
        """The name of this worker, ``actor:2``."""
        return f"{self.role}:{self.rank}"

    @property
    def role(self) -> str:
        """The name of the worker's role."""
        return self._master_handle.context.role

    @property
    def rank(self) -> int:
        """The worker's rank in its role, 0..world_size-1."""
        return self._master_handle.context.rank

    @property
    def world_size(self) -> int:
        """The number of ranks of the role."""
        return self._master_handle.context.world_size

    @property
    def word_size(self) -> int:
        """`world_size`, as DLRover's guide spells it."""
        return self.world_size

    @property
    def local_rank(self) -> int:
        """The rank among the role's workers on this node."""
        return self._master_handle.context.local_rank

    @property
    def local_world_size(self) -> int:
        """The number of workers of the role on this node."""
        return self._master_handle.context.local_world_size

    @property
    def torch_master_addr(self) -> str:
        """The address of the role's store (MASTER_ADDR)."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def torch_master_port(self) -> int:
        """The port of the role's store (MASTER_PORT)."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @trainer_invocation
    def sync_weights(self, channel: str, version: int, timeout: float | None = None) -> int:
        """Publish or receive `version` of the weights that a `WeightsChannel` of this worker has attached.

        ``trainer.sync_weights`` calls it in all ranks of the channel. Returns the version. Raises `UsageError` when
        nothing is attached, and what ``publish`` and ``receive`` raise.
        """
        if channel not in self._synced:
            raise UsageError(
                f"{self.name} has attached nothing to channel {channel!r}",
                f"call WeightsChannel({channel!r}).attach(model) in setup()",
            )
        return self._synced[channel](version, timeout)

    def is_actor_role(self) -> bool:
        """Return True if this is a worker of the role ``actor``."""
        return self.role.lower() == "actor"

    def get_device_collocation(self) -> str:
        """The roles that share this role's devices, itself among them: ``ACTOR,ROLLOUT``. Empty if none do."""
        return self._master_handle.context.peers.collocation(self.role)

    def setup(self) -> None:
        """Prepare for calls. Called once, before the first call.

        In a rank that was started again, the other ranks do not run `setup` with it. So it must not wait for them,
        except in ``init_process_group``.
        """

    def on_generation(self, generation: int) -> None:
        """Called in every rank after the role's process group was formed; 0 is the first time.

        A rank that was started again gets it after its `setup`.
        """

    def teardown(self) -> None:
        """Called before the worker is stopped, but not when it dies."""


Workload = BaseWorkload
