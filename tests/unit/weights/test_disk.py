"""Versions in files, which the safetensors package reads, too."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import fsspec
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.effort import examples
from tests.unit.weights.shardings import Sharding, shardings
from tests.unit.weights.test_moving import noise, same
from unirun.errors import FrameError, UsageError, WeightsError
from unirun.weights import disk
from unirun.weights.disk import LAYOUT
from unirun.weights.publishing import Packing, Publisher, format_code
from unirun.weights.tensors import Layout, LocalShard, Weights, tensors_of, unreadable

ANY = -(1 << 62)

DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype)
    and name == str(dtype).removeprefix("torch.")
    and not name.startswith(("q", "complex32"))  # torch warns of these
    and format_code(dtype) is not None
    and unreadable(name, torch.zeros(1, dtype=dtype)) is None
}
"""All that both torch and a file can have."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "policy")


def save(url: str, version: int, *ranks: Weights) -> list[str]:
    """All ranks of a publisher save."""
    paths = []
    for rank, weights in enumerate(ranks):
        publisher = Publisher("policy")
        publisher.publish(tensors_of(weights), version)
        with publisher.current() as (number, packing, block):
            paths.append(disk.save(url, number, rank, len(ranks), packing, block.memory))
        publisher.close()
    return paths


def load(url: str, into: Weights, at_least: int = ANY) -> int:
    return disk.load(url, tensors_of(into), at_least)


def halves(value: torch.Tensor) -> list[dict[str, LocalShard]]:
    """The rows of `value` in two ranks."""
    middle = len(value) // 2
    return [
        {"w": LocalShard(value[:middle], shape=value.shape, start=(0, 0))},
        {"w": LocalShard(value[middle:], shape=value.shape, start=(middle, 0))},
    ]


def test_every_dtype_comes_back_bit_for_bit_and_is_read_by_others(url: str) -> None:
    sent = {name: noise(3, 5, dtype=dtype) for name, dtype in DTYPES.items()} | {
        "scalar": torch.tensor(2**40 + 1),
        "empty": torch.zeros(0, 3),
        "columns": noise(6, 8).t(),
    }
    (path,) = save(url, 7, sent)
    assert path == f"{url}/7/00000-of-00001.safetensors"
    got = {name: torch.empty_like(value) for name, value in sent.items()}
    assert load(url, got) == 7
    assert [name for name in sent if not same(got[name], sent[name])] == []
    theirs = load_file(path)
    assert {*sent} - {*theirs} == {"empty"}
    assert [name for name in theirs if not same(theirs[name], sent[name])] == []


def test_a_file_says_which_framework_wrote_it(url: str) -> None:
    """transformers refuses a file that does not."""
    (path,) = save(url, 1, {"a": torch.ones(2)})
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata.keys() == {"format", LAYOUT}
    assert metadata["format"] == "pt"


def test_tensors_that_are_one_here_and_were_two_are_an_error(url: str) -> None:
    save(url, 1, {"a": torch.ones(2), "b": torch.zeros(2)})
    both = torch.full((2,), 5.0)
    with pytest.raises(WeightsError, match="do not fit the receiver"):
        load(url, {"a": both, "b": both})
    assert both.tolist() == [5.0, 5.0]
    save(url, 2, {"a": torch.ones(2), "b": torch.ones(2)})
    assert load(url, {"a": both, "b": both}) == 2
    assert both.tolist() == [1.0, 1.0]


def test_what_was_cut_is_loaded_in_another_cut(url: str) -> None:
    whole = torch.randn(6, 4)
    save(url, 0, *halves(whole))
    got, columns = torch.zeros(6, 4), torch.zeros(6, 2)
    load(url, {"w": got})
    load(url, {"w": LocalShard(columns, shape=(6, 4), start=(0, 2))})
    assert torch.equal(got, whole)
    assert torch.equal(columns, whole[:, 2:])


