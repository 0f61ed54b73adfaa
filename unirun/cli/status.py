"""``unirun status``, ``weights`` and ``top``: how a job stands, once or live, and which versions its ranks have."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from msgspec.structs import replace

from unirun.cli.logs import start_of_last
from unirun.cli.output import age, megabytes, print_table, screen_width, tell
from unirun.cli.stored import StoredJob, find_here, find_status
from unirun.errors import UnirunError
from unirun.launcher.foreground.terminal import is_screen, say, warn
from unirun.observe.batchjob import batch_state, read_batch
from unirun.observe.events import EventReader, LoggedEvent
from unirun.observe.jobdir import JobDir, all_jobs
from unirun.observe.status import FailureStatus, JobStatus, RoleStatus, WorkerStatus, read_status, runs
from unirun.observe.top import ORDERS, Line, Look, Meters, TopView, chosen, frame
from unirun.spec.read import printable, show_size
from unirun.values import WorkerId, show_ranks
from unirun.wire.reports import FROM, VERSION


def show_status(options: Any) -> int:
    """Print the status of a job. Returns 0, whatever the job's own end was."""
    status, found = find_status(options.store, options.job)
    batch = ""
    if isinstance(found, StoredJob):
        logs, leader = f"{found.host}:{found.logs}", found.leader.to_json() if found.leader else None
        more: dict[str, Any] = {"dir": None, "logs": found.logs, "store": found.store, "leader": leader}
        master = _master(found)
    else:
        logs = str(found.logs.resolve())
        more = {"dir": str(found.path), "logs": logs}
        master = f"term {status.epoch}" if status.epoch else ""
        if (submitted := read_batch(found)) is not None:
            batch = _batch(submitted)
            more["slurm"] = batch
    if options.json:
        print(json.dumps({**status.to_json(), **more}))
        return 0
    _print(status, master, batch, logs)
    return 0


def _batch(batch: str) -> str:
    """The state of a batch job, in words."""
    try:
        return f"job {batch} {batch_state(batch).words}"
    except UnirunError as error:
        return f"job {batch}: {error}"


def _master(stored: StoredJob) -> str:
    """The leader, as the store says."""
    written, leader = f"the last write is of term {stored.status.epoch}", stored.leader
    if leader is not None:
        same = leader.epoch == stored.status.epoch
        return f"{leader.address.host}, pid {leader.pid}, term {leader.epoch}{'' if same else f'; {written}'}"
    if stored.status.ended is not None:
        return written
    return f"nobody leads now; {written}; another comes within seconds, or the job is lost"


def _print(status: JobStatus, master: str, batch: str, logs: str) -> None:
    now = time.time()
    end = status.ended if status.ended is not None else now
    code = "" if status.code is None else f", exit code {status.code}"
    tell(f"job {status.run_id}: {status.phase}{code}, {age(end - status.started)}")
    if status.reason:
        tell(f"reason: {status.reason}")
    if status.trouble:
        tell(f"store: {' '.join(status.trouble.split())}")
    if batch:
        tell(f"Slurm: {batch}")
    if master:
        tell(f"master: {master}")
    if status.max_job_restarts:
        tell(f"restarts of the job: {status.restarts} of {status.max_job_restarts}")
    if status.committed >= 0:
        tell(f"committed: step {status.committed} by all roles that commit together")
    nodes = (
        *((status.spares, "held back"), (status.tainted, "tainted")),
        *((status.lost, "lost"), (status.left, "drained")),
    )
    if told := [f"{', '.join(names)} {what}" for names, what in nodes if names]:
        tell(f"nodes: {'; '.join(told)}")
    for text in status.sick:
        tell(f"sick: {text}")
    for text in status.waiting:
        tell(f"waiting: {text}")
    for text in status.stragglers:
        tell(f"slow: {text}")
    say(f"logs: {logs}")
    say()
    print_table(["ROLE", "STATE", "RANKS", "GENERATION", "RESTARTS"], [*map(_role, status.roles)])
    say()
    workers = [(role, worker) for role in status.roles for worker in role.workers]
    headers = ["WORKER", "STATE", "NODE", "PID", "INCARNATION", "MEMORY", "CPU"]
    rows = [_row(role, worker, now) for role, worker in workers]
    if any(worker.address for _, worker in workers):
        headers.append("ADDRESS")
        for row, (_, worker) in zip(rows, workers, strict=True):
            row.append(worker.address)
    if any(worker.metrics for _, worker in workers):
        headers.append("METRICS")
        for row, (_, worker) in zip(rows, workers, strict=True):
            # What came from whom is shown by `unirun weights --plan`.
            metrics = {name: value for name, value in worker.metrics.items() if FROM not in name}
            row.append(
                " ".join(
                    f"{name}={'nan' if value is None else format(value, '.6g')}"
                    for name, value in metrics.items()
                )
            )
    print_table(headers, rows)
    if status.failures:
        shown, every = len(status.failures), status.failed
        say()
        say(f"failures: {every if shown == every else f'the last {shown} of {every}'}")
        headers = ["WORKER", "INCARNATION", "WHEN", "EXIT", "DECIDED", "LIKELY CAUSE"]
        print_table(headers, [*_failures(status.failures, now)])


