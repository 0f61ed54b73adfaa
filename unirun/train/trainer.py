"""`Trainer`: runs a function on many ranks, from a script, a REPL or a notebook; searches with sets of them."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import queue
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, NoReturn, overload

from msgspec.structs import replace

from unirun.collocation import Inventory, count_slots, local_inventory, parse_fake, place
from unirun.errors import PlacementError, TrainingFailed, UsageError, WorkerLost
from unirun.observe.jobdir import unirun_home
from unirun.observe.status import JobStatus
from unirun.roles import InvocationRef
from unirun.spec.parse import parse_job
from unirun.spec.read import show_size
from unirun.train.arguments import (
    check_failures,
    check_writable,
    checked_rank,
    checkpoint_of,
    datasets,
    directory,
    environment,
    left_unfinished,
    name_of,
    next_run,
    require,
    takes_config,
)
from unirun.train.callbacks import Callbacks, TrainingCallback
from unirun.train.callbacks.base import numbers
from unirun.train.checkpoints import CheckpointStrategy
from unirun.train.familiar import TRAINERS, elsewhere, refuse_arguments
from unirun.train.running import Attempts, TrainingIterator
from unirun.train.setup import (
    Setup,
    TorchConfig,
    configured,
    find_backend,
    in_words,
    options_of,
    range_of,
    requested,
    resources_of,
    threads_of,
)
from unirun.train.task import Result, RunTask, cell_of
from unirun.train.workers import Workers
from unirun.wire.reporting import folded, report

if TYPE_CHECKING:
    import optuna


# `Trainable`: a training function as the objective of a search for hyperparameters, by Optuna or Ray Tune.
#
# Trials run side by side, each on a set of workers of its own. A set is a trainer with the same settings as the others,
# and stays warm between trials.

# Sets of workers side by side, each behind a trainer of its own: how many there may be, and what each has.
#
# A job is placed as if it were alone, so what devices and threads each set has is decided here.

ELSEWHERE = ("--hosts", "--hostfile", "--slurm", "--nnodes")
"""Options of jobs on other hosts, of which this process does not know what they have."""


def inventory_of(setup: Setup) -> Inventory | None:
    """The inventory of the host where the job runs; None when it runs on others."""
    options = setup.options
    if any(option in ELSEWHERE for option in options):
        return None
    if "--inventory" not in options:
        return local_inventory()
    found = parse_fake(options[options.index("--inventory") + 1])
    return found if len(found.nodes) == 1 else None


def setups(setup: Setup, inventory: Inventory | None, most: int | None = None) -> list[Setup]:
    """The requests of the sets of workers: `setup` is that of the first. There are as many as there is room for, or
    `most`; one without an `inventory`.

    On GPUs each has a part of them, as the planner gives them one after the other. Raises `UsageError` when there are
    too few for `most`, and `PlacementError` when there are too few for one.
    """
    if setup.device == "cuda":
        parts = [setup] if inventory is None else _parts(setup, inventory)
        if most is not None and most > len(parts):
            raise UsageError(
                f"max_concurrent={most}, and there are known to be GPUs for {len(parts)}",
                "leave it out, or give each trial fewer",
            )
        return parts[:most]
    room = 1 if inventory is None else count_slots("cpu", inventory) // (setup.most * setup.slots)
    other = setup
    if setup.device is not None:
        # Workers with more than one processor are bound to theirs, and those of all jobs would be bound to the same.
        env = {"OMP_NUM_THREADS": str(setup.slots), **setup.env}
        other = replace(setup, device=None, slots=1, env=env)
    return [setup, *[other] * (max(most or room, 1) - 1)]


def _parts(setup: Setup, inventory: Inventory) -> list[Setup]:
    """Each set has what the planner gives it of the devices that those before have left."""
    (node,) = inventory.nodes
    left = tuple(device.index for device in node.devices if device.type == setup.device)
    own, found = _planned(setup, inventory), [setup]
    while left := tuple(device for device in left if device not in own):
        try:
            own = _planned(replace(setup, devices=left), inventory)
        except PlacementError:
            break
        found.append(replace(setup, devices=own))
    return found


def _planned(setup: Setup, inventory: Inventory) -> tuple[str, ...]:
    """The devices that a job gets when it is alone. Raises `PlacementError`."""
    count = partial(count_slots, inventory=inventory)
    _, placement = place(parse_job(setup.job_file("set"), count_slots=count, run_id="set"), inventory)
    return tuple(device for rank in placement.assignments for device in rank.own)


def another(trainer: Trainer, setup: Setup | None = None) -> Trainer:
    """A trainer with the same settings, or with another `setup`, that is not started."""
    other = copy.copy(trainer)
    other._setup = setup or trainer._setup
    # A trainer numbers the runs in its directory, so each needs its own.
    other._logdir = trainer._logdir and f"{trainer._logdir.rstrip('/')}/{secrets.token_hex(3)}"
    other._attempts = other._run = other._finalizer = None
    other._trainables, other.logdir = weakref.WeakSet(), ""
    other._resume, other._runs = False, 0
    return other


def with_threads(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with so many threads of torch, unless the environment says how many.

    The only rank of a job has as many as there are processors, and on the same processors as another set it is many
    times slower then. Ranks of larger jobs have few, as under torchrun.
    """

    @wraps(function)
    def limited(*config: Any) -> Any:
        import torch

        before = torch.get_num_threads()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(number)
        try:
            return function(*config)
        finally:
            torch.set_num_threads(before)

    return limited


