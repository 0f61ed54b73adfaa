"""Results in files: every row is there as soon as it is reported, and a run that resumes goes on after the last one."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.train.callbacks.strategies import RESULTS
from unirun.errors import UsageError
from unirun.train.callbacks import CsvLoggerCallback, JsonLoggerCallback, TrainingCallback
from unirun.train.callbacks.base import flat, plain, readable

Results = list[dict[Any, Any]]


@pytest.fixture
def logdir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def run(callback: TrainingCallback, logdir: Path, *reports: Results) -> None:
    """A run with these reports."""
    callback.start_training(str(logdir), {"lr": 1})
    for results in reports:
        callback.handle_result(results)
    callback.finish_training(None)


def lines(logdir: Path, name: str = "results.json") -> list[Any]:
    """The rows of the file: all of its lines are whole."""
    text = (logdir / name).read_text("ascii")
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def rows(logdir: Path, name: str = "results.csv") -> list[list[str]]:
    text = (logdir / name).read_bytes().decode()
    assert text == "" or text.endswith("\n")
    return list(csv.reader(io.StringIO(text, newline="")))


def losses(*values: float) -> Results:
    """A report of as many ranks."""
    return [{"loss": value} for value in values]


def test_json_has_one_line_per_report_with_all_ranks(logdir: Path) -> None:
    run(JsonLoggerCallback(), logdir, losses(1, 2), losses(3, 4))
    text = (logdir / "results.json").read_text()
    assert text == '[{"loss": 1}, {"loss": 2}]\n[{"loss": 3}, {"loss": 4}]\n'


def test_json_has_values_of_its_own_for_what_it_does_not_know(logdir: Path) -> None:
    result = {
        "loss": torch.tensor(0.5),
        "lr": np.float64("nan"),
        "at": logdir,
        "top": math.inf,
        "w": np.ones(2),
    }
    run(JsonLoggerCallback(), logdir, [result])
    assert lines(logdir) == [[{"loss": 0.5, "lr": None, "at": str(logdir), "top": None, "w": [1.0, 1.0]}]]


def test_json_of_some_ranks_only(logdir: Path) -> None:
    run(JsonLoggerCallback(ranks=[2, 0]), logdir, losses(1, 2, 3), losses(4))
    assert lines(logdir) == [losses(1, 3), losses(4)]


@pytest.mark.parametrize("ranks", [0, "0", [-1], ["0"], [True], None])
def test_ranks_that_are_none_are_refused_at_once(ranks: Any) -> None:
    with pytest.raises(UsageError, match=r'is no list of ranks; write ranks=\[0, 1\] or ranks="all"'):
        JsonLoggerCallback(ranks=ranks)


@pytest.mark.parametrize("make", [JsonLoggerCallback, CsvLoggerCallback])
def test_a_file_may_have_a_folder_of_its_own(logdir: Path, make: Callable[[str], TrainingCallback]) -> None:
    run(make("deep/er/log"), logdir, losses(1))
    assert (logdir / "deep/er/log").stat().st_size > 0


@pytest.mark.parametrize(("make", "read"), [(JsonLoggerCallback, lines), (CsvLoggerCallback, rows)])
def test_a_report_is_in_the_file_when_it_was_handled(
    logdir: Path, make: Callable[[], TrainingCallback], read: Callable[[Path], list[Any]]
) -> None:
    callback = make()
    callback.start_training(str(logdir), {})
    for number in range(3):
        callback.handle_result(losses(number))
        last = read(logdir)[-1]
        assert last == ([{"loss": number}] if make is JsonLoggerCallback else ["0", str(number)])
    callback.finish_training(None)


@pytest.mark.parametrize(("make", "read"), [(JsonLoggerCallback, lines), (CsvLoggerCallback, rows)])
def test_a_run_that_resumes_goes_on_after_the_last_row(
    logdir: Path, make: Callable[[], TrainingCallback], read: Callable[[Path], list[Any]]
) -> None:
    callback = make()
    run(callback, logdir, losses(1, 2), losses(3, 4))
    run(callback, logdir, losses(5, 6))
    again = read(logdir)
    (logdir / "results.json").unlink(missing_ok=True)
    (logdir / "results.csv").unlink(missing_ok=True)
    run(make(), logdir, losses(1, 2), losses(3, 4), losses(5, 6))
    assert again == read(logdir)


@examples(40)
@given(st.lists(st.lists(RESULTS, min_size=1, max_size=2), min_size=1, max_size=4), st.floats(0, 1))
def test_json_has_all_whole_lines_before_a_kill_and_the_next_run_goes_on_there(
    tmp_path_factory: pytest.TempPathFactory, reports: list[Results], share: float
) -> None:
    logdir = tmp_path_factory.mktemp("killed")
    run(JsonLoggerCallback(), logdir, *reports)
    before = cut(logdir / "results.json", share).count(b"\n")
    run(JsonLoggerCallback(), logdir, losses(7))
    assert lines(logdir) == [plain(results) for results in reports[:before]] + [losses(7)]


def cut(path: Path, share: float) -> bytes:
    """The rest of the file after a kill."""
    path.write_bytes(path.read_bytes()[: round(share * path.stat().st_size)])
    return path.read_bytes()


def test_csv_has_one_row_per_rank_and_report(logdir: Path) -> None:
    run(CsvLoggerCallback(), logdir, losses(1, 2), losses(0.5, math.nan), losses(-math.inf))
    assert (logdir / "results.csv").read_text() == "_rank,loss\n0,1\n1,2\n0,0.5\n1,nan\n0,-inf\n"


def test_csv_has_nested_metrics_with_slashes_and_lists_as_json(logdir: Path) -> None:
    run(
        CsvLoggerCallback(),
        logdir,
        [{"val": {"acc": 0.5, "by": {"class": [1, 2]}}, "ok": True, "none": None}],
    )
    assert rows(logdir) == [
        ["_rank", "val/acc", "val/by/class", "ok", "none"],
        ["0", "0.5", "[1, 2]", "True", ""],
    ]


def test_a_metric_that_comes_later_gets_a_column_and_the_file_is_replaced_in_one_step(logdir: Path) -> None:
    callback = CsvLoggerCallback()
    callback.start_training(str(logdir), {})
    callback.handle_result(losses(1))
    with (logdir / "results.csv").open() as reader:
        callback.handle_result([{"loss": 2, "acc": 3}])
        assert reader.read() == "_rank,loss\n0,1\n"
    callback.handle_result([{"acc": 4}])
    callback.finish_training(None)
    assert (logdir / "results.csv").read_text() == "_rank,loss,acc\n0,1,\n0,2,3\n0,,4\n"
    assert [path.name for path in logdir.iterdir()] == ["results.csv"]


def test_texts_with_commas_quotes_and_newlines_come_back(logdir: Path) -> None:
    odd = 'a,"b"\r\nc\rd\ne'
    run(CsvLoggerCallback(), logdir, [{odd: odd}], [{odd: odd, "more": '"'}])
    assert rows(logdir) == [["_rank", odd, "more"], ["0", odd, ""], ["0", odd, '"']]


def test_a_file_that_a_spreadsheet_has_saved_goes_on(logdir: Path) -> None:
    (logdir / "results.csv").write_bytes(b"_rank,loss\r\n0,1\r\n")
    run(CsvLoggerCallback(), logdir, [{"loss": 2, "acc": 3}])
    assert rows(logdir) == [["_rank", "loss", "acc"], ["0", "1", ""], ["0", "2", "3"]]


def test_a_file_of_another_program_is_left_alone(logdir: Path) -> None:
    (logdir / "results.csv").write_text("name,age\nann,3\n")
    with pytest.raises(UsageError, match=r"results\.csv is not a file of CsvLoggerCallback; write Csv"):
        CsvLoggerCallback().start_training(str(logdir), {})
    assert (logdir / "results.csv").read_text() == "name,age\nann,3\n"


RUNS = st.lists(
    st.tuples(st.lists(st.lists(RESULTS, min_size=1, max_size=2), max_size=3), st.none() | st.floats(0, 1)),
    min_size=1,
    max_size=3,
)


@examples(40)
@given(RUNS)
def test_rows_of_any_runs_come_back_and_columns_appear_at_the_right(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[list[Results], float | None]]
) -> None:
    """Each run is killed at some byte, or ends well; the model keeps what was whole then."""
    logdir = tmp_path_factory.mktemp("runs")
    columns: list[str] = []
    expected: list[dict[str, str]] = []
    for reports, killed in runs:
        run(CsvLoggerCallback(), logdir, *reports)
        for results in reports:
            named = [{"_rank": rank} | flat(result) | {"_rank": rank} for rank, result in enumerate(results)]
            columns = list(dict.fromkeys([*columns, *(name for each in named for name in each)]))
            expected += [{name: cell(value) for name, value in each.items()} for each in named]
        full = rows(logdir)
        assert full == ([columns] if columns else []) + [
            [row.get(name, "") for name in columns] for row in expected
        ]
        if killed is not None:
            left = cut(logdir / "results.csv", killed)
            whole = whole_rows(left, full)
            columns, expected = (columns if whole else []), expected[: max(whole - 1, 0)]


def whole_rows(left: bytes, full: list[list[str]]) -> int:
    """The number of rows of a file that are whole in its first bytes: their lengths are added up, nothing is parsed."""
    number = size = 0
    for row in full:
        size += sum(len(quoted(each).encode()) + 1 for each in row)
        number += size <= len(left)
    return number


def quoted(text: str) -> str:
    return '"{}"'.format(text.replace('"', '""')) if any(each in text for each in ',"\r\n') else text


def cell(value: object) -> str:
    shown = readable(value)
    return "" if shown is None else json.dumps(shown) if isinstance(shown, list | dict) else str(shown)


def test_a_full_disk_is_an_error_that_the_run_ends_with() -> None:
    callback = JsonLoggerCallback("/dev/full")
    callback.start_training("/", {})
    with pytest.raises(OSError, match="No space left"):
        callback.handle_result(losses(1))
    with pytest.raises(OSError, match="No space left"):
        callback.finish_training(None)


def test_csv_in_a_device_is_refused(logdir: Path) -> None:
    with pytest.raises(UsageError, match="/dev/full is not a file of CsvLoggerCallback"):
        run(CsvLoggerCallback("/dev/full"), logdir)


def test_csv_behind_a_link_stays_there(logdir: Path, tmp_path: Path) -> None:
    (logdir / "results.csv").symlink_to(tmp_path / "elsewhere.csv")
    run(CsvLoggerCallback(), logdir, losses(1), [{"acc": 2}])
    assert rows(tmp_path, "elsewhere.csv") == [["_rank", "loss", "acc"], ["0", "1", ""], ["0", "", "2"]]
    assert (logdir / "results.csv").is_symlink()