@examples(20)
@given(shardings())
def test_any_layout_comes_back(tmp_path_factory: pytest.TempPathFactory, sharding: Sharding) -> None:
    url, whole = str(tmp_path_factory.mktemp("any")), torch.arange(70, dtype=torch.int32).view(7, 10)
    for rank, at in enumerate(sharding.coordinates):
        mine, layout = sharding.local(whole, at), {"w": sharding.part(whole, at)}
        memory = packed(mine, layout)
        path = disk.save(url, 1, rank, len(sharding.coordinates), Packing(layout, 1), memory)
        # Others read them, for whom only a whole tensor may have its name.
        pieces = layout["w"].pieces
        is_whole = [piece.box for piece in pieces] == [layout["w"].tensor.whole]
        assert {*load_file(path)} == ({"w"} if is_whole else {f"w/{number}" for number in range(len(pieces))})
    got = torch.zeros(7, 10, dtype=torch.int32)
    assert load(url, {"w": got}) == 1
    assert torch.equal(got, whole)


def packed(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The memory of a publisher with this local tensor."""
    packing = Packing(layout, 1)
    memory = torch.zeros(packing.size, dtype=torch.uint8)
    for piece in layout["w"].pieces:
        part = local
        for axis, (begin, size) in enumerate(zip(piece.at, piece.box.size, strict=True)):
            part = part.narrow(axis, begin, size)
        packing.view(memory, "w", piece.box).copy_(part)
    return memory


def test_the_latest_version_counts_that_all_ranks_have_saved(url: str) -> None:
    save(url, -3, *halves(torch.full((4, 2), -3.0)))
    got = torch.zeros(4, 2)
    assert load(url, {"w": got}) == -3
    assert got.unique().tolist() == [-3.0]
    for version in (1, 2, 10):
        save(url, version, *halves(torch.full((4, 2), float(version))))
    (_, second) = (Path(path) for path in save(url, 11, *halves(torch.zeros(4, 2))))
    second.rename(f"{second}.partial")
    got = torch.zeros(4, 2)
    assert load(url, {"w": got}) == 10
    assert got.unique().tolist() == [10.0]
    with pytest.raises(WeightsError, match="no weights from version 11 on"):
        load(url, {"w": got}, 11)
    assert got.unique().tolist() == [10.0]


def test_a_folder_that_another_program_has_made_is_no_version(url: str) -> None:
    save(url, 5, {"w": torch.ones(2)})
    (Path(url) / "0007").mkdir()
    assert load(url, {"w": torch.zeros(2)}) == 5


@pytest.mark.parametrize("first", [1, 2])
def test_of_a_version_that_was_saved_again_by_other_ranks_the_later_files_count(url: str, first: int) -> None:
    whole: list[list[Weights]] = [[{"w": torch.ones(4, 2)}], [*halves(torch.full((4, 2), 2.0))]]
    for path in save(url, 5, *whole[first - 1]):
        os.utime(path, (1.0, 1.0))
    save(url, 5, *whole[2 - first])
    got = torch.zeros(4, 2)
    assert load(url, {"w": got}) == 5
    assert got.unique().tolist() == [3.0 - first]


def test_nothing_is_there(url: str) -> None:
    with pytest.raises(WeightsError, match="no version is whole there; does every rank"):
        load(url, {"w": torch.zeros(1)})


def test_a_version_that_does_not_fit_changes_nothing(url: str) -> None:
    save(url, 1, {"a": torch.ones(2), "b": torch.ones(2)})
    got = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}
    with pytest.raises(WeightsError) as caught:
        load(url, got)
    assert [fault.where for fault in caught.value.faults] == ["b", "c"]
    assert not got["a"].any()


def test_nothing_published_cannot_be_saved() -> None:
    with pytest.raises(UsageError, match="nothing is published"), Publisher("policy").current():
        pass


def test_a_dtype_that_files_do_not_have_is_told(url: str) -> None:
    with pytest.raises(WeightsError, match=r"safetensors has no torch\.complex128"):
        save(url, 1, {"w": torch.zeros(1, dtype=torch.complex128)})


@pytest.mark.parametrize("size", [4, 60, -3])
def test_a_damaged_file_is_told(url: str, size: int) -> None:
    (path,) = save(url, 1, {"w": torch.ones(100)})
    Path(path).write_bytes(Path(path).read_bytes()[:size])
    got = torch.zeros(100)
    with pytest.raises(FrameError):
        load(url, {"w": got})
    assert not got.any()


def test_any_store_that_fsspec_knows_will_do() -> None:
    save("memory://weights", 3, {"w": torch.ones(4)})
    got = torch.zeros(4)
    assert load("memory://weights", {"w": got}) == 3
    assert got.all()
    assert fsspec.filesystem("memory").ls("/weights/3", detail=False) == [
        "/weights/3/00000-of-00001.safetensors"
    ]


def test_a_save_that_ends_in_its_middle_leaves_the_version_before(monkeypatch: pytest.MonkeyPatch) -> None:
    url, files, got = "memory://middle", fsspec.filesystem("memory"), torch.zeros(4)
    save(url, 1, {"w": torch.ones(4)})

    def half(source: str, path: str) -> None:
        files.pipe_file(path, Path(source).read_bytes()[:100])
        raise OSError("the network is gone")

    with monkeypatch.context() as patch:
        patch.setattr(files, "put_file", half)
        with pytest.raises(OSError, match="is gone"):
            save(url, 2, {"w": torch.ones(4)})
    assert load(url, {"w": got}) == 1
    save(url, 2, {"w": torch.ones(4)})
    assert load(url, {"w": got}) == 2


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    url = tmp_path_factory.mktemp("any")
    (path,) = save(str(url), 1, {"w": torch.ones(1)})
    Path(path).write_bytes(raw)
    with pytest.raises(FrameError):
        load(str(url), {"w": torch.zeros(1)})


@pytest.mark.parametrize("there", [{"v": torch.ones(1)}, {"w": torch.ones(2)}, {"w": torch.ones(1).int()}])
def test_a_file_that_has_other_tensors_than_its_layout_says_is_told(
    url: str, there: dict[str, torch.Tensor]
) -> None:
    (path,) = save(url, 1, {"w": torch.ones(1)})
    with safe_open(path, framework="pt") as file:
        layout = file.metadata()[LAYOUT]
    for metadata in ({LAYOUT: layout}, {LAYOUT: "[]"}, {}):
        save_file(there, path, metadata)
        got = torch.zeros(1)
        with pytest.raises(FrameError):
            load(url, {"w": got})
        assert not got.any()


def test_of_another_store_only_the_files_are_fetched_that_have_what_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, fetched, copies = torch.randn(6, 4), list[str](), list[Path]()
    save("memory://halves", 1, *halves(whole))
    files = fsspec.filesystem("memory")
    get = files.get_file

    def counted(path: str, name: str) -> None:
        fetched.append(path)
        copies.append(Path(name))
        get(path, name)

    monkeypatch.setattr(files, "get_file", counted)
    got = torch.zeros(3, 4)
    load("memory://halves", {"w": LocalShard(got, shape=(6, 4), start=(3, 0))})
    assert torch.equal(got, whole[3:])
    assert fetched == ["/halves/1/00001-of-00002.safetensors"]
    (copy,) = copies
    assert copy.parent.parent == Path(tempfile.gettempdir())
    assert not copy.parent.exists(), "no copy is left"


def test_a_version_is_found_that_another_process_has_saved_since_the_last_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Remote file systems keep the lists of directories that they have read."""
    files, known = fsspec.filesystem("memory"), dict[str, list[str]]()
    ls = files.ls

    def kept(path: str, *, detail: bool = True, refresh: bool = False) -> list[str]:
        if refresh or path not in known:
            known[path] = ls(path, detail=detail)
        return known[path]

    got = torch.zeros(4, 2)
    for version in (1, 2):
        save("memory://another", version, *halves(torch.full((4, 2), float(version))))
        with monkeypatch.context() as patch:
            patch.setattr(files, "ls", kept)
            assert load("memory://another", {"w": got}) == version


def test_a_file_can_be_read_by_those_whom_the_umask_lets(url: str) -> None:
    before = os.umask(0o027)
    try:
        (path,) = save(url, 1, {"w": torch.ones(1)})
    finally:
        os.umask(before)
    assert os.stat(path).st_mode & 0o777 == 0o640


def test_a_file_of_this_host_is_read_where_it_is(url: str) -> None:
    """Not even the pages of what is left out come into memory."""
    save(url, 1, {"w": torch.ones(1), "large": torch.ones(1 << 22)})
    before = rss()
    load(url, {"w": torch.zeros(1)})
    assert rss() - before < 1 << 23


def rss() -> int:
    """The memory of this process, in bytes."""
    return psutil.Process().memory_info().rss
