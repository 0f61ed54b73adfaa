"""What workers have measured is kept line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from unirun.errors import JobError
from unirun.observe import MetricsLog, read_metrics


def test_what_is_measured_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write("actor", 1, 2.5, {"loss": 0.5})
    log.write("critic", 0, 3.5, {"loss": float("inf")})
    assert [*read_metrics(path)] == [
        {"time": 2.5, "role": "actor", "rank": 1, "values": {"loss": 0.5}},
        {"time": 3.5, "role": "critic", "rank": 0, "values": {"loss": float("inf")}},
    ]
    log.close()


def test_nothing_is_written_when_nothing_is_measured(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.close()
    assert [*tmp_path.iterdir()] == []
    assert [*read_metrics(tmp_path / "metrics.jsonl")] == []


def test_a_line_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"time": 1.0}\n{"tim')
    assert [*read_metrics(path)] == [{"time": 1.0}]


def test_a_full_disk_loses_figures_and_not_the_job(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "nowhere" / "metrics.jsonl")
    log.write("actor", 0, 1.0, {"loss": 1.0})
    log.close()


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no metrics can be read"):
        next(read_metrics(tmp_path))
