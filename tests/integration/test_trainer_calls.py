"""Calls of a trainer beside runs, and its interruption and end. Real workers, which most tests share."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.harness import Unirun
from tests.waiting import WAIT_TIMEOUT
from unirun import train
from unirun.errors import TrainingFailed, UsageError
from unirun.roles.interruption import INTERRUPT
from unirun.train import Trainer

pytestmark = pytest.mark.usefixtures("warm_functions")


def summed() -> float:
    """A collective of all ranks."""
    total = torch.tensor(1.0 + train.world_rank())
    dist.all_reduce(total)
    return total.item()


def interrupt_when(path: Path) -> threading.Thread:
    """Ctrl-C, once there is such a file."""

    def watch() -> None:
        while not path.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


class TestExecute:
    def test_a_function_finds_its_rank_and_the_group_as_in_a_run(self, trainer: Trainer) -> None:
        assert trainer.execute(train.world_rank) == [0, 1, 2]
        assert trainer.execute(summed) == [6, 6, 6]
        assert trainer.execute_single(1, train.world_rank) == 1
        assert trainer.execute_async(train.world_size).result() == [3, 3, 3]

    def test_it_cannot_report(self, trainer: Trainer) -> None:
        with pytest.raises(UsageError, match=r"report\(\) was called in a function that is no run"):
            trainer.execute(lambda: train.report(x=1))
        with pytest.raises(UsageError, match=r"save_checkpoint\(\) was called in a function that is no run"):
            trainer.execute_single(0, lambda: train.save_checkpoint(x=1))

    @pytest.mark.parametrize("way", ["execute", "execute_async"])
    def test_when_one_rank_fails_the_others_are_interrupted_and_the_group_works_again(
        self, trainer: Trainer, way: str
    ) -> None:
        def function() -> None:
            if train.world_rank() == 1:
                raise KeyError("one")
            dist.barrier()

        pids = trainer.execute(os.getpid)
        calls: dict[str, Callable[[Callable[[], None]], object]] = {
            "execute": trainer.execute,
            "execute_async": lambda f: trainer.execute_async(f).result(),
        }
        with pytest.raises(KeyError, match="one"):
            calls[way](function)
        assert trainer.execute(summed) == [6, 6, 6]
        assert trainer.run(summed) == [6, 6, 6]
        assert trainer.execute(os.getpid) == pids

    def test_after_a_run_that_has_failed_the_group_works(self, trainer: Trainer) -> None:
        with pytest.raises(ZeroDivisionError):
            trainer.run(lambda: 1 // train.world_rank() or dist.barrier())
        assert trainer.execute(summed) == [6, 6, 6]

    def test_a_run_waits_for_what_was_called_before(self, trainer: Trainer) -> None:
        def function() -> int:
            time.sleep(0.3)
            return train.world_rank()

        ref = trainer.execute_async(function)
        assert trainer.run(train.world_size) == [3, 3, 3]
        assert ref.done()
        assert ref.result() == [0, 1, 2]

    def test_what_waits_in_the_queue_is_not_interrupted_with_what_comes_after_it(
        self, trainer: Trainer, tmp_path: Path
    ) -> None:
        def slow() -> int:
            while not (tmp_path / "interrupted").exists():
                time.sleep(0.01)
            return train.world_rank()

        first, queued = trainer.execute_async(slow), trainer.execute_async(train.world_size)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            trainer.execute(time.sleep, 60)
        (tmp_path / "interrupted").touch()
        assert (first.result(), queued.result()) == ([0, 1, 2], [3, 3, 3])
        assert trainer.run(summed) == [6, 6, 6]


class TestCtrlC:
    @pytest.mark.parametrize("way", ["execute", "execute_single", "run"])
    def test_it_ends_the_call_and_keeps_the_workers(self, trainer: Trainer, way: str, tmp_path: Path) -> None:
        def function() -> None:
            (tmp_path / str(train.world_rank())).touch()
            time.sleep(600)

        pids = trainer.execute(os.getpid)
        watch = interrupt_when(tmp_path / "1")
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            trainer.execute_single(1, function) if way == "execute_single" else getattr(trainer, way)(
                function
            )
        watch.join()
        assert trainer.run(summed) == [6, 6, 6]
        assert trainer.execute(os.getpid) == pids
        assert time.monotonic() - began < WAIT_TIMEOUT

    def test_it_ends_a_function_that_has_missed_the_first_signal(
        self, trainer: Trainer, tmp_path: Path
    ) -> None:
        """As one does that is about to sleep: a signal ends only what has begun."""

        def function() -> None:
            usual = signal.getsignal(INTERRUPT)
            signal.signal(INTERRUPT, lambda number, frame: signal.signal(number, usual))
            (tmp_path / "1").touch()
            time.sleep(600)

        pids = trainer.execute(os.getpid)
        interrupt_when(tmp_path / "1")
        with pytest.raises(KeyboardInterrupt):
            trainer.execute_single(1, function)
        assert trainer.execute(os.getpid) == pids

    def test_a_module_that_is_being_imported_then_is_imported_whole(
        self, trainer: Trainer, tmp_path: Path
    ) -> None:
        (tmp_path / "slow_to_import.py").write_text(
            "import pathlib, time\n"
            f"pathlib.Path({str(tmp_path)!r}, 'begun').touch()\n"
            "for _ in range(50): time.sleep(0.01)\n"
            "value = 5\n"
        )

        def function() -> int:
            import sys

            sys.path.insert(0, str(tmp_path))
            import slow_to_import  # type: ignore[import-not-found]

            time.sleep(60 if not (tmp_path / "over").exists() else 0)
            found: int = slow_to_import.value
            return found

        pids = trainer.execute(os.getpid)
        watch = interrupt_when(tmp_path / "begun")
        with pytest.raises(KeyboardInterrupt):
            trainer.run(function)
        watch.join()
        (tmp_path / "over").touch()
        assert trainer.run(function) == [5, 5, 5]
        assert trainer.execute(os.getpid) == pids


class TestClasses:
    def test_objects_are_made_in_all_ranks_and_called(self, trainer: Trainer) -> None:
        class Counter:
            def __init__(self, start: int) -> None:
                self.value = start

            def add(self, number: int) -> int:
                self.value += number
                return self.value

        trainer.start(Counter, 10)
        assert trainer.execute(lambda counter: counter.add(1)) == [11, 11, 11]
        assert trainer.execute_single(2, lambda counter, n: counter.add(n), 5) == 16
        assert trainer.execute_async(lambda counter: counter.value).result() == [11, 11, 16]

    def test_they_are_made_again_in_all_ranks_when_one_was_lost(self, trainer: Trainer) -> None:
        class Summing:
            def __init__(self) -> None:
                self.total = summed()

        trainer.start(Summing)
        pids = trainer.execute(lambda _: os.getpid())
        os.kill(pids[2], signal.SIGKILL)
        assert trainer.execute(lambda made: made.total) == [6, 6, 6]
        after = trainer.execute(lambda _: os.getpid())
        assert (after[:2], after[2] == pids[2]) == (pids[:2], False)

    def test_a_hook_is_called_also_in_who_comes_in_the_place_of_another(self, trainer: Trainer) -> None:
        def hook() -> None:
            os.environ["PREPARED"] = "yes"

        trainer.start(initialization_hook=hook)
        pids = trainer.execute(os.getpid)
        os.kill(pids[1], signal.SIGKILL)
        assert trainer.run(lambda: os.environ["PREPARED"]) == ["yes"] * 3


class TestTheEnd:
    @pytest.mark.parametrize("reporting", [True, False])
    def test_a_trainer_that_another_thread_shuts_down_ends_its_run(
        self, home: Unirun, reporting: bool
    ) -> None:
        def function() -> None:
            while True:
                train.report(x=1)
                if not reporting:
                    time.sleep(600)

        trainer = Trainer(2)
        run = trainer.run_iterator(function)
        next(run)
        (begun, errors) = threading.Event(), list[TrainingFailed]()

        def iterate() -> None:
            try:
                begun.set()
                for _ in run:
                    continue
            except TrainingFailed as error:
                errors.append(error)

        thread = threading.Thread(target=iterate)
        thread.start()
        begun.wait()
        trainer.shutdown()
        thread.join(WAIT_TIMEOUT)
        assert not thread.is_alive()
        (error,) = errors
        assert "was shut down" in str(error)
        assert str(trainer).endswith("not started")

    def test_a_callback_may_shut_the_trainer_down(self, home: Unirun) -> None:
        class Closing(train.TrainingCallback):
            def handle_result(self, results: list[dict[str, Any]]) -> None:
                own.shutdown()

        def function() -> None:
            while True:
                train.report(x=1)

        own = Trainer(1, backend="none")
        with pytest.raises(TrainingFailed, match="was shut down"):
            own.run(function, callbacks=[Closing()])
