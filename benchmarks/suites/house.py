"""The size of unirun's source, names that mean two things, circles of imports; and the files that a reader has to open
to follow four journeys.

A constant is one of time if it is a number at the top of a module and the first sentence of its docstring speaks of
seconds, minutes, hours or days (`benchmarks.source`). A file counts for a journey when one of its functions is called
between two marks, in the processes that the figure names (`benchmarks.entered`). The journeys are made in real jobs
(`benchmarks.journeys`), and what decides on a restart also in the simulation, without the shells of the processes and
what they do meanwhile (`benchmarks.simulated`).

`benchmarks/house_first.json` is the first run, before rooms were moved and modules were merged, and
`benchmarks/house_last.json` the one after.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median

import psutil

from benchmarks import source
from benchmarks.entered import PACKAGE, Entered
from benchmarks.figure import Bar, BenchmarkError, Figure, say
from benchmarks.job import DEADLINE, UNIRUN, Launcher, environment, program, started, sweep
from benchmarks.suites.launch import SETTLE
from benchmarks.suites.rpc import run
from benchmarks.suites.train import module

FILES = Bar("modules", "files", 270)
LINES = Bar("lines", "lines")
CODE = Bar("lines without blanks, docstrings and comments", "lines")
CLASSES = Bar("classes", "classes")
DENSITY = Bar("classes in 1 000 lines that are not blank", "classes")
PUBLIC = Bar("public class names that several modules define", "names", 0)
ALL = Bar("class names that several modules define", "names", 0)
CIRCLES = Bar("circles of imports inside a room", "circles", 0)
SMALL = Bar(f"modules with one importer and fewer than {source.SMALL} lines", "files")
TIMES = Bar("constants of time without unit or purpose in their names", "names", 0)

RESTART = Bar("SIGKILL of a worker → next generation: files of the cores of master and agent", "files", 26)
SHELLS = Bar("the same in a job, until all ranks are past an all_reduce: files of both processes", "files")
CALL = Bar("group call of 2 ranks there and back: files of both sides", "files", 14)
PUBLISH = Bar("publish → tensors of a receiver, not the first version: files of both sides", "files", 11)
REPORT = Bar("Trainer(2).run → report → callback, on warm workers: files of the driver", "files", 21)
WORKERS = Bar("the same: files of the workers", "files")

MASTER_AND_AGENT = {"unirun-master": "master", "unirun-agent": "agent"}
"""The processes that start the next generation."""

Sides = Mapping[str, list[str]]
"""The files that each kind of process has entered."""


def figures(runs: int) -> list[Figure]:
    """All figures of this suite. Figures that do not vary are counted once."""
    trained = Journeys("a run of a trainer", runs, report)
    return [
        *counts(source.modules(PACKAGE)),
        Journeys("a restart in the simulation", 1, decide).figure(RESTART),
        Journeys("a restart in a job", runs, restart).figure(SHELLS),
        Journeys("a group call", runs, call).figure(CALL),
        Journeys("weights", runs, publish).figure(PUBLISH),
        trained.figure(REPORT, "driver"),
        trained.figure(WORKERS, "worker"),
    ]


class Journeys:
    """Some runs of one journey, up to the first that fails."""

    def __init__(self, what: str, runs: int, once: Callable[[], Sides]) -> None:
        self._runs, self._found, self._fault = runs, list[Sides](), ""
        try:
            for number in range(runs):
                say(f"{what}, run {number + 1} of {runs}")
                self._found.append(once())
        except BenchmarkError as error:
            self._fault = str(error)

    def figure(self, bar: Bar, *sides: str) -> Figure:
        """The median number of files on these sides, or on all. The note has those of more than half of the runs."""
        own: list[float] = []
        seen: dict[str, Counter[str]] = {}
        for found in self._found:
            chosen = {side: found[side] for side in sides or found}
            own.append(len(set().union(*chosen.values())))
            for side, files in chosen.items():
                seen.setdefault(side, Counter()).update(files)
        note = []
        for side, times in seen.items():
            # A heartbeat, or news of another worker, comes into a run now and then.
            usual = sorted(file for file, runs in times.items() if runs > len(own) / 2)
            note.append(f"{side}, {len(usual)}: {' '.join(usual)}")
        value = median(own) if own else None
        return Figure(bar, value, self._runs, bar.unit, tuple(own), fault=self._fault, note="\n".join(note))


def counts(modules: list[source.Module]) -> list[Figure]:
    """The figures of the source. The notes name what is counted where the bar is 0."""
    say("the source")
    filled = sum(module.filled_lines for module in modules)
    classes = sum(len(module.classes) for module in modules)
    public = source.defined_twice(modules, public=True)
    every = source.defined_twice(modules, public=False)
    circles = [" ".join(circle) for circle in source.circles(modules)]
    return [
        counted(FILES, len(modules)),
        counted(LINES, sum(module.lines for module in modules), [f"{filled} of them are not blank"]),
        counted(CODE, sum(source.code_lines(module) for module in modules)),
        counted(CLASSES, classes),
        counted(DENSITY, 1000 * classes / filled),
        counted(PUBLIC, len(public), [f"{name}: {' '.join(homes)}" for name, homes in public.items()]),
        counted(ALL, len(every)),
        counted(CIRCLES, len(circles), circles),
        counted(SMALL, len(small := source.single_importers(modules)), sorted(small)),
        counted(TIMES, len(times := source.unclear_times(modules)), times),
    ]


def counted(bar: Bar, value: float, note: Iterable[str] = ()) -> Figure:
    """A figure of one run."""
    return Figure(bar, value, 1, bar.unit, (value,), note="\n".join(note))


def decide() -> Sides:
    """The restart in the simulation."""
    return recorded(lambda folder, result: module("benchmarks.simulated", result))


def restart() -> Sides:
    """Kill rank 1 of 4 twice. The second time counts, from SIGKILL until all ranks are past an all_reduce."""
    with tempfile.TemporaryDirectory() as folder:
        entered = Entered.new(Path(folder))
        launcher = Launcher("unirun", UNIRUN.command, {**UNIRUN.env, **entered.variables()})
        with started(launcher, 4, "train", max_restarts=3) as job:
            for restarts in (0, 1):
                victim = job.points(restarts)[1].pid
                time.sleep(SETTLE)
                if restarts:
                    entered.begin()
                os.kill(victim, signal.SIGKILL)
            job.points(restarts=2)
            entered.end()
            return by_name(job.members(), entered)


def by_name(processes: Iterable[psutil.Process], entered: Entered) -> Sides:
    """The files of the processes in `MASTER_AND_AGENT`."""
    pids = {process.name(): process.pid for process in processes}
    if missing := MASTER_AND_AGENT.keys() - pids.keys():
        raise BenchmarkError(f"the job has no {' and no '.join(sorted(missing))}, only {sorted(pids)}")
    return {side: entered.files({pids[name]}) for name, side in MASTER_AND_AGENT.items()}


def call() -> Sides:
    """A call of a role group whose connections are open."""
    return recorded(
        lambda folder, result: [program("unirun"), "--quiet", "--config", job_file(folder, result)]
    )


def job_file(folder: Path, result: str) -> str:
    """The job of the call."""
    path = folder / "job.yaml"
    job = {
        "roles": {"called": {"count": 2, "workload": "benchmarks.journeys:Called"}},
        "trainer": "benchmarks.journeys:Caller",
        "config": {"result": result},
        "cwd": str(Path(__file__).parents[2]),
    }
    path.write_text(json.dumps(job))
    return str(path)


def publish() -> Sides:
    """Weights of one actor for one rollout on this host."""
    script = [program("unirun"), "--quiet", "--roles", "actor=1,rollout=1", "-m", "benchmarks.journeys"]
    return recorded(lambda folder, result: [*script, "weights", result])


def report() -> Sides:
    """A function on running workers."""
    return recorded(lambda folder, result: module("benchmarks.journeys", "train", result))


def recorded(command: Callable[[Path, str], list[str]]) -> Sides:
    """Run a job of `benchmarks.journeys`, which writes to the path that `command` is given."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        entered, result = Entered.new(folder), folder / "result.json"
        env = {**environment(folder), **UNIRUN.env, **entered.variables()}
        try:
            run(command(folder, str(result)), env, DEADLINE)
        finally:
            sweep(folder)
        sides: Sides = json.loads(result.read_text())
        return sides
