"""The computation graph: who calls whom, what follows from it for placement and failover, and pictures of it."""

from unirun.graph.checks import faults, warnings, without_circles
from unirun.graph.instances import (
    Instance,
    InstanceEdge,
    instance_edges,
    instances,
    pair_count,
    sources_of,
    targets_of,
)
from unirun.graph.jobs import declared
from unirun.graph.learn import Caller, LearnedEdge, added, learn, sound
from unirun.graph.parts import Affected, affected, spans, tight_parts, weights
from unirun.graph.read import from_edges, read_edges
from unirun.graph.scenarios import SCENARIOS
from unirun.graph.svg import svg
from unirun.graph.text import dot, mermaid, tree, yaml
from unirun.graph.values import Direction, Edge, Graph, Kind, Role

__all__ = [
    "SCENARIOS",
    "Affected",
    "Caller",
    "Direction",
    "Edge",
    "Graph",
    "Instance",
    "InstanceEdge",
    "Kind",
    "LearnedEdge",
    "Role",
    "added",
    "affected",
    "declared",
    "dot",
    "faults",
    "from_edges",
    "instance_edges",
    "instances",
    "learn",
    "mermaid",
    "pair_count",
    "read_edges",
    "sound",
    "sources_of",
    "spans",
    "svg",
    "targets_of",
    "tight_parts",
    "tree",
    "warnings",
    "weights",
    "without_circles",
    "yaml",
]
