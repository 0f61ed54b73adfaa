"""The calls of a job builder as values, and a pure function from a `Draft` to the mapping of a job file.

The methods that users call are in `unirun.train.builder`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import field
from msgspec.structs import replace

from unirun.errors import Fault, SpecError
from unirun.spec.parse import parse_job
from unirun.spec.read import nearest, shown
from unirun.spec.roles import TRAINER
from unirun.spec.yaml import plain_config
from unirun.values import Value

CALLS_OF_GROUPS = {
    "collocations": "with_collocation",
    "host_collocations": "with_host_collocation",
    "separations": "with_separation",
    "isolations": "with_isolation",
}
"""Groups of roles: their key in a job file, and the builder's method."""

DL_TYPES = ("PRE", "SFT", "RL", "MULTIMODAL")


class EntryDraft(Value):
    """The module and the name of a class or function."""

    module: Any
    name: Any

    @property
    def target(self) -> str:
        """``pkg.mod:name``."""
        return f"{self.module}:{self.name}"


class WorkloadDraft(Value):
    """The calls for one role; None for a value that was not set."""

    role: str
    entry: EntryDraft
    kind: Literal["workload", "function"] = "workload"
    total: Any = None
    per_node: Any = None
    env: Any = field(default_factory=dict)
    auto_visible_device: bool = True
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a role in a job file: ``slots``, ``device``, ``devices``, ``per_group``, ``cpus``, ``max_restarts``, …"""

    @property
    def takes_slots(self) -> bool:
        """True if its ranks need slots."""
        return bool(self.needs.get("slots", 1))


class Draft(Value):
    """The calls for a job; None for a value that was not set."""

    dl_type: Any = None
    node_num: Any = None
    device_per_node: Any = None
    config: Any = None
    env: Any = field(default_factory=dict)
    trainer: EntryDraft | None = None
    workloads: tuple[WorkloadDraft, ...] = ()
    collocate_all: bool = False
    groups: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Groups of roles, each with its key in a job file."""
    spares: Any = None
    exclude_nodes: tuple[Any, ...] = ()
    edges: tuple[Any, ...] = ()
    channels: Any = field(default_factory=dict)
    transport: Any = None
    call_timeout: Any = None
    restarts: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a job file about restarts."""
    services: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Roles of programs as in a job file, by name."""


class Loaded(Value):
    """The result of importing a name: a function, the ``__unirun_kind__`` of a class, or an error."""

    kind: Literal["workload", "trainer", "function", ""] = ""
    error: str = ""


def job_mapping(draft: Draft, loaded: Mapping[str, Loaded]) -> dict[str, Any]:
    """The mapping of a job file that is equal to `draft`; `loaded` has each class and function by target.

    Raises `SpecError` with all faults.
    """
    faults = [*_job_faults(draft), *_trainer_faults(draft, loaded)]
    for workload in draft.workloads:
        faults += _workload_faults(draft, workload, loaded)
    groups, wrong = _groups(draft)
    faults += wrong
    numbers = [draft.node_num, draft.device_per_node]
    numbers += [number for workload in draft.workloads for number in (workload.total, workload.per_node)]
    sound = all(map(_is_number, numbers))
    if sound:
        faults += _device_faults(draft, groups["collocations"])
    try:
        config = plain_config(draft.config) if draft.config is not None else {}
    except SpecError as error:
        faults += error.faults
        config = {}
    mapping: dict[str, Any] = {
        "config": config,
        "env": draft.env,
        "roles": {workload.role: _role(workload) for workload in draft.workloads} | dict(draft.services),
        **groups,
        "spares": draft.spares,
        "exclude_nodes": [*draft.exclude_nodes],
        "edges": [*draft.edges],
        "channels": dict(draft.channels),
        "transport": draft.transport,
        "call_timeout": draft.call_timeout,
        **draft.restarts,
    }
    if draft.trainer is not None:
        mapping["trainer"] = draft.trainer.target
    faults += _faults_of_job_file(mapping if sound else _without_numbers(mapping), faults)
    if faults:
        raise SpecError([*dict.fromkeys(faults)])
    return mapping


def _role(workload: WorkloadDraft) -> dict[str, Any]:
    return {
        "count": workload.total,
        "per_node": workload.per_node,
        workload.kind: workload.entry.target,
        "env": workload.env,
        "auto_visible_device": workload.auto_visible_device,
        **workload.needs,
    }


