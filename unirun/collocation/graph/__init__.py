"""The computation graph: the calls between roles, and what placement and failover derive from them.

Pictures of it are in the modules `text` and `svg`, which only `unirun graph` imports.
"""

from unirun.collocation.graph.values import (
    Affected,
    LearnedEdge,
    ProcessCalls,
    Role,
    RoleGraph,
    added,
    affected,
    declared,
    faults,
    graph_of,
    learn,
    sound,
    tight_parts,
    warnings,
    weights,
    without_circles,
)
from unirun.spec.job import Direction, Edge, EdgeKind

__all__ = [
    "Affected",
    "Direction",
    "Edge",
    "EdgeKind",
    "LearnedEdge",
    "ProcessCalls",
    "Role",
    "RoleGraph",
    "added",
    "affected",
    "declared",
    "faults",
    "graph_of",
    "learn",
    "sound",
    "tight_parts",
    "warnings",
    "weights",
    "without_circles",
]
