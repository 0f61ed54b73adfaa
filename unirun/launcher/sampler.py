"""A worker's answers about itself: its stacks and its collectives.

`unirun.launcher.stacks` and `unirun.launcher.hangs` are the agent's side.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from unirun import atomic
from unirun.errors import UnirunError
from unirun.launcher.imported import C10D, when_imported
from unirun.wire.blocking import open_link, out_of_the_way
from unirun.wire.progress import ALLOWED, BEAT, COLLECTIVES, EVIDENCE, FOR_EVER, LAST, TEXT_LIMIT, Page, page
from unirun.wire.reporting import report, report_error
from unirun.wire.reports import UNKNOWN_RANKS, Arrivals, Wait

HANG_TIMEOUT = "UNIRUN_HANG_TIMEOUT"
"""The variable of a worker whose role has a time-out for hangs."""

INTERVAL = 5.0
"""Seconds between two looks of a worker whose role has no time-out."""

FORMED = "_update_default_pg"
"""The function of torch that is called with each new default process group."""

RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""The functions of torch that return what its flight recorders have. NCCL has a recorder of its own."""

STACKS_SIGNAL = signal.SIGRTMAX - 2
"""The signal for which a worker writes its stacks; SIGUSR1 and SIGUSR2 are the user's."""

WINDOW_SECONDS = 30.0
"""Seconds of a window in which ranks are compared; at most the time-out for hangs."""

STRIDES = (1, 7, 31, 127)
"""Each rank tells the times of the same part of its collectives. No step has such a number of them."""

MOST_TIMES = 64
"""Times of a window that are told, at most."""

LONGEST = 16
"""Number of waits in a page, and of characters of their names, at most."""

STACKS_MEMORY = "unirun-stacks"
"""The name of the memory to which a worker writes its stacks, and which its agent reads."""

STACKS, FLIGHT_RECORDER = "stacks.txt", "flight_recorder.json"
"""Files with evidence, in the directory of a worker's logs."""


def answer_for_stacks() -> None:
    """Write the stacks of this process when the agent asks for them."""
    # Without memory there are no stacks, and nothing else is missing.
    with contextlib.suppress(OSError):
        number = out_of_the_way(os.memfd_create(STACKS_MEMORY, os.MFD_CLOEXEC))
        # The agent empties it between two answers.
        fcntl.fcntl(number, fcntl.F_SETFL, os.O_APPEND)
        # Written by a handler in C, so also while another thread holds the GIL.
        faulthandler.register(STACKS_SIGNAL, number, all_threads=True)


def watch_myself(environ: Mapping[str, str]) -> None:
    """Begin to count collectives: at once if the role has a time-out, else with the first process group."""
    folder = Path(environ["TORCHELASTIC_ERROR_FILE"]).parent
    if HANG_TIMEOUT in environ:
        Sampler(page(), float(environ[HANG_TIMEOUT]), folder).start()
    else:
        with_the_first_group(lambda: Sampler(page(), 0.0, folder).start())


def with_the_first_group(start: Callable[[], None]) -> None:
    """Call `start` when this process, and no fork of it, forms its first process group. Before, a script has no thread
    that it would not have without unirun. One that cannot be started is no error of the script."""
    owner, done = os.getpid(), False

    def wrap(module: ModuleType) -> None:
        # Without it in a later torch, the console does not tell of collectives.
        known: Callable[[Any], None] | None = getattr(module, FORMED, None)
        if known is None:
            return

        def formed(group: Any) -> None:
            nonlocal done
            known(group)
            if not done and os.getpid() == owner:
                done = True
                with contextlib.suppress(RuntimeError):
                    start()

        setattr(module, FORMED, formed)

    when_imported(C10D, wrap)


