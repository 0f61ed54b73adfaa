"""Masters that were ended by an exception of their own: the store has how many, and which exceptions.

Agents tell the next master again what no master has written. An event that raises would therefore end one master after
another. When the same exception has ended `MOST` of them, or any exceptions `IN_ALL` of them, the next one does not
lead the job but aborts it (`unirun.failover.abort`).
"""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from msgspec import convert, to_builtins

from unirun.errors import StoreRefused
from unirun.rendezvous.election import Term
from unirun.rendezvous.keys import crashes_key
from unirun.rendezvous.store.protocol import Put, Store
from unirun.values import Value

MOST = 3
"""Masters that the same error may end."""

IN_ALL = 2 * MOST
"""Masters that errors may end, the same or not: one that depends on timing may come from another place each time."""

LASTING = 300.0
"""Seconds after which a term has brought the job on: what ended masters before it is forgotten."""

STORY = 12
"""Events that are told: the one that could not be handled, and those before it."""

_WORDS = 600
_TRACE = 8000
"""Characters of an event, and of a traceback, that are kept."""

_PACKAGE = str(Path(__file__).parents[1])


class Crash(Value):
    """The end of the master of term `epoch` by an exception, `lasted` seconds after the beginning of the term.

    `cause` tells one exception from another: its class and where it was raised. `message` is its last line. `story` are
    the latest events; the last one could not be handled. `causes` are the entries of
    the event log that led to an illegal transition, the earliest first.
    """

    epoch: int
    lasted: float
    cause: str
    message: str
    story: tuple[str, ...]
    traceback: str
    causes: tuple[str, ...] = ()


def crash_of(
    error: BaseException, epoch: int, lasted: float, events: Iterable[object], causes: Iterable[str] = ()
) -> Crash:
    """The crash of a master by `error`, after `events`, the last `STORY` or fewer; `causes` are those of the state."""
    return Crash(
        epoch=epoch,
        lasted=lasted,
        cause=f"{type(error).__name__} in {_place(error)}",
        message="".join(traceback.format_exception_only(error)).strip()[:_WORDS],
        story=tuple(repr(event)[:_WORDS] for event in events),
        traceback="".join(traceback.format_exception(error))[-_TRACE:],
        causes=tuple(text[:_WORDS] for text in causes),
    )


def _place(error: BaseException) -> str:
    """The innermost line of unirun that the error has passed; of any other code when there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)] or frames
    if not ours:
        return "nowhere"
    last = ours[-1]
    return f"{last.name} ({Path(last.filename).name}:{last.lineno})"


def fatal(crashes: Iterable[Crash]) -> Crash | None:
    """The latest crash by an exception that has ended `MOST` masters, else the latest of `IN_ALL`; None when there is
    none."""
    known = [*crashes]
    counts = Counter(crash.cause for crash in known)
    again = next((crash for crash in reversed(known) if counts[crash.cause] >= MOST), None)
    return again or (known[-1] if len(known) >= IN_ALL else None)


def with_crash(crashes: Iterable[Crash], crash: Crash) -> tuple[Crash, ...]:
    """`crashes`, as far as they still count, and one more. What was fatal stays so."""
    known = tuple(crashes)
    forgotten = crash.lasted >= LASTING and fatal(known) is None
    return (crash,) if forgotten else (*known, crash)


def reason_of(crash: Crash) -> str:
    """Why a job ends by a fatal crash, in one line."""
    last = crash.message.splitlines()[-1]
    return f"one master after another was ended by a bug in unirun: {crash.cause}: {last}"


def report_of(crash: Crash, log: str) -> str:
    """The same for a person to read, and to pass on to who can mend it; `log` is the masters' log."""
    *before, last = crash.story or ("nothing",)
    lines = [f"job failed: {reason_of(crash)}", f"the event that could not be handled: {last}"]
    if before:
        lines += ["before it:", *(f"  {event}" for event in before)]
    if crash.causes:
        lines += ["the state follows from:", *(f"  {cause}" for cause in crash.causes)]
    lines += [f"  {line}" for line in crash.traceback.rstrip().splitlines()]
    lines.append(f"  log: {log}")
    return "\n".join(lines)


def read_crashes(store: Store, run_id: str) -> tuple[Crash, ...]:
    """What the store has of a job. Raises `StoreError`."""
    item = store.get(crashes_key(run_id))
    if item is None:
        return ()
    try:
        return convert(json.loads(item.value), tuple[Crash, ...])
    except (ValueError, RecursionError) as error:
        raise StoreRefused(f"{item.key} holds {item.value!r:.80}, which no unirun has written") from error


def record_crash(store: Store, run_id: str, term: Term, crash: Crash) -> None:
    """Write a crash, unless another master leads by now. Raises `StoreError`."""
    crashes = with_crash(read_crashes(store, run_id), crash)
    text = json.dumps(to_builtins(crashes[-IN_ALL:]))
    store.txn([term.fence], [Put(crashes_key(run_id), text)])
