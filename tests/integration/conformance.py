"""Runs `scripts/probe.py` and `scripts/ends.py` under each launcher, and tells the differences to plain python."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unirun.failover import Exit

from .harness import SCRIPTS, START, TORCHRUN, Unirun

ARGS = ("--flag", "two words")

Report = dict[str, Any]
"""What the probe says: a value for each property."""

VARIANTS = ("script", "module", "directory", "zip")
"""How a program can be given to python; also the names of the roles that run it."""


@dataclass(frozen=True)
class Program:
    """The probe in a folder of its own, in each of the forms that python runs."""

    folder: Path

    @classmethod
    def written_to(cls, folder: Path) -> Program:
        """Write the forms into `folder`, each with the module that it imports beside it."""
        for name in ("probe.py", "pack/probe.py", "tree/__main__.py"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(SCRIPTS / "probe.py", path)
        for beside in (folder, folder / "tree"):
            shutil.copy(SCRIPTS / "probe_process.py", beside)
        (folder / "pack/__init__.py").touch()
        with zipfile.ZipFile(folder / "tree.zip", "w") as archive:
            archive.write(SCRIPTS / "probe.py", "__main__.py")
            archive.write(SCRIPTS / "probe_process.py", "probe_process.py")
        return cls(folder)

    def arguments(self, variant: str) -> tuple[str, ...]:
        """What follows ``python -u``, or a launcher's own options."""
        forms = {
            "script": ("probe.py",),
            "torch": ("probe.py",),
            "module": ("-m", "pack.probe"),
            "directory": ("tree",),
            "zip": ("tree.zip",),
        }
        return *forms[variant], *ARGS, *(["--torch"] if variant == "torch" else [])

    def under_python(self, unirun: Unirun, variants: Iterable[str]) -> dict[str, Report]:
        """One process after another: ``python -u script.py``."""
        return {each: self._alone(unirun, [sys.executable, "-u"], each) for each in variants}

    def under_torchrun(self, unirun: Unirun, variants: Iterable[str]) -> dict[str, Report]:
        """One torchrun after another."""
        torchrun = [TORCHRUN, "--standalone", "--nproc-per-node", "1"]
        return {each: self._alone(unirun, torchrun, each) for each in variants}

    def _alone(self, unirun: Unirun, command: list[str], variant: str) -> Report:
        path = self.folder / f"{Path(command[0]).name}-{variant}.log"
        with path.open("ab") as log, open(os.devnull) as nothing:
            subprocess.run(
                [*command, *self.arguments(variant)],
                env=unirun.environment({"OMP_NUM_THREADS": "1"}),
                cwd=self.folder,
                stdin=nothing,
                stdout=log,
                stderr=log,
                start_new_session=True,
                timeout=START,
                check=True,
            )
        return report_in(path.read_text())

    def under_unirun(self, unirun: Unirun, method: str, variants: Iterable[str]) -> dict[str, Report]:
        """One job with a role for each variant."""
        roles = {}
        for variant in variants:
            first, *args = self.arguments(variant)
            entry = {"script": first}
            if first == "-m":
                entry = {"module": args.pop(0)}
            roles[variant] = {"count": 1, **entry, "args": args, "start_method": method}
        path = self.folder / f"{method}.json"
        path.write_text(json.dumps({"name": "probe", "roles": roles}))
        result = unirun("--config", path, cwd=self.folder, env={"OMP_NUM_THREADS": "1"})
        assert result.code == 0, result.err
        return {variant: report_in(unirun.log(variant, 0).decode()) for variant in roles}


BETWEEN = ("random numbers", "hash of a text")
"""Properties that must differ between two processes: lists of numbers."""


def faults(expected: Mapping[str, Report], found: Mapping[str, Report]) -> dict[str, set[str]]:
    """The differences of the processes of a launcher, by variant, to those of plain python, by property."""
    differ: dict[str, set[str]] = {}
    for variant, report in found.items():
        for name, value in report.items():
            if name not in BETWEEN:
                differ.setdefault(name, set()).update(differences(expected[variant][name], value))
    for name in BETWEEN:
        numbers = [number for report in found.values() for number in report[name]]
        if len({*numbers}) < len(numbers):
            differ[name] = {f"{numbers} in {', '.join(found)}"}
    return {name: each for name, each in differ.items() if each}


def report_in(text: str) -> Report:
    """The only line of JSON in what a process has written."""
    (line,) = (line for line in text.splitlines() if line.startswith("{"))
    found: Report = json.loads(line)
    return found


def differences(expected: object, found: object) -> set[str]:
    """What `found` has more (``+name``), less (``-name``) or otherwise (``name: this instead of that``)."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        return {
            *(f"-{name}" for name in expected.keys() - found.keys()),
            *(f"+{name}" for name in found.keys() - expected.keys()),
            *(
                f"{name}: {found[name]} instead of {expected[name]}"
                for name in expected.keys() & found.keys()
                if expected[name] != found[name]
            ),
        }
    if isinstance(expected, list) and isinstance(found, list) and expected != found:
        less, more = [x for x in expected if x not in found], [x for x in found if x not in expected]
        return {*(f"-{x}" for x in less), *(f"+{x}" for x in more)} or {f"order: {found}"}
    return set() if expected == found else {f"{found} instead of {expected}"}


SEED = {"PYTHONHASHSEED": "7"}


@dataclass(frozen=True)
class End:
    """What is left of a process: how it ended, what it has written to its streams and its files."""

    exit: str
    stdout: str
    stderr: str
    files: Mapping[str, bytes]


def ends_under_python(unirun: Unirun, count: int) -> list[End]:
    """``python -u ends.py``, in each of `count` ways."""
    folder = unirun.root / "plain"
    folder.mkdir()

    def run(rank: int) -> End:
        done = subprocess.run(
            [sys.executable, "-u", SCRIPTS / "ends.py", folder],
            env=unirun.environment({"RANK": str(rank), **SEED}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START,
            start_new_session=True,
        )
        exit_of_it = Exit(done.returncode) if done.returncode >= 0 else Exit(signal=-done.returncode)
        return _end(str(exit_of_it), done.stdout, done.stderr, folder / str(rank))

    with ThreadPoolExecutor(3) as pool:
        return [*pool.map(run, range(count))]


def ends_under_unirun(unirun: Unirun, method: str, count: int) -> list[End]:
    """The same as the ranks of one job; none begins before all are there."""
    folder = unirun.root / method
    folder.mkdir()
    options = ("--start-method", method, "--nproc-per-node", count, "--role", "end")
    unirun(*options, SCRIPTS / "ends.py", folder, "--together", env=SEED)
    workers = unirun.workers()

    def end(rank: int) -> End:
        logs = (unirun.log("end", rank, stream=stream) for stream in ("stdout", "stderr"))
        return _end(workers[f"end:{rank}"]["exit"], *logs, folder / str(rank))

    return [end(rank) for rank in range(count)]


def _end(how: str, stdout: bytes, stderr: bytes, folder: Path) -> End:
    """Without the addresses of objects and the names of folders, which differ from one process to the next."""
    out, err = (re.sub(r"0x[0-9a-f]+", "0x…", text.decode()) for text in (stdout, stderr))
    return End(how, out, err, {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()})


def faults_of_ends(names: list[str], expected: list[End], found: list[End]) -> dict[str, set[str]]:
    """The differences in what is left of processes, by the name of their end."""
    rows = zip(names, expected, found, strict=True)
    differ = {f"end: {name}": differences(asdict(one), asdict(other)) for name, one, other in rows}
    return {name: each for name, each in differ.items() if each}