def _without_numbers(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping with valid numbers in place of wrong ones, whose faults were found already."""
    nothing = {"count": 1, "per_node": None, "per_group": None}
    roles = {name: {**role, **nothing} for name, role in mapping["roles"].items()}
    return {**mapping, "roles": roles}


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _number_fault(where: str, value: Any, call: str) -> Iterator[Fault]:
    if value is None:
        yield Fault(where, "it is not set", f"call .{call}")
    elif not _is_number(value):
        yield Fault(where, f"expected a whole number greater than 0, found {shown(value)}", f"call .{call}")


def _job_faults(draft: Draft) -> Iterator[Fault]:
    known = ", ".join(DL_TYPES)
    if draft.dl_type is None:
        yield Fault("dl_type", "it is not set", f"call .dl_type() with one of {known}")
    elif draft.dl_type not in DL_TYPES:
        remedy = nearest(str(draft.dl_type).upper(), DL_TYPES)
        yield Fault("dl_type", f"expected one of {known}, found {draft.dl_type!r}", remedy)
    yield from _number_fault("node_num", draft.node_num, "node_num(1)")
    yield from _number_fault("device_per_node", draft.device_per_node, "device_per_node(8)")
    if draft.config is None:
        yield Fault("config", "it is not set", "call .config({…}) with a dict or a DictConfig")
    if not draft.workloads:
        yield Fault("workload", "there is none", "call .workload(role, module, class)")
    names = [workload.role for workload in draft.workloads] + [*draft.services]
    for name, count in Counter(names).items():
        if count > 1:
            yield Fault(name, f"the role {name!r} is given twice", "name each role once")
    if draft.dl_type == "RL" and "actor" not in [name.lower() for name in names]:
        yield Fault("actor", "a job of type RL has an actor", "call .workload('actor', module, class)")


def _trainer_faults(draft: Draft, loaded: Mapping[str, Loaded]) -> Iterator[Fault]:
    """A job with workloads needs a trainer that calls them; one with functions only does not."""
    if draft.trainer is not None:
        yield from _class_faults(TRAINER, "trainer", draft.trainer, loaded)
    elif not draft.workloads or any(workload.kind != "function" for workload in draft.workloads):
        problem = "there is none, so nobody calls the workloads"
        yield Fault("trainer", problem, "call .trainer(module, class)")


def _class_faults(where: str, kind: str, entry: EntryDraft, loaded: Mapping[str, Loaded]) -> Iterator[Fault]:
    wanted = {"workload": "BaseWorkload", "trainer": "BaseTrainer"}
    for field_name, value in (("module", entry.module), ("class", entry.name)):
        if not isinstance(value, str) or not value:
            problem = f"expected the name of a {field_name}, found {shown(value)}"
            yield Fault(f"{where}.{field_name}", problem, "name it as a text")
            return
    found = loaded[entry.target]
    if found.error:
        problem = f"{entry.target} cannot be imported: {found.error}"
        yield Fault(f"{where}.class", problem, "correct the name")
    elif found.kind != kind:
        problem = f"{entry.target} is no {kind}{found.kind and f', it is a {found.kind}'}"
        yield Fault(f"{where}.class", problem, f"derive it from unirun.{wanted[kind]}")


def _function_faults(where: str, entry: EntryDraft, loaded: Mapping[str, Loaded]) -> Iterator[Fault]:
    where, remedy = f"{where}.function", "define it with def at the top level of a module"
    if not (isinstance(entry.module, str) and isinstance(entry.name, str) and entry.module and entry.name):
        yield Fault(where, f"expected a function or module:function, found {shown(entry.name)}", remedy)
    elif "<lambda>" in entry.name:
        yield Fault(where, f"{entry.target} is a lambda, which workers cannot import", remedy)
    elif "<locals>" in entry.name or "." in entry.name:
        yield Fault(where, f"{entry.target} is a local function or a method", remedy)
    elif error := loaded[entry.target].error:
        yield Fault(where, f"{entry.target} cannot be imported: {error}", "correct the name")
    elif loaded[entry.target].kind != "function":
        yield Fault(where, f"{entry.target} is no function", "call .workload for a class")


def _workload_faults(draft: Draft, workload: WorkloadDraft, loaded: Mapping[str, Loaded]) -> Iterator[Fault]:
    role, total, per_node = workload.role, workload.total, workload.per_node
    if workload.kind == "function":
        yield from _function_faults(role, workload.entry, loaded)
    else:
        yield from _class_faults(role, "workload", workload.entry, loaded)
    yield from _number_fault(f"{role}.total", total, "total(1)")
    yield from _number_fault(f"{role}.per_node", per_node, "per_node(1)")
    if _is_number(total) and _is_number(per_node) and _is_number(draft.node_num):
        places = per_node * draft.node_num
        if places < total and total % per_node == 0:
            problem = f"{per_node} on each of {draft.node_num} nodes are {places}, and total is {total}"
            needed = next(n for n in range(-(-total // draft.node_num), total + 1) if total % n == 0)
            yield Fault(f"{role}.per_node", problem, f"call .per_node({needed}), or add nodes")


def _groups(draft: Draft) -> tuple[dict[str, list[list[str]]], list[Fault]]:
    """The groups by their key in a job file, with the roles' own spelling: upper and lower case are the same."""
    roles = [workload.role for workload in draft.workloads]
    named = [*roles, *draft.services]
    spelled = {role.lower(): role for role in named} | {role: role for role in named} | {TRAINER: TRAINER}
    found: dict[str, list[list[str]]] = {key: [] for key in CALLS_OF_GROUPS}
    faults = []
    for key, group in draft.groups:
        call = CALLS_OF_GROUPS[key]
        wrong = [name for name in group if not isinstance(name, str)]
        if wrong:
            problem = f"expected names of roles, found {wrong[0]!r}"
            faults.append(Fault(f"{call}[{len(found[key])}]", problem, f"call .{call}('a', 'b')"))
        names = [name for name in group if isinstance(name, str)]
        found[key].append([spelled.get(name, spelled.get(name.lower(), name)) for name in names])
    on_devices = [workload.role for workload in draft.workloads if workload.takes_slots]
    if draft.collocate_all and len(on_devices) > 1:
        found["collocations"].append(on_devices)
    return found, faults


def _device_faults(draft: Draft, groups: Sequence[Sequence[str]]) -> list[Fault]:
    """Faults when devices are short. Roles that share devices need as many as the largest; roles
    without slots and the trainer need none. Roles need not be on one node."""
    by_name = {workload.role: workload for workload in draft.workloads if workload.takes_slots}
    together = [[by_name[name] for name in group if name in by_name] for group in groups]
    grouped = {workload.role for group in together for workload in group}
    units = [group for group in together if group]
    units += [[workload] for role, workload in by_name.items() if role not in grouped]
    there = draft.node_num * draft.device_per_node
    needs = [max(workload.total for workload in unit) for unit in units]
    if sum(needs) > there:
        listed = " + ".join(
            f"{'='.join(workload.role for workload in unit)} {need}"
            for unit, need in zip(units, needs, strict=True)
        )
        have = f"{draft.node_num} × {draft.device_per_node} = {there} are there"
        problem = f"total: {listed} = {sum(needs)} devices, and {have}"
        return [Fault("device_per_node", problem, "collocate roles, or ask for fewer ranks")]
    return [
        Fault(
            "device_per_node",
            f"per_node: {role} needs {workload.per_node} devices, and {draft.device_per_node} are there",
            "ask for fewer ranks on a node",
        )
        for role, workload in by_name.items()
        if workload.per_node > draft.device_per_node
    ]


def _faults_of_job_file(mapping: Mapping[str, Any], known: Sequence[Fault]) -> Iterator[Fault]:
    """The faults that parsing the job file finds, with the names of the builder's methods.

    Faults of classes and numbers are left out, because the builder has checked these itself.
    """
    told = {fault.where for fault in known}
    try:
        parse_job(mapping, count_slots=lambda _: 1, run_id="draft")
    except SpecError as error:
        for fault in error.faults:
            where = fault.where
            of_no_role = not mapping["roles"] and where.startswith("roles")
            if where.endswith((".workload", ".function", ".class")) or of_no_role:
                continue
            key, bracket, number = where.partition("[")
            where = f"{CALLS_OF_GROUPS.get(key, key)}{bracket}{number}"
            where = where.removeprefix("roles.").replace(".count", ".total", 1)
            if where not in told:
                yield replace(fault, where=where)