class Sampler:
    """A thread that looks at this process's collectives, as torch has no hook that would count them.

    The process groups count what was begun, and torch's flight recorder knows what is not over: DDP's and functional
    collectives included, but no `send` and no `recv`. With ``TORCH_FR_BUFFER_SIZE=0`` it knows nothing.

    Without a `timeout` (0) it looks rarely, for the console alone: it shows no signs of life, and tells no times of
    arrival.
    """

    def __init__(self, own: Page, timeout: float, folder: Path) -> None:
        self._page, self._folder, self._shows_life = own, folder, timeout > 0
        self._interval, self._stall = (
            (min(0.2, timeout / 10), timeout / 4) if timeout else (INTERVAL, 3 * INTERVAL)
        )
        self._counts: tuple[tuple[str, int], ...] = ()
        # The time of the next look at what is not over, if the counts do not change until then.
        self._due = time.monotonic() + self._stall
        self._window = min(WINDOW_SECONDS, timeout) if timeout else math.inf
        self._told = self._number()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unirun-progress", daemon=True)

    def start(self) -> None:
        """Start the thread; it ends before the interpreter does."""
        if self._shows_life:
            self._page.fields[BEAT] = time.monotonic_ns()
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread."""
        atexit.unregister(self.stop)
        self._over.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            while not self._over.wait(self._interval):
                self.look(time.monotonic())
        except Exception as error:  # noqa: BLE001 - of torch's internals: without its collectives no rank can be judged
            report("unirun: hangs of this worker are not found any more")
            report_error(error)
            self._page.fields[BEAT], self._page.fields[ALLOWED] = 0, FOR_EVER

    def look(self, now: float) -> None:
        """Take one look, at the time `now` of the monotonic clock."""
        fields = self._page.fields
        if self._shows_life:
            fields[BEAT] = time.monotonic_ns()
        counts = tuple(begun())
        if counts != self._counts:
            fields[COLLECTIVES] += max(_total(counts) - _total(self._counts), 1)
            fields[LAST] = time.monotonic_ns()
            self._counts, self._due = counts, now + self._stall
            self._page.write("")
        elif now >= self._due:
            waits = waits_in(recorded(), members(), latest())
            self._page.write(as_text(waits))
            # A rank that waits may stop to; one that does not begins with a count.
            self._due = now + self._stall if waits else math.inf
        if (number := self._number()) != self._told:
            self._tell_arrivals(self._told)
            self._told = number
        if fields[EVIDENCE]:
            record = recorded()
            self._page.write(as_text(waits_in(record, members(), latest())))
            with contextlib.suppress(OSError):
                atomic.replace(self._folder / FLIGHT_RECORDER, json.dumps(record))
            fields[EVIDENCE] = 0

    def _number(self) -> int:
        """The number of the present window. Ranks begin a window together."""
        return int(time.time() / self._window)

    def _tell_arrivals(self, window: int) -> None:
        """Tell the master when this rank has begun the collectives of a window."""
        began = window * self._window
        for group, ranks, times in arrivals_in(recorded(), members(), began, began + self._window):
            # Without an agent nobody is told of stragglers.
            with contextlib.suppress(UnirunError, OSError, KeyError):
                open_link(os.environ).send(Arrivals(group, ranks, window, times))


def operation(entry: Mapping[str, Any]) -> str:
    """The operation of an entry: ``all_reduce`` for ``gloo:all_reduce``."""
    name: str = entry["profiling_name"]
    return name.partition(":")[2] or name


def group_of(entry: Mapping[str, Any]) -> str:
    """The process group of an entry, in words."""
    name, described = entry["process_group"]
    return described if described not in ("", "undefined") else f"group {name}"


def shapes_of(entry: Mapping[str, Any]) -> str:
    """The shapes and types of the tensors of an entry: ``[4, 2] Float``."""
    pairs = zip(entry.get("input_sizes", ()), entry.get("input_dtypes", ()), strict=False)
    return ", ".join(f"{size} {kind}" for size, kind in pairs)


def _total(counts: Iterable[tuple[str, int]]) -> int:
    return sum(count for _, count in counts)


def _world() -> Any:
    """torch's record of the process groups of this process; None before it is imported."""
    return getattr(sys.modules.get(C10D), "_world", None)


def begun() -> Iterator[tuple[str, int]]:
    """The number of collectives that each process group of this process has begun, by the name of the group."""
    world = _world()
    for group in list(world.pg_map) if world is not None else ():
        counts = []
        # Backends of several devices may be one. torch tells that of one backend as the number of the group.
        with contextlib.suppress(RuntimeError, AttributeError):
            backends = [group._get_backend(device) for device in group._device_types]
            for backend in {id(each): each for each in backends}.values():
                # Some backends do not count.
                with contextlib.suppress(RuntimeError, AttributeError):
                    counts.append(backend._get_sequence_number_for_group())
        if counts:
            yield group.group_name, sum(counts)


def latest() -> dict[str, int]:
    """The number of the latest collective of each process group of this process that has one backend, by the name of
    the group. Of several backends each counts by itself."""
    configs = getattr(_world(), "pg_backend_config", {})
    alone = {
        group.group_name
        for group, config in list(configs.items())
        if len({each.partition(":")[2] for each in config.split(",")}) == 1
    }
    return {name: count for name, count in begun() if name in alone}


