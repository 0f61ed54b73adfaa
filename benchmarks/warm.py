"""The starts of the suite `launch`, from processes that have imported torch already (``unirun warm``)."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.figure import Bar, BenchmarkError, Figure, compared, say
from benchmarks.job import TORCHRUN, UNIRUN, environment, program, proportional_set_size, start_time, timed

STARTS = (
    (4, Bar("warm start of 4 ranks ÷ torchrun", "ratio", 0.12)),
    (16, Bar("warm start of 16 ranks ÷ torchrun", "ratio", 0.05)),
)
PRINTS = Bar("a script that prints, 1 rank, warm ÷ python -c 'import torch'", "ratio", 0.35)
MEMORY = Bar("memory of a warm process (PSS)", "MB", 200)


def figures(runs: int) -> list[Figure]:
    """Warm starts compared with torchrun, a command compared with a bare import, and the memory of the process."""
    with started() as folder:
        launcher = replace(UNIRUN, name="warm", env={"UNIRUN_RUN_DIR": str(folder)})
        warm = [partial(start_time, launcher, ranks) for ranks, _ in STARTS]
        cold = [partial(start_time, TORCHRUN, ranks) for ranks, _ in STARTS]
        found = [compared(bar, "s", runs, warm[i], "torchrun", cold[i]) for i, (_, bar) in enumerate(STARTS)]
        found.append(compared(PRINTS, "s", runs, partial(print_time, folder), "import torch", import_time))
    say(MEMORY.name)
    sizes = tuple(memory() for _ in range(runs))
    found.append(Figure(MEMORY, sorted(sizes)[runs // 2], runs, MEMORY.unit, sizes))
    return found


@contextlib.contextmanager
def started(**env: str) -> Iterator[Path]:
    """The warm processes that ``unirun warm`` starts, in a directory of their own."""
    with tempfile.TemporaryDirectory(prefix="unirun-bench-") as folder:
        home = {**environment(Path(folder)), "UNIRUN_RUN_DIR": folder, **env}
        timed([program("unirun"), "warm"], home)
        try:
            yield Path(folder)
        finally:
            timed([program("unirun"), "warm", "stop"], home)


def print_time(folder: Path) -> float:
    """Seconds from exec of ``unirun`` to its exit, for a script that prints and leaves."""
    with tempfile.TemporaryDirectory(prefix="unirun-bench-") as home:
        script = Path(home, "script.py")
        script.write_text("print('here')")
        env = {**environment(Path(home)), "UNIRUN_RUN_DIR": str(folder)}
        seconds, text = timed([program("unirun"), "--quiet", str(script)], env)
    if text != "here\n":
        raise BenchmarkError(f"the script printed {text!r}")
    return seconds


def import_time() -> float:
    """Seconds of an interpreter that imports torch and ends."""
    return timed([sys.executable, "-c", "import torch"], environment(Path(os.devnull)))[0]


def memory() -> float:
    """The PSS in MB (2**20 bytes) of a warm process with torch only, for jobs of several ranks."""
    with started(OMP_NUM_THREADS="1") as folder:
        home = {**environment(folder), "UNIRUN_RUN_DIR": str(folder)}
        _, table = timed([program("unirun"), "warm", "status"], home)
        return proportional_set_size(int(table.splitlines()[1].split()[0]))
