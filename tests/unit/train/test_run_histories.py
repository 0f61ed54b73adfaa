"""Runs of a `Trainer` whose ranks are lost, against a run in which none is.

The driver's iterator, the sessions, the writers of checkpoints and the data are real, in this process; a rank computes
when the driver takes its next report. Whatever is lost and whatever the number of ranks is then: each round with a
checkpoint arrives once, each sample of an epoch counts once, the same random numbers are drawn between the same
checkpoints, and after each operation on files every checkpoint that counts is whole.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.effort import examples
from tests.waiting import WAIT_TIMEOUT
from unirun import train
from unirun.errors import TrainingFailed, UsageError, WorkerLost
from unirun.train import functions, running
from unirun.train.callbacks import Callbacks, CsvLoggerCallback, JsonLoggerCallback, TrainingCallback
from unirun.train.checkpoints import CheckpointStrategy, Folder, Info
from unirun.train.checkpoints import writer as writers
from unirun.train.checkpoints.state import load
from unirun.train.checkpoints.writer import CheckpointWriter
from unirun.train.running import Attempts, TrainingIterator
from unirun.train.session import Session
from unirun.train.task import Attempt, RunTask

Sample = tuple[int, int]
"""An epoch, and a sample of it."""

numbered = itertools.count()


@dataclass
class Plan:
    """A run. After each `save`-th step there is a checkpoint, with the report of that step or before it. `worlds` are
    the numbers of ranks of the attempts; the last one is that of all that follow. `deaths`: events in which an attempt is
    lost, each with how many of its kind there were before; with `again` the attempt after such a one is lost, too."""

    size: int
    batch: int
    epochs: int
    save: int
    alone: bool
    worlds: list[int]
    keep: int | None
    scored: bool
    deaths: set[tuple[str, int]]
    again: bool

    def world(self, attempt: int) -> int:
        """The ranks of an attempt, from 0 on."""
        return self.worlds[min(attempt, len(self.worlds) - 1)]


class Flaky(Exception):
    """An error after which a run is tried again, in the same processes."""


class Files(MemoryFileSystem):  # type: ignore[misc]
    """Files that are looked at each time when one of them has gone or has got its name."""

    cachable = False

    def __init__(self, url: str) -> None:
        super().__init__()
        self._seen = Folder(url)

    def rm_file(self, path: str) -> None:
        super().rm_file(path)
        self.check()

    def check(self) -> None:
        """Check that all checkpoints that count are whole."""
        for number in self._seen.numbers():
            with contextlib.suppress(FileNotFoundError):
                self._seen._check_sizes(self._seen.manifest(number))


class Ref:
    """A call, which runs when somebody wants its result."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    def done(self) -> bool:
        return self.exception() is None

    def exception(self) -> BaseException | None:
        try:
            self.result()
        except WorkerLost as error:
            return error
        return None

    def result(self) -> Any:
        return self._answer()

    def wake_with(self, wake: Callable[[Any], None]) -> None:
        wake(self)

    def forget_wake(self, wake: Callable[[Any], None]) -> None: ...


class Unfinished(Ref):
    """The call of the function. It is over for the driver when a rank is lost, or when all have said that they end."""

    def done(self) -> bool:
        return self.exception() is not None

    def wake_with(self, wake: Callable[[Any], None]) -> None: ...


