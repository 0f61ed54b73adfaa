"""``unirun graph``: the calls between roles, as declared by options and job files, or as observed in a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from unirun.cli.commandline import parse
from unirun.cli.commands import parser_of
from unirun.cli.compose import inventory_of, job_spec
from unirun.cli.options import FORMATS, GRAPH_OPTIONS
from unirun.cli.output import print_table, write_file
from unirun.cli.stored import find_status
from unirun.collocation.graph import (
    Direction,
    Edge,
    EdgeKind,
    Role,
    RoleGraph,
    declared,
    tight_parts,
    warnings,
    without_circles,
)
from unirun.collocation.graph.svg import dot, mermaid, svg, tree, yaml
from unirun.errors import UsageError
from unirun.launcher.foreground.terminal import in_colour, say, warn
from unirun.observe.status import CallStatus, RoleStatus
from unirun.spec.read import show_size

States = Mapping[str, str]
DRAWN: dict[str, Callable[[RoleGraph, States], str]] = {
    "tree": tree,
    "mermaid": mermaid,
    "dot": dot,
    "svg": svg,
    "yaml": lambda graph, _states: yaml(graph),
}


def main(argv: list[str]) -> int:
    """Draw the graph of the job that `argv` describes or names. Returns 0.

    Raises `SpecError`, `UsageError`, `JobError`, `StoreError`.
    """
    parser = parser_of("graph")
    parser.allow_abbrev = False
    parser.usage = "unirun graph [JOB] [--store URL] [--format FORM] [-o FILE]"
    parser.usage += "\n       unirun graph [options of unirun …]"
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return 0
    options, rest = parser.parse_known_args(argv)
    if options.job is not None and options.job.endswith((".yaml", ".yml")) and not rest:
        raise UsageError(f"{options.job} is a job file", f"write unirun graph --config {options.job}")
    if rest or _is_script(options.job):
        return _described(argv)
    return _seen(options.job, options.store, _form(options.format, options.output), options.output)


def _form(named: str | None, output: str | None) -> str:
    """The format that `named` says, else the one that fits the suffix of the file."""
    suffix = os.path.splitext(output or "")[1].removeprefix(".")
    return named or {"mmd": "mermaid", "gv": "dot", "yml": "yaml"}.get(
        suffix, suffix if suffix in FORMATS else "tree"
    )


def _is_script(name: str | None) -> bool:
    return name is not None and (name.endswith(".py") or os.path.isfile(name))


def _described(argv: list[str]) -> int:
    line = parse(argv, "unirun graph", GRAPH_OPTIONS)
    spec = job_spec(line, inventory_of(line))
    graph = declared(spec)
    together = {name for group in (*spec.collocations, *spec.host_collocations) for name in group}
    for warning in warnings(graph, together):
        warn(warning)
    output = line.options.get("output")
    form = _form(line.options.get("format"), output)
    _show(graph, {}, form, output)
    if graph.edges and form == "tree" and output is None:
        say()
        say(f"wait for each other: {_parts(graph)}")
    return 0


def _parts(graph: RoleGraph) -> str:
    """The sub-DAGs, as ``trainer + actor, reward``: calls that are waited for join roles to one."""
    return ", ".join(" + ".join(part) for part in tight_parts(graph))


def _seen(name: str | None, store: str | None, form: str, output: str | None) -> int:
    """The graph of a job that runs or ran, and the figures of its calls."""
    status, _ = find_status(store, name)
    roles = tuple(map(_role, status.roles))
    graph = RoleGraph(roles, tuple(_edge(call) for call in status.calls))
    if form == "yaml":
        graph = without_circles(graph)
    _show(graph, {role.name: role.phase for role in status.roles}, form, output)
    if not status.calls:
        warn(f"job {status.run_id} has made no calls that unirun has seen")
    elif form == "tree" and output is None:
        say()
        print_table(["CALL", "CALLS", "EACH", "SENT", "RETURNED"], [_row(call) for call in status.calls])
    return 0


def _role(role: RoleStatus) -> Role:
    """A vertex, with the addresses of its ranks."""
    addresses = tuple(worker.address for worker in role.workers if worker.address)
    return Role(role.name, len(role.workers), os.path.basename(role.program), addresses)


def _edge(call: CallStatus) -> Edge:
    kind, direction = cast(EdgeKind, call.kind), cast(Direction, call.direction)
    return Edge(call.source, call.target, call.method, kind, direction, call.asynchronous, call.weight)


def _row(call: CallStatus) -> list[str]:
    return [
        str(_edge(call)),
        str(call.calls),
        f"{1000 * call.seconds / call.calls:.3g} ms",
        show_size(call.bytes),
        show_size(call.returned),
    ]


def _show(graph: RoleGraph, states: States, form: str, output: str | None) -> None:
    draw = DRAWN[form]
    if form == "tree" and output is None and in_colour(sys.stdout):
        draw = partial(tree, colour=True)
    picture = draw(graph, states)
    if output is not None:
        write_file(output, picture)
    else:
        sys.stdout.write(picture)
