"""`MasterWorkerProcess`: walks the graph of an experiment, step by step. It has metadata only."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from unirun import atomic
from unirun.errors import (
    CheckpointDamaged,
    RemoteTraceback,
    SpecError,
    TrainingFailed,
    UnirunError,
    UsageError,
    WorkerLost,
)
from unirun.experiments.buffer import BUFFER_RANK, TakenFile
from unirun.experiments.config import done, passed
from unirun.experiments.experiment import import_modules, resolve, trial_of, with_settings
from unirun.experiments.models.api import FinetuneSpec
from unirun.experiments.orders import LOST, STEPS_IN_FLIGHT, Step, means, reductions_of, startable
from unirun.experiments.recovery import (
    CHECKPOINTS,
    DATA,
    EVALUATIONS,
    STEPS,
    RecoverInfo,
    Recovery,
    SavedModels,
    settings_of,
)
from unirun.experiments.source import TrajectorySource
from unirun.experiments.starting import end_of, job_of, make_root
from unirun.experiments.tracking import tracked_settings, trackers
from unirun.roles import BaseTrainer, wait
from unirun.train.callbacks.base import Callbacks
from unirun.train.data.plan import SampleOrder
from unirun.train.losses import LOSS_REPORT_TIMEOUT, Repeats, kind_of, loss_of
from unirun.wire.reporting import report

WORKERS = "model_worker"
"""The role of the model workers."""

MAX_LOSSES_WITHOUT_STEP = 10
"""Losses of workers that a trial survives without a new step."""

STARTS = "at its start"
"""The phase in which a trial reads the configuration, the data and a checkpoint, and makes its models."""


def why_over(losses: Repeats) -> str:
    """The reason to end a trial after these losses of workers, between which a new step is progress; empty if it goes
    on."""
    if losses.hopeless:
        return f"that is the same end {losses.count} times, without a new step between them"
    return f"that is loss {losses.total} without a new step" if losses.total > MAX_LOSSES_WITHOUT_STEP else ""


class MasterWorkerProcess(BaseTrainer):
    """The master of a trial. When a worker dies, all go on from the last checkpoint, in the processes that live."""

    _failed = False
    _doing = ""

    def is_recoverable(self) -> bool:
        """True, except after an error that a restart would meet again, such as an exception of an interface."""
        return not self._failed

    def init(self) -> None:
        """Read the configuration."""
        with self._errors_come_again():
            self._trial = trial_of(self.config)
            import_modules(self._trial.modules, self._trial.folder)
            config = resolve(self._trial.experiment, self._trial.overrides)
            assert config.resolved is not None
            self._control, self._resolved = config.exp_ctrl, config.resolved
            self._graph = self._resolved.graph
            self._seed, self._shuffle = (
                config.master_worker[0].base_seed,
                config.master_worker[0].shuffle_dataset,
            )
            self._first = self._graph.calls[self._graph.sources[0]]
            self._root = Path(self._trial.root)
            make_root(self._root)
            self._recovery, self._settings = Recovery(self._root), settings_of(config)
            self._told: set[str] = set()
            self._group: Any = self.RG_MODEL_WORKER
            self._attempt = int(time.time() * 1000)
            self._saved = config.evaluated().role if config.auto_eval else ""
            self._manager = next(iter(config.gserver_manager), None)
            self._trackers = Callbacks(
                trackers(config, self._trial.experiment, self._trial.trial, job_of(self._root))
            )
            self._tracked = tracked_settings(
                config, with_settings(self._trial.experiment, self._trial.overrides)
            )
            self._taken, self._patience = TakenFile(self._recovery.buffer), config.call_timeout
            topologies = self._resolved.topologies
            self._workers = {name: frozenset(self._resolved.workers_of(name)) for name in topologies}

    @contextlib.contextmanager
    def _errors_come_again(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._failed = True
            raise

    def fit(self) -> dict[str, float]:
        """Train to the end. Returns the figures of the last step."""
        with self._errors_come_again():
            try:
                self._trackers.start(str(self._root), self._tracked)
                figures = self._fit()
            except BaseException as error:
                self._trackers.finish(error)
                raise
            self._trackers.finish(None)
            return figures

    def _fit(self) -> dict[str, float]:
        # Without a checkpoint there are, perhaps, trajectories.
        if self.load_state() is None and not (self._trial.resume and self._recovery.steps()):
            self._recovery.clear()
        figures: dict[str, float] = {}
        info: RecoverInfo | None = None
        losses, furthest = Repeats(), 0
        while True:
            try:
                if info is None:
                    info = self._begin()
                    if not info.step and self._control.every("eval"):
                        self._evaluate(info)
                while not self._over(info):
                    info, figures = self._step(info)
                self._save(info)
                self._saves.follow(to_end=True)
                return {**figures, **self._evaluate(info)}
            except Exception as error:
                # A worker may report a lost peer before the job does. Calls wait only for losses that the job
                # has reported.
                news = isinstance(error, WorkerLost) or self._lost_meanwhile()
                if not isinstance(error, LOST) and not news:
                    if (
                        isinstance(error, UsageError | SpecError | CheckpointDamaged)
                        and self._doing == STARTS
                    ):
                        raise
                    raise self._failure(error) from _cause(error)
                problem, kind = self._lost(error)
                step = info.step if info is not None else 0
                losses = losses.after(f"{self._doing}, {kind}", progress=step > furthest)
                furthest = max(step, furthest)
                if why := why_over(losses):
                    raise TrainingFailed(
                        f"a worker was lost {self._doing}: {problem}; {why}",
                        f"unirun logs {getattr(error, 'worker', WORKERS)} shows its output",
                    ) from None
                report(f"unirun: {self._doing}: {problem}: the trial goes on from its last checkpoint")
                info = None

    def _lost(self, error: Exception) -> tuple[str, str]:
        """The loss of a worker in words, with its end as far as it is known here, and its kind. An error that
        is a consequence of a loss does not name the lost worker."""
        worker = str(getattr(error, "worker", ""))
        deadline = time.monotonic() + LOSS_REPORT_TIMEOUT
        while job_of(self._root) and time.monotonic() < deadline:
            if found := end_of(self._root, worker, self._began):
                who, end = found
                return f"{who} was lost: {end}", kind_of(loss_of(who, end))
            # The state of the job is written a moment after the loss.
            time.sleep(0.05)
        # Losses of different workers whose ends are not known may have different causes.
        return error.problem if isinstance(error, UnirunError) else str(error), worker

    def _failure(self, error: Exception) -> TrainingFailed:
        """The error that ends the trial, with the call, the step and the worker. Another attempt would raise it
        again."""
        remote = error.__cause__
        where = f" ({remote.worker})" if isinstance(remote, RemoteTraceback) else ""
        return TrainingFailed(f"the trial has failed {self._doing}{where}: {error}")

    def _begin(self) -> RecoverInfo:
        """Have all workers go on from the last checkpoint, or begin."""
        self._doing = STARTS
        self._began = time.time()
        # An error after the loss of a worker may be due to that loss; any other would be raised again.
        self._generation = self._generation_now()
        group, info = self._group, self._last()
        # Without retries: each loss has to be counted here, with the end of the worker.
        read: list[tuple[int, str]] = group.about.options(idempotent=True, retries=0).call()
        samples, content = max(count for count, _ in read), _content_of(read)
        # Once in a job: a worker that was started again may make its samples anew.
        self._settings.setdefault(DATA, json.dumps(content))
        if info is not None:
            self._check_settings(info)
        n_seqs = self._first.n_seqs
        if samples < n_seqs:
            raise UsageError(
                f"the dataset has {samples} samples, and {self._first.name} needs {n_seqs} in each step",
                "make n_seqs smaller, or the dataset larger",
            )
        self._samples, self._steps = samples, samples // n_seqs
        spec = FinetuneSpec(self._control.total_train_epochs, samples, n_seqs)
        restore = group.restore.options(idempotent=True, retries=0)
        while True:
            self._attempt += 1
            self._generation = self._generation_now()
            try:
                found = restore.call(self._attempt, info.step if info is not None else None, spec)
            except CheckpointDamaged as error:
                assert info is not None
                report(f"unirun: {error}")
                info = self._last(before=info.step)
                report("unirun: an earlier checkpoint is used")
                continue
            # A worker that has died after it was ready is not ready, and the groups of the others have ended.
            if self._generation_now() == self._generation:
                break
        # Only now: if no checkpoint can be read, all of them stay as they are.
        self._drop_what_is_made_again(info)
        if info is None:
            info = RecoverInfo(versions={name: v for each in found for name, v in each.items()})
        self._used = [*info.used_ids]
        self._flight: list[Step] = []
        if self._manager is not None:
            self._source = TrajectorySource(self._group, self._attempt, self._taken, self._manager, info.step)
            self._release()
        return info

    def _release(self) -> None:
        """Drop the trajectories of steps before the oldest checkpoint."""
        self._source.release(min(self._recovery.steps(), default=0))

    def _last(self, before: int | None = None) -> RecoverInfo | None:
        """The last checkpoint, if there is one, of those `before` a step if one is given. A checkpoint with
        other settings is an error."""
        info = self._recovery.latest(before)
        if info is not None:
            self._check_settings(info)
        elif self._trial.resume_only:
            raise CheckpointDamaged(
                f"there is no checkpoint of the trial in {self._root}",
                "start with --recover-mode auto to begin anew",
            )
        return info

    def _check_settings(self, info: RecoverInfo) -> None:
        """Raise `UsageError` for changed settings that were not accepted; report each other change once."""
        for change in self._recovery.check(info, self._settings, self._trial.accept):
            if change not in self._told:
                self._told.add(change)
                report(f"unirun: the trial goes on with a change: {change}")

    def _drop_what_is_made_again(self, info: RecoverInfo | None) -> None:
        """Records and saved models are those up to the checkpoint. Without one, those of a job before are set aside."""
        if info is None and self.load_state() is None:
            self._recovery.set_aside()
        self._recovery.drop_after(info.step if info is not None else -1)
        # If this process dies, its successor goes on from the last checkpoint, and what it finds is of this job.
        self.save_state(b"begun")
        evaluator: Any = getattr(self, "RG_EVALUATOR") if self._saved else None  # noqa: B009 - no type knows it
        folder = self._root / CHECKPOINTS / self._saved
        self._saves = SavedModels(self._recovery, folder, evaluator, self._track_saved)

    def _generation_now(self) -> int:
        return int(self.master_handle.job_info()["roles"][WORKERS]["generation"])

    def _lost_meanwhile(self) -> bool:
        """Return True if a worker was lost since `_begin`: then process groups were ended, and calls of other
        workers fail because of that. Waits up to `LOSS_REPORT_TIMEOUT` seconds, as the loss may not be known here
        yet."""
        deadline = time.monotonic() + LOSS_REPORT_TIMEOUT
        while self._generation_now() == self._generation:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def _over(self, info: RecoverInfo) -> bool:
        return self._control.is_over(info.epoch, info.step, self._first.n_seqs)

    def _step(self, info: RecoverInfo) -> tuple[RecoverInfo, dict[str, float]]:
        """Run all calls once, and what is due after them."""
        began, used = time.perf_counter(), time.process_time()
        figures: dict[str, float] = {}
        if self._manager is not None:
            figures = self._source.begin(info.step, self._wait_for_trajectories(info))
        after = self._after(info)
        step = self._walk(info, after)
        figures |= step.figures
        seconds = time.perf_counter() - began
        ended = after.epoch > info.epoch
        trained = {str(call.model_name) for call in self._graph.trained}
        self._used.extend(step.ids)
        if ended:
            self._used.clear()
        info = replace(
            after,
            frequencies=passed(info.frequencies, epochs=int(ended), steps=1, secs=seconds),
            versions={name: version + (name in trained) for name, version in info.versions.items()},
        )
        figures |= {"seconds": seconds, "master_seconds": time.process_time() - used}
        if self._manager is not None:
            figures["trajectories/waited_share"] = figures["trajectories/waited"] / seconds
        self._write_figures(info.step, figures)
        if self._manager is not None:
            self._source.publish(info.step)
        due = self._control.due(info.frequencies)
        self._saves.follow(to_end=False)
        if due:
            info = replace(info, frequencies=done(info.frequencies, due))
            if "eval" in due:
                self._evaluate(info)
            if "save" in due:
                self._save(info)
            if "ckpt" in due:
                self._checkpoint(info)
        return info, figures

    def _after(self, info: RecoverInfo) -> RecoverInfo:
        """The position in the data after one more step."""
        at = info.epoch_step + 1
        ended = at >= self._steps
        return RecoverInfo(info.step + 1, info.epoch + ended, 0 if ended else at)

    def _wait_for_trajectories(self, info: RecoverInfo) -> float:
        """Wait until there are enough for the next step. Returns the seconds."""
        self._doing = f"in step {info.step + 1}, the wait for trajectories"
        began = progress = time.monotonic()
        while self._source.ids(info.step) is None:
            if self._source.wait():
                progress = time.monotonic()
            elif time.monotonic() - progress > self._patience:
                raise TrainingFailed(
                    f"no trajectory has come for {self._patience:g} s, and step {info.step + 1} has "
                    f"{self._source.waiting} of {self._first.n_seqs}",
                    "do the rollout workers work? unirun logs rollout_worker:0 shows their output",
                )
            if self._generation_now() != self._generation:
                raise WorkerLost(
                    "a model worker was lost while trajectories were waited for", "go on", worker=""
                )
        return time.monotonic() - began

    def _walk(self, info: RecoverInfo, after: RecoverInfo) -> Step:
        """Run the calls of the next step to their end, and meanwhile those of the one after it that may run."""
        if not self._flight:
            self._read(info)
        step = self._flight[0]
        while not step.over:
            there = [each for each in self._flight if each.ids]
            progress = [each.progress for each in there]
            for at, name in startable(self._graph, self._workers, progress):
                self._doing = f"in step {there[at].number + 1}, {name}"
                there[at].start(name, step.number)
            # After its calls, so that none of them waits for this.
            if step.ids and len(self._flight) < STEPS_IN_FLIGHT and not self._over(after):
                self._read(after)
            running = {
                ref: each
                for each in self._flight
                for ref in each.running
                if each is step or ref not in each.failed
            }
            waits = self._manager is not None and len(self._flight) < STEPS_IN_FLIGHT
            for ref in wait([*running, *([self._source.news] if waits else ())])[0]:
                if ref in running:
                    self._doing = f"in step {running[ref].number + 1}, {running[ref].running[ref]}"
                    running[ref].answer(ref, oldest=running[ref] is step)
                else:
                    self._source.look()
        return self._flight.pop(0)

    def _read(self, info: RecoverInfo) -> None:
        """Have the data of the next step after `info` read, if there is enough."""
        step = Step(self._group, self._resolved, self._attempt, info.step, self._seed)
        oldest = self._flight[0].number if self._flight else info.step
        if self._manager is None:
            step.load(self._first.model_name, self._indices(info), oldest)
        elif (ids := self._source.ids(info.step)) is not None:
            step.take(BUFFER_RANK, ids, oldest)
        else:
            return
        self._flight.append(step)

    def _indices(self, info: RecoverInfo) -> list[int]:
        """The samples of the dataset that the next step reads."""
        n = self._first.n_seqs
        order = SampleOrder(self._samples, self._seed, info.epoch, self._shuffle)
        found: list[int] = order.indices(info.epoch_step * n, (info.epoch_step + 1) * n).tolist()
        return found

    def _refuse_not_finite(self, info: RecoverInfo) -> None:
        """Raise `TrainingFailed` for a model that has diverged, so that no checkpoint and no saved model has it."""
        names = [call.model_name for call in self._graph.trained]
        found = self._group.not_finite.call(self._attempt, names)
        wrong = [f"{each} in {WORKERS}:{rank}" for rank, some in enumerate(found) for each in some]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise TrainingFailed(
                f"parameters are not finite: {'; '.join(wrong[:3])}{more}",
                "the checkpoints and models that were written before are whole: lower the learning rate",
            )

    def _checkpoint(self, info: RecoverInfo) -> None:
        """Write a checkpoint from which the trial can go on."""
        self._doing = f"in the checkpoint after step {info.step}"
        self._refuse_not_finite(info)
        models = [str(name) for name in self._resolved.instantiated]
        self._recovery.prepare(info.step, models)
        self._group.checkpoint.call(self._attempt, info.step)
        self._recovery.commit(replace(info, used_ids=tuple(self._used), settings=self._settings))
        if self._manager is not None:
            self._release()

    def _save(self, info: RecoverInfo) -> None:
        """Write all models that are trained, for others to use."""
        self._doing = f"in the save after step {info.step}"
        self._refuse_not_finite(info)
        for call in self._graph.trained:
            path = self._root / CHECKPOINTS / call.role / f"step{info.step:06}"
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic.directory(path, private=False, lasting=True) as draft:
                self._group.save.call(self._attempt, call.name, str(draft))

    def _evaluate(self, info: RecoverInfo) -> dict[str, float]:
        """The figures of all models that are trained, of their held-out data. A step is evaluated once."""
        figures: dict[str, float] = self._recovery.record_of(EVALUATIONS, info.step)
        if figures:
            return figures
        self._doing = f"in the evaluation after step {info.step}"
        for call in self._graph.trained:
            found = self._group.evaluate.call(self._attempt, call.name)
            told = means([*filter(None, found)], reductions_of(call))
            figures |= {f"{call.name}/eval_{key}": value for key, value in told.items()}
        if figures:
            self._write(EVALUATIONS, info.step, figures)
            report(f"step {info.step}: " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items()))
        return figures

    def _write(self, name: str, step: int, figures: dict[str, float]) -> None:
        line = {"step": step, **figures}
        self._recovery.record(name, line)
        self.master_handle.report(line)
        self._track(step, figures)

    def _track(self, step: int, figures: Mapping[str, float]) -> None:
        self._trackers.handle([{**figures, "_training_iteration": step, "_timestamp": time.time()}])

    def _track_saved(self, step: int, figures: Mapping[str, float]) -> None:
        """Show the figures of the model that was saved after `step`, which later ones may have overtaken."""
        self._track(step, {f"{self._saved}/saved_{name}": value for name, value in figures.items()})

    def _write_figures(self, step: int, figures: dict[str, float]) -> None:
        self._write(STEPS, step, figures)
        for call in self._graph.calls.values():
            if call.log_return_value:
                own = {k.partition("/")[2]: v for k, v in figures.items() if k.startswith(f"{call.name}/")}
                shown = ", ".join(f"{key} {value:.4g}" for key, value in own.items())
                report(f"step {step}: {call.name}: {shown}")


def _content_of(read: Sequence[tuple[int, str]]) -> str:
    """The content of the dataset, which is the same in all workers that have read it. Raises `UsageError`."""
    contents: dict[str, int] = {}
    for rank, (samples, content) in enumerate(read):
        if samples:
            contents.setdefault(content, rank)
    if len(contents) > 1:
        told = "; ".join(f"{each} in {WORKERS}:{rank}" for each, rank in contents.items())
        raise UsageError(
            f"workers have read different datasets: {told}",
            "let all hosts have the same files, and make samples from the seed",
        )
    return next(iter(contents), "")


def _cause(error: Exception) -> BaseException | None:
    """The cause to show with an error: its traceback in a worker, or the error itself; None for `TrainingFailed`."""
    if isinstance(error.__cause__, RemoteTraceback):
        return error.__cause__
    return None if isinstance(error, TrainingFailed) else error