class Rank:
    """One rank of an attempt: its session, its random numbers, and the function as far as it has come."""

    def __init__(self, run: Run, order: RunTask, rank: int, world: int) -> None:
        folder, began = run.folder(), time.monotonic()
        writer = CheckpointWriter(folder, order.strategy, rank, world, order.number, order.kept)
        number: Any = order.resume
        self.rank, self.world, self.run = rank, world, run
        self.session = Session(
            rank,
            world,
            rank,
            config=order.config,
            datasets=order.datasets,
            writer=writer,
            resume=None if number is None else (folder, folder.manifest(number)),
            saves=order.number - 1,
        )
        self.writer, self.samples = writer, list[Sample]()
        self.reports, self.ended, self.taken = 0, False, 0
        self.began, self.seconds = began, 0.0
        self._numbers = (torch.get_rng_state(), numpy.random.get_state(), random.getstate())
        self._function = self._steps(order.number - 1)

    def go_on(self) -> None:
        """Run up to the next report or checkpoint, or to the end."""
        self._with_own(self._numbers)
        functions.enter(self.session)
        try:
            next(self._function)
        except StopIteration:
            self.session.finish()
            self.ended = True
        finally:
            functions.enter(None)
            self._numbers = (torch.get_rng_state(), numpy.random.get_state(), random.getstate())

    def _with_own(self, numbers: Any) -> None:
        torch.set_rng_state(numbers[0])
        numpy.random.set_state(numbers[1])
        random.setstate(numbers[2])

    def _steps(self, saves: int) -> Iterator[None]:
        """The training function."""
        plan = self.run.plan
        train.enable_reproducibility(7)
        # A model is made, of a run that goes on, too.
        self._draw()
        state = train.load_checkpoint()
        done = state["step"] if state else 0
        shard = train.get_dataset_shard(shuffle=True, seed=5, block=4)
        loader = shard.to_torch(plan.batch)
        for epoch in range(shard.progress.epoch, plan.epochs):
            first = replace(shard.upcoming(plan.batch), rank=0)
            promised, count = len(loader), 0
            loop = iter(loader)
            # A rank without a batch of a step reports, too.
            for _ in range(first.total() or 0):
                batch = next(loop, None)
                if batch is not None:
                    count += 1
                    assert len(loader) == promised
                    self.samples += [(epoch, int(each)) for each in batch]
                self.run.drew(self.rank, saves, self._draw())
                done += 1
                if done % plan.save == 0:
                    saves += 1
                    train.save_checkpoint(step=done, score=score_of(done))
                    self.run.saved(saves, self.rank, self.samples)
                    if plan.alone:
                        yield
                more = {"late": done} if done > plan.save else {}
                train.report(step=done, rank=self.rank, **more)
                self.reports += 1
                yield
            assert next(loop, None) is None
            assert count == promised

    def _draw(self) -> tuple[float, ...]:
        return float(torch.rand(1)), float(numpy.random.rand()), random.random()


def score_of(step: int) -> float:
    """The score of the checkpoint after a step, which goes up and down."""
    return float(step * 7 % 5)


WRITER_END_TIMEOUT = 20.0
"""Seconds in which a writer ends with its attempt."""


