"""The request to the planner: values made from the spec and the graph of a job."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from msgspec import field

from unirun.values import Value


class RoleRequest(Value):
    """One role's ranks and what each of them needs.

    The planner places as many ranks as there is room for, `count` at most and `least` at least. A rank takes `slots`
    slots of `device` (``cpu``: a slot for one process; ``cuda``, or another type that the inventory knows), which are
    on one node; a fraction is a share of one slot. A role with `device` None needs no slot, only a node. `per_node` is
    how many ranks a node holds that holds any. `per_group` cuts the ranks into groups of that many consecutive ones,
    each on one node. `devices` are the only ones, by index, that the role may have on any node. With `component`, all
    its nodes are of that one.
    """

    name: str
    count: int
    least: int
    device: str | None = "cpu"
    slots: Fraction = Fraction(1)
    per_node: int | None = None
    per_group: int | None = None
    devices: tuple[str, ...] | None = None
    component: int | None = None


class Ties(Value):
    """Relations between roles from the graph. `weights` are bytes per step between two of them, over all edges.

    `parts` are groups of roles that wait for each other (sub-DAGs). A role in no group, or alone in one, waits for no
    other.
    """

    weights: Mapping[tuple[str, str], float] = field(default_factory=dict)
    parts: tuple[tuple[str, ...], ...] = ()


class Request(Value):
    """All roles, in their order, and the constraints between them. Every group names roles of the job.

    `collocated`: the roles of a group share slots, rank by rank (device collocation). `together`: rank for rank, in
    proportion to their counts, the roles of a group are on one node, on different slots (host collocation). `apart`: no
    node holds ranks of two roles of a group (separation). `isolated`: no NUMA node does; they may share a host.
    `ties`: traffic between nodes is small, and roles that wait for each other are on few nodes. `spares` nodes are held
    back, and nodes in `tainted` are not used.
    """

    roles: tuple[RoleRequest, ...]
    collocated: tuple[tuple[str, ...], ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    apart: tuple[tuple[str, ...], ...] = ()
    isolated: tuple[tuple[str, ...], ...] = ()
    ties: Ties = Ties()
    spares: int = 0
    tainted: frozenset[str] = frozenset()
