"""From a plain mapping (what YAML, the command line and the builder give) to a checked `JobSpec`.

All faults are collected and raised at once. No value is guessed: a wrong type is a fault that has the place, what was
expected and what was found.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unirun.errors import Fault, SpecError
from unirun.spec.engines import with_companions
from unirun.spec.job import GROUPS, PORT_RANGE, JobSpec, LogSpec, RoleSpec, read_channels, read_edges
from unirun.spec.programs import program_faults
from unirun.spec.read import RUN_ID_RULE, Section, id_stem, is_run_id, nearest, shown
from unirun.spec.roles import (
    ELSEWHERE,
    JOB_WIDE_KEYS,
    NAME,
    ONE_NODE,
    ROLE_KEYS,
    TRAINER,
    NodeCount,
    SlotCounter,
    read_roles,
    read_trainer,
)
from unirun.spec.secrets import check_env_file, read_secrets

# Checks of groups of roles, and of the names under which a trainer finds roles.

SHARING = ("collocations", "host_collocations")
"""Kinds of groups of which a role is in one at most."""

WHAT_GROUPS_SAY = {
    "collocations": "share devices",
    "host_collocations": "are on one node",
    "separations": "are on different nodes",
    "isolations": "are on different NUMA nodes",
}


def group_faults(key: str, groups: Sequence[Sequence[str]], roles: Sequence[RoleSpec]) -> list[Fault]:
    """The faults of the `groups` of roles that a job file has under `key`.

    A role may be in several groups of one kind, except groups that share. Contradictions between groups, and numbers of
    ranks that do not fit them, are found by the planner.
    """
    known = {role.name for role in roles if role.entry.kind != "trainer"}
    without = {
        role.name: "has no slots" if role.name in known else "is the trainer, which uses no device"
        for role in roles
        if not role.takes_slots
    }
    faults: list[Fault] = []
    home: dict[str, int] = {}
    for number, group in enumerate(groups):
        where = f"{key}[{number}]"
        if len(set(group)) < 2:
            remedy = f"name those that {WHAT_GROUPS_SAY[key]}"
            faults.append(Fault(where, f"{[*group]} names fewer than two roles", remedy))
        for name in group:
            if name in without and key == "collocations":
                faults.append(Fault(where, f"{name!r} {without[name]}", "leave it out"))
            elif name not in known and name not in without:
                faults.append(Fault(where, f"no role is called {name!r}", nearest(name, [*known])))
            elif name in home and (key in SHARING or home[name] == number):
                other = f"{key}[{home[name]}]"
                twice = "twice" if home[name] == number else f"in {other} as well"
                faults.append(Fault(where, f"role {name!r} is there {twice}", "name each role once"))
            home.setdefault(name, number)
    return [*dict.fromkeys(faults)]


def handle_faults(roles: Sequence[str]) -> list[Fault]:
    """Faults for roles with one name in the trainer: ``actor`` and ``Actor`` are both ``RG_ACTOR``."""
    first: dict[str, str] = {}
    faults = []
    for name in roles:
        handle = handle_name(name)
        other = first.setdefault(handle, name)
        if other != name:
            problem = f"the trainer would find both {other!r} and {name!r} as {handle}"
            faults.append(Fault(f"roles.{name}", problem, "rename one of them"))
    return faults


def handle_name(role: str) -> str:
    """The name under which the trainer finds `role`: ``udf-1`` is ``RG_UDF_1``."""
    return f"RG_{role.upper().replace('-', '_')}"


LOG_KEYS = LogSpec.__struct_fields__
_FIELDS = tuple(name for name in JobSpec.__struct_fields__ if name != "most_nodes")
JOB_KEYS = tuple(dict.fromkeys((*_FIELDS, "trainer", "nproc_per_node", *JOB_WIDE_KEYS)))
OF_ROLES = {
    **dict.fromkeys(set(ROLE_KEYS) - set(JOB_KEYS), "it is a key of a role: write it below roles: NAME:"),
    **{key: f"in a role, below roles: NAME:, {remedy}" for key, remedy in ELSEWHERE.items()},
}
"""Keys that stand in a role, and not beside ``roles``, ours and those of other launchers."""
NUMA_MODES = ("node", "socket", "exclusive", "core-complex")


def parse_job(
    data: Mapping[str, Any],
    *,
    count_slots: SlotCounter,
    run_id: str,
    nodes: NodeCount = ONE_NODE,
    here: bool = True,
) -> JobSpec:
    """The `JobSpec` that `data` describes; `run_id` is used when `data` has none. `nodes` is how many it will have.

    `data` has the keys of a job file (see ``docs/job-file.md``). Raises `SpecError` with every fault.
    Scripts, classes and working directories that the spec names must exist; none is imported. Without `here` the job
    runs where other modules may be, as in a container.
    """
    job = Section(data, here=here)
    job.known(JOB_KEYS, OF_ROLES)
    roles = read_roles(job, count_slots, nodes)
    trainer = read_trainer(job, roles)
    if trainer is not None:
        roles.append(trainer)
    names = [role.name for role in roles]
    groups = {key: _groups(job, key, roles) for key in GROUPS}
    primary = job.texts("primary") or _default_primary(roles)
    for name in primary:
        if name not in names:
            job.fault("primary", f"no role is called {name!r}", nearest(name, names))
    run = job.text("run_id") or run_id
    if not is_run_id(run):
        job.fault("run_id", f"{run!r} is no job id", RUN_ID_RULE)
    fields: dict[str, Any] = {
        "name": job.text("name") or _job_name(roles),
        "run_id": run,
        "env": job.env("env"),
        "config": _config(job),
        "preload": job.texts("preload"),
        "max_job_restarts": job.integer("max_job_restarts", 0, 0),
        "restart_window": job.seconds("restart_window", 0.0),
        "restart_delay": job.seconds("restart_delay", 0.0),
        "master_addr": job.text("master_addr") or "127.0.0.1",
        "master_port": job.integer("master_port", 0, 0, 65535),
        "shutdown_timeout": job.seconds("shutdown_timeout", 30.0),
        "join_timeout": job.seconds("join_timeout", 60.0, 0.1),
        "sample_interval": job.seconds("sample_interval", 5.0, 0.01),
        "virtual_local_rank": job.flag("virtual_local_rank"),
        "numa_binding": job.choice("numa_binding", NUMA_MODES, "") or None,
        "signals": _signals(job),
        "event_log": job.choice("event_log", ("null", "console"), "null"),
        "log": _log(job.section("log")),
        **groups,
        "spares": job.integer("spares", 0, 0),
        "exclude_nodes": _node_names(job),
        "edges": read_edges(job),
        "channels": read_channels(job, names),
        "call_timeout": job.seconds("call_timeout", 1800.0, 0.001),
        "transport": job.choice("transport", ("socket", "torch"), "socket"),
        "stdin": _stdin(job, roles),
        "port_range": _port_range(job),
        "env_file": check_env_file(job),
        "notify_command": job.text("notify_command"),
        "secret": read_secrets(
            job, [("env", job.mapping("env")), *((f"roles.{role.name}.env", role.env) for role in roles)]
        ),
    }
    job.faults += program_faults(roles, fields["env"])
    fields["channels"], companions, edges, faults = with_companions(fields["channels"], roles)
    # A job without edges has roles of which it says nothing.
    fields["edges"] += tuple(edges) if fields["edges"] else ()
    job.faults += faults
    if trainer is not None:
        job.faults += handle_faults([role.name for role in (*roles, *companions) if role is not trainer])
    for role in companions:
        if not NAME.fullmatch(role.name):
            problem = f"{role.name}, which brings weights into it, is too long a name for a role"
            job.fault(f"roles.{role.beside}", problem, "give it a shorter name")
    for name in primary:
        if any(role.name == name and role.service for role in roles):
            problem = f"{name} is a service, which is needed until the primary roles have ended"
            job.fault("primary", problem, "leave out service: true, or name another role")
    if job.faults:
        # The value of a key of the job is read for each role.
        raise SpecError([*dict.fromkeys(job.faults)])
    return JobSpec(roles=(*roles, *companions), primary=primary, **fields)


def _default_primary(roles: Sequence[RoleSpec]) -> tuple[str, ...]:
    """The trainer; without one all roles that end by themselves, which workloads and services do not."""
    kinds = {role.name: role.entry.kind for role in roles if not role.service}
    if "trainer" in kinds.values():
        return (TRAINER,)
    return tuple(name for name, kind in kinds.items() if kind != "workload") or tuple(kinds)


def _port_range(job: Section) -> tuple[int, int]:
    """``20000-29999``."""
    if not job.given("port_range"):
        return PORT_RANGE
    text = str(job.fields["port_range"])
    found = re.fullmatch(r"(\d{1,5})\s*-\s*(\d{1,5})", text)
    low, high = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < low <= high < 65536:
        job.fault("port_range", f"expected two numbers of ports, found {shown(text)}", "write 20000-29999")
        return PORT_RANGE
    return low, high


def _groups(job: Section, key: str, roles: Sequence[RoleSpec]) -> tuple[tuple[str, ...], ...]:
    groups = []
    items = job.items(key, "lists of roles", "write [[a, b]]")
    for where, group in items.fields.items():
        if isinstance(group, list | tuple):
            groups.append(items.texts(where))
        else:
            items.fault(where, f"expected a list of roles, found {shown(group)}", "write [[a, b]]")
    job.faults += group_faults(key, groups, roles)
    return tuple(groups)


def _node_names(job: Section) -> tuple[str, ...]:
    """Names of hosts, each once. Whether there are such nodes is not known here."""
    names = tuple(dict.fromkeys(job.texts("exclude_nodes")))
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}", name):
            job.fault("exclude_nodes", f"{name!r} is no name of a node", "name each one: [node3, node7]")
    return names


def _config(job: Section) -> dict[str, Any]:
    """The user's own configuration, which workers are sent as JSON."""
    config = job.mapping("config")
    try:
        json.dumps(config, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        job.fault("config", f"cannot be sent to workers as JSON: {error}", "quote it, workers convert it")
    return config


def _job_name(roles: list[RoleSpec]) -> str:
    for role in roles:
        if role.entry.target:
            return id_stem(Path(role.entry.target).name.split(":")[0].removesuffix(".py"))
    return "job"


def _stdin(job: Section, roles: Sequence[RoleSpec]) -> str | None:
    """A worker, as ``actor:0``, whose rank exists even with the least count."""
    text = job.text("stdin")
    if not text:
        return None
    name, _, rank = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,9}", rank) or not name:
        job.fault("stdin", f"{shown(text)} is no worker", "write ROLE:RANK, for example actor:0")
        return None
    counts = {role.name: role.least or role.count for role in roles}
    if name not in counts:
        job.fault("stdin", f"no role is called {name!r}", nearest(name, list(counts)))
    elif int(rank) >= counts[name]:
        job.fault("stdin", f"there is no {text}: the ranks of {name} are 0 to {counts[name] - 1}")
    return f"{name}:{int(rank)}"


