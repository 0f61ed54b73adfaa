"""From a plain mapping (what YAML and the command line both give) to a checked `JobSpec`.

Every fault is collected and raised at once. Reading a value never guesses: a wrong type is named with
the place, what was expected and what was found.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unirun.errors import Fault, SpecError
from unirun.spec.job import Entry, EntryKind, JobSpec, LogSpec, RoleSpec, StartMethod

SlotCounter = Callable[[str], int]
"""Turns ``auto``, ``cpu`` or ``gpu`` into how many workers that is on this node. Raises UnirunError."""

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,62}")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ENTRY_KINDS: tuple[EntryKind, ...] = ("script", "module", "program", "workload")
ROLE_KEYS = (*ENTRY_KINDS, "count", "args", "env", "cwd", "max_restarts", "start_method")
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
    "nproc_per_node",
    "primary",
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
    *(key for key in ROLE_KEYS if key != "count"),
)
NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
START_METHODS: dict[str, StartMethod] = {
    "fork": "fork",
    "forkserver": "fork",
    "exec": "exec",
    "spawn": "exec",
}
RESERVED_ENV = frozenset(
    prefix + name
    for prefix, names in {
        "": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        "GROUP_": ("RANK", "WORLD_SIZE"),
        "ROLE_": ("NAME", "RANK", "WORLD_SIZE"),
        "TORCHELASTIC_": ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS", "ERROR_FILE", "USE_AGENT_STORE"),
    }.items()
    for name in names
)
MAX_COUNT = 1_000_000


def nearest(word: str, words: tuple[str, ...] | list[str]) -> str:
    """``did you mean 'actor'?`` or, when nothing is near, the list of what there is."""
    close = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(words))}"


class _Reader:
    """Reads typed values out of mappings and collects the faults on the way."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def fault(self, where: str, problem: str, remedy: str = "") -> None:
        self.faults.append(Fault(where, problem, remedy))

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        if value is None:
            return {}
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return dict(value)
        self.fault(where, f"expected a mapping with names as keys, found {value!r}")
        return {}

    def known(self, mapping: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
        for key in mapping:
            if key not in keys:
                self.fault(f"{where}.{key}" if where else key, "unknown key", nearest(key, keys))

    def text(self, value: Any, where: str, default: str = "") -> str:
        if value is None:
            return default
        if isinstance(value, str) and _can_be_passed_on(value):
            return value
        self.fault(where, f"expected a text, found {value!r}")
        return default

    def texts(self, value: Any, where: str) -> tuple[str, ...]:
        if value is None:
            return ()
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list | tuple) and all(isinstance(v, str | int | float) for v in value):
            return tuple(self.text(str(v), where) for v in value)
        self.fault(where, f"expected a list of texts, found {value!r}")
        return ()

    def integer(self, value: Any, where: str, default: int, least: int, most: int = MAX_COUNT) -> int:
        if value is None:
            return default
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,12}", value.strip()):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fault(where, f"expected a whole number, found {value!r}")
            return default
        if not least <= value <= most:
            self.fault(where, f"expected a number from {least} to {most}, found {value}")
            return default
        return value

    def seconds(self, value: Any, where: str, default: float, least: float = 0.0) -> float:
        if value is None:
            return default
        try:
            number = float(value) if not isinstance(value, bool) else float("nan")
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if not least <= number < 1e9:
            self.fault(where, f"expected a number of seconds, at least {least:g}, found {value!r}")
            return default
        return number

    def flag(self, value: Any, where: str) -> bool:
        if value is None:
            return False
        if isinstance(value, bool):
            return value
        self.fault(where, f"expected true or false, found {value!r}")
        return False

    def choice(self, value: Any, where: str, choices: tuple[str, ...], default: str) -> str:
        if value is None:
            return default
        if isinstance(value, str) and value in choices:
            return value
        self.fault(where, f"expected one of {', '.join(choices)}, found {value!r}")
        return default

    def env(self, value: Any, where: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for key, item in self.mapping(value, where).items():
            if not ENV_NAME.fullmatch(key):
                self.fault(f"{where}.{key}", "not a name for an environment variable")
            elif key in RESERVED_ENV or key.startswith("UNIRUN_"):
                self.fault(f"{where}.{key}", "unirun sets this for every worker itself")
            elif isinstance(item, bool) or not isinstance(item, str | int | float):
                self.fault(f"{where}.{key}", f"expected a text or a number, found {item!r}", "quote it")
            else:
                found[key] = self.text(str(item), f"{where}.{key}")
        return found


def _can_be_passed_on(text: str) -> bool:
    """Whether a process can get `text` as an argument, in its environment or as a path."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def parse_job(data: Mapping[str, Any], *, count_slots: SlotCounter, run_id: str) -> JobSpec:
    """The `JobSpec` that `data` describes; `run_id` is used when `data` has none.

    `data` has the keys of a job file (see ``docs/job-file.md``). Raises `SpecError` with every fault.
    Files that the spec names (scripts, working directories) are looked for here, so that a missing one is
    told before anything starts.
    """
    read = _Reader()
    read.known(data, JOB_KEYS, "")
    roles = _roles(read, data, count_slots)
    names = [role.name for role in roles]
    primary = read.texts(data.get("primary"), "primary") or tuple(names)
    for name in primary:
        if name not in names:
            read.fault("primary", f"no role is called {name!r}", nearest(name, names))
    numa = data.get("numa_binding")
    run = read.text(data.get("run_id"), "run_id") or run_id
    if not NAME.fullmatch(run) and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", run):
        read.fault("run_id", f"{run!r} is no job id", "use letters, digits, '.', '-' and '_', at most 63")
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
    }
    if read.faults:
        raise SpecError(read.faults)
    return JobSpec(roles=tuple(roles), primary=primary, **fields)


def _roles(read: _Reader, data: Mapping[str, Any], count_slots: SlotCounter) -> list[RoleSpec]:
    raw = read.mapping(data.get("roles"), "roles")
    if not raw and not read.faults:
        raw = {"default": {}}
    default_entry = _entry(read, data, "", None)
    roles = []
    for name, value in raw.items():
        where = f"roles.{name}"
        if not NAME.fullmatch(name):
            read.fault(where, f"{name!r} is no name for a role", "a letter, then letters, digits, '-' or '_'")
        fields = read.mapping(value, where) if isinstance(value, Mapping) else {"count": value}
        read.known(fields, ROLE_KEYS, where)
        roles.append(_role(read, name, fields, data, default_entry, count_slots))
    return roles


def _role(
    read: _Reader,
    name: str,
    fields: dict[str, Any],
    job: Mapping[str, Any],
    default_entry: Entry,
    count_slots: SlotCounter,
) -> RoleSpec:
    where = f"roles.{name}"
    entry = _entry(read, fields, where, default_entry)
    cwd = read.text(fields.get("cwd", job.get("cwd")), f"{where}.cwd") or None
    if cwd is not None and not os.path.isdir(cwd):
        read.fault(f"{where}.cwd", f"{cwd!r} is no directory")
    method = fields.get("start_method", job.get("start_method"))
    chosen = read.choice(method, f"{where}.start_method", tuple(START_METHODS), "fork")
    if not entry.target:
        read.fault(where, "nothing to run", f"name a script, or one for this role: --script {name}=FILE")
    else:
        _check_target(read, entry, cwd, where)
    return RoleSpec(
        name=name,
        count=_count(read, fields.get("count", job.get("nproc_per_node", 1)), f"{where}.count", count_slots),
        entry=entry,
        env=read.env(fields.get("env"), f"{where}.env"),
        cwd=cwd,
        max_restarts=read.integer(
            fields.get("max_restarts", job.get("max_restarts")), f"{where}.max_restarts", 0, 0
        ),
        start_method="exec" if entry.kind == "program" else START_METHODS[chosen],
    )


def _count(read: _Reader, value: Any, where: str, count_slots: SlotCounter) -> int:
    if isinstance(value, str) and value in ("auto", "cpu", "gpu", "xpu"):
        try:
            return count_slots(value)
        except ValueError as error:
            read.fault(where, str(error))
            return 1
    return read.integer(value, where, 1, 1)


def _entry(read: _Reader, fields: Mapping[str, Any], where: str, default: Entry | None) -> Entry:
    """The entry in `fields`; what they leave out (the target, the arguments) comes from `default`."""
    given = [kind for kind in ENTRY_KINDS if fields.get(kind) is not None]
    if len(given) > 1:
        read.fault(where, f"{' and '.join(given)} are given", "a role runs one of them")
    args = default.args if default else ()
    if fields.get("args") is not None:
        args = read.texts(fields["args"], f"{where}.args" if where else "args")
    if given:
        target = read.text(fields[given[0]], f"{where}.{given[0]}" if where else given[0])
        return Entry(given[0], target, args)
    return Entry(default.kind, default.target, args) if default else Entry("script", "", args)


def _check_target(read: _Reader, entry: Entry, cwd: str | None, where: str) -> None:
    if entry.kind == "script":
        # os.path answers False where pathlib raises: a name too long, a directory that may not be entered.
        path = Path(cwd or ".", entry.target)
        if os.path.isdir(path) and not os.path.isfile(path / "__main__.py"):
            read.fault(where, f"script {entry.target!r} is a directory", "name the file in it")
        elif not os.path.exists(path):
            looked = os.path.abspath(path.parent)
            read.fault(where, f"script {entry.target!r} does not exist", f"looked in {looked}")
        elif not os.access(path, os.R_OK):
            read.fault(where, f"script {entry.target!r} cannot be read", "check its permissions")
    elif entry.kind == "program":
        if shutil.which(entry.target) is None and not os.path.isfile(Path(cwd or ".", entry.target)):
            read.fault(where, f"program {entry.target!r} is not found", "give its path, or check PATH")
    elif entry.kind == "workload":
        if not re.fullmatch(r"[\w.]+:[\w.]+", entry.target):
            read.fault(where, f"workload {entry.target!r} is not of the form pkg.mod:Class")
        else:
            read.fault(
                where, f"workload {entry.target!r} cannot be run by this version", "use a script for now"
            )


def _config(read: _Reader, value: Any) -> dict[str, Any]:
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
            stem = Path(role.entry.target).name.split(":")[0].removesuffix(".py")
            return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-") or "job"
    return "job"


def _signals(read: _Reader, value: Any) -> tuple[str, ...]:
    if value is None:
        return ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    names = read.texts(value, "signals")
    for name in names:
        if not name.startswith("SIG") or name not in signal.Signals.__members__:
            read.fault("signals", f"{name!r} is no signal", nearest(name, list(signal.Signals.__members__)))
        elif name in ("SIGKILL", "SIGSTOP"):
            read.fault("signals", f"{name} cannot be handled by any process")
    return names


def _log(read: _Reader, value: Any) -> LogSpec:
    fields = read.mapping(value, "log")
    read.known(fields, LOG_KEYS, "log")
    streams = {}
    for key in ("redirects", "tee"):
        text = str(fields.get(key) if fields.get(key) is not None else "0")
        if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
            read.fault(f"log.{key}", f"expected 0, 1, 2, 3 or RANK:N,RANK:N, found {text!r}")
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
