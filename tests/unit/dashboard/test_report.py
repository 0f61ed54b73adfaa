"""A job as one file."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.unit.cli.in_process import run_cli
from tests.unit.dashboard.recorded import MARKUP, record
from unirun.dashboard import report
from unirun.dashboard.report import report_of
from unirun.values import WorkerId


class Elements(HTMLParser):
    """The elements of a page, and the text of its data."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.data = ""
        self._in_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        self._in_data = ("id", "data") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data += data


def test_a_report_has_all_of_a_job_and_needs_nothing_else() -> None:
    text = report_of(record("job-1"))
    found = Elements()
    found.feed(text)
    answers = json.loads(found.data)["answers"]
    assert answers["/api/jobs/job-1"]["phase"] == "succeeded"
    assert MARKUP in answers["/api/jobs/job-1/failures"]["failures"][0]["record"]["traceback"]
    logs = [answer["text"] for path, answer in answers.items() if "/log?" in path]
    assert len(logs) == 1
    assert MARKUP in logs[0]
    assert not [link for link in found.links if not link.startswith(("data:", "#"))]


@pytest.mark.parametrize("room", [0, 5, 25, 1000])
def test_a_report_has_only_so_much_of_logs_those_of_failed_ranks_first(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    job = record("job-1")
    for rank in range(4):
        log = job.worker_logs(WorkerId("actor", rank, 0)) / "stdout.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"rank {rank} 89\n")
    monkeypatch.setattr(report, "LOG_BYTES", room)
    found = Elements()
    found.feed(report_of(job))
    answers = json.loads(found.data)["answers"]
    logs = [answer["text"] for path, answer in answers.items() if "/log?" in path]
    # A log that is begun is there as a whole.
    assert logs == [f"rank {rank} 89\n" for rank in (1, 0, 2, 3)][: -(-room // 10)]


def test_no_text_of_a_job_is_an_element_of_its_report() -> None:
    text = report_of(record("job-1"))
    found = Elements()
    found.feed(text)
    assert "img" not in found.tags
    assert found.tags.count("script") == 5
    assert MARKUP not in text


def test_a_report_lets_only_its_own_scripts_run() -> None:
    policy = re.search(r'http-equiv="content-security-policy" content="([^"]*)"', report_of(record("job-1")))
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert policy[1].count("sha256-") == 5


def test_the_command_writes_the_file_that_it_is_told(tmp_path: Path) -> None:
    record("job-1")
    assert run_cli("report", "job-1", "-o", str(tmp_path / "out.html")) == 0
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")