def _signals(job: Section) -> tuple[str, ...]:
    if not job.given("signals"):
        return ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    names = job.texts("signals")
    for name in names:
        if not name.startswith("SIG") or name not in signal.Signals.__members__:
            job.fault("signals", f"{name!r} is no signal", nearest(name, list(signal.Signals.__members__)))
        elif name in ("SIGKILL", "SIGSTOP"):
            job.fault("signals", f"{name} cannot be handled by any process")
    return names


def _log(log: Section) -> LogSpec:
    log.known(LOG_KEYS)
    streams = {}
    for key in ("redirects", "tee"):
        text = str(log.fields[key]) if log.given(key) else "0"
        if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
            log.fault(key, f"expected 0, 1, 2, 3 or RANK:N,RANK:N, found {shown(text)}")
        streams[key] = text
    ranks = log.fields.get("local_ranks_filter")
    numbers: tuple[int, ...] | None = None
    if ranks is not None:
        items = ranks.split(",") if isinstance(ranks, str) else ranks
        items = items if isinstance(items, list | tuple) else [items]
        numbers = tuple(log.as_integer("local_ranks_filter", item, 0, 0) for item in items)
    return LogSpec(
        dir=log.text("dir") or None,
        local_ranks_filter=numbers,
        duplicate_stdout_filters=log.texts("duplicate_stdout_filters"),
        duplicate_stderr_filters=log.texts("duplicate_stderr_filters"),
        line_prefix_template=log.text("line_prefix_template") or None,
        **streams,
    )
