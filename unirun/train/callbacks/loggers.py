"""Ready callbacks: reports on the screen, as JSON lines and CSV, in TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import contextlib
import csv
import importlib
import importlib.util
import itertools
import json
import math
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from unirun import atomic
from unirun.errors import UsageError
from unirun.spec.read import clipped, printable
from unirun.train.callbacks.base import (
    TrainingCallback,
    flat,
    json_of,
    number,
    numbers,
    plain,
    readable,
    text,
)
from unirun.train.output import DRAW_INTERVAL, LivePart

if TYPE_CHECKING:
    from rich.console import Console, OverflowMethod
    from rich.table import Table


_ITERATION, _SECONDS, _TIMESTAMP = "_training_iteration", "_time_this_iter_s", "_timestamp"
_OURS = frozenset({_ITERATION, _SECONDS, _TIMESTAMP, "_data_wait"})

_ROWS = 8
_WIDEST = 24
"""Characters of a metric that is a text."""


class ProgressCallback(TrainingCallback):
    """Shows the latest report: a row per rank (the first 8) with its metrics, the iteration and its seconds.

    `metrics` are the names to show, ``outer/inner`` for those in nested dicts; by default all that are numbers, as many
    as fit. On a terminal and in a notebook the table is redrawn in place, ten times a second at most; the last report
    is always shown. When stdout is no terminal, each report is one line with the metrics of rank 0.

    `console` is where it is shown, by default stdout; `clock` returns seconds, as `time.monotonic` does.
    """

    def __init__(
        self,
        metrics: Sequence[str] | None = None,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if isinstance(metrics, str):
            raise UsageError(f"metrics={metrics!r} is a text, no list", f"write metrics=[{metrics!r}]")
        self._metrics = None if metrics is None else [*metrics]
        self._given, self._clock = console, clock

    def start_training(self, logdir: str, config: Mapping[str, Any]) -> None:
        """Look at where the reports are to be shown."""
        from rich.console import Console

        self._console = self._given or Console()
        self._names = dict.fromkeys(self._metrics or ())
        self._drawn_at = -math.inf
        self._waiting: list[dict[str, Any]] | None = None
        # rich's own display of a notebook would need ipywidgets.
        self._cell: Any = None
        self._screen = None
        if not self._console.is_jupyter and _is_screen(self._console):
            # What is printed meanwhile goes above the table.
            self._screen = LivePart(self._console)

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """Show the report."""
        now = self._clock()
        if self._screen is None and not self._console.is_jupyter:
            # `out` does not break lines.
            self._console.out(_writable(_line(results, self._metrics), self._console), highlight=False)
        elif now - self._drawn_at < DRAW_INTERVAL:
            self._waiting = results
        else:
            self._drawn_at, self._waiting = now, None
            self._draw(self._table(results))

    def finish_training(self, error: BaseException | None) -> None:
        """Show the last report, and leave the table where it is."""
        try:
            if self._waiting is not None:
                self._draw(self._table(self._waiting))
        finally:
            if self._screen is not None:
                self._screen.stop()

    def _draw(self, table: Table) -> None:
        if self._screen is not None:
            self._screen.start()
            self._screen.update(table, refresh=True)
        elif self._cell is None:
            display = importlib.import_module("IPython.display").display
            self._cell = display(table, display_id=True)
        else:
            self._cell.update(table)

    def _table(self, results: list[dict[str, Any]]) -> Table:
        shown = results[:_ROWS]
        if self._metrics is None:
            # A metric that is not in each report keeps its column.
            for result in shown:
                self._names |= dict.fromkeys(_numeric(result))
        values = [flat(result) for result in shown]
        ranks = ["rank", *(str(rank) for rank in range(len(shown)))]
        iterations = self._column("iteration", _ITERATION, values)
        seconds = self._column("seconds", _SECONDS, values)
        metrics = [self._column(name, name, values) for name in self._names]
        fit = _fitting(metrics, self._console.width - sum(map(_width, (ranks, iterations, seconds))))
        left_out = [_more(len(results) - len(shown), "rank"), _more(len(metrics) - fit, "metric")]
        caption = [_writable(line, self._console) for line in left_out if line]
        return _drawn([ranks, iterations, *metrics[:fit], seconds], "\n".join(caption), self._console)

    def _column(self, header: str, name: str, values: list[dict[str, Any]]) -> list[str]:
        cells = (_shown(value.get(name)) for value in values)
        return [_writable(cell, self._console) for cell in (header, *cells)]


def _is_screen(console: Console) -> bool:
    """Return True if a table can be redrawn in place."""
    isatty = False
    with contextlib.suppress(AttributeError, ValueError):  # no file, or a closed one
        # FORCE_COLOR makes rich say that the log file of a CI is a terminal.
        isatty = console.file.isatty()
    return isatty and console.is_terminal and not console.is_dumb_terminal


def _line(results: list[dict[str, Any]], chosen: list[str] | None) -> str:
    """A report as one line."""
    values = flat(results[0])
    names = _numeric(results[0]) if chosen is None else chosen
    metrics = ", ".join(f"{name} {_shown(values[name])}" for name in names if name in values)
    ranks = f", rank 0 of {len(results)}" if len(results) > 1 else ""
    begin = f"iteration {_shown(values.get(_ITERATION))}{': ' if metrics else ''}{metrics}"
    return f"{begin} ({_shown(values.get(_SECONDS))} s{ranks})"


def _width(column: list[str]) -> int:
    """Characters of a header and its cells on the screen, with the space to the next column."""
    from rich.cells import cell_len

    return max(map(cell_len, column)) + 2


def _fitting(columns: list[list[str]], width: int) -> int:
    """The number of `columns` that fit into `width` characters, but one at least."""
    widths = itertools.accumulate(map(_width, columns))
    return max(sum(each <= width for each in widths), 1)


def _more(number: int, name: str) -> str:
    return f"… and {number} more {name}{'s' if number > 1 else ''}" if number > 0 else ""


def _drawn(columns: list[list[str]], caption: str, console: Console) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", caption_style="dim", caption_justify="left")
    # An ellipsis cannot be written on every terminal.
    overflow: OverflowMethod = "crop" if console.options.ascii_only else "ellipsis"
    # Texts, as square brackets in a plain string are markup.
    header, *rows = zip(*columns, strict=True)
    for cell in header:
        table.add_column(Text(cell), justify="right", overflow=overflow, no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    table.caption = Text(caption) if caption else None
    return table


def _numeric(result: Mapping[str, Any]) -> list[str]:
    """The names of the metrics that are numbers, without unirun's own."""
    return [name for name in numbers(result) if name not in _OURS]


