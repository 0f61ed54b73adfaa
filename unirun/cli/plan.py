"""``unirun plan …``: what would run where, with which environment, as text and as a picture. Starts nothing."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, cycle, groupby, zip_longest
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from unirun.cli.commandline import items, parse
from unirun.cli.compose import plan_job, topology_of
from unirun.cli.options import PLAN_OPTIONS
from unirun.cli.output import print_table, screen_width, tell, write_file
from unirun.collocation import Assignment, Inventory, Node, Placement, accelerators, slot_types
from unirun.collocation.graph.svg import FAINT, INK, box, document, text_at, text_width
from unirun.collocation.inventory import CPU
from unirun.collocation.placing import TopologyOf, shown_need
from unirun.errors import UsageError
from unirun.launcher.environment import worker_env
from unirun.launcher.foreground.console import COLOURS
from unirun.launcher.foreground.terminal import in_colour, say
from unirun.launcher.planned import PlannedJob, plan_without
from unirun.launcher.warm.borrowing import choices, starts
from unirun.observe.jobdir import job_at
from unirun.spec.job import JobSpec, RoleSpec
from unirun.spec.read import clipped, nearest, printable
from unirun.spec.secrets import MASK, secret_names
from unirun.values import Value, natural, show_ranks
from unirun.wire.messages import StartRole, StartWorker

# Nodes × slots with the ranks on them, as a value.
#
# A row is a node and a column a slot: every device, each processor's slot that is in use on some node, and a column for
# ranks that need no slot. Of many nodes, consecutive rows that differ only by the numbers of ranks are one row.

WHOLE = 8
"""Up to so many nodes, each has a row of its own."""
MAX_ROWS = 40
"""The most rows; the other nodes are summed up in one line."""
ASIDE = ("spare", "excluded", "lost")
"""The reasons why a node has no ranks."""
_NOWHERE = ("", "")

Column = tuple[str, str]
"""The type of a slot and its index."""


class Tenant(Value):
    """Ranks of one role on one slot, each with `share` of it."""

    role: str
    ranks: tuple[int, ...]
    share: float

    @property
    def text(self) -> str:
        """``actor:0``; ``reward:0-3 0.25``."""
        share = "" if self.share >= 1 else f" {self.share:.3g}"
        return f"{self.role}:{_shown(self.ranks)}{share}"


Cell = tuple[Tenant, ...] | None
"""The tenants of a slot; None where the node has no such slot, or an unused slot does not count as free."""


class Row(Value):
    """One node, or several nodes that differ only by the numbers of their ranks: `node` and the `others`.

    `free` is the number of its free slots. `aside`, one of `ASIDE`, says why a node has no ranks. `ranks` are those of
    the `others`, by role.
    """

    node: str
    cells: tuple[Cell, ...]
    free: int
    aside: str = ""
    others: tuple[str, ...] = ()
    ranks: Mapping[str, tuple[int, ...]] | None = None

    @property
    def note(self) -> str:
        """The end of the row: the number of free slots, or why there are no ranks."""
        return self.aside or str(self.free)

    @property
    def folded(self) -> str:
        """The line for the others: ``n3…n17 as n2: actor:16-135``; empty when there are none."""
        if not self.others:
            return ""
        first, last = self.others[0], self.others[-1]
        names = first if len(self.others) == 1 else f"{first}…{last} ({len(self.others)} nodes)"
        ranks = ", ".join(f"{role}:{_shown(each)}" for role, each in (self.ranks or {}).items())
        return f"{names} as {self.node}{f': {ranks}' if ranks else ''}"


class Grid(Value):
    """The whole picture. `roles` are in the order of their colours, `programs` those that are programs; `rest` sums up
    the nodes without a row."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    roles: tuple[str, ...]
    rest: str = ""
    programs: frozenset[str] = frozenset()


