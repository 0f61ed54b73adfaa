"""`Session`: one rank's part of one attempt of a run, behind the `functions` that a training function calls.

The function's thread reports and saves; threads of calls take its reports for the driver, commit checkpoints, and
interrupt it. Outside a `Trainer` there is a session of one rank, so that it can be debugged with plain python.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader

from unirun.errors import UnirunError, UsageError
from unirun.observe.spans import spans
from unirun.roles.calls.codec import dump
from unirun.roles.interruption import Interrupted
from unirun.roles.nested import mapped
from unirun.roles.stopping import Stopping
from unirun.train.checkpoints import Folder, Info, Manifest, files_in
from unirun.train.checkpoints.state import (
    encode,
    is_sharded,
    load,
    outline,
    plain_state,
    put_into,
    snapshot,
)
from unirun.train.checkpoints.writer import CheckpointWriter
from unirun.train.data import Consumed
from unirun.train.data.loader import Loader, Shard, sharded
from unirun.train.lockstep import Reported
from unirun.wire.progress import page
from unirun.wire.reporting import report as report_error

AHEAD = 2
"""Reports that the function may make before the driver has taken them."""

SAVE_SECONDS = 1800.0
"""Seconds that a rank may take to save, before ``hang_timeout`` begins to count."""

METRICS_INTERVAL = 1.0
"""Seconds between two reports of a rank that are among the job's metrics, for its page and ``unirun top``."""

RESERVED = "_"
"""The first character of the names of metrics that unirun adds."""


