"""Runs `scripts/probe.py` under each launcher, and compares the results with plain python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .harness import SCRIPTS, START_TIMEOUT, TORCHRUN, Result, Unirun

ENV = {"OMP_NUM_THREADS": "1"}
"""Set by unirun for jobs of several workers, as by torchrun."""

Report = dict[str, Any]
"""The output of the probe: a value for each property."""

VARIANTS = ("script", "module", "directory", "zip")
"""The forms of a program for python; also the names of the roles that run it."""


@dataclass(frozen=True)
class Program:
    """A script of `scripts/` in its own folder, in each of the forms that python runs."""

    folder: Path
    name: str

    @classmethod
    def written_to(cls, folder: Path, name: str, *beside: str) -> Program:
        """Write the forms of the script `name` into `folder`, each with the modules that it imports beside it."""
        for form in (f"{name}.py", f"pack/{name}.py", "tree/__main__.py"):
            path = folder / form
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(SCRIPTS / f"{name}.py", path)
        (folder / "pack/__init__.py").touch()
        with zipfile.ZipFile(folder / "tree.zip", "w") as archive:
            archive.write(SCRIPTS / f"{name}.py", "__main__.py")
            for module in beside:
                archive.write(SCRIPTS / f"{module}.py", f"{module}.py")
                for path in (folder, folder / "tree"):
                    shutil.copy(SCRIPTS / f"{module}.py", path)
        return cls(folder, name)

    def form(self, variant: str) -> tuple[str, ...]:
        """The arguments after ``python -u``, or after a launcher's options."""
        forms = {"module": ("-m", f"pack.{self.name}"), "directory": ("tree",), "zip": ("tree.zip",)}
        return forms.get(variant, (f"{self.name}.py",))

    def entry(self, variant: str) -> dict[str, str]:
        """The same for a job file."""
        kind = "module" if variant == "module" else "script"
        return {kind: self.form(variant)[-1]}


def probe_in(folder: Path) -> Program:
    """`scripts/probe.py`."""
    return Program.written_to(folder, "probe", "probe_process")


def reports_under_python(unirun: Unirun, program: Program, variants: Iterable[str]) -> dict[str, Report]:
    """Run one process after another: ``python -u script.py``."""
    return {each: _alone(unirun, program, [sys.executable, "-u"], each) for each in variants}


def reports_under_torchrun(unirun: Unirun, program: Program, variants: Iterable[str]) -> dict[str, Report]:
    """Run one torchrun after another."""
    torchrun = [TORCHRUN, "--standalone", "--nproc-per-node", "1"]
    return {each: _alone(unirun, program, torchrun, each) for each in variants}


def _alone(unirun: Unirun, program: Program, command: list[str], variant: str) -> Report:
    path = unirun.root / f"{Path(command[0]).name}-{variant}.log"
    with path.open("ab") as log, open(os.devnull) as nothing:
        subprocess.run(
            [*command, *program.form(variant), *_arguments(variant)],
            env=unirun.environment(ENV),
            cwd=program.folder,
            stdin=nothing,
            stdout=log,
            stderr=log,
            start_new_session=True,
            timeout=START_TIMEOUT,
            check=True,
        )
    return report_in(path.read_text())


def _arguments(variant: str) -> list[str]:
    return ["--flag", "two words", *(["--torch"] if variant == "torch" else [])]


def reports_under_unirun(
    unirun: Unirun, program: Program, method: str, variants: Iterable[str]
) -> dict[str, Report]:
    """One job with a role for each variant."""
    entries = {variant: {**program.entry(variant), "args": _arguments(variant)} for variant in variants}
    roles = {variant: {"count": 1, **entry, "start_method": method} for variant, entry in entries.items()}
    result = run_job(unirun, program, roles)
    assert result.code == 0, result.err
    return {variant: report_in(unirun.log(variant, 0).decode()) for variant in roles}


def run_job(unirun: Unirun, program: Program, roles: Mapping[str, Mapping[str, object]]) -> Result:
    """A job of these roles, which run in the folder of the program; the command runs in another."""
    path = unirun.root / "job.json"
    there = {name: {**role, "cwd": str(program.folder)} for name, role in roles.items()}
    path.write_text(json.dumps({"name": program.name, "roles": there}))
    return unirun("--config", path, env=ENV)


BETWEEN = ("random numbers", "hash of a text", "key of multiprocessing")
"""Properties that must differ between any two processes: lists of numbers."""


def faults(expected: Mapping[str, Report], found: Mapping[str, Report]) -> dict[str, set[str]]:
    """The differences between a launcher's processes and plain python's, by variant and property."""
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
    """The only line of JSON in a process's output."""
    (line,) = (line for line in text.splitlines() if line.startswith("{"))
    found: Report = json.loads(line)
    return found


def differences(expected: object, found: object) -> set[str]:
    """Describe names that `found` has in addition (``+name``), lacks (``-name``) or has with another value."""
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
