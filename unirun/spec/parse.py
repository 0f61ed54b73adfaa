"""From a plain mapping (what YAML, the command line and the builder give) to a checked `JobSpec`.

Every fault is collected and raised at once. Reading a value never guesses: a wrong type is named with
the place, what was expected and what was found.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unirun.errors import SpecError
from unirun.names import RUN_ID_RULE, id_stem, is_run_id
from unirun.spec.edges import read_edges
from unirun.spec.job import GROUPS, JobSpec, LogSpec, RoleSpec
from unirun.spec.read import Reader, nearest, shown
from unirun.spec.roles import JOB_WIDE_KEYS, TRAINER, SlotCounter, read_roles, read_trainer
from unirun.spec.together import group_faults, handle_faults

LOG_KEYS = (
    "dir",
    "redirects",
    "tee",
    "local_ranks_filter",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
)
JOB_KEYS = (
    "name",
    "run_id",
    "roles",
    "trainer",
    "nproc_per_node",
    "primary",
    *GROUPS,
    "spares",
    "exclude_nodes",
    "edges",
    "call_timeout",
    "transport",
    "stdin",
    "config",
    "preload",
    "master_addr",
    "master_port",
    "shutdown_timeout",
    "join_timeout",
    "sample_interval",
    "virtual_local_rank",
    "numa_binding",
    "signals",
    "event_log",
    "log",
    *JOB_WIDE_KEYS,
)
NUMA_MODES = ("node", "socket", "exclusive", "core-complex")


def parse_job(data: Mapping[str, Any], *, count_slots: SlotCounter, run_id: str) -> JobSpec:
    """The `JobSpec` that `data` describes; `run_id` is used when `data` has none.

    `data` has the keys of a job file (see ``docs/job-file.md``). Raises `SpecError` with every fault.
    What the spec names (scripts, classes, working directories) is looked for here, so that a missing one is
    told before anything starts; nothing of it is imported.
    """
    read = Reader()
    read.known(data, JOB_KEYS, "")
    roles = read_roles(read, data, count_slots)
    trainer = read_trainer(read, data, roles)
    if trainer is not None:
        read.faults += handle_faults([role.name for role in roles])
        roles.append(trainer)
    names = [role.name for role in roles]
    groups = {key: _groups(read, key, data.get(key), roles) for key in GROUPS}
    primary = read.texts(data.get("primary"), "primary") or _default_primary(roles)
    for name in primary:
        if name not in names:
            read.fault("primary", f"no role is called {name!r}", nearest(name, names))
    numa = data.get("numa_binding")
    run = read.text(data.get("run_id"), "run_id") or run_id
    if not is_run_id(run):
        read.fault("run_id", f"{run!r} is no job id", RUN_ID_RULE)
    fields: dict[str, Any] = {
        "name": read.text(data.get("name"), "name") or _job_name(roles),
        "run_id": run,
        "env": read.env(data.get("env"), "env"),
        "config": _config(read, data.get("config")),
        "preload": read.texts(data.get("preload"), "preload"),
        "master_addr": read.text(data.get("master_addr"), "master_addr") or "127.0.0.1",
        "master_port": read.integer(data.get("master_port"), "master_port", 0, 0, 65535),
        "shutdown_timeout": read.seconds(data.get("shutdown_timeout"), "shutdown_timeout", 30.0),
        "join_timeout": read.seconds(data.get("join_timeout"), "join_timeout", 60.0, 0.1),
        "sample_interval": read.seconds(data.get("sample_interval"), "sample_interval", 5.0, 0.01),
        "virtual_local_rank": read.flag(data.get("virtual_local_rank"), "virtual_local_rank"),
        "numa_binding": None if numa is None else read.choice(numa, "numa_binding", NUMA_MODES, "node"),
        "signals": _signals(read, data.get("signals")),
        "event_log": read.choice(data.get("event_log"), "event_log", ("null", "console"), "null"),
        "log": _log(read, data.get("log")),
        **groups,
        "spares": read.integer(data.get("spares"), "spares", 0, 0),
        "exclude_nodes": _node_names(read, data.get("exclude_nodes")),
        "edges": read_edges(read, data.get("edges")),
        "call_timeout": read.seconds(data.get("call_timeout"), "call_timeout", 1800.0, 0.001),
        "transport": read.choice(data.get("transport"), "transport", ("socket", "torch"), "socket"),
        "stdin": _stdin(read, data.get("stdin"), roles),
    }
    if read.faults:
        raise SpecError(read.faults)
    return JobSpec(roles=tuple(roles), primary=primary, **fields)


def _default_primary(roles: Sequence[RoleSpec]) -> tuple[str, ...]:
    """The trainer; without one all roles that end by themselves, which workloads do not."""
    kinds = {role.name: role.entry.kind for role in roles}
    if "trainer" in kinds.values():
        return (TRAINER,)
    return tuple(name for name, kind in kinds.items() if kind != "workload") or tuple(kinds)


def _groups(read: Reader, key: str, value: Any, roles: Sequence[RoleSpec]) -> tuple[tuple[str, ...], ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        read.fault(key, f"expected a list of lists of roles, found {shown(value)}", "write [[a, b]]")
        return ()
    groups = []
    for number, group in enumerate(value):
        where = f"{key}[{number}]"
        if isinstance(group, list | tuple):
            groups.append(read.texts(group, where))
        else:
            read.fault(where, f"expected a list of roles, found {shown(group)}", "write [[a, b]]")
    read.faults += group_faults(key, groups, roles)
    return tuple(groups)


def _node_names(read: Reader, value: Any) -> tuple[str, ...]:
    """Names of hosts, each once. Whether there are such nodes is not known here."""
    names = tuple(dict.fromkeys(read.texts(value, "exclude_nodes")))
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}", name):
            read.fault("exclude_nodes", f"{name!r} is no name of a node", "name each one: [node3, node7]")
    return names


def _config(read: Reader, value: Any) -> dict[str, Any]:
    """The user's part: whatever workers can be sent as JSON."""
    config = read.mapping(value, "config")
    try:
        json.dumps(config, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        read.fault("config", f"cannot be sent to workers as JSON: {error}", "quote it, workers convert it")
    return config


def _job_name(roles: list[RoleSpec]) -> str:
    for role in roles:
        if role.entry.target:
            return id_stem(Path(role.entry.target).name.split(":")[0].removesuffix(".py"))
    return "job"


def _stdin(read: Reader, value: Any, roles: Sequence[RoleSpec]) -> str | None:
    """A worker that is there in any case, as ``actor:0``."""
    text = read.text(value, "stdin")
    if not text:
        return None
    name, _, rank = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,9}", rank) or not name:
        read.fault("stdin", f"{shown(text)} is no worker", "write ROLE:RANK, for example actor:0")
        return None
    counts = {role.name: role.least or role.count for role in roles}
    if name not in counts:
        read.fault("stdin", f"no role is called {name!r}", nearest(name, list(counts)))
    elif int(rank) >= counts[name]:
        read.fault("stdin", f"there is no {text}: the ranks of {name} are 0 to {counts[name] - 1}")
    return f"{name}:{int(rank)}"


