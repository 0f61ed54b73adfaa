"""The master's continuation from a checkpoint. Its workers are in memory, and note what they are asked."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from unirun.errors import CheckpointDamaged, TrainingFailed, UsageError, WorkerLost
from unirun.experiments import master
from unirun.experiments.checks import file_faults
from unirun.experiments.config import (
    AutomaticEvaluator,
    ExperimentSaveEvalControl,
    ExperimentScheduling,
    Scheduling,
    TasksGroup,
    TensorBoardConfig,
    WandBConfig,
    model_workers,
)
from unirun.experiments.experiment import Experiment, ExperimentConfig, Trial, register_experiment
from unirun.experiments.graph import topology
from unirun.experiments.master import MasterWorkerProcess, why_over
from unirun.experiments.orders import StepProgress
from unirun.experiments.recovery import RecoverInfo, Recovery
from unirun.train.losses import Repeats, kind_of, loss_of

from .sample_configs import ACTOR, CRITIC, PROMPTS, TRAIN, at, call, config_with


@dataclass
class Trained(Experiment):
    """One call, four steps of eight samples."""

    data: int = 1
    n_seqs: int = 8
    steps: int = 4
    saves: bool = True
    seed: int = 1
    tracked: bool = False
    critic: bool = False

    def scheduling_setup(self) -> ExperimentScheduling:
        """As many workers as ranks."""
        return ExperimentScheduling(TasksGroup(self.data, Scheduling()))

    def initial_setup(self) -> ExperimentConfig:
        """A checkpoint each second step; all models are saved."""
        every = 1 if self.saves else None
        control = ExperimentSaveEvalControl(self.steps, save_freq_steps=every, ckpt_freq_steps=2)
        calls = [call("train", ["prompt"], (), ACTOR, TRAIN, self.n_seqs)]
        models = {ACTOR: at(topology(data=self.data))}
        if self.critic:
            calls.append(call("critic", ["prompt"], (), CRITIC, TRAIN, self.n_seqs))
            models[CRITIC] = at(topology(data=self.data))
        config = config_with(calls, model_workers(models, seed=self.seed, datasets=[PROMPTS]), control)
        config.auto_eval, config.evaluator = self.saves, AutomaticEvaluator(PROMPTS)
        if self.tracked:
            config.wandb = WandBConfig(mode="offline", group="tests", config={"host": "a"})
            config.tensorboard = TensorBoardConfig("/boards")
        return config


register_experiment("tests-trained", Trained)


class Method:
    """A method of a group of workers."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.call = run
        self.how: list[tuple[tuple[str, Any], ...]] = []

    def options(self, **how: Any) -> Method:
        self.how.append((*how.items(),))
        return self

    def call_async(self, *args: Any) -> Future[Any]:
        found: Future[Any] = Future()
        found.set_result(self.call(*args))
        return found


class Workers:
    """The model workers and the evaluator of a run. Models that it saves have its name in them."""

    def __init__(
        self,
        run: str,
        damaged: Sequence[int] = (),
        lost_in: int = 0,
        times: int = 1,
        diverged: Sequence[str] = (),
        unreadable: Exception | None = None,
        content: str = "",
        contents: Sequence[str] = (),
        contents_later: Sequence[str] = (),
        lost: Sequence[str] = ("model_worker:0",),
        lost_at_start: Sequence[str] = (),
        lost_in_save: Sequence[str] = (),
    ) -> None:
        self.asked: list[str] = []
        self._lost, self._lost_at_start = itertools.cycle(lost), [*lost_at_start]
        self._damaged, self.lost_in, self.times = damaged, lost_in, times
        self._run, self._lost_in_save = run, [*lost_in_save]
        self._contents_later = contents_later
        self._unreadable, self._contents = unreadable, contents or [content]
        self.about = Method(self._about)
        self.not_finite = Method(lambda attempt, names: [[], list(diverged)])
        self.restore = Method(self._restore)
        self.checkpoint = Method(lambda attempt, step: None)
        self.save = Method(self._save)
        self.evaluate = Method(lambda attempt, name: self._note("evaluate", [{"right": 1.0, "count": 2.0}]))

    @property
    def asked_with(self) -> list[tuple[tuple[str, Any], ...]]:
        """The options of the calls at the start."""
        return [*self.about.how, *self.restore.how]

    def lose(self) -> WorkerLost:
        """The error of the next worker that is lost in a step."""
        return WorkerLost("a worker has died", worker=next(self._lost))

    def _about(self) -> Any:
        self.asked.append("about")
        if self._lost_at_start:
            raise WorkerLost("a worker has died", worker=self._lost_at_start.pop(0))
        if self._unreadable is not None:
            raise self._unreadable
        # The last worker reads no data.
        found = [*((8, content) for content in self._contents), (0, "")]
        if self._contents_later:
            self._contents = self._contents_later
        return found

    def _note(self, what: str, answer: Any) -> Any:
        self.asked.append(what)
        return answer

    def _save(self, attempt: int, name: str, path: str) -> None:
        if self._lost_in_save[:1] == [name]:
            raise WorkerLost("a worker has died", worker=self._lost_in_save.pop(0))
        Path(path, "model.pt").write_text(self._run)

    def _restore(self, attempt: int, step: int | None, spec: object) -> list[dict[str, int]]:
        self.asked.append(f"restore {step}")
        if step in self._damaged:
            raise CheckpointDamaged(f"{step} cannot be read")
        return [{"actor@0": step or 0}]


