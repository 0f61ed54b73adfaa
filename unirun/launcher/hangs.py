"""The agent's side of hangs: which of its workers are late, and the evidence about them.

`unirun.failover.hangs` decides, and `unirun.launcher.sampler` is the worker's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence

from msgspec import convert

from unirun import atomic
from unirun.failover.hangs import NOTICE_SECONDS, HangTimeouts, is_late, is_noticed, is_watched
from unirun.failover.stacks import parsed
from unirun.launcher.events import AgentState, Hung, Worker
from unirun.launcher.sampler import FLIGHT_RECORDER, STACKS, shapes_in
from unirun.launcher.stacks import kernel_of, state_of, take_stacks, take_texts
from unirun.observe.jobdir import JobDir
from unirun.spec.job import JobSpec
from unirun.values import WorkerId
from unirun.wire.messages import AskProgress, AskStacks, EndHung, FollowSteps
from unirun.wire.progress import Snapshot, open_page, read_page, want_evidence
from unirun.wire.reports import (
    DEBUGGER,
    Late,
    Message,
    Progress,
    RankProgress,
    RankStacks,
    Stacks,
    StepsAgain,
    ThreadStack,
    Wait,
)

LOOK_INTERVAL, NOTICE_INTERVAL = 0.1, 1.0
"""Seconds between two looks at the pages, if a role has a time-out, and otherwise."""

FOLLOW_INTERVAL = 0.05
"""Seconds between two looks at the steps of a role that runs again."""

EVIDENCE_TIMEOUT = 0.3
"""Seconds in which workers write their stacks, before one of them is killed."""

STACKS_TIMEOUT = 0.5
"""Seconds in which workers write their stacks for ``unirun stacks``."""

STALL_SECONDS = 0.5
"""A look that is later than this by so many seconds means that this process, or its host, did not run."""


class ProgressWatch:
    """Looks at the pages of a node's workers. `state` gives the agent's state; `tell` sends to the master, and `end`
    applies the end of a worker."""

    def __init__(
        self,
        job: JobDir,
        spec: JobSpec,
        state: Callable[[], AgentState],
        tell: Callable[[Message], None],
        end: Callable[[Hung], None],
    ) -> None:
        self._job, self._state, self._tell, self._end = job, state, tell, end
        self._limits = {
            role.name: HangTimeouts(role.hang_timeout, role.first_step_timeout)
            for role in spec.roles
            if role.hang_timeout
        }
        self._interval = LOOK_INTERVAL if self._limits else NOTICE_INTERVAL
        self._numbers: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        # The time of the monotonic clock since which a worker is known to have a process, and no page.
        self._unbegun: dict[int, float] = {}
        # The time of the latest progress of a worker, the seconds since then at the latest look, and the most of them
        # before that progress.
        self._longest: dict[int, tuple[int, float, float]] = {}
        self._next: dict[str, float] = {}
        # The generation of each role whose steps are followed.
        self._followed: dict[str, int] = {}
        self._looked = time.monotonic()

    def announced(self, worker: int, number: int) -> None:
        """A worker has a page, in its descriptor `number`."""
        self._numbers[worker] = number
        self.open(worker)

    def open(self, worker: int) -> None:
        """Open the page of a worker, if it has announced one and its process is known. Either may come first. The page
        can be read after the end of its process."""
        if (known := self._state().workers.get(worker)) is not None:
            self._read(known)

    def close(self) -> None:
        """Close all pages."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    async def watch(self) -> None:
        """Look at the pages, and tell the master of roles with a late rank."""
        while True:
            await asyncio.sleep(self._interval)
            self.look(time.monotonic())

    def led(self) -> None:
        """There is another master, which has to be told again."""
        self._next = {}

    def look(self, now: float) -> None:
        """Take one look at all pages, at the time `now` of the monotonic clock."""
        stalled, self._looked = now - self._looked - self._interval, now
        self._drop_ended()
        for worker in self._state().workers.values():
            rank = self._progress(worker)
            if rank is None:
                continue
            role = worker.who.role
            if stalled > STALL_SECONDS:
                # The workers may not have run either.
                self._next[role] = max(self._next.get(role, 0.0), now + stalled)
            elif now >= self._next.get(role, 0.0) and self._is_late(worker, rank):
                limits = self._limits.get(role)
                self._next[role] = now + (max(LOOK_INTERVAL, limits.timeout / 4) if limits else 10.0)
                self._tell(Late(self._state().node, role))

    def _is_late(self, worker: Worker, rank: RankProgress) -> bool:
        """Return True if a worker is late, by the time-out of its role, or so much that the console says it."""
        limits = self._limits.get(worker.who.role)
        if limits is not None and is_late(rank, limits):
            return True
        found = self._read(worker)
        if found is None:
            return False
        last, quiet, longest = self._longest.get(worker.id, (found.last, 0.0, 0.0))
        if found.last != last:
            quiet, longest = 0.0, max(longest, quiet)
        if is_watched(rank):
            quiet = rank.quiet
        self._longest[worker.id] = found.last, quiet, longest
        return is_noticed(rank, HangTimeouts(max(NOTICE_SECONDS, 3 * longest)))

    def _drop_ended(self) -> None:
        there = self._state().workers.keys()
        for number in self._unbegun.keys() - there:
            del self._unbegun[number]
        for number in [number for number in self._numbers if number not in there]:
            del self._numbers[number]
            self._longest.pop(number, None)
            if (handle := self._handles.pop(number, None)) is not None:
                os.close(handle)

    def _read(self, worker: Worker) -> Snapshot | None:
        """The page of a worker that is in its user's code; None if it has none, or is told to end."""
        number = self._numbers.get(worker.id)
        if number is None or worker.pid is None or worker.sent is not None or worker.error is not None:
            return None
        try:
            if worker.id not in self._handles:
                self._handles[worker.id] = open_page(worker.pid, number)
            return read_page(self._handles[worker.id])
        except (OSError, ValueError):
            # Its process has just ended, or is of another user: it has no progress that could be seen.
            return None

    def _progress(self, worker: Worker, *, pid: int | None = None, at: str = "") -> RankProgress | None:
        """The progress of a worker by its page; by the age of its process, if its role has a time-out and it has no
        page yet, which it makes before its user's code. None if that is not known, or it is told to end."""
        page = self._read(worker)
        if page is not None:
            return progress_of(worker.who, page, pid=pid, at=at, held=is_held(worker))
        ends = worker.sent is not None or worker.error is not None
        if worker.who.role not in self._limits or worker.id in self._numbers or worker.pid is None or ends:
            return None
        age = time.monotonic() - self._unbegun.setdefault(worker.id, time.monotonic())
        state, traced = state_of(worker.pid)
        return RankProgress(
            worker.who, quiet=age, age=age, state=state, traced=traced or is_held(worker), begun=False
        )

    def step_of(self, worker: int) -> int:
        """The step to which a worker has come; -1 if that is not known."""
        handle = self._handles.get(worker)
        return read_page(handle).step if handle is not None else -1

    async def follow(self, order: FollowSteps) -> None:
        """Tell the master the first step of a role since its failure, and when it has come past the furthest one
        before. A later order about the role takes the place of this one."""
        since = time.monotonic_ns() - int(order.age * 1e9)
        began, told = time.monotonic(), False
        self._followed[order.role] = order.generation
        while self._followed[order.role] == order.generation:
            workers = [each for each in self._state().workers.values() if each.who.role == order.role]
            pages = [page for page in map(self._read, workers) if page is not None]
            found = steps_again([page for page in pages if page.first_at > since], order.furthest)
            if found is not None:
                first, furthest = found
                past = any(page.step > furthest for page in pages)
                if past or not told:
                    self._tell(
                        StepsAgain(self._state().node, order.role, order.generation, first, furthest, past)
                    )
                told = True
                if past:
                    return
            # The time that is told is late by a twentieth at most.
            await asyncio.sleep(min(max(FOLLOW_INTERVAL, (time.monotonic() - began) / 20), 5.0))

    async def answer(self, question: AskProgress) -> None:
        """Send the master the progress of the ranks of a role."""
        role = question.role
        workers = [each for each in self._state().workers.values() if each.who.role == role]
        at = await self._evidence(workers) if question.evidence else {}
        ranks = (self._progress(each, pid=each.pid, at=at.get(each.id, "")) for each in workers)
        self._tell(Progress(self._state().node, role, tuple(filter(None, ranks)), question.evidence))

    def end(self, order: EndHung) -> None:
        """Kill a worker that hangs, unless it has made progress meanwhile."""
        worker = self._state().find(order.worker.role, order.worker.rank)
        limits = self._limits.get(order.worker.role)
        if worker is None or worker.who != order.worker or limits is None:
            return
        rank = self._progress(worker)
        if rank is not None and is_late(rank, limits) and not rank.traced:
            self._end(Hung(worker.id, order.why))

    async def _evidence(self, workers: Iterable[Worker]) -> dict[int, str]:
        """Let workers write what the flight recorder has, and keep their stacks. Returns where their main threads are,
        of those that have answered within `EVIDENCE_TIMEOUT`."""
        asked = {each.id: each for each in workers if self._read(each) is not None}
        for number in asked:
            want_evidence(self._handles[number])
        pids = {number: worker.pid for number, worker in asked.items() if worker.pid is not None}
        began = time.monotonic()
        texts = await take_texts(pids, EVIDENCE_TIMEOUT)
        for number, text in texts.items():
            # A full disk costs the evidence, and nothing else.
            with contextlib.suppress(OSError):
                atomic.replace(self._job.worker_logs(asked[number].who) / STACKS, text)
        await self._recorded(asked.values(), began + EVIDENCE_TIMEOUT)
        return {number: innermost(parsed(text)) for number, text in texts.items()}

    async def _recorded(self, workers: Iterable[Worker], deadline: float) -> None:
        """Wait until workers have written what the flight recorder has, until the `deadline` of the monotonic clock."""
        while time.monotonic() < deadline:
            pages = [self._read(worker) for worker in workers]
            if not any(page.evidence for page in pages if page):
                return
            await asyncio.sleep(0.02)

    async def stacks(self, question: AskStacks) -> None:
        """Send the master the stacks of the ranks of a role, or of all."""
        asked = {
            each.id: each
            for each in self._state().workers.values()
            if each.pid is not None
            and question.role in ("", each.who.role)
            and question.rank in (-1, each.who.rank)
        }
        began = time.monotonic()
        recording = [each for each in asked.values() if each.who.role in self._limits and self._read(each)]
        for worker in recording:
            want_evidence(self._handles[worker.id])
        pids = {number: worker.pid for number, worker in asked.items() if worker.pid is not None}
        found = await take_stacks(pids, STACKS_TIMEOUT)
        await self._recorded(recording, began + STACKS_TIMEOUT)
        ranks = tuple(self._stacks_of(asked[n], pid, *found.get(n, ("", ()))) for n, pid in pids.items())
        self._tell(Stacks(self._state().node, question.number, ranks))

    def _stacks_of(
        self, worker: Worker, pid: int, source: str, threads: tuple[ThreadStack, ...]
    ) -> RankStacks:
        page = self._read(worker)
        state, traced = state_of(pid)
        progress = RankProgress(worker.who, state=state, traced=traced)
        shapes: tuple[str, ...] = ()
        if page is not None:
            progress = progress_of(worker.who, page, pid=pid, at=innermost(threads), held=is_held(worker))
        if progress.waits:
            # What was not written, or is old, lacks these collectives.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                path = self._job.worker_logs(worker.who) / FLIGHT_RECORDER
                known = shapes_in(json.loads(path.read_bytes()))
                shapes = tuple(known.get((wait.name, wait.number), "") for wait in progress.waits)
        return RankStacks(progress, pid, source, threads, kernel_of(pid), shapes)


