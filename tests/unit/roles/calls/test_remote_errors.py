"""Errors go through bytes and keep what can be kept."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from typing import Any

import numpy as np
import pytest
import torch

from unirun.errors import (
    TRACE_LINES,
    Fault,
    InvocationTimeout,
    RemoteError,
    RemoteTraceback,
    SpecError,
    UsageError,
    WorkerLost,
    shortened,
)
from unirun.roles.calls import codec
from unirun.roles.calls.codec import dump_error, load_error


def through(error: BaseException) -> BaseException:
    """The error that the caller gets for one that was raised in a worker."""
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001 - whatever it is
        packed = dump_error(raised, "actor:2")
    return load_error(*packed)


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_of_a_long_traceback_the_end_is_sent_and_of_a_long_text_its_beginning(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    monkeypatch.setattr(codec, "_TEXT", 100)
    found = through(kind("begin " + "x" * 200 + " end"))
    trace = found.traceback if isinstance(found, RemoteError) else str(found.__cause__)
    assert " end" in trace
    assert "Traceback" not in trace
    if isinstance(found, RemoteError):
        assert "begin x" in str(found)
        assert " end" not in str(found)


class Picky(Exception):
    """Wants other arguments than it passes on."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} in {where}")
        self.code, self.where = code, where


class Silent(Exception):
    """Passes nothing on."""

    def __init__(self, first: int, second: int) -> None:
        self.first, self.second = first, second

    def __str__(self) -> str:
        return f"{self.first}/{self.second}"


class Counting(Exception):
    """Pickles well and lies: its constructor adds to what it is given."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}!")


class Slotted(Exception):
    """Keeps what it knows in slots."""

    __slots__ = ("code", "unset")

    def __init__(self, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class Plain:
    """No text, no comparison."""


@pytest.mark.parametrize(
    "error",
    [
        ValueError("plain"),
        ValueError(),
        ValueError("two", 2),
        KeyError("key"),
        OSError(28, "no space", "/file"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        json.JSONDecodeError("bad", "doc", 1),
        subprocess.CalledProcessError(3, ["cmd"], "out"),
        StopIteration(3),
        ExceptionGroup("several", [ValueError(1), KeyError(2)]),
        torch.OutOfMemoryError("no memory"),
        Picky(7, where="there"),
        Silent(1, 2),
        Counting("more"),
        Slotted(5),
        UsageError("wrong", "do it right"),
        SpecError([Fault("roles.actor", "is bad")]),
        WorkerLost("lost", worker="rollout:1"),
        InvocationTimeout("late", missing=("a:1",), results={"a:0": 5}),
        ValueError(Plain()),
        ValueError(float("nan")),
        ValueError(np.arange(3)),
        ValueError(torch.arange(3)),
    ],
    ids=lambda error: f"{type(error).__name__}-{str(error)[:12]}",
)
def test_type_and_text_and_what_it_holds_are_kept(error: BaseException) -> None:
    found = through(error)
    assert type(found) is type(error)
    assert str(found).partition(" at 0x")[0] == str(error).partition(" at 0x")[0]
    assert [type(arg) for arg in found.args] == [type(arg) for arg in error.args]
    mine = {name: value for name, value in error.__dict__.items() if name != "__notes__"}
    assert {name: repr(found.__dict__[name]) for name in mine} == {
        n: repr(value) for n, value in mine.items()
    }
    assert found.__notes__ == ["raised in actor:2"]
    assert isinstance(found.__cause__, RemoteTraceback)
    assert found.__cause__.worker == "actor:2"
    assert "raise error" in found.__cause__.traceback
    assert str(found.__cause__).startswith("raised in actor:2\n\n")


def test_an_error_of_the_system_keeps_its_number_and_file() -> None:
    found = through(OSError(28, "no space", "/file"))
    assert isinstance(found, OSError)
    assert (found.errno, found.strerror, found.filename) == (28, "no space", "/file")


def test_attributes_that_do_not_pickle_are_left_behind() -> None:
    error = ValueError("with a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    error.number = 3  # type: ignore[attr-defined]
    found = through(error)
    assert (type(found), str(found)) == (ValueError, "with a lock")


def test_arguments_that_do_not_pickle_become_the_text() -> None:
    found = through(ValueError("with", threading.Lock()))
    assert type(found) is ValueError
    assert str(found).startswith("('with', <unlocked _thread.lock object")


def test_large_tensors_in_an_error_go_along() -> None:
    sent = torch.arange(1 << 20)
    found = through(ValueError("look", sent))
    assert type(found) is ValueError
    assert torch.equal(found.args[1], sent)


def test_slots_are_kept_beside_attributes() -> None:
    class Both(Slotted):
        """Has a dict, too."""

    error = Both(7)
    error.more = "x"  # type: ignore[attr-defined]
    error.code = 8
    found: Any = through(error)
    assert (found.code, found.more) == (8, "x"), "not what its constructor has made of its arguments"
    assert not hasattr(found, "unset")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SystemExit(0), "SystemExit"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (asyncio.CancelledError("gone"), "asyncio.exceptions.CancelledError"),
    ],
)
def test_what_would_end_the_caller_is_an_error_with_its_name(error: BaseException, kind: str) -> None:
    found = through(error)
    assert isinstance(found, RemoteError)
    assert found.kind == kind


def test_what_cannot_be_rebuilt_is_told_of() -> None:
    lock = threading.Lock()

    class Hidden(Exception):
        """Holds on to something that does not pickle."""

        def __str__(self) -> str:
            return f"hidden behind {type(lock).__name__}"

    found = through(Hidden())
    assert isinstance(found, RemoteError)
    assert found.kind.endswith("Hidden")
    assert found.worker == "actor:2"
    assert "raise error" in found.traceback
    assert str(found).endswith("Hidden: hidden behind lock")


def test_an_error_whose_text_cannot_be_made_is_told_of() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    found = through(Broken())
    assert type(found) is Broken
    assert "Broken" in str(found.__cause__)


def test_a_very_long_message_is_cut_in_the_report_and_whole_in_the_exception() -> None:
    """The message and the traceback beside the pickled exception are cut; the exception itself is sent whole."""
    body, buffers = dump_error(ValueError("x" * (8 << 20)), "actor:2")
    assert 8 << 20 < len(body) < 11 << 20
    found: Any = load_error(body, buffers)
    assert str(found).startswith("xxx")


class Layer(torch.nn.Module):
    """Calls itself so many times through torch's own frames, three of which are between two of this file."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = Layer(depth - 1) if depth else torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def shown(depth: int) -> list[str]:
    """The lines of the traceback that a caller sees."""
    try:
        Layer(depth)(torch.ones(1, 4))
    except RuntimeError as raised:
        cause = through(raised).__cause__
        assert isinstance(cause, RemoteTraceback)
        whole = cause.traceback.splitlines()
        head, empty, *lines = str(cause).splitlines()
        assert (head, empty, lines[-1]) == ("raised in actor:2", "", whole[-1])
        assert len(lines) <= TRACE_LINES < len(whole)
        return lines
    raise AssertionError


