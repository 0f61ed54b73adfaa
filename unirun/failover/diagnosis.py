"""The likely cause of a failure, from what is known of it: its exit, its error, the end of its output, a note.

These are pure functions of texts that users' code and libraries have written. None of them raises, and all take a time
that is linear in the part of a text that they read, whatever it is.
"""

from __future__ import annotations

import functools
import re
import signal
from typing import Literal

from unirun.failover.state import KEPT_FAILURES, Exit, Failure
from unirun.observe.status import FailureStatus, shaped
from unirun.values import Value, show_ranks

# Error texts that blame a peer: those of torch 2.11 to 2.15, gloo and NCCL.
#
# A rank that fails because a peer is gone or late says so in its exception, or, where a thread of C++ ends the process,
# in the last lines of its stderr. It does not say which peer, but for a monitored barrier and unirun's own errors.
#
# Patterns are texts: `re` compiles each when it is first used, and most processes never use one.

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
_GROUP = "(?i)" + "|".join(_IN_A_GROUP)
_ANY = "(?i)" + "|".join((*_IN_A_GROUP, *_ELSEWHERE))
_LOST = r"\b(?:WorkerLost|PeerLost): ([^\s:]{1,256}):(\d{1,9})\b"
_RANKS = r"(\d{1,9}(?:, ?\d{1,9})*)"
_MISSED = (
    rf"\bRanks? {_RANKS} failed to pass monitoredBarrier",
    # The report of NCCL's watchdog with TORCH_NCCL_DESYNC_DEBUG.
    rf"\branks \[{_RANKS}\] are the lagging ranks",
    rf"\[{_RANKS}\] finished collective #\d{{1,18}}, but didn't join",
)
_CALLED = r'torch/distributed/distributed_c10d\.py", line \d{1,9}, in (\w{1,64})'
_OF_ALL_RANKS = r"(all_|reduce|broadcast|gather|scatter|barrier)\w*"


def is_consequence(failure: Failure) -> bool:
    """Return True if its text says that a peer is gone or late, or that any other connection was lost."""
    return bool(re.search(_ANY, words_of(failure)))


def waited_for_a_peer(failure: Failure) -> bool:
    """Return True if its text says that it waited for a peer in a process group, or lost one there."""
    return bool(re.search(_GROUP, words_of(failure)))


def lost(failure: Failure) -> frozenset[tuple[str, int]]:
    """The roles and ranks that its words call lost: those of which a call or a channel wanted something."""
    return frozenset((role, int(rank)) for role, rank in re.findall(_LOST, words_of(failure)))


def missed(failure: Failure) -> frozenset[int]:
    """The ranks that its words name: those that did not come to a monitored barrier or, by NCCL's report, to a
    collective."""
    words = words_of(failure)
    found = (ranks for pattern in _MISSED for ranks in re.findall(pattern, words))
    return frozenset(int(rank) for ranks in found for rank in ranks.split(","))


def collective_of(failure: Failure) -> str:
    """The collective in which it waited, by NCCL's report (with its number, and its group if that is there) or by the
    latest call of torch in its traceback (the name alone). Empty if it is not known, or was none of all ranks."""
    words = words_of(failure)
    if found := re.search(_COLLECTIVE, words):
        group = re.search(_OF_GROUP, words)
        return f"{found[2].lower()} {found[1]}" + (f" of group {group[1]}" if group else "")
    names = re.findall(_CALLED, _shown(failure.traceback))
    return names[-1] if names and re.fullmatch(_OF_ALL_RANKS, names[-1]) else ""


def words_of(failure: Failure) -> str:
    """The exception's message. Without one, the end of stderr, unless a signal from elsewhere has ended the process.

    Of a long text, the beginning and the end.
    """
    if failure.message or failure.exit.signal not in (None, signal.SIGABRT):
        return _shown(failure.message)
    return _shown(failure.tail)


# The class of a cause, and its words.