def members() -> dict[str, str]:
    """The ranks of each process group of this process, by the name of the group, as in a `Wait`."""
    world = _world()
    if world is None:
        return {}
    groups = list(world.pg_group_ranks.items())
    # torch also has a number there, for groups of which this process is no member.
    found = {group.group_name: ranks for group, ranks in groups if hasattr(group, "group_name")}
    most = max(map(len, found.values()), default=0)
    return {name: _text_of(ranks, most) for name, ranks in found.items()}


def _text_of(ranks: Mapping[int, int], most: int) -> str:
    # A group across roles has its own numbers for its ranks (`unirun.roles.formation`).
    text = ",".join(map(str, ranks)) if type(ranks) is dict else UNKNOWN_RANKS
    return "" if type(ranks) is dict and len(ranks) == most else text


def recorded() -> dict[str, Any]:
    """The contents of torch's flight recorders: the one of NCCL, in builds with it, and the one of all other backends.
    Empty before torch is imported."""
    native, found = sys.modules.get("torch._C._distributed_c10d"), dict[str, Any]()
    for name in RECORDERS:
        dump = getattr(native, name, None)
        if dump is not None:
            record = json.loads(dump())
            found = {**record, "entries": [*found.get("entries", ()), *record.get("entries", ())]}
    return found


def waits_in(
    record: Mapping[str, Any], ranks: Mapping[str, str], latest: Mapping[str, int] | None = None
) -> list[Wait]:
    """The first collective of each group that is not over, from the contents of the flight recorder, and the ranks of
    the groups by name; and the numbers of their latest collectives, which have to be asked for after the record.

    A group that has ended may leave some for ever, and a later one may have its name, and begins again at 1.
    """
    known = latest or {}
    found: dict[tuple[str, str], dict[int, Wait]] = {}
    before: dict[tuple[str, str], int] = {}
    for entry in record.get("entries", ()):
        name, number = entry["process_group"][0], entry["collective_seq_id"]
        if entry["is_p2p"] or name not in ranks:
            continue
        # Each backend of a group counts by itself.
        counter = name, entry["profiling_name"].partition(":")[0]
        if number < before.get(counter, number):
            found.pop(counter, None)
        before[counter] = number
        waits = found.setdefault(counter, {})
        if entry["retired"] or entry["state"] == "completed":
            waits.pop(number, None)
        else:
            waits.setdefault(number, Wait(group_of(entry), number, operation(entry), ranks[name]))
    first: dict[str, Wait] = {}
    for (name, _), waits in found.items():
        # The later group has not come to such a number.
        own = [wait for number, wait in waits.items() if number <= known.get(name, number)]
        if own:
            first.setdefault(name, own[0])
    return list(first.values())


def shapes_in(record: Mapping[str, Any]) -> dict[tuple[str, int], str]:
    """The shapes and types of the tensors of each collective that is not over, by the name of its operation and its
    number: ``[4, 2] Float``."""
    found: dict[tuple[str, int], str] = {}
    for entry in record.get("entries", ()):
        if entry["retired"] or entry["state"] == "completed" or entry["is_p2p"]:
            continue
        found[operation(entry), entry["collective_seq_id"]] = shapes_of(entry)
    return found


def arrivals_in(
    record: Mapping[str, Any], ranks: Mapping[str, str], began: float, end: float
) -> Iterator[tuple[str, str, tuple[tuple[int, float], ...]]]:
    """The group of which most collectives were begun in a window, with its ranks and the times of some of them."""
    found: dict[str, dict[int, float]] = {}
    for entry in record.get("entries", ()):
        at = entry["time_created_ns"] / 1e9
        if not entry["is_p2p"] and began <= at < end:
            found.setdefault(entry["process_group"][0], {})[entry["collective_seq_id"]] = at
    for name, times in sorted(found.items(), key=lambda each: len(each[1]), reverse=True)[:1]:
        stride = next((each for each in STRIDES if len(times) <= each * MOST_TIMES), STRIDES[-1])
        chosen = [(number, at) for number, at in sorted(times.items()) if number % stride == 0]
        yield name, ranks.get(name, UNKNOWN_RANKS), tuple(chosen[:MOST_TIMES])


def as_text(waits: Iterable[Wait]) -> str:
    """The text of a page. It has to fit: a rank that waits for others must not look as if it did not."""
    waits = list(waits)[:LONGEST]
    rows = [[w.group[:LONGEST], w.number, w.name[:LONGEST], w.ranks] for w in waits]
    text = json.dumps(rows)
    if len(text) > TEXT_LIMIT:
        text = json.dumps([[*row[:3], UNKNOWN_RANKS] for row in rows])
    return text
