"""A log of JSON lines on a disk that is full for a while: the lines around the gap stay whole."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from unirun.observe.events import LineLog, read_lines

ROOM = 64
"""Bytes."""


@pytest.fixture
def room_for_little() -> Iterator[None]:
    """Files of this process may have `ROOM` bytes: a write beyond is cut off, and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def make_room() -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.mark.usefixtures("room_for_little")
def test_a_line_that_was_cut_off_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    log = LineLog(tmp_path / "log")
    log.append({"text": "first"})
    log.append({"text": "x" * ROOM})
    log.append({"text": "lost"})
    assert os.stat(tmp_path / "log").st_size == ROOM
    make_room()
    log.append({"text": "after"})
    log.append({"text": "last"})
    log.close()
    assert [each["text"] for each in read_lines(tmp_path / "log")] == ["first", "after", "last"]
    assert b"\n\n" not in (tmp_path / "log").read_bytes()


def test_nor_does_one_that_another_process_has_left(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"text": "cut')
    log = LineLog(tmp_path / "log")
    log.append({"text": "whole"})
    log.close()
    assert [each["text"] for each in read_lines(tmp_path / "log")] == ["whole"]
