"""The roles of a job: what each runs, how often, and what is known to be wrong with that before anything starts."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from unirun.spec.entries import missing_entry
from unirun.spec.job import Entry, EntryKind, RoleSpec, StartMethod
from unirun.spec.read import Reader, as_number, shown

SlotCounter = Callable[[str], int]
"""Turns ``auto``, ``cpu`` or ``gpu`` into how many workers that is on this node. Raises UnirunError."""

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,62}")
TRAINER = "trainer"
"""The name of the role that a job's ``trainer`` makes."""

ENTRY_KINDS: tuple[EntryKind, ...] = ("script", "module", "program", "function", "workload")
JOB_WIDE_KEYS = (*ENTRY_KINDS, "args", "env", "cwd", "max_restarts", "start_method")
"""What a role takes from the job when it does not say it itself."""

AUTO_DEVICE = ("auto_visible_device", "enable_ray_auto_visible_device")
"""The second name is the one under which DLRover's users know it."""

ROLE_KEYS = (*JOB_WIDE_KEYS, "count", "per_node", "per_group", "device", "slots", "devices", *AUTO_DEVICE)
TRAINER_KEYS = ("class", "env", "cwd", "max_restarts", "start_method")
START_METHODS: dict[str, StartMethod] = {
    "fork": "fork",
    "forkserver": "fork",
    "exec": "exec",
    "spawn": "exec",
}
CLASS_RESTARTS = 3
"""How often a workload or a trainer is started again by default: it keeps its place in the job, a script does not."""


def read_roles(read: Reader, data: Mapping[str, Any], count_slots: SlotCounter) -> list[RoleSpec]:
    """The roles of a job in the order of the file; without any, one that is called ``default``."""
    raw = read.mapping(data.get("roles"), "roles")
    if not raw and data.get("trainer") is not None:
        read.fault(
            "roles", "there are none, so the trainer has nobody to call", "name the roles of workloads"
        )
    elif not raw and not read.faults:
        raw = {"default": {}}
    default_entry = _entry(read, data, "", None)
    roles = []
    for name, value in raw.items():
        where = f"roles.{name}"
        if not NAME.fullmatch(name):
            read.fault(
                where,
                f"{name!r} is no name for a role",
                "a letter, then letters, digits, '-' or '_', of ASCII",
            )
        fields = read.mapping(value, where) if isinstance(value, Mapping) else {"count": value}
        read.known(fields, ROLE_KEYS, where)
        roles.append(_role(read, name, fields, data, default_entry, count_slots))
    return roles


def read_trainer(read: Reader, data: Mapping[str, Any], roles: list[RoleSpec]) -> RoleSpec | None:
    """The role that ``trainer: pkg.mod:Class`` or ``trainer: {class: …}`` makes; None without one."""
    value = data.get("trainer")
    if value is None:
        return None
    fields = read.mapping(value, "trainer") if isinstance(value, Mapping) else {"class": value}
    read.known(fields, TRAINER_KEYS, "trainer")
    if any(role.name == TRAINER for role in roles):
        read.fault(
            "roles.trainer", "trainer is given as well, which makes a role of that name", "rename the role"
        )
    target = read.text(fields.get("class"), "trainer.class")
    if not fields.get("class"):
        read.fault("trainer", "it has no class", "write trainer: pkg.mod:Class")
    args = read.texts(data.get("args"), "args")
    return _finish(read, TRAINER, "trainer", fields, data, Entry("trainer", target, args))


def _role(
    read: Reader,
    name: str,
    fields: Mapping[str, Any],
    job: Mapping[str, Any],
    default_entry: Entry,
    count_slots: SlotCounter,
) -> RoleSpec:
    where = f"roles.{name}"
    entry = _entry(read, fields, where, default_entry)
    if not entry.target and job.get("roles"):
        read.fault(where, "nothing to run", f"name a script, or one for this role: --script {name}=FILE")
    elif not entry.target:
        read.fault(where, "there is nothing to run", "name a script: unirun train.py")
    least, count = _counts(
        read, fields.get("count", job.get("nproc_per_node", 1)), f"{where}.count", count_slots
    )
    role = _finish(read, name, where, fields, job, entry, count)
    return replace(role, least=least, **_places(read, fields, where, count))