CauseClass = Literal[
    "injected",
    "lost_node",
    "cut_off",
    "out_of_memory",
    "hang",
    "left_early",
    "not_ready",
    "port_taken",
    "lost_store",
    "weights",
    "cuda_out_of_memory",
    "memory",
    "disk_full",
    "import_error",
    "collective_timeout",
    "lost_peer",
    "exception",
    "crash",
    "abort",
    "terminated",
    "killed",
    "signal",
    "ended_early",
    "not_executed",
    "exit_code",
]
"""The classes of likely causes; docs/diagnosis.md has a row for each."""


class LikelyCause(Value):
    """The class (`kind`) of the likely cause of a failure, and the cause in `words`."""

    kind: CauseClass
    words: str


SHOWN = 4096
"""Characters at the beginning and at the end of a text that are read."""

LINE = 200
"""Characters of a line that are repeated."""

OOM_KILLED = "the kernel killed it: out of memory"
"""The note of an agent on a process that the kernel's OOM killer has ended."""

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)

NOT_EXECUTED = (126, 127)
"""Exit codes of shells, and of unirun, for a program that cannot be executed or is not found."""

_TEXTS: tuple[tuple[CauseClass, str, str], ...] = (
    (
        "cuda_out_of_memory",
        "the device's memory is used up",
        r"(CUDA|HIP|XPU) out of memory|CUDA error: out of memory|OutOfMemoryError|cudaErrorMemoryAllocation",
    ),
    (
        "memory",
        "the host's memory, or its limit, is used up",
        r"^MemoryError|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory|std::bad_alloc",
    ),
    ("disk_full", "a disk is full", r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]"),
    (
        "port_taken",
        "another process has its port",
        r"Address already in use|EADDRINUSE|\[Errno 98\]",
    ),
    ("import_error", "an import has failed", r"^(ModuleNotFoundError|ImportError|SyntaxError)\b"),
)
"""Classes of errors that are known by their texts."""

_TIMEOUT = (
    r"(?i)timed out waiting \d{1,12}\s?ms for|watchdog caught collective operation timeout|timed out in blocking wait"
    r"|failed to pass monitoredBarrier|application timeout caused pair closure|wait timeout after"
    r"|due to a collective timeout|timed out initializing process group|seconds waiting for clients"
)
_COLLECTIVE = r"SeqNum=(\d{1,18}), ?OpType=(\w{1,40})"
_OF_GROUP = r"\bPG GUID (\S{1,100}) Rank \d"
_FATAL = r"(?m)^Fatal Python error: (.{1,200})"
_FRAME = r'(?m)^ *File "([^"\n]{1,500})", line (\d{1,9}) in (.{1,100})'

_BY_RULE: dict[str, CauseClass] = {
    "node": "lost_node",
    "network": "cut_off",
    "hang": "hang",
    "peers": "left_early",
    "probe": "not_ready",
    "port": "port_taken",
    "store": "lost_store",
    "weights": "weights",
}


@functools.lru_cache(KEPT_FAILURES)
def likely_cause(failure: Failure) -> LikelyCause:
    """The likely cause of `failure`. A fault that was injected counts before all else; then what an agent or the master
    has seen, then the error that the worker has raised, then its exit."""
    if failure.fault:
        plain = _without_fault(failure)
        # The fault was sent by unirun.
        words = "SIGKILL" if plain.kind == "killed" else plain.words
        return LikelyCause("injected", f"an injected fault: {words}")
    return _without_fault(failure)


def _without_fault(failure: Failure) -> LikelyCause:
    note = _line(failure.note)
    if (kind := _BY_RULE.get(failure.rule)) is not None:
        return LikelyCause(kind, note or "it is known by others")
    if failure.exit.signal == signal.SIGKILL and OOM_KILLED in failure.note:
        return LikelyCause("out_of_memory", "the kernel's OOM killer has ended it")
    text = words_of(failure)
    return (_of_error(failure, text) if text else None) or _of_exit(failure.exit, note, _shown(failure.tail))


