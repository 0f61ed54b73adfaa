"""A process that has something to report goes on, whatever its stderr is."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest

from unirun.wire.reporting import flush, gave_up, lacks_threads, report, report_error


def test_report_flushes_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    report("unirun-master: ü")
    assert capsys.readouterr().err == "unirun-master: ü\n"


def test_report_error_writes_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    report_error(caught.value)
    text = capsys.readouterr().err
    assert text.startswith("Traceback")
    assert text.endswith("ZeroDivisionError: division by zero\n")


def test_only_python_s_own_error_says_that_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = threading.Thread(target=list)
    monkeypatch.setattr(threading, "_start_new_thread", refuse)
    with pytest.raises(RuntimeError) as caught:
        thread.start()
    assert lacks_threads(caught.value)
    assert not lacks_threads(RuntimeError("of another kind"))
    assert not lacks_threads(ValueError("can't start new thread"))


def refuse(*args: object) -> None:
    """Fail as the interpreter does when the kernel gives it no thread."""
    raise RuntimeError("can't start new thread")


class Broken:
    """An object that a user may put in the place of stderr."""

    def write(self, text: str) -> int:
        raise RuntimeError("no")

    flush = write


@pytest.fixture(params=["full", "closed", "none", "broken"])
def stderr(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    file: TextIO | None = None
    if request.param in ("full", "closed"):
        file = open("/dev/full", "w")
        if request.param == "closed":
            file.close()
    monkeypatch.setattr(sys, "stderr", Broken() if request.param == "broken" else file)
    yield
    monkeypatch.undo()
    if file is not None:
        with contextlib.suppress(OSError):
            file.close()


@pytest.mark.usefixtures("stderr")
def test_report_never_raises_when_stderr_cannot_be_written() -> None:
    for _ in range(3):
        report("lost")
        report_error(ValueError("lost"))
        flush()


def test_a_wait_that_has_run_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    gave_up("the end of a spawner", 2.0)
    assert capsys.readouterr().err == "unirun: gave up waiting for the end of a spawner after 2 s\n"
