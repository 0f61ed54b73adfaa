"""``unirun stacks``, ``debug``, ``profile`` and ``inject``: requests of a command to ranks of a running job.

Only the user of a job can: directories of others are refused, and a master wants the proof of the job's token.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, get_args
from zlib import crc32

from msgspec import to_builtins

from unirun import atomic
from unirun.cli.output import duration
from unirun.cli.stored import find_here, refuse_elsewhere
from unirun.collocation.graph.svg import box, document, element, text_at, text_width
from unirun.errors import JobError, RendezvousError, StoreError, UsageError, WireError
from unirun.failover.stacks import lines
from unirun.launcher.asking import ask_stacks
from unirun.launcher.foreground.terminal import say, warn
from unirun.observe.jobdir import JobDir
from unirun.observe.status import ENDED, JobStatus, read_status, read_summary
from unirun.rendezvous.masters import call_master
from unirun.spec.read import printable
from unirun.values import Value
from unirun.wire.blocking import BlockingStream
from unirun.wire.messages import AskStacks, Attach, Debug, DebugInput, Fault, Inject, Injected, Profile
from unirun.wire.reports import DebugEnded, DebugOutput, Message, Profiled, TracePart


def stacks(options: Any) -> int:
    """Print the stacks. Returns 0. Raises `JobError`, `UsageError`."""
    job = find_here(options.store, options.job, "stacks")
    status = read_status(job)
    if status.phase in ENDED:
        raise JobError(f"job {job.run_id} has ended", "its ranks have no stacks any more")
    refuse_elsewhere(job, "stacks")
    wanted = AskStacks()
    if options.who is not None:
        # Of several ranks, those of the role are asked, and the others left out.
        ranks = ranks_of(options.who, status)
        wanted = AskStacks(ranks[0][0], ranks[0][1] if len(ranks) == 1 else -1)
    found, silent = ask_stacks(job, wanted)
    if options.who is not None:
        found = [each for each in found if (each.progress.worker.role, each.progress.worker.rank) in ranks]
    if silent:
        warn(f"no answer from {', '.join(silent)}")
    if not found:
        raise JobError("no rank has a process now", "see unirun status")
    if options.json:
        for each in found:
            print(json.dumps({"worker": str(each.progress.worker), **to_builtins(each)}))
        return 0
    for line in lines(found, threads=options.threads):
        say(line)
    return 0


POLL_INTERVAL = 0.2
"""Seconds between two looks whether Ctrl-C was pressed."""

NATIVE_NOTICE_DELAY = 2.0
"""Seconds without an answer after which the command prints the likely reason."""


def debug(options: Any) -> int:
    """Debug a rank. Returns 0 when the user has left, 1 when the rank has ended. Raises `JobError`, `UsageError`."""
    job, role, rank = one_rank(options, "debug")
    with contextlib.suppress(ImportError):
        # Editing and history for `input`.
        import readline  # noqa: F401
    try:
        with call_master(job) as master:
            master.send(Attach())
            master.send(Debug(role, rank))
            return Conversation(master, f"{role}:{rank}").run()
    except (StoreError, WireError, RendezvousError) as error:
        raise JobError(f"the master is gone: {error}", f"{role}:{rank} goes on; try again") from error


class Conversation:
    """The user of a debugger, and the debugger of the rank `who` behind the `master`."""

    def __init__(self, master: BlockingStream, who: str) -> None:
        self._master, self._who = master, who
        self._text = ""
        self._met = False
        # The times that Ctrl-C was pressed since the last prompt, and those of which the program was told.
        self._interrupts = self._asked = 0

    def run(self) -> int:
        """Talk until one of the two leaves. Returns the exit code. Raises `JobError`, `WireError`."""
        usual = signal.signal(signal.SIGINT, self._interrupted)
        try:
            while (code := self._next()) is None:
                pass
            return code
        finally:
            signal.signal(signal.SIGINT, usual)

    def _interrupted(self, *_signal: Any) -> None:
        self._interrupts += 1

    def _next(self) -> int | None:
        """Take the next message. Returns the exit code when it is the last one."""
        word = self._receive()
        if word is None:
            self._leave()
            return 0
        if isinstance(word, DebugEnded):
            sys.stdout.write(self._text)
            if not word.problem:
                return 0
            if not self._met:
                raise JobError(f"{self._who} is not debugged: {word.problem}", "see unirun status")
            warn(f"{self._who}: {word.problem}")
            return 1
        if isinstance(word, DebugOutput):
            self._met = True
            self._text += word.text
            if word.asks and not self._answer():
                return 0
        return None

    def _receive(self) -> Message | None:
        """The next message; None if the user wants to leave. Ctrl-C stops the program, and a second one leaves it."""
        began, told = time.monotonic(), False
        while True:
            if self._interrupts > self._asked:
                if self._asked or not self._met:
                    return None
                self._asked = self._interrupts
                self._master.send(DebugInput(control="interrupt"))
            try:
                word = self._master.receive(POLL_INTERVAL)
            except RendezvousError:
                waits = not self._met or self._asked
                if waits and not told and time.monotonic() - began > NATIVE_NOTICE_DELAY:
                    told = True
                    warn(
                        f"{self._who} is in native code; it stops when it comes to Python code (Ctrl-C leaves)"
                    )
                continue
            if isinstance(word, DebugOutput | DebugEnded):
                return word

    def _answer(self) -> bool:
        """Send the line that the user types. Returns False if there is none, and the rank goes on."""
        body, newline, prompt = self._text.rpartition("\n")
        self._text = ""
        sys.stdout.write(body + newline)
        sys.stdout.flush()
        while True:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                line = input(prompt)
            except KeyboardInterrupt:
                # As in a shell: the line is given up.
                sys.stdout.write("\n")
                continue
            except EOFError:
                sys.stdout.write("\n")
                self._leave()
                return False
            finally:
                signal.signal(signal.SIGINT, self._interrupted)
                self._interrupts = self._asked = 0
            self._master.send(DebugInput(line))
            return True

    def _leave(self) -> None:
        self._master.send(DebugInput(control="detach"))
        say(f"{self._who} goes on")


PROFILE_TIMEOUT = 75.0
"""Seconds after the profile, and after each part of a trace, in which the agent must answer; torch takes some to write
the first."""

LONGEST_SECONDS = 600.0
"""Seconds of a profile, at most: a trace of torch has some MB for each."""

FLAME, FOLDED, TRACE = "flame.svg", "stacks.folded", "trace.json.gz"


def profile(options: Any) -> int:
    """Profile a rank. Returns 0. Raises `JobError`, `UsageError`."""
    if not 0 < options.seconds <= LONGEST_SECONDS:
        raise UsageError(f"--seconds {options.seconds:g}", f"give more than 0, {LONGEST_SECONDS:g} at most")
    job, role, rank = one_rank(options, "profile")
    folder = Path(options.output or f"profile-{role}-{rank}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder}: {error.strerror}", "name another directory") from error
    result, trace = profiled(job, Profile(role, rank, options.seconds))
    if result.problem:
        raise JobError(f"{role}:{rank} is not profiled: {result.problem}", "see unirun status")
    # Names of files need not be text.
    counts = {printable(stack): count for stack, count in result.stacks}
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


def profiled(job: JobDir, request: Profile) -> tuple[Profiled, bytes]:
    """The profile, and the bytes of the trace. Raises `JobError`."""
    parts: list[bytes] = []
    deadline = time.monotonic() + request.seconds + PROFILE_TIMEOUT
    try:
        with call_master(job) as master:
            master.send(Attach())
            master.send(request)
            while True:
                word = master.receive(max(deadline - time.monotonic(), 0.0))
                if isinstance(word, TracePart):
                    parts.append(word.data)
                    deadline = time.monotonic() + PROFILE_TIMEOUT
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


ANSWER_TIMEOUT = 10.0
"""Seconds in which the master must answer."""

SCHEDULE_CHECK_INTERVAL = 0.5
"""Seconds between two looks whether the job has ended, while the next fault is not due."""


def inject(options: Any) -> int:
    """Inject faults. Returns 0. Raises `UsageError`, `JobError`."""
    fault, amount = fault_of(options.fault)
    every = None if options.every is None else duration("--every", options.every)
    lasting = None if options.lasting is None else duration("--for", options.lasting)
    if every is None and (lasting is not None or options.seed is not None):
        raise UsageError("--for and --seed are for a schedule", "add --every 5s")
    if every == 0:
        raise UsageError("--every 0s is no schedule", "for example --every 5s")
    if every is not None and lasting is not None and lasting < every:
        raise UsageError(
            f"--for {options.lasting} is over before the first fault, which comes after {options.every}",
            f"give --for {options.every} or longer",
        )
    job = find_here(options.store, options.job, "inject")
    if read_summary(job).phase in ENDED:
        raise JobError(f"job {job.run_id} has ended", "there is nothing to inject a fault into")
    refuse_elsewhere(job, "inject")
    faults = [Inject(role, rank, fault, amount) for role, rank in ranks_of(options.who, read_status(job))]
    if every is not None:
        return _by_schedule(job, faults, every, lasting, options.seed)
    problems = _ask(job, faults)
    for each, problem in zip(faults, problems, strict=True):
        say(problem or f"{each} → {each.role}:{each.rank}")
    if all(problems):
        raise JobError("no fault was injected", "see unirun status")
    return 0


def _by_schedule(
    job: JobDir,
    faults: Sequence[Inject],
    every: float,
    lasting: float | None,
    seed: int | None,
) -> int:
    """One of `faults` each `every` seconds, until `lasting` seconds are over or the job ends."""
    if seed is None:
        seed = random.SystemRandom().randrange(1 << 16)
        say(f"seed {seed}")
    choices, began, count = random.Random(seed), time.monotonic(), 0
    while lasting is None or (count + 1) * every <= lasting:
        count += 1
        if not _wait_until(job, began + count * every):
            say(f"job {job.run_id} has ended")
            return 0
        fault = choices.choice(faults)
        (problem,) = _ask(job, [fault])
        say(f"{count * every:8.1f} s  {problem or f'{fault} → {fault.role}:{fault.rank}'}")
    return 0


def _wait_until(job: JobDir, due: float) -> bool:
    """Wait. Returns False when the job has ended before."""
    while read_summary(job).phase not in ENDED:
        left = due - time.monotonic()
        if left <= 0:
            return True
        time.sleep(min(left, SCHEDULE_CHECK_INTERVAL))
    return False


def _ask(job: JobDir, faults: Sequence[Inject]) -> list[str]:
    """Have the master inject faults. Returns for each the reason why it was not, or may not have been, injected; empty
    when it was. Nothing is asked again: one fault could become two."""
    answers: dict[tuple[str, int], str] = {}
    problem, deadline = "", time.monotonic() + ANSWER_TIMEOUT
    try:
        with call_master(job) as master:
            master.send(Attach())
            for each in faults:
                master.send(each)
            while any((each.role, each.rank) not in answers for each in faults):
                word = master.receive(max(deadline - time.monotonic(), 0.0))
                if isinstance(word, Injected):
                    answers[word.role, word.rank] = word.problem
    except (StoreError, WireError, RendezvousError) as error:
        problem = f"the master has not answered: {error}"
    return [answers.get((each.role, each.rank), f"{each.role}:{each.rank}: {problem}") for each in faults]


def fault_of(text: str) -> tuple[Fault, float]:
    """The fault of this name, and its amount: ``sigkill``, ``exit=3``, ``slow=2x``. Raises `UsageError`."""
    name, equals, amount = text.partition("=")
    found: Fault | None = next((each for each in get_args(Fault) if each == name), None)
    if found is None or bool(equals) != (found in ("exit", "slow")):
        known = ", ".join(
            {"exit": "exit=CODE", "slow": "slow=FACTOR"}.get(each, each) for each in get_args(Fault)
        )
        raise UsageError(f"--fault {text!r:.80} is unknown", f"it is one of {known}")
    if found == "exit" and not (re.fullmatch(r"\d{1,3}", amount) and int(amount) < 256):
        raise UsageError(f"--fault {text!r:.80} has no exit code", "for example exit=3; 255 is the greatest")
    if found == "slow" and not (
        re.fullmatch(r"\d{1,3}(\.\d{1,3})?x?", amount) and 1 < float(amount.rstrip("x")) <= 100
    ):
        raise UsageError(f"--fault {text!r:.80} has no factor", "for example slow=2x; 100x is the greatest")
    return found, float(amount.rstrip("x") or 0)


def ranks_of(who: str, status: JobStatus) -> list[tuple[str, int]]:
    """The ranks that ``actor``, ``actor:2`` or ``actor:0-3`` names. Raises `UsageError`."""
    name, colon, ranks = who.partition(":")
    role = next((each for each in status.roles if each.name == name), None)
    if role is None:
        known = ", ".join(each.name for each in status.roles)
        raise UsageError(f"job {status.run_id} has no role {name!r:.80}", f"its roles are {known}")
    last = len(role.workers) - 1
    span = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", ranks) if colon else None
    if colon and span is None:
        raise UsageError(f"{who!r:.80} names no ranks", f"write {name}, {name}:2 or {name}:0-3")
    low, high = (int(span[1]), int(span[2] or span[1])) if span is not None else (0, last)
    if not low <= high <= last:
        raise UsageError(f"{who!r:.80} names ranks that are not there", f"{name} has ranks 0 to {last}")
    return [(name, rank) for rank in range(low, high + 1)]


def one_rank(options: Any, command: str) -> tuple[JobDir, str, int]:
    """The job and the only rank that the `options` of `command` name. Raises `JobError`, `UsageError`."""
    job = find_here(options.store, options.job, command)
    status = read_status(job)
    if status.phase in ENDED:
        raise JobError(f"job {job.run_id} has ended", "it has no ranks any more")
    ranks = ranks_of(options.who, status)
    if len(ranks) != 1:
        raise UsageError(f"{options.who} names {len(ranks)} ranks", f"name one: {ranks[0][0]}:0")
    refuse_elsewhere(job, command)
    return job, *ranks[0]
