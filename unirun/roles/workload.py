"""`BaseWorkload`: a class whose methods a trainer calls, one object in each worker of a role."""

from __future__ import annotations

from typing import ClassVar

from omegaconf import DictConfig

from unirun.roles.handle import MasterHandle


class BaseWorkload:
    """Derive the actors, rollouts, critics … of a job from it; unirun makes one in each worker.

    Every public method can be called by the trainer, decorated with `trainer_invocation` or not. A worker's life::

        __init__(master_handle, config)     definitions only
        setup()                             models, data, torch.distributed.init_process_group(…)
        on_generation(generation)           each time the role's process group was formed, in all ranks
        …calls…                             one at a time, in this same thread
        teardown()                          before it is stopped

    When another rank of the role dies, it is started again alone. This object lives on: between two calls (a call
    that waits for the dead rank in a collective fails), unirun forms the default process group anew, with the same
    backend, and calls `on_generation` in every rank. So what all ranks do together after a change, like sending
    the weights to the one that is new, belongs there.
    """

    __unirun_kind__: ClassVar[str] = "workload"

    def __init__(self, master_handle: MasterHandle, config: DictConfig) -> None:
        self._master_handle, self._config = master_handle, config

    @property
    def master_handle(self) -> MasterHandle:
        """The job: ``job_info()``, ``report(metrics)``, ``save_state(bytes)``, ``load_state()``."""
        return self._master_handle

    @property
    def config(self) -> DictConfig:
        """The job's ``config:`` section."""
        return self._config

    @property
    def name(self) -> str:
        """The name of this worker, ``actor:2``."""
        return self._master_handle.identity.name

    @property
    def role(self) -> str:
        """The name of its role."""
        return self._master_handle.identity.role

    @property
    def rank(self) -> int:
        """Its rank in the role, 0..world_size-1."""
        return self._master_handle.identity.rank

    @property
    def world_size(self) -> int:
        """How many ranks the role has."""
        return self._master_handle.identity.world_size

    @property
    def word_size(self) -> int:
        """`world_size`, as DLRover's guide spells it."""
        return self.world_size

    @property
    def local_rank(self) -> int:
        """The rank among the role's workers on this node."""
        return self._master_handle.identity.local_rank

    @property
    def local_world_size(self) -> int:
        """How many workers of the role are on this node."""
        return self._master_handle.identity.local_world_size

    @property
    def torch_master_addr(self) -> str:
        """The address of the role's store (MASTER_ADDR)."""
        return self._master_handle.identity.master_addr

    @property
    def torch_master_port(self) -> int:
        """The port of the role's store (MASTER_PORT)."""
        return self._master_handle.identity.master_port

    def is_actor_role(self) -> bool:
        """Whether this is a worker of the role ``actor``."""
        return self.role.lower() == "actor"

    def get_device_collocation(self) -> str:
        """The roles that share this role's devices, itself among them: ``ACTOR,ROLLOUT``. Empty if none do."""
        return self._master_handle.identity.collocation

    def setup(self) -> None:
        """Prepare for calls; called once, before the first. Nothing here may wait for ranks that are set up already,
        except for ``init_process_group``."""

    def on_generation(self, generation: int) -> None:
        """The role's process group was formed, for the `generation`-th time after the first (0). Called in every
        rank, also in one that was just set up."""

    def teardown(self) -> None:
        """Called before the worker is stopped, not when it dies."""


Workload = BaseWorkload
