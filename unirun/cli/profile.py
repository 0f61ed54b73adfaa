"""``unirun profile JOB ROLE:RANK``: a flame graph and a trace of torch's profiler, without a restart."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any
from zlib import crc32

from unirun import atomic
from unirun.cli.inject import one_rank
from unirun.collocation.graph.svg import box, document, element, text_at, text_width
from unirun.errors import JobError, RendezvousError, StoreError, UsageError, WireError
from unirun.launcher.foreground.terminal import say, warn
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.masters import call_master
from unirun.spec.read import printable
from unirun.values import Value
from unirun.wire.messages import Attach, Profile
from unirun.wire.reports import Profiled, TracePart

ANSWER_TIMEOUT = 75.0
"""Seconds after the profile, and after each part of a trace, in which the agent must answer; torch takes some to write
the first."""

LONGEST_SECONDS = 600.0
"""Seconds of a profile, at most: a trace of torch has some MB for each."""

FLAME, FOLDED, TRACE = "flame.svg", "stacks.folded", "trace.json.gz"


def main(options: Any) -> int:
    """Profile a rank. Returns 0. Raises `JobError`, `UsageError`."""
    if not 0 < options.seconds <= LONGEST_SECONDS:
        raise UsageError(f"--seconds {options.seconds:g}", f"give more than 0, {LONGEST_SECONDS:g} at most")
    job, role, rank = one_rank(options, "profile")
    folder = Path(options.output or f"profile-{role}-{rank}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder}: {error.strerror}", "name another directory") from error
    result, trace = ask(job, Profile(role, rank, options.seconds))
    if result.problem:
        raise JobError(f"{role}:{rank} is not profiled: {result.problem}", "see unirun status")
    counts = dict(result.stacks)
    title = f"{role}:{rank} of {job.run_id}, {options.seconds:g} s"
    files = {
        FLAME: flame(counts, title),
        FOLDED: "".join(f"{stack} {count}\n" for stack, count in counts.items()),
    }
    try:
        for name, text in files.items():
            atomic.replace(folder / name, text)
        if trace:
            atomic.replace(folder / TRACE, trace)
    except OSError as error:
        raise JobError(f"{folder} cannot be written: {error.strerror}", "name another directory") from error
    say(f"{folder / FLAME}: {sum(counts.values())} samples of its stacks; {FOLDED} has them for speedscope")
    if trace:
        say(f"{folder / TRACE}: torch's profiler, for https://ui.perfetto.dev")
    else:
        warn(f"no trace of torch's profiler: {result.without_trace}")
    return 0


def ask(job: JobDir, request: Profile) -> tuple[Profiled, bytes]:
    """The profile, and the bytes of the trace. Raises `JobError`."""
    parts: list[bytes] = []
    deadline = time.monotonic() + request.seconds + ANSWER_TIMEOUT
    try:
        with call_master(job) as master:
            master.send(Attach())
            master.send(request)
            while True:
                word = master.receive(max(deadline - time.monotonic(), 0.0))
                if isinstance(word, TracePart):
                    parts.append(word.data)
                    deadline = time.monotonic() + ANSWER_TIMEOUT
                elif isinstance(word, Profiled):
                    return word, b"".join(parts)
    except (StoreError, WireError, RendezvousError) as error:
        raise JobError(f"the master has not answered: {error}", "try again in a moment") from error


# Flame graphs of folded stacks (`unirun.launcher.profiler`).

WIDTH, ROW, FONT = 1200, 17, 11
"""Pixels of a graph, of a row, and of letters."""

LEAST_WIDTH = 0.5
"""Pixels below which a frame is left out, with all that it calls."""


class Bar(Value):
    """A frame in a graph: its place in units of samples, and the depth from 0 on."""

    name: str
    first: int
    samples: int
    depth: int


def bars(counts: Mapping[str, int]) -> Iterator[Bar]:
    """The frames of folded stacks, beside each other in the order of their names, each after those that it calls."""
    stacks = sorted((stack.split(";"), count) for stack, count in counts.items())
    path: list[tuple[str, int]] = []
    at = 0
    for names, count in (*stacks, ([], 0)):
        same = 0
        while same < len(path) and names[same : same + 1] == [path[same][0]]:
            same += 1
        while len(path) > same:
            name, first = path.pop()
            yield Bar(name, first, at - first, len(path))
        path += ((name, at) for name in names[same:])
        at += count


def flame(counts: Mapping[str, int], title: str) -> str:
    """A flame graph of folded stacks, the outermost frames at the top. Titles of its frames have names and shares."""
    total = max(sum(counts.values()), 1)
    scale = WIDTH / total
    drawn = [bar for bar in bars(counts) if bar.samples * scale >= LEAST_WIDTH]
    parts = [text_at(f"{title}: {total} samples", 4, ROW / 2)]
    for bar in drawn:
        x, y, width = bar.first * scale, ROW * (bar.depth + 1.5), bar.samples * scale
        letters = int(width / text_width("m", FONT))
        label = bar.name if len(bar.name) <= letters else bar.name[: max(letters - 1, 0)]
        share = f"{bar.name}: {bar.samples} samples, {100 * bar.samples / total:.1f} %"
        frame = box(x, y, width, ROW - 1, fill=_colour(bar.name)) + text_at(label, x + 2, y + ROW / 2)
        parts.append(element("g", element("title", escape(printable(share))) + frame))
    height = ROW * (max((bar.depth for bar in drawn), default=0) + 3)
    return document(WIDTH, height, FONT, parts, stretched=True)


def _colour(name: str) -> str:
    """A warm colour, the same for all functions of a file."""
    number = crc32(name.rpartition("(")[2].encode())
    return f"hsl({number % 50},{70 + number // 50 % 25}%,{66 + number // 5000 % 14}%)"