def _shown(value: object) -> str:
    """`value` in a cell: a number with 4 significant digits, a count as it is, a text in part."""
    found = number(value)
    if isinstance(found, int) and abs(found) < 10**9:
        return str(found)
    if found is not None:
        return f"{found:.4g}"
    return "" if value is None else clipped(text(value), _WIDEST)


def _writable(shown: str, console: Console) -> str:
    """`shown` with all escaped that breaks the line, moves the cursor, or is not in the encoding of the terminal."""
    return printable(shown).encode(console.encoding, "backslashreplace").decode(console.encoding)


# Results in files of the run's directory: JSON lines, and CSV.
#
# A file that is there when a run starts is continued after its last whole row, as a run that resumes from a checkpoint
# is the same run: its rows keep their order, and ``_timestamp`` tells them apart where iterations repeat. What a killed
# process has left of a row is cut off. Each row is flushed when it is written, so a kill costs at most the row of that
# moment; nothing is forced to the disk, so a loss of power may cost more.

_RANK = "_rank"


class JsonLoggerCallback(TrainingCallback):
    """Writes each report as one line of `filename` in the run's directory: a JSON list with the dict of each rank.

    ``ranks=[0, 2]`` writes those of ranks 0 and 2 only; one that the run does not have (an elastic run has fewer ranks
    at times) is left out. Values that JSON does not have are written as its own: tensors and arrays as lists, nan and
    the infinities as null, which pandas reads as NaN, all else as texts.

    A file that exists is continued after its last whole row. Raises OSError when it cannot be written.
    """

    def __init__(self, filename: str = "results.json", ranks: Literal["all"] | Sequence[int] = "all") -> None:
        if ranks != "all" and not (
            isinstance(ranks, Sequence) and all(type(rank) is int and rank >= 0 for rank in ranks)
        ):
            raise UsageError(f"ranks={ranks!r} is no list of ranks", 'write ranks=[0, 1] or ranks="all"')
        self._filename = filename
        self._ranks: set[int] | None = None if ranks == "all" else {int(rank) for rank in ranks}
        self._file: BinaryIO | None = None

    def start_training(self, logdir: str, config: Mapping[str, Any]) -> None:
        """Open the file."""
        self._file = _continued(Path(logdir, self._filename), _lines)

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """Write one line."""
        assert self._file is not None
        ranks = self._ranks
        wanted = [result for rank, result in enumerate(results) if ranks is None or rank in ranks]
        self._file.write(json_of(wanted).encode() + b"\n")
        self._file.flush()

    def finish_training(self, error: BaseException | None) -> None:
        """Close the file."""
        assert self._file is not None
        self._file.close()


