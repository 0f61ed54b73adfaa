"""`BaseTrainer`: the class that drives a job by calling its workloads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from omegaconf import DictConfig

from unirun.errors import UsageError
from unirun.roles.calls.group import RoleGroup, WorkerHandle
from unirun.roles.handle import MasterHandle


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
        """The `WorkerHandle` of each worker, by role, in rank order."""
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
        publisher.sync_weights(channel, version, timeout)
        # A publisher that was started again may not have what it was to publish; a receiver needs nothing else.
        refs = [
            group.sync_weights.options(idempotent=True).call_async(channel, version, timeout)
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