# A search for hyperparameters goes on after its driver was killed: trials that it has left running are tried again.

DRIVER = "driver"
"""The attribute of a trial that names the process which runs it."""


def resume(study: optuna.Study, n_trials: int) -> int:
    """Try the parameters of trials again that a killed driver has left running. Returns how many of `n_trials` are left
    to do: all but those that are complete or pruned.

    ::

        study = optuna.create_study(study_name="digits", storage="sqlite:///study.db", load_if_exists=True)
        study.optimize(trainable, n_trials=trainable.resume(study, 20))

    A trial that was left becomes a failed one, and a new one has its parameters. Trials of drivers on other hosts, or
    in other containers, stay as they are; for these there is the heartbeat of Optuna's storages.
    """
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False)
    drivers = {tuple(trial.user_attrs.get(DRIVER, ())) for trial in trials} - {()}
    ended = {driver for driver in drivers if _has_ended(*driver)}
    if drivers and ended == drivers:
        # One of them was killed before it could say that it runs the trial.
        ended.add(())
    for trial in trials:
        if trial.state == TrialState.RUNNING and tuple(trial.user_attrs.get(DRIVER, ())) in ended:
            # In this order, so that nothing is lost when this process is killed as well.
            parameters = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
            study.enqueue_trial(parameters, user_attrs=trial.user_attrs)
            study.tell(trial.number, state=TrialState.FAIL)
    if study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        _ask_one_at_a_time(study)
    done = sum(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in trials)
    return max(n_trials - done, 0)


def this_process() -> list[Any]:
    """The identity of this process: its pid, where that is its pid, and what distinguishes it there from others."""
    return [os.getpid(), _place(), _life(os.getpid())]


def _ask_one_at_a_time(study: optuna.Study) -> None:
    """Let no two threads have the same of the trials that wait, which they may with SQLite (optuna #4002)."""
    ask, lock = study.ask, threading.Lock()

    def ask_alone(*args: Any, **kwargs: Any) -> optuna.Trial:
        with lock:
            return ask(*args, **kwargs)

    study.ask = ask_alone  # type: ignore[method-assign]


def _has_ended(pid: int, place: str, life: str) -> bool:
    """Return True if a process has ended. One in another place counts as alive."""
    return place == _place() and _life(pid) != life


def _place() -> str:
    """The namespace in which a pid names a process: a host, or a container on it."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def _life(pid: int) -> str:
    """The mark that distinguishes process `pid` from others that have had its pid; empty when it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "" if stat[0] in "ZX" else f"{boot} {stat[19]}"


Config = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]
"""The config of the training function: values and functions of the trial by name, or one function of the trial."""

DIRECTIONS = {"min": "minimize", "max": "maximize"}


