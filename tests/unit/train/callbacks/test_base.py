"""The callbacks of a run: who is called, and where an error goes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from unirun.errors import UsageError
from unirun.train.callbacks import Callbacks, JsonLoggerCallback, TrainingCallback

RESULT: list[dict[str, Any]] = [{"loss": 1.0}, {"loss": 2.0}]


class Recorder(TrainingCallback):
    """Writes down what it is called with; `fails` maps a method to what it raises."""

    def __init__(self, fails: Mapping[str, BaseException] | None = None) -> None:
        self.fails, self.calls = fails or {}, list[tuple[str, Any]]()

    def start_training(self, logdir: str, config: Mapping[str, Any]) -> None:
        self.called("start", (logdir, config))

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        self.called("handle", results)

    def finish_training(self, error: BaseException | None) -> None:
        self.called("finish", error)

    def called(self, method: str, argument: Any) -> None:
        self.calls.append((method, argument))
        if method in self.fails:
            raise self.fails[method]


def run(*callbacks: TrainingCallback, error: BaseException | None = None) -> BaseException | None:
    """The error that a run raises that makes one report, and is ended by `error` after it: as its caller does it."""
    those = Callbacks(callbacks)
    try:
        try:
            those.start("/logs", {"lr": 1})
            those.handle(RESULT)
            if error is not None:
                raise error
        except BaseException as raised:
            those.finish(raised)
            raise
        those.finish(None)
    except BaseException as raised:  # noqa: BLE001 - tests look at it
        return raised
    return None


def notes(error: BaseException | None) -> list[str]:
    return getattr(error, "__notes__", [])


def test_all_callbacks_see_the_whole_run_in_order() -> None:
    first, second = Recorder(), Recorder()
    assert run(first, second) is None
    assert first.calls == [("start", ("/logs", {"lr": 1})), ("handle", RESULT), ("finish", None)]
    assert second.calls == first.calls


def test_a_callback_needs_no_method_of_its_own() -> None:
    assert run(TrainingCallback()) is None


def test_a_callback_that_changes_its_results_changes_nobody_elses() -> None:
    class Greedy(TrainingCallback):
        def handle_result(self, results: list[dict[str, Any]]) -> None:
            results.pop()["loss"] = 0

    after = Recorder()
    assert run(Greedy(), after) is None
    assert after.calls[1] == ("handle", [{"loss": 1.0}, {"loss": 2.0}])
    assert len(RESULT) == 2


def test_callbacks_learn_the_error_that_ended_the_run() -> None:
    callback, error = Recorder(), KeyError("boom")
    assert run(callback, error=error) is error
    assert callback.calls[-1] == ("finish", error)
    assert notes(error) == []


def test_an_error_of_a_start_ends_the_run_and_finishes_those_that_were_started() -> None:
    error = OSError("no room")
    before, failing, after = Recorder(), Recorder({"start": error}), Recorder()
    assert run(before, failing, after) is error
    assert [name for name, _ in before.calls] == ["start", "finish"]
    assert before.calls[-1] == ("finish", error)
    assert [name for name, _ in failing.calls] == ["start"]
    assert after.calls == []


def test_an_error_of_a_report_ends_the_run_with_its_own_traceback() -> None:
    error = OSError("disk full")
    failing, after = Recorder({"handle": error}), Recorder()
    assert run(failing, after) is error
    assert traceback.extract_tb(error.__traceback__)[-1].name == "called"
    assert failing.calls[-1] == ("finish", error)
    assert [name for name, _ in after.calls] == ["start", "finish"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_of_a_finish_is_raised_after_all_were_called(kind: Callable[[str], BaseException]) -> None:
    first, second = kind("first"), OSError("second")
    last = Recorder()
    assert run(Recorder({"finish": first}), Recorder({"finish": second}), last) is first
    assert last.calls[-1] == ("finish", None)
    (note,) = notes(first)
    assert note.startswith("finish_training of Recorder raised, too:\nTraceback")
    assert note.endswith("OSError: second")


def test_errors_of_finishes_are_notes_of_the_error_that_ended_the_run() -> None:
    error = RuntimeError("the training function")
    callbacks = [Recorder({"finish": ValueError("one")}), Recorder({"finish": ValueError("two")}), Recorder()]
    assert run(*callbacks, error=error) is error
    assert callbacks[-1].calls[-1] == ("finish", error)
    assert [note.splitlines()[-1] for note in notes(error)] == ["ValueError: one", "ValueError: two"]


def test_a_finish_that_raises_the_error_it_got_adds_nothing() -> None:
    error = RuntimeError("the training function")
    assert run(Recorder({"finish": error}), error=error) is error
    assert notes(error) == []


def test_a_second_finish_does_nothing() -> None:
    callback = Recorder()
    callbacks = Callbacks([callback])
    callbacks.start("/logs", {})
    callbacks.finish(None)
    callbacks.finish(ValueError("late"))
    assert [name for name, _ in callback.calls] == ["start", "finish"]


class Half:
    def handle_result(self, results: list[dict[str, Any]]) -> None: ...


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (JsonLoggerCallback(), r"callbacks is a JsonLoggerCallback, no list; write callbacks=\[…\]"),
        ([Recorder(), Recorder], r"callbacks\[1\] is the class Recorder; pass an object: Recorder\(…\)"),
        ([Recorder(), Recorder(), 3], r"callbacks\[2\] is a int, which has no start_training and no handle"),
        ([Half()], r"\[0\] is a Half, which has no start_training and no finish_training; derive its class"),
    ],
)
def test_what_is_no_callback_is_refused_by_its_place_and_type(callbacks: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Callbacks(callbacks)


def test_an_object_with_the_methods_is_a_callback_of_any_class() -> None:
    class Duck(Half):
        def start_training(self, logdir: str, config: Mapping[str, Any]) -> None: ...
        def finish_training(self, error: BaseException | None) -> None: ...

    Callbacks((Duck(),))
    Callbacks([])
