"""What a trial writes of itself: figures of steps, of held-out data and of saved models, an object in each line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEPS, EVALUATIONS, SAVES = "steps.jsonl", "evaluations.jsonl", "saves.jsonl"


class Records:
    """The files in the directory of a trial."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, name: str, line: Mapping[str, Any]) -> None:
        """Add a line to one of the files."""
        with (self._root / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

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

    def drop_after(self, step: int) -> None:
        """Drop the lines of steps after `step`: the trial continues there and writes them again."""
        for name in (STEPS, EVALUATIONS):
            lines = [line for line in self.read(name) if line["step"] <= step]
            part = self._root / f"{name}.partial"
            part.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
            part.rename(self._root / name)


class SavedModels:
    """Has an evaluator, if there is one, evaluate each model that was saved in `folder`, in their order."""

    def __init__(self, records: Records, folder: Path, evaluator: Any | None) -> None:
        self._records, self._folder, self._evaluator = records, folder, evaluator
        self._asked: dict[str, Any] = {}
        self._known = {str(line["save"]) for line in records.read(SAVES)}

    def follow(self, *, to_end: bool) -> None:
        """Ask for what is new, and write what is known by now; with `to_end`, wait for all of it."""
        if self._evaluator is None:
            return
        for path in sorted(self._folder.glob("step*")):
            if path.name not in self._known:
                self._known.add(path.name)
                self._asked[path.name] = self._evaluator.evaluate.call_async(str(path))
        while self._asked:
            name, ref = next(iter(self._asked.items()))
            if not to_end and not ref.done():
                return
            self._records.write(SAVES, {"save": name, **ref.result()})
            del self._asked[name]
