"""The contents of the page as plain values: a job, what changed in it, its graph, its timeline, its failures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from msgspec import to_builtins

from unirun.collocation.graph import Direction, Edge, EdgeKind, Role, RoleGraph
from unirun.collocation.graph.svg import svg
from unirun.failover.hangs import named
from unirun.failover.stacks import groups, meeting_line, meetings
from unirun.observe.events import LoggedEvent, consequences, covers, failures
from unirun.observe.status import JobStatus, RoleStatus, WorkerStatus
from unirun.values import natural
from unirun.wire.reports import RankStacks

SPANS = 200
"""Spans of one rank in a timeline; of more, the latest."""

MARKED = (
    "failure",
    "decision",
    "master",
    "agent_lost",
    "arrival",
    "drain",
    "taint",
    "sick",
    "inject",
    "stopping",
)
"""Kinds of events that a timeline has a mark for."""

Plain = dict[str, Any]

COLUMNS = (
    "state",
    "node",
    "incarnation",
    "generation",
    "pid",
    "memory",
    "cpu",
    "exit",
    "address",
    "why",
    "slots",
)
"""The values in the row of a rank, in this order. `node` is a number in the list of nodes."""


def job_view(status: JobStatus) -> Plain:
    """A job as the page shows it: its fields, and for each role a row of `COLUMNS` for each rank."""
    nodes = sorted({worker.node for role in status.roles for worker in role.workers} - {""})
    place = {node: number for number, node in enumerate(nodes)}
    plain: Plain = {
        name: getattr(status, name)
        for name in status.__struct_fields__
        if name not in ("roles", "failures", "calls")
    }
    roles = [_role(status, role, place) for role in status.roles]
    calls = [to_builtins(call) for call in status.calls]
    return {**to_builtins(plain), "nodes": nodes, "columns": COLUMNS, "roles": roles, "calls": calls}


def _role(status: JobStatus, role: RoleStatus, place: Mapping[str, int]) -> Plain:
    failed = {(f.rank, f.incarnation) for f in status.failures if f.role == role.name}
    rows = [_row(role, worker, place, (worker.rank, worker.incarnation) in failed) for worker in role.workers]
    fields = ("name", "phase", "generation", "used", "program")
    return {**{name: getattr(role, name) for name in fields}, "ranks": rows}


def _row(role: RoleStatus, worker: WorkerStatus, place: Mapping[str, int], failed: bool) -> list[Any]:
    return [
        state_of(role, worker, failed=failed),
        place.get(worker.node, -1),
        worker.incarnation,
        worker.generation,
        worker.pid,
        worker.memory,
        worker.cpu,
        worker.exit,
        worker.address,
        worker.why,
        worker.slots,
    ]


def state_of(role: RoleStatus, worker: WorkerStatus, *, failed: bool) -> str:
    """The state of a rank in one word: its phase; of one whose process has ended ``done``, ``failed`` or ``stopped``;
    of a program whose probe fails ``unready``. `failed` says that this incarnation has failed."""
    if worker.phase != "exited":
        return "unready" if worker.ready is False and worker.phase in ("running", "serving") else worker.phase
    if failed:
        return "failed"
    if worker.exit in ("exit code 0", ""):
        return "done"
    return "failed" if role.phase == "failed" else "stopped"


def changes(before: Plain, after: Plain) -> Plain | None:
    """The changes of a job between two views of it: new values of its fields, and rows of ranks by their numbers.
    None for nothing. The whole of `after`, as ``all``, when roles or nodes are others."""
    shape = [(role["name"], len(role["ranks"])) for role in after["roles"]]
    if before["nodes"] != after["nodes"] or shape != [(r["name"], len(r["ranks"])) for r in before["roles"]]:
        return {"all": after}
    fields = {name: value for name, value in after.items() if name != "roles" and before[name] != value}
    roles = {}
    for old, new in zip(before["roles"], after["roles"], strict=True):
        changed = {name: value for name, value in new.items() if name != "ranks" and old[name] != value}
        pairs = enumerate(zip(old["ranks"], new["ranks"], strict=True))
        rows = {str(rank): row for rank, (was, row) in pairs if was != row}
        if changed or rows:
            roles[new["name"]] = {"fields": changed, "ranks": rows}
    return {"fields": fields, "roles": roles} if fields or roles else None


def rank_view(status: JobStatus, role: str, rank: int) -> Plain | None:
    """Everything about one rank; None if the job does not have it."""
    for each in status.roles:
        if each.name == role and 0 <= rank < len(each.workers):
            worker = each.workers[rank]
            failed = any(
                f.who == f"{role}:{rank}" and f.incarnation == worker.incarnation for f in status.failures
            )
            state = state_of(each, worker, failed=failed)
            return {**to_builtins(worker), "role": role, "state": state, "restarts": each.restarts}
    return None


def graph_picture(status: JobStatus) -> str:
    """The calls between the roles as SVG, as ``unirun graph`` draws them."""
    roles = tuple(Role(role.name, len(role.workers), role.program) for role in status.roles)
    edges = tuple(
        Edge(
            call.source,
            call.target,
            call.method,
            cast(EdgeKind, call.kind),
            cast(Direction, call.direction),
            call.asynchronous,
            call.weight,
        )
        for call in status.calls
    )
    return svg(RoleGraph(roles, edges), {role.name: role.phase for role in status.roles})


def event_rows(events: Iterable[LoggedEvent]) -> list[Plain]:
    """Events without their details, which are long."""
    fields = ("id", "time", "kind", "text", "cause", "about")
    return [{name: getattr(event, name) for name in fields} for event in events]


def failure_rows(events: Sequence[LoggedEvent], last: int) -> list[Plain]:
    """The `last` failures with their records, durations, and the events around them."""
    found = [*failures(events)][-last:]
    return [
        {**to_builtins(each), "events": event_rows(consequences(events, each)[:100])}
        for each in reversed(found)
    ]


def timeline(status: JobStatus, events: Sequence[LoggedEvent], now: float) -> Plain:
    """The spans of each rank, in seconds since the start: a state, and from when to when. Marks are events that
    concern more than one rank, or that decide."""
    began = status.started
    size = {role.name: len(role.workers) for role in status.roles}
    lanes = {role.name: [_Lane() for _ in role.workers] for role in status.roles}
    for event in events:
        at = round(event.time - began, 3)
        for subject in event.about:
            role, _, ranks = subject.partition(":")
            for rank in _ranks(ranks, size.get(role, 0)):
                lanes[role][rank].take(event.kind, at, bool(ranks), ended_well="exit code 0" in event.text)
    end = round((status.ended if status.ended is not None else now) - began, 3)
    marks = [
        {"at": round(e.time - began, 3), "kind": e.kind, "text": e.text, "about": e.about}
        for e in events
        if e.kind in MARKED
    ]
    roles = [{"name": name, "ranks": [lane.spans(end) for lane in each]} for name, each in lanes.items()]
    return {"end": end, "roles": roles, "marks": marks[-2000:]}


def _ranks(text: str, count: int) -> Iterable[int]:
    """The ranks in ``0-3,7``; all of them for an empty text, as of a role."""
    if not text:
        return range(count)
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = natural(first), natural(last or first)
        if low is not None and high is not None:
            found += range(low, min(high + 1, count))
    return found


class _Lane:
    """The spans of one rank."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float, str]] = []
        self._since, self._state = 0.0, ""

    def take(self, kind: str, at: float, alone: bool, *, ended_well: bool) -> None:
        """An event of a kind about this rank `alone`, or about its role."""
        if (
            kind == "order" and alone and self._state in ("", "failed", "stopped", "done")
        ) or kind == "started":
            self._to("starting", at)
        elif kind in ("running", "ready") and self._state not in ("failed", "done", "stopped"):
            self._to("running", at)
        elif kind == "unready" and alone:
            self._to("unready", at)
        elif kind == "exit" and alone:
            self._to("done" if ended_well else "stopped", at)
        elif kind == "failure" and alone:
            # Written with the exit that it is about.
            self._to("failed", at)

    def _to(self, state: str, at: float) -> None:
        if state == self._state:
            return
        if self._state and at > self._since:
            self._spans.append((self._since, at, self._state))
        self._since, self._state = at, state

    def spans(self, end: float) -> list[tuple[float, float, str]]:
        """All spans; the last one goes on until the end."""
        last = [(self._since, max(end, self._since), self._state)] if self._state else []
        return [*self._spans, *last][-SPANS:]


def story_rows(events: Sequence[LoggedEvent], who: str, last: int = 50) -> list[Plain]:
    """The latest events about a rank."""
    return event_rows([e for e in events if any(covers(each, who) for each in e.about)][-last:])


def stack_view(ranks: Sequence[RankStacks], silent: Sequence[str]) -> Plain:
    """The stacks of all ranks, equal ones together and the odd one first, and the collectives that they are in;
    `silent` are nodes that have not answered."""
    roles: dict[str, list[RankStacks]] = {}
    for rank in sorted(ranks, key=lambda each: each.progress.worker):
        roles.setdefault(rank.progress.worker.role, []).append(rank)
    return {
        "silent": list(silent),
        "roles": [
            {
                "name": role,
                "groups": [
                    {"who": named(each.workers), "state": each.state, "frames": list(each.frames)}
                    for each in groups(found)
                ],
                "meetings": [meeting_line(each) for each in meetings(found)],
            }
            for role, found in roles.items()
        ],
    }
