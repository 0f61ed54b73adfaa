"""The choice of the root cause among several failures, and its report for a person.

It is the first failure in time, with two corrections. A process that is killed drops its connections, and its
peers may raise an error about that before the kill itself is seen: a failure whose text says that a peer went
away is a consequence as long as there is one that does not say so. When all failures say so, the cause is a
rank that has not failed, if it is known: one that left its peers with exit code 0, or the one that they all
waited for.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence

from unirun.collocation.graph import show_ranks
from unirun.errors import EXIT_FAILURE
from unirun.failover.state import Exit, Failure, JobState
from unirun.values import Value, WorkerId

# Error texts that blame a peer: those of torch 2.11 to 2.15, gloo and NCCL.
#
# A rank that fails because a peer is gone or late says so in its exception, or, where a thread of C++ ends the process,
# in the last lines of its stderr. It does not say which peer, but for a monitored barrier and unirun's own errors.

_IN_A_GROUP = (
    # gloo: the transport's connections, its waits, and how it connects.
    r"connection closed by peer \[",
    r"read error \[.*\]:",
    r"writev? error \[|sendmsg .*\[",
    r"application timeout caused pair closure",
    r"timed out waiting \d+\s*ms for (recv|send) operation",
    r"connectFullMesh failed|connect timeout \[|gloo/transport",
    # NCCL, and the watchdog of its process group.
    r"ncclRemoteError|remote process exited or there was a network error",
    r"connection closed by (remote peer|localRank)",
    r"NCCL communicator was aborted",
    r"watchdog caught (collective operation timeout|exception)",
    r"some NCCL operations have failed or timed out",
    r"timed out in blocking wait|received a dump signal due to a collective timeout",
    # The store in which ranks meet.
    r"DistNetworkError|DistStoreError",
    r"failed to (recv, got|send, sent) 0 bytes|wait timeout after|socket .*timed out after",
    # Barriers, torch.distributed.rpc, and unirun's own groups.
    r"failed to pass monitoredBarrier",
    r"this error originated at tensorpipe|RPC ran for more than set timeout",
    r"GroupError|GroupOutdated",
)
_ELSEWHERE = (
    r"connection (was )?(closed|reset|refused|aborted)",
    r"broken pipe|socket timeout|peer (is )?gone|remote process has exited",
    r"timed out (waiting|after)",
    r"WorkerLost|PeerLost",
)
_GROUP = re.compile("|".join(_IN_A_GROUP), re.IGNORECASE)
_ANY = re.compile("|".join((*_IN_A_GROUP, *_ELSEWHERE)), re.IGNORECASE)
_LOST = re.compile(r"\b(?:WorkerLost|PeerLost): (\S+?):(\d+)\b")
_MISSED = re.compile(r"Ranks? ([\d, ]*\d) failed to pass monitoredBarrier")


def is_consequence(failure: Failure) -> bool:
    """Return True if its text says that a peer is gone or late, or that any other connection was lost."""
    return bool(_ANY.search(_words(failure)))


def waited_for_a_peer(failure: Failure) -> bool:
    """Return True if its text says that it waited for a peer in a process group, or lost one there."""
    return bool(_GROUP.search(_words(failure)))


def lost(failure: Failure) -> frozenset[tuple[str, int]]:
    """The roles and ranks that its words call lost: those of which a call or a channel wanted something."""
    return frozenset((role, int(rank)) for role, rank in _LOST.findall(_words(failure)))


def missed(failure: Failure) -> frozenset[int]:
    """The ranks that its words name: those that did not come to a monitored barrier."""
    return frozenset(int(rank) for each in _MISSED.findall(_words(failure)) for rank in each.split(","))


def _words(failure: Failure) -> str:
    """The exception's message. Without one, the end of stderr, unless a signal from elsewhere has ended the process."""
    if failure.message or failure.exit.signal not in (None, signal.SIGABRT):
        return failure.message
    return failure.tail


MAX_DETECTION_DELAY = 1.0
"""Seconds by which the end of a process may be seen later than its consequences."""

CONSEQUENCE_SECONDS = 60.0
"""Seconds from the end of a rank to the failures in another role that are taken for a consequence of it."""