def grid(
    placement: Placement,
    inventory: Inventory,
    types: Mapping[str, str],
    programs: frozenset[str] = frozenset(),
) -> Grid:
    """The picture of `placement` on `inventory`.

    `types` has the type of the slots of each role (`unirun.collocation.slot_types`), `programs` the roles that are
    programs.
    """
    given = any(each.own for each in placement.assignments)
    here: dict[str, dict[Column, dict[tuple[str, float], list[int]]]] = defaultdict(dict)
    for each in placement.assignments:
        for column in _columns_of(each, types.get(each.role, CPU), given):
            tenants = here[each.node].setdefault(column, {})
            tenants.setdefault((each.role, each.share), []).append(each.rank)
    devices = dict.fromkeys(column for node in inventory.nodes for column in _devices(node)) if given else {}
    used = dict.fromkeys(column for columns in here.values() for column in columns if column not in devices)
    columns = (*devices, *sorted(used, key=lambda column: (column == _NOWHERE, *_by_number(column))))
    nodes_aside = zip(ASIDE, (placement.spares, placement.excluded, placement.lost), strict=True)
    aside = {node: why for why, nodes in nodes_aside for node in nodes}
    rows = []
    for node in inventory.nodes:
        own = set(_devices(node)) if given else set()
        cells = tuple(_cell(here[node.name].get(column), column in own) for column in columns)
        free = _free(node, columns, cells, own)
        rows.append(Row(node.name, cells, free, aside.get(node.name, "")))
    if len(rows) > WHOLE:
        rows = [_fold([*group]) for _, group in groupby(rows, key=_look)]
    names = tuple(
        "no slot" if column == _NOWHERE else f"{column[0]} {clipped(column[1], 12)}" for column in columns
    )
    roles = tuple(dict.fromkeys(each.role for each in placement.assignments))
    return Grid(names, tuple(rows[:MAX_ROWS]), roles, _rest(rows[MAX_ROWS:]), programs)


def _columns_of(rank: Assignment, kind: str, given: bool) -> list[Column]:
    """The columns of a rank: its slots if ranks were `given` slots, else the processor's slot with its number."""
    if not given:
        return [_NOWHERE if rank.slot < 0 else (CPU, str(rank.slot))]
    return [(kind, index) for index in rank.own] or [_NOWHERE]


def _devices(node: Node) -> list[Column]:
    return [(device.type, device.index) for device in accelerators(node)]


def _by_number(column: Column) -> tuple[str, int, str]:
    kind, index = column
    return kind, natural(index) or 0, index


def _cell(tenants: Mapping[tuple[str, float], Sequence[int]] | None, there: bool) -> Cell:
    if tenants is None:
        return () if there else None
    return tuple(Tenant(role, tuple(ranks), share) for (role, share), ranks in tenants.items())


def _free(node: Node, columns: Sequence[Column], cells: Sequence[Cell], own: set[Column]) -> int:
    """The free devices of a node, or, when it has none to be free, its free processors."""
    if own:
        return sum(1 for cell in cells if cell == ())
    used = sum(1 for column, cell in zip(columns, cells, strict=True) if cell and column != _NOWHERE)
    return max(len(node.cpus) - used, 0)


def _look(row: Row) -> object:
    """Equal for rows that differ by the numbers of their ranks only."""
    cells = [
        None if cell is None else [(each.role, len(each.ranks), each.share) for each in cell]
        for cell in row.cells
    ]
    return cells, row.note


def _fold(rows: Sequence[Row]) -> Row:
    first, *others = rows
    if not others:
        return first
    return Row(
        first.node,
        first.cells,
        first.free,
        first.aside,
        tuple(row.node for row in others),
        _ranks_in_cell(others),
    )


def _ranks_in_cell(rows: Iterable[Row]) -> dict[str, tuple[int, ...]]:
    """By role, the ranks on the nodes of `rows`."""
    found: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        for tenant in (tenant for cell in row.cells for tenant in cell or ()):
            found[tenant.role].update(tenant.ranks)
        for role, ranks in (row.ranks or {}).items():
            found[role].update(ranks)
    return {role: tuple(sorted(ranks)) for role, ranks in found.items()}


