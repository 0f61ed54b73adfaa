"""Checkpoints that ranks save beside training: when one counts, what is in it, and whose."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import TrainingFailed, UsageError
from unirun.train.checkpoints import CheckpointStrategy, Folder, Info
from unirun.train.checkpoints import writer as module
from unirun.train.checkpoints.state import load
from unirun.train.checkpoints.writer import CheckpointWriter
from unirun.train.data import Consumed, Share


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path / "run"))


WRITERS: list[CheckpointWriter] = []


def rank(folder: Folder, number: int = 0, world: int = 1, **strategy: Any) -> CheckpointWriter:
    WRITERS.append(CheckpointWriter(folder, CheckpointStrategy(**strategy), number, world, 1))
    return WRITERS[-1]


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    while WRITERS:
        WRITERS.pop().close()


def committed(writer: CheckpointWriter, number: int) -> Info:
    return writer.commit(number).result(WAIT_TIMEOUT)[-1]


def state(folder: Folder, number: int) -> dict[str, Any]:
    return load(folder, folder.manifest(number), None)


class TestWhenOneCounts:
    @pytest.fixture(autouse=True)
    def patient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "REPORT_TIMEOUT", 1000.0)

    def test_it_counts_when_the_driver_says_so(self, folder: Folder) -> None:
        writer = rank(folder)
        writer.save({"epoch": 3}, {})
        assert writer.reported({"loss": 1.0}) == 1
        assert folder.infos() == []
        info = committed(writer, 1)
        assert folder.infos() == [info]
        assert state(folder, 1) == {"epoch": 3}

    def test_the_next_one_makes_it_count_when_no_report_has_followed(self, folder: Folder) -> None:
        writer = rank(folder)
        writer.save({"epoch": 1}, {})
        writer.save({"epoch": 2}, {})
        assert [info.number for info in folder.infos()] == [1]
        assert writer.finish() == 2

    def test_what_is_not_committed_when_the_attempt_ends_does_not_count(self, folder: Folder) -> None:
        writer = rank(folder)
        writer.save({"epoch": 1}, {})
        writer.close()
        assert folder.infos() == []

    def test_a_report_without_one_before_it_says_nothing(self, folder: Folder) -> None:
        writer = rank(folder)
        assert writer.reported({"loss": 1.0}) is None
        writer.save({"epoch": 1}, {})
        writer.reported({})
        committed(writer, 1)
        assert writer.reported({}) is None

    def test_saying_it_twice_changes_nothing(self, folder: Folder) -> None:
        writer = rank(folder)
        writer.save({"epoch": 1}, {})
        assert committed(writer, 1).path == committed(writer, 1).path


def test_it_counts_by_itself_when_no_report_follows(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_TIMEOUT", 0.01)
    counts = threading.Event()
    commit = folder.commit

    def committed_now(manifest: Any) -> Any:
        found = commit(manifest)
        counts.set()
        return found

    monkeypatch.setattr(folder, "commit", committed_now)
    writer = rank(folder)
    writer.save({"epoch": 1}, {})
    assert counts.wait(WAIT_TIMEOUT)
    assert [info.number for info in folder.infos()] == [1]

    # The driver hears of it with the next report, once.
    assert writer.reported({}) == 1
    assert committed(writer, 1).number == 1
    assert writer.reported({}) is None


def test_one_whose_score_is_in_the_report_waits_for_that(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPORT_TIMEOUT", 0.0)
    writer = rank(folder, checkpoint_score_attribute="loss")
    writer.save({"epoch": 1}, {})
    assert writer.reported({"loss": 2.0}) == 1
    assert committed(writer, 1).score == 2.0


class Copied:
    """A value whose copies are counted."""

    alive: ClassVar[weakref.WeakSet[Copied]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)

    def __deepcopy__(self, memo: Any) -> Copied:
        return Copied()


def test_the_copy_is_given_up_once_it_is_written_however_late_the_report(folder: Folder) -> None:
    writer, own = rank(folder, checkpoint_score_attribute="loss"), Copied()
    writer.save({"own": own}, {})
    eventually(lambda: [*Copied.alive] == [own], "the copy is given up")
    assert folder.sizes(1)["state.pt"] > 0
    writer.reported({"loss": 1.0})
    assert committed(writer, 1).score == 1.0


def test_those_that_were_there_are_kept_with_the_new_ones(folder: Folder) -> None:
    first = rank(folder)
    first.save({"epoch": 1}, {})
    info = committed(first, 1)
    then = CheckpointWriter(folder, CheckpointStrategy(), 0, 1, 2, [info])
    WRITERS.append(then)
    then.save({"epoch": 2}, {})
    assert [each.number for each in then.commit(2).result(WAIT_TIMEOUT)] == [1, 2]


class TestWhatIsInIt:
    def test_the_state_is_that_of_the_moment(self, folder: Folder) -> None:
        writer, weights, losses = rank(folder), torch.ones(3), deque([1.0])
        writer.save({"w": weights, "list": [weights], "losses": losses, "array": weights.numpy(), "n": 5}, {})
        weights.fill_(7.0)
        losses.append(7.0)
        committed(writer, 1)
        found = state(folder, 1)
        assert found["w"].tolist() == found["list"][0].tolist() == found["array"].tolist() == [1.0] * 3
        assert (found["n"], found["losses"]) == (5, deque([1.0]))

    def test_modules_and_optimizers_are_their_state_dicts(self, folder: Folder) -> None:
        writer, model = rank(folder), torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        writer.save({"model": model, "optimizer": optimizer}, {})
        committed(writer, 1)
        found = state(folder, 1)
        assert [*found["model"]] == ["weight", "bias"]
        torch.nn.Linear(2, 1).load_state_dict(found["model"])
        torch.optim.Adam(model.parameters()).load_state_dict(found["optimizer"])

    def test_a_state_that_cannot_be_saved_is_told_with_the_next_call(self, folder: Folder) -> None:
        writer = rank(folder)
        writer.save({"function": lambda: 0}, {})
        with pytest.raises(UsageError, match="^function cannot be saved: AttributeError"):
            writer.finish()

    def test_an_object_that_cannot_be_copied_is_told_at_once(self, folder: Folder) -> None:
        with pytest.raises(UsageError, match="^lock cannot be saved: TypeError"):
            rank(folder).save({"lock": threading.Lock()}, {})

    def test_a_directory_that_cannot_be_written_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match="file"):
            rank(Folder(f"{tmp_path}/file/run")).save({"epoch": 1}, {})


class TestSeveralRanks:
    def test_rank_0_writes_the_state_and_all_ranks_how_far_they_have_come(self, folder: Folder) -> None:
        writers = [rank(folder, number, 2) for number in range(2)]
        for number, writer in enumerate(writers):
            share = Share(number, 2, 10, Consumed(samples=10), steps=2)
            writer.save({"rank": number}, {"train": share})
        assert [writer.reported({}) for writer in writers] == [1, None]
        committed(writers[0], 1)
        assert state(folder, 1) == {"rank": 0}
        assert folder.manifest(1).data["train"] == Consumed(samples=14)

    def test_a_rank_that_does_not_save_is_named(
        self, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "RANKS_SAVE_TIMEOUT", 0.0)
        writer = rank(folder, 0, 3)
        writer.save({"rank": 0}, {"train": Share(0, 3, 9)})
        with pytest.raises(TrainingFailed, match="ranks 1, 2 have not saved checkpoint 1"):
            committed(writer, 1)

    def test_a_rank_that_still_writes_is_waited_for(
        self, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files of a rank may be large."""
        now, more = itertools.count(), iter(range(20))
        writers = [rank(folder, number, 2) for number in range(2)]

        def passes(seconds: float) -> None:
            if (part := next(more, None)) is None:
                writers[1].save({}, {"train": Share(1, 2, 9)})
                writers[1].finish()
            else:
                Path(folder.inside(1, f"part{part // 2}")).write_bytes(bytes(part))

        clock = SimpleNamespace(monotonic=lambda: float(next(now)), sleep=passes, time_ns=time.time_ns)
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "RANKS_SAVE_TIMEOUT", 4.0)
        writers[0].save({}, {"train": Share(0, 2, 9)})
        committed(writers[0], 1)
        assert "rank.00001.json" in folder.manifest(1).files

    def test_ranks_with_different_datasets_are_told(self, folder: Folder) -> None:
        for number, name in ((1, "validation"), (0, "train")):
            writer = rank(folder, number, 2)
            writer.save({}, {name: Share(number, 2, 9)})
        with pytest.raises(UsageError, match="ranks use different datasets"):
            committed(writer, 1)


