"""The key of a warm process: all that a fork of it has from its start and cannot change.

A job and a warm process have the same key, or the job starts cold. The umask, the working directory, the environment
and the session are set in the fork, so they are not part of it. Nor are the session keyring and the audit session,
which do not affect a program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Container, Mapping
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
"""Files of ``/proc/self``. A kernel may lack the last two."""

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

_OWN_SIGNALS = sum(1 << (number - 1) for number in (1, 2, 3, 10, 12, 13, 15, 25, 32, 33))
"""HUP, INT, QUIT, USR1, USR2, PIPE, TERM, XFSZ: unirun and Python decide whether these are ignored. The last two are
those of glibc's threads, which takes them when it needs them."""

_STAT = {"priority": 15, "nice": 16, "scheduling policy": 38}
"""Fields of ``/proc/PID/stat``, counted from the one after the name."""

DESCRIPTION, SOCKET = "warm.json", "socket"
"""Files in the folder of a warm process."""

_libc = ctypes.CDLL(None)


def state_of() -> dict[str, str]:
    """The properties of this process, by name, as text for users: its program, and what the kernel has of it."""
    place = Path("/proc/self")
    state = {"Python": sys.executable, "unirun": str(Path(__file__).parents[2])}
    state |= {f"namespace {each.name}": os.readlink(each) for each in sorted((place / "ns").iterdir())}
    state["root directory"] = os.readlink(place / "root")
    for line in (place / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in _STATUS:
            state[name] = value.strip()
        elif name == "SigIgn":
            state["ignored signals"] = f"{int(value, 16) & ~_OWN_SIGNALS:016x}"
    for name in _FILES:
        with contextlib.suppress(OSError):
            state[name] = (place / name).read_text().rstrip("\0\n")
    with contextlib.suppress(OSError), (place / "numa_maps").open(buffering=256) as maps:
        # The process's policy, as numactl sets it: the first mapping, the executable's, has no other policy.
        state["memory policy"] = maps.readline().split()[1]
    if number := _IOPRIO_GET.get(os.uname().machine):
        state["I/O priority"] = str(_libc.syscall(number, 1, 0))
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

    `modules`: those to preload. `path`: the folders of its PYTHONPATH. `imported`: its top-level modules and their
    files. `names`: the variables that its imports have read, None when some import has read all of them. Its key is
    `variables` (`variables_that_count`) and `state` (`state_of`).
    """

    pid: int
    began: float
    idle: float
    modules: tuple[str, ...]
    path: tuple[str, ...]
    imported: dict[str, str]
    names: tuple[str, ...] | None
    variables: dict[str, str]
    state: dict[str, str]


def counts_in_warm(name: str) -> bool:
    """Return True if a variable must be equal for a fork to be like a new process."""
    return name == "HOME" or counts_at_import(name) or name.startswith(_OF_LIBRARIES)


def variables_that_count(env: Mapping[str, str], names: Container[str] | None) -> dict[str, str]:
    """The part of `env` that is in the key: what libraries read when they are loaded, and `names`; all with None.
    PYTHONPATH is compared by itself (`found_elsewhere`)."""
    return {
        name: value
        for name, value in env.items()
        if (counts_in_warm(name) or (name not in OF_SHELLS if names is None else name in names))
        and name != files.VARIABLE
    }


def unlike(there: Description, wanted: Borrow, state: Mapping[str, str]) -> list[str]:
    """Describe why a fork of that process cannot be the spawner that a process with `state` wants; empty when it
    can."""
    reasons = []
    path = folders_of(wanted.env.get(files.VARIABLE), wanted.cwd)
    if why := found_elsewhere(there.path, path, there.imported):
        reasons.append(why)
    if more := [name for name in there.modules if name not in wanted.modules]:
        reasons.append(f"it has imported {', '.join(more)}, which this job does not --preload")
    variables = variables_that_count(wanted.env, there.names)
    return [*reasons, *differences(variables, there.variables), *differences(state, there.state)]


OF_SHELLS = frozenset(("_", "OLDPWD", "PWD", "SHLVL"))
"""Variables that a shell sets for each command."""
