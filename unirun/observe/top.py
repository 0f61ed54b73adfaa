"""The frames of ``unirun top``: pure, from what is known of a job to lines that fit a terminal.

`Meters` turns totals of two looks into rates; `frame` draws.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

from unirun.observe.events import LoggedEvent
from unirun.observe.status import ENDED, CallStatus, JobStatus, RoleStatus, WorkerStatus
from unirun.spec.read import clipped
from unirun.values import Value
from unirun.wire.reports import VERSION

Order = Literal["rank", "state", "cpu", "memory", "step"]
ORDERS: tuple[Order, ...] = get_args(Order)

ITEMS = "/items"
"""At the end of the name of a metric: the items that a queue has at a producer."""

DECISIONS = ("decision", "failure", "restart", "move", "late", "straggler", "taint", "master")
"""Kinds of events that a frame shows."""

Style = Literal["", "title", "head", "good", "bad", "slow", "chosen", "dim"]


class Line(Value):
    """A line of a frame."""

    text: str
    style: Style = ""


class Look(Value):
    """The state of a job at a time, in seconds since the epoch; `tail` are the last lines of the chosen rank."""

    time: float
    status: JobStatus
    events: tuple[LoggedEvent, ...] = ()
    tail: tuple[str, ...] = ()


class TopView(Value):
    """The user's choices: the order and the filter of ranks, the chosen row, whether it is shown in detail, and the job
    (by its number, of `jobs`)."""

    order: Order = "rank"
    filter: str = ""
    row: int = 0
    detail: bool = False
    job: int = 0
    jobs: tuple[str, ...] = ()


Total = tuple[float, tuple[float, ...]]


class Meters:
    """Rates per second, from totals that change now and then: between the last two changes."""

    def __init__(self) -> None:
        self._last: dict[str, Total] = {}
        self._rates: dict[str, tuple[float, ...]] = {}

    def update(self, look: Look) -> None:
        """Take the totals of a look."""
        for role in look.status.roles:
            for worker in role.workers:
                who = name_of(role, worker)
                if worker.cpu is not None:
                    self._put(f"cpu {who} {worker.incarnation}", look.time, worker.cpu)
                if worker.step >= 0:
                    self._put(f"step {who} {worker.incarnation}", look.time, worker.step)
        for call in look.status.calls:
            self._put(f"call {edge_of(call)}", look.time, call.calls, call.seconds)

    def _put(self, name: str, now: float, *totals: float) -> None:
        before = self._last.get(name)
        if before is None:
            self._last[name] = now, totals
        elif totals != before[1] and now > before[0]:
            rates = ((new - old) / (now - before[0]) for new, old in zip(totals, before[1], strict=True))
            self._rates[name] = tuple(max(each, 0.0) for each in rates)
            self._last[name] = now, totals

    def of(self, name: str) -> tuple[float, ...] | None:
        """The rates of totals; None until they have changed."""
        return self._rates.get(name)


def name_of(role: RoleStatus, worker: WorkerStatus) -> str:
    """``actor:2``"""
    return f"{role.name}:{worker.rank}"


def edge_of(call: CallStatus) -> str:
    """``trainer → actor update``"""
    return f"{call.source} → {call.target} {call.method}"


def frame(look: Look, meters: Meters, choice: TopView, width: int = 80, height: int = 24) -> list[Line]:
    """The lines of a frame, at most `height`, none wider than `width`."""
    head = list(_head(look, choice))
    if choice.detail:
        body = list(_detail(look, meters, choice))
        rows = [*head, *body][: height - 1]
    else:
        below = [*_edges(look.status, meters), *_decisions(look)]
        # A third of the height at least is for ranks.
        below = below[: max(height - len(head) - 2 - max(height // 3, 3), 0)]
        ranks = list(_ranks(look, meters, choice, height - len(head) - len(below) - 1))
        rows = [*head, *ranks, *below]
    keys = "q quit  s sort  / filter  ↑↓ choose  ⏎ rank or back  tab next job"
    return [Line(clipped(each.text, width), each.style) for each in (*rows, Line(keys, "dim"))][:height]


def _head(look: Look, choice: TopView) -> Iterator[Line]:
    status = look.status
    end = look.time if status.ended is None else status.ended
    code = "" if status.code is None else f", exit code {status.code}"
    which = f" ({choice.job + 1} of {len(choice.jobs)})" if len(choice.jobs) > 1 else ""
    style: Style = "bad" if status.phase in ENDED[1:] else "title"
    text = f"{status.run_id}{which}: {status.phase}{code}, {end - status.started:.0f} s"
    yield Line(
        f"{text}; master term {status.epoch}, {status.failed} failures, sorted by {choice.order}", style
    )
    if status.reason:
        yield Line(f"reason: {status.reason}", "bad" if status.phase != "succeeded" else "")
    for problem in (*status.sick, *status.waiting, *status.stragglers)[:2]:
        yield Line(problem, "slow")
    versions = _newest(status)
    for role in status.roles:
        ready = sum(each.ready is not False and each.phase in ("running", "serving") for each in role.workers)
        words = [f"{role.name} {role.phase}", f"{ready} of {len(role.workers)} up"]
        words += [f"generation {role.generation}", f"restarts {role.used}"]
        if (stale := staleness(role, versions)) is not None:
            words.append(f"staleness {stale:g}")
        if (depth := queued(role)) is not None:
            words.append(f"queue {depth:g}")
        yield Line(", ".join(words), "good" if ready == len(role.workers) else "slow")


def _newest(status: JobStatus) -> Mapping[str, float]:
    """The latest version of each channel of weights."""
    found: dict[str, float] = defaultdict(lambda: -math.inf)
    for role in status.roles:
        for worker in role.workers:
            for name, value in worker.metrics.items():
                if name.endswith(VERSION) and value is not None:
                    found[name] = max(found[name], value)
    return found


def staleness(role: RoleStatus, newest: Mapping[str, float]) -> float | None:
    """The versions by which the slowest rank of a role is behind; None without weights."""
    behind = [
        newest[name] - value
        for worker in role.workers
        for name, value in worker.metrics.items()
        if name in newest and value is not None
    ]
    return max(behind, default=None)


def queued(role: RoleStatus) -> float | None:
    """The items that the producers of a role hold for consumers; None without a queue."""
    held = [
        v for each in role.workers for k, v in each.metrics.items() if k.endswith(ITEMS) and v is not None
    ]
    return sum(held) if held else None


def chosen(status: JobStatus, choice: TopView) -> list[tuple[RoleStatus, WorkerStatus]]:
    """The ranks that fit the filter, in the order that is chosen."""
    found = [
        (role, worker)
        for role in status.roles
        for worker in role.workers
        if choice.filter in f"{name_of(role, worker)} {worker.phase} {worker.node} {worker.exit}"
    ]
    match choice.order:
        case "state":
            found.sort(key=lambda each: (each[1].phase in ("running", "serving"), each[1].phase))
        case "cpu":
            found.sort(key=lambda each: -(each[1].cpu or 0.0))
        case "memory":
            found.sort(key=lambda each: -(each[1].memory or 0))
        case "step":
            found.sort(key=lambda each: each[1].step)
    return found


_COLUMNS = (
    f"{'RANK':16} {'STATE':10} {'NODE':8} {'INC':>3} {'CPU%':>5} {'MEM':>6} {'GPU%':>4} {'GMEM':>6} "
    f"{'STEP':>7} {'/S':>6}"
)


def _ranks(look: Look, meters: Meters, choice: TopView, room: int) -> Iterator[Line]:
    """The rows of ranks around the chosen one, in so many lines."""
    yield Line(f"{_COLUMNS}{f'  filter {choice.filter}' if choice.filter else ''}", "head")
    rows = chosen(look.status, choice)
    # Below them stands which ranks are shown, if there is no room for all.
    fit = room - 1 if len(rows) < room else max(room - 2, 1)
    at = min(max(choice.row, 0), max(len(rows) - 1, 0))
    first = max(at - fit + 1, 0)
    shown = rows[first : first + fit]
    for number, (role, worker) in enumerate(shown, first):
        style: Style = "chosen" if number == at else _style(worker)
        yield Line(_row(role, worker, meters), style)
    if len(rows) > fit:
        yield Line(f"… {len(rows)} ranks, {first + 1} to {first + len(shown)} are shown", "dim")


def _style(worker: WorkerStatus) -> Style:
    if worker.phase not in ("running", "serving"):
        return "bad" if worker.exit and worker.exit != "exit code 0" else "slow"
    return "slow" if worker.ready is False else ""


def _row(role: RoleStatus, worker: WorkerStatus, meters: Meters) -> str:
    who = f"{name_of(role, worker)} {worker.incarnation}"
    cpu, steps = meters.of(f"cpu {who}"), meters.of(f"step {who}")
    state = worker.phase if worker.ready is None else "ready" if worker.ready else "not ready"
    busy, gpu = ("", "") if worker.gpu is None else (f"{worker.gpu[0]:.0f}", _size(worker.gpu[1]))
    memory = "" if worker.memory is None else _size(worker.memory)
    step = "" if worker.step < 0 else str(worker.step)
    return (
        f"{name_of(role, worker):16.16} {state:10.10} {worker.node:8.8} {worker.incarnation:>3} "
        f"{'' if cpu is None else f'{100 * cpu[0]:.0f}':>5} {memory:>6} {busy:>4} {gpu:>6} "
        f"{step:>7} {'' if steps is None else f'{steps[0]:.4g}':>6}"
    )


def _size(size: float) -> str:
    """``1.2G``"""
    for unit in ("", "K", "M", "G"):  # noqa: B007 - used below
        # What rounds to 1000 is one of the next unit.
        if size < 999.5:
            break
        size /= 1000
    else:
        unit = "T"
    return f"{size:.3g}{unit}"


def _edges(status: JobStatus, meters: Meters) -> Iterator[Line]:
    calls = sorted(status.calls, key=lambda each: -each.calls)[:4]
    if calls:
        yield Line(f"{'CALLS':40} {'CALLS/S':>8} {'MEAN MS':>8} {'NOW MS':>8}", "head")
    for call in calls:
        rate = meters.of(f"call {edge_of(call)}")
        mean = 1e3 * call.seconds / call.calls if call.calls else 0.0
        now = f"{1e3 * rate[1] / rate[0]:.2f}" if rate is not None and rate[0] else ""
        rates = "" if rate is None else f"{rate[0]:.4g}"
        yield Line(f"{edge_of(call):40.40} {rates:>8} {mean:8.2f} {now:>8}")


def _decisions(look: Look) -> Iterator[Line]:
    told = [each for each in look.events if each.kind in DECISIONS][-4:]
    if told:
        yield Line("DECISIONS AND FAILURES, THE LATEST FIRST", "head")
    for event in reversed(told):
        yield Line(f"{look.time - event.time:6.0f} s ago  {event.kind}: {event.text}")


def _detail(look: Look, meters: Meters, choice: TopView) -> Iterator[Line]:
    """One rank, and the end of its log."""
    rows = chosen(look.status, choice)
    if not rows:
        yield Line("no rank fits the filter", "slow")
        return
    role, worker = rows[min(max(choice.row, 0), len(rows) - 1)]
    yield Line(_COLUMNS, "head")
    yield Line(_row(role, worker, meters), _style(worker))
    yield Line(
        f"process {worker.pid or '–'}, generation {worker.generation}{f', {worker.exit}' if worker.exit else ''}"
    )
    if worker.why:
        yield Line(worker.why, "slow")
    for name, value in list(worker.metrics.items())[:6]:
        yield Line(f"{name} = {'nan' if value is None else format(value, '.6g')}")
    yield from (
        Line(f"{each.kind}: {each.text}", "dim") for each in _about(look.events, name_of(role, worker))
    )
    yield Line("THE END OF ITS LOG", "head")
    yield from map(Line, look.tail)


def _about(events: Sequence[LoggedEvent], who: str) -> list[LoggedEvent]:
    return [each for each in events if who in each.about][-3:]