def test_a_long_traceback_is_shown_without_the_frames_of_libraries_that_did_not_raise() -> None:
    lines = shown(2)
    assert lines[0] == "Traceback (most recent call last):"
    assert sum(f'File "{__file__}"' in line for line in lines) == 5
    assert lines.count("  … 2 frames of torch") == 4
    (own,) = [number for number, line in enumerate(lines) if "site-packages/torch" in line]
    assert "linear.py" in lines[own]
    assert lines[own + 1].strip().startswith("return F.linear")


def test_of_one_that_is_still_too_long_the_middle_is_left_out() -> None:
    lines = shown(20)
    assert len(lines) == TRACE_LINES
    (left,) = [line for line in lines if line.startswith("… ")]
    assert left.endswith(" lines are left out; __cause__.traceback of the error has them")


@pytest.mark.parametrize(
    ("raised", "folded"),
    [
        # Another error follows: the frame that raised the first one stays, with its marks.
        (
            ['  File "/v/lib/python3.13/json/decoder.py", line 3, in f', "    g()", "E: one", "", "During"],
            None,
        ),
        (['  File "<frozen importlib._bootstrap>", line 7, in _load'] * 3 + ['  File "/u/a.py", line 1'], 3),
    ],
)
def test_the_frame_that_raised_is_never_folded(raised: list[str], folded: int | None) -> None:
    lines = [*raised, *(f"{number}" for number in range(TRACE_LINES))]
    found = shortened(lines, "rest")
    assert len(found) == TRACE_LINES
    if folded is None:
        assert found[:3] == lines[:3]
    else:
        assert found[:2] == [f"  … {folded} frames of importlib", raised[-1]]
