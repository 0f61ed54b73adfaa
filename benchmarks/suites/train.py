"""A function on many ranks, with `unirun.train.Trainer`: its start, its recovery and its reports, beside Ray Train; the
speed of a training loop, beside torchrun; a long list of files; and a search by Optuna, beside a job for each trial.

Each measurement has a process of its own, which begins without warm workers. The processes of both sides alternate.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.figure import Bar, BenchmarkError, Figure, load_of_others, ratio, say
from benchmarks.job import DEADLINE, environment, program, sweep
from benchmarks.raytrain import MISSING, VARIABLES, installed
from benchmarks.suites.rpc import run

START = Bar("Trainer(4) → first report of all ranks ÷ Ray Train with ray.init()", "ratio", 0.25)
SECOND = Bar("second run on warm workers → first report of all ranks", "s", 0.05)
RECOVERY = Bar("SIGKILL of a rank → first report after the checkpoint ÷ Ray Train", "ratio", 0.1)
REPORT = Bar("report of 10 metrics, 4 ranks that only report: p50 of a call", "ms", 1.0)
SPEED = Bar("digits, 2 ranks: samples/s ÷ the same loop under torchrun", "ratio", 0.97, at_least=True)
MEMORY = Bar("list of 10 million files, read by 4 ranks at once: memory of a rank", "MB", 50)
TIME = Bar("the same: time until a rank has its first file", "s", 1.0)
STUDY = Bar("20 Optuna trials of digits, 2 at a time ÷ 20 jobs one after the other", "ratio", 0.35)

FILES, AT_ONCE = 10_000_000, 100_000
STUDIES = 3
"""Runs of the study at most: a run starts 20 jobs, and takes minutes."""

TRIALS = 20

Results = dict[str, float]


class Rounds:
    """The measurements of several sides, in turn. After a failed run, a side continues with the next one."""

    def __init__(self, what: str, runs: int, sides: Mapping[str, Callable[[], Results]]) -> None:
        self.runs, self._found, self._faults = runs, list[tuple[str, Results]](), dict[str, str]()
        busy = []
        for number in range(runs):
            say(f"{what}, run {number + 1} of {runs}")
            busy.append(load_of_others())
            for side, measure in sides.items():
                try:
                    self._found.append((side, measure()))
                except (BenchmarkError, ValueError, LookupError) as error:
                    self._faults[side] = f"{side}: {error}"
        self._busy = median(busy)

    def of(self, side: str, what: str) -> tuple[float, ...]:
        """The runs of a side."""
        return tuple(results[what] for name, results in self._found if name == side)

    def figure(self, bar: Bar, what: str, note: str = "") -> Figure:
        """The median of unirun's runs."""
        own = self.of("unirun", what)
        fault = self._faults.get("unirun", "")
        value = median(own) if own else None
        return Figure(bar, value, self.runs, bar.unit, own, fault=fault, busy=self._busy, note=note)

    def compared(self, bar: Bar, what: str, unit: str, peer: str, note: str = "") -> Figure:
        """The same, divided by the median of the peer's."""
        own, theirs = self.of("unirun", what), self.of(peer, what)
        fault = "\n".join(self._faults[side] for side in ("unirun", peer) if side in self._faults)
        value = ratio(own, theirs)
        return Figure(bar, value, self.runs, unit, own, peer, theirs, fault, self._busy, note=note)


def figures(runs: int) -> list[Figure]:
    """All figures of this suite."""
    starts, recoveries = (beside_ray(what, runs) for what in ("start", "recovery"))
    reports = Rounds("reports", runs, {"unirun": partial(trainer, "reports")})
    with long_list() as path:
        listed = Rounds("a long list of files", runs, {"unirun": partial(trainer, "listed", str(path))})
    return [
        against_ray(starts, START, "start", without_init(starts)),
        starts.figure(SECOND, "second"),
        against_ray(recoveries, RECOVERY, "recovery"),
        reports.figure(REPORT, "p50", also(reports, p99="p99 {:.2f} ms", rate="{:.0f} rounds/s")),
        digits(SPEED, "samples/s", runs, partial(speed, "unirun"), "torchrun", partial(speed, "torchrun")),
        listed.figure(MEMORY, "megabytes"),
        listed.figure(TIME, "seconds", also(listed, following="{:.0f} us for each file after that")),
        digits(STUDY, "s", min(runs, STUDIES), study, "jobs", jobs),
    ]


def beside_ray(what: str, runs: int) -> Rounds:
    """A measurement of `benchmarks.training`, and with Ray Train if it is installed."""
    sides: dict[str, Callable[[], Results]] = {"unirun": partial(trainer, what)}
    if installed():
        sides["Ray Train"] = partial(ray_train, what)
    return Rounds(f"{what} of a trainer", runs, sides)


