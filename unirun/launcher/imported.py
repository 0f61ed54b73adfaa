"""Calls at the import of a module, which do not import it themselves: torch is imported by the user's code."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

C10D = "torch.distributed.distributed_c10d"
"""The module of torch that has its process groups."""


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with the module `name`: now if it is imported, else as soon as it is."""
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    else:
        sys.meta_path.insert(0, _Imported(name, then))


class _Imported:
    """A finder of modules, which calls `then` with one when it has been imported, once."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then, self._asked = name, then, False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders have for the module."""
        if name != self._name or self._asked:
            return None
        self._asked = True
        # It is elsewhere when a script has put a finder of its own around all others.
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def and_then(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = and_then  # type: ignore[method-assign]
        return spec
