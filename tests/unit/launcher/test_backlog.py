"""A backlog is bounded in bytes and in order."""

from __future__ import annotations

from unirun.launcher.agent import Backlog


def test_a_backlog_is_taken_in_order_and_once() -> None:
    backlog = Backlog()
    for frame in (b"a", b"b", b"c"):
        backlog.add(frame)
    assert [*backlog.take()] == [b"a", b"b", b"c"]
    assert [*backlog.take()] == []


def test_a_full_backlog_drops_the_oldest() -> None:
    backlog = Backlog(limit=10)
    for frame in (b"aaaa", b"bbbb", b"cccc", b"dd"):
        backlog.add(frame)
    assert [*backlog.take()] == [b"bbbb", b"cccc", b"dd"]
    backlog.add(b"e" * 10)
    assert [*backlog.take()] == [b"e" * 10], "what was taken does not count any more"


def test_a_backlog_drops_a_frame_over_its_limit() -> None:
    backlog = Backlog(limit=10)
    backlog.add(b"a")
    backlog.add(b"b" * 11)
    backlog.add(b"c")
    assert [*backlog.take()] == [b"c"]
