"""Calls from a trainer to its workers, beside plain torch.distributed.rpc between the same processes, and beside Ray
and Monarch when they are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import cast

from benchmarks.figure import Bar, BenchmarkError, Figure, load_of_others, ratio, say
from benchmarks.job import DEADLINE, environment, program

WORKERS = 8
"""The workers of a call of a whole role. All other calls have one worker."""

ROUNDS = 3
"""The number of measurements of each figure in one job."""

BARS = (
    ("torch", "blocking", "us", Bar("blocking call over torch ÷ raw rpc_sync", "ratio", 1.5)),
    ("socket", "blocking", "us", Bar("blocking call over socket ÷ raw rpc_sync", "ratio", 0.5)),
    ("socket", "group", "us", Bar("call of 8 workers over socket ÷ raw rpc_async fan-out", "ratio", 0.4)),
    (
        "socket",
        "in flight",
        "calls/s",
        Bar("1000 calls in flight over socket ÷ raw rpc_async", "ratio", 3.0, True),
    ),
    ("socket", "large", "us", Bar("64 MB argument over socket ÷ raw rpc_sync", "ratio", 0.5)),
)

FOREIGN = {"ray": "ray", "monarch": "torchmonarch"}
"""The modules of other systems, and their packages."""

FOREIGN_BARS = {"torch": 0.4, "socket": 0.2}

Rounds = dict[str, dict[str, list[float]]]
"""The rounds of each measurement: ``own`` for unirun's, and in the job over torch also ``raw`` for torch's."""


def figures(runs: int) -> list[Figure]:
    """All figures of this suite, each from `runs` rounds in one job per transport."""
    busy, faults = load_of_others(), dict[str, str]()
    found: dict[str, Rounds] = {"torch": {}, "socket": {}}
    for number in range(runs):
        # Jobs take turns, so what else the machine does falls on both.
        for transport, so_far in found.items():
            say(f"calls over {transport}, run {number + 1} of {runs}")
            try:
                measured = {**rounds(transport, 1), **rounds(transport, WORKERS)}
                for what, sides in measured.items():
                    for side, values in sides.items():
                        so_far.setdefault(what, {}).setdefault(side, []).append(median(values))
            except BenchmarkError as error:
                faults[transport] = str(error)
    result = []
    for transport, what, unit, bar in BARS:
        own, raw = found[transport].get(what, {}).get("own", []), found["torch"].get(what, {}).get("raw", [])
        fault = faults.get(transport, "") or faults.get("torch", "")
        result.append(figure(bar, unit, runs, own, "torch rpc", raw, fault, busy))
    blocking = {transport: what.get("blocking", {}).get("own", []) for transport, what in found.items()}
    return [*result, *foreign(runs, blocking, busy, FOREIGN)]


def figure(
    bar: Bar, unit: str, runs: int, own: list[float], peer: str, theirs: list[float], fault: str, busy: float
) -> Figure:
    """One row of the table."""
    return Figure(bar, ratio(own, theirs), runs, unit, tuple(own), peer, tuple(theirs), fault, busy)


def rounds(transport: str, workers: int) -> Rounds:
    """Run the job of `benchmarks.calls` once, with this number of workers. Raises `BenchmarkError` when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        config = {
            "raw": transport == "torch",
            "result": str(home / "result.json"),
            "rounds": ROUNDS,
        }
        job = {
            "roles": {"worker": {"count": workers, "workload": "benchmarks.calls:Worker"}},
            "trainer": "benchmarks.calls:Measure",
            "transport": transport,
            "config": config,
            "cwd": str(Path(__file__).parents[2]),
        }
        (home / "job.yaml").write_text(json.dumps(job))
        run(
            [program("unirun"), "--quiet", "--config", str(home / "job.yaml")],
            environment(home),
            DEADLINE * 3,
        )
        return cast(Rounds, json.loads((home / "result.json").read_text()))


def foreign(
    runs: int, blocking: Mapping[str, list[float]], busy: float, systems: Iterable[str]
) -> list[Figure]:
    """Blocking calls, compared with those of other systems that are installed. `blocking` has µs by transport."""
    rows = []
    for system in systems:
        bars = {
            transport: Bar(f"blocking call over {transport} ÷ {system}", "ratio", FOREIGN_BARS[transport])
            for transport in blocking
        }
        if importlib.util.find_spec(system) is None:
            why = f"{system} is not installed: pip install {FOREIGN[system]}"
            rows += [Figure(bar, None, runs, "us", peer=system, missing=why) for bar in bars.values()]
            continue
        theirs, fault = [], ""
        say(f"blocking call of {system}")
        try:
            for _ in range(runs):
                command = [sys.executable, "-m", "benchmarks.foreign", system]
                theirs.append(float(run(command, dict(os.environ), DEADLINE).splitlines()[-1]))
        except (BenchmarkError, ValueError, IndexError) as error:
            fault = str(error)
        for transport, bar in bars.items():
            rows.append(figure(bar, "us", runs, blocking[transport], system, theirs, fault, busy))
    return rows


def run(command: list[str], env: dict[str, str], deadline: float) -> str:
    """The stdout of a command. Raises `BenchmarkError` unless it ends with 0 in time."""
    try:
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{' '.join(command)} did not end within {deadline:g} s") from error
    if done.returncode != 0:
        raise BenchmarkError(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout
