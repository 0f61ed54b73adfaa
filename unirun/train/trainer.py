"""`Trainer`: runs a function on many ranks, from a script, a REPL or a notebook."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from unirun.errors import UsageError, WorkerLost
from unirun.observe.jobdir import unirun_home
from unirun.observe.status import JobStatus
from unirun.roles import InvocationRef
from unirun.spec.read import show_size
from unirun.train import tuning
from unirun.train.arguments import (
    check_failures,
    check_writable,
    checkpoint_of,
    datasets,
    directory,
    environment,
    name_of,
    next_run,
    require,
    takes_config,
)
from unirun.train.backends import find_backend
from unirun.train.callbacks import Callbacks, TrainingCallback
from unirun.train.checkpoints import CheckpointStrategy
from unirun.train.running import Attempts, RunRequest, TrainingIterator
from unirun.train.setup import MANY, Setup, options_of, range_of, resources_of
from unirun.train.workers import Workers
from unirun.wire.reporting import report

# The table that ``print(trainer)`` shows.

COLUMNS = ("RANK", "NODE", "PID", "DEVICES", "CPU", "MEMORY", "STATE")


def table(status: JobStatus, described: Sequence[Mapping[str, Any]], backend: str) -> str:
    """One line for each worker. `described` is what each says of itself, or nothing."""
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
    head = f"Trainer {status.run_id}: {len(role.workers)} workers, backend {backend}"
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
    (`Backend`). `resources_per_worker` has ``CPU`` and ``GPU``, for each rank. `logdir` is where runs keep their
    checkpoints and what callbacks write: a path, or a URL that fsspec knows; by default a directory below
    ``$UNIRUN_HOME/train``. A run survives `max_failures` losses of workers and exceptions of the types in
    `retry_exceptions`, together (-1: any number).

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
    ) -> None:
        least, most = range_of(num_workers)
        device, slots = resources_of(use_gpu, {} if resources_per_worker is None else resources_per_worker)
        check_failures(max_failures, retry_exceptions, grow_every)
        self._decode = find_backend(backend, use_gpu=use_gpu)().decode_data
        # Without GPUs of their own they see none: `torch.cuda.is_available()` tells the truth.
        hidden = {} if use_gpu else {"CUDA_VISIBLE_DEVICES": ""}
        options = options_of(placement, store)
        self._setup = Setup(least, most, backend, device, slots, {**hidden, **environment(env)}, options)
        self._max_failures, self._retry = max_failures, tuple(retry_exceptions)
        self._grow_every = grow_every
        self._logdir = directory(logdir)
        self._attempts: Attempts | None = None
        self._hook: Callable[[], Any] | None = None
        self._kind: Callable[[], Any] | None = None
        self._run: TrainingIterator | None = None
        self._trainables: weakref.WeakSet[tuning.Trainable] = weakref.WeakSet()
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
        return self.run_iterator(
            train_func, config, callbacks, dataset, checkpoint, checkpoint_strategy
        ).get_final_results(force=True)

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
        if self._run is not None:
            # One that was not iterated to its end.
            self._run.close()
        attempts = self._started()
        url, local = next_run(self.logdir)
        request = RunRequest(
            train_func,
            takes,
            dict(config or {}),
            data,
            start,
            strategy,
            f"{url}/checkpoints",
            local,
            self._max_failures,
            self._retry,
            self._setup.least != self._setup.most,
            self._grow_every,
        )
        self._run = TrainingIterator(attempts, request, called, self._decode)
        return self._run

    run_generator = run_iterator
    to_trainable = tuning.to_trainable

    @property
    def latest_checkpoint(self) -> str | None:
        """The path or URL of the last checkpoint of the last run; None without one."""
        info = self._run.latest if self._run is not None else None
        return info.path if info is not None else None

    @property
    def best_checkpoint_path(self) -> str | None:
        """The path or URL of its best checkpoint, as its strategy has it; None without one."""
        return self._run.best if self._run is not None else None

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

    def execute_single(self, rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function` in one rank."""
        self._leave_run()
        return self._started().execute_single(rank, function, args, kwargs)

    def shutdown(self) -> None:
        """End the workers, also those of its trainables. `run` would start others."""
        for trainable in tuple(self._trainables):
            trainable.close()
        if self._run is not None:
            self._run.close()
        finalizer, self._finalizer, self._attempts = self._finalizer, None, None
        if finalizer is not None:
            finalizer()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __str__(self) -> str:
        """A table of the workers: where they are, their devices, processor time, memory and state."""
        if self._attempts is None:
            least, most = self._setup.least, self._setup.most
            ranks = f"{least}" if least == most else f"{least} to {most if most < MANY else 'any number of'}"
            return f"Trainer of {ranks} workers, backend {self._setup.backend}, not started"
        workers = self._attempts.workers
        try:
            described = workers.group.describe()
        except WorkerLost:
            described = []
        return table(workers.status(), described, self._setup.backend)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In a notebook it shows itself as a table."""
        printer.text(str(self))
