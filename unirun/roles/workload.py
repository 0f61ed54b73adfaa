"""`BaseWorkload` and `BaseTrainer`: the classes from which users derive theirs; `MasterHandle`: the job, for both."""

from __future__ import annotations

import base64
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from unirun.errors import UsageError
from unirun.roles.calls.group import RoleGroup, WorkerHandle, trainer_invocation
from unirun.roles.context import Context
from unirun.wire.frames import finite
from unirun.wire.reports import Metrics

if TYPE_CHECKING:
    # Its import takes a tenth of a second, also in scripts that need none of it.
    from omegaconf import DictConfig

MAX_STATE = 8 << 20
"""Bytes that one rank may save."""

SYNC_ANSWER_TIMEOUT = 5.0
"""Seconds beyond the time of a transfer of weights in which its workers tell how it has ended."""

MASTER_ASK_TIMEOUT = 120.0
"""Seconds in which the master must answer. It is long as the store may be unavailable for a while."""


class MasterHandle:
    """The job, as one of its workers sees it: ``self.master_handle`` of a workload or a trainer."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._peers = context.peers
        self._unlinked_state: bytes | None = None

    def job_info(self) -> dict[str, Any]:
        """A dict with the job's ``name`` and its ``roles``.

        For each role it has ``world_size``, ``generation``, ``phase``, ``kind`` (``script``, ``function``,
        ``workload``, ``trainer``, …) and ``target``, the class or file.
        """
        welcome = self._peers.welcome
        roles = {}
        for name, info in self._peers.roles().items():
            view, brief = self._peers.view(name), self._peers.brief(name)
            roles[name] = {
                "world_size": info.world_size,
                "generation": info.generation,
                "phase": view.phase if view else "running",
                "kind": brief.kind if brief else "script",
                "target": brief.target if brief else "",
            }
        return {"name": welcome.name if welcome else "", "roles": roles}

    def report(self, metrics: Mapping[str, float]) -> None:
        """Report figures by name: ``report({"loss": 0.1})``. ``unirun status`` shows the latest of each, and the job's
        ``metrics.jsonl`` has all of them.

        Raises `UsageError` for a value that is not a number, `ConnectionLost` if this node's agent is gone.
        """
        values = {}
        for key, value in metrics.items():
            try:
                values[str(key)] = float(value)
            except (TypeError, ValueError, OverflowError) as error:
                raise UsageError(
                    f"metric {key!r} is a {type(value).__name__} that is no float: {error}", "report floats"
                ) from error
        self._peers.tell(Metrics(finite(values), time.time()))

    def save_state(self, state: bytes) -> None:
        """Keep `state`, at most 8 MiB, for the next incarnation of this rank. It is in the job's store when this
        returns.

        Raises `UsageError` for a value that is not bytes or is too large, `StoreAway` if the store does not answer::

            self.master_handle.save_state(pickle.dumps({"step": step}))
        """
        if not isinstance(state, bytes | bytearray | memoryview):
            raise UsageError(
                f"save_state got {type(state).__name__}", "give bytes, for example pickle.dumps(…)"
            )
        state = bytes(state)
        if len(state) > MAX_STATE:
            raise UsageError(
                f"save_state got {len(state)} bytes, and {MAX_STATE} is the most",
                "keep large data in files, and their names in the state",
            )
        if self._peers.linked:
            self._peers.ask("save_state", data=base64.b64encode(state).decode(), timeout=MASTER_ASK_TIMEOUT)
        else:
            # Without a launcher nothing outlives the process.
            self._unlinked_state = state

    def load_state(self) -> bytes | None:
        """The state that this rank saved last, in this incarnation or an earlier one; None if nothing was.

        Raises `StoreAway` if the store does not answer.
        """
        if not self._peers.linked:
            return self._unlinked_state
        data = self._peers.ask("load_state", timeout=MASTER_ASK_TIMEOUT)
        return None if data is None else base64.b64decode(data)

    def commit_version(self, channel: str, version: int) -> int:
        """Keep `version` as the latest of `channel` (weights, a data set), unless a higher one is kept already.

        Returns the version that is kept. It is in the job's store by then, and survives every process of the job.
        Raises `UsageError` for a negative version, `JobError` for a channel name that is empty or longer than 200
        characters, `StoreAway` if the store does not answer.
        """
        if version < 0:
            raise UsageError(f"version {version} of {channel!r} is negative", "count from 0")
        kept = self._peers.ask("commit_version", channel, str(version), timeout=MASTER_ASK_TIMEOUT)
        return int(kept or 0)

    def version(self, channel: str) -> int | None:
        """The latest version of `channel` that was committed; None if none was."""
        kept = self._peers.ask("version", channel, timeout=MASTER_ASK_TIMEOUT)
        return None if kept is None else int(kept)


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
    restart belongs there.

    A workload whose ranks are replicas may offer ``get_state()``, which returns tensors and what can be pickled, in
    lists and dicts, and ``set_state(state)``. Before `on_generation`, a rank that was started again then gets the state
    of another one, with its tensors in the memory of the host.
    """

    __unirun_kind__: ClassVar[str] = "workload"

    def __init__(self, master_handle: MasterHandle, config: DictConfig) -> None:
        self._master_handle, self._config = master_handle, config
        self._synced: Mapping[str, Callable[[int, float | None], int]] = {}
        self._anew: Callable[[str], None] = lambda name: None
        """Has all ranks form the default process group again, when each of them calls it with the same new name."""
        self._leave: Callable[[BaseException], None] = lambda error: None
        """Ends the worker with an error of another thread."""

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