class CsvLoggerCallback(TrainingCallback):
    """Writes each report as one row per rank to `filename` in the run's directory.

    The first column is ``_rank``; the others are the metrics of the first report, those of nested dicts as
    ``outer/inner``. A metric that comes later gets a column at the right, and the file is replaced in one
    step: a reader sees the old file or the new one. A metric that a rank does not report is an empty cell.
    Lists and tensors are JSON, nan is ``nan``, the infinities are ``inf`` and ``-inf``.

    A file that exists is continued after its last whole row. Raises `UsageError` when that is another file, and
    OSError when it cannot be written.
    """

    def __init__(self, filename: str = "results.csv") -> None:
        self._filename = filename
        self._path = Path(filename)
        self._columns: list[str] = []
        self._file: BinaryIO | None = None

    def start_training(self, logdir: str, config: Mapping[str, Any]) -> None:
        """Open the file, and read its columns if it has any."""
        # The file itself, as a link would be replaced.
        self._path = Path(logdir, self._filename).resolve()
        self._columns = _columns(self._path)
        self._file = _continued(self._path, _rows)

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """Write one row per rank."""
        assert self._file is not None
        # The first and the last have the column's place and its value, also when there is a metric of that name.
        reports = [{_RANK: rank} | flat(result) | {_RANK: rank} for rank, result in enumerate(results)]
        known = set(self._columns)
        new = [
            name for name in dict.fromkeys(name for report in reports for name in report) if name not in known
        ]
        if new:
            self._add(new)
        rows = (_row([_cell(report.get(name)) for name in self._columns]) for report in reports)
        self._file.write(b"".join(rows))
        self._file.flush()

    def finish_training(self, error: BaseException | None) -> None:
        """Close the file."""
        assert self._file is not None
        self._file.close()

    def _add(self, new: list[str]) -> None:
        """Write the file anew with more columns, empty in the rows so far."""
        assert self._file is not None
        columns = [*self._columns, *new]
        # A loss of power would cost all rows so far.
        with self._path.open("rb") as old, atomic.writing(self._path, private=False, lasting=True) as file:
            file.write(_row(columns))
            rows = _rows(old)
            next(rows, None)
            file.writelines(row.rstrip(b"\r\n") + b"," * len(new) + b"\n" for row in rows)
        self._file.close()
        self._file = self._path.open("ab")
        self._columns = columns


def _columns(path: Path) -> list[str]:
    """The columns of the file at `path`; none when it has no whole header. Raises `UsageError`, OSError."""
    if not path.exists():
        return []
    columns: list[str] = []
    # A pipe or a device cannot be written anew.
    ours = path.is_file()
    if ours:
        with path.open("rb") as file:
            header = next(_rows(file), b"")
        columns = next(csv.reader([header.decode(errors="replace")]), [])
        ours = columns[:1] in ([], [_RANK])
    if not ours:
        raise UsageError(f"{path} is not a file of CsvLoggerCallback", 'write CsvLoggerCallback("other.csv")')
    return columns