class Session:
    """One rank's part of one attempt of a run; or of a function that `Trainer.execute` calls, which is no run, so it
    has no reports and no checkpoints."""

    dtype: torch.dtype | None = None
    """The precision in which the function computes (`accelerate`); None for that of the parameters."""
    scaler: torch.amp.GradScaler | None = None
    """The scaler of gradients, for float16 on a GPU."""
    has_stepped = False
    """True if an optimizer has made a step with the present scale."""
    has_prepared = False
    """True if a model or an optimizer was prepared in this precision."""
    attempt = 0
    """The number of the attempt, the same in all ranks."""
    accelerated_first = False
    """True if the function has called `accelerate` before that."""

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        local_rank: int = 0,
        *,
        is_run: bool = True,
        config: Mapping[str, Any] | None = None,
        datasets: Mapping[str | None, Any] | None = None,
        writer: CheckpointWriter | None = None,
        resume: tuple[Folder, Manifest] | dict[str, Any] | None = None,
        saves: int = 0,
        tell: Callable[[Mapping[str, float]], None] = lambda values: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`local_rank` is the number of this rank among those of its node. `resume` is the checkpoint that the function
        goes on from: one in a folder, or a state; `saves` is the number of the last one of the run, 0 at first. Without
        a `writer` nothing that is saved is kept. `tell` gets what is reported, a time each second at most, for the
        metrics of the job."""
        self.rank, self.world, self.local_rank, self.is_run = rank, world, local_rank, is_run
        self.config = dict(config or {})
        self._deterministic: bool | None = None
        self._datasets, self._writer, self._resume = dict(datasets or {}), writer, resume
        self._now, self._tell = now, tell
        self._told, self._untold = -math.inf, dict[str, Any]()
        self._shards: dict[str, Shard] = {}
        self._options: dict[str, dict[str, Any]] = {}
        self._adopted: list[tuple[DataLoader[Any], Loader]] = []
        self._changed = threading.Condition()
        self._reports: deque[Reported] = deque()
        self._interrupted = ""
        self._last = now()
        self._waited = 0.0
        self._reseed: Callable[[int], None] = lambda number: None
        self._saves = saves
        self._asked = 0
        self._stopping: Stopping | None = None
        self._next = Reported(1)
        """The next report, as far as it is known."""
        self._loaded = resume is None
        self._fetched: tempfile.TemporaryDirectory[str] | None = None

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Hand `metrics` to the driver. Waits while it has not taken those before."""
        self._check_run("report")
        self.check()
        check_names(metrics)
        self._check_loaded()
        values = {name: _plain(name, value) for name, value in metrics.items()}
        now = self._now()
        values |= {"_timestamp": time.time(), "_time_this_iter_s": now - self._last}
        if self._shards:
            waited = sum(shard.waited for shard in self._shards.values())
            values["_data_wait"] = (waited - self._waited) / max(now - self._last, 1e-9)
            self._waited = waited
        self._last = now
        page().step(self._next.number)
        self._untold = {"training_iteration": self._next.number, **values}
        pending = self._writer.reported(values) if self._writer is not None else None
        with self._changed:
            while len(self._reports) >= AHEAD and not self._interrupted:
                with page().idle():
                    self._changed.wait()
            self.check()
            self._reports.append(replace(self._next, metrics=values, pending=pending))
            self._next = replace(self._next, number=self._next.number + 1, outline={})
            self._changed.notify_all()
        if now >= self._told + METRICS_INTERVAL:
            self._tell_metrics()
            self._told = now

    def _tell_metrics(self) -> None:
        told, self._untold = _numbers(self._untold), {}
        # Without its agent the rank has other troubles than this.
        with contextlib.suppress(UnirunError):
            self._tell(told)

    def finish(self) -> None:
        """The function has returned: wait for checkpoints that are being written."""
        if self._untold:
            self._tell_metrics()
        pending = self._writer.finish() if self._writer is not None else None
        with self._changed:
            self._reports.append(replace(self._next, pending=pending, ended=True))
            self._changed.notify_all()

    def should_stop(self) -> bool:
        """Return True when all ranks stop, after as many calls in each."""
        self._check_run("should_stop")
        self.check()
        self._stopping = self._stopping or Stopping(chained=False)
        self._asked += 1
        return self._stopping.should_stop(self._asked, self.attempt)

    def leave_as_told(self) -> None:
        """The function is over. If it has asked whether it should stop, and the worker was told to end: let the
        checkpoint count, and end."""
        if self._stopping is None:
            return
        if self._stopping.stopped and self._writer is not None:
            self._writer.settle()
        self._stopping.close()

    def take(self, number: int) -> Reported:
        """The report with this number; those before were taken. Waits for it, or for the end. Raises `Interrupted`."""
        with self._changed:
            while True:
                while self._reports and self._reports[0].number < number:
                    self._reports.popleft()
                    self._changed.notify_all()
                if not self._reports or self._reports[0].ended:
                    self.check()
                if self._reports:
                    # It stays until the driver asks for the next one, as then the driver has it.
                    return self._reports[0]
                self._changed.wait()

    def commit(self, number: int) -> Future[list[Info]]:
        """Make a checkpoint of this rank count."""
        assert self._writer is not None
        return self._writer.commit(number)

    def interrupt(self, reason: str) -> None:
        """End the run of this rank: `report` and the like raise, and who waits is told."""
        with self._changed:
            self._interrupted = reason
            self._changed.notify_all()

    @property
    def interrupted(self) -> bool:
        """True if it was interrupted."""
        return bool(self._interrupted)

    def check(self) -> None:
        """Raise `Interrupted` when it was."""
        if self._interrupted:
            raise Interrupted(self._interrupted)

    def save(self, state: Mapping[str, Any], files: Any = None) -> None:
        """Save a checkpoint, with files if there are any."""
        self._check_run("save_checkpoint")
        self.check()
        added = None if files is None else files_in(files)
        if state or added:
            # Without one it has nothing to load: the positions of datasets are all that it saves.
            self._check_loaded()
        else:
            self._loaded = True
        shares = {name: shard.progress for name, shard in self._shards.items()}
        if self._writer is not None:
            began = time.time_ns()
            with page().allowance(SAVE_SECONDS):
                saved = self._writer.save(state, shares, added)
                self._count_saved(saved, together=bool(shares) or added is not None)
            spans().write("life", "save_checkpoint", began)
        self._saves += 1
        self._reseed(self._saves)

    def _check_run(self, what: str) -> None:
        if not self.is_run:
            raise UsageError(
                f"{what}() was called in a function that is no run", "use Trainer.run, or return the value"
            )

    def _count_saved(self, whole: dict[str, Any], *, together: bool) -> None:
        if not self._next.saves and self.world > 1:
            self._next = replace(self._next, outline=outline(whole), sharded=is_sharded(whole))
        self._next = replace(self._next, saves=self._next.saves + 1, together=together)

    def _check_loaded(self) -> None:
        """Warn once if the function has not loaded the checkpoint that the run goes on from. Only rank 0 warns, as one
        rank may load it for all."""
        if not self._loaded and not self.rank:
            found = (
                self._resume[0].path(self._resume[1].number) if isinstance(self._resume, tuple) else "a state"
            )
            report_error(
                f"unirun: this run goes on from {found}, which the function has not loaded, so it begins anew; "
                "call load_checkpoint first"
            )
        self._loaded = True

    def begin_seeds(self, reseed: Callable[[int], None]) -> None:
        """Call `reseed` with the number of each checkpoint that is saved or loaded, and now. Algorithms are
        deterministic until the attempt is over."""
        if self._deterministic is None:
            self._deterministic = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        self._reseed = reseed
        reseed(self._saves)

    def files(self, rank: int) -> Path | None:
        """The directory with the files that a rank has added to the checkpoint that the run goes on from."""
        self.check()
        self._loaded = True
        if not isinstance(self._resume, tuple):
            return None
        if self._fetched is None:
            self._fetched = tempfile.TemporaryDirectory(prefix="unirun-files-")
        folder, manifest = self._resume
        return folder.fetch(manifest, rank, self._fetched.name)

    def load(self, into: dict[str, Any] | None) -> dict[str, Any] | None:
        """The state that the run goes on from; None at the beginning."""
        self.check()
        self._loaded = True
        try:
            if self._resume is None:
                return None
            if isinstance(self._resume, tuple):
                return load(*self._resume, into)
            # A copy, as what loads it may change it.
            state: dict[str, Any] = snapshot(plain_state(self._resume))
            put_into(into or {}, state)
            return state
        finally:
            self._reseed(self._saves)

    def shard(
        self,
        name: str | None,
        *,
        otherwise: Any = None,
        shuffle: bool = False,
        seed: int = 0,
        block: int = 1024,
    ) -> Shard:
        """This rank's part of the dataset `name`: each call with these options returns the same."""
        key = name if name is not None else ""
        options = {"shuffle": shuffle, "seed": seed, "block": block}
        if key not in self._shards:
            dataset = self._dataset(name, otherwise)
            self._shards[key] = Shard(
                key or "dataset",
                dataset,
                self.rank,
                self.world,
                shuffle=shuffle,
                seed=seed,
                block=block,
                consumed=self._consumed(key),
            )
            self._options[key] = options
        if (before := self._options.get(key, options)) != options:
            raise UsageError(
                f"dataset {key or 'dataset'!r} is asked for with {_shown(options)}, and was before "
                f"with {_shown(before)}",
                "pass the same each time, or keep what the first call has returned",
            )
        return self._shards[key]

    def _dataset(self, name: str | None, otherwise: Any) -> Any:
        if name in self._datasets:
            return self._datasets[name]
        if otherwise is not None:
            return otherwise
        there = ", ".join(repr(each) for each in self._datasets) or "none"
        raise UsageError(
            f"this run has no dataset {name!r}; it has {there}",
            "pass dataset= to Trainer.run, or otherwise= here for plain python",
        )

    def adopt(self, loader: DataLoader[Any]) -> Loader:
        """The part of a user's loader that this rank has: that of before for one that is made again in each epoch."""
        for before, known in self._adopted:
            if _are_alike(before, loader):
                return known
        key = f"loader {len(self._adopted)}"
        found = sharded(loader, key, self.rank, self.world, consumed=self._consumed(key))
        self._shards[key] = found.shard
        self._adopted.append((loader, found))
        return found

    def _consumed(self, key: str) -> Consumed:
        return self._resume[1].data.get(key, Consumed()) if isinstance(self._resume, tuple) else Consumed()

    def end_loaders(self) -> None:
        """End the processes that the loaders of the function have kept, as it has ended. Otherwise the signal
        that ends this process ends them, too, and torch raises an error for each."""
        for _, loader in self._adopted:
            loader.close()

    def close(self) -> None:
        """The attempt is over."""
        if self._deterministic is not None:
            torch.use_deterministic_algorithms(self._deterministic)
        if self._writer is not None:
            self._writer.close()
        if self._fetched is not None:
            self._fetched.cleanup()


