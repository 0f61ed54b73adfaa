"""The latest report, as a user sees it on a terminal, in a notebook and in a log file."""

from __future__ import annotations

import io
import itertools
import math
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from tests.effort import examples
from tests.unit.train.callbacks.strategies import RESULTS
from unirun.errors import UsageError
from unirun.train.callbacks import ProgressCallback
from unirun.train.output import LivePart


class Screen(io.TextIOWrapper):
    """A file that says that it is a terminal."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="")

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        self.flush()
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode(self.encoding)

    @property
    def drawings(self) -> list[list[str]]:
        """The tables that were drawn: the rows of each table, without the control sequences between them."""
        texts = (text.strip("\r\n") for text in re.split(r"(?:\r?\x1b\[[\d?]*[A-Za-z])+", self.text))
        return [[row.rstrip() for row in text.splitlines()] for text in texts if text]


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def console(file: io.TextIOBase, width: int = 80, **more: Any) -> Console:
    """A console that nothing in the environment of the tests changes."""
    return Console(file=file, width=width, color_system=None, _environ={"TERM": "xterm"}, **more)  # type: ignore[arg-type]


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def report(iteration: int, *results: dict[str, Any], seconds: float = 1.25) -> list[dict[str, Any]]:
    ours = {"_timestamp": 1e9, "_time_this_iter_s": seconds, "_training_iteration": iteration}
    return [result | ours for result in results]


def drawn(screen: Screen, *reports: list[dict[str, Any]], metrics: Any = None, width: int = 80) -> list[str]:
    """The last table of a run with these reports."""
    callback = ProgressCallback(
        metrics, console=console(screen, width, force_terminal=True), clock=lambda: 0.0
    )
    callback.start_training("/logs", {})
    for each in reports:
        callback.handle_result(each)
    callback.finish_training(None)
    return screen.drawings[-1]


def test_a_table_has_a_row_per_rank_with_its_numbers(screen: Screen) -> None:
    results = {"loss": 0.123456, "tokens": 50000, "text": "no"}, {"loss": torch.tensor(2.5), "tokens": 12}
    assert drawn(screen, report(7, *results)) == [
        "rank  iteration    loss  tokens  seconds",
        "   0          7  0.1235   50000     1.25",
        "   1          7     2.5      12     1.25",
    ]


def test_numbers_have_four_significant_digits(screen: Screen) -> None:
    result = {"a": 123456.0, "b": 1e-5 / 3, "c": math.nan, "d": -math.inf, "e": 3 * 10**12, "f": True}
    (_, row) = drawn(screen, report(1, result, seconds=0.123456))
    assert row.split() == ["0", "1", "1.235e+05", "3.333e-06", "nan", "-inf", "3e+12", "1", "0.1235"]


def test_at_most_eight_ranks_are_shown(screen: Screen) -> None:
    ranks = [{"loss": float(rank)} for rank in range(12)]
    _, *rows, last = drawn(screen, report(1, *ranks))
    assert [row.split()[0] for row in rows] == [*map(str, range(8))]
    assert last == "… and 4 more ranks"
    assert drawn(screen, report(1, *ranks[:9]))[-1] == "… and 1 more rank"
    assert len(drawn(screen, report(1, *ranks[:8]))) == 9


def test_metrics_that_do_not_fit_are_counted(screen: Screen) -> None:
    result = {f"metric_{number}": number for number in range(20)}
    header, _, last = drawn(screen, report(1, result), width=60)
    assert header == "rank  iteration  metric_0  metric_1  metric_2  seconds"
    assert last == "… and 17 more metrics"


def test_chosen_metrics_may_be_texts_or_missing(screen: Screen) -> None:
    result = {"loss": 1, "val": {"acc": 0.5}, "note": "a [red]word[/]", "long": "x" * 99, "w": torch.ones(2)}
    rows = drawn(screen, report(1, result), metrics=["val/acc", "note", "absent", "w"])
    assert rows == [
        "rank  iteration  val/acc            note  absent                 w  seconds",
        "   0          1      0.5  a [red]word[/]          tensor([1., 1.])     1.25",
    ]
    assert f"{'x' * 23}…" in drawn(screen, report(1, result), metrics=["long"])[1]


def test_a_metric_that_is_not_in_each_report_keeps_its_column(screen: Screen) -> None:
    rows = drawn(screen, report(1, {"loss": 1, "val": 2}), report(2, {"loss": 3, "lr": 4}))
    assert rows == [
        "rank  iteration  loss  val  lr  seconds",
        "   0          2     3        4     1.25",
    ]


def test_the_table_is_redrawn_in_place_ten_times_a_second_and_at_the_end(
    screen: Screen, clock: FakeClock
) -> None:
    callback = ProgressCallback(console=console(screen, force_terminal=True), clock=clock)
    callback.start_training("/logs", {})
    seen = []
    for iteration, clock.now in enumerate([0, 0.05, 0.0999, 0.1, 0.15, 0.21, 0.22], 1):
        callback.handle_result(report(iteration, {"loss": 1}))
        seen.append(int(screen.drawings[-1][-1].split()[1]))
    assert seen == [1, 1, 1, 4, 4, 6, 6]
    assert len(screen.drawings) == 3
    callback.finish_training(None)
    assert screen.drawings[-1][-1].split()[1] == "7"
    assert screen.text.endswith("\n\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize("seconds", [*itertools.product((0.05, 0.1), repeat=3)])
def test_the_last_report_is_shown_whenever_those_before_it_have_come(
    screen: Screen, clock: FakeClock, seconds: tuple[float, ...]
) -> None:
    callback = ProgressCallback(console=console(screen, force_terminal=True), clock=clock)
    callback.start_training("/logs", {})
    for iteration, clock.now in enumerate(itertools.accumulate((0.0, *seconds)), 1):
        callback.handle_result(report(iteration, {"loss": 1}))
    callback.finish_training(None)
    assert screen.drawings[-1][-1].split()[1] == str(len(seconds) + 1)


def test_what_is_printed_meanwhile_stands_above_the_table(
    monkeypatch: pytest.MonkeyPatch, screen: Screen
) -> None:
    monkeypatch.setattr(sys, "stdout", screen)
    callback = ProgressCallback(console=console(screen, force_terminal=True))
    callback.start_training("/logs", {})
    callback.handle_result(report(1, {"loss": 1}))
    sys.stdout.write("epoch 1 is done\n")
    callback.finish_training(None)
    assert screen.drawings[1][0] == "epoch 1 is done"
    assert screen.drawings[1][1].startswith("rank")
    assert sys.stdout is screen


def test_bars_of_ranks_and_the_table_are_drawn_together(screen: Screen) -> None:
    bars = LivePart(console(screen, force_terminal=True), transient=True)
    callback = ProgressCallback(console=console(screen, force_terminal=True))
    callback.start_training("/logs", {})
    bars.start()
    bars.update(Text("[worker:0]: 10%"))
    callback.handle_result(report(1, {"loss": 1}))
    assert [line.split()[0] for line in screen.drawings[-1]] == ["[worker:0]:", "rank", "0"]
    callback.finish_training(None)
    # The table stands above the bars that are left.
    assert [line.split()[0] for line in screen.drawings[-1]] == ["rank", "0", "[worker:0]:"]
    bars.stop()
    assert not LivePart.open()


def test_a_run_without_a_report_shows_nothing(screen: Screen) -> None:
    callback = ProgressCallback(console=console(screen, force_terminal=True))
    callback.start_training("/logs", {})
    callback.finish_training(ValueError("before the first report"))
    assert screen.text == ""


def test_a_callback_follows_one_run_after_another(screen: Screen, clock: FakeClock) -> None:
    callback = ProgressCallback(console=console(screen, force_terminal=True), clock=clock)
    for name in ("loss", "reward"):
        callback.start_training("/logs", {})
        callback.handle_result(report(1, {name: 1}))
        callback.finish_training(None)
    assert screen.drawings[-1][0] == "rank  iteration  reward  seconds"


def written(
    *reports: list[dict[str, Any]], metrics: Any = None, file: io.TextIOBase | None = None
) -> list[str]:
    """The lines of a run whose stdout is no terminal."""
    file = file or io.StringIO()
    callback = ProgressCallback(metrics, console=console(file))
    callback.start_training("/logs", {})
    for each in reports:
        callback.handle_result(each)
    callback.finish_training(None)
    file.seek(0)
    return file.read().splitlines()


def test_in_a_file_each_report_is_one_line() -> None:
    results = {"loss": 0.123456, "val": {"acc": 0.5}, "note": "warm"}, {"loss": 2.0}
    assert written(report(1, *results), report(2, *results[:1]), report(3, {})) == [
        "iteration 1: loss 0.1235, val/acc 0.5 (1.25 s, rank 0 of 2)",
        "iteration 2: loss 0.1235, val/acc 0.5 (1.25 s)",
        "iteration 3 (1.25 s)",
    ]
    assert written(report(1, *results), metrics=["note", "absent"]) == [
        "iteration 1: note warm (1.25 s, rank 0 of 2)"
    ]


def test_a_line_is_never_wrapped_and_never_more_than_one() -> None:
    result = {f"a metric with a\nlong name {number}": number for number in range(30)}
    (line,) = written(report(1, result))
    assert line.endswith("a metric with a\\nlong name 29 29 (1.25 s)")


def test_colours_in_the_log_of_a_ci_do_not_make_it_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setenv("FORCE_COLOR", "1")
    callback = ProgressCallback()
    callback.start_training("/logs", {})
    callback.handle_result(report(1, {"loss": 1}))
    callback.finish_training(None)
    assert file.getvalue() == "iteration 1: loss 1 (1.25 s)\n"


def test_a_terminal_that_cannot_move_the_cursor_gets_lines(screen: Screen) -> None:
    dumb = Console(file=screen, width=80, force_terminal=True, _environ={"TERM": "dumb"})
    callback = ProgressCallback(console=dumb)
    callback.start_training("/logs", {})
    callback.handle_result(report(1, {"loss": 1}))
    callback.finish_training(None)
    assert screen.text == "iteration 1: loss 1 (1.25 s)\n"


class Notebook:
    """The part of IPython.display that is used: `display` returns a handle, whose `update` replaces what is shown."""

    def __init__(self) -> None:
        self.cells: list[list[Any]] = []

    def display(self, shown: Any, *, display_id: bool) -> SimpleNamespace:
        assert display_id
        cell = [shown]
        self.cells.append(cell)
        return SimpleNamespace(update=cell.append)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    made = Notebook()
    monkeypatch.setitem(sys.modules, "IPython.display", made)
    return made


def test_in_a_notebook_one_output_is_updated(notebook: Notebook, clock: FakeClock) -> None:
    file = io.StringIO()
    callback = ProgressCallback(console=console(file, force_jupyter=True), clock=clock)
    callback.start_training("/logs", {})
    for iteration, clock.now in enumerate([0, 0.2, 0.21], 1):
        callback.handle_result(report(iteration, *[{"loss": iteration}] * 10))
    callback.finish_training(None)
    (shown,) = notebook.cells
    assert len(shown) == 3
    html = shown[-1]._repr_mimebundle_([], [])["text/html"]
    assert html.startswith("<pre")
    assert "   0          3     3     1.25\n" in html
    assert "… and 2 more ranks" in html
    assert file.getvalue() == ""


def test_metrics_that_are_a_text_are_refused() -> None:
    with pytest.raises(UsageError, match=r"metrics='loss' is a text, no list; write metrics=\['loss'\]"):
        ProgressCallback("loss")


@examples(40)
@given(
    st.lists(st.lists(RESULTS, min_size=1, max_size=3), min_size=1, max_size=2),
    st.none() | st.lists(st.sampled_from(["loss", "acc", "a/b", "_rank"])),
    st.sampled_from(["utf-8", "ascii"]),
    st.integers(1, 90),
)
def test_any_report_is_shown_on_any_screen(
    reports: list[list[dict[Any, Any]]], metrics: list[str] | None, encoding: str, width: int
) -> None:
    drawn(Screen(encoding), *reports, metrics=metrics, width=width)
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    assert len(written(*reports, metrics=metrics, file=file)) == len(reports)
