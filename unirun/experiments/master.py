"""`MasterWorkerProcess`: walks the graph of an experiment, step by step. It has metadata only."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
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
from unirun.experiments.buffer import BUFFER_RANK, TakenFile, TakeOrder, staleness
from unirun.experiments.config import done, passed
from unirun.experiments.experiment import import_modules, resolve, trial_of
from unirun.experiments.models.api import FinetuneSpec
from unirun.experiments.orders import LOST, Step, means, reductions_of
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
from unirun.experiments.starting import end_of, job_of, make_root
from unirun.roles import BaseTrainer
from unirun.train.data.plan import SampleOrder
from unirun.train.losses import LOSS_REPORT_TIMEOUT, Repeats, kind_of, loss_of
from unirun.wire.reporting import report

WORKERS = "model_worker"
"""The role of the model workers."""

MAX_LOSSES_WITHOUT_STEP = 10
"""Losses of workers that a trial survives without a new step."""


LOOK_INTERVAL = 1.0
"""Seconds after which a master that waits for trajectories looks whether all workers live."""


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
            self._source = self._graph.calls[self._graph.sources[0]]
            self._root = Path(self._trial.root)
            make_root(self._root)
            self._recovery, self._settings = Recovery(self._root), settings_of(config)
            self._told: set[str] = set()
            self._group: Any = self.RG_MODEL_WORKER
            self._attempt = int(time.time() * 1000)
            self._saved = config.evaluated().role if config.auto_eval else ""
            self._manager = next(iter(config.gserver_manager), None)
            self._taken, self._patience = TakenFile(self._recovery.buffer), config.call_timeout

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
            return self._fit()

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
        n_seqs = self._source.n_seqs
        if samples < n_seqs:
            raise UsageError(
                f"the dataset has {samples} samples, and {self._source.name} needs {n_seqs} in each step",
                "make n_seqs smaller, or the dataset larger",
            )
        self._samples, self._steps = samples, samples // n_seqs
        spec = FinetuneSpec(self._control.total_train_epochs, samples, n_seqs)
        unreadable: list[int] = []
        restore = group.restore.options(idempotent=True, retries=0)
        while True:
            self._attempt += 1
            self._generation = self._generation_now()
            try:
                found = restore.call(self._attempt, info.step if info is not None else None, spec)
            except CheckpointDamaged as error:
                assert info is not None
                report(f"unirun: {error}")
                unreadable.append(info.step)
                info = self._last(before=info.step)
                report("unirun: an earlier checkpoint is used")
                continue
            # A worker that has died after it was ready is not ready, and the groups of the others have ended.
            if self._generation_now() == self._generation:
                break
        # Only now: if no checkpoint can be read, all of them stay as they are.
        for step in unreadable:
            self._recovery.discard(step)
        self._drop_what_is_made_again(info)
        if info is None:
            info = RecoverInfo(versions={name: v for each in found for name, v in each.items()})
        self._used = [*info.used_ids]
        if self._manager is not None:
            self._find_trajectories(info)
        return info

    # Trajectories of an asynchronous trial.

    def _find_trajectories(self, info: RecoverInfo) -> None:
        """Find those that were accepted, and which step has taken which; go on to take more."""
        self._order, self._ages = TakeOrder.of(self._taken.read()), dict[str, int]()
        self._next, self._counts, self._counted = 0, (0, 0), (0, 0)
        self._look(0.0)
        self._counted = self._counts
        self._begun = max(info.step, self._order.begun)
        old = [each for taken in self._order.taken.values() for each in taken.old]
        self._keeper.release.call(self._attempt, old, dropped=True)
        self._release()
        # The last step that was begun may not have been trained.
        version = max(info.step, self._begun - 1)
        kept = len(self._order.waiting) + (self._begun - version) * self._source.n_seqs
        self._keeper.receive.call(self._attempt, version, kept)
        if len({*self._group.published.call(self._attempt)}) > 1:
            # A worker was started again, or lost before it had published what others have. The steps that are made
            # again need not give the same weights to the bit, and a version is of one state.
            self._group.withdraw.call(self._attempt)
        self._publish(info)

    @property
    def _keeper(self) -> Any:
        """The worker that has the buffer."""
        return self._group[BUFFER_RANK]

    def _look(self, seconds: float) -> bool:
        """Learn what has arrived, and wait for it up to so many seconds. Returns True if something has."""
        self._next, some, self._counts = self._keeper.accepted.call(self._attempt, self._next, seconds)
        self._order = self._order.arrived((meta.ids[0], version) for version, meta in some)
        self._ages |= {meta.ids[0]: version for version, meta in some}
        return bool(some)

    def _take(self, step: int) -> tuple[tuple[str, ...], dict[str, float]]:
        """The trajectories of a step, and figures. Waits until there are enough."""
        assert self._manager is not None
        began = progress = time.monotonic()
        self._look(0.0)
        while True:
            again = step in self._order.taken
            self._order, taken = self._order.take(
                step, self._source.n_seqs, self._manager.max_head_offpolicyness
            )
            if taken is not None:
                break
            if self._look(LOOK_INTERVAL):
                progress = time.monotonic()
            elif time.monotonic() - progress > self._patience:
                raise TrainingFailed(
                    f"no trajectory has come for {self._patience:g} s, and step {step + 1} has "
                    f"{len(self._order.waiting)} of {self._source.n_seqs}",
                    "do the rollout workers work? unirun logs rollout_worker:0 shows their output",
                )
            if self._generation_now() != self._generation:
                raise WorkerLost(
                    "a model worker was lost while trajectories were waited for", "go on", worker=""
                )
        if not again:
            self._taken.write(taken)
            if taken.old:
                self._keeper.release.call(self._attempt, taken.old, dropped=True)
        ages = staleness(taken, self._ages)
        accepted, rejected = (now - before for now, before in zip(self._counts, self._counted, strict=True))
        self._counted = self._counts
        return taken.ids, {
            "trajectories/waited": time.monotonic() - began,
            "trajectories/waiting": float(len(self._order.waiting)),
            "trajectories/accepted": float(accepted),
            "trajectories/rejected": float(rejected),
            "trajectories/too_old": float(len(taken.old)),
            # All ages: `unirun status` shows the last figure of each name.
            **{
                f"trajectories/staleness_{age}": float(ages.get(age, 0))
                for age in range(self._manager.max_head_offpolicyness + 1)
            },
        }

    def _publish(self, info: RecoverInfo) -> None:
        """Publish the weights, unless they are those of a step that is made again, after which others were seen. What
        all workers have published stays."""
        if info.step >= self._begun:
            self._group.publish.call(self._attempt, info.step)

    def _release(self) -> None:
        """Drop the trajectories of steps that no checkpoint goes back to."""
        self._order, ids = self._order.released(min(self._recovery.steps(), default=0))
        for each in ids:
            self._ages.pop(each, None)
        if ids:
            self._keeper.release.call(self._attempt, ids, dropped=False)

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
        self._saves = SavedModels(self._recovery, self._root / CHECKPOINTS / self._saved, evaluator)

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
        return self._control.is_over(info.epoch, info.step, self._source.n_seqs)

    def _step(self, info: RecoverInfo) -> tuple[RecoverInfo, dict[str, float]]:
        """Run all calls once, and what is due after them."""
        began, used = time.perf_counter(), time.process_time()
        step = Step(self._group, self._resolved, self._attempt, info.step, self._seed)
        figures: dict[str, float] = {}
        try:
            if self._manager is None:
                ids, figures = step.load(self._source.model_name, self._indices(info)), {}
            else:
                step.at = "the wait for trajectories"
                ids, figures = self._take(info.step)
                step.take(BUFFER_RANK, ids)
            figures |= step.walk()
        finally:
            self._doing = f"in step {info.step + 1}, {step.at}"
        seconds = time.perf_counter() - began
        epoch_step = info.epoch_step + 1
        ended = epoch_step >= self._steps
        trained = {str(call.model_name) for call in self._graph.trained}
        self._used.extend(ids)
        if ended:
            self._used.clear()
        info = RecoverInfo(
            info.step + 1,
            info.epoch + ended,
            0 if ended else epoch_step,
            (),
            passed(info.frequencies, epochs=int(ended), steps=1, secs=seconds),
            {name: version + (name in trained) for name, version in info.versions.items()},
        )
        figures |= {"seconds": seconds, "master_seconds": time.process_time() - used}
        self._write_figures(info.step, figures)
        if self._manager is not None:
            self._publish(info)
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

    def _indices(self, info: RecoverInfo) -> list[int]:
        """The samples of the dataset that the next step reads."""
        n = self._source.n_seqs
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