class Workers:
    """The workers of a trainer, and what their group answers. It is lost as a whole."""

    name = "w"
    lives = True
    error = ""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.group = self
        self._events = Counter[str]()
        self._lost: WorkerLost | None = None
        self._attempt = -1
        self.ranks: list[Rank] = []
        self._turn = 0
        self.generation = 0
        self.world_size = 0
        self.grown: list[int] = []
        """The rounds after which more ranks were asked for."""
        self._begin()

    def grow(self) -> None:
        self.grown.append(len(self._run.recorded.rounds))

    def _begin(self) -> None:
        self._lost, self._attempt, self._failed = None, self._attempt + 1, 0
        self.world_size = self._run.plan.world(self._attempt)

    # What a trainer knows of its workers.

    @property
    def incarnations(self) -> tuple[int, ...]:
        return (self.generation,) * self.world_size

    def wait_until_whole(self, timeout: float) -> None:
        if self._lost is not None:
            self.generation += 1
            self._begin()

    def loss(self, error: WorkerLost, called: Sequence[int]) -> str:
        return f"{error.worker} was lost"

    # The group, and each of its workers.

    def __len__(self) -> int:
        return self.world_size

    def __iter__(self) -> Iterator[Any]:
        return iter(self[rank] for rank in range(self.world_size))

    def __getitem__(self, rank: int) -> Any:
        return Worker(self, rank)

    def happens(self, what: str) -> None:
        """Something in which all of them may be lost. Raises `WorkerLost`."""
        event = what, self._events[what]
        self._events[what] += 1
        again = self._run.plan.again and self._attempt % 2 == 1 and what == "step"
        if self._lost is None and (again or event in self._run.plan.deaths):
            self._lost = WorkerLost("it was lost", worker=f"w:{what}{event[1]}")
            self.end()
        if self._lost is not None:
            raise self._lost

    def fails(self) -> None:
        """An exception of the function, in processes that live."""
        event = "fail", self._events["fail"]
        self._events["fail"] += 1
        if event in self._run.plan.deaths:
            self._failed += 1
            self.end()
            raise Flaky(event)

    def end(self) -> None:
        """The attempt is over, and nothing of it is written any more."""
        for rank in self.ranks:
            rank.session.interrupt("over")
            rank.session.close()
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            for thread in rank.writer._pool._threads:
                thread.join(WRITER_END_TIMEOUT)
                if thread.is_alive():
                    with rank.writer._changed:
                        rank.writer._changed.notify_all()
                    raise AssertionError("the writer of a rank goes on after its attempt")

    @property
    def idle(self) -> Any:
        return self

    def options(self, **how: Any) -> Any:
        return self

    def call(self) -> None:
        self.end()

    @property
    def run(self) -> Any:
        return self

    def call_async(self, turn: Attempt, order: RunTask) -> Any:
        """Begin the function. Ranks meet again if it has failed in these processes."""
        assert (turn.generation, turn.failed_attempts) == (self.generation, self._failed)
        self._turn = turn.attempt
        self.ranks = [Rank(self._run, order, rank, self.world_size) for rank in range(self.world_size)]
        self._run.resumed(order.resume, order.number)
        return Unfinished(self._values)

    def _values(self) -> list[int]:
        if self._lost is not None:
            raise self._lost
        return [rank.reports for rank in self.ranks]

    def verify(self, url: str, number: int) -> None:
        self.happens("verify")
        folder = self._run.folder()
        for rank in range(self.world_size):
            folder.verify(folder.require(number), rank, self.world_size)

    def of(self, attempt: int) -> Workers:
        """A call is for the attempt that runs."""
        assert attempt == self._turn
        return self

    def take(self, rank: int, number: int) -> Any:
        """The next report of a rank. All ranks come as far together."""
        self.happens("take")
        self.fails()
        while self.ranks[rank].reports < number and not self.ranks[rank].ended:
            for each in self.ranks:
                self.happens("step")
                each.go_on()
        own = self.ranks[rank]
        said = own.session.take(number)
        if not said.ended and number > own.taken:
            own.taken, own.seconds = number, own.seconds + said.metrics["_time_this_iter_s"]
            assert own.seconds <= time.monotonic() - own.began
        return said

    def commit(self, number: int) -> list[Info]:
        self.happens("commit")
        found = self.ranks[0].session.commit(number).result(WAIT_TIMEOUT)
        self.happens("committed")
        return found


class Worker:
    """One of them."""

    def __init__(self, workers: Workers, rank: int) -> None:
        self._workers, self._rank = workers, rank
        self.take = Method(lambda attempt, number: workers.of(attempt).take(rank, number))
        self.commit = Method(lambda attempt, number: workers.of(attempt).commit(number))
        self.interrupt = Interrupt(workers._run.interrupts)

    def clear(self, url: str) -> None:
        self._workers.happens("clear")
        self._workers._run.folder().clear()

    def checkpoints(self, url: str, below: int | None) -> tuple[list[Info], int]:
        self._workers.happens("look")
        folder = self._workers._run.folder()
        return folder.infos(below), max(folder.numbers(), default=0) + 1