def _signals(read: Reader, value: Any) -> tuple[str, ...]:
    if value is None:
        return ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    names = read.texts(value, "signals")
    for name in names:
        if not name.startswith("SIG") or name not in signal.Signals.__members__:
            read.fault("signals", f"{name!r} is no signal", nearest(name, list(signal.Signals.__members__)))
        elif name in ("SIGKILL", "SIGSTOP"):
            read.fault("signals", f"{name} cannot be handled by any process")
    return names


def _log(read: Reader, value: Any) -> LogSpec:
    fields = read.mapping(value, "log")
    read.known(fields, LOG_KEYS, "log")
    streams = {}
    for key in ("redirects", "tee"):
        text = str(fields.get(key) if fields.get(key) is not None else "0")
        if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
            read.fault(f"log.{key}", f"expected 0, 1, 2, 3 or RANK:N,RANK:N, found {shown(text)}")
        streams[key] = text
    ranks = fields.get("local_ranks_filter")
    numbers: tuple[int, ...] | None = None
    if ranks is not None:
        items = ranks.split(",") if isinstance(ranks, str) else ranks
        items = items if isinstance(items, list | tuple) else [items]
        numbers = tuple(read.integer(item, "log.local_ranks_filter", 0, 0) for item in items)
    return LogSpec(
        dir=read.text(fields.get("dir"), "log.dir") or None,
        local_ranks_filter=numbers,
        duplicate_stdout_filters=read.texts(
            fields.get("duplicate_stdout_filters"), "log.duplicate_stdout_filters"
        ),
        duplicate_stderr_filters=read.texts(
            fields.get("duplicate_stderr_filters"), "log.duplicate_stderr_filters"
        ),
        **streams,
    )