def _continued(path: Path, whole: Callable[[BinaryIO], Iterator[bytes]]) -> BinaryIO:
    """Open the file at `path` to append after the last of its `whole` rows. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        with path.open("r+b") as file:
            file.truncate(sum(map(len, whole(file))))
    return path.open("ab")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of `file` without an incomplete last one."""
    return (line for line in file if line.endswith(b"\n"))


def _rows(file: BinaryIO) -> Iterator[bytes]:
    """The rows of CSV in `file`, with quoted newlines in them, without an incomplete last one."""
    lines: list[bytes] = []
    quoted = False
    for line in file:
        lines.append(line)
        quoted ^= line.count(b'"') % 2 == 1
        if not quoted and line.endswith(b"\n"):
            yield b"".join(lines)
            lines = []


def _row(cells: Sequence[str]) -> bytes:
    """One row of CSV. Not by the csv module, which leaves a carriage return without quotes before Python 3.13."""
    return ",".join(map(_quoted, cells)).encode() + b"\n"


def _quoted(cell: str) -> str:
    special = any(char in cell for char in ',"\r\n')
    return '"' + cell.replace('"', '""') + '"' if special else cell


def _cell(value: object) -> str:
    shown = readable(value)
    if shown is None:
        return ""
    return json_of(shown) if isinstance(shown, list | dict) else str(shown)


# Results in experiment trackers: TensorBoard, Weights & Biases, MLflow.
#
# Each logs the numbers that rank 0 reports, those of nested dicts as ``outer/inner``, with the iteration as the step,
# and the config once at the start. The libraries are no dependencies of unirun. A callback whose library is missing
# cannot be made, so that no worker starts before that is told; the library is imported when the run starts.


class TensorBoardCallback(TrainingCallback):
    """Writes an event file for TensorBoard to `logdir`, by default the run's directory: ``tensorboard --logdir …``.

    The config is a text named ``config``, and so is the traceback of the error with which a run ends (``error``).
    Raises `UsageError` when tensorboard is not installed.
    """

    def __init__(self, logdir: str | None = None) -> None:
        _find("tensorboard", "tensorboard", self)
        self._logdir = logdir
        self._writer: Any = None

    def start_training(self, logdir: str, config: Mapping[str, Any]) -> None:
        """Open the event file, and write the config."""
        library = _load("torch.utils.tensorboard", "tensorboard", self)
        # By default what was reported shows up two minutes later, and a killed process loses that.
        self._writer = library.SummaryWriter(self._logdir or logdir, flush_secs=5)
        self._writer.add_text("config", _code(json.dumps(plain(config), indent=2)))

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """Write the numbers of rank 0."""
        step, time = results[0][_ITERATION], results[0][_TIMESTAMP]
        for name, value in _metrics(results[0]).items():
            self._writer.add_scalar(name, value, global_step=step, walltime=time)

    def finish_training(self, error: BaseException | None) -> None:
        """Write the error if there is one, and close the file."""
        if error is not None:
            self._writer.add_text("error", _code("".join(traceback.format_exception(error))))
        self._writer.close()