class Method:
    """A method of a worker, whose call runs once."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def call_async(self, *args: Any) -> Ref:
        found: list[Any] = []

        def answer() -> Any:
            if not found:
                found.append(self._run(*args))
            return found[0]

        return Ref(answer)


class Interrupt:
    """A method whose calls are noted at once, as the driver does not wait for them."""

    def __init__(self, noted: list[tuple[int, str]]) -> None:
        self._noted = noted

    def call_async(self, attempt: int, reason: str) -> None:
        self._noted.append((attempt, reason))


class Recorded(TrainingCallback):
    """The rounds, and how often the run has begun and ended."""

    def __init__(self) -> None:
        self.rounds: list[list[dict[str, Any]]] = []
        self.calls: list[str] = []

    def start_training(self, logdir: str, config: Mapping[str, Any]) -> None:
        self.calls.append("start")

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        self.rounds.append(results)

    def finish_training(self, error: BaseException | None) -> None:
        self.calls.append(f"finish {error}")


class Run:
    """One run of a plan."""

    def __init__(self, plan: Plan, logdir: Path) -> None:
        self.plan, self.logdir = plan, logdir
        self.url = f"memory://run-histories/{next(numbered)}"
        self._drawn: dict[tuple[int, int, int], tuple[float, ...]] = {}
        self._counts: dict[tuple[int, int], int] = {}
        self._kept: dict[int, dict[int, list[Sample]]] = {}
        self._before: list[Sample] = []
        self.interrupts: list[tuple[int, str]] = []
        self.workers = Workers(self)
        self.recorded = Recorded()
        scored = {"checkpoint_score_attribute": "score"} if plan.scored else {}
        self.strategy = CheckpointStrategy(plan.keep, **scored)
        task = RunTask(print, [], False, {}, {None: range(plan.size)}, self.url, self.strategy)
        workers: Any = self.workers
        self.iterator = TrainingIterator(
            Attempts(workers),
            task,
            Callbacks([self.recorded, JsonLoggerCallback(), CsvLoggerCallback()]),
            lambda data: data,
            checkpoint=None,
            logdir=str(logdir),
            max_failures=-1,
            retry=(Flaky,),
            elastic=True,
            grow_every=0.0,
        )

    def folder(self) -> Folder:
        """The checkpoints, as a process sees them."""
        found = Folder(self.url)
        found.files = Files(self.url)
        return found

    # What ranks tell.

    def resumed(self, number: Any, following: int) -> None:
        """An attempt begins at this checkpoint."""
        self._before = self._of(number)
        self._kept = {each: some for each, some in self._kept.items() if each < following}
        self._counts = {}

    def _of(self, number: int | None) -> list[Sample]:
        """All samples that were used until a checkpoint."""
        return [each for some in self._kept[number].values() for each in some] if number else []

    def saved(self, number: int, rank: int, samples: Sequence[Sample]) -> None:
        """A rank has saved a checkpoint. Rank 0 has the samples of the attempts before, too."""
        self._kept.setdefault(number, {})[rank] = [*samples, *([] if rank else self._before)]

    def drew(self, rank: int, saves: int, numbers: tuple[float, ...]) -> None:
        """A rank has drawn random numbers, as many times since this checkpoint as it has counted here."""
        count = self._counts[rank, saves] = self._counts.get((rank, saves), 0) + 1
        assert self._drawn.setdefault((rank, saves, count), numbers) == numbers

    # What the driver does.

    def to_its_end(self) -> None:
        """Iterate, and look at all that is there after each round."""
        for results in self.iterator:
            self._check_round(results)
        used = [*self._before, *(each for rank in self.workers.ranks for each in rank.samples)]
        found = self.iterator.get_final_results()
        assert found == [found[0]] * self.workers.world_size
        assert self.recorded.calls == ["start", "finish None"]
        assert sorted(used) == [
            (epoch, each) for epoch in range(self.plan.epochs) for each in range(self.plan.size)
        ]
        self.workers.end()
        self._check_steps()
        self._check_checkpoints()
        each_kind = [[numbers[kind] for numbers in self._drawn.values()] for kind in range(3)]
        assert all(len({*some}) == len(some) for some in each_kind)

    def _check_round(self, results: Sequence[Mapping[str, Any]]) -> None:
        rounds = self.recorded.rounds
        assert [each["_training_iteration"] for each in results] == [len(rounds)] * len(results)
        assert [each["rank"] for each in results] == [*range(len(results))]
        assert len({each["step"] for each in results}) == 1
        assert all(0.0 <= each["_data_wait"] <= 1.0 for each in results)
        lines = (self.logdir / "results.json").read_text().splitlines()
        assert [json.loads(line)[0]["step"] for line in lines] == [some[0]["step"] for some in rounds]
        with (self.logdir / "results.csv").open() as file:
            rows = [(int(row["step"]), int(row["_rank"])) for row in csv.DictReader(file)]
        assert rows == [(each["step"], each["rank"]) for some in rounds for each in some]

    def _check_steps(self) -> None:
        """Steps follow each other, some of them once more after a loss, but none up to a checkpoint."""
        steps = [some[0]["step"] for some in self.recorded.rounds]
        assert steps[0] == 1
        for before, step in itertools.pairwise(steps):
            assert step == before + 1 or (step <= before and (step - 1) % self.plan.save == 0)
        ends = [step for step in steps if step % self.plan.save == 0]
        assert ends == [*range(self.plan.save, steps[-1] + 1, self.plan.save)]

    def _check_checkpoints(self) -> None:
        folder = self.folder()
        infos = folder.infos()
        assert infos == self.iterator.checkpoints
        last = self.recorded.rounds[-1][0]["step"] // self.plan.save
        assert [info.number for info in infos][-1:] == [last][: min(last, 1)]
        if self.plan.keep is not None:
            assert len(infos) == min(self.plan.keep, last)
        for info in infos:
            step = info.number * self.plan.save
            assert load(folder, folder.manifest(info.number), None)["step"] == step
            assert info.score == (score_of(step) if self.plan.scored else None)


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The random numbers of this process are its own again. Checkpoints count when the driver says so."""
    before = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    monkeypatch.setattr(writers, "REPORT_TIMEOUT", 1000.0)
    monkeypatch.setattr(writers, "RANKS_SAVE_POLL_INTERVAL", 0.001)
    # Ranks are lost here, and not the machine.
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_rng_state(before[0])
    numpy.random.set_state(before[1])
    random.setstate(before[2])


