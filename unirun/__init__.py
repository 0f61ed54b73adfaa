"""unirun: torchrun for many roles. This is the whole public API."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unirun.errors import (
        CallError,
        EncodingError,
        InvocationTimeout,
        RemoteError,
        RemoteTraceback,
        UnirunError,
        WorkerLost,
    )
    from unirun.roles import (
        BaseTrainer,
        BaseWorkload,
        Context,
        InvocationRef,
        MasterHandle,
        Member,
        RoleGroup,
        Trainer,
        WorkerHandle,
        Workload,
        init,
        replicate,
        rpc_name,
        serve,
        shard,
        trainer_invocation,
        wait,
    )

__all__ = [
    "BaseTrainer",
    "BaseWorkload",
    "CallError",
    "Context",
    "EncodingError",
    "InvocationRef",
    "InvocationTimeout",
    "MasterHandle",
    "Member",
    "RemoteError",
    "RemoteTraceback",
    "RoleGroup",
    "Trainer",
    "UnirunError",
    "WorkerHandle",
    "WorkerLost",
    "Workload",
    "init",
    "replicate",
    "rpc_name",
    "serve",
    "shard",
    "trainer_invocation",
    "wait",
]

_ERRORS = frozenset(
    {
        "CallError",
        "EncodingError",
        "InvocationTimeout",
        "RemoteError",
        "RemoteTraceback",
        "UnirunError",
        "WorkerLost",
    }
)


def __getattr__(name: str) -> Any:
    """Names are imported when they are used, so that the command starts without what it does not need."""
    if name not in __all__:
        raise AttributeError(f"module 'unirun' has no attribute {name!r}")
    home = "unirun.errors" if name in _ERRORS else "unirun.roles"
    return getattr(importlib.import_module(home), name)
