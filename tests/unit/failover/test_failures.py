"""The record of a failure is small, whatever a worker has said, and keeps the words that tell most."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from unirun.failover.state import (
    MARK,
    MESSAGE,
    NOTE,
    TAIL,
    TRACEBACK,
    Exit,
    Failure,
    beginning,
    brief,
    ending,
)
from unirun.values import WorkerId

MOST = 32 * 1024
"""Bytes of JSON: eight of them fit into one document of the job's context."""

words = st.text(st.characters(codec=None) | st.sampled_from('\x00\n"\\é…😀\udcff'))
limits = st.integers(6, 60)


def size(text: str) -> int:
    return len(json.dumps(text).encode()) - 2


def failure(message: str = "", traceback: str = "", note: str = "", tail: str = "") -> Failure:
    log = f"/{'d' * 4000}/actor/1/0"
    end = Exit(code=1)
    return Failure(
        WorkerId("r" * 63, 1, 0), 0, "n" * 253, 1.0, end, message, traceback, note, tail, log, decision=note
    )


@given(words, limits)
def test_what_fits_is_left_as_it_is(text: str, limit: int) -> None:
    for kept in (beginning(text, limit), ending(text, limit)):
        assert (kept == text) == (size(text) <= limit)


@given(words, limits)
def test_what_does_not_fit_is_cut_as_little_as_can_be(text: str, limit: int) -> None:
    if size(text) <= limit:
        return
    start, end = beginning(text, limit), ending(text, limit)
    assert start.endswith(MARK)
    assert end.startswith(MARK)
    head, tail = start.removesuffix(MARK), end.removeprefix(MARK)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert size(start) <= limit < size(text[: len(head) + 1] + MARK)
    assert size(end) <= limit < size(MARK + text[len(text) - len(tail) - 1 :])


@given(words, limits)
def test_what_was_cut_is_not_cut_again(text: str, limit: int) -> None:
    for cut in (beginning, ending):
        once = cut(text, limit)
        assert cut(once, limit) == once


def test_a_cut_counts_bytes_as_json_writes_them() -> None:
    assert beginning("abcdefghijkl", 10) == "abcd…"
    assert ending("abcdefghijkl", 10) == "…ijkl"
    assert beginning("ab\n\n\n\n\n", 10) == "ab\n…"
    assert ending("😀" * 9, 18) == "…😀"


@pytest.mark.parametrize("letter", ["x", "\n", "\x00", "é", "😀", "\udcff", '"'])
def test_a_failure_that_says_very_much_is_still_small(letter: str) -> None:
    flood = letter * 300_000
    kept = brief(failure(flood, flood, flood, flood))
    assert len(json.dumps(to_builtins(kept)).encode()) <= MOST
    assert brief(kept) == kept


def test_of_a_message_the_beginning_is_kept_of_a_traceback_and_a_tail_the_end() -> None:
    lines = [f"line {number}" for number in range(10_000)]
    text = "\n".join(lines)
    kept = brief(failure(text, text, text, text))
    assert kept.message.startswith("line 0\nline 1\n")
    assert kept.note.startswith("line 0\n")
    assert kept.decision.startswith("line 0\n")
    assert kept.traceback.endswith("\nline 9998\nline 9999")
    assert kept.tail.endswith("\nline 9999")
    assert [size(kept.message), size(kept.traceback), size(kept.tail)] == pytest.approx(
        [MESSAGE, TRACEBACK, TAIL], abs=2
    )
    assert [size(kept.note), size(kept.decision)] == pytest.approx([NOTE, NOTE], abs=10)


def test_a_failure_of_usual_length_is_kept_whole() -> None:
    usual = failure("ValueError: x", "Traceback\n" + "  frame\n" * 200, "a note", "the end\n" * 12)
    assert brief(usual) == usual


@pytest.mark.parametrize(
    ("end", "ok", "status", "words"),
    [
        (Exit(code=0), True, 0, "exit code 0"),
        (Exit(code=7), False, 7, "exit code 7"),
        (Exit(signal=9), False, 137, "killed by SIGKILL"),
        (Exit(signal=11), False, 139, "killed by SIGSEGV"),
        (Exit(signal=40), False, 168, "killed by signal 40"),
    ],
)
def test_an_exit_is_ok_only_with_code_0(end: Exit, ok: bool, status: int, words: str) -> None:
    assert (end.ok, end.status, str(end)) == (ok, status, words)
