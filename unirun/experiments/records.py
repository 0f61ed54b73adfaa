"""The records of a trial: figures of steps, of held-out data and of saved models, an object in each line."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirun.errors import TrainingFailed, WorkerLost
from unirun.train.losses import LIMIT
from unirun.wire.frames import finite

STEPS, EVALUATIONS, SAVES = "steps.jsonl", "evaluations.jsonl", "saves.jsonl"
CHECKPOINTS, SAVED = "checkpoints", "step"
"""The directory of saved models; how the name of each one begins, which ends with its step."""


class Records:
    """The files in the directory of a trial."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, name: str, line: Mapping[str, Any]) -> None:
        """Add a line to one of the files. A figure that is not finite is null in it."""
        with (self._root / name).open("a") as file:
            file.write(_json(line))

    def read(self, name: str) -> list[dict[str, Any]]:
        """All lines of a file. One that was cut, as its process was killed, is left out."""
        path = self._root / name
        found = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def of_step(self, name: str, step: int) -> dict[str, Any]:
        """The figures of the line of `step`, nan for those that are null; none if there is no such line."""
        found = [line for line in self.read(name) if line.pop("step") == step]
        return (
            {key: math.nan if value is None else value for key, value in found[-1].items()} if found else {}
        )

    def set_aside(self) -> None:
        """The trial begins anew: move these files and the saved models of the run before to ``earlier/1``, …"""
        there = [self._root / name for name in (STEPS, EVALUATIONS, SAVES, CHECKPOINTS)]
        there = [path for path in there if path.exists()]
        if there:
            top = self._root / "earlier"
            top.mkdir(exist_ok=True)
            numbers = [int(path.name) for path in top.iterdir() if path.name.isdecimal()]
            folder = top / str(1 + max(numbers, default=0))
            folder.mkdir()
            for path in there:
                path.rename(folder / path.name)

    def drop_after(self, step: int) -> None:
        """Drop the lines and the saved models of steps after `step`: the trial goes on there and makes them again."""
        for path in self._root.glob(f"{CHECKPOINTS}/*/{SAVED}*"):
            if _number(path.name) > step:
                shutil.rmtree(path)
        for name in (STEPS, EVALUATIONS, SAVES):
            if (self._root / name).exists():
                lines = [line for line in self.read(name) if _step_of(line) <= step]
                part = self._root / f"{name}.partial"
                part.write_text("".join(map(_json, lines)))
                part.rename(self._root / name)


def _json(line: Mapping[str, Any]) -> str:
    return json.dumps(finite(line), allow_nan=False) + "\n"


def _number(save: str) -> int:
    """The step of a saved model: 12 of ``step000012``; -1 for a name that no trial gives."""
    found = re.fullmatch(rf"{SAVED}(\d+)", save)
    return int(found[1]) if found else -1


def _step_of(line: Mapping[str, Any]) -> int:
    return _number(line["save"]) if "save" in line else int(line["step"])


class SavedModels:
    """Has an evaluator, if there is one, evaluate each model that was saved in `folder`, in their order."""

    def __init__(self, records: Records, folder: Path, evaluator: Any | None) -> None:
        self._records, self._folder, self._evaluator = records, folder, evaluator
        self._asked: tuple[str, Any] | None = None
        self._known = {str(line["save"]) for line in records.read(SAVES)}

    def follow(self, *, to_end: bool) -> None:
        """Write what is known by now, and ask for the next one; with `to_end`, wait for all of them."""
        while self._evaluator is not None:
            if self._asked is None:
                new = sorted(path for path in self._folder.glob(f"{SAVED}*") if path.name not in self._known)
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
            self._records.write(SAVES, {"save": name, **found})
            self._known.add(name)
            self._asked = None
