"""The computation graph: the calls between roles, and what placement and failover derive from them.

Pictures of it are in `unirun.graph.text` and `unirun.graph.svg`, ready-made graphs in `unirun.graph.scenarios`, which
only `unirun graph` imports.
"""

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
from unirun.graph.jobs import declared, graph_of
from unirun.graph.learn import LearnedEdge, ProcessCalls, added, learn, sound
from unirun.graph.parts import Affected, affected, spans, tight_parts, weights
from unirun.graph.values import Graph, Role
from unirun.spec.edges import Direction, Edge, Kind

__all__ = [
    "Affected",
    "Direction",
    "Edge",
    "Graph",
    "Instance",
    "InstanceEdge",
    "Kind",
    "LearnedEdge",
    "ProcessCalls",
    "Role",
    "added",
    "affected",
    "declared",
    "faults",
    "graph_of",
    "instance_edges",
    "instances",
    "learn",
    "pair_count",
    "sound",
    "sources_of",
    "spans",
    "targets_of",
    "tight_parts",
    "warnings",
    "weights",
    "without_circles",
]