def test_a_full_disk_is_told_with_the_number_and_the_path_of_the_checkpoint(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    writer = rank(folder)
    writer.save({"epoch": 1}, {})
    told = re.escape(f"checkpoint 1 is not written: No space left on device: '{folder.path(1)}'")
    with pytest.raises(OSError, match=told):
        committed(writer, 1)
    with pytest.raises(OSError, match=told):
        writer.finish()


class TestKeeping:
    def test_only_the_best_are_kept(self, folder: Folder) -> None:
        writer = rank(folder, num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min")
        for number, loss in enumerate((0.5, 0.1, 0.9, 0.3), 1):
            writer.save({"epoch": number}, {})
            writer.reported({"loss": loss})
            committed(writer, number)
        assert [(info.number, info.score) for info in folder.infos()] == [(2, 0.1), (4, 0.3)]

    def test_one_that_a_user_has_deleted_is_not_missed(self, folder: Folder) -> None:
        writer = rank(folder, num_to_keep=1)
        for number in (1, 2):
            writer.save({"epoch": number}, {})
            writer.reported({})
            assert committed(writer, number).number == number
            shutil.rmtree(folder.path(number))
        assert folder.infos() == []

    def test_a_score_that_is_no_number_is_told_and_the_checkpoint_does_not_count(
        self, folder: Folder
    ) -> None:
        writer = rank(folder, checkpoint_score_attribute="loss")
        writer.save({"epoch": 1}, {})
        writer.reported({"loss": "high"})
        with pytest.raises(UsageError, match="the score 'loss' of a checkpoint is 'high'"):
            committed(writer, 1)
        assert folder.infos() == []

    def test_one_that_is_not_finite_is_null_and_counts(self, folder: Folder) -> None:
        writer = rank(folder, checkpoint_score_attribute="loss")
        writer.save({"epoch": 1}, {})
        writer.reported({"loss": float("nan")})
        assert committed(writer, 1).score is None
        with folder.open(1, "checkpoint.json") as file:
            assert json.loads(file.read())["score"] is None
        *_, latest = folder.infos()
        assert latest.score is None


def test_one_whose_report_was_made_counts_only_when_the_driver_has_that(folder: Folder) -> None:
    writer = rank(folder)
    writer.save({"epoch": 1}, {})
    assert writer.reported({"loss": 1.0}) == 1
    saved = threading.Thread(target=writer.save, args=({"epoch": 2}, {}))
    saved.start()
    saved.join(0.1)
    assert saved.is_alive()
    assert folder.infos() == []
    committed(writer, 1)
    saved.join(WAIT_TIMEOUT)
    assert not saved.is_alive()


class Slow:
    """A value that is written only when it may go on."""

    begins, goes_on = threading.Event(), threading.Event()

    def __deepcopy__(self, memo: Any) -> Slow:
        return self

    def __reduce__(self) -> Any:
        self.begins.set()
        assert self.goes_on.wait(WAIT_TIMEOUT)
        return Slow, ()


def test_an_attempt_that_is_over_writes_nothing_while_the_next_one_does(folder: Folder) -> None:
    writer = rank(folder)
    writer.save({"own": Slow()}, {})
    assert Slow.begins.wait(WAIT_TIMEOUT)
    closes = threading.Thread(target=writer.close)
    closes.start()
    closes.join(0.1)
    assert closes.is_alive()
    Slow.goes_on.set()
    closes.join(WAIT_TIMEOUT)
    assert not closes.is_alive()
    folder.clear()
    assert folder.numbers() == []


class Slowly(MemoryFileSystem):  # type: ignore[misc]
    """Files that get another name as in a store of objects: by a copy, and later by the end of the first."""

    cachable = False
    protocol = "slowly"

    def __init__(self) -> None:
        super().__init__()
        self.copied, self.goes_on = threading.Event(), threading.Event()

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        self.cp_file(path1, path2)
        if "rank.00001" in path2:
            self.copied.set()
            assert self.goes_on.wait(WAIT_TIMEOUT)
        self.rm_file(path1)


def test_a_file_without_its_name_is_no_part_of_a_checkpoint() -> None:
    folder, slowly = Folder("memory://partial-names"), Slowly()
    folder.files = slowly
    writers = [rank(folder, number, 2) for number in range(2)]
    for number, writer in enumerate(writers):
        writer.save({"rank": number}, {"train": Share(number, 2, 10)})
    assert slowly.copied.wait(WAIT_TIMEOUT)
    info = committed(writers[0], 1)
    slowly.goes_on.set()
    writers[1].finish()
    assert folder.infos() == [info]
    folder.remove(1)


def test_one_that_a_dead_rank_has_not_written_is_given_up_with_its_attempt(folder: Folder) -> None:
    writer = rank(folder, world=2)
    writer.save({"epoch": 1}, {"train": Share(0, 1, 9)})
    commit = writer.commit(1)
    writer.close()
    with pytest.raises(CancelledError, match="checkpoint 1 was given up, as its attempt is over"):
        commit.result(WAIT_TIMEOUT)
    assert folder.infos() == []


@pytest.mark.parametrize("sharded", [0, 1, 2])
def test_a_group_for_sharded_states_is_made_once_if_it_is_needed_and_ends_with_the_attempt(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, sharded: int
) -> None:
    made, ended = list[object](), list[object]()

    def group() -> object:
        made.append(object())
        return made[-1]

    def save(of: Folder, number: int, whole: object, by: object, files: dict[str, tuple[int, int]]) -> Any:
        assert by is made[-1]
        done: Future[None] = Future()
        done.set_result(None)
        return done

    monkeypatch.setattr(module, "is_sharded", lambda whole: bool(whole["sharded"]))
    monkeypatch.setattr(module, "save_sharded", save)
    for _ in range(2):
        WRITERS.append(CheckpointWriter(folder, CheckpointStrategy(), 1, 2, 1, (), group, ended.append))
        for number in range(2):
            WRITERS[-1].save({"sharded": number < sharded}, {})
        assert ended == made[: len(made) - bool(sharded)]
        WRITERS.pop().close()
        assert ended == made
    assert len(made) == 2 * bool(sharded)
