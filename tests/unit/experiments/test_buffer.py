"""The trajectories of an asynchronous trial: which step takes which, and their files, however they were cut."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.weights.job import Job
from tests.unit.weights.queues.test_ends import FIRST, begun
from tests.unit.weights.queues.test_histories import End
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import CheckpointDamaged, QueueTimeout, UsageError
from unirun.experiments import buffer
from unirun.experiments.buffer import Buffer, Intake, Taken, TakenFile, TakeOrder, staleness, version_of
from unirun.experiments.config import GserverManager
from unirun.experiments.graph import ModelName
from unirun.experiments.sample import SequenceSample
from unirun.weights.queue import Item


def sample(name: str, size: int = 3) -> SequenceSample:
    """Two sequences of one prompt, with each kind of number."""
    data = {
        "packed_input_ids": [torch.arange(size), torch.arange(size + 1)],
        "prompt_mask": [torch.arange(size) < 1, torch.arange(size + 1) < 2],
        "packed_logprobs": [torch.full((size,), -0.25), torch.full((size + 1,), -0.5)],
        "rewards": [torch.tensor(0.0), torch.tensor(1.0)],
        "image": [torch.zeros(0, 2, dtype=torch.bfloat16), torch.ones(1, 2, dtype=torch.bfloat16)],
    }
    return SequenceSample.of({key: [value] for key, value in data.items()}, [name], told=[{"a": size}])


def test_a_step_takes_those_that_came_first_and_drops_those_that_are_too_old() -> None:
    order = TakeOrder().arrived([("a", 3), ("b", 1), ("c", 3), ("d", 2)])
    assert order.take(4, 3, eta=1)[1] is None
    order, taken = order.take(4, 3, eta=2)
    assert taken == Taken(4, ("a", "c", "d"), ("b",))
    assert dict(order.waiting) == {}
    assert staleness(taken, {"a": 3, "c": 3, "d": 2}) == {1: 2, 2: 1}


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=30),
    st.integers(1, 3),
    st.integers(0, 3),
    st.data(),
)
def test_whatever_comes_and_wherever_a_trial_goes_back_to_each_is_taken_once(
    comes: list[tuple[int, int]], count: int, eta: int, data: st.DataObject
) -> None:
    order, lines, arrivals, step, number = TakeOrder(), list[Taken](), list[tuple[str, int]](), 0, 0
    for lag, some in comes:
        new = [(f"{number + at}", max(step - lag, 0)) for at in range(some)]
        number += some
        arrivals += new
        order = order.arrived(new)
        again = step in order.taken
        order, taken = order.take(step, count, eta)
        if taken is not None:
            lines += [] if again else [taken]
            assert len(taken.ids) == count
            step += 1
        if data.draw(st.booleans(), "goes back"):
            # All is read from disk; those of the queue may come once more.
            step = data.draw(st.integers(0, step), "to")
            order = TakeOrder.of(lines).arrived(arrivals).arrived(arrivals)
    used = [each for taken in lines for each in (*taken.ids, *taken.old)]
    assert len(used) == len({*used})
    assert [taken.step for taken in lines] == [*range(len(lines))]
    versions = dict(arrivals)
    assert all(taken.step - versions[each] <= eta for taken in lines for each in taken.ids)
    # None is lost.
    assert {*used} | {*order.waiting} == {*versions}


def test_what_no_checkpoint_goes_back_to_is_released() -> None:
    order = TakeOrder.of([Taken(0, ("a",), ("b",)), Taken(1, ("c",))])
    order, ids = order.released(1)
    assert ids == ["a", "b"]
    assert (order.begun, [*order.taken]) == (2, [1])


def test_trajectories_are_there_again_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    first = Buffer(tmp_path)
    first.add([(sample("a"), 3), (sample("b", 0), 4)])
    second = Buffer(tmp_path)
    second.add([(sample("c"), 5)])
    third = Buffer(tmp_path)
    number, found = third.since(0)
    assert (number, [(version, meta.ids) for version, meta in found]) == (
        3,
        [(3, ("a",)), (4, ("b",)), (5, ("c",))],
    )
    for name, size in (("a", 3), ("b", 0), ("c", 3)):
        read, wanted = third.read([name]), sample(name, size)
        assert (read.seqlens, read.metadata) == (wanted.seqlens, wanted.metadata)
        for key in wanted.keys:
            assert read[key].dtype == wanted[key].dtype
            assert torch.equal(read[key], wanted[key])
    assert third.since(2)[1][0][1].ids == ("c",)
    assert third.since(3) == (3, [])


@pytest.mark.parametrize("cut", [1, 30, 100])
def test_one_that_was_cut_was_not_accepted(tmp_path: Path, cut: int) -> None:
    Buffer(tmp_path).add([(sample("a"), 0), (sample("b"), 0)])
    (path,) = tmp_path.glob("*.items")
    path.write_bytes(path.read_bytes()[:-cut])
    found = Buffer(tmp_path)
    assert ("a" in found, "b" in found) == (True, False)
    found.add([(sample("b"), 0)])
    assert [meta.ids for _, meta in Buffer(tmp_path).since(0)[1]] == [("a",), ("b",)]


@pytest.mark.parametrize("zeros", [16, 400])
def test_zeros_in_the_place_of_one_that_was_not_on_disk_are_none(tmp_path: Path, zeros: int) -> None:
    Buffer(tmp_path).add([(sample("a"), 0), (sample("b"), 0)])
    (path,) = tmp_path.glob("*.items")
    content = path.read_bytes()
    path.write_bytes(content + bytes(zeros))
    assert len(Buffer(tmp_path)) == 2
    path.write_bytes(content[:-40] + bytes(40 + zeros))
    assert len(Buffer(tmp_path)) == 1
    path.write_bytes(content + bytes(zeros) + content)
    with pytest.raises(CheckpointDamaged, match=rf"000001\.items is damaged at byte {len(content) + 16}"):
        Buffer(tmp_path)


def test_a_file_that_is_damaged_is_told(tmp_path: Path) -> None:
    Buffer(tmp_path).add([(sample("a"), 0), (sample("b"), 0)])
    (path,) = tmp_path.glob("*.items")
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=r"000001\.items is damaged at byte 16"):
        Buffer(tmp_path)


def test_a_file_goes_with_the_last_trajectory_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "SEGMENT_BYTES", 1)
    made = Buffer(tmp_path)
    made.add([(sample(name), 0) for name in "abc"])
    assert made.release(["a", "c", "x"]) == 2
    assert sorted(path.name for path in tmp_path.glob("*.items")) == ["000002.items", "000003.items"]
    assert "a" in made, "it was accepted"
    with pytest.raises(CheckpointDamaged, match="trajectory 'a' is not in"):
        made.read(["a"])


def test_the_next_process_does_not_find_what_was_released(tmp_path: Path) -> None:
    first = Buffer(tmp_path)
    first.add([(sample(name), 0) for name in "abc"])
    first.release(["a"])
    first.release(["b"])
    second = Buffer(tmp_path)
    assert [meta.ids for _, meta in second.since(0)[1]] == [("c",)]
    assert "a" in second, "it was accepted"
    second.release(["c"])
    assert [*tmp_path.iterdir()] == []


def test_trajectories_that_come_together_may_fill_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer, "SEGMENT_BYTES", 1)
    there = Buffer(tmp_path)
    there.add([(sample(name), 0) for name in "abc"])
    assert len([*tmp_path.glob("*.items")]) == 3
    there.release(["a"])
    assert [there.read([name]).ids for name in "bc"] == [("b",), ("c",)]


def test_nobody_finds_a_trajectory_before_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, found = Buffer(tmp_path), list[int]()
    monkeypatch.setattr(os, "fsync", lambda _: found.append(there.since(0)[0]))
    there.add([(sample("a"), 0), (sample("b"), 0)])
    assert set(found) == {0}
    assert there.since(0)[0] == 2


def test_what_was_released_long_ago_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "REMEMBERED", 2)
    made = Buffer(tmp_path)
    made.add([(sample(name), 0) for name in "abcde"])
    made.release(["a", "b"])
    made.release(["d"])
    assert [name in made for name in "abcde"] == [False, True, True, True, True]
    assert (len(made), len(made._released)) == (2, 2)
    number, found = made.since(2)
    assert (number, [meta.ids[0] for _, meta in found]) == (5, ["c", "e"])
    made.add([(sample("f"), 0)])
    assert [meta.ids[0] for _, meta in made.since(number)[1]] == ["f"]


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """As `time.monotonic`."""
        return self.now

    def passes(self, seconds: float) -> None:
        """So much time passes."""
        self.now += seconds


class Source:
    """A queue with items that have come together."""

    def __init__(self, *names: str) -> None:
        self.items = [
            Item(str(at), sample(name, 0 if name == "bad" else 3), 1) for at, name in enumerate(names)
        ]
        self.dropped: list[str] = []
        self.used = 0
        self.clock = Clock()

    def get_some(self, most: int, *, timeout: float) -> list[Item]:
        """All of them, or the end of the wait when there are none."""
        self.clock.passes(2.0 if self.items else timeout)
        if not self.items:
            raise QueueTimeout("nothing came", "wait longer", queue="trajectories")
        assert most == buffer.TAKEN_TOGETHER
        return self.items[:most]

    def drop(self, item: Item) -> None:
        """Note it."""
        self.dropped.append(item.id)

    def done(self) -> None:
        """Note how many are on disk."""
        self.used += 1


def test_what_has_come_together_is_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, source = Buffer(tmp_path), Source("a", "bad", "c", "b", "a")
    made.add([(sample("c"), 1)])
    written: list[int] = []
    monkeypatch.setattr("os.fsync", written.append)
    queue: Any = source
    intake = Intake(made, queue, lambda each: bool(each.total("packed_input_ids") > 1))
    intake.take()
    assert len(written) == 1
    assert (intake.accepted, intake.rejected, source.dropped, source.used) == (2, 1, ["1"], 1)
    assert [meta.ids[0] for _, meta in Buffer(tmp_path).since(0)[1]] == ["c", "a", "b"]


@pytest.mark.parametrize("restarted", [False, True])
def test_one_that_comes_again_counts_once_for_the_gate(tmp_path: Path, restarted: bool) -> None:
    """It is on disk, and its producer has not heard of it: the connection has ended, or the process that has it."""
    job = Job(rollout=1, actor=1)
    try:
        rollout, actor = (End(job.starts(role, 0, "a")) for role in ("rollout", "actor"))
        made = Buffer(tmp_path)
        intake = Intake(made, actor.queue, lambda each: True)
        rollout.queue.put(sample("a"), version=0)
        intake.take()
        rollout.queue.put(sample("b"), version=0)
        made.add([(item.value, 0) for item in actor.queue.get_some(2, timeout=0.1)])
        if restarted:
            job.dies(actor.worker)
            made, actor = Buffer(tmp_path), End(job.starts("actor", 0, "a"))
            actor.queue.keep(len(made))
            intake = Intake(made, actor.queue, lambda each: True)
        else:
            job.breaks(actor.worker, rollout.worker)
            actor.queue.done()
        intake.take()
        assert [meta.ids[0] for _, meta in made.since(0)[1]] == ["a", "b"]
        assert begun(rollout) == FIRST - 2
    finally:
        job.close()


def test_the_time_without_a_trajectory_is_counted_whether_one_comes_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    queue: Any = source
    monkeypatch.setattr(buffer, "time", source.clock)
    intake = Intake(Buffer(tmp_path), queue, lambda each: True)
    intake.take()
    assert (intake.waited, source.used) == (buffer.TAKE_TIMEOUT, 0)
    source.items = Source("a").items
    intake.take()
    assert (intake.waited, source.used) == (buffer.TAKE_TIMEOUT + 2.0, 1)


def test_a_thread_that_does_not_end_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source, go_on = Source("a"), threading.Event()
    queue: Any = source
    monkeypatch.setattr(buffer, "CLOSE_TIMEOUT", 0.01)
    intake = Intake(Buffer(tmp_path), queue, lambda each: go_on.wait(WAIT_TIMEOUT))
    intake.start()
    intake.close()
    assert "the thread that takes trajectories" in capfd.readouterr().err
    go_on.set()
    intake._thread.join(WAIT_TIMEOUT)


def test_the_queue_of_a_trial_has_the_bounds_of_its_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(buffer, "Queue", lambda *args, **options: made.append((args, options)))
    manager = GserverManager(
        model_name=ModelName("actor", 0),
        n_servers=2,
        schedule_policy="round_robin",
        max_head_offpolicyness=3,
        train_batch_size=7,
        flush_request_timeout=60,
        max_concurrent_rollouts=5,
    )
    buffer.trajectories(manager)
    bounds = {"batch": 7, "max_head_offpolicyness": 3, "max_concurrent_rollouts": 5}
    ends = {"producer": "rollout_worker", "consumer": "model_worker", "maxsize": buffer.QUEUE_ITEMS}
    assert made == [(("trajectories",), {**ends, **bounds})]


def test_the_thread_ends_when_it_is_closed(tmp_path: Path) -> None:
    made, source = Buffer(tmp_path), Source("a")
    queue: Any = source
    intake = Intake(made, queue, lambda each: True)
    intake.start()
    eventually(lambda: intake.accepted == 1, "it takes trajectories")
    intake.close()
    intake.raise_error()
    assert len(made) == 1
    assert "trajectories" not in [thread.name for thread in threading.enumerate()]


def test_an_item_has_one_id(tmp_path: Path) -> None:
    two = SequenceSample.gather([sample("a"), sample("b")])
    with pytest.raises(UsageError, match="has 2 ids"):
        Buffer(tmp_path).add([(two, 0)])


def test_a_line_that_was_cut_is_of_a_step_that_had_not_begun(tmp_path: Path) -> None:
    file = TakenFile(tmp_path)
    assert file.read() == []
    file.write(Taken(0, ("a",)))
    file.write(Taken(1, ("b",), ("c",)))
    path = tmp_path / "taken.jsonl"
    path.write_text(path.read_text()[:-5])
    assert file.read() == [Taken(0, ("a",))]
    file.write(Taken(1, ("b",)))
    assert TakenFile(tmp_path).read() == [Taken(0, ("a",)), Taken(1, ("b",))]
    file.cut(1)
    file.write(Taken(2, ("c",)))
    assert TakenFile(tmp_path).read() == [Taken(1, ("b",)), Taken(2, ("c",))]


@given(st.lists(st.integers(-1, 5), max_size=6), st.none() | st.integers(0, 9))
def test_the_version_of_a_trajectory_is_that_of_its_oldest_token_if_no_other_was_put(
    versions: list[int], put: int | None
) -> None:
    """Tokens of the prompt have no version."""
    item = Item("1", SequenceSample.of({"versions": [[torch.tensor(versions)]]}, ["a"]), put)
    made = [each for each in versions if each >= 0]
    if put is not None or made:
        assert version_of(item) == (min(made) if put is None else put)
    else:
        with pytest.raises(UsageError, match="without a version"):
            version_of(item)


def test_what_was_written_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may die at any time: what a file has then is what it had at its last fsync."""
    on_disk: dict[int, bytes] = {}

    def sync(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            on_disk[os.fstat(handle).st_ino] = Path(f"/proc/self/fd/{handle}").read_bytes()

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(buffer, "SEGMENT_BYTES", 1)
    there, file = Buffer(tmp_path), TakenFile(tmp_path)
    for change in (
        lambda: there.add([(sample(name), 0) for name in "abc"]),
        lambda: file.write(Taken(0, ("a",))),
        lambda: file.write(Taken(1, ("b",))),
        lambda: file.cut(1),
        lambda: there.release(["c"]),
        lambda: there.add([(sample("d"), 0)]),
    ):
        change()
        for path in tmp_path.iterdir():
            assert on_disk.get(path.stat().st_ino) == path.read_bytes(), path.name


def test_a_trajectory_is_there_as_soon_as_it_has_come_for_one_that_waits(tmp_path: Path) -> None:
    buffer, found = Buffer(tmp_path), SimpleQueue[int]()
    waits = threading.Thread(target=lambda: found.put(len(buffer.since(0, 3600.0)[1])), daemon=True)
    waits.start()
    buffer.add([(sample("a"), 1)])
    assert found.get(timeout=WAIT_TIMEOUT / 4) == 1
