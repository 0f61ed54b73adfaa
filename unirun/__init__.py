"""unirun: torchrun for many roles. This is the whole public API."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unirun.errors import (
        CallError,
        EncodingError,
        InvocationTimeout,
        JobFailed,
        PeerLost,
        QueueEnded,
        QueueTimeout,
        RemoteError,
        RemoteTraceback,
        ServerError,
        ServerTimeout,
        UnirunError,
        WeightsError,
        WeightsTimeout,
        WorkerLost,
    )
    from unirun.launcher.debugger import breakpoint
    from unirun.roles import (
        BaseTrainer,
        BaseWorkload,
        Context,
        InvocationRef,
        MasterHandle,
        Member,
        RemoteMethod,
        ResilientState,
        RoleGroup,
        WorkerHandle,
        Workload,
        commit_job,
        init,
        replicate,
        resilient,
        rpc_name,
        run_in_process,
        serve,
        shard,
        should_stop,
        trainer_invocation,
        wait,
    )
    from unirun.rollout import EngineClient
    from unirun.train import DLJobBuilder, JobBuilder, JobHandle, RLJobBuilder, attach
    from unirun.weights import Admission, Item, LocalShard, Queue, WeightsChannel
    from unirun.wire.progress import allowance, progress

__all__ = [
    "Admission",
    "BaseTrainer",
    "BaseWorkload",
    "CallError",
    "Context",
    "DLJobBuilder",
    "EncodingError",
    "EngineClient",
    "InvocationRef",
    "InvocationTimeout",
    "Item",
    "JobBuilder",
    "JobFailed",
    "JobHandle",
    "LocalShard",
    "MasterHandle",
    "Member",
    "PeerLost",
    "Queue",
    "QueueEnded",
    "QueueTimeout",
    "RLJobBuilder",
    "RemoteError",
    "RemoteMethod",
    "RemoteTraceback",
    "ResilientState",
    "RoleGroup",
    "ServerError",
    "ServerTimeout",
    "UnirunError",
    "WeightsChannel",
    "WeightsError",
    "WeightsTimeout",
    "WorkerHandle",
    "WorkerLost",
    "Workload",
    "allowance",
    "attach",
    "breakpoint",
    "commit_job",
    "init",
    "progress",
    "replicate",
    "resilient",
    "rpc_name",
    "run_in_process",
    "serve",
    "shard",
    "should_stop",
    "trainer_invocation",
    "wait",
]

_ERRORS = frozenset(
    {
        "CallError",
        "EncodingError",
        "InvocationTimeout",
        "JobFailed",
        "PeerLost",
        "QueueEnded",
        "QueueTimeout",
        "RemoteError",
        "RemoteTraceback",
        "ServerError",
        "ServerTimeout",
        "UnirunError",
        "WeightsError",
        "WeightsTimeout",
        "WorkerLost",
    }
)

_TRAIN = frozenset({"DLJobBuilder", "JobBuilder", "JobHandle", "RLJobBuilder", "attach"})

_PROGRESS = frozenset({"allowance", "progress"})

_WEIGHTS = frozenset({"Admission", "Item", "LocalShard", "Queue", "WeightsChannel"})


def __dir__() -> list[str]:
    """The public names, most of which are not imported yet."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Names are imported when they are used, so that the command starts without what it does not need."""
    if name not in __all__:
        raise AttributeError(f"module 'unirun' has no attribute {name!r}")
    home = "unirun.roles"
    if name in _ERRORS:
        home = "unirun.errors"
    elif name in _PROGRESS:
        home = "unirun.wire.progress"
    elif name == "breakpoint":
        home = "unirun.launcher.debugger"
    elif name == "EngineClient":
        home = "unirun.rollout"
    elif name in _TRAIN:
        home = "unirun.train"
    elif name in _WEIGHTS:
        home = "unirun.weights"
    return getattr(importlib.import_module(home), name)