def _finish(
    read: Reader,
    name: str,
    where: str,
    fields: Mapping[str, Any],
    job: Mapping[str, Any],
    entry: Entry,
    count: int = 1,
) -> RoleSpec:
    """What all roles have, whatever they run."""
    cwd = read.text(fields.get("cwd", job.get("cwd")), f"{where}.cwd") or None
    if cwd is not None and not os.path.isdir(cwd):
        read.fault(f"{where}.cwd", f"{cwd!r} is no directory")
    method = fields.get("start_method", job.get("start_method"))
    chosen = read.choice(method, f"{where}.start_method", tuple(START_METHODS), "fork")
    env = read.env(fields.get("env"), f"{where}.env")
    by_class = entry.kind in ("workload", "trainer")
    if entry.target:
        _check_target(read, entry, where, cwd, python_path(env, job.get("env")))
    restarts = fields.get("max_restarts", job.get("max_restarts"))
    return RoleSpec(
        name=name,
        count=count,
        entry=entry,
        env=env,
        cwd=cwd,
        max_restarts=read.integer(restarts, f"{where}.max_restarts", CLASS_RESTARTS if by_class else 0, 0),
        start_method="exec" if entry.kind == "program" else START_METHODS[chosen],
        restart="process" if by_class else "role",
        per_node=_per_node(read, fields.get("per_node"), where, count),
        auto_visible_device=_auto_device(read, fields, where),
    )


def _places(read: Reader, fields: Mapping[str, Any], where: str, count: int) -> dict[str, Any]:
    """What each rank needs, and how ranks belong together."""
    devices = fields.get("devices")
    device = read.text(fields.get("device"), f"{where}.device") or None
    per_group = fields.get("per_group")
    return {
        "device": device,
        "slots": _slots(read, fields.get("slots"), f"{where}.slots"),
        "per_group": None
        if per_group is None
        else _divisor(read, per_group, f"{where}.per_group", count, "every group"),
        "devices": None if devices is None else _devices(read, devices, f"{where}.devices"),
    }


def _slots(read: Reader, value: Any, where: str) -> float:
    """Whole slots, or a share of one."""
    if value is None:
        return 1.0
    number = as_number(value)
    if not 0 < number < 1e6 or (number > 1 and number != int(number)):
        read.fault(
            where, f"expected a whole number or a share of one, found {shown(value)}", "for example 2 or 0.5"
        )
        return 1.0
    return number


def _counts(read: Reader, value: Any, where: str, count_slots: SlotCounter) -> tuple[int | None, int]:
    """``4``, or ``2:8`` for as many as there is room for."""
    if not (isinstance(value, str) and ":" in value):
        return None, _count(read, value, where, count_slots)
    low, _, high = value.partition(":")
    least, most = _count(read, low, where, count_slots), _count(read, high, where, count_slots)
    if least > most:
        read.fault(where, f"{value!r} is from {least} to {most}", "write the smaller number first")
    return least, max(least, most)


def _count(read: Reader, value: Any, where: str, count_slots: SlotCounter) -> int:
    if isinstance(value, str) and value in ("auto", "cpu", "gpu", "xpu"):
        try:
            return count_slots(value)
        except ValueError as error:
            read.fault(where, str(error))
            return 1
    return read.integer(value, where, 1, 1)


def _per_node(read: Reader, value: Any, where: str, count: int) -> int | None:
    return None if value is None else _divisor(read, value, f"{where}.per_node", count, "every node")


def _devices(read: Reader, value: Any, where: str) -> tuple[str, ...]:
    """Indices or UUIDs, each once."""
    named = read.texts(value, where)
    for name in named:
        if re.fullmatch(r"\d+\s*(-|:|\.\.)\s*\d+", name):
            read.fault(where, f"{name!r} is no device", "name each one: [0, 1, 2]")
    twice = sorted(name for name, times in Counter(named).items() if times > 1)
    if twice:
        read.fault(where, f"{', '.join(twice)} stands there twice", "name each device once")
    return named


def _divisor(read: Reader, value: Any, where: str, count: int, what: str) -> int:
    number = read.integer(value, where, 1, 1)
    if count % number:
        fits = [str(each) for each in range(1, min(count, 64) + 1) if count % each == 0]
        problem = f"{number} does not divide the role's {count} ranks"
        read.fault(where, problem, f"{what} has as many: {', '.join(fits)}")
    return number


def _auto_device(read: Reader, fields: Mapping[str, Any], where: str) -> bool:
    given = [key for key in AUTO_DEVICE if fields.get(key) is not None]
    if len(given) > 1:
        read.fault(where, f"{' and '.join(given)} are given", "they are one and the same: keep the first")
    return read.flag(fields[given[0]], f"{where}.{given[0]}") if given else True


def _entry(read: Reader, fields: Mapping[str, Any], where: str, default: Entry | None) -> Entry:
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


def python_path(*envs: object) -> list[str]:
    """The folders of PYTHONPATH in the first of `envs` that has it; the one of this process is on ``sys.path``."""
    for env in envs:
        if isinstance(env, Mapping) and env.get("PYTHONPATH"):
            return [folder for folder in str(env["PYTHONPATH"]).split(os.pathsep) if folder]
    return []


def _check_target(read: Reader, entry: Entry, where: str, cwd: str | None, python_path: list[str]) -> None:
    missing = missing_entry(entry, cwd, python_path)
    if missing is not None:
        key = {"workload": ".workload", "trainer": ".class", "function": ".function"}.get(entry.kind, "")
        read.fault(f"{where}{key}", missing.problem, missing.remedy)