class Bystander(Value):
    """A worker that has not failed. `left` is the time at which it ended with 0 by itself, in seconds since
    the epoch; 0 if it lived until it was told to end. `log` is its log directory."""

    worker: WorkerId
    node: str
    exit: Exit | None
    left: float
    log: str


class Diagnosis(Value):
    """The `cause`, the `reason` for taking it, and the `others` in order of time.

    `inferred`: the cause is a rank that has not failed; its `note` says how it caused the other failures.
    """

    cause: Failure
    reason: str
    others: tuple[Failure, ...]
    inferred: bool = False

    @property
    def failure(self) -> Failure:
        """The first rank that has failed itself: the one with an error to show."""
        return self.others[0] if self.inferred else self.cause

    @property
    def code(self) -> int:
        """The exit code of the job. A rank that ended with 0 gives none."""
        return EXIT_FAILURE if self.cause.exit.ok else self.failure.exit.status

    def __str__(self) -> str:
        what = self.cause.note if self.inferred else f"{self.cause.exit} ({self.reason})"
        return f"{self.cause.worker} on {self.cause.node}: {what}"


def episode(failures: Sequence[Failure], gap: float = 5.0) -> tuple[Failure, ...]:
    """The failures that belong together with the last one.

    Of each role only the latest generation that failed counts, and, going back from the last failure, no
    silence longer than `gap` seconds lies between two of them. Inferred failures do not count.
    """
    failures = [failure for failure in failures if not failure.inferred]
    latest = {
        f.worker.role: max(g.generation for g in failures if g.worker.role == f.worker.role) for f in failures
    }
    ordered = sorted((f for f in failures if f.generation == latest[f.worker.role]), key=lambda f: f.time)
    start = len(ordered) - 1
    while start > 0 and ordered[start].time - ordered[start - 1].time <= gap:
        start -= 1
    return tuple(ordered[max(start, 0) :])


def bystanders(state: JobState, failures: Sequence[Failure]) -> tuple[Bystander, ...]:
    """The workers that are not among `failures`: those of the same generations, and those of other roles."""
    failed = {failure.worker for failure in (*state.failures, *failures)}
    generations = {failure.worker.role: failure.generation for failure in failures}
    found = []
    for role in state.roles.values():
        for worker in role.workers:
            who = WorkerId(role.name, worker.rank, worker.incarnation)
            if who in failed or worker.generation != generations.get(role.name, worker.generation):
                continue
            log = f"{state.logs}/{role.name}/{worker.rank}/{worker.incarnation}"
            found.append(Bystander(who, worker.node, worker.exit, worker.left, log))
    return tuple(found)


def diagnose(failures: Sequence[Failure], others: Sequence[Bystander] = ()) -> Diagnosis:
    """The root cause among `failures` (at least one), or among the `others`, which have not failed."""
    ordered = sorted(failures, key=lambda f: (f.time, f.worker.role, f.worker.rank, f.generation))
    firsts = [failure for failure in ordered if not is_consequence(failure)]
    inferred = None if firsts else _without_failure(ordered, others)
    if inferred is not None:
        return Diagnosis(inferred, inferred.note, tuple(ordered), inferred=True)
    cause = (firsts or ordered)[0]
    rest = tuple(failure for failure in ordered if failure is not cause)
    if not rest:
        reason = "the only failure"
    elif not firsts:
        reason = f"the first of {len(ordered)} failures, all about a lost peer or connection{_idle(ordered, others)}"
    elif cause is ordered[0]:
        reason = f"the first of {len(ordered)} failures"
    else:
        reason = f"the first of {len(ordered)} failures that is not about a lost peer"
    return Diagnosis(cause, reason, rest)


def _idle(failures: Sequence[Failure], others: Sequence[Bystander]) -> str:
    """The hint for the case that all ranks of a role have waited for a peer in vain: it may be of another role, with
    which they have a group."""
    roles = {failure.worker.role for failure in failures}
    silent = [each.worker for each in others if not each.left]
    if not any(map(waited_for_a_peer, failures)) or not silent or any(each.role in roles for each in silent):
        return ""
    return f"; {_named(silent)} had not failed"