class BaseTrainer:
    """The base class of a job's trainer. unirun makes one object in a process of its own, calls `init`, then `fit`.

    The job ends when `fit` returns. What it returns is `JobHandle.result`.

    Each role is an attribute, the `RoleGroup` of its workers: ``self.RG_ACTOR.update(x)`` calls ``update`` in all
    actors, ``self.RG_ACTOR[2].update(x)`` in one. The attribute's name is ``RG_`` and the role's name in upper case.
    Role groups and `master_handle` are set before `init` is called, but not yet in ``__init__``::

        class PPOTrainer(BaseTrainer):
            def init(self):
                self.prompts = list(range(64))

            def fit(self):
                for _ in range(self.config.steps):
                    samples = self.RG_ROLLOUT.generate(shard(self.prompts))
                    self.RG_ACTOR.update(samples)
    """

    __unirun_kind__: ClassVar[str] = "trainer"

    def __init__(
        self,
        actor_handles: Mapping[str, list[WorkerHandle]],
        actor_classes: Mapping[str, type],
        config: DictConfig,
    ) -> None:
        self._actor_handles, self._actor_classes, self._config = actor_handles, actor_classes, config
        self._groups: dict[str, RoleGroup] = {}
        self._master_handle: MasterHandle | None = None
        self._resources: dict[str, dict[str, Any]] = {}
        self._channels: dict[str, tuple[str, ...]] = {}
        """The publisher and the receivers of each channel."""

    def init(self) -> None:
        """Prepare: data, tokenizer, first calls of the workloads. Must be defined."""
        raise NotImplementedError(f"{type(self).__name__} must define init()")

    def fit(self) -> Any:
        """Train. Must be defined. What it returns, which has to be picklable, is the job's result."""
        raise NotImplementedError(f"{type(self).__name__} must define fit()")

    @property
    def config(self) -> DictConfig:
        """The job's ``config:`` section."""
        return self._config

    @property
    def actor_handles(self) -> Mapping[str, list[WorkerHandle]]:
        """The `WorkerHandle` of each worker, by role, in rank order. Each access gives those that the role has now."""
        return self._actor_handles

    @property
    def actor_classes(self) -> Mapping[str, type]:
        """The workload class of each role. It is imported at the first access."""
        return self._actor_classes

    @property
    def master_handle(self) -> MasterHandle:
        """The job, for ``job_info()``, ``report(metrics)`` and more. Raises `UsageError` in ``__init__``."""
        if self._master_handle is None:
            raise UsageError(
                "the trainer is not bound to a job yet", "use it in init() or fit(), not in __init__"
            )
        return self._master_handle

    def get_role_groups(self) -> list[str]:
        """The names of the role groups: ``["RG_ACTOR", "RG_ROLLOUT"]``."""
        return list(self._groups)

    def get_workload_resource(self, role: str) -> dict[str, Any]:
        """The resources of a role: its ``total`` number of ranks, ranks ``per_node``, ``collocation`` and
        ``class``.

        Raises `UsageError` for a role that the job does not have.
        """
        if role not in self._resources:
            raise UsageError(f"this job has no role {role!r}", f"it has {', '.join(self._resources)}")
        return dict(self._resources[role])

    def sync_weights(self, channel: str, *, version: int | None = None, timeout: float | None = None) -> int:
        """Publish the weights of `channel` in its publisher, and receive them in all of its receivers. Of these, only
        workloads are waited for: engines and scripts get each version by themselves.

        Their workers have said with ``WeightsChannel(channel).attach(model)`` which weights. `version` is by default
        the one after the last; it is returned. `timeout` is in seconds, by default that of calls. Raises `UsageError`
        for a channel that the job does not declare, and what the workers raise.
        """
        if channel not in self._channels:
            there = ", ".join(self._channels) or "none"
            raise UsageError(f"this job declares no channel {channel!r}", f"there are: {there}")
        if version is None:
            last = self.master_handle.version(channel)
            version = 0 if last is None else last + 1
        publisher, *receivers = (self._groups[group_name(role)] for role in self._channels[channel])
        # The time of a call is finite.
        limit = None if timeout is None else min(max(timeout, 0.0), 1e9) + SYNC_ANSWER_TIMEOUT
        publisher.sync_weights.options(timeout=limit).call(channel, version, timeout)
        # A publisher that was started again may not have what it was to publish; a receiver needs nothing else.
        refs = [
            group.sync_weights.options(idempotent=True, timeout=limit).call_async(channel, version, timeout)
            for group in receivers
        ]
        for ref in refs:
            ref.result()
        return self.master_handle.commit_version(channel, version)

    def is_recoverable(self) -> bool:
        """Return True if the trainer may be started again when it dies. False by default: then the job fails.

        A trainer that is started again runs `init` and `fit` anew, with the workloads as they are, and reads with
        `load_state` what its predecessor saved. The first call of a worker that has itself been started again raises
        `WorkerLost`. It is asked before `init`, and again when `init` or `fit` has raised.
        """
        return False

    def save_state(self, state: bytes) -> None:
        """Keep `state`, at most 8 MiB, for a trainer that is started again. It is in the job's store when this returns.

        Raises `UsageError` for a value that is not bytes or is too large, `StoreAway` if the store does not answer.
        """
        self.master_handle.save_state(state)

    def load_state(self) -> bytes | None:
        """The state that was saved last; None if nothing was."""
        return self.master_handle.load_state()

    def __getattr__(self, name: str) -> RoleGroup:
        if name.startswith("RG_"):
            there = ", ".join(self.__dict__.get("_groups", ())) or "none before __init__ has returned"
            raise AttributeError(f"there is no role group {name}; there are: {there}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def group_name(role: str) -> str:
    """``udf_1`` → ``RG_UDF_1``"""
    return f"RG_{re.sub(r'[^A-Za-z0-9_]', '_', role).upper()}"


def bind(
    trainer: BaseTrainer,
    groups: Mapping[str, RoleGroup],
    handle: MasterHandle,
    resources: Mapping[str, dict[str, Any]],
    channels: Mapping[str, tuple[str, ...]],
) -> None:
    """Give a trainer its role groups, by role, its job, and the roles of each channel, the publisher first.

    Raises `UsageError` when two roles give one name.
    """
    names = [group_name(role) for role in groups]
    twice = [role for role in groups if names.count(group_name(role)) > 1]
    if twice:
        raise UsageError(
            f"roles {' and '.join(twice)} both give {group_name(twice[0])}", "rename one of them"
        )
    trainer.__dict__.setdefault("_groups", {})
    trainer._groups = dict(zip(names, groups.values(), strict=True))
    trainer._master_handle, trainer._resources, trainer._channels = handle, dict(resources), dict(channels)
    for name, group in trainer._groups.items():
        setattr(trainer, name, group)
