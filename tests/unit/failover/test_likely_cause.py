"""The likely cause of a failure, from its exit, its error, the end of its output and its note."""

from __future__ import annotations

import signal
import time
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.documents import ROOT
from tests.effort import examples
from tests.unit.failover.test_lost_peers import ELSEWHERE, IN_A_GROUP
from unirun.failover.diagnosis import (
    LINE,
    OOM_KILLED,
    CauseClass,
    likely_cause,
    lost,
    missed,
    record_of,
    waited_for_a_peer,
)
from unirun.failover.state import Exit, Failure, Rule
from unirun.values import WorkerId

SEGFAULT = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/home/me/model.py", line 12 in forward
  File "/home/me/train.py", line 80 in <module>
"""
WATCHDOG = (
    "what():  [PG ID 0 PG GUID 0 Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
)


def failure(
    message: str = "",
    *,
    code: int | None = None,
    by: int | None = None,
    early: bool = False,
    tail: str = "",
    note: str = "",
    rule: Rule = "exit",
) -> Failure:
    end = Exit(1 if code is None and by is None else code, by, early)
    return Failure(WorkerId("actor", 2, 0), 0, "n0", 1.0, end, message, note=note, tail=tail, rule=rule)


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        (failure(by=9, note=OOM_KILLED), "out_of_memory", "the kernel's OOM killer has ended it"),
        (failure(by=9), "killed", "somebody has sent it SIGKILL; unirun has not"),
        (
            failure(by=9, note="perhaps for lack of memory: x"),
            "killed",
            "somebody has sent it SIGKILL; unirun has not: perhaps for lack of memory: x",
        ),
        (failure(by=15), "terminated", "a request to end from outside, as of preemption"),
        (failure(code=143), "terminated", "its own exit after a request to end, as of preemption"),
        (failure(by=10), "signal", "a signal that nobody of unirun has sent"),
        (
            failure(by=11, tail=SEGFAULT),
            "crash",
            "a crash in native code: Segmentation fault, in forward (/home/me/model.py:12)",
        ),
        (
            failure(by=6, tail="a\nb\nfree(): invalid pointer\n"),
            "abort",
            "aborted it: free(): invalid pointer",
        ),
        (
            failure(by=6, tail=WATCHDOG),
            "collective_timeout",
            "a collective ALLREDUCE, number 7 of its group, or its rendezvous has timed out",
        ),
        (
            failure("RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 3000 ms"),
            "collective_timeout",
            "; not there: ranks 1,3: RuntimeError",
        ),
        (
            failure(
                by=6, tail=f"{WATCHDOG}\n - To our best knowledge, ranks [1, 2] are the lagging ranks that"
            ),
            "collective_timeout",
            "; not there: ranks 1-2: what()",
        ),
        (
            failure(by=6, tail=f"{WATCHDOG}\n  [3] finished collective #6, but didn't join collective #7"),
            "collective_timeout",
            "; not there: rank 3: what()",
        ),
        (
            failure("torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 1/2"),
            "collective_timeout",
            "a collective or its rendezvous has timed out",
        ),
        (failure("torch.OutOfMemoryError: CUDA out of memory. Tried …"), "cuda_out_of_memory", "Tried"),
        (failure("MemoryError"), "memory", "the host's memory, or its limit, is used up: MemoryError"),
        (
            failure("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "memory",
            "DefaultCPUAllocator",
        ),
        (failure("OSError: [Errno 28] No space left on device: 'x'"), "disk_full", "a disk is full"),
        (failure("OSError: [Errno 98] Address already in use"), "port_taken", "another process has its port"),
        (failure("ModuleNotFoundError: No module named 'x'"), "import_error", "No module named 'x'"),
        (failure("unirun.errors.PeerLost: critic:1 is gone: x"), "lost_peer", "a peer (critic:1) is gone"),
        (failure("ValueError: loss is nan\nin step 3"), "exception", "ValueError: loss is nan"),
        (failure(code=3), "exit_code", "its own exit, without an exception"),
        (failure(code=127), "not_executed", "a program was not found or cannot be executed"),
        (failure(code=0, early=True), "ended_early", "it has ended with 0 while it was needed"),
        (failure(by=9, rule="node", note="node n0 is gone"), "lost_node", "node n0 is gone"),
        (failure(by=9, rule="hang", note="it waits"), "hang", "it waits"),
        (failure(by=9, rule="probe", note="did not answer"), "not_ready", "did not answer"),
        (failure(code=1, rule="port"), "port_taken", "it is known by others"),
        (failure(by=9, rule="store", note="the store is gone"), "lost_store", "the store is gone"),
        (failure(by=9, rule="weights", note="half new"), "weights", "half new"),
        (failure(code=0, rule="peers", note="ended with 0"), "left_early", "ended with 0"),
    ],
)
def test_a_cause_has_a_class_and_words(found: Failure, kind: CauseClass, words: str) -> None:
    cause = likely_cause(found)
    assert cause.kind == kind
    assert words in cause.words


def test_every_class_is_documented() -> None:
    """`docs/diagnosis.md` has a row for each."""
    page = (ROOT / "docs/diagnosis.md").read_text()
    assert [kind for kind in get_args(CauseClass) if f"| `{kind}` |" not in page] == []


@pytest.mark.parametrize(
    ("led_to", "words"),
    [
        (failure("MemoryError"), "the host's memory, or its limit, is used up: MemoryError"),
        (failure(by=9), "SIGKILL"),
        (failure(by=11, tail=SEGFAULT), likely_cause(failure(by=11, tail=SEGFAULT)).words),
    ],
)
def test_a_fault_that_was_injected_is_told_as_such_whatever_it_has_led_to(
    led_to: Failure, words: str
) -> None:
    cause = likely_cause(replace(led_to, fault="1-7"))
    assert (cause.kind, cause.words) == ("injected", f"an injected fault: {words}")


@pytest.mark.parametrize("message", IN_A_GROUP)
def test_what_a_group_reports_is_a_time_out_or_a_lost_peer(message: str) -> None:
    assert likely_cause(failure(message)).kind in ("collective_timeout", "lost_peer")


@pytest.mark.parametrize("message", ELSEWHERE)
def test_what_any_other_connection_reports_is_a_lost_peer(message: str) -> None:
    assert likely_cause(failure(message)).kind == "lost_peer"


ANY_TEXT = st.one_of(
    st.text(),
    st.lists(
        st.sampled_from(
            [
                *IN_A_GROUP,
                SEGFAULT,
                WATCHDOG,
                "Ranks 1,, 2 failed to pass monitoredBarrier",
                f"Rank {'9' * 5000} failed to pass monitoredBarrier",
                f"WorkerLost: a:{'1' * 5000}",
                "\n",
                "\udc80",
                "read error [",
            ]
        ),
        max_size=4,
    ).map(" ".join),
)


@examples(300)
@given(
    message=ANY_TEXT,
    tail=ANY_TEXT,
    note=ANY_TEXT,
    code=st.none() | st.integers(-300, 300),
    by=st.none() | st.integers(-1, 200),
    rule=st.sampled_from(get_args(Rule)),
    fault=st.sampled_from(["", "1-1"]),
)
def test_any_failure_has_a_cause(
    message: str, tail: str, note: str, code: int | None, by: int | None, rule: Rule, fault: str
) -> None:
    found = replace(failure(message, tail=tail, note=note, rule=rule), exit=Exit(code, by), fault=fault)
    cause = likely_cause(found)
    assert cause.kind in get_args(CauseClass)
    assert cause.words
    assert "\n" not in cause.words
    assert len(cause.words) < 4 * LINE + 400
    assert record_of(found).cause == cause.words
    assert lost(found) is not None
    assert missed(found) is not None


@pytest.mark.parametrize(
    "text",
    [
        "read error [" * 1_000_000,
        "sendmsg " * 1_000_000,
        "socket " * 1_000_000,
        "Rank " + "1, " * 3_000_000,
        "WorkerLost: " * 1_000_000,
        "a" * 10_000_000,
        "\n" * 10_000_000,
        'File "' * 2_000_000,
    ],
    ids=lambda text: text[:12].strip() or "lines",
)
def test_long_texts_take_no_longer(text: str) -> None:
    began = time.process_time()
    for found in (failure(text, note=text), failure(by=int(signal.SIGSEGV), tail=text)):
        likely_cause(found)
        waited_for_a_peer(found)
    assert time.process_time() - began < 1.0
