"""Checkpoints in a directory: what counts, what is skipped, what is deleted."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import CheckpointDamaged
from unirun.train.checkpoints import Folder, Manifest
from unirun.train.checkpoints import folder as module
from unirun.train.checkpoints.state import load
from unirun.train.data import Consumed

CHUNK = 16


@pytest.fixture(autouse=True, scope="module")
def files_of_several_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", CHUNK)
        yield


@pytest.fixture(params=["path", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(f"{tmp_path}/run" if request.param == "path" else f"memory://{tmp_path.name}/run")


def put(folder: Folder, number: int, name: str, data: bytes) -> tuple[int, int]:
    return folder.write(number, name, lambda file: file.write(data))


def saved(folder: Folder, number: int, data: bytes = b"weights", *, commit: bool = True) -> None:
    folder.make(number)
    files = {"state.pt": put(folder, number, "state.pt", data)}
    if commit:
        folder.commit(Manifest(number, 2, False, files, {"train": Consumed(1, 5)}, 0.5))


def test_nothing_is_there_at_first(folder: Folder) -> None:
    assert (folder.infos(), folder.numbers()) == ([], [])


def test_the_latest_that_was_committed_counts(folder: Folder) -> None:
    saved(folder, 1)
    saved(folder, 2)
    saved(folder, 3, commit=False)
    *_, latest = folder.infos()
    assert (latest.number, latest.path, latest.score) == (2, folder.path(2), 0.5)
    assert [info.number for info in folder.infos()] == [1, 2]
    assert folder.manifest(2).data == {"train": Consumed(1, 5)}


def test_what_was_not_finished_is_deleted(folder: Folder) -> None:
    saved(folder, 1)
    saved(folder, 2, commit=False)
    folder.clear()
    assert folder.numbers() == [1]


def test_one_that_a_user_has_put_elsewhere_is_used_and_only_the_link_to_it_is_deleted(tmp_path: Path) -> None:
    folder, elsewhere = Folder(f"{tmp_path}/run"), tmp_path / "elsewhere"
    saved(folder, 1)
    Path(folder.path(1)).rename(elsewhere)
    Path(folder.path(1)).symlink_to(elsewhere)
    assert [info.number for info in folder.infos()] == [1]
    folder.remove(1)
    assert folder.numbers() == []
    assert sorted(os.listdir(elsewhere)) == ["checkpoint.json", "state.pt"]


@pytest.mark.parametrize("damage", [b"weight", b"weights and more", b""])
def test_one_whose_files_have_other_sizes_is_skipped_with_a_warning(
    folder: Folder, capfd: pytest.CaptureFixture[str], damage: bytes
) -> None:
    saved(folder, 1)
    saved(folder, 2)
    put(folder, 2, "state.pt", damage)
    *_, latest = folder.infos()
    assert latest.number == 1
    assert "000002/state.pt is not as it was written; an earlier one is used" in capfd.readouterr().err


def test_the_one_before_another_is_found(folder: Folder) -> None:
    for number in (1, 2, 3):
        saved(folder, number)
    found = [[info.number for info in folder.infos(below)] for below in (3, 2, 1)]
    assert found == [[1, 2], [1], []]


@given(
    sizes=st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=12),
    world=st.integers(1, 5),
    choice=st.integers(0, 1000),
)
def test_exactly_one_rank_finds_a_flipped_byte_and_none_reads_all(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], world: int, choice: int
) -> None:
    folder = Folder(str(tmp_path_factory.mktemp("any")))
    folder.make(1)
    files = {
        f"__{rank}_0.distcp": put(folder, 1, f"__{rank}_0.distcp", bytes(size or 1))
        for rank, size in enumerate(sizes)
    }
    manifest = Manifest(1, len(sizes), True, files)
    for rank in range(world):
        folder.verify(manifest, rank, world)
    name = sorted(files)[choice % len(files)]
    put(folder, 1, name, b"\1" + bytes(files[name][0] - 1))
    found = []
    for rank in range(world):
        try:
            folder.verify(manifest, rank, world)
        except CheckpointDamaged as error:
            found.append(str(error))
    assert found == [f"checkpoint 1 is damaged: {folder.path(1)}/{name} is not as it was written"]


class Remembering(LocalFileSystem):  # type: ignore[misc]
    """A file system that remembers what it has listed, as remote ones do."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self._listed: dict[tuple[str, bool], Any] = {}

    def ls(self, path: str, detail: bool = False, refresh: bool = False, **options: Any) -> Any:
        if refresh or (path, detail) not in self._listed:
            self._listed[path, detail] = super().ls(path, detail, **options)
        return self._listed[path, detail]


