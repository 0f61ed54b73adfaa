"""`Setup`: what a trainer asks for, and how its arguments say that; and the backends with which its workers compute.

Of the backends, ``torch`` makes the default process group of torch.distributed, over nccl with GPUs and gloo without;
``gloo`` and ``nccl`` are named ones; ``none`` makes nothing. A package adds others by an entry point of the group
``unirun.train.backends``; ``"pkg.mod:Class"`` names a class directly.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from unirun.errors import UsageError
from unirun.observe.status import NO_LIMIT
from unirun.values import Value, natural

GROUP_TIMEOUT = 1800.0
"""Seconds after which a collective fails, as torch has them."""

INIT_METHODS = ("env", "env://", "tcp")
"""Spellings of the way in which ranks meet. It is the same for all: in the store of their job."""

ALIASES = {"pytorch": "torch"}
"""Other names of built-in backends, as RaySGD has them."""


ROLE = "worker"
"""The role of the workers."""

MANY = 100_000
"""Ranks, where there may be any number."""


PRELOAD = ("unirun.train.worker", "torch._dynamo")
"""The modules that are imported once before the workers are forked. DistributedDataParallel imports the
second one, for a second: so not in each of them, and not again in one that comes in the place of another."""


class Setup(Value):
    """The request of a trainer: from `least` to `most` ranks with so many `slots` of a `device` each (None: a
    place for one process), a `backend`, environment variables, and options of the ``unirun`` command. With
    `devices`, no others than these. `group_timeout` is the timeout of the process group, in seconds."""

    least: int
    most: int
    backend: str
    device: str | None = None
    slots: int = 1
    env: Mapping[str, str] = {}
    options: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    group_timeout: float = GROUP_TIMEOUT

    def job_file(self, name: str) -> dict[str, Any]:
        """The job, as a job file has it."""
        elastic = self.least != self.most
        role: dict[str, Any] = {
            "count": f"{self.least}:{self.most}" if elastic else self.most,
            "workload": "unirun.train.worker:TrainWorker",
            # The trainer counts restarts, and calls take as many seconds as the functions.
            "max_restarts": NO_LIMIT,
            "slots": self.slots,
            "env": dict(self.env),
        }
        if self.device is not None:
            role["device"] = self.device
        if elastic:
            role["elastic"] = True
        if self.devices:
            role["devices"] = [*self.devices]
        return {
            "name": name,
            "roles": {ROLE: role},
            "preload": [*PRELOAD] if self.most > 1 else [*PRELOAD[:1]],
            "call_timeout": NO_LIMIT,
            "config": {
                "backend": self.backend,
                "group_timeout": self.group_timeout,
                "logging": logging_told(),
            },
        }

    def __str__(self) -> str:
        """The request in words, as ``print(trainer)`` has it before the workers start."""
        most = str(self.most) if self.most < MANY else "any number of"
        ranks = f"{self.least}" if self.least == self.most else f"{self.least} to {most}"
        return in_words(ranks, self.resources, self.backend)

    @property
    def resources(self) -> str:
        """The resources of each rank, in words."""
        # OpenMP takes a list, too, of which the first is for the outermost level.
        told = self.env.get("OMP_NUM_THREADS", "").partition(",")[0]
        threads = (natural(told) or 1) if self.device == "cuda" else 0
        found = [(self.slots, "GPU")] if self.device == "cuda" else []
        found += [] if threads == 1 else [(threads or self.slots, "CPU")]
        return " and ".join(f"{number} {name}{'s' * (number > 1)}" for number, name in found)


def range_of(num_workers: Any) -> tuple[int, int]:
    """From how many to how many ranks. Raises `UsageError`."""
    least, most = (
        num_workers if isinstance(num_workers, tuple | list) and len(num_workers) == 2 else (num_workers,) * 2
    )
    most = MANY if most == math.inf else most
    numbers = all(isinstance(each, int) and not isinstance(each, bool) for each in (least, most))
    if not numbers or not 1 <= least <= most:
        raise UsageError(
            f"num_workers={num_workers!r}", "give a number from 1 on, or a range: (2, 8), (4, math.inf)"
        )
    return least, most


def requested(
    use_gpu: bool,
    resources: Mapping[str, float] | None,
    cpus_per_worker: int | None = None,
    gpus_per_worker: int | None = None,
) -> tuple[bool, Mapping[str, float]]:
    """`use_gpu` and `resources_per_worker` as they follow from these and from RaySGD's arguments. Raises
    `UsageError`."""
    found: Mapping[str, float] = {} if resources is None else resources
    if not isinstance(found, Mapping):
        raise UsageError(f"resources_per_worker is a {type(found).__name__}", "give a dict, {'CPU': 1}")
    for name, number in (("CPU", cpus_per_worker), ("GPU", gpus_per_worker)):
        if number is not None:
            if name in found and found[name] != number:
                raise UsageError(
                    f"{name.lower()}s_per_worker={number!r}, and resources_per_worker has {found[name]!r}",
                    "give one of them",
                )
            found = {**found, name: number}
    return use_gpu or bool(gpus_per_worker), found


def threads_of(resources: Mapping[str, float]) -> dict[str, str]:
    """The variable by which ranks with GPUs have as many threads as processors. Ranks without are bound to theirs."""
    cpus = int(resources.get("CPU", 1))
    return {"OMP_NUM_THREADS": str(cpus)} if cpus > 1 else {}


def resources_of(use_gpu: bool, resources: Mapping[str, float]) -> tuple[str | None, int]:
    """The type of device, and how many each rank has. Raises `UsageError`."""
    if not isinstance(use_gpu, bool):
        raise UsageError(f"use_gpu={use_gpu!r}", "it is True or False")
    unknown = resources.keys() - {"CPU", "GPU"}
    if unknown:
        raise UsageError(f"resources_per_worker has {min(map(repr, unknown))}", "it has CPU and GPU")
    for name, number in resources.items():
        whole = isinstance(number, int | float) and float(number).is_integer() and number >= 0
        if not whole or isinstance(number, bool):
            raise UsageError(f"resources_per_worker: {name} is {number!r}", "give a whole number")
    gpus = int(resources.get("GPU", int(use_gpu)))
    if gpus and not use_gpu:
        raise UsageError(f"resources_per_worker asks for {gpus} GPUs", "pass use_gpu=True")
    if use_gpu and not gpus:
        raise UsageError("use_gpu=True with 0 GPUs for each worker", "leave out one of them")
    cpus = int(resources.get("CPU", 1))
    if gpus:
        return "cuda", gpus
    return ("cpu", cpus) if cpus > 1 else (None, 1)


def options_of(placement: Any, store: str) -> tuple[str, ...]:
    """Options of the ``unirun`` command. Raises `UsageError`."""
    if not isinstance(store, str):
        raise UsageError(f"store is a {type(store).__name__}", "give what --store takes, as text")
    if isinstance(placement, str):
        key = "inventory" if placement.startswith("fake:") else "hosts"
        placement = {key: placement} if placement else {}
    if not isinstance(placement, Mapping):
        raise UsageError(
            f"placement is a {type(placement).__name__}", "give hosts, an inventory, or a dict of options"
        )
    found: list[str] = ["--store", store] if store else []
    for name, value in placement.items():
        if not isinstance(name, str):
            raise UsageError(f"placement has {name!r}", "give names of options of the unirun command")
        option = f"--{name.replace('_', '-')}"
        if value is not None and value is not False:
            found += [option] if value is True else [option, str(value)]
    return tuple(found)


def in_words(ranks: str, resources: str, backend: str) -> str:
    """``2 workers with 1 CPU each, backend torch``."""
    workers = f"1 worker with {resources}" if ranks == "1" else f"{ranks} workers with {resources} each"
    return f"{workers}, backend {backend}"


GROUP = "unirun.train.backends"


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
        number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if not number or not 0 < timeout_s < math.inf:
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


_STYLES = {logging.PercentStyle: "%", logging.StrFormatStyle: "{", logging.StringTemplateStyle: "$"}


def logging_told() -> dict[str, Any] | None:
    """The level and format of this program's root logger; None when it has not configured logging.

    A formatter of another class, such as one that writes JSON, cannot be told: then the format is Python's own.
    """
    root = logging.getLogger()
    if not root.handlers:
        return None
    found = {"level": root.level, "format": logging.BASIC_FORMAT, "datefmt": None, "style": "%"}
    for formatter in (handler.formatter for handler in root.handlers):
        if type(formatter) is logging.Formatter and formatter._fmt:
            style = next((_STYLES[each] for each in type(formatter._style).mro() if each in _STYLES), "%")
            # A dollar with a brace would be a reference to another value of the config.
            text = formatter._fmt.replace("${", r"\${")
            return {**found, "format": text, "datefmt": formatter.datefmt, "style": style}
    return found


def configure_logging(setting: Mapping[str, Any] | None) -> None:
    """Configure logging so, unless a module that was imported before has configured it."""
    if setting is not None:
        logging.basicConfig(**setting)
