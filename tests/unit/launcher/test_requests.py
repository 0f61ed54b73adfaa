"""Requests to a worker, with this process as the worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import eventually
from unirun.launcher import requests
from unirun.launcher.requests import REQUEST_SIGNAL, await_requests, send_request


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The directory of a worker that takes requests."""
    before = signal.getsignal(REQUEST_SIGNAL)
    await_requests({"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})
    yield tmp_path
    signal.signal(REQUEST_SIGNAL, before)


def test_requests_that_come_while_it_is_in_native_code_are_all_taken_in_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel keeps one signal of those that come before it is handled."""
    taken: list[str] = []
    monkeypatch.setattr(requests, "_answer", lambda folder, text, frame: taken.append(text))
    with monkeypatch.context() as native:
        native.setattr(os, "kill", lambda pid, number: None)
        for text in ("profile=1", "debug=5"):
            assert send_request(os.getpid(), str(folder), text) == ""
    assert taken == []
    assert send_request(os.getpid(), str(folder), "exit=3") == ""
    # Another thread may get the signal, a moment later.
    eventually(lambda: len(taken) == 3)
    assert taken == ["profile=1", "debug=5", "exit=3"]
    assert list(folder.iterdir()) == []


def test_a_request_that_comes_during_another_one_is_taken_at_once_and_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def answer(folder: Path, text: str, frame: object) -> None:
        taken.append(text)
        if text == "debug=5":
            send_request(os.getpid(), str(folder), "exit=3")
            eventually(lambda: taken[-1] == "exit=3")

    monkeypatch.setattr(requests, "_answer", answer)
    send_request(os.getpid(), str(folder), "debug=5")
    eventually(lambda: len(taken) == 2)
    assert taken == ["debug=5", "exit=3"]


def test_requests_behind_one_that_raises_are_taken_before_the_users_code_gets_the_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def answer(folder: Path, text: str, frame: object) -> None:
        taken.append(text)
        if text == "oom":
            raise MemoryError("injected")

    monkeypatch.setattr(requests, "_answer", answer)
    for number, text in enumerate(("oom", "debug=5", "profile=1")):
        (folder / f"request.{number:020}").write_text(text)
    handler = signal.getsignal(REQUEST_SIGNAL)
    assert callable(handler)
    with pytest.raises(MemoryError, match="injected"):
        handler(REQUEST_SIGNAL, None)
    assert taken == ["oom", "debug=5", "profile=1"]
    assert list(folder.iterdir()) == []
