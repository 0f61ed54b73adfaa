"""A process that has something to report goes on, whatever its stderr is."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, TextIO, cast

import pytest

import unirun
from unirun.errors import RemoteTraceback, UsageError
from unirun.wire.reporting import flush, folded, gave_up, lacks_threads, noted, report, report_error


def test_report_flushes_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be killed at any time."""
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(file, encoding="utf-8"))
    report("unirun-master: ü")
    assert file.getvalue().decode() == "unirun-master: ü\n"
    print("by a user", file=sys.stderr)
    flush()
    assert file.getvalue().decode() == "unirun-master: ü\nby a user\n"


def test_report_error_writes_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="expected: ") as caught:
        raise ValueError("expected: ")
    report_error(caught.value)
    text = capsys.readouterr().err
    assert text.startswith("Traceback")
    assert text.endswith("ValueError: expected: \n")


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


def of_unirun(function: FunctionType, room: str) -> Callable[..., Any]:
    """The function as one of unirun, as its traceback has it."""
    file = f"{Path(unirun.__file__).parent}/{room}/x.py"
    return FunctionType(function.__code__.replace(co_filename=file), function.__globals__)


def through_unirun(room: str) -> Callable[[Callable[[], Any]], Any]:
    """A function of unirun, as it seems, that calls another one."""

    def between(function: Callable[[], Any]) -> None:
        function()

    return of_unirun(cast(FunctionType, between), room)


def frames_of(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (EOFError("EOF when reading a line"), "run: unirun --stdin actor:1 …"),
        (
            BdbQuit(),
            "write unirun.breakpoint() in its place, or debug it as it runs with: unirun debug JOB actor:1",
        ),
        (EOFError("Ran out of input"), ""),
        (ValueError(), ""),
    ],
)
def test_a_rank_that_reads_from_no_terminal_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    for name, value in {"ROLE_NAME": "actor", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with without_stdin():
        notes = getattr(noted(noted(error)), "__notes__", [])
    assert len(notes) == bool(words)
    assert words in "".join(notes)


def test_a_process_that_has_no_rank_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLE_NAME", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with without_stdin():
        (note,) = noted(EOFError("EOF when reading a line")).__notes__
    assert "worker:0 has no terminal" in note
    assert "unirun --stdin worker:0" in note


def test_a_process_whose_stdin_is_closed_is_told_too() -> None:
    kept = os.dup(0)
    os.close(0)
    try:
        (note,) = noted(EOFError("EOF when reading a line")).__notes__
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    assert "has no terminal" in note


def test_the_end_of_an_input_that_a_rank_has_needs_no_note() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    with without_stdin(reader):
        assert not hasattr(noted(EOFError("EOF when reading a line")), "__notes__")


@contextlib.contextmanager
def without_stdin(descriptor: int | None = None) -> Iterator[None]:
    """With ``/dev/null``, or with a descriptor, in place of this process's stdin."""
    kept = os.dup(0)
    given = os.open(os.devnull, os.O_RDONLY) if descriptor is None else descriptor
    try:
        os.dup2(given, 0)
        yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(given)


class TestFrames:
    @pytest.mark.parametrize("room", ["roles/calls", "train", "launcher", "wire"])
    def test_those_of_unirun_between_functions_of_users_are_left_out(self, room: str) -> None:
        between = through_unirun(room)

        def users() -> None:
            raise LookupError("no data")

        with pytest.raises(LookupError) as caught:
            between(lambda: between(users))
        assert frames_of(folded(caught.value)) == [
            "test_those_of_unirun_between_functions_of_users_are_left_out",
            "<lambda>",
            "users",
        ]

    def test_those_of_rooms_that_compute_for_users_stay(self) -> None:
        def users() -> None:
            raise LookupError("no data")

        with pytest.raises(LookupError) as caught:
            through_unirun("weights")(users)
        assert frames_of(folded(caught.value))[1:] == ["between", "users"]

    @pytest.mark.parametrize(
        ("error", "cause", "stays"),
        [
            (LookupError("a fault of unirun"), None, True),
            (UsageError("on purpose"), None, False),
            (LookupError("of a worker"), RemoteTraceback("actor:1", "Traceback …"), False),
        ],
    )
    def test_those_at_the_end_stay_where_they_may_say_what_is_wrong(
        self, error: Exception, cause: Exception | None, stays: bool
    ) -> None:
        def fail(error: Exception, cause: Exception | None) -> None:
            raise error from cause

        raises = partial(of_unirun(cast(FunctionType, fail), "roles"), error, cause)
        with pytest.raises(type(error)) as caught:
            through_unirun("roles")(raises)
        assert frames_of(folded(caught.value))[1:] == ["between", "fail"] * stays

    def test_those_of_errors_that_have_led_to_it_are_left_out_too(self) -> None:
        def users() -> None:
            raise LookupError("no data")

        def more() -> None:
            try:
                through_unirun("roles")(users)
            except LookupError as error:
                raise ValueError("no batch") from error

        with pytest.raises(ValueError, match="no batch") as caught:
            more()
        error = folded(caught.value)
        assert error.__cause__ is not None
        assert frames_of(error.__cause__) == ["more", "users"]


def test_errors_that_have_led_to_each_other_are_folded() -> None:
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    assert folded(one) is one
