"""Parses the roles of a job: entry, number of ranks, environment, restarts and needs of each."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from msgspec.structs import replace

from unirun.errors import Fault
from unirun.spec.engines import ready_made
from unirun.spec.entries import missing_entry
from unirun.spec.job import FIRST_STEP_TIMEOUT, Contract, Entry, EntryKind, RoleSpec, StartMethod, Stragglers
from unirun.spec.programs import (
    JOB_WIDE_PROGRAM_KEYS,
    PROGRAM_KEYS,
    SERVICE_RESTARTS,
    read_contract,
    read_program,
    variables_of,
)
from unirun.spec.read import Section, as_number, parse_size, shown
from unirun.spec.secrets import check_env_file
from unirun.values import natural

SlotCounter = Callable[[str], int]
NodeCount = tuple[int, int]
"""The least and the greatest number of nodes."""
ONE_NODE: NodeCount = (1, 1)
"""Turns ``auto``, ``cpu`` or ``gpu`` into how many workers that is on this node. Raises UnirunError."""

LEAST_MEMORY = 10**6
"""A smaller size is a number without its unit."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,62}")
TRAINER = "trainer"
"""The name of the role that a job's ``trainer`` makes."""

ENTRY_KINDS: tuple[EntryKind, ...] = ("script", "module", "program", "function", "workload")
RESTART_KEYS = ("max_restarts", "rank_restarts", "restart_window", "restart_delay", "fatal_exit_codes")
HANG_KEYS = ("hang_timeout", "first_step_timeout", "stragglers")
JOB_WIDE_KEYS = (
    *ENTRY_KINDS,
    *("args", "env", "cwd", *RESTART_KEYS, *HANG_KEYS, "start_method"),
    *JOB_WIDE_PROGRAM_KEYS,
)
"""Keys that a role inherits from the job."""

AUTO_DEVICE = ("auto_visible_device", "enable_ray_auto_visible_device")
"""The second name is the one under which DLRover's users know it."""

ROLE_KEYS = (
    *JOB_WIDE_KEYS,
    "count",
    "per_node",
    "per_group",
    "device",
    "slots",
    "devices",
    "component",
    "elastic",
    "cpus",
    "memory",
    "env_file",
    "kind",
    "model",
    *AUTO_DEVICE,
    *PROGRAM_KEYS,
)
ELSEWHERE = {
    **dict.fromkeys(
        ("gpu", "gpus", "num_gpus", "gpus_per_worker"), "write slots: N, the devices that each rank has"
    ),
    **dict.fromkeys(("cpu", "num_cpus"), "write cpus: N, the processors that each rank needs"),
    **dict.fromkeys(("mem", "ram"), "write memory: 64GB, what each rank needs"),
    "resources": "write what each rank needs in the role: slots: N, cpus: N, memory: 64GB",
    "depends_on": "write after: [ROLE], and ready: in that role",
    "healthcheck": "write ready: http://{addr}/health, and alive: for the time after that",
    **dict.fromkeys(
        ("replicas", "num_replicas", "num_workers", "world_size", "nproc_per_node", "nproc"), "write count: N"
    ),
    **dict.fromkeys(("command", "cmd", "entrypoint"), "write script: FILE, or program: NAME, with args: […]"),
    **dict.fromkeys(("environment", "env_vars"), "write env: {NAME: VALUE}"),
}
"""Keys of other launchers' files, and what to write for them in a role."""

TRAINER_KEYS = (
    *("class", "env", "cwd", *RESTART_KEYS, *HANG_KEYS, "start_method"),
    *("cpus", "memory", "after", "env_file"),
)
START_METHODS: dict[str, StartMethod] = {
    "fork": "fork",
    "forkserver": "fork",
    "exec": "exec",
    "spawn": "exec",
}
CLASS_RESTARTS = 3
"""The default of ``max_restarts`` for workloads and trainers; that of scripts is 0, as in torchrun."""


