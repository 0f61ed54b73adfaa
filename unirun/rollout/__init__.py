"""Requests to the engines of a job: which one gets each, and what becomes of those that a dead one had not finished.
And agents that make trajectories with them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unirun.rollout.chatting import Reply
    from unirun.rollout.choosing import Answer, Span
    from unirun.rollout.client import AddressFile, EngineClient, EngineList, Engines
    from unirun.rollout.completing import Completer, Completion, EngineCompleter, Group, Outcomes, Trajectory
    from unirun.rollout.pool import Pool, Recorder
    from unirun.rollout.rewards import Rewards
    from unirun.values import Engine

__all__ = [
    "AddressFile",
    "Answer",
    "Completer",
    "Completion",
    "Engine",
    "EngineClient",
    "EngineCompleter",
    "EngineList",
    "Engines",
    "Group",
    "Outcomes",
    "Pool",
    "Recorder",
    "Reply",
    "Rewards",
    "Span",
    "Trajectory",
]

_HOMES = {
    "unirun.rollout.chatting": ("Reply",),
    "unirun.rollout.choosing": ("Answer", "Span"),
    "unirun.rollout.client": ("AddressFile", "EngineClient", "EngineList", "Engines"),
    "unirun.rollout.completing": (
        *("Completer", "Completion", "EngineCompleter"),
        *("Group", "Outcomes", "Trajectory"),
    ),
    "unirun.rollout.pool": ("Pool", "Recorder"),
    "unirun.rollout.rewards": ("Rewards",),
    "unirun.values": ("Engine",),
}
"""The module that has each name. They are imported when they are used: a process of rewards needs little of it, and a
client needs no torch."""


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(importlib.import_module(home), name)
            return found
    raise AttributeError(f"module 'unirun.rollout' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
