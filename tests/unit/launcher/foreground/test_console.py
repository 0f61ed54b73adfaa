"""The output that is shown, and its form."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from unirun.cli.output import age, megabytes, print_table
from unirun.launcher.foreground.console import Console, prefix_of, shown
from unirun.spec.job import Entry, JobSpec, LogSpec, RoleSpec
from unirun.values import WorkerId


@pytest.mark.parametrize(
    ("log", "local_rank", "stdout", "stderr"),
    [
        (LogSpec(), 0, True, True),
        (LogSpec(redirects="3"), 0, False, False),
        (LogSpec(redirects="1"), 0, False, True),
        (LogSpec(redirects="2"), 5, True, False),
        (LogSpec(redirects="3", tee="1"), 0, True, False),
        (LogSpec(redirects="3", tee="3"), 0, True, True),
        (LogSpec(redirects="0:3,2:1"), 0, False, False),
        (LogSpec(redirects="0:3,2:1"), 1, True, True),
        (LogSpec(redirects="0:3,2:1"), 2, False, True),
        (LogSpec(redirects="3", tee="1:2"), 1, False, True),
        (LogSpec(local_ranks_filter=(1,)), 0, False, False),
        (LogSpec(local_ranks_filter=(1,)), 1, True, True),
        (LogSpec(local_ranks_filter=()), 1, False, False),
    ],
)
def test_a_worker_stream_is_shown_by_redirects_tee_and_filter(
    log: LogSpec, local_rank: int, stdout: bool, stderr: bool
) -> None:
    assert (shown(log, local_rank, 1), shown(log, local_rank, 2)) == (stdout, stderr)


def spec(*counts: int) -> JobSpec:
    names = ("actor", "rollout")
    roles = tuple(RoleSpec(n, c, Entry("script", "a.py")) for n, c in zip(names, counts, strict=False))
    return JobSpec("job", "job", roles, names[: len(counts)])


class TestAPrefix:
    def test_a_prefix_names_role_and_rank(self) -> None:
        assert prefix_of(spec(2, 1), None, False, WorkerId("actor", 1, 0), 0, "n1") == b"[actor:1] "

    def test_a_prefix_is_omitted_for_a_single_worker(self) -> None:
        assert prefix_of(spec(1), None, True, WorkerId("actor", 0, 0), 0, "n1") == b""
        assert prefix_of(spec(1, 1), None, False, WorkerId("actor", 0, 0), 0, "n1") == b"[actor:0] "

    def test_a_prefix_has_the_colour_of_its_role(self) -> None:
        prefix = partial(prefix_of, spec(2, 2), None, True)
        one, two, other = (
            prefix(WorkerId(*who, 0), 0, "n1") for who in (("actor", 0), ("actor", 1), ("rollout", 0))
        )
        assert one[:5] == two[:5] != other[:5]
        assert one.endswith(b"\x1b[0m")

    def test_a_prefix_follows_torchruns_template(self) -> None:
        prefix = partial(prefix_of, spec(1), "${hostname}/${role_name}/$rank/$local_rank/$other|", False)
        assert prefix(WorkerId("actor", 3, 0), 1, "n1") == b"n1/actor/3/1/$other|"


@contextmanager
def console(*, quiet: bool = False) -> Iterator[Console]:
    """A console on the captured stdout and stderr."""
    made = Console(quiet=quiet)
    try:
        yield made
    finally:
        made.close(20.0)


class TestTheConsole:
    @pytest.mark.parametrize(
        ("data", "written"),
        [
            (b"one\ntwo\n", b"[a] one\n[a] two\n"),
            (b"cut off", b"[a] cut off\n"),
            (b"\n", b"[a] \n"),
            (b"\xff\xfe\n", b"[a] \xff\xfe\n"),
            (b"dos\r\nlines\r\n", b"[a] dos\n[a] lines\n"),
            (b"\x1b[31mred\x1b[0m\n", b"[a] \x1b[31mred\x1b[0m\n"),
        ],
    )
    def test_the_console_puts_the_prefix_before_each_line(
        self, capfdbinary: pytest.CaptureFixture[bytes], data: bytes, written: bytes
    ) -> None:
        with console() as shown:
            shown.lines(1, b"[a] ", data)
        assert capfdbinary.readouterr() == (written, b"")

    def test_the_console_leaves_a_single_workers_output_unchanged(
        self, capfdbinary: pytest.CaptureFixture[bytes]
    ) -> None:
        with console() as shown:
            shown.lines(2, b"", b"10%\r20%\rdone\n")
        assert capfdbinary.readouterr() == (b"", b"10%\r20%\rdone\n")

    def test_the_console_shows_a_single_workers_incomplete_line(
        self, capfdbinary: pytest.CaptureFixture[bytes]
    ) -> None:
        with console() as shown:
            shown.lines(1, b"", b"name? ")
        assert capfdbinary.readouterr() == (b"name? ", b"")

    @pytest.mark.parametrize("together", [True, False])
    def test_the_console_does_not_write_on_a_row_that_a_worker_has_begun(
        self, tmp_path: Path, together: bool
    ) -> None:
        path = tmp_path / "both"
        with path.open("a") as err, (path if together else tmp_path / "out").open("a") as out:
            shown = Console(quiet=False, out=out, err=err)
            shown.lines(1, b"", b"half")
            shown.note("a note")
            shown.close(20.0)
        assert path.read_bytes() == (b"half\n" if together else b"") + b"unirun: a note\n"

    @pytest.mark.parametrize("together", [True, False])
    def test_a_traceback_on_stdout_is_above_a_report_only_where_both_go_to_one_place(
        self, tmp_path: Path, together: bool
    ) -> None:
        path = tmp_path / "both"
        with path.open("a") as err, (path if together else tmp_path / "out").open("a") as out:
            shown = Console(quiet=False, out=out, err=err)
            assert (shown.beside_notes(1), shown.beside_notes(2)) == (together, True)
            shown.close(20.0)

    def test_the_console_writes_its_own_lines_to_stderr(
        self, capfdbinary: pytest.CaptureFixture[bytes]
    ) -> None:
        with console() as shown:
            shown.note("a\nb")
            shown.live("not on a pipe")
        assert capfdbinary.readouterr() == (b"", b"unirun: a\nunirun: b\n")

    def test_a_quiet_console_shows_errors_only(self, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        with console(quiet=True) as shown:
            shown.note("hidden")
            shown.error("shown")
        assert capfdbinary.readouterr().err == b"unirun: shown\n"

    def test_the_console_reports_a_lost_reader_once(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        told: list[OSError] = []
        with os.fdopen(writer, "w") as closed:
            shown = Console(quiet=False, out=closed)
            shown.when_lost(told.append)
            shown.lines(1, b"", b"lost\n")
            shown.lines(1, b"", b"lost too\n")
            shown.close(20.0)
        (error,) = told
        assert isinstance(error, BrokenPipeError)

    @pytest.mark.parametrize("together", [True, False])
    def test_the_console_reports_lost_stderr_only_when_it_is_stdout(
        self, tmp_path: Path, together: bool
    ) -> None:
        told: list[OSError] = []
        with open("/dev/full", "w") as err, open("/dev/full" if together else tmp_path / "out", "w") as out:
            shown = Console(quiet=False, out=out, err=err)
            shown.when_lost(told.append)
            shown.note("a note")
            shown.lines(2, b"", b"lost\n")
            shown.lines(1, b"", b"lost too\n")
            shown.close(20.0)
        assert len(told) == together


class TestATable:
    def test_a_table_is_aligned_and_never_cut(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_table(["A", "LONG"], [["x" * 200, "1"], ["y", ""]])
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "A" + " " * 201 + "LONG"
        assert lines[1] == "x" * 200 + "  1"
        assert lines[2] == "y"

    def test_a_table_may_be_empty(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_table(["A", "B"], [])
        assert capsys.readouterr().out == "A  B\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (8.9, "8 s"),
        (185, "3 min 5 s"),
        (9600, "2 h 40 min"),
        (442_800, "5 d 3 h"),
        (60, "1 min 0 s"),
    ],
)
def test_a_duration_is_formatted_for_reading(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_memory_is_formatted_in_megabytes() -> None:
    assert (megabytes(None), megabytes(34_600_000)) == ("", "35 MB")