def against_ray(rounds: Rounds, bar: Bar, what: str, note: str = "") -> Figure:
    """The figure, or that there is no Ray Train."""
    if not installed():
        return Figure(bar, None, rounds.runs, "s", rounds.of("unirun", what), "Ray Train", missing=MISSING)
    return rounds.compared(bar, what, "s", "Ray Train", note)


def digits(
    bar: Bar, unit: str, runs: int, ours: Callable[[], Results], peer: str, its: Callable[[], Results]
) -> Figure:
    """A measurement with `benchmarks.digits`, if its packages are installed. Both sides measure in `unit`."""
    for name, package in (("sklearn", "scikit-learn"), ("optuna", "optuna")):
        if importlib.util.find_spec(name) is None:
            missing = f"{package} is not installed: pip install {package}"
            return Figure(bar, None, runs, unit, peer=peer, missing=missing)
    return Rounds(bar.name, runs, {"unirun": ours, peer: its}).compared(bar, unit, unit, peer)


def without_init(rounds: Rounds) -> str:
    """The start, compared with one in a running Ray."""
    own, theirs = rounds.of("unirun", "start"), rounds.of("Ray Train", "without init")
    value = ratio(own, theirs)
    return "" if value is None else f"{value:.2g} of Ray Train without ray.init(), {median(theirs):.1f} s"


def also(rounds: Rounds, **shown: str) -> str:
    """The medians of further measurements, each in its format."""
    found = {form: rounds.of("unirun", what) for what, form in shown.items()}
    return ", ".join(form.format(median(values)) for form, values in found.items() if values)


def trainer(what: str, *args: str) -> Results:
    """A measurement of `benchmarks.training`."""
    with home() as folder:
        return last_line(run(module("benchmarks.training", what, *args), variables(folder), DEADLINE))


def ray_train(what: str) -> Results:
    """A measurement of `benchmarks.raytrain`."""
    with home() as folder:
        env = {**variables(folder), **VARIABLES}
        return last_line(run(module("benchmarks.raytrain", what, str(folder)), env, 2 * DEADLINE))


def speed(side: str) -> Results:
    """Samples in a second of the loop in `benchmarks.digits`."""
    commands = {
        "unirun": module("benchmarks.digits", "trainer"),
        "torchrun": [
            *(program("torchrun"), "--standalone", "--nproc-per-node=2"),
            *("-m", "benchmarks.digits", "torchrun"),
        ],
    }
    with home() as folder:
        result = folder / "result.json"
        run([*commands[side], str(result)], variables(folder), DEADLINE)
        return {"samples/s": float(json.loads(result.read_text()))}


def study() -> Results:
    """Seconds of the command that makes the study."""
    with home() as folder:
        return {"s": timed(module("benchmarks.digits", "study", str(folder / "result")), folder)}


def jobs() -> Results:
    """Seconds of as many jobs, one after the other."""
    command = [program("unirun"), "--quiet", "-m", "benchmarks.digits", "trial"]
    with home() as folder:
        times = [timed([*command, str(folder / "result"), str(number)], folder) for number in range(TRIALS)]
    return {"s": sum(times)}


def timed(command: list[str], folder: Path) -> float:
    """Seconds of a command with one thread for each rank, which must end with 0."""
    began = time.perf_counter()
    # With as many threads as processors, a job would be many times slower on a busy machine.
    run(command, {**variables(folder), "OMP_NUM_THREADS": "1"}, DEADLINE)
    return time.perf_counter() - began


def module(name: str, *args: str) -> list[str]:
    """The command that runs a module."""
    return [sys.executable, "-m", name, *args]


def variables(folder: Path) -> dict[str, str]:
    """The environment of a process whose files are in `folder`, and which uses no warm process."""
    return {**environment(folder), "UNIRUN_WARM": "0"}


def last_line(text: str) -> Results:
    """The figures in the last line that a process has printed."""
    found: Results = json.loads(text.splitlines()[-1])
    return found


@contextmanager
def home() -> Iterator[Path]:
    """A folder for a measurement. At the end of the context, none of its processes and files is left."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name:
        try:
            yield Path(name)
        finally:
            sweep(Path(name))


@contextmanager
def long_list() -> Iterator[Path]:
    """A list of this number of URLs that contain their data. It is in memory, so the disk is not measured."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        path = Path(name, "files.txt")
        say(f"a list of {FILES} files is written")
        with path.open("w") as out:
            for first in range(0, FILES, AT_ONCE):
                numbers = range(first, first + AT_ONCE)
                out.write("".join(f"data:,shard-{n // 1000:05}/sample-{n:08}.jpg\n" for n in numbers))
        yield path
