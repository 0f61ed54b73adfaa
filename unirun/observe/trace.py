"""The trace of a job in the JSON of Chrome's trace events, which Perfetto and chrome://tracing open.

Pure: from the events, metrics and spans of a job to trace events on one clock, that of the master's host. Each rank is
a process of the trace, and so is the master. A call and its run in a worker are joined by a flow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from unirun.observe.events import LoggedEvent
from unirun.observe.spans import TraceSpan
from unirun.values import Value, WorkerId
from unirun.wire.reports import VERSION

MASTER = 1
"""The number of the process of the trace that has the master's events; the ranks follow it."""

LIFE, CALLS, RUNS, COLLECTIVES = 1, 2, 3, 4
"""The tracks of a rank: its life, the calls that it makes, those that it runs, and its collectives."""

INSTANTS = frozenset(
    [
        "failure",
        "decision",
        "restart",
        "move",
        "cut_off",
        "late",
        "straggler",
        "taint",
        "sick",
        "silence",
        "agent_lost",
        "arrival",
        "drain",
        "store",
        "affected",
        "stop",
        "stopping",
        "end",
        "inject",
        "master",
        "resumed",
        "caught_up",
        "order",
        "join",
        "start",
        "role",
    ]
)
"""Kinds of events without a length, on the master's track."""

Row = dict[str, Any]


class MetricRow(Value):
    """A line of the metrics of a job."""

    time: float
    role: str
    rank: int
    values: dict[str, float | None]


class Offset(Value):
    """The clock of a node minus that of the master's host, in seconds: an estimate, and how wrong it may be (None: not
    known)."""

    seconds: float = 0.0
    within: float | None = None


def offsets(
    events: Sequence[LoggedEvent], spans: Mapping[WorkerId, Sequence[TraceSpan]], nodes: Mapping[str, str]
) -> dict[str, Offset]:
    """The offsets of the nodes. `nodes` has the node of each rank.

    What a worker does comes after the order to start it, and before its end is noticed: each worker bounds the offset
    from both sides. On one host it is 0, which is within the bounds.
    """
    ordered: dict[str, float] = {}
    ended: dict[str, float] = {}
    for event in events:
        for who in event.about:
            if event.kind == "order":
                for each in _ranks(who):
                    ordered.setdefault(each, event.time)
            elif event.kind == "exit":
                ended[who] = event.time
    bounds: dict[str, tuple[float, float]] = {}
    for worker, found in spans.items():
        who = f"{worker.role}:{worker.rank}"
        if not found or who not in nodes:
            continue
        low, high = bounds.get(nodes[who], (-float("inf"), float("inf")))
        if who in ordered:
            high = min(high, min(each.began for each in found) / 1e9 - ordered[who])
        if who in ended:
            low = max(low, max(each.ended for each in found) / 1e9 - ended[who])
        bounds[nodes[who]] = low, high
    return {node: _offset(low, high) for node, (low, high) in bounds.items()}


def _offset(low: float, high: float) -> Offset:
    """The offset nearest to 0 within bounds."""
    seconds = min(max(0.0, low), high) if low <= high else (low + high) / 2
    width = max(high - seconds, seconds - low)
    return Offset(seconds, width if width < float("inf") else None)


def _ranks(who: str) -> list[str]:
    """``actor:0``, ``actor:1`` for ``actor:0-1``."""
    role, colon, ranks = who.partition(":")
    if not colon:
        return []
    spans = (re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part) for part in ranks.split(","))
    return [f"{role}:{n}" for m in spans if m for n in range(int(m[1]), int(m[2] or m[1]) + 1)]


