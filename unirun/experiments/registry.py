"""Registries: what configurations name by a string."""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import Any, Generic, TypeVar

from unirun.errors import UsageError

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects of one `kind` by name. A name is used once. An object whose import is slow is registered as a string,
    ``package.module:name``, and imported when it is needed."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._found: dict[str, T | str] = {}

    def register(self, name: str, value: T | str) -> None:
        """Give `value` a name. Raises `UsageError` if another one has it."""
        known = self._found.setdefault(name, value)
        if known is not value and not _same(known, value):
            raise UsageError(
                f"{self.kind} {name!r} is registered already, as {_where(known)}", "choose another name"
            )

    def find(self, name: str) -> T:
        """Return the entry with this name. Raises `UsageError` with the names that there are."""
        if name not in self._found:
            near = difflib.get_close_matches(name, self._found, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(
                f"no {self.kind} is registered as {name!r}",
                f"{hint}there are: {', '.join(self.names()) or 'none'}",
            )
        found = self._found[name]
        if isinstance(found, str):
            module, _, attribute = found.partition(":")
            found = self._found[name] = getattr(importlib.import_module(module), attribute)
        return found

    def at_hand(self, name: str) -> T | None:
        """Return the entry with this name. None if nothing has, or if it is not imported yet."""
        found = self._found.get(name)
        return None if isinstance(found, str) else found

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._found)

    def __contains__(self, name: object) -> bool:
        return name in self._found


def _where(value: object) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}".lstrip(".")


def _same(one: object, other: object) -> bool:
    """Return True if both are from one place: a module imported twice, as ``__main__`` too, registers twice."""
    if isinstance(other, str):
        return other in (one, f"{getattr(one, '__module__', '')}:{getattr(one, '__qualname__', '')}")
    places = [
        (
            getattr(each, "__qualname__", None),
            getattr(sys.modules.get(getattr(each, "__module__", "")), "__file__", None),
        )
        for each in (one, other)
    ]
    return None not in places[0] and places[0] == places[1]


DATASETS: Registry[Any] = Registry("dataset")
MODELS: Registry[Any] = Registry("model")
BACKENDS: Registry[Any] = Registry("backend")
INTERFACES: Registry[Any] = Registry("interface")

# What is built in is registered as strings: the command that starts a trial needs only the names. Datasets register
# themselves, and interfaces come with the algorithms.
for _name, _class in (("ddp", "Train"), ("fsdp2", "Sharded"), ("inference", "Inference"), ("null", "Null")):
    BACKENDS.register(_name, f"unirun.experiments.models.backends:{_class}Backend")
MODELS.register("causal_lm", "unirun.experiments.models.backends:causal_lm")
MODELS.register("null", "unirun.experiments.models.backends:no_model")


def register_dataset(name: str, cls: Any) -> None:
    """`DatasetAbstraction(name, args)` makes ``cls(util, **args)``; ``cls.keys`` are the keys of its samples."""
    if not isinstance(getattr(cls, "keys", None), tuple):
        raise UsageError(
            f"dataset {name!r} does not say which keys it has", "give the class keys = ('prompt', …), a tuple"
        )
    DATASETS.register(name, cls)


def register_model(name: str, make: Any) -> None:
    """`ModelAbstraction(name, args)` makes ``make(place, **args)``."""
    MODELS.register(name, make)


def register_backend(name: str, cls: Any) -> None:
    """`ModelBackendAbstraction(name, args)` makes ``cls(**args)``, a `ModelBackend`."""
    BACKENDS.register(name, cls)


def register_interface(name: str, cls: Any) -> None:
    """`ModelInterfaceAbstraction(name, args)` makes ``cls(**args)``, a `ModelInterface`."""
    INTERFACES.register(name, cls)
