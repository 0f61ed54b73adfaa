"""Experiments: the cost of a trial's master, the data between its workers, the time of its start, calls at the same
time, and the pure parts.

PPO is that of `examples/experiments`: four models, six calls, eight workers, the actor generating in another layout
than that in which it is trained.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figure import Bar, BenchmarkError, Figure
from benchmarks.job import DEADLINE, environment, program
from benchmarks.suites.rpc import run
from benchmarks.suites.train import Results, Rounds, home, last_line, module

MASTER = Bar("PPO of 6 calls, 8 workers: processor time of the master in a step", "ms", 5.0)
MOVED = Bar(
    "the same: bytes that move between workers ÷ bytes that are not where they are needed", "ratio", 1.05
)
COLD = Bar("unirun experiment start → first step of PPO with 8 workers", "s", 8.0)
WARM = Bar("the same, from a warm process", "s", 3.0)
APART = Bar("6 uneven calls, each model on its own worker ÷ all on one: time of a step", "ratio", 0.75)
EVEN = Bar("10 000 sequences over 8 ranks: tokens of the fullest ÷ the mean", "ratio", 1.02)
PACKED = Bar("the same: time", "ms", 50.0)
GRAPH = Bar("100 calls over 1 024 shards: checks, graph and pairs", "s", 1.0)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STEPS = 12


def figures(runs: int) -> list[Figure]:
    """All figures of this suite."""
    return [
        *ppo(runs),
        uneven(runs),
        *(
            pure(what, bars, runs)
            for what, bars in (("packing", (EVEN, "imbalance")), ("packing", (PACKED, "ms")))
        ),
        pure("graph", (GRAPH, "seconds"), runs),
    ]


def pure(what: str, figure: tuple[Bar, str], runs: int) -> Figure:
    """A measurement of `benchmarks.trials`."""
    measure: Callable[[], Results] = lambda: last_line(  # noqa: E731 - a partial cannot nest
        run(module("benchmarks.trials", what), dict(os.environ), DEADLINE)
    )
    return Rounds(f"{what} of experiments", runs, {"unirun": measure}).figure(*figure)


def ppo(runs: int) -> list[Figure]:
    """The figures of PPO, if the packages of its tasks are installed."""
    for name, package in (("transformers", "transformers"), ("reasoning_gym", "reasoning-gym")):
        if importlib.util.find_spec(name) is None:
            missing = f"{package} is not installed: pip install {package}"
            return [Figure(bar, None, runs, bar.unit, missing=missing) for bar in (MASTER, MOVED, COLD, WARM)]
    cold = Rounds("a trial of PPO", runs, {"unirun": partial(trial, warm=False)})
    warm = Rounds("a trial of PPO from a warm process", runs, {"unirun": partial(trial, warm=True)})
    note = f"of {median(cold.of('unirun', 'megabytes') or (0.0,)):.1f} MB in a step; the master has metadata only"
    return [
        cold.figure(MASTER, "master"),
        cold.figure(MOVED, "moved", note),
        cold.figure(COLD, "first"),
        warm.figure(WARM, "first"),
    ]


def trial(*, warm: bool) -> Results:
    """A trial of PPO: seconds until the end of its first step, and medians of its steps."""
    from unirun.experiments.starting import PRELOAD

    words = ("-e", "ppo", "-f", "bench", "separate=true", "samples=240", "batch=20", "epochs=1")
    with home() as folder:
        env = {**environment(folder), "UNIRUN_WARM": "0"}
        if warm:
            env |= {"UNIRUN_WARM": "", "UNIRUN_RUN_DIR": str(folder / "run")}
            run(
                [program("unirun"), "warm", f"--preload={','.join((*PRELOAD, 'reasoning_gym'))}"],
                env,
                DEADLINE,
            )
        try:
            first = until_first_step(["experiment", "start", *words], env, folder)
        finally:
            if warm:
                run([program("unirun"), "warm", "stop"], env, DEADLINE)
        steps = read(folder / "experiments" / "ppo" / "bench")
        if len(steps) < STEPS:
            raise BenchmarkError(f"there are {len(steps)} steps of {STEPS}")
        # In the first one, workers learn where parameters are.
        later = steps[1:]
        return {
            "first": first,
            "master": 1e3 * median(step["master_seconds"] for step in later),
            "moved": sum(step["bytes_moved"] for step in later) / sum(step["bytes_needed"] for step in later),
            "megabytes": median(step["bytes_moved"] for step in later) / 1e6,
        }


def until_first_step(words: list[str], env: dict[str, str], folder: Path) -> float:
    """Run a trial to its end. Returns the seconds until its first step was written."""
    steps = folder / "experiments" / "ppo" / "bench" / "steps.jsonl"
    began = time.perf_counter()
    first = 0.0
    with subprocess.Popen(
        [program("unirun"), *words], env=env, cwd=EXAMPLES, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            while process.poll() is None and time.perf_counter() < began + DEADLINE:
                if not first and steps.exists() and steps.stat().st_size:
                    first = time.perf_counter() - began
                time.sleep(0.005)
        finally:
            process.kill()
        if process.returncode or not first:
            output = process.stdout.read().decode() if process.stdout is not None else ""
            raise BenchmarkError(f"a trial of PPO ended with {process.returncode}: {output[-2000:]}")
    return first


def read(path: Path) -> list[dict[str, Any]]:
    """The figures of its steps."""
    return [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]


def uneven(runs: int) -> Figure:
    """A step with calls at the same time, and one after the other."""
    sides: dict[str, Callable[[], Results]] = {
        "unirun": partial(waiting, apart=True),
        "one worker": partial(waiting, apart=False),
    }
    return Rounds("calls at the same time", runs, sides).compared(APART, "step", "s", "one worker")


def waiting(*, apart: bool) -> Results:
    """The median time of a step."""
    words = ["experiment", "start", "-e", "waiting", "-f", "bench", "--module", "benchmarks.trials"]
    with home() as folder:
        env = {**environment(folder), "UNIRUN_WARM": "0", "PYTHONPATH": str(ROOT)}
        run([program("unirun"), *words, f"apart={str(apart).lower()}"], env, DEADLINE)
        return {
            "step": median(step["seconds"] for step in read(folder / "experiments" / "waiting" / "bench"))
        }