class Steps:
    """Steps whose call takes no time. A worker may be lost in one."""

    workers: Workers

    def __init__(self, group: object, resolved: object, attempt: int, number: int, seed: int) -> None:
        self.number, self.over = number, False
        self.ids: tuple[str, ...] = ()
        self.progress, self.figures = StepProgress((), ()), dict[str, float]()
        self.running: dict[Future[Any], str] = {}
        self.failed = set[Any]()

    def load(self, model: object, indices: Sequence[int], oldest: int) -> None:
        self.ids = tuple(map(str, indices))

    def start(self, name: str, oldest: int) -> None:
        if self.workers.lost_in == self.number + 1 and self.workers.times:
            self.workers.times -= 1
            raise self.workers.lose()
        ended: Future[Any] = Future()
        ended.set_result(None)
        self.running[ended] = name

    def answer(self, ref: Future[Any], *, oldest: bool) -> None:
        self.running.pop(ref)
        self.over = True


class Handle:
    """The job of a master."""

    def __init__(self) -> None:
        self._state: bytes | None = None

    def job_info(self) -> dict[str, Any]:
        return {"roles": {"model_worker": {"generation": 0}}}

    def report(self, line: object) -> None: ...

    def save_state(self, state: bytes) -> None:
        self._state = state

    def load_state(self) -> bytes | None:
        return self._state


