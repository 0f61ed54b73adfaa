"""Any damage of a checkpoint, whole or in parts, is told with its number and the path of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import fully_shard

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import CheckpointDamaged, UsageError
from unirun.train.checkpoints import CheckpointStrategy, Folder
from unirun.train.checkpoints.state import load
from unirun.train.checkpoints.writer import CheckpointWriter

pytestmark = pytest.mark.leaves


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["whole", "in parts"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint, plain or sharded, that is as it was written."""
    model = torch.nn.Linear(8, 8)
    if request.param == "in parts":
        fully_shard(model)
    writer = CheckpointWriter(
        Folder(str(tmp_path)), CheckpointStrategy(), 0, 1, 7, group=lambda: dist.new_group(backend="gloo")
    )
    writer.save({"model": model, "epoch": 3}, {})
    writer.commit(7).result(WAIT_TIMEOUT)
    writer.close()
    return tmp_path / "000007"


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def gone(file: Path) -> None:
    file.unlink()


def a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def verified(checkpoint: Path) -> None:
    folder = Folder(str(checkpoint.parent))
    folder.verify(folder.require(int(checkpoint.name)))


def states(checkpoint: Path) -> list[Path]:
    """The files that a load reads."""
    return [path for path in checkpoint.iterdir() if path.suffix != ".json"]


@pytest.mark.parametrize("damage", [flipped, cut, gone, a_directory])
def test_damage_of_any_file_is_found(checkpoint: Path, damage: Callable[[Path], None]) -> None:
    files = states(checkpoint)
    assert files
    for file in files:
        before = file.read_bytes()
        damage(file)
        with pytest.raises(CheckpointDamaged, match=f"^checkpoint 7 is damaged: {file} "):
            verified(checkpoint)
        if file.is_dir():
            file.rmdir()
        file.write_bytes(before)
    verified(checkpoint)


@pytest.mark.parametrize("damage", [gone, a_directory])
def test_a_file_that_goes_before_it_is_loaded_is_told_in_the_same_way(
    checkpoint: Path, damage: Callable[[Path], None]
) -> None:
    folder = Folder(str(checkpoint.parent))
    manifest = folder.require(7)
    for file in states(checkpoint):
        before = file.read_bytes()
        damage(file)
        for into in (None, {"epoch": 0, "model": torch.nn.Linear(8, 8)}):
            with pytest.raises(CheckpointDamaged, match=f"^checkpoint 7 is damaged: {file} cannot be read"):
                load(folder, manifest, into)
        if file.is_dir():
            file.rmdir()
        file.write_bytes(before)


@pytest.mark.parametrize(
    "manifest",
    [
        b'{"number": 7, "world_size": 1, "sharded": false, "files": {"\xff": [1, 1]}}',
        b'{"number": 7, "world_size": 1, "sharded": false, "files": {}}',
        b'{"number": 7, "world_size": 1, "sharded": true, "files": {"state.pt": [1, 1]}}',
        b"[" * 100_000,
        b"",
    ],
    ids=["no UTF-8", "no state", "no index", "too deep", "empty"],
)
def test_a_manifest_that_makes_no_sense_is_damage(checkpoint: Path, manifest: bytes) -> None:
    (checkpoint / "checkpoint.json").write_bytes(manifest)
    with pytest.raises(CheckpointDamaged, match=f"^checkpoint 7 is damaged: {checkpoint}/checkpoint.json "):
        verified(checkpoint)
    folder = Folder(str(checkpoint.parent))
    assert folder.infos() == []


def test_a_checkpoint_of_which_the_folder_became_a_file_is_damaged(checkpoint: Path) -> None:
    checkpoint.rename(checkpoint.with_name("other"))
    checkpoint.write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match=f"^checkpoint 7 is damaged: {checkpoint}/checkpoint.json "):
        verified(checkpoint)
    assert Folder(str(checkpoint.parent)).infos() == []


def test_one_that_is_not_there_was_named_wrongly(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=f"there is no checkpoint {checkpoint.parent}/000008"):
        verified(checkpoint.with_name("000008"))


def test_a_copy_under_another_number_is_the_same_checkpoint(checkpoint: Path) -> None:
    copy = checkpoint.rename(checkpoint.with_name("000001"))
    verified(copy)
    folder = Folder(str(copy.parent))
    assert load(folder, folder.require(1), None)["epoch"] == 3


def test_a_part_that_cannot_be_written_is_told_with_the_number_and_the_path(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    (tmp_path / "000001" / "__0_0.distcp").mkdir(parents=True)
    writer = CheckpointWriter(
        Folder(str(tmp_path)), CheckpointStrategy(), 0, 1, 1, group=lambda: dist.new_group(backend="gloo")
    )
    writer.save({"model": model}, {})
    with pytest.raises(OSError, match=f"checkpoint 1 is not written: Is a directory: '{tmp_path}/000001'"):
        writer.commit(1).result(WAIT_TIMEOUT)
    writer.close()


@pytest.mark.parametrize("count", range(3))
def test_the_checkpoints_of_an_attempt_have_one_process_group_which_ends_with_it(
    tmp_path: Path, count: int
) -> None:
    model, formed, ended = torch.nn.Linear(8, 8), list[object](), list[object]()
    fully_shard(model)

    def form() -> object:
        formed.append(dist.new_group(backend="gloo"))
        return formed[-1]

    writer = CheckpointWriter(Folder(str(tmp_path)), CheckpointStrategy(), 0, 1, 1, (), form, ended.append)
    for number in range(1, count + 1):
        writer.save({"model": model}, {})
        writer.commit(number).result(WAIT_TIMEOUT)
    assert ended == []
    writer.close()
    assert ended == formed
    assert len(formed) == min(count, 1)
