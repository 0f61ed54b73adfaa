"""Runs `scripts/ends.py` under each launcher, and records the remains of processes that end in many ways."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from unirun.failover.state import Exit

from .conformance import VARIANTS, Program, differences, run_job
from .harness import SCRIPTS, START_TIMEOUT, Unirun

NAMES = [
    name.replace("_", " ")
    for name in re.findall(r"^@end\ndef (\w+)", (SCRIPTS / "ends.py").read_text(), re.MULTILINE)
]
"""The ways to end, by number."""

CASES = {
    **{f"end: {name}": ("script", number) for number, name in enumerate(NAMES)},
    **{
        f"end: uncaught exception, {each}": (each, NAMES.index("uncaught exception")) for each in VARIANTS[1:]
    },
}
"""The kind of entry and the number of the way to end, by the name of the property."""


@dataclass(frozen=True)
class End:
    """The remains of a process: its exit, and the contents of its streams and files."""

    exit: str
    stdout: str
    stderr: str
    files: Mapping[str, bytes]
    folders: int


def ends_in(folder: Path) -> Program:
    """`scripts/ends.py`."""
    return Program.written_to(folder, "ends")


def ends_under_python(unirun: Unirun, program: Program) -> dict[str, End]:
    """``python -u ends.py``, for each case."""
    folder = unirun.root / "plain"
    folder.mkdir()

    def run(case: tuple[str, int]) -> End:
        variant, number = case
        done = subprocess.run(
            [sys.executable, "-u", *program.form(variant), str(folder), "0"],
            env=unirun.environment({"ROLE_NAME": variant, "END": str(number), **_SEED}),
            cwd=program.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START_TIMEOUT,
            start_new_session=True,
        )
        exit_of_it = Exit(done.returncode) if done.returncode >= 0 else Exit(signal=-done.returncode)
        return _end(str(exit_of_it), done.stdout, done.stderr, folder / f"{variant}-{number}")

    with ThreadPoolExecutor(3) as pool:
        return dict(zip(CASES, pool.map(run, CASES.values()), strict=True))


def ends_under_unirun(unirun: Unirun, program: Program, method: str) -> dict[str, End]:
    """Run the cases as ranks of one job; none begins before all have started."""
    folder = unirun.root / method
    folder.mkdir()
    common = {"args": [str(folder), str(len(CASES))], "start_method": method}
    roles = {"script": {"count": len(NAMES), **program.entry("script"), **common, "env": _SEED}}
    for variant, number in CASES.values():
        if variant != "script":
            env = {"END": str(number), **_SEED}
            roles[variant] = {"count": 1, **program.entry(variant), **common, "env": env}
    run_job(unirun, program, roles)
    workers = unirun.workers()

    def end(variant: str, number: int) -> End:
        rank = number if variant == "script" else 0
        stdout, stderr = (unirun.log(variant, rank, stream=stream) for stream in ("stdout", "stderr"))
        return _end(workers[f"{variant}:{rank}"]["exit"], stdout, stderr, folder / f"{variant}-{number}")

    return {name: end(variant, number) for name, (variant, number) in CASES.items()}


_SEED = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}


def _end(how: str, stdout: bytes, stderr: bytes, folder: Path) -> End:
    """Replace addresses of objects, which differ between processes."""
    out, err = (re.sub(r"0x[0-9a-f]+", "0x…", text.decode()) for text in (stdout, stderr))
    paths = [*folder.rglob("*")]
    files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    return End(how, out, err, files, sum(path.is_dir() for path in paths))


def faults_of_ends(expected: Mapping[str, End], found: Mapping[str, End]) -> dict[str, set[str]]:
    """The differences in the remains of processes, by the name of the case."""
    differ = {name: differences(asdict(expected[name]), asdict(found[name])) for name in CASES}
    return {name: each for name, each in differ.items() if each}
