"""`Trainable`: a training function as the objective of a search for hyperparameters, by Optuna or Ray Tune.

Trials run side by side, each on a set of workers of its own. A set is a trainer with the same settings as the others,
and stays warm between trials.
"""

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
from typing import TYPE_CHECKING, Any, Literal, overload

from msgspec.structs import asdict, replace

from unirun.collocation import Inventory, count_slots, local_inventory, parse_fake, place
from unirun.errors import PlacementError, TrainingFailed, UsageError
from unirun.spec.parse import parse_job
from unirun.train.callbacks.base import numbers
from unirun.train.checkpoints import CheckpointStrategy
from unirun.train.setup import ROLE, Setup

if TYPE_CHECKING:
    import optuna

    from unirun.train.running import TrainingIterator
    from unirun.train.trainer import Trainer


# Sets of workers side by side, each behind a trainer of its own: how many there may be, and what each has.
#
# A job is placed as if it were alone, so what devices and threads each set has is decided here.

ELSEWHERE = ("--hosts", "--hostfile", "--slurm", "--nnodes")
"""Options of jobs on other hosts, of which this process does not know what they have."""


class DeviceSetup(Setup):
    """The request of a set of workers that may have no devices but these."""

    devices: tuple[str, ...] = ()

    def job_file(self, name: str) -> dict[str, Any]:
        """The job, as a job file has it."""
        job = super().job_file(name)
        job["roles"][ROLE]["devices"] = list(self.devices)
        return job


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
            own = _planned(_part(setup, left), inventory)
        except PlacementError:
            break
        found.append(_part(setup, own))
    return found


def _planned(setup: Setup, inventory: Inventory) -> tuple[str, ...]:
    """The devices that a job gets when it is alone. Raises `PlacementError`."""
    count = partial(count_slots, inventory=inventory)
    _, placement = place(parse_job(setup.job_file("set"), count_slots=count, run_id="set"), inventory)
    return tuple(device for rank in placement.assignments for device in rank.own)


def _part(setup: Setup, devices: Sequence[str]) -> DeviceSetup:
    return DeviceSetup(**asdict(setup), devices=tuple(devices))


def another(trainer: Trainer, setup: Setup | None = None) -> Trainer:
    """A trainer with the same settings, or with another `setup`, that is not started."""
    other = copy.copy(trainer)
    other._setup = setup or trainer._setup
    # A trainer numbers the runs in its directory, so each needs its own.
    other._logdir = trainer._logdir and f"{trainer._logdir.rstrip('/')}/{secrets.token_hex(3)}"
    other._attempts = other._run = other._finalizer = None
    other._trainables, other.logdir = weakref.WeakSet(), ""
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
