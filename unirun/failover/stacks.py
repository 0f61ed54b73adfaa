"""The stacks of a job's ranks, for people: equal ones together, the odd one first, and who is in which collective.

Pure: from the answers of the agents to lines of text. `unirun.launcher.stacks` takes the stacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from unirun.failover.hangs import STOPPED, collectives, members, named
from unirun.spec.read import some
from unirun.values import Value, WorkerId
from unirun.wire.reports import RankStacks, ThreadStack, Wait

STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a device or a file system",
    "T": "is stopped",
    "t": "is held by a debugger",
    "Z": "has ended",
}
"""The states of a process, by the letters of ``ps``."""

_BOOTSTRAP = re.compile(r"/unirun/launcher/\w+\.py:|^<frozen runpy>:|/runpy\.py:")
_WAITING = re.compile(r"/torch/distributed/")


class StackGroup(Value):
    """Ranks whose main threads have the same stack. `state` is in words; `waits`: they wait for other ranks."""

    workers: tuple[WorkerId, ...]
    state: str
    frames: tuple[str, ...]
    waits: bool


class Meeting(Value):
    """A collective with the ranks that are in it, and those of its group that are `missing`; `shape` as each of the
    present ranks has it, where that is known."""

    wait: Wait
    present: tuple[WorkerId, ...]
    missing: tuple[WorkerId, ...]
    shapes: Mapping[str, tuple[WorkerId, ...]]


def main_thread(rank: RankStacks) -> ThreadStack | None:
    """The stack of the main thread of a rank, which is the one that the signal has interrupted; None without one."""
    return next((each for each in rank.threads if each.main), None)


def groups(ranks: Sequence[RankStacks]) -> list[StackGroup]:
    """The groups of ranks of a role with equal stacks, the oddest first.

    A rank that cannot run comes first, then one that has not answered, then those that wait for nobody, then the
    smallest group.
    """
    found: dict[tuple[str, tuple[str, ...]], list[WorkerId]] = {}
    for rank in ranks:
        thread = main_thread(rank)
        frames = _without_bootstrap(thread.frames if thread is not None else ())
        found.setdefault((_state(rank), frames), []).append(rank.progress.worker)
    made = [
        StackGroup(tuple(workers), state, frames, any(_WAITING.search(each) for each in frames))
        for (state, frames), workers in found.items()
    ]
    return sorted(
        made, key=lambda each: (not _is_halted(each), bool(each.frames), each.waits, len(each.workers))
    )


def _without_bootstrap(frames: tuple[str, ...]) -> tuple[str, ...]:
    """The frames without the outermost ones, in which unirun starts the user's code."""
    while frames and _BOOTSTRAP.search(frames[-1]):
        frames = frames[:-1]
    return frames


def _is_halted(group: StackGroup) -> bool:
    return any(STATES[letter] in group.state for letter in STOPPED)


def _state(rank: RankStacks) -> str:
    """The state of a process that is stopped, or the reason why there is no stack."""
    letter = rank.progress.state
    words = STATES.get(letter, "is gone" if letter == "?" else letter)
    if main_thread(rank) is not None and letter not in STOPPED:
        return ""
    kernel = f", in {rank.kernel} of the kernel" if rank.kernel not in ("", "0") else ""
    how = f", by {rank.source}" if rank.source else ""
    return f"{words}{kernel}{how}"


def meetings(ranks: Sequence[RankStacks]) -> list[Meeting]:
    """The collectives that ranks of a role are in, those with missing ranks first."""
    all_ranks = [rank.progress for rank in ranks]
    found = []
    for wait, present in collectives(all_ranks).items():
        group = members(wait)
        missing = tuple(
            each.worker
            for each in all_ranks
            if each.worker not in present and (group is None or each.worker.rank in group)
        )
        shapes: dict[str, list[WorkerId]] = {}
        for rank in ranks:
            for own, shape in zip(rank.progress.waits, rank.shapes, strict=False):
                if own == wait and shape:
                    shapes.setdefault(shape, []).append(rank.progress.worker)
        named = {shape: tuple(workers) for shape, workers in shapes.items()}
        found.append(Meeting(wait, tuple(present), missing, named))
    return sorted(found, key=lambda each: (not each.missing, len(each.present)))


def parsed(text: str) -> tuple[ThreadStack, ...]:
    """The threads in what Python's faulthandler has written."""
    found = []
    for part in re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE):
        head = re.match(r"(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*?)\])?", part)
        if head is None:
            continue
        lines = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', part, re.MULTILINE)
        frames = tuple(f"{file}:{line} in {name}" for file, line, name in lines)
        found.append(ThreadStack(head[3] or head[2], frames, main=head[1] == "Current thread"))
    return tuple(found)


def lines(ranks: Sequence[RankStacks], *, threads: bool = False) -> Iterator[str]:
    """The lines of ``unirun stacks`` about the ranks of all roles; with `threads` the other threads, too."""
    roles: dict[str, list[RankStacks]] = {}
    for rank in sorted(ranks, key=lambda each: (each.progress.worker.role, each.progress.worker.rank)):
        roles.setdefault(rank.progress.worker.role, []).append(rank)
    for role, found in roles.items():
        stacks = groups(found)
        yield f"role {role}: {some(len(found), 'rank')}, {some(len(stacks), 'different stack')}"
        for group in stacks:
            yield f"  {named(group.workers)}{f' {group.state}' if group.state else ''}"
            yield from (f"    {frame}" for frame in group.frames)
        for meeting in meetings(found):
            yield f"  {meeting_line(meeting)}"
        if threads:
            yield from _others(found)


def _others(ranks: Sequence[RankStacks]) -> Iterator[str]:
    for rank in ranks:
        for thread in rank.threads:
            if not thread.main:
                yield f"  {named([rank.progress.worker])}, thread {thread.name}"
                yield from (f"    {frame}" for frame in thread.frames)


def meeting_line(meeting: Meeting) -> str:
    """``all_reduce 6 of default_pg: actor:0,2; not there: actor:1``"""
    wait = meeting.wait
    text = f"{wait.name} {wait.number} of {wait.group}: {named(meeting.present)}"
    text += f"; not there: {named(meeting.missing)}" if meeting.missing else "; all are there"
    shapes = [f"{shape} in {named(workers)}" for shape, workers in meeting.shapes.items()]
    return f"{text}; {', '.join(shapes)}" if shapes else text
