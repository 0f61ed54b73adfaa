"""The ties between the roles of a job when their ranks are placed."""

from __future__ import annotations

from unirun.collocation import Ties
from unirun.collocation.graph import Graph, tight_parts, weights


def ties_of(graph: Graph) -> Ties:
    """The bytes between roles, and the roles that wait for each other, by the edges of `graph`."""
    return Ties(weights(graph), tight_parts(graph))
