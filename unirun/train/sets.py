"""Sets of workers side by side, each behind a trainer of its own: how many there may be, and what each has.

A job is placed as if it were alone, so what devices and threads each set has is decided here.
"""

from __future__ import annotations

import copy
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict, replace

from unirun.collocation import Inventory, count_slots, local_inventory, parse_fake, place
from unirun.errors import PlacementError, UsageError
from unirun.spec.parse import parse_job
from unirun.train.setup import ROLE, Setup

if TYPE_CHECKING:
    from unirun.train.trainer import Trainer

ELSEWHERE = ("--hosts", "--hostfile", "--slurm", "--nnodes")
"""Options of jobs on other hosts, of which this process does not know what they have."""


class Part(Setup):
    """The request of a set of workers that may have no devices but these."""

    devices: tuple[str, ...] = ()

    def job_file(self, name: str) -> dict[str, Any]:
        """The job, as a job file has it."""
        job = super().job_file(name)
        job["roles"][ROLE]["devices"] = list(self.devices)
        return job


def inventory_of(setup: Setup) -> Inventory | None:
    """The inventory of the host where the job runs; None when it runs on others."""
    options = setup.options
    if any(option in ELSEWHERE for option in options):
        return None
    if "--inventory" not in options:
        return local_inventory()
    found = parse_fake(options[options.index("--inventory") + 1])
    return found if len(found.nodes) == 1 else None


def setups(setup: Setup, inventory: Inventory | None, most: int | None = None) -> list[Setup]:
    """The requests of the sets of workers: `setup` is that of the first. There are as many as there is room for, or
    `most`; one without an `inventory`.

    On GPUs each has a part of them, as the planner gives them one after the other. Raises `UsageError` when there are
    too few for `most`, and `PlacementError` when there are too few for one.
    """
    if setup.device == "cuda":
        parts = [setup] if inventory is None else _parts(setup, inventory)
        if most is not None and most > len(parts):
            raise UsageError(
                f"max_concurrent={most}, and there are known to be GPUs for {len(parts)}",
                "leave it out, or give each trial fewer",
            )
        return parts[:most]
    room = 1 if inventory is None else count_slots("cpu", inventory) // (setup.most * setup.slots)
    other = setup
    if setup.device is not None:
        # Workers with more than one processor are bound to theirs, and those of all jobs would be bound to the same.
        env = {"OMP_NUM_THREADS": str(setup.slots), **setup.env}
        other = replace(setup, device=None, slots=1, env=env)
    return [setup, *[other] * (max(most or room, 1) - 1)]


def _parts(setup: Setup, inventory: Inventory) -> list[Setup]:
    """Each set has what the planner gives it of the devices that those before have left."""
    (node,) = inventory.nodes
    left = tuple(device.index for device in node.devices if device.type == setup.device)
    own, found = _planned(setup, inventory), [setup]
    while left := tuple(device for device in left if device not in own):
        try:
            own = _planned(_part(setup, left), inventory)
        except PlacementError:
            break
        found.append(_part(setup, own))
    return found


def _planned(setup: Setup, inventory: Inventory) -> tuple[str, ...]:
    """The devices that a job gets when it is alone. Raises `PlacementError`."""
    count = partial(count_slots, inventory=inventory)
    _, placement = place(parse_job(setup.job_file("set"), count_slots=count, run_id="set"), inventory)
    return tuple(device for rank in placement.assignments for device in rank.own)


def _part(setup: Setup, devices: Sequence[str]) -> Part:
    return Part(**asdict(setup), devices=tuple(devices))


def another(trainer: Trainer, setup: Setup | None = None) -> Trainer:
    """A trainer with the same settings, or with another `setup`, that is not started."""
    other = copy.copy(trainer)
    other._setup = setup or trainer._setup
    # A trainer numbers the runs in its directory, so each needs its own.
    other._logdir = trainer._logdir and f"{trainer._logdir.rstrip('/')}/{secrets.token_hex(3)}"
    other._attempts = other._run = other._finalizer = None
    other._trainables, other.logdir = weakref.WeakSet(), ""
    return other


def with_threads(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with so many threads of torch, unless the environment says how many.

    The only rank of a job has as many as there are processors, and on the same processors as another set it is many
    times slower then. Ranks of larger jobs have few, as under torchrun.
    """

    @wraps(function)
    def limited(*config: Any) -> Any:
        import torch

        before = torch.get_num_threads()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(number)
        try:
            return function(*config)
        finally:
            torch.set_num_threads(before)

    return limited
