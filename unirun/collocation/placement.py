"""The placement of ranks: values that the planner returns, the launcher executes, and the store keeps."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property

from msgspec import field

from unirun.values import Value


class Assignment(Value):
    """The node and slots of one rank.

    `slot` is the number of its first slot among those of its type on the node, in the node's order (of roles that
    are collocated the same), -1 for a role that needs none. `devices` is the mask that the worker sees: the devices of
    its role on its node in the order of their local ranks, so that ``cuda:{LOCAL_RANK}`` is its own, where each rank
    has one device to itself, else those of this rank alone; empty when it is to see none, and None when the mask is
    left as it is. `cpus` are the processors it is bound to, None for no binding.

    `own` are the indices of its slots, and `share` is its part of each of them, at most 1. `numa` is the NUMA node
    that all of them are near to, -1 when they are near to several or it has none.
    """

    role: str
    rank: int
    node: str
    slot: int
    local_rank: int
    devices: tuple[str, ...] | None = None
    cpus: tuple[int, ...] | None = None
    own: tuple[str, ...] = ()
    share: float = 1.0
    numa: int = -1


class Placement(Value, dict=True, gc=True):
    """The assignments of all ranks of a job; `note` is the decision in words.

    `spares` are nodes held back, `excluded` those that the job shall not use, and `lost` those that it had, in the
    order of the inventory.
    `crossing` is what goes from node to node, in bytes per step, when every rank of a role talks as much with every
    rank of the other. `masks` has, by role, the variable that shows a worker its devices (``CUDA_VISIBLE_DEVICES``);
    roles whose devices have none are not in it.
    """

    assignments: tuple[Assignment, ...]
    note: str
    spares: tuple[str, ...] = ()
    crossing: float = 0.0
    excluded: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    masks: Mapping[str, str] = field(default_factory=dict)

    def of_role(self, role: str) -> tuple[Assignment, ...]:
        """The assignments of `role` in rank order."""
        return self._by_role.get(role, ())

    @cached_property
    def _by_role(self) -> dict[str, tuple[Assignment, ...]]:
        """Cached, because the master uses it in every step."""
        found: dict[str, list[Assignment]] = {}
        for each in self.assignments:
            found.setdefault(each.role, []).append(each)
        return {role: tuple(there) for role, there in found.items()}

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The nodes in use."""
        return tuple(dict.fromkeys(a.node for a in self.assignments))


# The request to the planner: values made from the spec and the graph of a job.


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


class PlacementRequest(Value):
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