Run = Callable[..., dict[str, float]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the trial to its end, with these workers and settings, in a job of its own or in that of `handle`."""

    def start(workers: Workers, *overrides: str, handle: Handle | None = None, **how: Any) -> Any:
        Steps.workers = workers
        monkeypatch.setattr(master, "Step", Steps)
        monkeypatch.setattr(master, "wait", lambda refs: ([*refs], []))
        monkeypatch.setattr(master, "LOSS_REPORT_TIMEOUT", 0.1)  # a loss is known to these handles at once
        about = Trial("tests-trained", "one", str(tmp_path), (__name__,), overrides, **how)
        trainer: Any = MasterWorkerProcess({}, {}, OmegaConf.create(msgspec.to_builtins(about)))
        trainer.RG_MODEL_WORKER, trainer._master_handle = workers, handle or Handle()
        trainer.RG_EVALUATOR = evaluator = Workers("")
        evaluator.evaluate = Method(lambda path: {"of": Path(path, "model.pt").read_text()})
        trainer.init()
        return trainer.fit()

    return start


def models(root: Path) -> dict[int, str]:
    """By which run each saved model was made."""
    found = (root / "checkpoints" / "actor").glob("step*/model.pt")
    return {int(path.parent.name.removeprefix("step")): path.read_text() for path in found}


def lines(root: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / name).read_text().splitlines()]


class Library:
    """wandb, or torch.utils.tensorboard: notes what is asked of it and of what it makes."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def called(*args: Any, **named: Any) -> Library:
            self._calls.append((name, *args, named))
            return self

        return called


class TestTrackers:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        """The calls of both libraries."""
        found: list[tuple[Any, ...]] = []
        for name in ("wandb", "tensorboard", "torch.utils.tensorboard"):
            monkeypatch.setitem(sys.modules, name, Library(found))
        return found

    def test_each_step_and_the_end_are_told(
        self, run: Run, calls: list[tuple[Any, ...]], tmp_path: Path
    ) -> None:
        run(Workers("first"), "tracked=true", "steps=2")
        (init,) = (each[-1] for each in calls if each[0] == "init")
        assert init | {"config": None} == {
            "mode": "offline",
            "group": "tests",
            "project": "tests-trained",
            "name": "one",
            "id": "",
            "resume": "allow",
            "dir": str(tmp_path),
            "config": None,
        }
        assert (init["config"]["n_seqs"], init["config"]["host"]) == (8, "a")
        # Steps, saved models, and the evaluation at the end.
        assert [each[1]["training_iteration"] for each in calls if each[0] == "log"] == [1, 2, 1, 2, 2]
        scalars = {(each[1], each[-1]["global_step"]) for each in calls if each[0] == "add_scalar"}
        assert {("seconds", 1), ("seconds", 2)} <= scalars
        assert [each for each in calls if each[0] == "finish"] == [("finish", {"exit_code": 0})]

    def test_a_trial_that_fails_is_told(self, run: Run, calls: list[tuple[Any, ...]]) -> None:
        with pytest.raises(TrainingFailed):
            run(Workers("first", lost_in=2, times=5), "tracked=true")
        assert ("finish", {"exit_code": 1}) in calls

    def test_one_whose_library_is_not_here_is_refused_before_anything_starts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = Trained(tracked=True).initial_setup()
        monkeypatch.setitem(sys.modules, "wandb", Library([]))
        monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        (fault,) = file_faults(config)
        assert str(fault) == (
            "wandb and tensorboard: TensorBoardCallback needs tensorboard, which is not installed; run: pip install "
            "tensorboard"
        )
        config.wandb.mode = "on"
        assert "wandb.mode: 'on'; it is one of online, offline, disabled" in map(str, file_faults(config))


class TestOtherSettings:
    def test_another_layout_is_refused_before_a_worker_is_asked_and_the_checkpoints_stay(
        self, run: Run, tmp_path: Path
    ) -> None:
        run(Workers("first"))
        workers = Workers("second")
        with pytest.raises(UsageError) as caught:
            run(workers, "data=2", resume=True)
        assert (
            "000004 was written with other settings: models.actor@0.layout.data: 1 → 2; start with the settings of before, "
            "with another trial name, or with --recover-mode disabled"
        ) in str(caught.value)
        assert workers.asked == []
        assert Recovery(tmp_path).steps() == [2, 4]
        assert len(lines(tmp_path, "steps.jsonl")) == 4

    def test_another_number_of_sequences_is_refused(self, run: Run) -> None:
        run(Workers("first"))
        with pytest.raises(UsageError, match="n_seqs: 8 → 4"):
            run(Workers("second"), "n_seqs=4", resume=True)

    def test_another_seed_is_refused_and_accepted_by_its_name(
        self, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(Workers("first"), "steps=2")
        with pytest.raises(UsageError, match="seed: 1 → 2; .*--accept-change seed"):
            run(Workers("second"), "seed=2", resume=True)
        run(Workers("third", lost_in=4), "seed=2", resume=True, accept=("seed",))
        assert capsys.readouterr().err.count("the trial goes on with a change: seed: 1 → 2") == 1
        # The last checkpoint has the new seed.
        assert run(Workers("fourth"), "seed=2", resume=True)
        assert [line["step"] for line in lines(tmp_path, "steps.jsonl")] == [1, 2, 3, 4]

    def test_other_samples_are_refused_when_the_workers_have_read_them(self, run: Run) -> None:
        run(Workers("first", content="a"))
        workers = Workers("second", content="b")
        with pytest.raises(UsageError, match='datasets.content: "a" → "b"'):
            run(workers, resume=True)
        assert workers.asked == ["about"]

    def test_workers_that_have_read_other_samples_than_the_others_are_told(self, run: Run) -> None:
        workers = Workers("first", contents=["8 samples, a", "8 samples, b", "8 samples, a"])
        with pytest.raises(UsageError) as caught:
            run(workers)
        assert caught.value.problem == (
            "workers have read different datasets: 8 samples, a in model_worker:0; 8 samples, b in model_worker:1"
        )
        assert workers.asked == ["about"]

    def test_samples_are_compared_with_those_of_the_checkpoint_once_in_a_job(
        self, run: Run, tmp_path: Path
    ) -> None:
        run(Workers("first", contents=["a"], contents_later=["b"], lost_in=3))
        assert [line["step"] for line in lines(tmp_path, "steps.jsonl")] == [1, 2, 3, 4]
        run(Workers("second", contents=["a"]), resume=True)

    def test_a_trial_that_begins_anew_may_have_others(self, run: Run, tmp_path: Path) -> None:
        run(Workers("first"))
        run(Workers("second"), "data=2", "n_seqs=4")
        assert set(models(tmp_path).values()) == {"second"}


class TestDamage:
    def test_one_is_skipped_when_the_one_before_can_be_read(
        self, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(Workers("first"))
        workers = Workers("second", damaged=[4])
        run(workers, resume=True)
        assert workers.asked[:3] == ["about", "restore 4", "restore 2"]
        assert "4 cannot be read\nunirun: an earlier checkpoint is used\n" in capsys.readouterr().err
        assert models(tmp_path) == {1: "first", 2: "first", 3: "second", 4: "second"}

    @pytest.mark.parametrize("only", [True, False])
    def test_a_trial_whose_checkpoints_are_all_damaged_fails_and_all_stays_as_it_was(
        self, only: bool, run: Run, tmp_path: Path
    ) -> None:
        run(Workers("first"))
        for _ in range(2):
            workers = Workers("second", damaged=[2, 4])
            with pytest.raises(
                CheckpointDamaged, match="none of them can be read; .*--recover-mode disabled"
            ):
                run(workers, resume=True, resume_only=only)
            assert workers.asked == ["about", "restore 4", "restore 2"]
        assert Recovery(tmp_path).steps() == [2, 4]
        assert len(lines(tmp_path, "steps.jsonl")) == 4
        assert set(models(tmp_path).values()) == {"first"}

    def test_with_resume_only_a_trial_without_checkpoints_fails(self, run: Run) -> None:
        with pytest.raises(
            CheckpointDamaged, match="there is no checkpoint .*; start with --recover-mode auto"
        ):
            run(Workers("first"), resume=True, resume_only=True)


class TestErrorsThatComeAgain:
    def test_a_worker_that_is_lost_three_times_in_one_call_of_one_step_ends_the_trial(
        self, run: Run, capsys: pytest.CaptureFixture[str]
    ) -> None:
        workers = Workers("first", lost_in=2, times=5)
        with pytest.raises(TrainingFailed) as caught:
            run(workers)
        assert str(caught.value) == (
            "a worker was lost in step 2, train: a worker has died; that is the same end 3 times, without a new step "
            "between them; unirun logs model_worker:0 shows its output"
        )
        assert workers.asked.count("restore None") == 3
        assert capsys.readouterr().err.count("goes on from its last checkpoint") == 2

    def test_two_losses_in_a_call_are_survived(self, run: Run, tmp_path: Path) -> None:
        run(Workers("first", lost_in=2, times=2))
        assert [line["step"] for line in lines(tmp_path, "steps.jsonl")] == [1, 2, 3, 4]

    def test_an_error_before_the_first_step_is_no_lost_worker(self, run: Run, tmp_path: Path) -> None:
        workers = Workers("first", unreadable=FileNotFoundError("there is no train.jsonl"))
        with pytest.raises(TrainingFailed, match="has failed at its start: there is no train.jsonl"):
            run(workers)
        assert workers.asked == ["about"]

    def test_other_losses_end_a_trial_when_there_are_too_many_of_them_without_a_new_step(self) -> None:
        losses = Repeats()
        for number in range(10):
            losses = losses.after(f"in step 3, call {number % 2}", progress=False)
            assert not why_over(losses)
        assert why_over(losses.after("in step 3, another", progress=True)) == ""
        assert (
            why_over(losses.after("in step 3, another", progress=False))
            == "that is loss 11 without a new step"
        )

    def test_workers_that_end_in_other_ways_in_one_place_are_not_the_same_end(self) -> None:
        losses = Repeats()
        ends = [("model_worker:3", "killed by SIGKILL"), ("model_worker:9", "killed by SIGKILL")]
        for worker, end in [
            *ends,
            ("model_worker:1", "exit code 3"),
            *ends,
            ("model_worker:2", "exit code 3"),
        ]:
            losses = losses.after(kind_of(loss_of(worker, end)), progress=False)
            assert not why_over(losses)
        for worker in ("model_worker:0", "model_worker:5"):
            losses = losses.after(kind_of(loss_of(worker, "exit code 3")), progress=False)
        assert why_over(losses).startswith("that is the same end 3 times")

    def test_workers_whose_ends_are_not_known_are_told_apart(self, run: Run, tmp_path: Path) -> None:
        run(Workers("first", lost_in=2, times=5, lost=("model_worker:0", "model_worker:1")))
        assert [line["step"] for line in lines(tmp_path, "steps.jsonl")] == [1, 2, 3, 4]

    def test_each_loss_at_the_start_counts_once(
        self, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        workers = Workers("first", lost_at_start=["model_worker:0", "model_worker:1", "model_worker:0"])
        run(workers)
        assert [line["step"] for line in lines(tmp_path, "steps.jsonl")] == [1, 2, 3, 4]
        assert capsys.readouterr().err.count("goes on from its last checkpoint") == 3
        with pytest.raises(TrainingFailed, match="lost at its start: .*that is the same end 3 times"):
            run(again := Workers("again", lost_at_start=["model_worker:0"] * 5))
        assert again.asked == ["about"] * 3
        assert {*workers.asked_with, *again.asked_with} == {(("idempotent", True), ("retries", 0))}


class TestDiverged:
    def test_parameters_that_are_not_finite_are_never_saved(self, run: Run, tmp_path: Path) -> None:
        with pytest.raises(TrainingFailed) as caught:
            run(
                Workers(
                    "first", diverged=["actor@0: lm_head.weight", "actor@0: a", "actor@0: b", "actor@0: c"]
                )
            )
        assert (
            "the trial has failed in the save after step 1: parameters are not finite: "
            "actor@0: lm_head.weight in model_worker:1; actor@0: a in model_worker:1; "
            "actor@0: b in model_worker:1 and 1 more"
        ) in str(caught.value)
        assert models(tmp_path) == {}

    def test_nor_written_to_a_checkpoint(self, run: Run, tmp_path: Path) -> None:
        with pytest.raises(TrainingFailed, match="in the checkpoint after step 2: parameters are not finite"):
            run(Workers("first", diverged=["actor@0: lm_head.weight"]), "saves=False")
        assert Recovery(tmp_path).steps() == []


class TestWhatIsMadeAgain:
    def test_models_after_the_checkpoint_are_saved_and_evaluated_again(
        self, run: Run, tmp_path: Path
    ) -> None:
        run(Workers("first"), "steps=3")
        run(Workers("second"), "steps=4", resume=True)
        assert models(tmp_path) == {1: "first", 2: "first", 3: "second", 4: "second"}
        assert lines(tmp_path, "saves.jsonl") == [
            {"save": "step000001", "of": "first"},
            {"save": "step000002", "of": "first"},
            {"save": "step000003", "of": "second"},
            {"save": "step000004", "of": "second"},
        ]

    @pytest.mark.parametrize("lost_in", [["train"], ["critic"], ["critic", "train"], ["critic", "critic"]])
    def test_all_models_are_saved_though_a_worker_is_lost_between_two_of_them(
        self, run: Run, tmp_path: Path, lost_in: list[str]
    ) -> None:
        workers = Workers("first", lost_in_save=lost_in)
        run(workers, "saves=false", "critic=true")
        assert workers._lost_in_save == (["train"] if lost_in == ["critic", "train"] else [])
        saved = sorted(path.relative_to(tmp_path) for path in tmp_path.glob("checkpoints/*/*"))
        assert saved == [Path("checkpoints", role, "step000004") for role in ("actor", "critic")]

    def test_each_line_is_there_once_though_a_worker_is_lost(self, run: Run, tmp_path: Path) -> None:
        for lost_in in (1, 2, 4):
            workers = Workers("first", lost_in=lost_in)
            run(workers)
            last = None if lost_in < 3 else 2
            assert workers.asked == ["about", "restore None", "about", f"restore {last}", "evaluate"]
            assert [line["step"] for line in lines(tmp_path, "steps.jsonl")] == [1, 2, 3, 4]
            assert [line["save"][-1] for line in lines(tmp_path, "saves.jsonl")] == ["1", "2", "3", "4"]
        # A run of a job sets aside what another job has left, and not what it has made itself.
        assert sorted(path.name for path in (tmp_path / "earlier").iterdir()) == ["1", "2"]

    def test_a_master_that_is_started_again_in_the_job_makes_the_rest_anew(
        self, run: Run, tmp_path: Path
    ) -> None:
        handle = Handle()
        run(Workers("first"), "steps=1", handle=handle)
        run(Workers("second"), "steps=3", handle=handle)
        run(Workers("third"), "steps=4", handle=handle)
        assert models(tmp_path) == {1: "second", 2: "second", 3: "third", 4: "third"}
        assert not (tmp_path / "earlier").exists()


def test_a_trial_that_has_ended_is_evaluated_once_however_often_it_is_started(
    run: Run, tmp_path: Path
) -> None:
    first = run(Workers("first"))
    before = lines(tmp_path, "evaluations.jsonl")
    assert before == [{"step": 4, "train/eval_right": 0.5}]
    for _ in range(2):
        workers = Workers("again")
        assert run(workers, resume=True) == {"train/eval_right": 0.5}
        assert workers.asked == ["about", "restore 4"]
    assert first["train/eval_right"] == 0.5
    assert lines(tmp_path, "evaluations.jsonl") == before
    assert set(models(tmp_path).values()) == {"first"}


def test_how_a_worker_has_ended_in_an_attempt_before_is_not_its_end_in_this_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[tuple[float, str]] = []

    def end_of(root: Path, worker: str, since: float) -> tuple[str, str] | None:
        return next(((worker, end) for at, end in reversed(ended) if at >= since), None)

    class Known(Workers):
        """Workers of which the job tells the first end alone in time."""

        def lose(self) -> WorkerLost:
            if not ended:
                ended.append((time.time(), "exit code 3"))
            return super().lose()

    monkeypatch.setattr(master, "job_of", lambda root: "job")
    monkeypatch.setattr(master, "end_of", end_of)
    run(Known("first", lost_in=2, times=2))
    told = [line for line in capsys.readouterr().err.splitlines() if "goes on from its last" in line]
    assert ["exit code 3" in line for line in told] == [True, False]


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0.0, 4.0)), max_size=12),
    st.integers(0, 4),
    st.none() | st.integers(0, 12),
)
def test_a_step_waits_for_trajectories_as_long_as_some_come(
    looks: list[tuple[bool, float]], needs: int, lost_at: int | None
) -> None:
    """Each look takes a while, and finds whether one has come; a worker may be lost meanwhile. Patience: 5 s."""
    now, come, at = 0.0, 0, 0

    def wait() -> bool:
        nonlocal now, come, at
        found, seconds = looks[at] if at < len(looks) else (False, 1.0)
        now, come, at = now + seconds, come + found, at + 1
        return found

    trial: Any = object.__new__(MasterWorkerProcess)
    trial._source = SimpleNamespace(ids=lambda step: ("a",) if come >= needs else None, wait=wait, waiting=0)
    trial._patience, trial._generation, trial._first = 5.0, 0, SimpleNamespace(n_seqs=needs)
    trial._generation_now = lambda: int(lost_at is not None and at > lost_at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(master, "time", SimpleNamespace(monotonic=lambda: now))
        try:
            end: Any = trial._wait_for_trajectories(RecoverInfo())
        except (TrainingFailed, WorkerLost) as error:
            end = type(error)
    expected: Any = 0.0
    begun, last, found = 0.0, 0.0, 0
    for number, (comes, seconds) in enumerate((*looks, *[(False, 1.0)] * 7)):
        if found >= needs:
            break
        begun, found = begun + seconds, found + comes
        last = begun if comes else last
        expected = begun
        if begun - last > 5.0:
            expected = TrainingFailed
            break
        if lost_at is not None and number >= lost_at:
            expected = WorkerLost
            break
    assert end == (pytest.approx(expected) if isinstance(expected, float) else expected)


def test_trajectories_are_kept_until_no_checkpoint_goes_back_to_them(tmp_path: Path) -> None:
    released: list[int] = []
    trial: Any = object.__new__(MasterWorkerProcess)
    trial._recovery, trial._manager, trial._attempt = Recovery(tmp_path), object(), 1
    trial._graph = SimpleNamespace(trained=[])
    trial._resolved = SimpleNamespace(instantiated=[ACTOR])
    trial._group, trial._used, trial._settings = Workers("first"), [], {}
    trial._source = SimpleNamespace(release=released.append)
    trial._release()
    for step in (2, 3, 5, 9):
        trial._checkpoint(RecoverInfo(step))
        assert released[-1] == min(trial._recovery.steps())
    trial._release()
    assert released == [0, 2, 2, 3, 5, 5]