KINDS = ("fail", "take", "step", "commit", "committed", "clear", "look", "verify")

events = st.tuples(st.sampled_from(KINDS), st.integers(0, 12))
plans = st.builds(
    Plan,
    size=st.integers(1, 14),
    batch=st.integers(1, 3),
    epochs=st.integers(1, 3),
    save=st.integers(1, 4),
    alone=st.booleans(),
    worlds=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    keep=st.none() | st.integers(1, 2),
    scored=st.booleans(),
    deaths=st.sets(events, min_size=1, max_size=4),
    again=st.booleans(),
)


@examples(100, shrunk=False)
@given(plans)
def test_whatever_is_lost_a_run_is_that_in_which_nothing_is(plan: Plan) -> None:
    logdir = Path(tempfile.mkdtemp(prefix="run-"))
    run = Run(plan, logdir)
    try:
        run.to_its_end()
    finally:
        run.workers.end()
        shutil.rmtree(logdir)


CALM = Plan(6, 1, 2, 2, False, [2], None, False, set(), False)
"""A run of six rounds, with three checkpoints, in which nothing is lost."""

ROUNDS = 6


@pytest.fixture
def calm(tmp_path: Path) -> Iterator[Run]:
    run = Run(CALM, tmp_path)
    yield run
    run.workers.end()


def test_more_ranks_are_asked_for_after_each_round_with_a_checkpoint(calm: Run) -> None:
    calm.to_its_end()
    assert calm.workers.grown == [2, 4, 6]


