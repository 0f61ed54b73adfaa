"""A checkpoint is a pickle, so only tensors and plain data are read from a file that another user may have
written."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import fully_shard

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import UsageError
from unirun.train.checkpoints import CheckpointStrategy, Folder
from unirun.train.checkpoints.state import load
from unirun.train.checkpoints.writer import CheckpointWriter

pytestmark = pytest.mark.leaves


class Harm:
    """Unpickling it makes a directory."""

    def __init__(self, mark: Path) -> None:
        self._mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._mark,)


def checkpoint(folder: Folder, state: dict[str, Any]) -> Path:
    writer = CheckpointWriter(
        folder, CheckpointStrategy(), 0, 1, 1, group=lambda: dist.new_group(backend="gloo")
    )
    writer.save(state, {})
    writer.commit(1).result(WAIT_TIMEOUT)
    writer.close()
    return Path(folder.path(1))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path / "run" / "checkpoints"))


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def written_by_all(path: Path) -> None:
    path.parent.parent.chmod(0o777)


def a_file_that_all_may_write(path: Path) -> None:
    (path / "state.pt").chmod(0o666)


def a_link(path: Path) -> None:
    state = (path / "state.pt").rename(path.parent / "state.pt")
    (path / "state.pt").symlink_to(state)


FOREIGN = written_by_all, a_file_that_all_may_write, a_link


def read(folder: Folder) -> dict[str, Any]:
    return load(folder, folder.require(1), None)


@pytest.mark.parametrize("foreign", FOREIGN)
def test_objects_of_any_class_are_made_of_ones_own_only(
    folder: Folder, tmp_path: Path, foreign: Callable[[Path], None]
) -> None:
    mark = tmp_path / "mark"
    path = checkpoint(folder, {"epoch": 3, "strange": {1j}})
    (path / "state.pt").chmod(0o600)
    torch.save({"x": Harm(mark)}, path / "state.pt")
    foreign(path)
    with pytest.raises(
        UsageError, match=rf"checkpoint {path} is not loaded: .* alone, and .*; copy it to a dir"
    ):
        read(folder)
    assert not mark.exists()


def test_ones_own_may_have_anything(folder: Folder) -> None:
    checkpoint(folder, {"path": Path("/here"), "values": {1j}})
    assert read(folder) == {"path": Path("/here"), "values": {1j}}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_tensors_and_plain_data_of_others_are_read(folder: Folder, foreign: Callable[[Path], None]) -> None:
    foreign(checkpoint(folder, {"epoch": 3, "model": torch.nn.Linear(2, 2)}))
    assert read(folder)["epoch"] == 3


@pytest.mark.usefixtures("group")
def test_a_sharded_one_of_others_is_not_read(folder: Folder) -> None:
    model = torch.nn.Linear(2, 2)
    fully_shard(model)
    path = checkpoint(folder, {"model": model})
    assert [*read(folder)] == ["model"]
    written_by_all(path)
    with pytest.raises(
        UsageError, match="it is sharded, so its index is a pickle, and .* may be written by all"
    ):
        read(folder)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("shard", [False, True], ids=["whole", "in parts"])
def test_whatever_the_umask_it_is_written_for_this_user_alone(folder: Folder, *, shard: bool) -> None:
    model = torch.nn.Linear(2, 2)
    if shard:
        fully_shard(model)
    before = os.umask(0)
    try:
        path = checkpoint(folder, {"model": model})
    finally:
        os.umask(before)
    assert folder.foreign(1) == ""
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in (path, *path.iterdir())}
    assert {*modes.values()} == {0o600, 0o700}, modes