def _are_alike(one: DataLoader[Any], other: DataLoader[Any]) -> bool:
    """Return True if both give the samples of one dataset in the same batches and order."""
    return isinstance(other, DataLoader) and one.dataset is other.dataset and _batches(one) == _batches(other)


def _batches(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """The samplers and the size by which a loader makes its batches."""
    batches: Any = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    return type(batches), getattr(batches, "batch_size", None), type(sampler)


def check_names(metrics: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a name of a metric that is reserved, or no text."""
    for name in metrics:
        if not isinstance(name, str):
            raise UsageError(f"the name of a metric is {name!r}", "give a text")
        if name.startswith(RESERVED):
            raise UsageError(
                f"the metric {name!r} begins with an underscore", "such names are those that unirun adds"
            )


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _plain(name: str, value: Any) -> Any:
    """A copy of a metric, as the function goes on: tensors and arrays of one element as numbers, others in the memory
    of the host. Raises `EncodingError` for one that cannot be sent."""
    if type(value) in (float, int, str):
        return value
    return mapped(lambda leaf: _number_or_copy(leaf, name), value)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers, tensors of one element among them."""
    found = {}
    for name, value in metrics.items():
        if not isinstance(value, str | bytes) and not name.startswith(RESERVED):
            with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
                found[name] = float(value)
    return found


def _number_or_copy(value: Any, name: str) -> Any:
    if hasattr(value, "item") and getattr(value, "numel", lambda: getattr(value, "size", 1))() == 1:
        return value.item()
    if hasattr(value, "detach"):
        return value.detach().to("cpu", copy=True)
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - classes raise what they like
        dump(value, f"the metric {name!r}")
        return value


# `Alone`: what a training function finds in plain python, where no trainer says when a run begins.


class Alone(Session):
    """The session of rank 0 of 1. A function that is called again finds nothing of the call before."""

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Print `metrics`."""
        check_names(metrics)
        report_error("report: " + ", ".join(f"{name}={value}" for name, value in metrics.items()))

    def save(self, state: Mapping[str, Any], files: Any = None) -> None:
        """Only check that it can be saved: there is no run that would go on from it."""
        whole = plain_state(state)
        if not is_sharded(whole):
            encode(whole, os.devnull)
        super().save(state, files)

    def begin_seeds(self, reseed: Callable[[int], None]) -> None:
        """The same, from the numbers of the first call on."""
        self._saves = 0
        super().begin_seeds(reseed)

    def shard(self, name: str | None, *, otherwise: Any = None, **options: Any) -> Shard:
        """All of a dataset, from its beginning."""
        self._shards.clear()
        return super().shard(name, otherwise=otherwise, **options)
