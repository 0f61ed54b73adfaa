"""``unirun plan …``: what would run where, with which environment. Starts nothing."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from unirun.cli.commandline import items, parse
from unirun.cli.compose import plan_job, topology_of
from unirun.cli.grid import grid, svg, text
from unirun.cli.options import PLAN_OPTIONS
from unirun.cli.output import print_table, write_file
from unirun.collocation import Placement, slot_types
from unirun.collocation.placing import TopologyOf, shown_need
from unirun.errors import UsageError
from unirun.launcher.environment import worker_env
from unirun.launcher.foreground.console import COLOURS
from unirun.launcher.foreground.terminal import columns, in_colour, say
from unirun.launcher.planned import PlannedJob, plan_without
from unirun.launcher.warm.leaving import choices, starts
from unirun.observe.jobdir import job_at
from unirun.spec.job import JobSpec, RoleSpec
from unirun.spec.read import nearest
from unirun.spec.secrets import MASK, secret_names
from unirun.values import Value
from unirun.wire.messages import StartRole, StartWorker


def main(argv: list[str]) -> int:
    """Print the plan of the job that `argv` describes. Returns 0."""
    line = parse(argv, "unirun plan", PLAN_OPTIONS)
    planned = before = plan_job(line)
    if lost := items(line.options.get("lost", ())):
        planned = _without(before, lost, topology_of(line))
    spec, placement, inventory = planned.spec, planned.placement, planned.inventory
    rows = plan_rows(spec, placement)
    types = slot_types(spec, inventory)
    moved = moves(before.placement, placement, types)
    if "svg" in line.options:
        programs = frozenset(role.name for role in spec.roles if role.entry.kind == "program")
        write_file(line.options["svg"], svg(grid(placement, inventory, types, programs)))
    if line.options.get("json"):
        whole = {
            "spec": spec.to_json(),
            "note": placement.note,
            "spares": placement.spares,
            "excluded": placement.excluded,
            "lost": placement.lost,
            "moved": [to_builtins(each) for each in moved],
            "crossing": placement.crossing,
            "workers": rows,
        }
        print(json.dumps(whole, indent=2))
        return 0
    say(f"job {spec.run_id}: {placement.note}")
    for line_of_text in (*_calls(spec), *map(starts, choices(job_at(spec.run_id), spec))):
        say(line_of_text)
    if len(spec.roles) > 1 or len(inventory.nodes) > 1:
        colours = COLOURS if in_colour(sys.stdout) else ()
        width = columns(sys.stdout.fileno()) if sys.stdout.isatty() else 110
        picture = grid(placement, inventory, types)
        sys.stdout.write(f"\n{text(picture, colours=colours, width=width)}\n")
    if lost:
        say(f"{_ranks(len(moved))} of {len(before.placement.assignments)} would move{':' if moved else ''}")
        if moved:
            rows_of_moves = [[each.worker, each.before, each.after or "nowhere"] for each in moved]
            print_table(["WORKER", "FROM", "TO"], rows_of_moves)
        say()
    names = ("role", "rank", "node")
    needs = {role.name: shown_need(role) for role in spec.roles}
    needy = any(needs.values())
    table = [
        [
            *(str(row[name]) for name in names),
            "-" if row["slot"] < 0 else str(row["slot"]),
            *([needs[row["role"]] or "-"] if needy else []),
            f"{row['restart']}×{row['max_restarts']}",
            _short_env(row["env"]),
            row["command"],
        ]
        for row in rows
    ]
    needed = ["NEEDS"] if needy else []
    print_table(["ROLE", "RANK", "NODE", "SLOT", *needed, "RESTART", "ENV", "COMMAND"], table)
    return 0


def _without(planned: PlannedJob, lost: Sequence[str], topology: TopologyOf) -> PlannedJob:
    """The job when nodes are `lost`. Raises `UsageError` for a node that there is not, `PlacementError`."""
    names = [node.name for node in planned.inventory.nodes]
    for name in lost:
        if name not in names:
            raise UsageError(f"--lost: no node is called {name!r}", nearest(name, names))
    return plan_without(planned, lost, topology)


class WorkerMove(Value):
    """A worker that moves from `before` to `after`, each as ``node0 cuda 1``; empty when it has no slot left."""

    worker: str
    before: str
    after: str


def moves(before: Placement, after: Placement, types: Mapping[str, str]) -> list[WorkerMove]:
    """The workers whose node or slots differ. `types` are the types of slots by role."""
    was, now = _places(before, types), _places(after, types)
    return [
        WorkerMove(worker, was[worker], now.get(worker, ""))
        for worker in was
        if was[worker] != now.get(worker)
    ]


def _places(placement: Placement, types: Mapping[str, str]) -> dict[str, str]:
    """``node0 cuda 1,2`` by worker; the node alone for one that needs no slot."""
    return {
        f"{a.role}:{a.rank}": f"{a.node} {types[a.role]} {','.join(a.own)}" if a.own else a.node
        for a in placement.assignments
    }


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _calls(spec: JobSpec) -> list[str]:
    """The devices that roles share and the calls between roles; nothing for a job of scripts."""
    lines = [f"collocated, on the same devices: {', '.join(group)}" for group in spec.collocations]
    if any(role.entry.kind in ("workload", "trainer") for role in spec.roles):
        lines.append(f"calls: transport {spec.transport}, at most {spec.call_timeout:g} s each")
    return lines


def plan_rows(spec: JobSpec, placement: Placement) -> list[dict[str, Any]]:
    """One object per worker: its assignment, entry, restarts, and the environment variables that unirun sets.

    A port that the launcher will choose is 0.
    """
    job, secrets = job_at(spec.run_id), sorted(secret_names(spec))
    rows = []
    for index, role in enumerate(spec.roles):
        port = spec.master_port if index == 0 else 0
        assignments = placement.of_role(role.name)
        there = Counter(each.node for each in assignments)
        group_ranks = {node: number for number, node in enumerate(there)}
        for each in assignments:
            member = StartWorker(each.rank, each.local_rank, 0, each.devices, each.cpus, each.share)
            order = StartRole(
                role=role.name,
                generation=0,
                restarts=0,
                world_size=role.count,
                local_world_size=there[each.node],
                group_rank=group_ranks[each.node],
                group_world_size=len(there),
                endpoint=f"{spec.master_addr}:{port}",
                members=(member,),
                mask=placement.masks.get(role.name, ""),
            )
            rows.append(
                {
                    **to_builtins(each),
                    "cwd": role.cwd or os.getcwd(),
                    "kind": role.entry.kind,
                    "restart": role.restart,
                    "max_restarts": role.max_restarts,
                    "command": command_of(role),
                    "env": worker_env(spec, order, member, job, each.node, {}) | dict.fromkeys(secrets, MASK),
                }
            )
    return rows


def command_of(role: RoleSpec) -> str:
    """The entry of a role as a command line."""
    entry = role.entry
    words = {
        "script": [Path(sys.executable).name, entry.target],
        "module": [Path(sys.executable).name, "-m", entry.target],
        "program": [entry.target],
        "function": ["function", entry.target],
        "workload": ["workload", entry.target],
        "trainer": ["trainer", entry.target],
    }[entry.kind]
    return " ".join([*words, *entry.args])


def _short_env(env: dict[str, str]) -> str:
    """The variables that tell workers apart; --json has all of them."""
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "CUDA_VISIBLE_DEVICES",
        "UNIRUN_DEVICE_SHARE",
        "OMP_NUM_THREADS",
    )
    return " ".join(f"{name}={env[name]}" for name in names if name in env)
