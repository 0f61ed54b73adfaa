"""`Setup`: what a trainer asks for, and how its arguments say that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unirun.errors import UsageError
from unirun.observe.status import NO_LIMIT
from unirun.train import logs
from unirun.train.backends import GROUP_TIMEOUT
from unirun.values import Value, natural

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
            "config": {"backend": self.backend, "group_timeout": self.group_timeout, "logging": logs.told()},
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
