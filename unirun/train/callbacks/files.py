"""Results in files of the run's directory: JSON lines, and CSV.

A file that is there when a run starts is continued after its last whole row, as a run that resumes from a checkpoint is
the same run: its rows keep their order, and ``_timestamp`` tells them apart where iterations repeat. What a killed
process has left of a row is cut off. Each row is flushed when it is written, so a kill costs at most the row of that
moment; nothing is forced to the disk, so a loss of power may cost more.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from unirun.errors import UsageError
from unirun.train.callbacks.base import TrainingCallback, flat, json_of, readable

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
        partial = self._path.with_name(f"{self._path.name}.partial")
        with self._path.open("rb") as old, partial.open("wb") as file:
            file.write(_row(columns))
            rows = _rows(old)
            next(rows, None)
            file.writelines(row.rstrip(b"\r\n") + b"," * len(new) + b"\n" for row in rows)
            file.flush()
            # Here a loss of power would cost all rows so far.
            os.fsync(file.fileno())
        partial.replace(self._path)
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
