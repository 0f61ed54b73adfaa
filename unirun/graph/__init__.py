"""The computation graph: who calls whom, what follows from it for placement and failover, and pictures of it."""

from unirun.graph.checks import faults, warnings
from unirun.graph.instances import (
    Instance,
    InstanceEdge,
    instance_edges,
    instances,
    pair_count,
    sources_of,
    targets_of,
)
from unirun.graph.learn import CallReport, Observed, learn
from unirun.graph.parts import Affected, affected, tight_parts, weights
from unirun.graph.read import from_edges, read_edges
from unirun.graph.scenarios import SCENARIOS
from unirun.graph.svg import svg
from unirun.graph.text import dot, mermaid, tree
from unirun.graph.values import Direction, Edge, Graph, Kind, Role

__all__ = [
    "SCENARIOS",
    "Affected",
    "CallReport",
    "Direction",
    "Edge",
    "Graph",
    "Instance",
    "InstanceEdge",
    "Kind",
    "Observed",
    "Role",
    "affected",
    "dot",
    "faults",
    "from_edges",
    "instance_edges",
    "instances",
    "learn",
    "mermaid",
    "pair_count",
    "read_edges",
    "sources_of",
    "svg",
    "targets_of",
    "tight_parts",
    "tree",
    "warnings",
    "weights",
]