def _role(role: RoleStatus) -> list[str]:
    return [role.name, role.phase, str(len(role.workers)), str(role.generation), role.used]


def _row(role: RoleStatus, worker: WorkerStatus, now: float) -> list[str]:
    return [
        f"{role.name}:{worker.rank}",
        worker.exit or _state(worker, now),
        worker.node,
        str(worker.pid or ""),
        str(worker.incarnation),
        megabytes(worker.memory),
        "" if worker.cpu is None else f"{worker.cpu:.1f} s",
    ]


def _state(worker: WorkerStatus, now: float) -> str:
    """The phase, or ``ready since 31 s``, or why it is not."""
    if worker.ready is None:
        return worker.phase
    if not worker.ready:
        return f"not ready: {worker.why}"
    return f"ready for {age(now - worker.since)}{f', {worker.why}' if worker.why else ''}"


def _failures(failures: Sequence[FailureStatus], now: float) -> Iterator[list[str]]:
    """A row for each failure, and one for ranks of a role that only lost a connection to a peer."""
    followed: dict[tuple[str, int, str], list[FailureStatus]] = defaultdict(list)
    for each in failures:
        if each.kind == "lost_peer" and not each.decision:
            followed[each.role, each.incarnation, each.exit].append(each)
    for each in failures:
        peers = followed[each.role, each.incarnation, each.exit]
        alike = peers if each in peers and len(peers) > 1 else [each]
        if each is not alike[0]:
            continue
        yield [
            f"{each.role}:{show_ranks(sorted(peer.rank for peer in alike))}",
            str(each.incarnation),
            f"{age(now - each.time)} ago",
            each.exit,
            # A decision begins with the failure that it is about.
            each.decision.rpartition(f"{each.exit}; ")[2],
            "they only lost a connection to a peer" if len(alike) > 1 else each.cause,
        ]


# ``unirun weights``: the versions that a job's ranks have of each channel, and on which paths they have come.


Transfer = tuple[str, str, str, str, float]
"""The channel, the receiver, the source and the path of what has come of the last version, and its bytes."""


def show_weights(options: Any) -> int:
    """Print which version of the weights each rank has. Returns 0. Raises `UsageError`, `JobError`, `StoreError`."""
    status, _ = find_status(options.store, options.job)
    found, transfers = versions(status), moves(status)
    if not (transfers if options.plan else found):
        warn(f"job {status.run_id} has moved no weights yet")
    elif options.plan:
        _print_moves(transfers)
    else:
        print_table(
            ["CHANNEL", "VERSION", "RANKS"],
            [[channel, str(version), ranks] for (channel, version), ranks in found.items()],
        )
    return 0


