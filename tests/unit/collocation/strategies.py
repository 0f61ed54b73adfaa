"""Small requests and inventories of every kind, for property tests."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.collocation.brute_force import component_of, hosts
from unirun.collocation.inventory import Inventory, PlacementRequest, RoleRequest, Ties
from unirun.collocation.planning.problem import problem_of
from unirun.errors import PlacementError

NAMES = ("a", "b", "c")


@st.composite
def inventories(draw: st.DrawFn, most: int = 3) -> Inventory:
    found = hosts(
        *draw(st.lists(st.sampled_from([4, 4, 3, 2, 2, 1, 0]), min_size=1, max_size=most)),
        numas=draw(st.sampled_from([1, 2])),
        nvlink=draw(st.sampled_from([None, None, lambda i, _: i // 2, lambda i, n: i % (n // 2 or 1)])),
    )
    nodes = []
    for node in found.nodes:
        changes: dict[str, object] = {"component": component_of(node.name)}
        if draw(st.integers(0, 2)) == 0:
            changes |= {
                "memory": draw(st.sampled_from([0, 40, 70])),
                "cpus": tuple(range(draw(st.integers(1, 8)))),
            }
        changes["resources"] = {"license": draw(st.integers(0, 3))} if draw(st.booleans()) else {}
        nodes.append(replace(node, **changes))
    return Inventory(tuple(nodes))


NEEDS = (
    {"cpus": 2},
    {"cpus": 5, "memory": 20},
    {"cpus": "all"},
    {"memory": 30},
    {"license": 1},
    {"license": 2, "cpus": 1},
)
"""Besides slots; no node has licenses that is not given some."""


@st.composite
def requests(draw: st.DrawFn, elastic: bool = False, most: int = 4) -> PlacementRequest:
    """Without faults. Each kind of constraint is there now and then."""
    size = draw(st.integers(1, most))
    roles = tuple(draw(_roles(name, size, elastic)) for name in NAMES[: draw(st.integers(1, 3))])
    names = [role.name for role in roles]
    request = PlacementRequest(roles)
    pairs = [*combinations(names, 2), tuple(names)]
    for kind in ("collocated", "together", "apart", "isolated"):
        if len(names) > 1 and draw(st.integers(0, 2)) == 0:
            request = _if_sound(request, **{kind: (draw(st.sampled_from(pairs)),)})
    weights = {pair: float(draw(st.integers(0, 9))) for pair in combinations(names, 2) if draw(st.booleans())}
    request = replace(request, ties=Ties(weights, draw(_parts(names))))
    for name, changes in (
        ("per_node", (1, 2)),
        ("per_group", (2,)),
        ("devices", (("0",), ("0", "1"), ("1", "3"))),
        ("component", (0, 0, 1)),
        ("needs", NEEDS),
    ):
        for at, role in enumerate(request.roles):
            if draw(st.integers(0, 5)) == 0:
                changed = replace(role, **{name: draw(st.sampled_from(changes))})
                request = _if_sound(request, roles=(*request.roles[:at], changed, *request.roles[at + 1 :]))
    spares, tainted = draw(st.sampled_from([(0, ()), (0, ()), (1, ()), (0, ("n0",))]))
    return replace(request, spares=spares, tainted=frozenset(tainted))


@st.composite
def spread(draw: st.DrawFn, request: PlacementRequest) -> PlacementRequest:
    """`request` with more constraints, if they can be: its plans are placements of `request` with ranks far apart."""
    names = [role.name for role in request.roles]
    for pair in combinations(names, 2):
        if draw(st.booleans()):
            request = _if_sound(request, apart=(*request.apart, pair))
    for at, role in enumerate(request.roles):
        if role.per_node is None and draw(st.booleans()):
            roles = (*request.roles[:at], replace(role, per_node=1), *request.roles[at + 1 :])
            request = _if_sound(request, roles=roles)
    return request


@st.composite
def _parts(draw: st.DrawFn, names: list[str]) -> tuple[tuple[str, ...], ...]:
    """As a graph has them: every role is in one."""
    of = [draw(st.integers(0, 2)) for _ in names]
    groups = [tuple(name for name, part in zip(names, of, strict=True) if part == each) for each in range(3)]
    return tuple(group for group in groups if group)


@st.composite
def _roles(draw: st.DrawFn, name: str, size: int, elastic: bool) -> RoleRequest:
    # Often the same count, so that roles can be collocated.
    count = draw(st.sampled_from([size, size, 1, 2, 3]))
    least = draw(st.integers(0, count)) if elastic else count
    device = draw(st.sampled_from(["cuda"] * 6 + ["cpu", None]))
    slots = draw(st.sampled_from([Fraction(1)] * 4 + [Fraction(2), Fraction(1, 2), Fraction(1, 3)]))
    return RoleRequest(name, count, least, device, slots if device == "cuda" else Fraction(1))


def _if_sound(request: PlacementRequest, **change: object) -> PlacementRequest:
    changed = replace(request, **change)
    whole = all(size is None or role.count % size == 0 for role in changed.roles for size in _sizes(role))
    try:
        problem_of(changed)
    except PlacementError:
        return request
    return changed if whole else request


def _sizes(role: RoleRequest) -> tuple[int | None, int | None]:
    """Both divide the count of a role in every spec."""
    return role.per_node, role.per_group