def test_what_another_process_has_written_or_deleted_is_seen(tmp_path: Path) -> None:
    folder, other = Folder(str(tmp_path)), Folder(str(tmp_path))
    folder.files = Remembering()
    for number in (1, 2):
        saved(other, number)
        assert folder.numbers() == [*range(1, number + 1)]
        for name in ("rank.00000.json", "rank.00001.json"):
            assert {*folder.sizes(number)} == {each.name for each in (tmp_path / f"{number:06}").iterdir()}
            put(other, number, name, b"{}")
    other.remove(1)
    assert folder.numbers() == [2]


class Failing(LocalFileSystem):  # type: ignore[misc]
    """A file system that cannot read files with a `name`, for the reason `error`."""

    cachable = False
    name = "none"
    error: OSError

    def open(self, path: str, *args: Any, **kwargs: Any) -> Any:
        if path.endswith(self.name):
            raise self.error
        return super().open(path, *args, **kwargs)


PASSING = [
    OSError(errno.EIO, os.strerror(errno.EIO)),
    OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
    PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
    TimeoutError(),
]


@pytest.mark.parametrize("error", PASSING, ids=["EIO", "ESTALE", "EACCES", "a time limit"])
class TestAnErrorThatMayPass:
    """An error that may pass is no damage, so that a run does not go back to an earlier checkpoint, or to its
    beginning."""

    @pytest.fixture
    def failing(self, error: OSError, tmp_path: Path) -> Folder:
        folder = Folder(str(tmp_path))
        saved(folder, 1)
        saved(folder, 2)
        folder.files = Failing()
        folder.files.error = error
        return folder

    def test_of_a_manifest_is_told(self, failing: Folder, error: OSError) -> None:
        failing.files.name = "000002/checkpoint.json"
        with pytest.raises(
            type(error), match=f"checkpoint 2 cannot be read.*{failing.path(2)}/checkpoint.json"
        ):
            failing.infos()

    def test_of_another_file_is_told(self, failing: Folder, error: OSError) -> None:
        manifest = failing.manifest(2)
        failing.files.name = "000002/state.pt"
        for use in (failing.verify, lambda manifest: load(failing, manifest, None)):
            with pytest.raises(type(error), match=f"checkpoint 2 cannot be read.*{failing.path(2)}/state.pt"):
                use(manifest)


def test_one_whose_manifest_is_damaged_is_skipped_too(folder: Folder) -> None:
    saved(folder, 1)
    saved(folder, 2)
    put(folder, 2, "checkpoint.json", b'{"number": 2')
    *_, latest = folder.infos()
    assert latest.number == 1
    assert [info.number for info in folder.infos()] == [1]


def test_one_without_its_file_is_skipped(folder: Folder) -> None:
    saved(folder, 1)
    folder.files.rm(folder.inside(1, "state.pt"))
    assert folder.infos() == []


def test_a_checkpoint_is_deleted_as_a_whole(folder: Folder) -> None:
    saved(folder, 1)
    folder.remove(1)
    assert folder.numbers() == []


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    folder = Folder(str(tmp_path_factory.mktemp("any")))
    folder.make(1)
    put(folder, 1, "checkpoint.json", raw)
    try:
        folder.manifest(1)
    except CheckpointDamaged:
        assert folder.infos() == []
