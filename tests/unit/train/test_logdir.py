"""The directory of a trainer, and the one of each of its runs."""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import UsageError
from unirun.train.arguments import (
    LOCK,
    absolute,
    check_writable,
    hold,
    left_unfinished,
    mark_finished,
    next_run,
    release,
    runs_in,
)
from unirun.train.checkpoints import Manifest


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """A URL that is no path."""
    url = f"memory://{secrets.token_hex(4)}/logs"
    yield url
    files, root = fsspec.url_to_fs(url)
    if files.exists(root):
        files.rm(root, recursive=True)


class TestWhereItIs:
    def test_a_relative_path_is_that_of_the_present_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for path in ("runs", "./runs/", "file://runs"):
            assert absolute(path) == f"{tmp_path}/runs"

    def test_the_home_directory_is_that_of_this_user(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/me")
        assert absolute("~/runs") == "/home/me/runs"

    def test_a_url_of_a_file_is_a_path(self) -> None:
        assert absolute("file:///tmp/runs") == "/tmp/runs"

    @pytest.mark.parametrize("url", ["s3://bucket/runs", "memory://~/runs/", "simplecache::file:///runs"])
    def test_any_other_url_is_kept(self, url: str) -> None:
        assert absolute(url) == url


class TestWhetherItCanBeWritten:
    def test_it_is_made_and_nothing_is_left_in_it(self, tmp_path: Path) -> None:
        folder = tmp_path / "some" / "where"
        check_writable(str(folder))
        assert [*folder.iterdir()] == []
        check_writable(str(folder))

    def test_a_file_in_its_place_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "file" / "logs"):
            with pytest.raises(UsageError) as raised:
                check_writable(str(path))
            assert re.fullmatch(
                rf"logdir {path} cannot be written: (File exists|Not a directory); give another one",
                str(raised.value),
            )

    @pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="there is no such file system")
    def test_a_file_system_that_takes_no_files_is_told(self) -> None:
        """Also root cannot write there."""
        with pytest.raises(UsageError, match=r"logdir /proc/self/fd cannot be written: .*; give another one"):
            check_writable("/proc/self/fd")

    @pytest.mark.parametrize("below", ["", "exp/mine"])
    def test_one_that_another_user_could_replace_is_told(self, tmp_path: Path, below: str) -> None:
        shared = tmp_path / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        with pytest.raises(UsageError) as raised:
            check_writable(str(shared / below))
        assert str(raised.value) == (
            f"logdir {shared / below} is not safe: {shared} may be written by all users; chmod go-w {shared}, or name "
            "another directory"
        )

    def test_whatever_the_umask_it_is_for_this_user_alone(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            check_writable(str(tmp_path / "logs" / "mine"))
            run, _ = next_run(str(tmp_path / "logs" / "mine"))
        finally:
            os.umask(before)
        for path in (tmp_path / "logs", tmp_path / "logs" / "mine", Path(run)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700

    def test_a_url_that_nobody_knows_is_told(self) -> None:
        with pytest.raises(
            UsageError, match=r"logdir nowhere://bucket/logs cannot be used: .*nowhere.*; see fsspec"
        ):
            check_writable("nowhere://bucket/logs")

    def test_a_url_that_fsspec_knows_is_for_its_library_to_judge(self, elsewhere: str) -> None:
        check_writable(elsewhere)
        files, root = fsspec.url_to_fs(elsewhere)
        assert not files.exists(root)


class TestTheDirectoriesOfRuns:
    def test_runs_are_numbered_from_1_on(self, tmp_path: Path) -> None:
        paths = [next_run(str(tmp_path)) for _ in range(3)]
        assert paths == [(f"{tmp_path}/run_00{number}",) * 2 for number in (1, 2, 3)]
        assert all(Path(path).is_dir() for path, _ in paths)

    @given(st.sets(st.integers(1, 2000), max_size=5))
    def test_each_comes_after_all_that_there_are(
        self, tmp_path_factory: pytest.TempPathFactory, numbers: set[int]
    ) -> None:
        folder = tmp_path_factory.mktemp("logs")
        for number in numbers:
            (folder / f"run_{number:03}").mkdir()
        assert next_run(str(folder))[0] == f"{folder}/run_{max(numbers, default=0) + 1:03}"

    @given(st.sets(st.integers(1, 12000), min_size=1, max_size=5), st.booleans())
    def test_they_come_in_the_order_of_their_numbers(
        self, tmp_path_factory: pytest.TempPathFactory, numbers: set[int], finished: bool
    ) -> None:
        folder = str(tmp_path_factory.mktemp("logs"))
        for number in numbers:
            checkpoint = Path(folder, f"run_{number:03}", "checkpoints", "000001")
            checkpoint.mkdir(parents=True)
            (checkpoint / "state.pt").write_bytes(b"1")
            manifest = Manifest(1, 1, False, {"state.pt": (1, 0)})
            (checkpoint / "checkpoint.json").write_bytes(msgspec.json.encode(manifest))
        names = {number: f"{folder}/run_{number:03}" for number in sorted(numbers)}
        assert [*runs_in(folder).items()] == [*names.items()]
        last = names[max(numbers)]
        if finished:
            mark_finished(last)
        assert left_unfinished(folder) == ("" if finished else last)

    def test_what_else_is_there_does_not_count(self, tmp_path: Path) -> None:
        for name in ("run_7", "run_007x", "xrun_008", "run_abc", "notes.txt"):
            (tmp_path / name).touch()
        assert next_run(f"{tmp_path}/")[0] == f"{tmp_path}/run_001"

    def test_trainers_that_share_it_get_different_ones(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(8) as pool:
            found = [*pool.map(lambda _: next_run(str(tmp_path))[0], range(40))]
        assert len({*found}) == 40

    def test_a_directory_that_is_not_there_is_an_error_of_the_system(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            next_run(str(tmp_path / "gone"))

    def test_of_a_url_callbacks_have_a_directory_of_this_host(
        self, elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        files, root = fsspec.url_to_fs(elsewhere)
        url, local = next_run(elsewhere)
        name = url.removeprefix(f"{elsewhere}/")
        assert re.fullmatch("run_001-[0-9a-f]{8}", name)
        assert (Path(local).parent, os.listdir(local)) == (tmp_path, [])
        # What a run keeps there is what makes its directory.
        files.pipe(f"{root}/{name}/checkpoints/000001/state.pt", b"")
        assert next_run(elsewhere)[0].startswith(f"{elsewhere}/run_002-")

    def test_trainers_that_share_a_url_get_different_ones(
        self, elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        assert len({next_run(elsewhere)[0] for _ in range(20)}) == 20


class TestTheLockOfARun:
    def test_it_names_its_last_holder_alone_however_many_there_were(self, tmp_path: Path) -> None:
        release(hold(str(tmp_path)))
        assert stat.S_IMODE((tmp_path / LOCK).stat().st_mode) & 0o077 == 0
        (tmp_path / LOCK).write_text("process 123456789 on another host with a long name")
        mine = f"process {os.getpid()} on {socket.gethostname()}"
        for _ in range(2):
            file = hold(str(tmp_path))
            with pytest.raises(UsageError, match=f"{tmp_path} is in use by {mine}; wait until"):
                hold(str(tmp_path))
            release(file)
            release(file)
        assert (tmp_path / LOCK).read_text() == mine

    def test_a_process_that_was_forked_meanwhile_does_not_hold_it_longer(self, tmp_path: Path) -> None:
        file = hold(str(tmp_path))
        assert file is not None
        fork = os.dup(file.fileno())
        release(file)
        release(hold(str(tmp_path)))
        os.close(fork)

    def test_a_url_has_none(self, elsewhere: str) -> None:
        assert hold(elsewhere) is None
        release(None)