def versions(status: JobStatus) -> dict[tuple[str, int], str]:
    """The ranks that have each version of each channel: ``actor:0-3, rollout:1``; the latest versions first."""
    found: dict[tuple[str, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for role in status.roles:
        for worker in role.workers:
            for name, value in worker.metrics.items():
                if name.endswith(VERSION) and value is not None:
                    found[name.removesuffix(VERSION), -int(value)][role.name].append(worker.rank)
    return {
        (channel, -older): ", ".join(
            f"{role}:{show_ranks(ranks)}" for role, ranks in found[channel, older].items()
        )
        for channel, older in sorted(found)
    }


def moves(status: JobStatus) -> list[Transfer]:
    """For each receiver, the amounts that it has received from each source."""
    found = []
    for role in status.roles:
        for worker in role.workers:
            for name, value in worker.metrics.items():
                channel, separator, rest = name.partition(FROM)
                source, _, path = rest.partition("/")
                if separator and value:
                    found.append((channel, f"{role.name}:{worker.rank}", source, path, value))
    return sorted(found, key=itemgetter(0, 3))


def _print_moves(found: list[Transfer]) -> None:
    print_table(
        ["CHANNEL", "RECEIVER", "FROM", "PATH", "SIZE"],
        [[*words, show_size(size)] for *words, size in found],
    )
    sums: dict[str, float] = defaultdict(float)
    for *_, path, size in found:
        sums[path] += size
    say()
    say("in all: " + ", ".join(f"{show_size(size)} by {path}" for path, size in sums.items()))


EVENTS_KEPT = 200
"""Events of which the latest are shown."""

TAIL_BYTES = 1 << 16
"""Bytes at the end of a log, of which the last lines are shown."""

STYLES = {
    "title": "bold",
    "head": "bold reverse",
    "good": "green",
    "bad": "bold red",
    "slow": "yellow",
    "chosen": "reverse",
    "dim": "dim",
}


class Followed:
    """A job that is looked at again and again."""

    def __init__(self, job: JobDir) -> None:
        self._job, self._uid = job, ""

    def look(self, choice: TopView) -> Look:
        """Read what the job has written. Raises `JobError`."""
        if (uid := self._job.uid) != self._uid:
            # At first, and when another job has taken the id.
            self._uid, self._reader = uid, EventReader(self._job.events)
            self._events: tuple[LoggedEvent, ...] = ()
            self.meters = Meters()
        self._events = (*self._events, *self._reader.read())[-EVENTS_KEPT:]
        look = Look(time.time(), read_status(self._job), self._events)
        self.meters.update(look)
        rows = chosen(look.status, choice)
        if choice.detail and rows:
            role, worker = rows[min(choice.row, len(rows) - 1)]
            look = replace(look, tail=self._tail(WorkerId(role.name, worker.rank, worker.incarnation)))
        return look

    def _tail(self, worker: WorkerId, lines: int = 40) -> tuple[str, ...]:
        """The last lines of a worker's stderr, else of its stdout."""
        for name in ("stderr.log", "stdout.log"):
            with contextlib.suppress(OSError), (self._job.worker_logs(worker) / name).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(start_of_last(file, lines), size - TAIL_BYTES))
                if rows := file.read(TAIL_BYTES).decode(errors="replace").splitlines():
                    return tuple(rows[-lines:])
        return ()


def show_top(options: Any) -> int:
    """Show jobs until the user leaves; without a screen, or with --once, print one frame. Returns 0."""
    names = options.jobs or [None]
    jobs = [find_here(options.store, name, "top") for name in names]
    if not options.jobs and options.store is None:
        # The tab key goes to the others that run.
        jobs += [each for each in all_jobs() if each.run_id != jobs[0].run_id and runs(each)]
    followed = [Followed(job) for job in jobs]
    choice = TopView(options.sort, options.filter, jobs=tuple(job.run_id for job in jobs))
    if options.once or not (sys.stdin.isatty() and is_screen(sys.stdout)):
        # A program that reads it gets whole lines, as those of tables.
        width = screen_width() or sys.maxsize
        for line in frame(followed[0].look(choice), followed[0].meters, choice, width, 1000)[:-1]:
            say(line.text.rstrip())
        return 0
    _show_live(followed, choice, options.interval)
    return 0


def _show_live(jobs: list[Followed], choice: TopView, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def drawn(lines: list[Line]) -> Text:
        # Of a style that rich does not know there is none; text of workers has no say in it.
        texts = [Text(printable(line.text), STYLES.get(line.style, "")) for line in lines]
        return Text("\n", no_wrap=True, overflow="ellipsis").join(texts)

    console = Console()
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            now = jobs[choice.job]
            size = console.size
            look = now.look(choice)
            lines = frame(look, now.meters, choice, size.width, size.height)
            live.update(drawn(lines), refresh=True)
            ready, _, _ = select.select([keys], [], [], interval)
            if ready:
                key = _read_key(keys)
                if key in (b"q", b"\x03", b"\x04", b""):
                    return
                choice = pressed(choice, key, lambda: _read_line(keys), len(chosen(look.status, choice)))


def pressed(choice: TopView, key: bytes, ask: Any, rows: int) -> TopView:
    """The choice after a key; `ask` reads the text of a filter, and `rows` are those that there are now."""
    last = max(rows - 1, 0)
    match key:
        case b"s":
            at = ORDERS.index(choice.order)
            return replace(choice, order=ORDERS[(at + 1) % len(ORDERS)])
        case b"/":
            return replace(choice, filter=ask(), row=0)
        case b"\x1b[A" | b"k":
            return replace(choice, row=max(min(choice.row, last) - 1, 0))
        case b"\x1b[B" | b"j":
            return replace(choice, row=min(choice.row + 1, last))
        case b"\r" | b"\n":
            return replace(choice, detail=not choice.detail)
        case b"\t":
            return replace(choice, job=(choice.job + 1) % len(choice.jobs), row=0, detail=False)
    return choice


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """The descriptor of the terminal, from which single keys are read."""
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield number
    except KeyboardInterrupt:
        return
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _read_key(keys: int) -> bytes:
    """The next key, of several that were pressed since the last look: a character, or the three of an arrow."""
    key = os.read(keys, 1)
    arrow = key == b"\x1b" and select.select([keys], [], [], 0)[0]
    return key + os.read(keys, 2) if arrow else key


def _read_line(keys: int) -> str:
    """The text up to the enter key; it is not echoed, and the frame shows it afterwards."""
    found = b""
    while (key := os.read(keys, 1)) not in (b"\r", b"\n", b""):
        found = found[:-1] if key == b"\x7f" else found + key
    return found.decode(errors="replace")