def to_trainable(
    trainer: Trainer,
    train_func: Callable[..., Any],
    config: Config | None = None,
    *,
    metric: str = "loss",
    mode: Literal["min", "max"] = "min",
    dataset: Any = None,
    checkpoint_strategy: CheckpointStrategy | None = None,
    max_concurrent: int | None = None,
    timeout: float = 24 * 3600.0,
) -> Trainable:
    """`train_func` as the objective of a search for hyperparameters.

    ::

        config = {"lr": lambda trial: trial.suggest_float("lr", 1e-4, 1e-1, log=True), "epochs": 3}
        with trainer.to_trainable(train_func, config) as trainable:
            study = optuna.create_study(pruner=optuna.pruners.HyperbandPruner())
            study.optimize(trainable, n_trials=20, n_jobs=trainable.max_concurrent)

    Values of `config` that are functions are called with the trial; so is `config`, if it is a function. The value of a
    trial is the `metric` in the last report of rank 0, ``outer/inner`` in nested dicts; each report goes to the pruner.
    `mode` is the direction of the study. `dataset` and `checkpoint_strategy` are those of `Trainer.run`, but only the
    latest checkpoint is kept by default. Trials get the attributes ``ranks``, ``checkpoint`` (the path of the best one,
    or None) and ``driver``.

    At most `max_concurrent` trials run at a time, each on warm workers of its own: by default as many as this host has
    GPUs or processors for, and one on other hosts. The first set are those of this trainer. A trial waits `timeout`
    seconds for a free one.

    For Ray Tune it is a function: ``ray.tune.Tuner(trainable, param_space={"lr": …})``. Parameters of Ray Tune go
    before those in `config`, and each report goes to ``ray.tune.report``. A trial starts workers of its own, for which
    ``ray.tune.with_resources`` reserves room; `metric`, `mode` and `max_concurrent` are Ray Tune's.

    Raises `UsageError`, and `PlacementError` when there is no room for a trial.
    """
    if not callable(train_func) or isinstance(train_func, type):
        raise UsageError(f"{train_func!r} is no function", "give a function of nothing, or of config")
    if mode not in DIRECTIONS:
        raise UsageError(f"mode={mode!r}", "it is 'min' or 'max'")
    if max_concurrent is not None and (not isinstance(max_concurrent, int) or max_concurrent < 1):
        raise UsageError(f"max_concurrent={max_concurrent!r}", "give a number from 1 on, or None")
    if config is not None and not isinstance(config, Mapping) and not callable(config):
        raise UsageError(f"config is a {type(config).__name__}", "give a dict, or a function of the trial")
    setup = trainer._setup
    others = setups(setup, inventory_of(setup), max_concurrent)[1:]
    sets = [trainer, *(another(trainer, each) for each in others)]
    function = with_threads(setup.slots if setup.device == "cpu" else 1, train_func) if others else train_func
    strategy = checkpoint_strategy or CheckpointStrategy(num_to_keep=1)
    found = Trainable(sets, function, config or {}, metric, mode, dataset, strategy, timeout)
    trainer._trainables.add(found)
    return found