def trace_events(
    events: Sequence[LoggedEvent],
    metrics: Iterable[MetricRow],
    spans: Mapping[WorkerId, Sequence[TraceSpan]],
    nodes: Mapping[str, str],
) -> Iterator[Row]:
    """The trace events of a job, in microseconds since its first event."""
    clocks = offsets(events, spans, nodes)
    began = events[0].time if events else 0.0
    numbers = {who: MASTER + 1 + index for index, who in enumerate(nodes)}
    yield from _names(nodes, numbers, clocks)
    yield from _of_master(events, began)
    yield from _lives(events, numbers, began)
    for row in metrics:
        who = f"{row.role}:{row.rank}"
        for name, value in row.values.items():
            if name.endswith(VERSION) and value is not None and who in numbers:
                at = _us(row.time - clocks.get(nodes[who], Offset()).seconds - began)
                common = {"pid": numbers[who], "tid": LIFE, "ts": at}
                yield {**common, "ph": "i", "s": "t", "cat": "weights", "name": f"{name} {value:g}"}
                yield {**common, "ph": "C", "name": name, "args": {"version": value}}
    for worker, found in spans.items():
        who = f"{worker.role}:{worker.rank}"
        if who in numbers:
            offset = clocks.get(nodes[who], Offset()).seconds + began
            for span in found:
                yield from _of_span(span, who, numbers[who], offset)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _names(
    nodes: Mapping[str, str], numbers: Mapping[str, int], clocks: Mapping[str, Offset]
) -> Iterator[Row]:
    yield {"ph": "M", "name": "process_name", "pid": MASTER, "tid": 0, "args": {"name": "master"}}
    for who, number in numbers.items():
        clock = clocks.get(nodes[who], Offset())
        within = "" if clock.within is None else f" ± {1e3 * clock.within:.3g} ms"
        about = f"on {nodes[who]}, clock {1e3 * clock.seconds:+.3g} ms{within}"
        yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": who}}
        yield {"ph": "M", "name": "process_labels", "pid": number, "tid": 0, "args": {"labels": about}}
        for track, name in ((LIFE, "life"), (CALLS, "calls"), (RUNS, "runs"), (COLLECTIVES, "collectives")):
            yield {"ph": "M", "name": "thread_name", "pid": number, "tid": track, "args": {"name": name}}


def _of_master(events: Sequence[LoggedEvent], began: float) -> Iterator[Row]:
    """The events and decisions of the job, the import of torch, and the starts of roles until they run."""
    starting: dict[str, LoggedEvent] = {}
    for event in events:
        at = {"pid": MASTER, "tid": 1, "ts": _us(event.time - began), "cat": event.kind}
        details = {"text": event.text, "cause": event.cause, "id": event.id}
        seconds = re.search(r"after ([\d.]+) s", event.text)
        if event.kind == "spawner" and seconds:
            length = float(seconds[1])
            begin = {"tid": 2, "ts": _us(event.time - length - began), "dur": _us(length)}
            yield {**at, **begin, "ph": "X", "name": f"import torch on {event.about[0]}", "args": details}
        if event.kind in ("start", "restart"):
            for role in event.about:
                starting.setdefault(role, event)
        if event.kind == "running":
            for role in event.about:
                if (first := starting.pop(role, None)) is not None:
                    length = event.time - first.time
                    begin = {"tid": 3, "ts": _us(first.time - began), "dur": _us(length)}
                    yield {**at, **begin, "ph": "X", "name": f"{first.kind} of {role}", "args": details}
        if event.kind in INSTANTS:
            yield {**at, "ph": "i", "s": "p", "name": event.kind, "args": details}


def _lives(events: Sequence[LoggedEvent], numbers: Mapping[str, int], began: float) -> Iterator[Row]:
    """The life of each process of a rank, from the order to start it to its exit; its readiness and its groups."""
    alive: dict[str, float] = {}
    last = max((event.time for event in events), default=began)
    for event in events:
        starts = event.kind == "order" and " starts " in event.text
        for who in (each for about in event.about for each in _ranks(about)):
            if who not in numbers:
                continue
            if starts:
                alive[who] = event.time
            elif event.kind == "exit" and who in alive:
                yield _life(numbers[who], alive.pop(who), event.time, began, event.text)
            elif event.kind in ("formed", "ready", "unready", "started", "failure"):
                at = {"pid": numbers[who], "tid": LIFE, "ts": _us(event.time - began)}
                yield {**at, "ph": "i", "s": "t", "name": event.kind, "args": {"text": event.text}}
    for who, since in alive.items():
        yield _life(numbers[who], since, last, began, "it lives")


def _life(number: int, since: float, until: float, began: float, text: str) -> Row:
    at = {"pid": number, "tid": LIFE, "ts": _us(since - began), "dur": _us(until - since)}
    return {**at, "ph": "X", "cat": "life", "name": "process", "args": {"end": text}}


def _of_span(span: TraceSpan, who: str, number: int, offset: float) -> Iterator[Row]:
    """A span, and its end of the flow of a call."""
    track = {"call": CALLS, "run": RUNS, "collective": COLLECTIVES}.get(span.kind, LIFE)
    begin, length = _us(span.began / 1e9 - offset), _us((span.ended - span.began) / 1e9)
    at = {"pid": number, "tid": track, "ts": begin}
    args = {"caller": span.caller, "seq": span.seq, "workers": list(span.workers), "failed": span.failed}
    yield {**at, "ph": "X", "cat": span.kind, "name": span.name, "dur": length, "args": args}
    flow = {**at, "cat": "flow", "name": span.name}
    if span.kind == "call":
        for worker in span.workers:
            yield {**flow, "ph": "s", "id": f"{span.caller} {span.seq} {worker}"}
    elif span.kind == "run":
        yield {**flow, "ph": "f", "bp": "e", "id": f"{span.caller} {span.seq} {who}"}