class WandbCallback(TrainingCallback):
    """Logs to a run of Weights & Biases, which has the exit code 1 when the run ends with an error.

    `init` goes to `wandb.init`, as ``name``, ``entity``, ``group`` or ``mode="offline"``; without ``dir`` in it, files
    are in the run's directory. The x-axis of all charts is the metric ``training_iteration``; wandb's own step counts
    the reports.
    Raises `UsageError` when wandb is not installed.
    """

    def __init__(self, project: str | None = None, **init: Any) -> None:
        _find("wandb", "wandb", self)
        self._init = {"project": project, **init}
        self._run: Any = None

    def start_training(self, logdir: str, config: Mapping[str, Any]) -> None:
        """Start a run with the config."""
        library = _load("wandb", "wandb", self)
        self._run = library.init(**{"dir": logdir, "config": plain(config), **self._init})
        # wandb drops what has a lower step than it has had, as after a restart from a checkpoint. An axis of ours may
        # go back. It cannot have unirun's name for it, as wandb hides names that begin with an underscore.
        self._run.define_metric("training_iteration")
        self._run.define_metric("*", step_metric="training_iteration")

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """Log the numbers of rank 0."""
        self._run.log({"training_iteration": results[0][_ITERATION], **_metrics(results[0])})

    def finish_training(self, error: BaseException | None) -> None:
        """End the run, and wait until all is sent."""
        self._run.finish(exit_code=0 if error is None else 1)


class MLflowCallback(TrainingCallback):
    """Logs to a run of MLflow, which ends as FINISHED, or as FAILED when there is an error.

    `experiment_name` and `tracking_uri` are MLflow's own (``MLFLOW_EXPERIMENT_NAME``, ``MLFLOW_TRACKING_URI``) by
    default; like `mlflow.set_tracking_uri`, they hold for the process from then on. `start` goes to `mlflow.start_run`,
    as ``run_name``, ``tags`` or ``nested=True`` inside a run that is active. Characters that MLflow does not allow in a
    name are written as ``_``. Raises `UsageError` when mlflow is not installed.
    """

    def __init__(
        self, experiment_name: str | None = None, tracking_uri: str | None = None, **start: Any
    ) -> None:
        _find("mlflow", "mlflow", self)
        self._experiment_name, self._tracking_uri, self._start = experiment_name, tracking_uri, start
        self._mlflow: Any = None

    def start_training(self, logdir: str, config: Mapping[str, Any]) -> None:
        """Start a run, with the config as its params."""
        self._mlflow = mlflow = _load("mlflow", "mlflow", self)
        if self._tracking_uri is not None:
            mlflow.set_tracking_uri(self._tracking_uri)
        if self._experiment_name is not None:
            mlflow.set_experiment(self._experiment_name)
        mlflow.start_run(**self._start)
        try:
            mlflow.log_params({_allowed(name): text(readable(value)) for name, value in flat(config).items()})
        except BaseException:
            mlflow.end_run("FAILED")
            raise

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """Log the numbers of rank 0."""
        metrics = {_allowed(name): value for name, value in _metrics(results[0]).items()}
        self._mlflow.log_metrics(metrics, step=results[0][_ITERATION])

    def finish_training(self, error: BaseException | None) -> None:
        """End the run."""
        self._mlflow.end_run("FINISHED" if error is None else "FAILED")


def _find(module: str, package: str, callback: TrainingCallback) -> None:
    """Raise `UsageError` unless there is `module`, which is not imported."""
    if sys.modules.get(module) is not None:
        return
    spec = importlib.util.find_spec(module)
    # A folder of that name without __init__.py is found, too: wandb writes its runs to ./wandb.
    if spec is None or spec.origin is None:
        raise UsageError(
            f"{type(callback).__name__} needs {package}, which is not installed",
            f"run: pip install {package}",
        )


def _load(module: str, package: str, callback: TrainingCallback) -> Any:
    """Import `module`. Raises `UsageError` when that fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{type(callback).__name__} needs {package}, which cannot be imported: {error}",
            f"run: pip install --upgrade {package}",
        ) from error


def _metrics(result: Mapping[str, Any]) -> dict[str, int | float]:
    """The numbers in `result`, without those that a tracker has as the step and the time."""
    return {name: value for name, value in numbers(result).items() if name not in (_ITERATION, _TIMESTAMP)}


def _allowed(name: str) -> str:
    """`name` as MLflow takes it."""
    return re.sub(r"[^\w/.\- :]", "_", name)


def _code(content: str) -> str:
    """`content` as a block of Markdown that is shown as it is."""
    return "\n".join(f"    {line}" for line in content.splitlines())
