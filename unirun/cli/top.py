"""``unirun top [JOB…]``: a live view of jobs in the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from unirun.cli.logs import start_of_last
from unirun.cli.stored import find_here
from unirun.launcher.foreground.terminal import say
from unirun.observe.events import EventReader, LoggedEvent
from unirun.observe.jobdir import JobDir, all_jobs
from unirun.observe.status import read_status, runs
from unirun.observe.top import ORDERS, Line, Look, Meters, TopView, chosen, frame
from unirun.spec.read import printable
from unirun.values import WorkerId

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
        self._job, self._reader = job, EventReader(job.events)
        self._events: tuple[LoggedEvent, ...] = ()
        self.meters = Meters()

    def look(self, choice: TopView) -> Look:
        """Read what the job has written. Raises `JobError`."""
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


def main(options: Any) -> int:
    """Show jobs until the user leaves; without a terminal, or with --once, print one frame. Returns 0."""
    names = options.jobs or [None]
    jobs = [find_here(options.store, name, "top") for name in names]
    if not options.jobs and options.store is None:
        # The tab key goes to the others that run.
        jobs += [each for each in all_jobs() if each.run_id != jobs[0].run_id and runs(each)]
    followed = [Followed(job) for job in jobs]
    choice = TopView(options.sort, options.filter, jobs=tuple(job.run_id for job in jobs))
    if options.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        width = shutil.get_terminal_size((80, 24)).columns
        for line in frame(followed[0].look(choice), followed[0].meters, choice, width, 1000)[:-1]:
            say(line.text.rstrip())
        return 0
    _show(followed, choice, options.interval)
    return 0


def _show(jobs: list[Followed], choice: TopView, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def drawn(lines: list[Line]) -> Text:
        # Of a style that rich does not know there is none; text of workers has no say in it.
        texts = [Text(printable(line.text), STYLES.get(line.style, "")) for line in lines]
        return Text("\n", no_wrap=True, overflow="ellipsis").join(texts)

    console = Console()
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        due = time.monotonic()
        while True:
            now = jobs[choice.job]
            size = console.size
            look = now.look(choice)
            lines = frame(look, now.meters, choice, size.width, size.height)
            live.update(drawn(lines), refresh=True)
            due = max(due + interval, time.monotonic())
            ready, _, _ = select.select([keys], [], [], max(due - time.monotonic(), 0.0) or interval)
            if ready:
                key = os.read(keys, 16)
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


def _read_line(keys: int) -> str:
    """The text up to the enter key; it is not echoed, and the frame shows it afterwards."""
    found = b""
    while (key := os.read(keys, 1)) not in (b"\r", b"\n", b""):
        found = found[:-1] if key == b"\x7f" else found + key
    return found.decode(errors="replace")