def read_roles(job: Section, count_slots: SlotCounter, nodes: NodeCount) -> list[RoleSpec]:
    """The roles of a job in the order of the file; without any, one that is called ``default``.

    A role without a count has ``nproc_per_node`` ranks on each of the job's `nodes`, as under torchrun; a program that
    has not torchrun's contract has one.
    """
    raw = job.mapping("roles")
    if not raw and job.given("trainer"):
        remedy = "name the roles of workloads"
        job.fault("roles", "there are none, so the trainer has nobody to call", remedy)
    elif not raw and not job.faults:
        raw = {"default": {}}
    default_entry = _entry(job, None)
    return [_role(job, name, value, default_entry, count_slots, nodes) for name, value in raw.items()]


def read_trainer(job: Section, roles: list[RoleSpec]) -> RoleSpec | None:
    """The role that ``trainer: pkg.mod:Class`` or ``trainer: {class: …}`` makes; None without one."""
    value = job.fields.get("trainer")
    if value is None:
        return None
    fields = job.mapping("trainer") if isinstance(value, Mapping) else {"class": value}
    trainer = job.below("trainer", fields)
    trainer.known(TRAINER_KEYS)
    if any(role.name == TRAINER for role in roles):
        problem = "trainer is given as well, which makes a role of that name"
        job.fault("roles.trainer", problem, "rename the role")
    if not fields.get("class"):
        job.fault("trainer", "it has no class", "write trainer: pkg.mod:Class")
    return _finish(trainer, job, TRAINER, Entry("trainer", trainer.text("class"), job.texts("args")))


def _role(
    job: Section, name: str, value: Any, default_entry: Entry, count_slots: SlotCounter, nodes: NodeCount
) -> RoleSpec:
    where = f"roles.{name}"
    if not NAME.fullmatch(name):
        remedy = "a letter, then letters, digits, '-' or '_', of ASCII"
        job.fault(where, f"{name!r} is no name for a role", remedy)
    if isinstance(value, Mapping):
        role = Section({where: value}, "", job.faults).section(where)
    else:
        role = job.below(where, {"count": value})
    role.known(ROLE_KEYS, ELSEWHERE)
    role = ready_made(job, name, role)
    entry = _entry(role, default_entry)
    if not entry.target and job.fields.get("roles"):
        job.fault(where, "nothing to run", f"name a script, or one for this role: --script {name}=FILE")
    elif not entry.target:
        job.fault(where, "there is nothing to run", "name a script: unirun train.py")
    contract = read_contract(role, job, entry)
    usual = job.fields.get("nproc_per_node", 1) if contract == "torchrun" else 1
    value = role.fields["count"] if role.given("count") else usual
    if not role.given("count") and nodes != ONE_NODE and contract == "torchrun":
        each = _count(role, value, count_slots)
        made = replace(_finish(role, job, name, entry, each * nodes[1], contract), least=each * nodes[0])
        return replace(made, per_node=made.per_node or each, **_needs(role, made))
    least, count = _counts(role, value, count_slots)
    if role.flag("elastic", False) and (least is None or entry.kind != "workload"):
        problem = "only workloads of which the number is given as MIN:MAX are elastic"
        role.fault("elastic", problem, "write count: 2:8, or leave it out")
    made = _finish(role, job, name, entry, count, contract)
    return replace(made, least=least, engine=role.fields.get("kind"), **_needs(role, made))


def _finish(
    role: Section, job: Section, name: str, entry: Entry, count: int = 1, contract: Contract = "torchrun"
) -> RoleSpec:
    """The settings that roles and the trainer have in common."""
    keys = ("cwd", *RESTART_KEYS, *HANG_KEYS, "start_method", "python")
    wide = {key: job.fields[key] for key in keys if key in job.fields and not role.given(key)}
    role = Section({**role.fields, **wide}, role.where, role.faults)
    cwd = role.text("cwd") or None
    if cwd is not None and not os.path.isdir(cwd):
        role.fault("cwd", f"{cwd!r} is no directory")
    chosen = role.choice("start_method", tuple(START_METHODS), "fork")
    env = role.env("env")
    by_class = entry.kind in ("workload", "trainer")
    program = read_program(role, entry, contract)
    if entry.target:
        envs = env, job.fields.get("env")
        path = search_path(program["python"], *envs)
        here = job.here and program["python"] is None
        _tell_missing(role, entry, missing_entry(entry, cwd, python_path(*envs), path, here=here))
    restarts = SERVICE_RESTARTS if program["service"] else CLASS_RESTARTS if by_class else 0
    return RoleSpec(
        name=name,
        count=count,
        entry=entry,
        env=env,
        cwd=cwd,
        max_restarts=role.integer("max_restarts", restarts, 0),
        fatal_exit_codes=_exit_codes(role),
        rank_restarts=_rank_restarts(role, program),
        start_method="exec" if entry.kind == "program" or program["python"] else START_METHODS[chosen],
        restart="process" if by_class or (program["service"] and contract == "none") else "role",
        per_node=_divisor(role, "per_node", count, "every node"),
        auto_visible_device=_auto_device(role),
        env_file=check_env_file(role) if "env_file" in role.fields else None,
        cpus=_cpus(role),
        memory=_memory(role),
        hang_timeout=_hang_timeout(role, contract),
        first_step_timeout=role.seconds("first_step_timeout", FIRST_STEP_TIMEOUT),
        stragglers=_stragglers(role, contract),
        **program,
    )


