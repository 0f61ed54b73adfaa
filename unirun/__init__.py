"""unirun: torchrun for many roles. This is the whole public API."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unirun.errors import UnirunError
    from unirun.roles import Context, Member, init

__all__ = ["Context", "Member", "UnirunError", "init"]

_HOMES = {"Context": "roles", "Member": "roles", "init": "roles", "UnirunError": "errors"}


def __getattr__(name: str) -> Any:
    """Names are imported when they are used, so that the command starts without what it does not need."""
    if name not in _HOMES:
        raise AttributeError(f"module 'unirun' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unirun.{_HOMES[name]}"), name)
