"""A trainer that is used in one way after another: a run that was left is over then, and the hook is the one given last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from unirun.errors import TrainingFailed, UsageError
from unirun.train import Trainer
from unirun.train.arguments import hold, next_run, release
from unirun.train.checkpoints import Manifest


class Job:
    """The workers of a trainer, which note what they are prepared with and what they call."""

    name, lives = "job", True

    error = ""

    def __init__(self) -> None:
        self.workers, self.prepared = self, list[tuple[Any, Any]]()
        self.called: list[str] = []
        self.stopped = 0

    def prepare_with(self, hook: Any, kind: Any) -> None:
        self.prepared.append((hook, kind))

    def ready(self, *, idle: bool) -> None:
        self.called.append("ready")

    def execute(self, *called: Any) -> list[Any]:
        self.called.append("execute")
        return []

    execute_async = execute_single = execute

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def trainer(tmp_path: Path, job: Job) -> Trainer:
    """One whose workers are up."""
    made: Any = Trainer(1, "none", logdir=tmp_path)
    made._attempts, made.logdir, made._finalizer = job, str(tmp_path), job.stop
    found: Trainer = made
    return found


Use = Callable[[Trainer], object]

USES: dict[str, Use] = {
    "start": lambda trainer: trainer.start(),
    "execute": lambda trainer: trainer.execute(print),
    "execute_async": lambda trainer: trainer.execute_async(print),
    "execute_single": lambda trainer: trainer.execute_single(0, print),
    "run": lambda trainer: trainer.run_iterator(print),
    "shutdown": lambda trainer: trainer.shutdown(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("before", ["none", "another run"])
def test_a_run_that_was_left_is_over_when_the_trainer_is_used_again(
    trainer: Trainer, use: str, before: str
) -> None:
    if before == "another run":
        trainer.run_iterator(print)
    run = trainer.run_iterator(print)
    USES[use](trainer)
    with pytest.raises(TrainingFailed, match="the run was closed"):
        next(run)
    # Nothing of it is in use any more.
    lock = run._lock
    assert lock is not None
    assert lock.closed
    trainer.shutdown()


def test_a_callback_of_a_run_does_not_use_its_trainer(trainer: Trainer) -> None:
    told: list[str] = []

    class Uses(SimpleNamespace):
        """A callback that uses the trainer."""

        def start_training(self, logdir: str, config: object) -> None:
            for name, use in USES.items():
                if name == "shutdown":
                    continue
                with pytest.raises(UsageError, match="a callback uses the trainer whose run it follows"):
                    use(trainer)
                told.append(name)
            raise LookupError

        def handle_result(self, results: object) -> None: ...

        def finish_training(self, error: object) -> None: ...

    callback: Any = Uses()
    with pytest.raises(LookupError):
        trainer.run(print, callbacks=[callback])
    assert len(told) == len(USES) - 1
    trainer.shutdown()


@pytest.mark.parametrize(
    ("error", "told"), [(SystemExit(), ""), (SystemExit(0), ""), (SystemExit(3), "SystemExit")], ids=repr
)
def test_a_program_that_leaves_its_trainer_by_sys_exit_has_failed_if_its_exit_code_says_so(
    trainer: Trainer, job: Job, error: SystemExit, told: str
) -> None:
    with pytest.raises(SystemExit), trainer:
        raise error
    assert (job.error, job.stopped) == (told, 1)


def test_workers_that_are_up_are_prepared_with_what_was_given_last(trainer: Trainer, job: Job) -> None:
    trainer.start(initialization_hook=print)
    trainer.start()
    trainer.start(dict, a=1)
    assert [hook for hook, _ in job.prepared] == [print, None]
    assert job.prepared[0][1] is None
    assert job.prepared[1][1]() == {"a": 1}
    assert job.called == ["ready"] * 3
    trainer.shutdown()
    trainer.shutdown()
    assert job.stopped == 1


def test_a_run_that_another_program_has_is_gone_on_with_once_it_is_free(trainer: Any, tmp_path: Path) -> None:
    trainer._resume = True
    url, _ = next_run(str(tmp_path))
    held = hold(url)
    with pytest.raises(UsageError, match="is in use"):
        trainer.run_iterator(print)
    release(held)
    assert trainer.run_iterator(print).url == url
    assert trainer.run_iterator(print).url != url
    trainer.shutdown()


def test_a_run_that_a_program_before_has_left_is_told_with_the_first_run_alone(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    def saves(run: Path) -> None:
        checkpoint = run / "checkpoints" / "000001"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.pt").write_bytes(b"1")
        manifest = Manifest(1, 1, False, {"state.pt": (1, 0)})
        (checkpoint / "checkpoint.json").write_bytes(msgspec.json.encode(manifest))

    saves(Path(trainer.logdir, "run_001"))
    for _ in range(3):
        # Each is left with a checkpoint, too.
        saves(Path(trainer.run_iterator(print).url))
    trainer.shutdown()
    assert capsys.readouterr().err.count("was not finished") == 1
