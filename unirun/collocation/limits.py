"""Resource limits of this process: those of its cgroup, version 1 or 2, and of Slurm."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from unirun.errors import PlacementError
from unirun.spec.job import JobSpec
from unirun.values import Value

# Values in files of the kernel: ``/proc``, ``/sys`` and control groups.


def read_text(path: Path) -> str:
    """The text of a file without blanks around it; empty when it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def number(text: str | None) -> int | None:
    """A number over 0; None for anything else (``max``, ``-1``, nothing)."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,20}", text) and int(text) else None


def read_number(path: Path) -> int | None:
    """The `number` in a file."""
    return number(read_text(path))


def read_integer(path: Path, default: int) -> int:
    """The whole number in a file, which may be negative; `default` when there is none."""
    try:
        return int(read_text(path))
    except ValueError:
        return default


def memory_field(path: Path, name: str) -> int:
    """The bytes of a line ``MemTotal: 16 kB``; 0 when there is none."""
    for line in read_text(path).splitlines():
        words = line.split()
        if f"{name}:" in words:
            return int(words[words.index(f"{name}:") + 1]) * 1024
    return 0


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """``0-3,8`` as (0, 1, 2, 3, 8). Raises ValueError."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


class Limits(Value):
    """Resource limits; None where there is no limit.

    `cpus` are the only processors, `cpu_count` how many at once (a quota of 2.5 is 2, and never less than 1), `memory`
    is in bytes, `pids` are processes and threads.
    """

    cpus: frozenset[int] | None = None
    cpu_count: int | None = None
    memory: int | None = None
    pids: int | None = None


def least(*limits: Limits) -> Limits:
    """The strictest of `limits`, for each resource."""
    sets = [each.cpus for each in limits if each.cpus is not None]
    return Limits(
        cpus=frozenset.intersection(*sets) if sets else None,
        cpu_count=min((each.cpu_count for each in limits if each.cpu_count is not None), default=None),
        memory=min((each.memory for each in limits if each.memory is not None), default=None),
        pids=min((each.pids for each in limits if each.pids is not None), default=None),
    )


def slurm_limits(environ: Mapping[str, str]) -> Limits:
    """The resources of this Slurm job step on its node. Values that are not numbers, and 0, count as unset.

    ``SLURM_MEM_PER_NODE`` and ``SLURM_MEM_PER_CPU`` are in MiB (``srun(1)``); 0 is Slurm's word for all there is.
    """
    cpus = number(environ.get("SLURM_CPUS_ON_NODE"))
    per_node = number(environ.get("SLURM_MEM_PER_NODE"))
    per_cpu = number(environ.get("SLURM_MEM_PER_CPU"))
    by_cpu = per_cpu * cpus if per_cpu is not None and cpus is not None else None
    mebibytes = per_node if per_node is not None else by_cpu
    return Limits(cpu_count=cpus, memory=None if mebibytes is None else mebibytes << 20)


def slurm_devices(environ: Mapping[str, str], seen: int) -> str | None:
    """The devices of this job step as a mask, None when Slurm does not say or its cgroup has hidden the others.

    ``SLURM_STEP_GPUS`` and ``SLURM_JOB_GPUS`` count the devices of the host. `seen` is how many this process sees:
    where a cgroup leaves it no others than its own they are numbered from 0, and Slurm's numbers are not theirs.
    """
    text = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or ""
    numbers = parse_cpu_list(text) if _LIST.fullmatch(text) else ()
    return ",".join(map(str, numbers)) if 0 < len(numbers) < seen else None


def cgroup_limits(root: Path = Path("/")) -> Limits:
    """The limits of this process's control groups and of all above them that it can see."""
    found = Limits()
    for version, point, top, group in _mounts(root):
        for folder in _levels(root / point.lstrip("/"), top, group):
            found = least(found, _limits_of(folder, version))
    return found


def _mounts(root: Path) -> Iterator[tuple[int, str, str, str]]:
    """The cgroup hierarchies that may have limits: the version, the point where the top group is mounted, that group,
    and the one of this process. See proc_pid_mountinfo(5) and cgroups(7)."""
    groups: dict[str, str] = {}
    """By controller; the second version has none there."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        groups |= dict.fromkeys(controllers.split(","), path)
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        top, point = (_unescaped(field) for field in fields[3:5])
        if kind[0] == "cgroup2" and "" in groups:
            yield 2, point, top, groups[""]
        elif kind[0] == "cgroup":
            mine = [name for name in kind[2].split(",") if name in ("cpu", "cpuset", "memory", "pids")]
            group = next((groups[name] for name in mine if name in groups), None)
            if group is not None:
                yield 1, point, top, group


def _levels(point: Path, top: str, inside: str) -> Iterator[Path]:
    """The folders of the group `inside` and of those above it, where the group `top` is mounted at `point`."""
    if top != "/" and f"{inside}/".startswith(f"{top.rstrip('/')}/"):
        inside = inside[len(top.rstrip("/")) :]
    folder = point / inside.strip("/")
    # In a container that shares the host's view, the group's path need not be below the mount: its top is ours then.
    if ".." in Path(inside).parts or not folder.is_dir():
        folder = point
    while True:
        yield folder
        if folder == point:
            return
        folder = folder.parent


def _limits_of(folder: Path, version: int) -> Limits:
    """The limits of one control group; a controller that is not there has no files."""
    if version == 2:
        quota, period = [*read_text(folder / "cpu.max").split(), "", ""][:2]
        cpus, memory = "cpuset.cpus.effective", "memory.max"
    else:
        quota, period = (read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        cpus, memory = "cpuset.effective_cpus", "memory.limit_in_bytes"
    size = read_number(folder / memory)
    return Limits(
        cpus=_cpu_set(folder / cpus),
        cpu_count=_whole_cpus(number(quota), number(period)),
        memory=size if size is not None and size < _V1_UNLIMITED else None,
        pids=read_number(folder / "pids.max"),
    )


_V1_UNLIMITED = 1 << 62
"""Version 1 says "no limit" with the greatest whole number of pages, a little less than 2**63."""


def _whole_cpus(quota: int | None, period: int | None) -> int | None:
    return None if quota is None or period is None else max(quota // period, 1)


def _cpu_set(path: Path) -> frozenset[int] | None:
    """None for an empty set: the group inherits from its parent."""
    text = read_text(path)
    return frozenset(parse_cpu_list(text)) if _LIST.fullmatch(text) else None


_LIST = re.compile(r"[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*")
"""``0-3,8``"""


def _unescaped(field: str) -> str:
    r"""A path of mountinfo, where ``\040`` is a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


# Checks before a job starts that one host can run as many processes as the job has ranks on it.
#
# Every figure is a lower bound: a job that passes may still find that the host is too small.

WORKER_MEMORY = 4 << 20
"""Private memory, in bytes, of a worker that was forked from a process with torch imported, before it runs user code.
Measured: 4.1 MiB; a new interpreter has more."""

PROGRAM_MEMORY = 256 << 10
"""Private memory, in bytes, of a program, which may be as small as a shell."""

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
