"""Checkpoints in a directory: what counts, what is skipped, what is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import CheckpointDamaged
from unirun.train.checkpoints import Folder, Manifest
from unirun.train.data import Progress


@pytest.fixture(params=["path", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(f"{tmp_path}/run" if request.param == "path" else f"memory://{tmp_path.name}/run")


def saved(folder: Folder, number: int, data: bytes = b"weights", *, commit: bool = True) -> None:
    folder.make(number)
    files = {"state.pt": folder.write(number, "state.pt", data)}
    if commit:
        folder.commit(Manifest(number, 2, False, files, {"train": Progress(1, 5)}, 0.5))


def test_nothing_is_there_at_first(folder: Folder) -> None:
    assert (folder.latest(), folder.infos(), folder.numbers()) == (None, [], [])


def test_the_latest_that_was_committed_counts(folder: Folder) -> None:
    saved(folder, 1)
    saved(folder, 2)
    saved(folder, 3, commit=False)
    latest = folder.latest()
    assert latest is not None
    assert (latest.number, latest.path, latest.score) == (2, folder.path(2), 0.5)
    assert [info.number for info in folder.infos()] == [1, 2]
    assert folder.manifest(2).data == {"train": Progress(1, 5)}


def test_what_was_not_finished_is_deleted(folder: Folder) -> None:
    saved(folder, 1)
    saved(folder, 2, commit=False)
    folder.clear()
    assert folder.numbers() == [1]


@pytest.mark.parametrize("damage", [b"weightz", b"weight", b""])
def test_a_damaged_one_is_skipped_with_a_warning(
    folder: Folder, capfd: pytest.CaptureFixture[str], damage: bytes
) -> None:
    saved(folder, 1)
    saved(folder, 2)
    folder.write(2, "state.pt", damage)
    latest = folder.latest()
    assert latest is not None
    assert latest.number == 1
    assert "000002/state.pt is not as it was written; an earlier one is used" in capfd.readouterr().err


def test_one_whose_manifest_is_damaged_is_skipped_too(folder: Folder) -> None:
    saved(folder, 1)
    saved(folder, 2)
    folder.write(2, "checkpoint.json", b'{"number": 2')
    latest = folder.latest()
    assert latest is not None
    assert latest.number == 1
    assert [info.number for info in folder.infos()] == [1]


def test_one_without_its_file_is_skipped(folder: Folder) -> None:
    saved(folder, 1)
    folder.files.rm(folder.inside(1, "state.pt"))
    assert folder.latest() is None


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
    folder.write(1, "checkpoint.json", raw)
    try:
        folder.manifest(1)
    except CheckpointDamaged:
        assert folder.latest() is None