class Trainable:
    """A training function as the objective of a search. `Trainer.to_trainable` makes it."""

    def __init__(
        self,
        sets: Sequence[Trainer],
        function: Callable[..., Any],
        config: Config,
        metric: str,
        mode: str,
        dataset: Any,
        strategy: CheckpointStrategy,
        timeout: float,
    ) -> None:
        self.max_concurrent = len(sets)
        """The number of trials that may run at a time."""
        # Ray Tune names its runs so.
        self.__name__ = str(getattr(function, "__name__", "trainable"))
        self._first, self._free = sets[0], _queue(sets)
        self._function, self._config, self._metric, self._mode = function, config, metric, mode
        self._dataset, self._strategy, self._timeout = dataset, strategy, timeout

    resume = staticmethod(resume)

    @overload
    def __call__(self, trial: optuna.Trial) -> float: ...

    @overload
    def __call__(self, trial: dict[str, Any]) -> None: ...

    def __call__(self, trial: optuna.Trial | dict[str, Any]) -> float | None:
        """Run one trial: of Optuna, or one with the parameters that Ray Tune has chosen.

        Raises `optuna.TrialPruned`, what the function raises, `UsageError`, and `TrainingFailed`.
        """
        if isinstance(trial, dict):
            self._run_in_ray(trial)
            return None
        self._check_direction(trial)
        trial.set_user_attr(DRIVER, this_process())
        try:
            trainer = self._free.get(timeout=self._timeout)
        except queue.Empty:
            raise TrainingFailed(
                f"no workers were free within {self._timeout:g} s; max_concurrent is {self.max_concurrent}",
                "pass no more n_jobs than that, or a longer timeout",
            ) from None
        try:
            return self._run(trainer, trial)
        except TrainingFailed:
            # Its workers may have ended. The next trial starts others.
            trainer.shutdown()
            raise
        finally:
            self._free.put(trainer)

    def close(self) -> None:
        """End the workers that it has started, but for those of trials that run. A trial would start others."""
        idle: list[Trainer] = []
        with contextlib.suppress(queue.Empty):
            while True:
                idle.append(self._free.get_nowait())
        with contextlib.ExitStack() as stack:
            for trainer in idle:
                stack.callback(self._free.put, trainer)
                if trainer is not self._first:
                    stack.callback(trainer.shutdown)

    def __enter__(self) -> Trainable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """In another process it has one set of workers, which is started there."""
        return {**vars(self), "max_concurrent": 1, "_first": another(self._first), "_free": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _free=_queue([state["_first"]]))

    def _check_direction(self, trial: optuna.Trial) -> None:
        """Raise `UsageError` when the study goes the other way. A trial without a study is only tried out."""
        study, wanted = getattr(trial, "study", None), DIRECTIONS[self._mode]
        if study is not None and (direction := study.direction.name.lower()) != wanted:
            raise UsageError(
                f"the study is to {direction}, and mode is {self._mode!r}",
                f"create it with direction={wanted!r}, or pass the other mode",
            )

    def _run(self, trainer: Trainer, trial: optuna.Trial) -> float:
        run = self._iterator(trainer, _chosen(self._config, trial))
        results: list[dict[str, Any]] = []
        with contextlib.closing(run):
            try:
                for results in run:
                    value, step = self._value(results[0]), results[0]["_training_iteration"]
                    trial.report(value, step)
                    if trial.should_prune():
                        from optuna import TrialPruned

                        raise TrialPruned(f"{self._metric} was {value:g} in report {step}")
            finally:
                trial.set_user_attr("ranks", len(results))
                trial.set_user_attr("checkpoint", run.best)
        if not results:
            raise UsageError("the function has reported nothing", f"call train.report({self._metric}=…)")
        return value

    def _value(self, result: Mapping[str, Any]) -> float:
        found = numbers(result)
        if self._metric not in found:
            there = ", ".join(name for name in found if not name.startswith("_")) or "none"
            raise UsageError(
                f"rank 0 has reported no number {self._metric!r}; its numbers are: {there}",
                "report it, or choose another metric",
            )
        return float(found[self._metric])

    def _run_in_ray(self, parameters: dict[str, Any]) -> None:
        try:
            tune = importlib.import_module("ray.tune")
        except ImportError as error:
            raise UsageError(f"no Ray Tune: {error}", "run: pip install 'ray[tune]'") from error
        fixed = {"config": self._config} if callable(self._config) else self._config
        if left := [name for name, value in fixed.items() if _is_function(value) and name not in parameters]:
            raise UsageError(f"{left[0]} is a function of a trial of Optuna", "put it into param_space")
        with another(self._first) as trainer:
            for results in self._iterator(trainer, {**fixed, **parameters}):
                tune.report(results[0])

    def _iterator(self, trainer: Trainer, config: Mapping[str, Any]) -> TrainingIterator:
        return trainer.run_iterator(
            self._function, config, dataset=self._dataset, checkpoint_strategy=self._strategy
        )


def _queue(sets: Sequence[Trainer]) -> queue.LifoQueue[Trainer]:
    """The sets that are free. Warm ones come out first, and the first one before those that are not."""
    found: queue.LifoQueue[Trainer] = queue.LifoQueue()
    for each in reversed(sets):
        found.put(each)
    return found


def _chosen(config: Config, trial: optuna.Trial) -> Mapping[str, Any]:
    if callable(config):
        return config(trial)
    return {name: value(trial) if _is_function(value) else value for name, value in config.items()}


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


# The table that ``print(trainer)`` shows.

COLUMNS = ("RANK", "NODE", "PID", "DEVICES", "CPU", "MEMORY", "STATE")


