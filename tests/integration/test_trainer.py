"""A function on many ranks, driven from this process: results, reports, errors, kills, checkpoints. Real workers, which
most tests share, as they stay warm."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from tests.integration.harness import Script, Unirun, gone
from tests.waiting import WAIT_TIMEOUT
from unirun import train
from unirun.errors import (
    EncodingError,
    PlacementError,
    RemoteTraceback,
    TrainingFailed,
    UsageError,
    WorkerLost,
)
from unirun.train import Trainer, TrainingCallback

pytestmark = pytest.mark.usefixtures("warm_functions")

Results = list[dict[str, Any]]


class Heard(TrainingCallback):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.rounds: list[Results] = []
        self.error: BaseException | str | None = "not finished"
        self.config: Mapping[str, Any] = {}

    def start_training(self, logdir: str, config: Mapping[str, Any]) -> None:
        self.config, self.logdir = config, logdir

    def handle_result(self, results: Results) -> None:
        self.rounds.append(results)

    def finish_training(self, error: BaseException | None) -> None:
        self.error = error

    def of(self, name: str) -> list[Any]:
        """A metric of rank 0, report by report."""
        return [results[0][name] for results in self.rounds]


class TestARun:
    def test_results_are_in_rank_order_and_the_process_group_works(self, trainer: Trainer) -> None:
        def function(config: dict[str, Any]) -> Any:
            total = torch.tensor([config["base"] + train.world_rank()])
            dist.all_reduce(total)
            return train.world_rank(), train.world_size(), train.local_rank(), total.item()

        assert trainer.run(function, config={"base": 10}) == [(n, 3, n, 33) for n in range(3)]

    def test_reports_of_all_ranks_come_together_with_what_is_added(self, trainer: Trainer) -> None:
        def function() -> str:
            for step in range(3):
                train.report(step=step, rank=train.world_rank())
            return "done"

        heard = Heard()
        assert trainer.run(function, callbacks=[heard]) == ["done"] * 3
        assert [[each["rank"] for each in results] for results in heard.rounds] == [[0, 1, 2]] * 3
        assert (heard.of("step"), heard.of("_training_iteration")) == ([0, 1, 2], [1, 2, 3])
        assert heard.error is None
        assert Path(heard.logdir).is_dir()

    def test_an_iterator_gives_the_reports_one_after_the_other(self, trainer: Trainer) -> None:
        def function(config: dict[str, int]) -> int:
            for step in range(config["steps"]):
                train.report(step=step)
            return train.world_rank()

        run = trainer.run_iterator(function, config={"steps": 4})
        assert next(run)[2]["step"] == 0
        assert not run.is_finished()
        with pytest.raises(UsageError, match="the run is not finished"):
            run.get_final_results()
        assert [results[0]["step"] for results in run] == [1, 2, 3]
        assert run.is_finished()
        assert run.get_final_results() == [0, 1, 2]
        assert trainer.run_generator(function, config={"steps": 4}).get_final_results(force=True) == [0, 1, 2]

    def test_a_run_that_is_left_early_ends_and_the_next_one_works(self, trainer: Trainer) -> None:
        def endless() -> None:
            while True:
                train.report(x=1)

        assert next(trainer.run_iterator(endless))[0]["x"] == 1
        assert trainer.run(lambda: train.world_rank()) == [0, 1, 2]
        heard = Heard()
        for results in (run := trainer.run_iterator(endless, callbacks=[heard])):
            assert results[0]["x"] == 1
            break
        assert trainer.execute(train.world_rank) == [0, 1, 2]
        assert heard.error is None
        with pytest.raises(TrainingFailed, match="the run was closed"):
            next(run)

    def test_lambdas_closures_and_classes_of_this_module_are_sent_by_value(self, trainer: Trainer) -> None:
        captured = {"of": "here"}
        assert trainer.run(lambda: captured["of"]) == ["here"] * 3

    def test_a_model_that_is_returned_is_without_the_wrapper_of_the_ranks(self, trainer: Trainer) -> None:
        def function() -> Any:
            torch.manual_seed(0)
            model = train.prepare_model(torch.nn.Linear(2, 1))
            assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
            return model, {"nets": [model], "rank": train.world_rank()}

        for results in (trainer.run(function), trainer.execute(function)):
            for rank, (model, more) in enumerate(results):
                assert type(model) is type(more["nets"][0]) is torch.nn.Linear
                assert model(torch.ones(1, 2)).shape == (1, 1)
                assert more["rank"] == rank

    def test_workers_are_the_same_processes_from_run_to_run(self, trainer: Trainer) -> None:
        assert trainer.run(os.getpid) == trainer.run(os.getpid) == trainer.execute(os.getpid)

    def test_print_shows_a_line_for_each_worker(self, trainer: Trainer) -> None:
        lines = str(trainer).splitlines()
        assert lines[0].endswith("3 workers with 1 CPU each, backend torch")
        assert lines[1].split() == ["RANK", "NODE", "PID", "DEVICES", "CPU", "MEMORY", "STATE"]
        assert [line.split()[2] for line in lines[2:]] == [*map(str, trainer.execute(os.getpid))]
        assert (
            str(Trainer((2, float("inf"))))
            == "Trainer of 2 to any number of workers with 1 CPU each, backend torch, not started"
        )

    def test_processes_that_a_loader_keeps_end_with_the_run(self, trainer: Trainer) -> None:
        """Helpers of a loader that ended with their worker would make torch print a traceback for each."""

        def function() -> int:
            data = TensorDataset(torch.arange(12))
            loader = train.prepare_data_loader(
                DataLoader(data, 2, num_workers=1, persistent_workers=True, prefetch_factor=1)
            )
            assert len([*loader]) == 2
            return len(psutil.Process().children())

        processes = [psutil.Process(pid) for pid in trainer.execute(os.getpid)]
        assert trainer.run(function) == [1, 1, 1]
        assert [each.children() for each in processes] == [[], [], []]


class TestErrors:
    def test_an_exception_of_one_rank_ends_the_run_while_the_others_wait_in_a_collective(
        self, trainer: Trainer
    ) -> None:
        def function() -> None:
            if train.world_rank() == 1:
                raise LookupError("this rank has no data")
            dist.barrier()

        heard, began = Heard(), time.monotonic()
        with pytest.raises(LookupError, match="this rank has no data") as raised:
            trainer.run(function, callbacks=[heard])
        assert time.monotonic() - began < WAIT_TIMEOUT
        assert heard.error is raised.value
        assert isinstance(raised.value.__cause__, RemoteTraceback)
        assert 'raise LookupError("this rank has no data")' in str(raised.value.__cause__)
        assert trainer.run(lambda: train.world_size()) == [3, 3, 3]

    @pytest.mark.parametrize("code", [0, 3])
    def test_leaving_the_process_is_a_failure(self, trainer: Trainer, code: int) -> None:
        def function() -> None:
            if train.world_rank() == 2:
                sys.exit(code)
            time.sleep(600)

        with pytest.raises(TrainingFailed, match=rf"called sys.exit\({code}\) in rank 2"):
            trainer.run(function)
        assert trainer.run(train.world_rank) == [0, 1, 2]

    def test_ranks_that_report_unequally_often_are_named(self, trainer: Trainer) -> None:
        def function() -> None:
            for _ in range(2 + (train.world_rank() == 1)):
                train.report(x=1)

        with pytest.raises(TrainingFailed, match=r"ranks? [02,]+ 2 times, rank 1 at least 3 times"):
            trainer.run(function)

    @pytest.mark.parametrize("when", ["start_training", "handle_result", "finish_training"])
    def test_a_callback_that_raises_ends_the_run_with_its_own_traceback(
        self, trainer: Trainer, when: str
    ) -> None:
        class Bad(Heard):
            pass

        def fail(self: Bad, *args: object) -> None:
            raise RuntimeError(f"a bug in {when}")

        setattr(Bad, when, fail)
        heard = Heard()
        with pytest.raises(RuntimeError, match=f"a bug in {when}") as raised:
            trainer.run(lambda: train.report(x=1), callbacks=[heard, Bad()])
        assert any(entry.name == "fail" for entry in raised.traceback)
        assert (heard.error is raised.value) or when == "finish_training"
        assert trainer.run(train.world_rank) == [0, 1, 2]

    def test_only_what_the_function_raises_is_retried(self, home: Unirun) -> None:
        class Using(Heard):
            error_of: type[Exception] | None = OSError

            def handle_result(self, results: Results) -> None:
                super().handle_result(results)
                if self.error_of is not None:
                    raise self.error_of("a callback cannot write")
                own.execute(train.world_rank)

        def calling_others() -> None:
            raise WorkerLost("another job has lost one", worker="actor:0")

        with Trainer(1, backend="none", retry_exceptions=[OSError]) as own:
            heard = Using()
            with pytest.raises(OSError, match="a callback cannot write"):
                own.run(lambda: train.report(x=1), callbacks=[heard])
            assert len(heard.rounds) == 1
            heard.error_of = None
            with pytest.raises(UsageError, match="a callback uses the trainer whose run it follows"):
                own.run(lambda: train.report(x=1), callbacks=[heard])
            with pytest.raises(WorkerLost, match="another job has lost one"):
                own.run(calling_others)

    def test_ctrl_c_ends_the_run_and_keeps_the_trainer(self, trainer: Trainer) -> None:
        def function() -> None:
            train.report(x=1)
            while True:
                pass

        class Interrupting(Heard):
            def handle_result(self, results: Results) -> None:
                threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,)).start()

        heard = Interrupting()
        before = trainer.execute(os.getpid)
        with pytest.raises(KeyboardInterrupt):
            trainer.run(function, callbacks=[heard])
        assert isinstance(heard.error, KeyboardInterrupt)
        assert trainer.run(os.getpid) == before

    def test_what_cannot_be_sent_to_the_workers_is_named(self, trainer: Trainer) -> None:
        lock = threading.Lock()
        with pytest.raises(
            EncodingError, match="^the function <lambda> uses `lock`, line [0-9]+, cannot be sent"
        ):
            trainer.run(lambda: lock.acquire())
        with pytest.raises(EncodingError, match=r"^config\['lock'\] cannot be sent: TypeError"):
            trainer.run(lambda config: None, {"lock": lock})
        with pytest.raises(EncodingError, match=r"^dataset\[1\] cannot be sent: TypeError"):
            trainer.run(lambda: None, dataset=[1, lock])
        with pytest.raises(EncodingError, match=r"^argument 1 of `print` cannot be sent: TypeError"):
            trainer.execute(print, lock)
        assert trainer.run(train.world_rank) == [0, 1, 2]

    def test_what_the_function_returns_must_be_sent(self, trainer: Trainer) -> None:
        with pytest.raises(Exception, match="cannot pickle"):
            trainer.run(lambda: threading.Lock())


def step_by_step(config: dict[str, Any]) -> int:
    """Saves and reports each step; at some, a rank is killed once."""
    state = train.load_checkpoint()
    first = state["step"] + 1 if state else 0
    total = torch.zeros(1)
    for step in range(first, config["steps"]):
        dist.all_reduce(total)
        mark = Path(config["marks"], str(step))
        if (
            config["kill"].get(step) == train.world_rank()
            and config["where"] == "before"
            and not mark.exists()
        ):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        train.save_checkpoint(step=step, total=total)
        if (
            config["kill"].get(step) == train.world_rank()
            and config["where"] == "between"
            and not mark.exists()
        ):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        train.report(step=step, world=train.world_size())
        if (
            config["kill"].get(step) == train.world_rank()
            and config["where"] == "after"
            and not mark.exists()
        ):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return int(first)


class TestKills:
    @pytest.mark.parametrize("where", ["before", "between", "after"])
    def test_each_step_is_reported_and_saved_once_though_ranks_are_killed_at_every_one(
        self, trainer: Trainer, tmp_path: Path, where: str
    ) -> None:
        """A rank is killed before a checkpoint, between it and the report that follows, or after that."""
        steps = 6
        kill = {step: (step + 1) % 3 for step in range(steps - (where == "after"))}
        heard = Heard()
        config = {"steps": steps, "kill": kill, "marks": str(tmp_path), "where": where}
        trainer.run(step_by_step, config=config, callbacks=[heard])
        assert heard.of("step") == [*range(steps)]
        assert heard.of("_training_iteration") == [*range(1, steps + 1)]
        assert heard.error is None
        assert trainer.latest_checkpoint is not None
        saved = sorted(path.name for path in Path(trainer.latest_checkpoint).parent.iterdir())
        assert saved == [f"{number:06}" for number in range(1, steps + 1)]

    def test_no_report_is_lost_though_ranks_run_ahead_of_the_driver(self, trainer: Trainer) -> None:
        """Rank 1 dies when rank 0 has made reports that are not complete."""

        def function() -> None:
            state = train.load_checkpoint()
            for step in range(state["step"] if state else 0, 6):
                if step == 3 and state is None and train.world_rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                train.save_checkpoint(step=step + 1)
                train.report(step=step)

        heard = Heard()
        trainer.run(function, callbacks=[heard])
        assert heard.of("step") == [0, 1, 2, 3, 4, 5]

    def test_survivors_keep_their_processes(self, trainer: Trainer, tmp_path: Path) -> None:
        before = trainer.execute(os.getpid)
        config = {"steps": 2, "kill": {1: 1}, "marks": str(tmp_path), "where": "before"}
        trainer.run(step_by_step, config=config)
        after = trainer.execute(os.getpid)
        assert [before[0] == after[0], before[1] == after[1], before[2] == after[2]] == [True, False, True]

    def test_a_run_that_has_lost_too_many_workers_fails_and_the_trainer_stays(self, home: Unirun) -> None:
        def dies() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def fails() -> None:
            raise OSError("the disk is away")

        heard = Heard()
        with Trainer(2, max_failures=1, retry_exceptions=[OSError]) as trainer:
            with pytest.raises(TrainingFailed, match="that is failure 2, and max_failures is 1"):
                trainer.run(dies, callbacks=[heard])
            assert isinstance(heard.error, TrainingFailed)
            # Those exceptions count as losses do.
            with pytest.raises(OSError, match="the disk is away"):
                trainer.run(fails)
            assert trainer.run(train.world_rank) == [0, 1]

    def test_a_loss_says_how_the_process_ended(
        self, trainer: Trainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def function(config: dict[str, Any]) -> None:
            for end in range(3):
                if train.world_rank() == 1 and not (mark := Path(config["marks"], str(end))).exists():
                    mark.touch()
                    if end == 2:
                        os._exit(7)
                    os.kill(os.getpid(), signal.SIGSEGV if end else signal.SIGKILL)

        trainer.run(function, {"marks": tmp_path})
        shown = capfd.readouterr().err
        assert "failure 1 of 20: worker:1 was killed by SIGKILL, perhaps for lack of memory; the run" in shown
        assert "failure 2 of 20: worker:1 was killed by SIGSEGV; the run goes on" in shown
        assert "failure 3 of 20: worker:1 ended with exit code 7; the run goes on" in shown

        def dies() -> None:
            os.kill(os.getpid(), signal.SIGABRT)

        with pytest.raises(WorkerLost, match=r"^worker:2 was killed by SIGABRT; see unirun logs train-\w+$"):
            trainer.execute_single(2, dies)

    def test_a_process_of_a_loader_that_dies_is_a_loss_of_its_rank(
        self, trainer: Trainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def function(config: dict[str, Path]) -> list[int]:
            train.load_checkpoint()
            for batch in train.get_dataset_shard().to_torch(2, num_workers=1, prefetch_factor=1):
                train.save_checkpoint()
                train.report(samples=batch.tolist())
                if train.world_rank() == 1 and not config["mark"].exists():
                    config["mark"].touch()
                    (loader,) = psutil.Process().children()
                    loader.kill()
                    time.sleep(60.0)
            return [train.world_rank()]

        heard = Heard()
        assert trainer.run(function, {"mark": tmp_path / "mark"}, [heard], range(60)) == [[0], [1], [2]]
        used = [sample for results in heard.rounds for each in results for sample in each["samples"]]
        assert sorted(used) == [*range(60)]
        assert (
            "failure 1 of 20: worker:1 lost a process of a DataLoader, which was killed by SIGKILL, perhaps for lack of "
            "memory; the run goes on" in capfd.readouterr().err
        )

    def test_a_rank_that_dies_between_two_runs_costs_nothing(self, trainer: Trainer) -> None:
        pids = trainer.execute(os.getpid)
        os.kill(pids[0], signal.SIGKILL)
        gone(pids[0], 10)
        heard = Heard()
        trainer.run(lambda: train.report(x=1), callbacks=[heard])
        assert len(heard.rounds) == 1

    def test_a_run_goes_on_from_the_checkpoint_that_it_is_given(
        self, trainer: Trainer, tmp_path: Path
    ) -> None:
        config = {"steps": 3, "kill": {}, "marks": str(tmp_path), "where": ""}
        trainer.run(step_by_step, config=config)
        latest = trainer.latest_checkpoint
        assert trainer.run(step_by_step, config={**config, "steps": 5}, checkpoint=latest) == [3, 3, 3]
        assert trainer.run(step_by_step, config={**config, "steps": 5}, checkpoint={"step": 3}) == [4, 4, 4]


class TestEqualEnds:
    """Three equal ends without progress between them end the run, with one message."""

    def test_three_equal_ends_of_the_function_end_the_run(self, trainer: Trainer) -> None:
        def function() -> None:
            if train.world_rank():
                os._exit(3)
            dist.barrier()

        with pytest.raises(TrainingFailed) as raised:
            trainer.run(function)
        assert re.fullmatch(
            r"worker:[12] ended with exit code 3; 3 times in a row in function, without a report or a checkpoint "
            r"between; see unirun logs train-\w+ for their output",
            str(raised.value),
        )
        assert trainer.run(train.world_rank) == [0, 1, 2]

    def test_a_checkpoint_without_a_report_is_progress(self, home: Unirun, tmp_path: Path) -> None:
        def function(config: dict[str, str]) -> int:
            attempts = Path(config["attempts"])
            with attempts.open("a") as file:
                file.write(".")
            if (attempt := len(attempts.read_text())) == 3:
                train.save_checkpoint(attempt=attempt)
                while not [*Path(config["logdir"]).glob("run_*/checkpoints/*/checkpoint.json")]:
                    time.sleep(0.01)
            if attempt <= 3:
                os._exit(3)
            return attempt

        with Trainer(1, "none", max_failures=-1, logdir=tmp_path / "logs") as own:
            config = {"attempts": str(tmp_path / "attempts"), "logdir": str(tmp_path / "logs")}
            assert own.run(function, config=config) == [4]

    def test_of_an_exception_that_is_retried(self, home: Unirun) -> None:
        def function() -> None:
            raise OSError("no data")

        with Trainer(1, "none", max_failures=-1, retry_exceptions=[OSError]) as own:
            with pytest.raises(OSError, match="no data") as raised:
                own.run(function)
            assert raised.value.__notes__[-1] == (
                "unirun: 3 times in a row in function, without a report or a checkpoint between"
            )
            own.start(initialization_hook=lambda: None)
            assert own.run(train.world_rank) == [0]

            def leaves() -> None:
                os._exit(4)

            with pytest.raises(
                TrainingFailed,
                match="worker:0 ended with exit code 4, 3 times in a row, in the initialization hook leaves; see unirun",
            ):
                own.start(initialization_hook=leaves)

    def test_three_equal_ends_of_a_backend_end_the_run(
        self, home: Unirun, script: Script, tmp_path: Path
    ) -> None:
        script(
            """
            import os
            from unirun.train import NoBackend

            class Leaves(NoBackend):
                def on_start(self, rank, world_size):
                    os._exit(5)
            """,
            "leaving.py",
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(tmp_path)
            with (
                Trainer(1, "leaving:Leaves") as own,
                pytest.raises(
                    TrainingFailed,
                    match="a rank was started 3 times and does not come up: on_start or on_failure of the backend "
                    "'leaving:Leaves' ends it: worker:0 ended with exit code 5; see unirun logs",
                ),
            ):
                own.start()


class TestBeforeWorkersStart:
    def test_mistakes_are_told_at_once(self, home: Unirun, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        began = time.monotonic()
        with pytest.raises(UsageError, match="logdir .* cannot be written"):
            Trainer(logdir=tmp_path / "file" / "logs").run(lambda: None)
        for arguments in ({"num_workers": 0}, {"backend": "horovod"}, {"resources_per_worker": {"GPU": 1}}):
            with pytest.raises(UsageError):
                Trainer(**arguments)
        for function in (5, lambda a, b: None, Heard):
            with pytest.raises(UsageError):
                Trainer().run(function)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"callbacks\[0\] is the class Heard"):
            Trainer().run(lambda: None, callbacks=[Heard])  # type: ignore[list-item]
        with pytest.raises(UsageError, match="is no checkpoint"):
            Trainer().run(lambda: None, checkpoint="nowhere")
        with pytest.raises(UsageError, match="there is no checkpoint .*/000001"):
            Trainer().run(lambda: None, checkpoint=tmp_path / "000001")
        assert time.monotonic() - began < WAIT_TIMEOUT

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_gpus_that_are_not_there_are_told(self, home: Unirun) -> None:
        with pytest.raises(PlacementError, match="2 cuda slots are needed, 0 are there"):
            Trainer(2, use_gpu=True).start()


DRIVER = """
    import os, sys
    from unirun.train import Trainer, report

    def function():
        report(pid=os.getpid())
        while True:
            pass

    if __name__ == "__main__":
        trainer = Trainer(2)
        for results in trainer.run_iterator(function):
            print("pids", *(each["pid"] for each in results), flush=True)
"""


def test_a_driver_that_is_killed_leaves_no_worker(unirun: Unirun, script: Script) -> None:
    driver = unirun.start_program([sys.executable, str(script(DRIVER))])
    (line,) = driver.lines(r"pids ([\d ]+)")
    os.kill(driver.pid, signal.SIGKILL)
    for pid in map(int, line.split()):
        assert gone(pid, 5)
    unirun.assert_nothing_left()