def _rank_restarts(role: Section, program: Mapping[str, Any]) -> int | None:
    """Restarts that one rank may cause; None for no limit of its own."""
    if not role.given("rank_restarts"):
        return None
    if program["service"] and program["contract"] == "none":
        problem = "max_restarts is for each rank of a service"
        role.fault("rank_restarts", problem, "leave it out")
    return role.integer("rank_restarts", 1, 1)


def _exit_codes(role: Section) -> tuple[int, ...]:
    """Exit codes that no restart follows: one, several, or a text with commas. A signal is 128 + its number."""
    key = "fatal_exit_codes"
    value = role.fields.get(key)
    codes = (
        value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    )
    return () if value is None else tuple(role.as_integer(key, code, 1, 1, 255) for code in codes)


def _hang_timeout(role: Section, contract: Contract) -> float:
    """Seconds without progress. A program reports none, so that of the job is not its own."""
    timeout = role.seconds("hang_timeout", 0.0)
    return timeout if contract == "torchrun" else 0.0


def _stragglers(role: Section, contract: Contract) -> Stragglers:
    """The fate of ranks for which the others wait."""
    choices: dict[str, Stragglers] = {"tell": "tell", "replace": "replace"}
    chosen = choices[role.choice("stragglers", tuple(choices), "tell")]
    if chosen == "replace" and contract == "torchrun" and not role.given("hang_timeout"):
        remedy = "set hang_timeout, too (--hang-timeout)"
        role.fault("stragglers", "collectives are counted where ranks have a time-out for hangs", remedy)
    return chosen


def _needs(role: Section, made: RoleSpec) -> dict[str, Any]:
    """Slots and devices of each rank, and groups of ranks. `made` has the settings of the role that are known."""
    on_device = role.given("device") or role.given("devices")
    slots = _slots(role, 1.0 if on_device or made.contract == "torchrun" else 0.0)
    if not slots and on_device:
        key = "device" if role.given("device") else "devices"
        role.fault(
            "slots", f"a rank without slots has no device, and {key} is given", "leave one of them out"
        )
    return {
        "device": role.text("device") or None,
        "slots": slots,
        "per_group": _divisor(role, "per_group", made.count, "every group"),
        "devices": _devices(role) if role.given("devices") else None,
        "component": role.integer("component", 0, 0) if role.given("component") else None,
        "elastic": role.flag("elastic", False),
    }


def _slots(role: Section, default: float) -> float:
    """Whole slots, or a share of one; 0 for none."""
    if not role.given("slots"):
        return default
    number = as_number(role.fields["slots"])
    if not 0 <= number < 1e6 or (number > 1 and number != int(number)):
        problem = f"expected a whole number or a share of one, found {shown(role.fields['slots'])}"
        role.fault("slots", problem, "for example 2 or 0.5; 0 for a role that needs no device")
        return default
    return number


def _cpus(role: Section) -> int | Literal["all"] | None:
    """Processors of its node that each rank needs, ``all`` for all of them."""
    if not role.given("cpus"):
        return None
    value = role.fields["cpus"]
    if value == "all":
        return "all"
    if isinstance(value, str) and natural(value.strip()) is None:
        role.fault("cpus", f"expected a whole number or all, found {shown(value)}", "for example 8")
        return None
    return role.as_integer("cpus", value, 1, 1)


