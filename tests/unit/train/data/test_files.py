"""Datasets of many files."""

from __future__ import annotations

import contextlib
import gzip
import io
import pickle
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.train.data.datasets import in_files, stored
from unirun.errors import UsageError
from unirun.train.data import Consumed, Files, files
from unirun.train.data.loader import Shard


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


class TestPaths:
    @pytest.mark.parametrize("name", ["data", "a::b"])
    def test_a_pattern_is_the_files_that_match_by_name(self, tmp_path: Path, name: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        for name in ("b.txt", "a.txt", "c.csv"):
            write(folder / name, name)
        found = Files(f"{folder}/*.txt")
        assert [Path(found.path(index)).name for index in range(len(found))] == ["a.txt", "b.txt"]
        assert [[*found.items(index)] for index in range(2)] == [["a.txt"], ["b.txt"]]

    def test_directories_that_a_pattern_matches_are_none(self, tmp_path: Path) -> None:
        (tmp_path / "a.d").mkdir()
        write(tmp_path / "b.d", "1")
        (tmp_path / "c.d").symlink_to("b.d")
        (tmp_path / "d.d").symlink_to("a.d")
        found = Files(f"{tmp_path}/*.d")
        assert [[*found.items(index)] for index in range(len(found))] == [["1"], ["1"]]
        with pytest.raises(UsageError, match="no file matches"):
            Files(f"{tmp_path}/a*.d")

    def test_one_path_is_one_file(self, tmp_path: Path) -> None:
        path = write(tmp_path / "the::one.txt", "1\n2\n")
        assert [*Files.listed_in(write(tmp_path / "the::list", path)).items(0)] == ["1", "2"]
        assert [*Files(path).items(0)] == [*Files(Path(path)).items(0)] == ["1", "2"]

    def test_paths_may_be_urls(self) -> None:
        assert [*in_files([2], "urls").items(0)] == ["0", "1"]

    def test_a_pattern_without_files_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"no file matches '.*\*.txt'; check the pattern"):
            Files(f"{tmp_path}/*.txt")

    @pytest.mark.parametrize("paths", [3, [1, 2], {"a": 1}, iter(["a"])])
    def test_what_is_no_path_is_refused(self, paths: Any) -> None:
        with pytest.raises(UsageError, match=r"Files\(\): expected paths, found .*; pass a list of paths"):
            Files(paths)


class TestItems:
    def test_lines_lose_their_ends_only(self, tmp_path: Path) -> None:
        path = tmp_path / "lines.txt"
        path.write_bytes(" a \n\nb\r\nü".encode())
        assert [*Files([path]).items(0)] == [" a ", "", "b", "ü"]

    def test_read_gets_the_open_file(self, tmp_path: Path) -> None:
        def read(file: IO[bytes]) -> Iterator[bytes]:
            with gzip.open(file) as plain:
                yield from plain.read().split()

        path = tmp_path / "some.gz"
        path.write_bytes(gzip.compress(b"x y z"))
        assert [*Files([path], read).items(0, 1)] == [b"y", b"z"]

    def test_a_file_is_closed_when_its_reader_is_left(self, tmp_path: Path) -> None:
        held: list[IO[bytes]] = []

        def read(file: IO[bytes]) -> Iterator[bytes]:
            held.append(file)
            yield from file

        items = Files([write(tmp_path / "some.txt", "1\n2\n")], read).items(0)
        next(items)
        del items
        assert held[0].closed


