"""Checks before a job starts that one host can run as many processes as the job has ranks on it.

Every figure is a lower bound: a job that passes may still find that the host is too small.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path

from unirun.collocation.hostfiles import memory_field, read_number
from unirun.collocation.limits import cgroup_limits
from unirun.errors import PlacementError
from unirun.spec.job import JobSpec
from unirun.values import Value

WORKER_MEMORY = 4 << 20
"""Private memory, in bytes, of a worker that was forked from a process with torch imported, before it runs user code.
Measured: 4.1 MiB; a new interpreter has more."""

PROGRAM_MEMORY = 256 << 10
"""The same for a program, which may be as small as a shell."""

AROUND = 4
"""Processes of a job besides those of its nodes and roles: the command, the master, and for a moment its successor."""

PER_NODE = 2
"""An agent and a spawner."""

DESCRIPTORS = 64
"""File descriptors that an agent or a spawner has open, besides one for each of its workers."""


class Ceilings(Value):
    """The limits of a host; None where there is no limit.

    `processes` are limits, each with its name and the way to raise it. `descriptors` is the hard limit of one process.
    `memory` is in bytes, swap included.
    """

    processes: tuple[tuple[int, str, str], ...] = ()
    descriptors: int | None = None
    memory: int | None = None


def host_ceilings(root: Path = Path("/")) -> Ceilings:
    """The limits of this process on this host."""
    limits = cgroup_limits(root)
    found: list[tuple[int | None, str, str]] = [
        (read_number(root / "proc/sys/kernel/pid_max"), "kernel.pid_max", "sysctl -w kernel.pid_max=4194304"),
        (
            read_number(root / "proc/sys/kernel/threads-max"),
            "kernel.threads-max",
            "sysctl -w kernel.threads-max=NUMBER",
        ),
        (limits.pids, "pids.max of the control group", "the service or the container sets it"),
    ]
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    # The kernel does not hold root to it.
    if os.geteuid() != 0 and soft != resource.RLIM_INFINITY:
        found.append((soft, "ulimit -u", "ulimit -u NUMBER"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return Ceilings(
        tuple((most, name, remedy) for most, name, remedy in found if most is not None),
        None if hard == resource.RLIM_INFINITY else hard,
        _memory(root, limits.memory),
    )


def refuse_impossible(spec: JobSpec, ranks: Iterable[tuple[str, str]], ceilings: Ceilings) -> None:
    """Raise `PlacementError` for `ranks`, as pairs of role and node, that one host cannot have all."""
    roles: dict[str, int] = {}
    nodes: dict[str, int] = {}
    for role, node in ranks:
        roles[role] = roles.get(role, 0) + 1
        nodes[node] = nodes.get(node, 0) + 1
    total = sum(roles.values())
    largest = max(roles, key=lambda name: roles[name])
    around = AROUND + PER_NODE * len(nodes) + len(roles)
    for most, name, remedy in ceilings.processes:
        if total + around > most:
            raise _refusal(
                f"{total} ranks need {total + around} processes on this host, and {name} allows {most}",
                f"ask for fewer, or raise it: {remedy}",
                largest,
                total,
                max(most - around, 0),
            )
    most_here = max(nodes.values())
    if ceilings.descriptors is not None and most_here + DESCRIPTORS > ceilings.descriptors:
        raise _refusal(
            f"{most_here} ranks of one node need {most_here + DESCRIPTORS} descriptors in its agent,"
            f" and ulimit -Hn allows {ceilings.descriptors}",
            "ask for fewer, or raise it: ulimit -Hn NUMBER as root, or LimitNOFILE= of the service",
            largest,
            most_here,
            max(ceilings.descriptors - DESCRIPTORS, 0),
        )
    programs = {role.name for role in spec.roles if role.entry.kind == "program"}
    memory = sum(
        count * (PROGRAM_MEMORY if name in programs else WORKER_MEMORY) for name, count in roles.items()
    )
    if ceilings.memory is not None and memory > ceilings.memory:
        raise _refusal(
            f"{total} ranks need at least {memory >> 20} MiB, and this host allows {ceilings.memory >> 20} MiB",
            "ask for fewer",
            largest,
            total,
            total * ceilings.memory // memory,
        )


def _refusal(problem: str, remedy: str, role: str, needed: int, available: int) -> PlacementError:
    return PlacementError(problem, remedy, role=role, needed=needed, available=available)


def _memory(root: Path, group: int | None) -> int | None:
    """The memory of the host or of its control group, whichever is less, and all swap."""
    total, swap = (memory_field(root / "proc/meminfo", name) for name in ("MemTotal", "SwapTotal"))
    known = [size for size in (total, group) if size]
    return min(known) + swap if known else None