def table(status: JobStatus, described: Sequence[Mapping[str, Any]], backend: str, each: str) -> str:
    """One line for each worker. `described` is what each says of itself, or nothing; `each` has these resources."""
    (role,) = status.roles
    rows = [COLUMNS]
    for worker in role.workers:
        own = described[worker.rank] if worker.rank < len(described) else {}
        restarted = f", started {worker.incarnation + 1} times" if worker.incarnation else ""
        rows.append(
            (
                str(worker.rank),
                worker.node,
                str(own.get("pid") or worker.pid or ""),
                str(own.get("devices") or "cpu"),
                f"{own['cpu']:.1f} s" if own else "",
                show_size(own["memory"]) if own else "",
                f"{worker.phase}{restarted}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    head = f"Trainer {status.run_id}: {in_words(str(len(role.workers)), each, backend)}"
    return "\n".join([head, *lines])


GROW_INTERVAL = 60.0
"""Seconds between two attempts to have more ranks."""


class Trainer:
    """Runs functions on `num_workers` ranks, which stay warm between them.

    ::

        def train_func(config):
            model = train.prepare_model(Net())
            for epoch in range(config["epochs"]):
                ...
                train.report(loss=loss)
            return loss

        with Trainer(num_workers=4) as trainer:
            losses = trainer.run(train_func, config={"epochs": 3})  # in rank order

    `num_workers` may be a range: ``(2, 8)`` or ``(4, inf)`` for as many as there is room for. Ranks of a node that goes
    are given up then, and nodes that come are used from a checkpoint on, at most once in `grow_every` seconds.

    `backend` is ``"torch"`` (nccl with `use_gpu`, else gloo), ``"gloo"``, ``"nccl"``, ``"none"``, or that of a package
    (`Backend`); `backend_args` is a `TorchConfig`. `resources_per_worker` has ``CPU`` and ``GPU``, for each rank, as
    `cpus_per_worker` and `gpus_per_worker` have; with GPUs the processors are threads of torch.

    `logdir` is where runs keep their checkpoints and what callbacks write: a path, or a URL that fsspec knows; by
    default a directory below ``$UNIRUN_HOME/train``. With `resume` the first run of this trainer goes on in the
    directory of the first one in `logdir`, from its last checkpoint, the second one in that of the second, and so on:
    so a script whose process was killed is started again as it is. A run survives `max_failures` losses of workers and
    exceptions of the types in `retry_exceptions`, together (-1: any number).

    `placement` says where workers run: the hosts of ``unirun --hosts`` (``"h1:4,h2:4"``), an inventory
    (``"fake:nodes=2,devices=2"``), or a dict of any options of the command, as ``{"hosts": "h1,h2", "interface":
    "eth1"}``; by default this host. `store` is that of ``--store``; `env` are variables of the workers.

    The workers end with this process, or with `shutdown`. Raises `UsageError` for a wrong argument.
    """

    def __init__(
        self,
        num_workers: int | tuple[int, float] = 1,
        backend: str = "torch",
        use_gpu: bool = False,
        resources_per_worker: Mapping[str, float] | None = None,
        logdir: str | os.PathLike[str] | None = None,
        max_failures: int = 3,
        *,
        retry_exceptions: Sequence[type[Exception]] = (),
        placement: str | Mapping[str, Any] = "",
        store: str = "",
        env: Mapping[str, str] | None = None,
        grow_every: float = GROW_INTERVAL,
        cpus_per_worker: int | None = None,
        gpus_per_worker: int | None = None,
        backend_args: TorchConfig | None = None,
        resume: bool = False,
        **unknown: Never,
    ) -> None:
        refuse_arguments(Trainer, unknown)
        least, most = range_of(num_workers)
        use_gpu, resources = requested(use_gpu, resources_per_worker, cpus_per_worker, gpus_per_worker)
        device, slots = resources_of(use_gpu, resources)
        backend, timeout = configured(backend, backend_args)
        check_failures(max_failures, retry_exceptions, grow_every)
        self._decode = find_backend(backend, use_gpu=use_gpu)().decode_data
        # Without GPUs of their own they see none: `torch.cuda.is_available()` tells the truth.
        own = threads_of(resources) if use_gpu else {"CUDA_VISIBLE_DEVICES": ""}
        variables, options = {**own, **environment(env)}, options_of(placement, store)
        self._setup = Setup(least, most, backend, device, slots, variables, options, group_timeout=timeout)
        self._max_failures, self._retry = max_failures, tuple(retry_exceptions)
        self._grow_every = grow_every
        self._logdir = directory(logdir)
        require("resume", resume, bool, "it is True or False")
        if resume and not self._logdir:
            raise UsageError("resume=True without a logdir", "give the logdir in which the runs are")
        self._resume, self._runs = resume, 0
        self._attempts: Attempts | None = None
        self._hook: Callable[[], Any] | None = None
        self._kind: Callable[[], Any] | None = None
        self._run: TrainingIterator | None = None
        self._trainables: weakref.WeakSet[Trainable] = weakref.WeakSet()
        self.logdir = ""
        """The folder in which this trainer keeps the files of its runs; empty before `start`."""
        # Runs also at the exit of the interpreter.
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def start(
        self,
        kind: Callable[..., Any] | None = None,
        *args: Any,
        initialization_hook: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Start the workers, and wait until all are up; `run` does it by itself.

        `initialization_hook` is called in each of them, also in one that has come in the place of another. With a class
        as `kind`, each makes an object of it, with these arguments: the first argument of what `execute` calls. When a
        worker was lost, all ranks make it again, as its constructor may need the others.

        Raises `PlacementError` where there is no room, `UsageError`, `TrainingFailed`, and what the hook or the class
        raises.
        """
        self._leave_run()
        if kind is not None or initialization_hook is not None:
            self._hook = initialization_hook
            self._kind = partial(kind, *args, **kwargs) if kind is not None else None
            if self._attempts is not None:
                self._attempts.prepare_with(self._hook, self._kind)
        try:
            self._started().ready(idle=False)
        except BaseException:
            self.shutdown()
            raise

    def _started(self) -> Attempts:
        """The workers, started if need be."""
        if self._attempts is not None and not self._attempts.workers.lives:
            report("unirun: the workers have ended; others are started")
            self.shutdown()
        if self._attempts is None:
            workers = Workers(self._setup)
            self.logdir = self._logdir or str(unirun_home() / "train" / workers.name)
            check_writable(self.logdir)
            workers.start()
            self._attempts = Attempts(workers)
            self._attempts.prepare_with(self._hook, self._kind)
            # An iterator over a run has the attempts, too, and may outlive this object.
            self._finalizer = weakref.finalize(self._attempts, workers.stop)
        return self._attempts

    def _leave_run(self) -> None:
        """End a run that was not iterated to its end, which would be in the way."""
        if self._run is not None:
            self._run.leave()

    def run(
        self,
        train_func: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        callbacks: Sequence[TrainingCallback] = (),
        dataset: Any = None,
        checkpoint: str | os.PathLike[str] | dict[str, Any] | None = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
    ) -> list[Any]:
        """Run `train_func` in all ranks, and return what it returns in each, in rank order.

        It takes nothing, or `config`. It is sent by value, so it may be a lambda, or defined in a notebook. It goes on
        from `checkpoint`, a path or a state, and after a loss of workers from the last checkpoint that it has saved.
        `dataset` is a dataset, or a dict of several, for `get_dataset_shard`. `callbacks` are called in this thread.

        Raises what the function raises, with the traceback of its worker as the cause, and `TrainingFailed`. The
        workers stay. Ctrl-C ends the run and keeps them, too.
        """
        run = self.run_iterator(train_func, config, callbacks, dataset, checkpoint, checkpoint_strategy)
        try:
            return run.get_final_results(force=True)
        except Exception as error:  # noqa: BLE001 - the same is raised
            raise folded(error)  # noqa: B904

    def run_iterator(
        self,
        train_func: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        callbacks: Sequence[TrainingCallback] = (),
        dataset: Any = None,
        checkpoint: str | os.PathLike[str] | dict[str, Any] | None = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
    ) -> TrainingIterator:
        """The same, as an iterator over the reports: for each, a list with the metrics of each rank."""
        takes = takes_config(train_func, given=bool(config))
        if config is not None:
            require("config", config, Mapping, "give a dict")
        if config and not takes:
            name = name_of(train_func)
            raise UsageError(f"{name} takes no config", f"write def {name}(config)")
        called, data = Callbacks(callbacks), datasets(dataset)
        start = checkpoint_of(checkpoint, local=not self._setup.options)
        strategy = CheckpointStrategy() if checkpoint_strategy is None else checkpoint_strategy
        require("checkpoint_strategy", strategy, CheckpointStrategy, "give a CheckpointStrategy(...)")
        self._leave_run()
        if self._run is not None:
            # Another thread iterates over it.
            self._run.close()
        attempts = self._started()
        url, local = self._next_run()
        own = dict(config or {})
        self._run = TrainingIterator(
            attempts,
            RunTask(train_func, cell_of(train_func), takes, own, data, f"{url}/checkpoints", strategy),
            called,
            self._decode,
            checkpoint=start,
            logdir=local,
            max_failures=self._max_failures,
            retry=self._retry,
            elastic=self._setup.least != self._setup.most,
            grow_every=self._grow_every,
        )
        self._runs += 1
        return self._run

    def _next_run(self) -> tuple[str, str]:
        """The folder of the next run and that of its callbacks."""
        left = left_unfinished(self.logdir) if self._logdir and not self._runs else ""
        if left and not self._resume:
            report(
                f"unirun: the run in {left} was not finished; Trainer(…, resume=True) goes on from its checkpoint"
            )
        return next_run(self.logdir, self._runs + 1 if self._resume else None)

    run_generator = run_iterator
    to_trainable = to_trainable

    @property
    def result(self) -> Result | None:
        """The outcome of the last run: metrics, a data frame, checkpoints, its directory; None before one."""
        return self._run.result if self._run is not None else None

    @property
    def latest_checkpoint(self) -> str | None:
        """The path or URL of the last checkpoint of the last run; None without one."""
        info = self._run.latest if self._run is not None else None
        return info.path if info is not None else None

    @property
    def best_checkpoint_path(self) -> str | None:
        """The path or URL of its best checkpoint, as its strategy has it; None without one."""
        return self._run.best if self._run is not None else None

    def get_last_checkpoint(self) -> Any:
        """The state of the last checkpoint of the last run, with tensors on the CPU; None without one. Raises
        `CheckpointDamaged`."""
        from unirun.train.checkpoints.state import state_at

        path = self.latest_checkpoint
        return None if path is None else state_at(path)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(elsewhere("a Trainer", name, TRAINERS))

    def execute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function` in all ranks, and return the results in rank order. It gets the object of `start` first, if
        there is one. It finds its rank and the process group as in a run, but cannot report. Raises what it raises, and
        `WorkerLost`."""
        self._leave_run()
        return self._started().execute(function, args, kwargs)

    def execute_async(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> InvocationRef[list[Any]]:
        """The same, without waiting: ``ref.result()`` does."""
        self._leave_run()
        return self._started().execute_async(function, args, kwargs)

    @overload
    def execute_single(self, rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...

    @overload
    def execute_single(self, rank: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...

    def execute_single(self, rank: int | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in one rank: ``execute_single(1, f)``; without a number in rank 0."""
        self._leave_run()
        called = (rank, *args) if not callable(rank) else (0, rank, *args)
        number, function = checked_rank(called, self._setup.most)
        return self._started().execute_single(number, function, called[2:], kwargs)

    def shutdown(self) -> None:
        """End the workers, also those of its trainables. `run` would start others."""
        try:
            for trainable in tuple(self._trainables):
                trainable.close()
            if self._run is not None:
                self._run.close()
        finally:
            # Also when a callback raises, as the end of its run calls that.
            finalizer, self._finalizer, self._attempts = self._finalizer, None, None
            if finalizer is not None:
                finalizer()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = isinstance(error, SystemExit) and error.code in (None, 0)
        if kind is not None and not left and self._attempts is not None:
            self._attempts.workers.error = kind.__name__
        self.shutdown()

    def __str__(self) -> str:
        """A table of the workers: where they are, their devices, processor time, memory and state."""
        if self._attempts is None:
            return f"Trainer of {self._setup}, not started"
        workers = self._attempts.workers
        try:
            described = workers.group.describe()
        except WorkerLost:
            described = []
        return table(workers.status(), described, self._setup.backend, self._setup.resources)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In a notebook it shows itself as a table."""
        printer.text(str(self))
