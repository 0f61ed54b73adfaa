"""Files that grow, and logs of any size, in bounded memory."""

from __future__ import annotations

import json
import os
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.dashboard.recorded import record
from unirun.dashboard import reading
from unirun.dashboard.reading import RankLog, Tail, log_files, log_path, read_part, search
from unirun.errors import JobError
from unirun.observe.status import read_status
from unirun.values import WorkerId


def test_each_object_comes_once_and_a_half_line_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert [*tail.new()] == []
    path.write_bytes(b'{"a": 1}\n[1]\nno\n{"a": 2')
    assert [*tail.new()] == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b'}\n{"a": 3}\n')
    assert [*tail.new()] == [{"a": 2}, {"a": 3}]
    assert [*tail.new()] == []


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n')
    tail = Tail(path)
    assert len([*tail.new()]) == 2
    path.write_bytes(b'{"a": 3}\n')
    assert [*tail.new()] == [{"a": 3}]


PIECES = [b'{"a": 1}\n', b'{"a"', b": 2}\n", b"no\n", b"[1]\n", b"\n"]


def objects(content: bytes) -> list[Any]:
    """The objects in the whole lines of a file."""
    found = []
    for line in content.split(b"\n")[:-1]:
        with suppress(ValueError):
            found.append(json.loads(line))
    return [each for each in found if isinstance(each, dict)]


@examples(200)
@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from(PIECES), max_size=3), st.sampled_from(["read", "replace", "cut"])),
        max_size=12,
    )
)
def test_whatever_happens_to_a_file_each_whole_object_comes_once(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[list[bytes], str]]
) -> None:
    path = tmp_path_factory.mktemp("tail") / "lines"
    tail, content, seen = Tail(path), b"", 0

    def look() -> None:
        nonlocal seen
        assert [*tail.new()] == objects(content)[seen:]
        assert not tail.changed()
        seen = len(objects(content))

    for number, (pieces, then) in enumerate(history):
        with path.open("ab") as file:
            file.write(b"".join(pieces))
        content += b"".join(pieces)
        look()
        if then == "replace":
            # The file before stays, so that the new one has another number.
            path.rename(path.with_name(f"before{number}"))
            path.write_bytes(content := b'{"b": 1}\n{"b"')
        elif then == "cut":
            os.truncate(path, 0)
            content = b""
        if then != "read":
            seen = 0
            look()


def test_of_a_huge_file_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with path.open("wb") as file:
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"a": 1}\n')
    tail = Tail(path)
    assert [*tail.new()] == [{"a": 1}]
    assert tail.left_out > 900 << 20


@given(st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), max_size=30), st.data())
def test_a_part_of_a_log_is_its_last_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    whole = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PAGE", data.draw(st.integers(40, 200)))
        part = read_part(path)
    shown = whole[part.start : part.end]
    assert part.end == part.size == len(whole)
    assert part.text == shown.decode(errors="replace")
    assert part.start == 0 or whole[part.start - 1 : part.start] == b"\n"


def test_the_parts_of_a_log_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAGE", 100)
    path = tmp_path / "log"
    text = "".join(f"line {n}\n" for n in range(100))
    path.write_text(text)
    part = read_part(path)
    found = part.text
    while part.start > 0:
        part = read_part(path, before=part.start)
        found = part.text + found
    assert found == text
    with path.open("a") as file:
        file.write("new\n")
    assert read_part(path, after=len(text)).text == "new\n"
    assert read_part(path, after=10).start > 10


def test_of_a_log_of_a_gigabyte_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\nneedle in the end\n")
    tracemalloc.start()
    part = read_part(path)
    found = search(path, "NEEDLE")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert part.text.endswith("needle in the end\n")
    assert [match.line for match in found.matches] == ["needle in the end"]
    assert found.down_to > 900 << 20
    assert peak < 64 << 20


