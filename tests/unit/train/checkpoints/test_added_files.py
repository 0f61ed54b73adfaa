"""Files that ranks add to checkpoints."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import CheckpointDamaged, TrainingFailed, UsageError
from unirun.train.checkpoints import CheckpointStrategy, Folder, files_in
from unirun.train.checkpoints.writer import CheckpointWriter
from unirun.train.lockstep import Lockstep, Reported
from unirun.train.session import Session


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A directory as `save_pretrained` makes it."""
    folder = tmp_path / "adapter"
    (folder / "more").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "more" / "weights").write_bytes(b"w" * 100)
    return folder


@pytest.fixture(params=["path", "url"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    url = str(tmp_path / "run") if request.param == "path" else f"memory://{secrets.token_hex(4)}"
    yield Folder(url)
    files, root = fsspec.url_to_fs(url)
    if files.exists(root):
        files.rm(root, recursive=True)


def saved(folder: Folder, *files: Any) -> None:
    """Checkpoint 1, in which each rank has saved these files."""
    writers = [
        CheckpointWriter(folder, CheckpointStrategy(), rank, len(files), 1) for rank in range(len(files))
    ]
    try:
        for writer, each in zip(writers, files, strict=True):
            writer.save({"epoch": 1}, {}, None if each is None else files_in(each))
        writers[0].commit(1).result(WAIT_TIMEOUT)
    finally:
        for writer in writers:
            writer.close()


def test_a_directory_behind_a_link_is_saved_too(adapter: Path) -> None:
    (adapter.parent / "base").mkdir()
    (adapter.parent / "base" / "vocabulary").touch()
    (adapter / "base").symlink_to("../base")
    (adapter / "more" / "again").symlink_to("..")
    assert files_in(adapter).keys() == {"config.json", "more/weights", "base/vocabulary"}


def test_a_directory_gives_its_content_and_a_list_its_names(adapter: Path) -> None:
    assert files_in(adapter).keys() == {"config.json", "more/weights"}
    assert files_in(str(adapter / "config.json")).keys() == {"config.json"}
    assert files_in([adapter / "config.json", adapter / "more"]).keys() == {"config.json", "more/weights"}
    assert files_in([]) == {}


def test_the_directory_here_and_the_one_above_have_their_own_names_in_a_list(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"adapter/config.json", "adapter/more/weights"}
    monkeypatch.chdir(adapter / "more")
    assert files_in([".."]).keys() == files_in([adapter / "more" / ".."]).keys() == names
    assert files_in(["."]).keys() == {"more/weights"}
    assert files_in("..").keys() == {"config.json", "more/weights"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (True, "files=True; give a directory, a file, or a list of these"),
        ({"a": 1}, "files={'a': 1}; give a directory"),
        ("", "files=''; give a directory"),
        ([""], "files=['']; give a directory"),
        (["/nowhere/to"], "files: there is no /nowhere/to; write it before save_checkpoint is called"),
    ],
)
def test_anything_else_is_told(given: Any, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        files_in(given)
    assert str(raised.value).startswith(message)


def test_a_name_whose_bytes_are_no_text_is_told(adapter: Path) -> None:
    (adapter / os.fsdecode(b"\xff")).touch()
    with pytest.raises(UsageError, match=r"^files: the name '\\udcff' is no text; give it another$"):
        files_in(adapter)


def test_two_files_of_one_name_are_told(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(UsageError, match="have one name; give one of them another"):
        files_in([adapter / "config.json", tmp_path / "config.json"])


def test_files_of_all_ranks_are_in_a_checkpoint(folder: Folder, adapter: Path, tmp_path: Path) -> None:
    saved(folder, adapter, [], [adapter / "config.json"])
    manifest = folder.require(1)
    folder.verify(manifest)
    (info,) = folder.infos()
    assert info.number == 1
    for rank, names in enumerate((["config.json", "more/weights"], [], ["config.json"])):
        found = folder.fetch(manifest, rank, str(tmp_path / "fetched"))
        there = [] if found is None else [path for path in found.rglob("*") if path.is_file()]
        assert sorted(str(path.relative_to(found)) for path in there if found) == names
    # What training does with its files later changes nothing.
    (adapter / "config.json").write_text("[]")
    found = folder.fetch(manifest, 0, str(tmp_path / "again"))
    assert found is not None
    assert (found / "config.json").read_text() == "{}"


def test_a_directory_among_them_may_have_the_number_of_the_checkpoint(folder: Folder, adapter: Path) -> None:
    (adapter / "000001").mkdir()
    (adapter / "000001" / "state.pt").write_bytes(b"s")
    saved(folder, adapter)
    assert [info.number for info in folder.infos()] == [1]
    folder.verify(folder.require(1))


def test_a_file_that_is_gone_or_changed_is_a_damage(tmp_path: Path, adapter: Path) -> None:
    folder = Folder(str(tmp_path / "run"))
    saved(folder, adapter)
    weights = Path(folder.inside(1, "files.00000/more/weights"))
    weights.write_bytes(b"v" * 100)
    with pytest.raises(CheckpointDamaged, match=r"files\.00000/more/weights is not as it was written"):
        folder.verify(folder.require(1))
    weights.unlink()
    assert folder.infos() == []


def test_files_are_for_this_user_alone(tmp_path: Path, adapter: Path) -> None:
    folder = Folder(str(tmp_path / "run"))
    saved(folder, adapter)
    top = Path(folder.inside(1, "files.00000"))
    modes = {path.stat().st_mode & 0o777 for path in (top, *top.rglob("*"))}
    assert modes == {0o700, 0o600}


def test_a_session_finds_the_files_of_the_checkpoint_that_it_goes_on_from(
    folder: Folder, adapter: Path
) -> None:
    saved(folder, adapter, [])
    session = Session(resume=(folder, folder.require(1)))
    found = session.files(0)
    assert found is not None
    assert (found / "more" / "weights").read_bytes() == b"w" * 100
    assert session.files(1) is None
    assert Session().files(0) is None
    # Those behind a URL were copied, and only the copies go.
    session.close()
    assert found.exists() == folder.local


def test_every_rank_says_whether_it_has_files() -> None:
    lockstep = Lockstep(2)
    lockstep.hear(0, Reported(1, saves=1, together=True))
    with pytest.raises(TrainingFailed) as raised:
        lockstep.hear(1, Reported(1, saves=1))
    assert "every rank passes files= to save_checkpoint, [] where it has none" in str(raised.value)