class TestListed:
    @given(
        st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=5)),
        st.sampled_from(["\n", "\r\n"]),
        st.booleans(),
        st.integers(1, 9),
        st.integers(1, 5),
    )
    def test_each_line_is_a_path(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        lines: list[str],
        end: str,
        terminated: bool,
        chunk: int,
        block: int,
    ) -> None:
        monkeypatch.setattr(files, "CHUNK", chunk)
        monkeypatch.setattr(files, "LINES", block)
        # Without its end, an empty last line is none.
        last = end if terminated or (lines and not lines[-1]) else ""
        path = tmp_path / "list.txt"
        path.write_bytes((end.join(lines) + (last if lines else "")).encode())
        found = Files.listed_in(path)
        assert [found.path(index) for index in range(len(found))] == lines

    def test_a_line_without_text_is_a_file_without_items(self, tmp_path: Path) -> None:
        some = in_files([2, 1], "gaps")
        path = write(tmp_path / "list.txt", f"{some.path(0)}\n\n{some.path(1)}\n")
        shard = Shard("train", Files.listed_in(path), 0, 1)
        assert [*shard] == ["0", "1", "2"]

    def test_its_files_are_read_as_the_user_says(self, tmp_path: Path) -> None:
        some = in_files([2, 1], "read")
        path = write(tmp_path / "list.txt", f"{some.path(0)}\n{some.path(1)}\n")
        found = Files.listed_in(path, lambda file: [file.read()])
        assert [[*found.items(index)] for index in range(len(found))] == [[b"0\n1\n"], [b"2\n"]]

    def test_a_list_is_never_in_memory_as_a_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(files, "CHUNK", 1 << 12)
        path = write(tmp_path / "list.txt", "path\n" * 50_000)
        Files.listed_in(path)
        tracemalloc.start()
        try:
            found = Files.listed_in(path)
            assert found.path(len(found) - 1) == "path"
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 150_000

    def test_a_list_that_changes_while_it_is_used_is_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path / "list.txt", "a\nb\nc\n")
        for changed in ("a\n", "aaaaaaaaaa"):
            write(tmp_path / "list.txt", "a\nb\nc\n")
            found = Files.listed_in(path)
            write(tmp_path / "list.txt", changed)
            for _ in range(2):
                with pytest.raises(
                    UsageError, match="list.txt has changed since it was read first; leave it"
                ):
                    found.path(0)

    def test_a_list_that_could_not_be_read_for_a_moment_is_read_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(files, "LINES", 2)
        path = write(tmp_path / "list.txt", "a\nb\nc\nd\n")
        found = Files.listed_in(path)
        for index, name in enumerate("abcd"):
            (tmp_path / "list.txt").rename(tmp_path / "away.txt")
            with contextlib.suppress(FileNotFoundError):
                assert found.path(index) == name
            (tmp_path / "away.txt").rename(tmp_path / "list.txt")
            assert found.path(index) == name

    def test_a_list_goes_to_other_processes_without_its_lines(self, tmp_path: Path) -> None:
        path = write(tmp_path / "list.txt", "path\n" * 5000)
        assert len(pickle.dumps(Files.listed_in(path))) < 1000

    def test_a_list_that_is_not_there_is_an_error_at_once(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            Files.listed_in(tmp_path / "none.txt")


class TestShards:
    def test_whole_files_go_to_the_ranks_in_turn(self) -> None:
        dataset = in_files([2, 1, 3, 1], "turns")
        assert [[*Shard("train", dataset, rank, 3)] for rank in range(3)] == [
            ["0", "1", "6"],
            ["2"],
            ["3", "4", "5"],
        ]

    def test_more_ranks_than_files_leave_some_without_items(self) -> None:
        assert [[*Shard("train", in_files([2], "few"), rank, 2)] for rank in range(2)] == [["0", "1"], []]

    def test_a_file_that_was_begun_is_gone_on_with_by_whoever_has_it(self) -> None:
        dataset = in_files([3, 3, 3], "begun")
        shards = [Shard("train", dataset, rank, 2) for rank in range(2)]
        loops = [iter(shard) for shard in shards]
        assert [next(loops[rank]) for rank in (0, 0, 0, 0, 1)] == ["0", "1", "2", "6", "3"]
        consumed = stored(shards)
        assert consumed == Consumed(samples=1, beyond={1: 1, 2: 1})
        assert [*Shard("train", dataset, 0, 1, consumed=consumed)] == ["4", "5", "7", "8"]

    def test_files_without_items_are_passed_and_not_opened_again(self) -> None:
        opened: list[str] = []

        def read(file: IO[bytes]) -> Iterator[str]:
            text = io.TextIOWrapper(file).read()
            opened.append(text)
            yield from text.split()

        source = in_files([1, 0, 0, 1, 1], "passed")
        dataset = Files([source.path(index) for index in range(5)], read)
        shard = Shard("train", dataset, 0, 1)
        loop = iter(shard)
        assert [next(loop), next(loop)] == ["0", "1"]
        assert shard.progress.steps == 4
        opened.clear()
        assert [*Shard("train", dataset, 0, 1, consumed=stored([shard]))] == ["2"]
        assert opened == ["2\n"]
