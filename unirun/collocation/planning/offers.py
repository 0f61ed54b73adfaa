"""What would make a request fit: found by planning it again with something changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import islice, repeat
from math import ceil

from msgspec.structs import replace

from unirun.collocation.inventory import Inventory, Node
from unirun.collocation.planning.changes import changes, without_a_group
from unirun.collocation.planning.faults import request_faults
from unirun.collocation.planning.problem import Bundle, Cells, Problem, compile_request
from unirun.collocation.planning.rooms import devices_of
from unirun.collocation.planning.solve import bounds, feasibility
from unirun.collocation.planning.wording import both, join, some
from unirun.collocation.request import Request, RoleRequest
from unirun.collocation.slots import CPU
from unirun.values import Value

TRIES = 8
"""So many numbers are tried for a constraint, the nearest first."""

SHARES = (Fraction(1, 2), Fraction("0.333"), Fraction("0.25"), Fraction("0.1"))
"""Parts of a slot that are tried, as they are written in a job file."""

MANY = 1_000_000
"""More than any node has of anything."""


class Offer(Value):
    """A request that fits, with `more` nodes if it needs them, and how it differs from the one that does not.

    `binds` is the constraint that it lets go: of `role`, if it is a role's. Neither is there when there is less to
    place, or more room.
    """

    request: Request
    text: str
    binds: str = ""
    role: str = ""
    more: int = 0


def offer(before: Request, after: Request) -> Offer:
    """`after`, which fits, in place of `before`."""
    found = changes(before, after)
    binds = join(change.binds for change in found if change.binds)
    return Offer(after, both(change.text for change in found), binds, found[-1].role)


class Trials:
    """Tries requests on the nodes of an inventory. Of those that are alike one stands for all."""

    def __init__(self, inventory: Inventory) -> None:
        kinds: dict[object, int] = {}
        self._first: list[Node] = []
        """By kind of node."""
        self._kinds: dict[str, int] = {}
        """By the name of a node, in the order of the inventory."""
        for node in inventory.nodes:
            kind = kinds.setdefault((devices_of(node), node.cpus, node.numa), len(kinds))
            if kind == len(self._first):
                self._first.append(node)
            self._kinds[node.name] = kind

    def nodes(self, request: Request, more: int = 0) -> list[Node]:
        """What `request` may use when there are `more` like the usual one. Those that are alike are in a row."""
        sound = [kind for name, kind in self._kinds.items() if name not in request.tainted]
        if more:
            sound += [self._kinds[self.usual(request).name]] * more
        found = Counter(sound[: max(len(sound) - request.spares, 0)])
        return [node for kind, number in found.items() for node in repeat(self._first[kind], number)]

    def held(self, request: Request) -> int:
        """How many nodes are held back as spares."""
        return min(request.spares, len(self._kinds.keys() - request.tainted))

    def usual(self, request: Request) -> Node:
        """Of the nodes that have all types of devices that are asked for, else of all, the first of the commonest."""
        types = {role.device for role in request.roles} - {None, CPU}

        def has_all(kind: int) -> bool:
            return types.issubset(device.type for device in self._first[kind].devices)

        counts = Counter(self._kinds.values())
        return self._first[max(counts, key=lambda kind: (has_all(kind), counts[kind], -kind))]

    def fit(self, request: Request, more: int = 0) -> bool:
        """Whether there is a place for what `request` needs at least."""
        if request_faults(request):
            return False
        problem, faults = compile_request(request)
        return not faults and feasibility(problem, self.nodes(request, more))(bounds(problem)[0])

    def counts(self, request: Request) -> list[int]:
        """By bundle: with how many of its cells `request`, which does not fit, would fit; 0 if with none."""
        problem, _ = compile_request(request)
        fits = feasibility(problem, self.nodes(request))
        least, _ = bounds(problem)

        def most(bundle: int) -> int:
            before, after = least[:bundle], least[bundle + 1 :]
            return border(0, least[bundle], lambda cells: fits((*before, cells, *after)))

        return [most(bundle) for bundle in range(len(least))]

    def fewer(self, request: Request, counts: Sequence[int]) -> Iterator[Offer]:
        """With fewer ranks in one bundle, of which `counts` cells fit: where the fewest are missing first."""
        problem, _ = compile_request(request)
        least, _ = bounds(problem)
        missing = {
            b: (least[b] - count) * problem.bundles[b].ranks for b, count in enumerate(counts) if count
        }
        for bundle in sorted(missing, key=lambda b: (missing[b], b)):
            changed = _with_cells(request, problem, (*least[:bundle], counts[bundle], *least[bundle + 1 :]))
            if self.fit(changed):
                yield offer(request, changed)
        for each, count in zip(problem.bundles, counts, strict=True):
            if not count and len(each.stacks) > 1:
                yield from islice(self._in_smaller_cells(request, each), 1)

    def _in_smaller_cells(self, request: Request, bundle: Bundle) -> Iterator[Offer]:
        """With some ranks fewer in roles that are together, so that they can be cut into smaller parts.

        Of 4001 actors and 3000 rollouts a node must have all; of 4000 and 3000 it may have 4 and 3.
        """
        roles = {role.name: role for stack in bundle.stacks for role in stack.roles}
        if any(role.least < role.count for role in roles.values()):
            return
        firsts = [stack.roles[0] for stack in bundle.stacks]
        least = max(ceil(role.count * role.slots / max(self.most(role.device), 1)) for role in firsts)
        most = min(role.count for role in roles.values())

        def left_over(parts: int) -> int:
            return sum(role.count % parts for role in roles.values())

        tries = sorted(range(least, most + 1), key=lambda parts: (left_over(parts), -parts))
        for parts in islice(tries, TRIES):
            fewer = {name: role.count - role.count % parts for name, role in roles.items()}
            changed = replace(
                request,
                roles=tuple(
                    replace(role, least=fewer[role.name], count=fewer[role.name])
                    if role.name in fewer
                    else role
                    for role in request.roles
                ),
            )
            if self.fit(changed):
                yield offer(request, changed)

    def smaller(self, request: Request) -> Request | None:
        """With fewer ranks in all bundles, by equal parts."""
        problem, faults = compile_request(request)
        if faults or request_faults(request):
            return None
        least, _ = bounds(problem)
        fits = feasibility(problem, self.nodes(request))
        parts = max(least)

        def part(number: int) -> Cells:
            return tuple(max(count * number // parts, min(count, 1)) for count in least)

        if not fits(part(0)):
            return None
        changed = _with_cells(request, problem, part(border(0, parts, lambda number: fits(part(number)))))
        return changed if self.fit(changed) else None

    def room(self, request: Request) -> Iterator[Offer]:
        """With spares or excluded nodes in use."""
        if request.spares and self.fit(replace(request, spares=0)):
            spares = border(0, request.spares, lambda number: self.fit(replace(request, spares=number)))
            yield offer(request, replace(request, spares=spares))
        # The largest are wanted back first.
        names = sorted(request.tainted & self._kinds.keys())
        names.sort(key=lambda name: -len(self._first[self._kinds[name]].devices))

        def without(back: int) -> Request:
            return replace(request, tainted=request.tainted.difference(names[:back]))

        if names and self.fit(without(len(names))):
            yield offer(request, without(border(len(names), 0, lambda back: self.fit(without(back)))))

    def more(self, request: Request) -> Offer | None:
        """With more nodes like the usual one, at most as many as there are ranks."""
        ranks = sum(role.least for role in request.roles) + request.spares
        if not self._first or not self.fit(request, ranks):
            return None
        most = 1
        while most < ranks and not self.fit(request, most):
            most *= 2
        number = border(min(most, ranks), most // 2, lambda number: self.fit(request, number))
        like = f" like {self.usual(request).name}" if len(self._first) > 1 else ""
        return Offer(request, f"adding {some(number, 'node')}{like}", more=number)

    def loosened(self, request: Request) -> Iterator[Offer]:
        """With one constraint less, or less of it."""
        yield from (offer(request, changed) for changed in without_a_group(request) if self.fit(changed))
        for role in request.roles:
            yield from self.narrower(request, role)
            for others in (self._per_node(role), _per_group(role), _devices(role)):
                yield from self._first_of(request, role, others)

    def narrower(self, request: Request, role: RoleRequest) -> Iterator[Offer]:
        """With fewer slots for a rank of `role`, or a smaller share of one."""
        if role.slots > 1:
            widest = min(int(role.slots) - 1, self.most(role.device))
            sizes = [Fraction(size) for size in range(widest, 0, -1)]
        else:
            sizes = [share for share in SHARES if share < role.slots < 1]
        yield from self._first_of(request, role, (replace(role, slots=size) for size in sizes))

    def _first_of(
        self, request: Request, role: RoleRequest, others: Iterable[RoleRequest]
    ) -> Iterator[Offer]:
        """The first of `others`, which replace `role`, with which `request` fits."""
        for other in islice(others, TRIES):
            changed = replace(request, roles=tuple(other if each is role else each for each in request.roles))
            if self.fit(changed):
                yield offer(request, changed)
                return

    def _per_node(self, role: RoleRequest) -> Iterator[RoleRequest]:
        """The nearest first. Of those that leave too few nodes, or fill more than one, none is tried."""
        there = role.per_node
        if there is None:
            return
        most = self.most(role.device) // role.slots
        sizes = (size for size in range(1, role.count + 1) if role.count % size == 0 and size != there)
        for size in sorted(sizes, key=lambda size: abs(size - there)):
            if size <= most and role.count <= size * len(self._kinds):
                yield replace(role, per_node=size)

    def most(self, type: str | None) -> int:
        """How many slots of a type a node has at most; of places on processors there is no end."""
        if type in (None, CPU):
            return MANY
        return max((sum(device.type == type for device in node.devices) for node in self._first), default=0)


def _per_group(role: RoleRequest) -> Iterator[RoleRequest]:
    if role.per_group is not None:
        parts = (size for size in range(role.per_group - 1, 1, -1) if role.per_group % size == 0)
        yield from (replace(role, per_group=size) for size in parts)
        yield replace(role, per_group=None)


def _devices(role: RoleRequest) -> Iterator[RoleRequest]:
    if role.devices is not None:
        yield replace(role, devices=None)


def _with_cells(request: Request, problem: Problem, cells: Cells) -> Request:
    """`request`, when `cells` are the least of each bundle; a role that may not have fewer ranks has so many."""
    roles = {role.name: role for role in request.roles}
    for bundle, count in zip(problem.bundles, cells, strict=True):
        for stack in bundle.stacks if count < bundle.least else ():
            for role in stack.roles:
                ranks = count * stack.ranks
                elastic = role.least < role.count
                least = min(role.least, ranks)
                roles[role.name] = replace(role, least=least, count=role.count if elastic else ranks)
    return replace(request, roles=tuple(roles.values()))


def border(good: int, bad: int, fits: Callable[[int], bool]) -> int:
    """The number nearest to `bad`, which does not fit, that does, when all between it and `good` do."""
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