def _memory(role: Section) -> int | None:
    """Bytes that each rank needs, as a number or as a size."""
    if not role.given("memory"):
        return None
    value = role.fields["memory"]
    try:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(f"expected a size, found {shown(value)}")
        size = parse_size(str(value))
        if size < LEAST_MEMORY:
            raise ValueError(f"{shown(value)} is {size} bytes, less than any process needs")
    except ValueError as error:
        role.fault("memory", str(error), "for example 64GB or 512MiB")
        return None
    return size


def _counts(role: Section, value: Any, count_slots: SlotCounter) -> tuple[int | None, int]:
    """``4``, or ``2:8`` for as many as there is room for."""
    if not (isinstance(value, str) and ":" in value):
        return None, _count(role, value, count_slots)
    low, _, high = value.partition(":")
    least, most = _count(role, low, count_slots), _count(role, high, count_slots)
    if least > most:
        role.fault("count", f"{value!r} is from {least} to {most}", "write the smaller number first")
    return least, max(least, most)


def _count(role: Section, value: Any, count_slots: SlotCounter) -> int:
    if value in ("auto", "cpu", "gpu", "xpu"):
        try:
            return count_slots(value)
        except ValueError as error:
            role.fault("count", str(error))
            return 1
    return 1 if value is None else role.as_integer("count", value, 1, 1)


def _devices(role: Section) -> tuple[str, ...]:
    """Indices or UUIDs, each once."""
    named = role.texts("devices")
    for name in named:
        if re.fullmatch(r"\d+\s*(-|:|\.\.)\s*\d+", name):
            role.fault("devices", f"{name!r} is no device", "name each one: [0, 1, 2]")
    twice = sorted(name for name, times in Counter(named).items() if times > 1)
    if twice:
        role.fault("devices", f"{', '.join(twice)} stands there twice", "name each device once")
    return named


def _divisor(role: Section, key: str, count: int, what: str) -> int | None:
    if not role.given(key):
        return None
    number = role.integer(key, 1, 1)
    if count % number:
        fits = [str(each) for each in range(1, min(count, 64) + 1) if count % each == 0]
        problem = f"{number} does not divide the role's {count} ranks"
        role.fault(key, problem, f"{what} has as many: {', '.join(fits)}")
    return number


def _auto_device(role: Section) -> bool:
    given = [key for key in AUTO_DEVICE if role.given(key)]
    if len(given) > 1:
        problem = f"{' and '.join(given)} are given"
        role.faults.append(Fault(role.where, problem, "they are one and the same: keep the first"))
    return role.flag(given[0], True) if given else True


def _entry(fields: Section, default: Entry | None) -> Entry:
    """The entry in `fields`. A missing target or missing arguments come from `default`."""
    given = [kind for kind in ENTRY_KINDS if fields.given(kind)]
    if len(given) > 1:
        problem = f"{' and '.join(given)} are given"
        fields.faults.append(Fault(fields.where, problem, "a role runs one of them"))
    args = fields.texts("args") if fields.given("args") or default is None else default.args
    if given:
        return Entry(given[0], fields.text(given[0]), args)
    return Entry(default.kind, default.target, args) if default else Entry("script", "", args)


def python_path(*envs: object) -> list[str]:
    """The folders of PYTHONPATH in the first of `envs` that has it; the one of this process is on ``sys.path``."""
    for env in envs:
        if isinstance(env, Mapping) and env.get("PYTHONPATH"):
            return [folder for folder in str(env["PYTHONPATH"]).split(os.pathsep) if folder]
    return []


def search_path(python: str | None, *envs: object) -> str | None:
    """The PATH in which a role finds its program: that of the first of `envs` that has one, else this process's,
    behind the folder of its interpreter."""
    given = next((str(env["PATH"]) for env in envs if isinstance(env, Mapping) and env.get("PATH")), None)
    path = os.environ.get("PATH") if given is None else given
    folder = variables_of(python).get("PATH")
    return path if folder is None else os.pathsep.join(filter(None, (folder, path)))


def _tell_missing(role: Section, entry: Entry, missing: Fault | None) -> None:
    if missing is not None:
        key = {"workload": "workload", "trainer": "class", "function": "function"}.get(entry.kind)
        where = role.at(key) if key else role.where
        role.faults.append(replace(missing, where=where))