def _rest(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    sizes = [(row, 1 + len(row.others)) for row in rows]
    number = sum(size for _, size in sizes)
    counts = {
        "free slots": sum(row.free * size for row, size in sizes if not row.aside),
        **{why: sum(size for row, size in sizes if row.aside == why) for why in ASIDE},
    }
    told = [f"{role}:{_shown(each)}" for role, each in _ranks_in_cell(rows).items()]
    told += [f"{count} {what}" for what, count in counts.items() if count]
    return f"… {number} more nodes: {', '.join(told) or 'full'}"


def _shown(ranks: Iterable[int]) -> str:
    """``0-3,8``; of a long list the beginning."""
    return clipped(show_ranks(sorted(ranks)), 24)


# The picture as lines of pieces, for a terminal and as SVG.

Piece = tuple[str, str]
"""A text and its role; no role for names, notes and a free slot."""

FREE = "·"
"""The text of a free slot."""


def table(picture: Grid) -> tuple[list[list[Piece]], list[int]]:
    """The lines, and the widths of their columns in characters. A line of one piece goes over all columns."""
    lines = [[(name, "") for name in ("NODE", *picture.columns, "FREE")]]
    for row in picture.rows:
        cells = [
            [(FREE, "")] if cell == () else [(printable(each.text), each.role) for each in cell or ()]
            for cell in row.cells
        ]
        stacked = zip_longest([(printable(row.node), "")], *cells, [(row.note, "")], fillvalue=("", ""))
        lines += [[*line] for line in stacked] + [[(row.folded, "")]] * bool(row.folded)
    columns = zip(*(line for line in lines if len(line) > 1), strict=True)
    widths = [max(len(text) for text, _ in column) for column in columns]
    return lines + [[(picture.rest, "")]] * bool(picture.rest), widths


def text(picture: Grid, *, colours: Sequence[int] = (), width: int = 80) -> str:
    """Lines for a terminal of `width` columns; slots that do not fit beside each other are below each other.

    `colours` are codes of a terminal's colours, for roles in their order; without any, the lines are plain.
    """
    codes = dict(zip(picture.roles, cycle(colours), strict=False))
    lines, widths = table(picture)
    shown = ""
    for bank in _banks(widths[1:-1], width - widths[0] - 2 - widths[-1]):
        last = bank.stop == len(picture.columns)
        columns = [0, *(number + 1 for number in bank), *[len(widths) - 1] * last]
        shown += "\n" if shown else ""
        for line in lines:
            pieces = [line[n] for n in columns] if len(line) > 1 else line * last
            words = [f"{text:{widths[n]}}" for n, (text, _) in zip(columns, pieces, strict=False)]
            if any(map(str.strip, words)):
                told = (
                    f"\x1b[{codes[role]}m{word}\x1b[0m" if role in codes else word
                    for word, (_, role) in zip(words, pieces, strict=True)
                )
                shown += f"{'  '.join(told).rstrip()}\n"
    return shown


FONT, LINE, GAP, MARGIN = 12.0, 20.0, 4.0, 20.0
"""Pixels: the size of letters, from one line to the next, between boxes, and around everything."""

_FILLS = (
    ("#a5f3fc", "#0e7490"),
    ("#fde68a", "#b45309"),
    ("#f5d0fe", "#a21caf"),
    ("#bbf7d0", "#15803d"),
    ("#bfdbfe", "#1d4ed8"),
    ("#fecaca", "#b91c1c"),
    ("#ddd6fe", "#6d28d9"),
    ("#fed7aa", "#c2410c"),
    ("#d9f99d", "#4d7c0f"),
    ("#e2e8f0", "#334155"),
)
"""Fill and outline of the ranks of a role; for roles in their order."""


def svg(picture: Grid) -> str:
    """The picture: ranks in the colours of their roles, those that share a slot below each other, free slots dashed.

    It brings its own background, so it is legible on a light and on a dark page. Programs have boxes with sharp corners
    and bars at their sides, as in `unirun.collocation.graph.svg`.
    """
    fills = dict(zip(picture.roles, cycle(_FILLS), strict=False))
    lines, widths = table(picture)
    inner = 10 if picture.programs else 6
    sizes = [text_width("m" * wide, FONT) + 2 * inner for wide in widths]
    left = [*accumulate(sizes, lambda x, size: x + size + GAP, initial=MARGIN - inner)]
    parts, right = [], left[-1] - inner
    for number, line in enumerate(lines):
        y, height = MARGIN + number * LINE, LINE - GAP
        for (text, role), x, size in zip(line, left, sizes, strict=False):
            fill, stroke = fills.get(role, ("none", FAINT))
            if role or text == FREE:
                look = {"rx": 4, "fill": fill, "stroke": stroke, "stroke_dasharray": None if role else "3 3"}
                parts.append(box(x, y, size, height, program=role in picture.programs, **look))
            if text and text != FREE:
                parts.append(text_at(text, x + inner, y + height / 2, INK if number else FAINT))
            right = max(right, x + inner + text_width(text, FONT))
    return document(right + MARGIN, 2 * MARGIN + len(lines) * LINE, FONT, parts)


def _banks(wide: Sequence[int], room: int) -> Iterator[range]:
    """Columns that fit beside each other, one at the least."""
    start = taken = 0
    for number, width in enumerate(wide):
        if number > start and taken + 2 + width > room:
            yield range(start, number)
            start, taken = number, 0
        taken += 2 + width
    yield range(start, len(wide))


def main(argv: list[str]) -> int:
    """Print the plan of the job that `argv` describes. Returns 0."""
    line = parse(argv, "unirun plan", PLAN_OPTIONS)
    planned = before = plan_job(line)
    if lost := items(line.options.get("lost", ())):
        planned = _without(before, lost, topology_of(line))
    spec, placement, inventory = planned.spec, planned.placement, planned.inventory
    rows = plan_rows(spec, placement)
    types = slot_types(spec, inventory)
    moved = moves(before.placement, placement, types)
    if "svg" in line.options:
        programs = frozenset(role.name for role in spec.roles if role.entry.kind == "program")
        write_file(line.options["svg"], svg(grid(placement, inventory, types, programs)))
    if line.options.get("json"):
        whole = {
            "spec": spec.to_json(),
            "note": placement.note,
            "spares": placement.spares,
            "excluded": placement.excluded,
            "lost": placement.lost,
            "moved": moved,
            "crossing": placement.crossing,
            "workers": rows,
        }
        print(json.dumps(whole, indent=2))
        return 0
    tell(f"job {spec.run_id}: {placement.note}")
    for line_of_text in (*_calls(spec), *map(starts, choices(job_at(spec.run_id), spec))):
        tell(line_of_text)
    say()
    if len(spec.roles) > 1 or len(inventory.nodes) > 1:
        colours = COLOURS if in_colour(sys.stdout) else ()
        picture = grid(placement, inventory, types)
        sys.stdout.write(f"{text(picture, colours=colours, width=screen_width() or 80)}\n")
    if lost:
        say(f"{_ranks(len(moved))} of {len(before.placement.assignments)} would move{':' if moved else ''}")
        if moved:
            places = [[each["worker"], each["before"], each["after"] or "nowhere"] for each in moved]
            print_table(["WORKER", "FROM", "TO"], places)
        say()
    envs = {f"{row['role']}:{row['rank']}": _told_env(row["env"]) for row in rows}
    common = {
        role.name: _in_common([envs[f"{role.name}:{rank}"] for rank in range(role.count)])
        for role in spec.roles
    }
    print_table(*_roles(spec, common))
    say()
    places = [
        [
            worker,
            row["node"],
            "-" if row["slot"] < 0 else str(row["slot"]),
            " ".join(each for each in env if each not in common[row["role"]]),
        ]
        for row, (worker, env) in zip(rows, envs.items(), strict=True)
    ]
    print_table(["WORKER", "NODE", "SLOT", "ENV"], places)
    return 0


def _roles(spec: JobSpec, env: Mapping[str, Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The settings that all ranks of a role have in common, as a table."""
    needs = {role.name: shown_need(role) for role in spec.roles}
    needy = any(needs.values())
    table = [
        [
            role.name,
            str(role.count),
            f"{role.restart}×{role.max_restarts}",
            *([needs[role.name] or "-"] if needy else []),
            " ".join(env[role.name]),
            command_of(role),
        ]
        for role in spec.roles
    ]
    return ["ROLE", "RANKS", "RESTART", *["NEEDS"] * needy, "ENV", "COMMAND"], table


def _without(planned: PlannedJob, lost: Sequence[str], topology: TopologyOf) -> PlannedJob:
    """The job when nodes are `lost`. Raises `UsageError` for a node that there is not, `PlacementError`."""
    names = [node.name for node in planned.inventory.nodes]
    for name in lost:
        if name not in names:
            raise UsageError(f"--lost: no node is called {name!r}", nearest(name, names))
    return plan_without(planned, lost, topology)


def moves(before: Placement, after: Placement, types: Mapping[str, str]) -> list[dict[str, str]]:
    """The workers whose node or slots differ, with their places ``before`` and ``after``, each as ``node0 cuda 1``;
    empty when there is no slot left. `types` are the types of slots by role."""
    was, now = _places(before, types), _places(after, types)
    return [
        {"worker": worker, "before": place, "after": now.get(worker, "")}
        for worker, place in was.items()
        if place != now.get(worker)
    ]


def _places(placement: Placement, types: Mapping[str, str]) -> dict[str, str]:
    """``node0 cuda 1,2`` by worker; the node alone for one that needs no slot."""
    return {
        f"{a.role}:{a.rank}": f"{a.node} {types[a.role]} {','.join(a.own)}" if a.own else a.node
        for a in placement.assignments
    }


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _calls(spec: JobSpec) -> list[str]:
    """The devices that roles share and the calls between roles; nothing for a job of scripts."""
    lines = [f"collocated, on the same devices: {', '.join(group)}" for group in spec.collocations]
    if any(role.entry.kind in ("workload", "trainer") for role in spec.roles):
        lines.append(f"calls: transport {spec.transport}, at most {spec.call_timeout:g} s each")
    return lines


def plan_rows(spec: JobSpec, placement: Placement) -> list[dict[str, Any]]:
    """One object per worker: its assignment, entry, restarts, and the environment variables that unirun sets.

    A port that the launcher will choose is 0.
    """
    job, secrets = job_at(spec.run_id), sorted(secret_names(spec))
    rows = []
    for index, role in enumerate(spec.roles):
        port = spec.master_port if index == 0 else 0
        assignments = placement.of_role(role.name)
        there = Counter(each.node for each in assignments)
        group_ranks = {node: number for number, node in enumerate(there)}
        for each in assignments:
            member = StartWorker(each.rank, each.local_rank, 0, each.devices, each.cpus, each.share)
            order = StartRole(
                role=role.name,
                generation=0,
                restarts=0,
                world_size=role.count,
                local_world_size=there[each.node],
                group_rank=group_ranks[each.node],
                group_world_size=len(there),
                endpoint=f"{spec.master_addr}:{port}",
                members=(member,),
                mask=placement.masks.get(role.name, ""),
            )
            rows.append(
                {
                    **to_builtins(each),
                    "cwd": role.cwd or os.getcwd(),
                    "kind": role.entry.kind,
                    "restart": role.restart,
                    "max_restarts": role.max_restarts,
                    "command": command_of(role),
                    "env": worker_env(spec, order, member, job, each.node, {}) | dict.fromkeys(secrets, MASK),
                }
            )
    return rows


def command_of(role: RoleSpec) -> str:
    """The entry of a role as a command line."""
    entry = role.entry
    python = Path(sys.executable).name
    words = {"script": [python], "module": [python, "-m"], "program": []}.get(entry.kind, [entry.kind])
    return " ".join([*words, entry.target, *entry.args])


def _told_env(env: dict[str, str]) -> list[str]:
    """The variables that tell workers and roles apart; --json has all of them."""
    names = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "UNIRUN_DEVICE_SHARE", "OMP_NUM_THREADS")
    return [f"{name}={env[name]}" for name in names if name in env]


def _in_common(ranks: Sequence[Sequence[str]]) -> list[str]:
    """The variables that all `ranks` have, but for the local rank, which differs as soon as there are two of them."""
    return [
        each
        for each in (ranks[0] if ranks else ())
        if all(each in other for other in ranks) and not each.startswith("LOCAL_RANK=")
    ]