def _of_error(failure: Failure, text: str) -> LikelyCause | None:
    """The cause that an error message, or the last lines of stderr, tell; None when they tell none."""
    for kind, words, pattern in _TEXTS:
        if (found := re.search(pattern, text, re.MULTILINE)) is not None:
            return LikelyCause(kind, f"{words}: {_line_at(text, found.start())}")
    if re.search(_TIMEOUT, text) is not None:
        return LikelyCause("collective_timeout", _timeout(failure, text))
    if is_consequence(failure):
        gone = ", ".join(f"{role}:{rank}" for role, rank in sorted(lost(failure)))
        which = f" ({gone})" if gone else ""
        return LikelyCause("lost_peer", f"a peer{which} is gone, or a connection was lost: {_line(text)}")
    if failure.message:
        return LikelyCause("exception", _line(text))
    return None


def _timeout(failure: Failure, text: str) -> str:
    """The time-out of a collective in words, with the collective and the ranks that were missing if they are named."""
    found, ranks = re.search(_COLLECTIVE, text), missed(failure)
    which = f" {found[2]}, number {found[1]} of its group," if found is not None else ""
    who = f"; not there: rank{'s' * (len(ranks) > 1)} {show_ranks(sorted(ranks))}" if ranks else ""
    return f"a collective{which} or its rendezvous has timed out{who}: {_line(text)}"


def _of_exit(end: Exit, note: str, tail: str) -> LikelyCause:
    """The cause as far as the exit tells it."""
    more = f": {note}" if note else ""
    if end.signal is None:
        if end.early:
            return LikelyCause("ended_early", f"it has ended with {end.code} while it was needed{more}")
        if end.code in NOT_EXECUTED:
            return LikelyCause("not_executed", f"a program was not found or cannot be executed{more}")
        if (end.code or 0) - 128 in _REQUESTS:
            return LikelyCause("terminated", f"its own exit after a request to end, as of preemption{more}")
        return LikelyCause("exit_code", f"its own exit, without an exception{more}")
    if end.signal in _CRASHES:
        return LikelyCause("crash", f"a crash in native code{_stack(tail)}{more}")
    if end.signal == signal.SIGABRT:
        last = tail.rstrip().rpartition("\n")[2]
        return LikelyCause(
            "abort", f"native code has aborted it{_stack(tail) or (last and f': {_line(last)}')}{more}"
        )
    if end.signal == signal.SIGKILL:
        return LikelyCause("killed", f"somebody has sent it SIGKILL; unirun has not{more}")
    if end.signal in _REQUESTS:
        return LikelyCause("terminated", f"a request to end from outside, as of preemption{more}")
    return LikelyCause("signal", f"a signal that nobody of unirun has sent{more}")


def _stack(tail: str) -> str:
    """The fatal error and the innermost Python frame that faulthandler has written; empty when there is none."""
    error, frame = re.search(_FATAL, tail), re.search(_FRAME, tail)
    said = f": {_line(error[1])}" if error is not None else ""
    return said if frame is None else f"{said}, in {_line(frame[3])} ({_line(frame[1])}:{frame[2]})"


def _shown(text: str) -> str:
    """The parts of a text that are read."""
    return text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]}\n{text[-SHOWN:]}"


def _line(text: str) -> str:
    """The first line of a text that is not empty, cut."""
    return _line_at(text[:SHOWN].lstrip(), 0)


def _line_at(text: str, at: int) -> str:
    """The line of `text` that has the character `at`, cut."""
    start = max(text.rfind("\n", 0, at) + 1, at - LINE // 2)
    end = text.find("\n", at)
    line = text[start : len(text) if end < 0 else end].strip()
    return line if len(line) <= LINE else f"{line[: LINE - 1]}…"


def record_of(failure: Failure) -> FailureStatus:
    """The record of a failure, as its event and the status have it."""
    role, rank, incarnation = failure.worker
    found = likely_cause(failure)
    return shaped(
        FailureStatus,
        failure,
        role=role,
        rank=rank,
        incarnation=incarnation,
        exit=str(failure.exit),
        kind=found.kind,
        cause=found.words,
    )
