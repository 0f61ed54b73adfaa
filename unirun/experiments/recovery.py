"""`RecoverInfo`: from where a trial goes on, and the checkpoints beside it.

::

    <trial>/recover/000012/actor@0/00003.pt   what rank 3 of a model needs to go on
                          /recover.json       written last, by one rename: the trial can go on from here
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import msgspec

from unirun.errors import CheckpointDamaged, UsageError
from unirun.experiments.config import ExperimentConfig
from unirun.experiments.control import Frequencies
from unirun.experiments.layout import ProcessTopology
from unirun.reporting import report
from unirun.values import Value

FILE = "recover.json"
KEPT = 2
"""Checkpoints that are kept: the last one, and the one before, which is used if recover.json is damaged."""


class ModelSettings(Value):
    """The layout of a model, and the type of its backend."""

    topology: ProcessTopology
    backend: str

    def __str__(self) -> str:
        return f"{self.backend} with {self.topology}"


class Settings(Value):
    """What must not change between a checkpoint and the trial that goes on from it. `models` are those that have files
    in a checkpoint."""

    n_seqs: int
    models: dict[str, ModelSettings]

    @staticmethod
    def of(config: ExperimentConfig) -> Settings:
        """Those of a configuration that is resolved. All of its calls have one `n_seqs`."""
        models = {
            str(shard.id.model_name): ModelSettings(shard.id.topo, shard.backend.type_)
            for worker in config.model_worker
            for shard in worker.shards
            if shard.should_instantiate
        }
        return Settings(config.model_rpcs[0].n_seqs, models)

    def changes(self, now: Settings) -> list[str]:
        """What is different `now`, in words."""
        found = [f"n_seqs was {self.n_seqs} and is {now.n_seqs}"] if self.n_seqs != now.n_seqs else []
        for name in sorted({*self.models, *now.models}):
            before, after = self.models.get(name), now.models.get(name)
            if before != after:
                found.append(f"{name} was {before or 'not there'} and is {after or 'not there'}")
        return found


class RecoverInfo(Value):
    """How far a trial has come: `step` steps are done in all, and `epoch_step` in the epoch. `used_ids` are the samples
    of the epoch that were used. `versions` says how often each model was trained. `settings` is None until it is
    written."""

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    used_ids: tuple[str, ...] = ()
    frequencies: Frequencies = Frequencies()
    versions: dict[str, int] = {}  # noqa: RUF012
    settings: Settings | None = None


class Recovery:
    """The checkpoints of a trial, in a directory that all of its processes reach."""

    def __init__(self, root: Path) -> None:
        self._root = root / "recover"

    def path(self, step: int) -> Path:
        """Where the checkpoint after so many steps is."""
        return self._root / f"{step:06}"

    def folder(self, step: int, model: str) -> Path:
        """The directory of one model in that checkpoint."""
        return self.path(step) / model

    def prepare(self, step: int, models: list[str]) -> None:
        """Make the directories of a new checkpoint, and drop what an attempt before has left of it."""
        shutil.rmtree(self.path(step), ignore_errors=True)
        for model in models:
            self.folder(step, model).mkdir(parents=True)

    def commit(self, info: RecoverInfo) -> None:
        """Make the checkpoint valid, after all ranks have written their parts. Remove older checkpoints."""
        path = self.path(info.step) / FILE
        part = path.with_suffix(".partial")
        with part.open("wb") as file:
            file.write(msgspec.json.encode(info))
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
        kept = [step for step in self.steps() if step <= info.step][-KEPT:]
        # What was begun before and never finished goes, too.
        for step in self._numbers():
            if step < info.step and step not in kept:
                shutil.rmtree(self.path(step), ignore_errors=True)

    def steps(self) -> list[int]:
        """The steps of all valid checkpoints, in ascending order."""
        return [step for step in self._numbers() if (self.path(step) / FILE).exists()]

    def _numbers(self) -> list[int]:
        """All directories, in ascending order, also of checkpoints that do not count."""
        found = self._root.iterdir() if self._root.is_dir() else ()
        return sorted(int(path.name) for path in found if re.fullmatch(r"\d{6,}", path.name))

    def latest(self) -> RecoverInfo | None:
        """The last valid checkpoint, or None. One whose recover.json is damaged is skipped, with a warning."""
        for step in reversed(self.steps()):
            try:
                return self.read(step)
            except CheckpointDamaged as error:
                report(f"unirun: {error}; an earlier one is used")
        return None

    def read(self, step: int) -> RecoverInfo:
        """Read the recover.json of one checkpoint. Raises `CheckpointDamaged`."""
        path = self.path(step) / FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=RecoverInfo)
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointDamaged(f"{path} cannot be read: {error}") from error

    def check(self, info: RecoverInfo, now: Settings) -> None:
        """Raise `UsageError` if the settings of a checkpoint are not those of `now`."""
        changes = info.settings.changes(now) if info.settings is not None else []
        if changes:
            raise UsageError(
                f"{self.path(info.step)} was written with other settings: {'; '.join(changes)}",
                "start with the settings of before, with another trial name, or with --recover-mode disabled",
            )

    def discard(self, step: int) -> None:
        """A checkpoint cannot be read: it is none from now on."""
        (self.path(step) / FILE).rename(self.path(step) / f"{FILE}.damaged")

    def clear(self) -> None:
        """The trial begins anew."""
        shutil.rmtree(self._root, ignore_errors=True)