def _without_failure(failures: Sequence[Failure], others: Sequence[Bystander]) -> Failure | None:
    """The rank that all `failures` are a consequence of, though it has not failed itself; None if it is not known."""
    left = "ended with exit code 0 while {others} waited for {it}"
    for each in others:
        who = each.worker.role, each.worker.rank
        if each.left and (callers := [failure for failure in failures if who in lost(failure)]):
            return _blamed([each], callers, left)
    waiting = [failure for failure in failures if waited_for_a_peer(failure)]
    if not waiting:
        return None
    roles = {failure.worker.role for failure in waiting}
    first = waiting[0].time
    early = [each for each in others if each.left and each.left <= first + MAX_DETECTION_DELAY]
    if mates := [each for each in early if each.worker.role in roles]:
        return _blamed(mates, waiting, left)
    silent = [each for each in others if each.worker.role in roles and not each.left]
    named = {(failure.worker.role, rank) for failure in waiting for rank in missed(failure)}
    if absent := [each for each in silent if (each.worker.role, each.worker.rank) in named]:
        return _blamed(absent, waiting, "did not come to a barrier where {others} waited for {it}")
    if len(silent) == 1 or 0 < len(silent) < len(waiting):
        # If there are more such ranks, most of them were told to end before their own wait was over.
        return _blamed(silent, waiting, "had not failed when {others} waited for a peer in vain")
    if gone := [each for each in early if each.left >= first - CONSEQUENCE_SECONDS]:
        return _blamed(gone, waiting, left)
    return None


def _blamed(ranks: Sequence[Bystander], waiting: Sequence[Failure], words: str) -> Failure:
    """The first of `ranks` as the cause of what `waiting` ranks report."""
    first = min(ranks, key=lambda each: (each.left, each.worker.role, each.worker.rank))
    note = words.format(
        others=_named(failure.worker for failure in waiting), it="it" if len(ranks) == 1 else "them"
    )
    if rest := [each.worker for each in ranks if each is not first]:
        note = f"{note}, as {_named(rest)} did"
    generation = next((f.generation for f in waiting if f.worker.role == first.worker.role), 0)
    time = first.left or waiting[0].time
    end = first.exit or Exit()
    return Failure(first.worker, generation, first.node, time, end, note=note, log=first.log, inferred=True)


def _named(workers: Iterable[WorkerId]) -> str:
    """``actor:0-3 and rollout:1``"""
    roles: dict[str, list[int]] = {}
    for worker in workers:
        roles.setdefault(worker.role, []).append(worker.rank)
    return " and ".join(f"{role}:{show_ranks(sorted(ranks))}" for role, ranks in sorted(roles.items()))


OTHERS_SHOWN = 8


def failure_report(reason: str, diagnosis: Diagnosis) -> str:
    """Several lines: the consequences first, then the cause with its traceback and its log."""
    cause = diagnosis.cause
    lines = [f"job failed: {reason}"]
    if diagnosis.others:
        lines.append(f"other failures ({len(diagnosis.others)}):")
        lines += [f"  {_short(failure, cause)}" for failure in diagnosis.others[:OTHERS_SHOWN]]
        if len(diagnosis.others) > OTHERS_SHOWN:
            lines.append(f"  … and {len(diagnosis.others) - OTHERS_SHOWN} more")
    lines.append(f"root cause: {diagnosis}")
    if cause.note and not diagnosis.inferred:
        lines.append(f"  {cause.note}")
    words = cause.traceback or cause.message
    if not words and cause.tail:
        lines.append("  the end of its output:")
        words = cause.tail
    lines += [f"  {line}" for line in words.rstrip().splitlines()]
    lines.append(f"  log: {cause.log}/stderr.log")
    return "\n".join(lines)


def _short(failure: Failure, cause: Failure) -> str:
    later = failure.time - cause.time
    when = f"{abs(later):.3f} s {'later' if later >= 0 else 'before'}"
    words = failure.message.splitlines()[0][:160] if failure.message else failure.note
    return f"{failure.worker} on {failure.node}: {failure.exit}, {when}{': ' + words if words else ''}"