@pytest.mark.parametrize("rounds", range(ROUNDS + 1))
@pytest.mark.parametrize("how", ["close", "leave"])
def test_a_run_that_is_left_early_is_over_and_its_ranks_are_told(calm: Run, rounds: int, how: str) -> None:
    iterator = calm.iterator
    assert (iterator.latest, iterator.best) == (None, None)
    for _ in range(rounds):
        next(iterator)
    getattr(iterator, how)()
    getattr(iterator, how)()
    assert calm.recorded.calls == ["start", "finish None"][: 2 * (rounds > 0)]
    assert calm.interrupts == [(1, "the run has ended: GeneratorExit")] * 2 * (rounds > 0)
    with pytest.raises(
        TrainingFailed, match="^the run was closed, or the trainer was shut down, while it went on$"
    ):
        next(iterator)
    with pytest.raises(UsageError, match="the run is not finished; iterate to its end, or pass force=True"):
        iterator.get_final_results()
    assert not iterator.is_finished()
    assert iterator.result.metrics.get("step") == (rounds or None)
    assert len(iterator.result.history) == rounds
    paths = [f"{calm.url}/{number:06}" for number in range(1, rounds // 2 + 1)]
    assert iterator.best == iterator.result.checkpoint == (paths[-1] if paths else None)
    assert [info.path for info in iterator.checkpoints] == paths


def test_what_is_left_of_a_run_is_taken_before_its_results(calm: Run) -> None:
    next(calm.iterator)
    assert calm.iterator.get_final_results(force=True) == calm.iterator.get_returns() == [ROUNDS] * 2
    assert calm.iterator.is_finished()
    assert len(calm.recorded.rounds) == ROUNDS
    for end in (calm.iterator.close, calm.iterator.leave):
        end()
        with pytest.raises(StopIteration):
            next(calm.iterator)
    assert calm.iterator.get_final_results() == [ROUNDS] * 2
    assert calm.interrupts == []


@pytest.mark.parametrize("how", ["close", "leave", "raise"])
def test_a_callback_may_close_its_run_and_not_use_the_trainer_beside_it(calm: Run, how: str) -> None:
    error = LookupError("of the callback")

    def ends(results: list[dict[str, Any]]) -> None:
        if how == "raise":
            raise error
        getattr(calm.iterator, how)()

    calm.recorded.handle_result = ends  # type: ignore[method-assign]
    expected: dict[str, tuple[type[Exception], str]] = {
        "close": (TrainingFailed, "the run was closed"),
        "leave": (UsageError, "a callback uses the trainer whose run it follows"),
        "raise": (LookupError, "of the callback"),
    }
    kind, told = expected[how]
    if how == "close":
        next(calm.iterator)
    with pytest.raises(kind, match=told) as raised:
        next(calm.iterator)
    assert calm.iterator.result.error is raised.value
    assert calm.recorded.calls == ["start", f"finish {raised.value}"]
    assert (
        calm.interrupts
        == [(1, f"the run has ended: {'TrainingFailed' if how == 'close' else kind.__name__}")] * 2
    )


def test_a_run_that_another_thread_iterates_is_closed_by_its_next_round(
    calm: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "RUN_CLOSE_TIMEOUT", 0.01)
    inside, closed, ended = threading.Event(), threading.Event(), list[BaseException]()

    def waits(results: list[dict[str, Any]]) -> None:
        inside.set()
        assert closed.wait(WAIT_TIMEOUT)

    def iterate() -> None:
        try:
            calm.iterator.get_final_results(force=True)
        except TrainingFailed as error:
            ended.append(error)

    calm.recorded.handle_result = waits  # type: ignore[method-assign]
    thread = threading.Thread(target=iterate)
    thread.start()
    assert inside.wait(WAIT_TIMEOUT)
    calm.iterator.leave()
    assert not calm.iterator._closed
    calm.iterator.close()
    closed.set()
    thread.join(WAIT_TIMEOUT)
    assert [str(error) for error in ended] == [
        "the run was closed, or the trainer was shut down, while it went on"
    ]


@pytest.mark.parametrize(
    "error", [Flaky("of the callback"), WorkerLost("judge:0 was lost", worker="judge:0")], ids=["own", "loss"]
)
def test_an_error_of_a_callback_ends_a_run_that_survives_such_errors_of_its_function(
    calm: Run, error: Exception
) -> None:
    def raises(results: list[dict[str, Any]]) -> None:
        raise error

    calm.recorded.handle_result = raises  # type: ignore[method-assign]
    with pytest.raises(type(error)) as raised:
        calm.iterator.get_final_results(force=True)
    assert raised.value is error
    with pytest.raises(TrainingFailed, match="the run has failed: ") as again:
        calm.iterator.get_final_results(force=True)
    assert again.value.__cause__ is error
    assert calm.recorded.calls == ["start", f"finish {error}"]
    assert len(calm.interrupts) == 2


def test_the_error_of_a_program_that_leaves_its_run_is_that_of_the_job(calm: Run) -> None:
    next(calm.iterator)
    trainer: Any = train.Trainer(1, "none")
    trainer._run, trainer._attempts = calm.iterator, calm.iterator._attempts
    with pytest.raises(LookupError), trainer:
        raise LookupError
    assert calm.workers.error == "LookupError"


def test_workers_end_though_a_callback_of_the_run_that_was_left_raises(calm: Run) -> None:
    def raises(error: BaseException | None) -> None:
        raise OSError("no space")

    calm.recorded.finish_training = raises  # type: ignore[method-assign]
    next(calm.iterator)
    trainer: Any = train.Trainer(1, "none")
    stopped: list[str] = []
    trainer._run, trainer._finalizer = calm.iterator, lambda: stopped.append("workers")
    with pytest.raises(OSError, match="no space"):
        trainer.shutdown()
    assert stopped == ["workers"]


def test_values_that_checkpoints_do_not_have_are_told_once(
    calm: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("unirun.train.lockstep.dropped", lambda said: "'epoch' of rank 1 differs")
    calm.to_its_end()
    assert capsys.readouterr().err.count("unirun: 'epoch' of rank 1 differs") == 1
