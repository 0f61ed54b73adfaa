"""Compare the properties of two processes that are inherited at start and cannot be changed in a fork.

The umask, the working directory, the environment and the session are set in the fork, so they are not compared. Nor are
the session keyring and the audit session, which do not affect a program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from unirun.launcher.environment import counts_at_import
from unirun.launcher.warm import files
from unirun.launcher.warm.files import folders_of, found_elsewhere
from unirun.values import Value
from unirun.wire.reports import Borrow

_STATUS = (
    *("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
    *(
        "NoNewPrivs",
        "Seccomp",
        "Seccomp_filters",
        "Cpus_allowed_list",
        "Mems_allowed_list",
        "SigBlk",
        "THP_enabled",
    ),
)
"""Lines of ``/proc/PID/status``."""

_FILES = (
    *("cgroup", "oom_score_adj", "personality", "coredump_filter", "timerslack_ns"),
    *("attr/current", "loginuid"),
)
"""Files of ``/proc/PID``. A kernel may lack the last two, and Yama hides some of other processes."""

_IOPRIO_GET = {"x86_64": 252, "aarch64": 31, "riscv64": 31, "ppc64le": 274, "s390x": 283}
"""Number of the system call, for which libc has no function."""

_OF_LIBRARIES = (
    "GFORTRAN_",
    "GOTO_",
    "I_MPI_",
    "INTEL_LIBITTNOTIFY",
    "MPI_LOCALNRANKS",
    "NUMPY_",
    "OMPI_",
    "ACC_DEVICE_",
    "FSSPEC_",
)
"""Prefixes of variables that libraries of torch and numpy read in C when loaded, and fsspec in a copy of all variables,
besides `counts_at_import`."""

_OWN_SIGNALS = sum(1 << (number - 1) for number in (1, 2, 3, 10, 12, 13, 15, 25))
"""HUP, INT, QUIT, USR1, USR2, PIPE, TERM, XFSZ: unirun and Python decide whether these are ignored."""

_STAT = {"priority": 15, "nice": 16, "scheduling policy": 38}
"""Fields of ``/proc/PID/stat``, counted from the one after the name."""

DESCRIPTION, SOCKET = "warm.json", "socket"
"""Files in the folder of a warm process."""

_libc = ctypes.CDLL(None)

State = dict[str, str]
"""Properties by name, as text for users."""


def state_of(pid: int | str = "self") -> State:
    """Read the state of process `pid` from the kernel, as far as this process may see it. Raises OSError when the
    process is gone or belongs to another user."""
    place = Path(f"/proc/{pid}")
    state = {f"namespace {each.name}": os.readlink(each) for each in sorted((place / "ns").iterdir())}
    state["root directory"] = os.readlink(place / "root")
    for line in (place / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in _STATUS:
            state[name] = value.strip()
        elif name == "SigIgn":
            state["ignored signals"] = f"{int(value, 16) & ~_OWN_SIGNALS:016x}"
    for name in _FILES:
        try:
            state[name] = (place / name).read_text().rstrip("\0\n")
        except OSError:
            if not place.exists():
                raise
    with contextlib.suppress(OSError), (place / "numa_maps").open(buffering=256) as maps:
        # The process's policy, as numactl sets it: the first mapping, the executable's, has no other policy.
        state["memory policy"] = maps.readline().split()[1]
    if number := _IOPRIO_GET.get(os.uname().machine):
        state["I/O priority"] = str(_libc.syscall(number, 1, 0 if pid == "self" else pid))
    fields = (place / "stat").read_text().rpartition(")")[2].split()
    state |= {name: fields[index] for name, index in _STAT.items()}
    for line in (place / "limits").read_text().splitlines()[1:]:
        name, soft, hard = line[:26].strip(), *line[26:].split()[:2]
        # Agents raise the soft limit of descriptors; workers get the old one back.
        state[f"limit {name}"] = hard if name == "Max open files" else f"{soft} {hard}"
    return state


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Pid and user id of the process at the other end of a socket."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Describe the differences; `there` is the warm process."""
    return [
        f"{name} is {_shown(here, name)}, there {_shown(there, name)}"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]


def _shown(values: Mapping[str, str], name: str) -> str:
    return f"{values[name]!r:.80}" if name in values else "not set"


class Description(Value):
    """The description of a warm process in a file beside its socket.

    `unirun`: location of this package. `path`: the folders of its PYTHONPATH. `imported`: its top-level modules and
    their files. `variables`: those that its imports have read or that are read when libraries are loaded, None when
    unset; with `every_variable`, some import has read all of them.
    """

    pid: int
    began: float
    idle: float
    executable: str
    unirun: str
    path: tuple[str, ...]
    modules: tuple[str, ...]
    imported: dict[str, str]
    every_variable: bool
    variables: dict[str, str | None]


def counts_in_warm(name: str) -> bool:
    """Return True if a variable must be equal for a fork to be like a new process."""
    return counts_at_import(name) or name.startswith(_OF_LIBRARIES)


def unlike(there: Description, wanted: Borrow) -> list[str]:
    """Describe why a fork of that process cannot be the wanted spawner; empty when it can."""
    reasons = []
    if wanted.executable != there.executable:
        reasons.append(f"Python is {wanted.executable}, there {there.executable}")
    if wanted.unirun != there.unirun:
        reasons.append(f"unirun is {wanted.unirun}, there {there.unirun}")
    path = folders_of(wanted.env.get(files.VARIABLE), wanted.cwd)
    if why := found_elsewhere(there.path, path, there.imported):
        reasons.append(why)
    if more := [name for name in there.modules if name not in wanted.modules]:
        reasons.append(f"it has imported {', '.join(more)}, which this job does not --preload")
    names = {*there.variables, *filter(counts_in_warm, wanted.env)}
    if there.every_variable:
        names |= set(wanted.env) - OF_SHELLS
    names.discard(files.VARIABLE)
    here = {name: wanted.env[name] for name in names if name in wanted.env}
    known = {name: value for name, value in there.variables.items() if value is not None and name in names}
    return reasons + differences(here, known)


OF_SHELLS = frozenset(("_", "OLDPWD", "PWD", "SHLVL"))
"""Variables that a shell sets for each command."""
