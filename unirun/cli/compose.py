"""From a command line to a planned job.

Later layers win: defaults < ``PET_*`` < job file < ``key=value`` < options.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from unirun.cli.commandline import CommandLine, from_environment, role_items
from unirun.cli.joboptions import node_count, options_to_job, several_nodes
from unirun.cli.mistakes import refuse_mistakes, warnings
from unirun.collocation import (
    Inventory,
    count_slots,
    is_fake,
    local_inventory,
    local_topology,
    parse_fake,
    unknown_nodes,
)
from unirun.collocation.host import told_topology
from unirun.collocation.placing import TopologyOf
from unirun.errors import UsageError
from unirun.launcher.foreground.terminal import warn
from unirun.launcher.planned import PlannedJob, plan
from unirun.spec.entries import is_function
from unirun.spec.job import JobSpec
from unirun.spec.names import id_stem
from unirun.spec.parse import parse_job
from unirun.spec.roles import ENTRY_KINDS, ONE_NODE, NodeCount, python_path
from unirun.spec.yaml import merge


def plan_job(line: CommandLine) -> PlannedJob:
    """The job that a command line describes, with its placement. Likely mistakes are written to stderr.

    Raises `SpecError`, `UsageError`, `PlacementError`.
    """
    # Workers are started in it.
    os.getcwd()
    if several_nodes({**defaults_of(line, os.environ), **line.options}):
        raise UsageError(
            "what hosts have is known when they are asked", "plan with --inventory fake:nodes=2,…"
        )
    inventory = inventory_of(line)
    spec = job_spec(
        line, inventory, nodes=node_count(line.options) if "inventory" in line.options else ONE_NODE
    )
    tell_mistakes(line, spec, inventory)
    return plan(spec, inventory, topology_of(line))


def tell_mistakes(line: CommandLine, spec: JobSpec, inventory: Inventory) -> None:
    """Write what is probably a mistake to stderr."""
    if "quiet" not in line.options:
        for warning in (*warnings(line, spec, os.environ), *unknown_nodes(spec, inventory)):
            warn(warning)


def inventory_of(line: CommandLine) -> Inventory:
    """The nodes that ``--inventory`` describes; without it, this host. Raises `SpecError` or `UsageError`."""
    text = line.options.get("inventory")
    if text is None:
        return local_inventory()
    if not is_fake(text):
        raise UsageError(f"--inventory {text!r} is none that is known", "write fake:nodes=4,devices=8,numa=2")
    return parse_fake(text)


def topology_of(line: CommandLine) -> TopologyOf:
    """The function that finds the topology of a node: that of simulated nodes is in the inventory."""
    return told_topology if "inventory" in line.options else local_topology


def job_spec(
    line: CommandLine,
    inventory: Inventory,
    environ: Mapping[str, str] = os.environ,
    *,
    nodes: NodeCount = ONE_NODE,
) -> JobSpec:
    """The spec that a command line describes, for a job of as many `nodes`. Raises `SpecError` or `UsageError`."""
    refuse_mistakes(line)
    file: dict[str, Any] = {}
    if "config" in line.options:
        from unirun.spec.yaml import load_job_file

        file = load_job_file(line.options["config"], line.overrides)
    named = role_items(line.options)
    in_file = file["roles"] if isinstance(file.get("roles"), Mapping) else {}
    trained = "trainer" in line.options or "trainer" in file
    # PET_ROLE names the only role of a job, so the roles of all layers are known to the first one.
    known = [*(item.name for item in named), *in_file]
    defaults = defaults_of(line, environ)
    alone = nodes == ONE_NODE
    data = options_to_job(defaults, known, trained=trained, alone=alone)
    merge(data, file)
    known = [*data["roles"]] if isinstance(data.get("roles"), dict) else []
    script = line.script is not None or any(data.get(kind) for kind in ENTRY_KINDS)
    served = [name for name in known if _is_service(data["roles"][name])]
    ours = options_to_job(line.options, known, trained=trained, alone=alone, script=script, served=served)
    merge(data, ours)
    for item in named:
        if item.target is not None:
            _set_target(data, item.name, item.target)
    if "trainer" in line.options and not data.get("roles"):
        raise UsageError("--trainer has nobody to call without roles", "add --roles actor=4@pkg.mod:Class")
    _set_entry(data, line, {**defaults, **line.options})
    if "shutdown_timeout" not in data and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in environ:
        data["shutdown_timeout"] = environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    spec = parse_job(
        data,
        count_slots=lambda kind: count_slots(kind, inventory),
        run_id=_new_id(data, line.script),
        nodes=nodes,
    )
    if spec.numa_binding and not any(node.devices for node in inventory.nodes):
        raise UsageError(
            "--numa-binding follows the workers' GPUs, and there are none",
            "leave it out, or bind with numactl",
        )
    return spec


def _is_service(role: Any) -> bool:
    """Return True for a role that says so, and for a ready-made one (``kind``)."""
    return isinstance(role, Mapping) and bool(role.get("service", role.get("kind")))


def defaults_of(line: CommandLine, environ: Mapping[str, str]) -> dict[str, Any]:
    """The options of ``PET_*`` that the command line does not replace.

    Options that may be given several times add up, because each may be about another role.
    """
    replaced = {name for name in line.options if name not in ("nproc_per_node", "max_restarts")}
    if line.options.get("standalone"):
        replaced |= {"rdzv_backend", "rdzv_endpoint", "rdzv_id"}
    return {name: value for name, value in from_environment(environ).items() if name not in replaced}


def _set_target(data: Mapping[str, Any], name: str, target: str) -> None:
    """Set what ``--roles NAME=N@TARGET`` runs: a function if the source of its module shows one, else a workload."""
    role = data["roles"][name]
    folders = [str(role.get("cwd") or data.get("cwd") or "."), *python_path(role.get("env"), data.get("env"))]
    role["function" if is_function(target, folders) else "workload"] = target


def _new_id(data: Mapping[str, Any], script: str | None) -> str:
    trainer = data.get("trainer")
    driver = str(trainer.get("class") or "").partition(":")[0] if isinstance(trainer, Mapping) else ""
    stem = str(data.get("name") or os.path.basename(script or "") or driver).removesuffix(".py")
    return f"{id_stem(stem)}-{secrets.token_hex(3)}"


def _set_entry(data: dict[str, Any], line: CommandLine, options: Mapping[str, Any]) -> None:
    """Set what the positional script is: a file, or what -m and --no-python in `options` make of it.

    With --no-python it has torchrun's variables, as under torchrun; programs of roles in a job file do not.
    """
    kinds = [kind for kind, name in (("module", "module"), ("program", "no_python")) if options.get(name)]
    if len(kinds) == 2:
        raise UsageError("-m and --no-python exclude each other", "a program is not a module")
    if options.get("run_path"):
        if kinds == ["module"]:
            raise UsageError("--run-path runs a file, not a module", "leave out -m")
        kinds = []
        data.setdefault("start_method", "fork")
    roles = data["roles"].values() if isinstance(data.get("roles"), Mapping) else ()
    # By role: whether it has an entry of its own. Without roles there is one that has none.
    own = [
        isinstance(role, Mapping) and any(role.get(key) for key in (*ENTRY_KINDS, "kind")) for role in roles
    ]
    if line.script is not None:
        for kind in ENTRY_KINDS:
            data.pop(kind, None)
        data[kinds[0] if kinds else "script"] = line.script
        if own and all(own):
            problem = f"no role runs {line.script}: each has an entry of its own"
            raise UsageError(problem, "arguments for all of them follow --")
    elif kinds and "script" in data:
        data[kinds[0]] = data.pop("script")
    elif kinds and kinds[0] not in data:
        option = "-m" if kinds == ["module"] else "--no-python"
        raise UsageError(
            f"{option} says what the script is, and no script for all roles is named",
            f"in a job file, a role may have a {kinds[0]} of its own",
        )
    if kinds == ["program"] and "contract" not in data:
        for role in roles:
            if isinstance(role, dict) and (role.get("program") or role.get("kind")):
                role.setdefault("contract", "none")
        data["contract"] = "torchrun"
    if line.args or line.script is not None:
        data["args"] = list(line.args)
    if line.args and line.script is None and not any((*own, *map(data.get, ENTRY_KINDS))):
        raise UsageError("there are arguments but no script", "name the script before them")