def steps_again(pages: Sequence[Snapshot], furthest: int) -> tuple[int, int] | None:
    """The first step that ranks have reported since their role has failed, and the furthest one before, by the `pages`
    of those that have; None if one of them is not known."""
    reached = max([furthest, *(page.before for page in pages)])
    if not pages or reached < 0:
        return None
    return min(page.first for page in pages), reached


def is_held(worker: Worker) -> bool:
    """Return True if a debugger of unirun holds a worker."""
    return bool(worker.addresses.get(DEBUGGER))


def progress_of(
    who: WorkerId, found: Snapshot, *, pid: int | None = None, at: str = "", held: bool = False
) -> RankProgress:
    """The progress of a worker by its page; with its `pid`, also what the kernel says of the process."""
    now = time.monotonic_ns()
    state, traced = state_of(pid) if pid is not None else ("", False)
    return RankProgress(
        who,
        step=found.step,
        count=found.count,
        calls=found.calls,
        collectives=found.collectives,
        quiet=max(now - found.last, 0) / 1e9,
        age=(now - found.began) / 1e9,
        idle=bool(found.idle),
        allowed=max(found.allowed - now, 0) / 1e9,
        waits=_waits(found.text),
        state=state,
        traced=traced or held,
        mute=max(now - found.beat, 0) / 1e9 if found.beat else 0.0,
        at=at,
    )


def _waits(text: str) -> tuple[Wait, ...]:
    """The collectives in the text of a page, which a worker may have written in part."""
    with contextlib.suppress(ValueError, TypeError):
        found = convert(json.loads(text or "[]"), list[tuple[str, int, str, str]])
        return tuple(Wait(*each) for each in found)
    return ()


def innermost(threads: Sequence[ThreadStack]) -> str:
    """The innermost line of the user's code in the stack of the main thread; of any code if there is none of the
    user's."""
    frames = next((each.frames for each in threads if each.main), ())
    own = (each for each in frames if not re.search(r"/site-packages/|/lib/python3|/unirun/|^<frozen ", each))
    return next(own, frames[0] if frames else "")