@pytest.mark.parametrize("words", ["Übung", "übung", "ÜBUNG"])
def test_a_search_takes_no_notice_of_case_in_any_alphabet(tmp_path: Path, words: str) -> None:
    path = tmp_path / "log"
    path.write_bytes("die Übung\nÜBUNG\nubung\n".encode() + b"\xff \xc3\xbcbung\n")
    assert [match.line for match in search(path, words).matches] == ["\ufffd übung", "ÜBUNG", "die Übung"]


@given(
    st.lists(st.sampled_from(["needle", "hay", "", "a needle", "x" * 50]), max_size=60),
    st.integers(8, 64),
    st.booleans(),
)
def test_a_search_finds_each_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], block: int, ends: bool
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    text = "\n".join(lines) + "\n" * ends
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BLOCK", block)
        found = search(path, "needle")
    assert [match.line for match in reversed(found.matches)] == [line for line in lines if "needle" in line]
    assert all(text[match.at :].startswith(match.line) for match in found.matches)
    assert found.down_to == 0


def test_a_search_that_has_found_enough_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "FOUND", 3)
    path = tmp_path / "log"
    path.write_text("".join(f"needle {n}\n" for n in range(5)))
    first = search(path, "needle")
    second = search(path, "needle", first.down_to)
    assert [match.line for match in (*first.matches, *second.matches)] == [
        f"needle {n}" for n in (4, 3, 2, 1, 0)
    ]


def test_logs_of_every_incarnation_and_attempt_are_there() -> None:
    job = record("job-1")
    for folder, incarnation in ((job, 1), (job.attempt(0), 2)):
        logs = folder.worker_logs(WorkerId("actor", 0, incarnation))
        logs.mkdir(parents=True)
        (logs / "stderr.log").write_text("error\n")
    (job.attempt(0).path / "uid").write_text(job.uid)
    status = read_status(job)
    found = log_files(job, status, "actor", 0)
    assert [(each.attempt, each.incarnation, each.stream) for each in found] == [
        (0, 2, "stderr"),
        (1, 0, "stdout"),
        (1, 1, "stderr"),
    ]
    assert [log_path(job, status, "actor", 0, each).read_text()[:5] for each in found] == [
        "error",
        "first",
        "error",
    ]


@pytest.mark.parametrize(
    ("role", "rank", "log"),
    [
        ("../../..", 0, RankLog(0, 0, 0, "stdout", 0)),
        ("actor/../..", 0, RankLog(0, 0, 0, "stdout", 0)),
        ("actor", -1, RankLog(0, 0, 0, "stdout", 0)),
        ("actor", 4, RankLog(0, 0, 0, "stdout", 0)),
        ("actor", 0, RankLog(0, 0, 0, "../../../token", 0)),
        ("actor", 0, RankLog(1, 0, 0, "stdout", 0)),
        ("actor", 0, RankLog(-1, 0, 0, "stdout", 0)),
        ("actor", 0, RankLog(0, 1, 0, "stdout", 0)),
        ("actor", 0, RankLog(0, -1, 0, "stdout", 0)),
    ],
)
def test_a_log_is_named_by_what_the_job_has_and_no_path_leads_out_of_it(
    role: str, rank: int, log: RankLog
) -> None:
    job = record("job-1")
    with pytest.raises(JobError):
        log_path(job, read_status(job), role, rank, log)


def test_a_log_that_is_a_link_or_no_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo"):
        with pytest.raises(OSError, match=name):
            read_part(tmp_path / name)


def test_a_line_without_end_is_left_out_and_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE", 100)
    monkeypatch.setattr(reading, "BLOCK", 16)
    path = tmp_path / "lines.jsonl"
    tail = Tail(path)
    with path.open("ab", 0) as file:
        for _ in range(3):
            file.write(b'{"a": "' + b"x" * 1000)
            assert [*tail.new()] == []
            assert len(tail._rest) <= 100
        file.write(b'"}\n{"b": 1}\n')
        assert [*tail.new()] == [{"b": 1}]
