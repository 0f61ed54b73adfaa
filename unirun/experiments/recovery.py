"""Files of a trial: `RecoverInfo`, the checkpoints beside it, and the records of its figures.

::

    <trial>/recover/000012/actor@0/00003.pt   what rank 3 of a model needs to go on
                          /recover.json       written last, by one rename: the trial can go on from here
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from unirun import atomic
from unirun.errors import CheckpointDamaged, TrainingFailed, UsageError, WorkerLost
from unirun.experiments.config import INTERFACES, DatasetAbstraction, Since
from unirun.experiments.experiment import ExperimentConfig
from unirun.experiments.graph import Abstraction
from unirun.experiments.starting import plain
from unirun.observe.events import read_lines
from unirun.train.losses import LIMIT
from unirun.values import Value, natural
from unirun.wire.frames import finite
from unirun.wire.reporting import report

STEPS, EVALUATIONS, SAVES = "steps.jsonl", "evaluations.jsonl", "saves.jsonl"
CHECKPOINTS, SAVED = "checkpoints", "step"
"""The directory of saved models; how the name of each one begins, which ends with its step."""

FILE = "recover.json"
KEPT = 2
"""Checkpoints that are kept: the last one, and the one before, which is used if recover.json is damaged."""


DATA = "datasets.content"
"""The setting with the content of the datasets. Only workers know it, as they read them."""

EPOCHS = "total_train_epochs"
"""The setting that decides numbers only where the learning rate follows from it."""


CODE = "code."
"""The beginning of settings with the digest of the file of an interface. A change there is reported, not refused."""

Settings = dict[str, str]
"""The settings that decide the numbers of a trial, in JSON, by names such as ``models.actor@0.backend.lr``. A long
value is a digest."""


def settings_of(config: ExperimentConfig) -> Settings:
    """The settings of a resolved configuration, without `DATA`. All of its calls have one `n_seqs`."""
    first = config.model_worker[0]
    found: dict[str, Any] = {
        "n_seqs": config.model_rpcs[0].n_seqs,
        "seed": first.base_seed,
        "shuffle_dataset": config.master_worker[0].shuffle_dataset,
        "tokenizer": first.tokenizer_name_or_path,
        "datasets": {str(at): _named(each) for at, each in enumerate(_datasets(config))},
    }
    for manager in config.gserver_manager:
        rollout = config.rollout_worker[0]
        found["gserver_manager.max_head_offpolicyness"] = manager.max_head_offpolicyness
        found["rollout_worker"] = {"agent": _named(rollout.agent), "env": _named(rollout.env)}
    for worker in config.model_worker:
        for shard in worker.shards:
            if shard.should_instantiate:
                found[f"models.{shard.id.model_name}"] = {
                    "layout": {**plain(shard.id.topo), "order": shard.id.topo.axes},
                    "backend": _named(shard.backend),
                    "model": _named(shard.model),
                    "eval_dataset": _named(shard.eval_dataset) if shard.eval_dataset else {},
                }
                rate = shard.backend.args
                if rate.get("schedule", "constant") != "constant" or rate.get("warmup"):
                    found[EPOCHS] = config.exp_ctrl.total_train_epochs
    for call in config.model_rpcs:
        named = {name: getattr(call, name) for name in _OF_CALLS}
        found[f"model_rpcs.{call.name}"] = {**named, "interface": _named(call.interface_impl)}
    return {**dict(_flat("", plain(found))), **_code(config)}


def changes(before: Settings, now: Settings) -> dict[str, str]:
    """The settings that are different `now`: by name what has changed, in words. The content of datasets, the number of
    epochs and code are compared only if both have them."""
    found: dict[str, str] = {}
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if old == new or (None in (old, new) and (name in (DATA, EPOCHS) or name.startswith(CODE))):
            continue
        found[name] = f"{name}: {old or 'none'} → {new or 'none'}"
        if name.startswith(CODE):
            found[name] = f"the code of interface {name.removeprefix(CODE)!r} has changed"
    return found


_OF_CALLS = (
    "interface_type", "model_name", "input_keys", "output_keys", "input_key_remap", "output_key_remap", "mb_spec",
    "balanced_dp", "error_if_nonfinite", "pre_hooks", "post_hooks",
)  # fmt: skip
"""Attributes of a call that decide its results, besides its interface and its data."""

_LONGEST = 160
"""Characters of a setting that is written as it is."""


def _datasets(config: ExperimentConfig) -> list[DatasetAbstraction]:
    """The datasets of the first worker that reads any."""
    each = [worker.datasets for worker in config.rollout_worker]
    each += [worker.datasets for worker in config.model_worker]
    return next(filter(None, each), [])


def _named(chosen: Abstraction) -> dict[str, Any]:
    """The arguments of something that is registered, and its name there."""
    return {"type": chosen.type_, **chosen.args}


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The settings in a mapping of mappings, each with its whole name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            # An abstraction is there under its own name: ``train.interface`` is its type.
            yield from _flat(name if key == "type" else f"{name}.{key}".lstrip("."), inner)
        return
    # The address of an object differs between processes.
    text = re.sub(r" at 0x[0-9a-f]+", "", json.dumps(value, sort_keys=True))
    if len(text) > _LONGEST:
        text = f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}, {len(text)} characters"
    yield name, text


def _code(config: ExperimentConfig) -> dict[str, str]:
    """A digest of the file of each interface."""
    found = {}
    for call in config.model_rpcs:
        kind = call.interface_impl.type_
        file = getattr(sys.modules.get(getattr(INTERFACES.at_hand(kind), "__module__", "")), "__file__", None)
        if file is not None and Path(file).is_file():
            found[CODE + kind] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return found


class RecoverInfo(Value):
    """The progress of a trial: `step` steps are done in all, and `epoch_step` in the epoch. `used_ids` are
    the samples of the epoch that were used. `frequencies` has by task, such as ``save``, the epochs, steps and
    seconds since it was last done. `versions` says how often each model was trained. `settings` is
    None until it is written."""

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    used_ids: tuple[str, ...] = ()
    frequencies: Since = {}  # noqa: RUF012
    versions: dict[str, int] = {}  # noqa: RUF012
    settings: dict[str, str] | None = None


class Recovery:
    """The checkpoints of a trial, and its records, from which it goes on, in a directory that all of its processes
    reach. Records are figures of steps, of held-out data and of saved models, an object in each line."""

    def __init__(self, root: Path) -> None:
        self._top, self._root = root, root / "recover"
        self.buffer = self._root / "buffer"
        """The directory of the trajectories of an asynchronous trial (`unirun.experiments.buffer`)."""

    def path(self, step: int) -> Path:
        """The path of the checkpoint after so many steps."""
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
        atomic.replace(self.path(info.step) / FILE, msgspec.json.encode(info), lasting=True)
        kept = self.steps()[-KEPT:]
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

    def latest(self, before: int | None = None) -> RecoverInfo | None:
        """The last valid checkpoint, of those `before` a step if one is given; None without any. One whose recover.json
        is damaged is skipped, with a warning. Raises `CheckpointDamaged` when there are checkpoints and none
        can be read: a trial must not lose its work unasked."""
        steps, found = self.steps(), None
        damaged: list[CheckpointDamaged] = []
        for step in reversed([step for step in steps if before is None or step < before]):
            try:
                found = self.read(step)
                break
            except CheckpointDamaged as error:
                damaged.append(error)
        more = "" if found is None else "; an earlier one is used"
        for each in damaged:
            report(f"unirun: {each}{more}")
        if steps and found is None:
            raise CheckpointDamaged(
                f"there are checkpoints in {self._root}, and none of them can be read",
                "go on with the version of unirun that has written them, or begin anew: with --recover-mode disabled "
                "or with another trial name",
            )
        return found

    def read(self, step: int) -> RecoverInfo:
        """Read the recover.json of one checkpoint. Raises `CheckpointDamaged`."""
        path = self.path(step) / FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=RecoverInfo)
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointDamaged(f"{path} cannot be read: {error}") from error

    def check(self, info: RecoverInfo, now: Settings, accepted: Sequence[str] = ()) -> list[str]:
        """The accepted changes from `info` to `now`, in words. `accepted` are names of settings, or their beginnings up
        to a dot. Raises `UsageError` if any other setting that decides the numbers has changed."""
        if info.settings is None:
            return []
        told: dict[str, str] = {}
        refused: dict[str, str] = {}
        for name, change in changes(info.settings, now).items():
            named = any(name == key or name.startswith(f"{key}.") for key in accepted)
            allowed = name.startswith(CODE) or (named and _may_be_accepted(name))
            (told if allowed else refused)[name] = change
        if refused:
            remedy = (
                "start with the settings of before, with another trial name, or with --recover-mode disabled"
            )
            if all(map(_may_be_accepted, refused)):
                names = " ".join(f"--accept-change {name}" for name in refused)
                remedy = f"{remedy}; to go on all the same: {names}"
            problem = f"was written with other settings: {'; '.join(refused.values())}"
            raise UsageError(f"{self.path(info.step)} {problem}", remedy)
        return [*told.values()]

    def discard(self, step: int) -> None:
        """A checkpoint cannot be read: it is none from now on."""
        (self.path(step) / FILE).rename(self.path(step) / f"{FILE}.damaged")

    def clear(self) -> None:
        """The trial begins anew."""
        shutil.rmtree(self._root, ignore_errors=True)

    def record(self, name: str, line: Mapping[str, Any]) -> None:
        """Add a line to the records of this name. A figure that is not finite is null in it."""
        with (self._top / name).open("a") as file:
            file.write(_json(line))

    def records(self, name: str) -> list[dict[str, Any]]:
        """All lines of these records. One that was cut, as its process was killed, is left out."""
        path = self._top / name
        return [*read_lines(path)] if path.exists() else []

    def record_of(self, name: str, step: int) -> dict[str, Any]:
        """The figures of the line of `step`, nan for those that are null; none if there is no such line."""
        found = [line for line in self.records(name) if line.pop("step") == step]
        return (
            {key: math.nan if value is None else value for key, value in found[-1].items()} if found else {}
        )

    def set_aside(self) -> None:
        """The trial begins anew: move these files and the saved models of the run before to ``earlier/1``, …"""
        self._remove_drafts()
        there = [self._top / name for name in (STEPS, EVALUATIONS, SAVES, CHECKPOINTS)]
        there = [path for path in there if path.exists()]
        if there:
            top = self._top / "earlier"
            top.mkdir(exist_ok=True)
            numbers = [natural(path.name) or 0 for path in top.iterdir()]
            folder = top / str(1 + max(numbers, default=0))
            folder.mkdir()
            for path in there:
                path.rename(folder / path.name)

    def _remove_drafts(self) -> None:
        """Remove the models that workers were saving when they were killed. They may be large."""
        for draft in self._top.glob(f"{CHECKPOINTS}/*/.{SAVED}*{atomic.PARTIAL}"):
            shutil.rmtree(draft)

    def drop_after(self, step: int) -> None:
        """Drop the lines and the saved models of steps after `step`: the trial goes on there and makes them again. Its
        checkpoints after that step, which cannot be read, count no more, so that they take the place of no other."""
        for later in self.steps():
            if later > step:
                self.discard(later)
        self._remove_drafts()
        for path in self._top.glob(f"{CHECKPOINTS}/*/{SAVED}*"):
            if _number(path.name) > step:
                shutil.rmtree(path)
        for name in (STEPS, EVALUATIONS, SAVES):
            if (self._top / name).exists():
                lines = [line for line in self.records(name) if _step_of(line) <= step]
                atomic.replace(self._top / name, "".join(map(_json, lines)), lasting=True)


def _may_be_accepted(setting: str) -> bool:
    """False for `n_seqs` and layouts: the checkpoint has a file for each rank, and a position counted in batches."""
    return setting != "n_seqs" and ".layout." not in setting


def _json(line: Mapping[str, Any]) -> str:
    return json.dumps(finite(line), allow_nan=False) + "\n"


def _number(save: str) -> int:
    """The step of a saved model: 12 of ``step000012``; -1 for a name that no trial gives."""
    found = re.fullmatch(rf"{SAVED}(\d+)", save)
    return int(found[1]) if found else -1


def _step_of(line: Mapping[str, Any]) -> int:
    return _number(line["save"]) if "save" in line else int(line["step"])


class SavedModels:
    """Has an evaluator, if there is one, evaluate each model that was saved in `folder`, in their order. `tell` is
    called with the step and the figures of each."""

    def __init__(
        self,
        recovery: Recovery,
        folder: Path,
        evaluator: Any | None,
        tell: Callable[[int, Mapping[str, float]], None],
    ) -> None:
        self._recovery, self._folder, self._evaluator, self._tell = recovery, folder, evaluator, tell
        self._asked: tuple[str, Any] | None = None
        self._known = {str(line["save"]) for line in recovery.records(SAVES)}

    def follow(self, *, to_end: bool) -> None:
        """Write what is known by now, and ask for the next one; with `to_end`, wait for all of them."""
        while self._evaluator is not None:
            if self._asked is None:
                # Other names are those of copies that users have made.
                there = (path for path in self._folder.glob(f"{SAVED}*") if _number(path.name) >= 0)
                new = sorted(path for path in there if path.name not in self._known)
                if not new:
                    return
                # One at a time, as the deadline of a call begins when it is made.
                self._asked = new[0].name, self._evaluator.evaluate.call_async(str(new[0]))
            name, ref = self._asked
            if not to_end and not ref.done():
                return
            try:
                found = ref.result()
            except WorkerLost as error:
                # The call was made again already.
                raise TrainingFailed(
                    f"{error.problem}; that is the same end {LIMIT} times while it evaluated {name}",
                    f"unirun logs {error.worker} shows its output",
                ) from error
            self._recovery.record(SAVES, {"save": name, **found})
            self._tell(int(name.removeprefix(SAVED)), found)
            self._known.add(name)
            self._asked = None
