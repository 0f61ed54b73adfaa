"""``unirun graph …``: who calls whom, as a job's options or its file say. Starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable

from unirun.cli.compose import job_spec
from unirun.cli.files import write_file
from unirun.cli.options import parse
from unirun.cli.optiontable import OUTPUT, Option
from unirun.collocation import local_inventory, parse_fake
from unirun.graph import Graph, dot, from_edges, mermaid, svg, tree, warnings
from unirun.spec import JobSpec

FORMATS: dict[str, Callable[[Graph], str]] = {"tree": tree, "mermaid": mermaid, "dot": dot, "svg": svg}
FORMAT = Option(
    ("--format",), "value", OUTPUT, "how the graph is drawn (default: tree)", "FORM", (*FORMATS,), pet=False
)
FILE = Option(("-o", "--output"), "value", OUTPUT, "a file for the graph (default: print)", "FILE", pet=False)


def main(argv: list[str]) -> int:
    """Draw the graph of the job that `argv` describes. Returns 0. Raises `SpecError`, `UsageError`."""
    line = parse(argv, "unirun graph", (FORMAT, FILE))
    fake = line.options.get("inventory")
    graph = graph_of(job_spec(line, parse_fake(fake) if fake else local_inventory()))
    for warning in warnings(graph):
        print(f"unirun: {warning}", file=sys.stderr)
    picture = FORMATS[line.options.get("format", "tree")](graph)
    if "output" in line.options:
        write_file(line.options["output"], picture)
    else:
        sys.stdout.write(picture)
    return 0


def graph_of(spec: JobSpec) -> Graph:
    """The roles of `spec` and its edges; without any, a trainer calls each role of workloads. Raises `SpecError`."""
    edges = [*spec.edges]
    if not edges:
        trainers = (role.name for role in spec.roles if role.entry.kind == "trainer")
        workloads = [role.name for role in spec.roles if role.entry.kind == "workload"]
        edges = [{"from": trainer, "to": workload} for trainer in trainers for workload in workloads]
    return from_edges({role.name: role.count for role in spec.roles}, edges)
