"""Backends: what the workers of a trainer need to compute together, and hooks around it.

``torch`` makes the default process group of torch.distributed, over nccl with GPUs and gloo without; ``gloo`` and
``nccl`` are named ones; ``none`` makes nothing. A package adds others by an entry point of the group
``unirun.train.backends``; ``"pkg.mod:Class"`` names a class directly.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from unirun.errors import UsageError

GROUP = "unirun.train.backends"
GROUP_TIMEOUT = 1800.0
"""Seconds after which a collective fails, as torch has them."""

INIT_METHODS = ("env", "env://", "tcp")
"""Spellings of the way in which ranks meet. It is the same for all: in the store of their job."""

ALIASES = {"pytorch": "torch"}
"""Other names of built-in backends, as RaySGD has them."""


class TorchConfig:
    """The process group of torch, as RaySGD and Ray Train describe it: ``backend_args=TorchConfig(timeout_s=60)``.

    A collective fails after `timeout_s` seconds. `backend` is ``"gloo"``, ``"nccl"``, or None for that of the trainer.
    `init_method` is ``"env"`` or ``"tcp"``; with both the ranks meet in the store of their job. Raises `UsageError`.
    """

    def __init__(
        self, backend: str | None = None, init_method: str = "env", timeout_s: float = GROUP_TIMEOUT
    ) -> None:
        if backend not in (None, "gloo", "nccl"):
            raise UsageError(f"TorchConfig(backend={backend!r})", "it is 'gloo', 'nccl' or None")
        if init_method not in INIT_METHODS:
            raise UsageError(
                f"TorchConfig(init_method={init_method!r})",
                "leave it out: the ranks meet in the store of their job",
            )
        if isinstance(timeout_s, timedelta):
            timeout_s = timeout_s.total_seconds()
        if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not timeout_s > 0:
            raise UsageError(f"TorchConfig(timeout_s={timeout_s!r})", "give seconds")
        self.backend, self.timeout_s = backend, float(timeout_s)


def configured(backend: str, args: Any) -> tuple[str, float]:
    """The backend, and the timeout of its process group, that `backend` and `backend_args` ask for. Raises
    `UsageError`."""
    backend = ALIASES.get(backend, backend) if isinstance(backend, str) else backend
    if args is None:
        return backend, GROUP_TIMEOUT
    if not isinstance(args, TorchConfig):
        raise UsageError(f"backend_args is a {type(args).__name__}", "give a TorchConfig(...)")
    if backend not in ("torch", "gloo", "nccl"):
        raise UsageError(f"backend_args with backend={backend!r}", "it is for the process groups of torch")
    if args.backend is not None and backend not in ("torch", args.backend):
        raise UsageError(f"backend={backend!r}, and backend_args has {args.backend!r}", "give one of them")
    return args.backend or backend, args.timeout_s


class Backend:
    """The hooks that are called in each worker of a trainer. It is made without arguments. These hooks do nothing, so
    the workers compute alone; a backend derives from this class and overrides what it needs."""

    def on_start(self, rank: int, world_size: int) -> None:
        """The worker has started, also one in the place of a lost one, and takes no calls yet."""

    def on_failure(self, rank: int, world_size: int) -> None:
        """Another rank was lost, or a function has failed, and the ranks are together again."""

    def on_shutdown(self) -> None:
        """The worker is about to end."""

    def encode_data(self, data: Any) -> Any:
        """Encode the value that the function has returned, before it is sent to the driver."""
        return data

    def decode_data(self, data: Any) -> Any:
        """The inverse, in the driver."""
        return data


NoBackend = Backend


class TorchBackend(Backend):
    """The default process group of torch.distributed, over `kind`: by default nccl with GPUs, and gloo without."""

    def __init__(self, kind: str | None = None, timeout: float = GROUP_TIMEOUT) -> None:
        """A collective fails after `timeout` seconds."""
        self._kind, self._timeout = kind, timeout

    def on_start(self, rank: int, world_size: int) -> None:
        """Form the group with the other ranks."""
        import torch
        from torch import distributed

        kind = self._kind or ("nccl" if torch.cuda.is_available() else "gloo")
        distributed.init_process_group(kind, timeout=timedelta(seconds=self._timeout))


BUILT_IN: dict[str, Callable[..., Backend]] = {
    "torch": TorchBackend,
    "gloo": partial(TorchBackend, "gloo"),
    "nccl": partial(TorchBackend, "nccl"),
    "none": Backend,
}


def find_backend(name: str, *, use_gpu: bool = True, timeout: float = GROUP_TIMEOUT) -> Callable[[], Backend]:
    """The maker of the backend called `name`, as its class; `timeout` is that of a process group. Raises `UsageError`,
    which names those that there are."""
    if not isinstance(name, str):
        raise UsageError(f"backend={name!r}", "give its name, or pkg.mod:Class")
    if name == "nccl" and not use_gpu:
        raise UsageError("backend='nccl' without GPUs", "pass use_gpu=True, or backend='gloo'")
    if name in BUILT_IN:
        found = BUILT_IN[name]
        return found if name == "none" or timeout == GROUP_TIMEOUT else partial(found, timeout=timeout)
    for point in entry_points(group=GROUP):
        if point.name == name:
            return _checked(name, point.load())
    module, colon, kind = name.partition(":")
    if colon:
        try:
            return _checked(name, getattr(importlib.import_module(module), kind))
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise UsageError(
                f"backend {name!r} cannot be imported: {error}", "name it as pkg.mod:Class"
            ) from error
    there = ", ".join(sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))}))
    raise UsageError(f"there is no backend {name!r}", f"there are: {there}; or name a class: pkg.mod:Class")


def _checked(name: str, found: Any) -> Callable[[], Backend]:
    hooks = ("on_start", "on_failure", "on_shutdown", "encode_data", "decode_data")
    missing = [hook for hook in hooks if not hasattr(found, hook)]
    if missing:
        raise UsageError(
            f"backend {name!r} has no {', '.join(missing)}", "derive it from unirun.train.NoBackend"
        )
    make: Callable[[], Backend] = found
    return make
