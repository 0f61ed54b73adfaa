"""Error texts that blame a peer: those of torch 2.11 to 2.15, gloo and NCCL.

A rank that fails because a peer is gone or late says so in its exception, or, where a thread of C++ ends the process,
in the last lines of its stderr. It does not say which peer, but for a monitored barrier and unirun's own errors.
"""

from __future__ import annotations

import re
import signal

from unirun.failover.failures import Failure

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
