"""Weights from one publisher to three receivers on one host, beside one copy of the same memory and beside gloo; and
items through a queue, beside torch's."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.figure import Bar, BenchmarkError, Figure, compared, load_of_others, ratio, say
from benchmarks.job import DEADLINE, environment, program
from benchmarks.suites.nodes import bed, started
from benchmarks.suites.rpc import run
from tests.testbed import machine
from unirun.weights.tensors import Box, Layout, Part, Piece, Tensor, plan

ROUNDS = 5
"""Measurements of each figure in one job."""

BARS = (
    (
        "large",
        "copied",
        "copies",
        Bar("1 GiB, copied into place ÷ as many copies by a thread for each processor", "ratio", 1.1),
    ),
    ("large", "mapped", "memcpy", Bar("1 GiB, mapped without a copy ÷ one memcpy", "ratio", 1.1)),
    ("large", "copied", "broadcast", Bar("1 GiB, copied into place ÷ broadcast over gloo", "ratio", 0.25)),
    (
        "large",
        "mapped",
        "broadcast",
        Bar("1 GiB, mapped without a copy ÷ broadcast over gloo", "ratio", 0.25),
    ),
    ("small", "copied", "broadcast", Bar("1 000 tensors of 1 kB ÷ broadcast tensor by tensor", "ratio", 0.1)),
)

BETWEEN = {
    "linked": Bar("256 MiB between two hosts over gloo, into place ÷ broadcast over gloo", "ratio", 1.1),
    "copied": Bar("256 MiB between two hosts over TLS, into place ÷ broadcast over gloo", "ratio", 1.4),
}

ONCE_TO_A_HOST = Bar("32 MiB over 1 Gbit/s to 4 receivers of one host ÷ to one", "ratio", 2.5)
"""Each part is sent once to a host. The value would be 4 if each receiver got all parts from the publisher."""

SLOW = ("rate", "1gbit", "burst", "2mb", "latency", "50ms")
"""A network that is slower than the processors, as most networks are. Between namespaces the processors are slower."""

RANKS, TENSORS = 1000, 500
QUEUED = Bar("queue: an item of 1 MB on one host ÷ torch.multiprocessing.Queue", "ratio", 0.67)
"""A minimum of 1.5 times as many items per second."""

MEMORY = Bar("shared memory of the publisher ÷ its weights, while one version follows another", "ratio", 2.0)

BESIDE_RAY = {
    "ray-weights": Bar("1 GiB, copied into place ÷ Ray's object store", "ratio", 0.5),
    "ray-queue": Bar("queue: an item of 1 MB on one host ÷ ray.util.queue", "ratio", 0.2),
}

PLANNED = Bar("plan of one of 1 000 receivers for 500 tensors of 1 000 publishers", "s", 2.0)


def figures(runs: int) -> list[Figure]:
    """All figures of this suite."""
    busy, fault = load_of_others(), ""
    found: dict[str, dict[str, list[float]]] = {"large": {}, "small": {}}
    for number in range(runs):
        for kind, so_far in found.items():
            say(f"weights in {kind} tensors, run {number + 1} of {runs}")
            try:
                for what, values in one_job(kind).items():
                    so_far.setdefault(what, []).append(median(values))
            except BenchmarkError as error:
                fault = str(error)
    rows = []
    for kind, what, peer, bar in BARS:
        own, theirs = found[kind].get(what, []), found[kind].get(peer, [])
        rows.append(Figure(bar, ratio(own, theirs), runs, "s", tuple(own), peer, tuple(theirs), fault, busy))
    memory = found["large"].get("memory", [])
    value = median(memory) if memory else None
    rows.append(Figure(MEMORY, value, runs, "ratio", tuple(memory), fault=fault, busy=busy))
    rows += [*between(runs), to_one_host(runs), queued(runs)]
    for what, own in (("ray-weights", found["large"].get("copied", [])), ("ray-queue", [*rows[-1].own])):
        rows.append(beside_ray(what, own, runs))
    say(PLANNED.name)
    times = tuple(planning() for _ in range(runs))
    return [*rows, Figure(PLANNED, median(times), runs, "s", times, busy=busy)]


def one_job(kind: str, roles: str = "actor=1,rollout=3") -> dict[str, list[float]]:
    """Run `benchmarks.moving` once. Raises `BenchmarkError` when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        script = str(Path(__file__).parents[1] / "moving.py")
        command = [program("unirun"), "--quiet", "--roles", roles, script]
        run([*command, str(result), kind, str(ROUNDS)], environment(Path(folder)), DEADLINE * 3)
        found: dict[str, list[float]] = json.loads(result.read_text())
        return found


def beside_ray(what: str, own: list[float], runs: int) -> Figure:
    """The same with Ray, when it is installed."""
    bar, busy = BESIDE_RAY[what], load_of_others()
    if importlib.util.find_spec("ray") is None:
        return Figure(bar, None, runs, "s", peer="ray", missing="ray is not installed: pip install ray")
    theirs: list[float] = []
    fault = ""
    for number in range(runs):
        say(f"{what}, run {number + 1} of {runs}")
        try:
            command = [sys.executable, "-m", "benchmarks.foreign", what]
            theirs.append(float(run(command, dict(os.environ), DEADLINE).splitlines()[-1]))
        except (BenchmarkError, ValueError, IndexError) as error:
            fault = str(error)
    return Figure(bar, ratio(own, theirs), runs, "s", tuple(own), "ray", tuple(theirs), fault, busy)


def between(runs: int) -> list[Figure]:
    """Transfers from one host to another; the hosts are network namespaces."""
    times: dict[str, list[float]] = {"linked": [], "copied": [], "broadcast": []}
    busy, fault = load_of_others(), ""
    script = Path(__file__).parents[1] / "moving.py"
    roles = ("--hosts", "h1:1,h2:1", "--roles", "actor=1,rollout=1")
    for number in range(runs):
        say(f"weights between hosts, run {number + 1} of {runs}")
        try:
            with bed() as (hosts, folder):
                result = folder / "result.json"
                command = (program("unirun"), "--quiet", *roles, script, result, "between", ROUNDS)
                with started(hosts, folder, command) as process:
                    if process.wait(DEADLINE) != 0:
                        raise BenchmarkError("the job between hosts did not succeed")
                found = json.loads(result.read_text())
            for what, so_far in times.items():
                so_far.append(median(found[what]))
        except machine.Unavailable as error:
            return [Figure(bar, None, runs, bar.unit, missing=str(error)) for bar in BETWEEN.values()]
        except BenchmarkError as error:
            fault = str(error)
    theirs = times["broadcast"]
    return [
        Figure(
            bar,
            ratio(times[what], theirs),
            runs,
            "s",
            tuple(times[what]),
            "broadcast",
            tuple(theirs),
            fault,
            busy,
        )
        for what, bar in BETWEEN.items()
    ]


def to_one_host(runs: int) -> Figure:
    """Transfers to receivers that pass parts on to each other."""
    try:
        return compared(
            ONCE_TO_A_HOST, "s", runs, partial(over_slow_network, 4), "one", partial(over_slow_network, 1)
        )
    except machine.Unavailable as error:
        return Figure(ONCE_TO_A_HOST, None, runs, ONCE_TO_A_HOST.unit, missing=str(error))


def over_slow_network(receivers: int) -> float:
    """Seconds until all receivers of another host have a version."""
    script = Path(__file__).parents[1] / "moving.py"
    roles = ("--hosts", f"h1:1,h2:{receivers}", "--roles", f"actor=1,rollout={receivers}")
    with bed() as (hosts, folder):
        machine.run("tc", "qdisc", "add", "dev", hosts[1].namespace, "root", "tbf", *SLOW)
        result = folder / "result.json"
        command = (program("unirun"), "--quiet", *roles, script, result, "slow", ROUNDS)
        with started(hosts, folder, command) as process:
            if process.wait(DEADLINE) != 0:
                raise BenchmarkError("the job between hosts did not succeed")
        return float(median(json.loads(result.read_text())["copied"]))


def queued(runs: int) -> Figure:
    """An item through a queue, beside torch's own."""
    own: list[float] = []
    theirs: list[float] = []
    busy, fault = load_of_others(), ""
    script = str(Path(__file__).parents[1] / "queueing.py")
    job = [program("unirun"), "--quiet", "--roles", "rollout=1,actor=1", script, "unirun"]
    for number in range(runs):
        say(f"a queue, run {number + 1} of {runs}")
        for command, times in ((job, own), ([sys.executable, script, "torch"], theirs)):
            try:
                with tempfile.TemporaryDirectory() as folder:
                    result = Path(folder) / "result.json"
                    run([*command, str(result)], environment(Path(folder)), DEADLINE)
                    times.append(float(result.read_text()))
            except BenchmarkError as error:
                fault = str(error)
    return Figure(
        QUEUED, ratio(own, theirs), runs, "s", tuple(own), "torch's queue", tuple(theirs), fault, busy
    )


def planning() -> float:
    """Seconds of one plan. Tensors are sharded by rows over the publishers, and by columns over the receivers."""
    about = Tensor((RANKS, RANKS), "bfloat16")

    def layout(box: Box) -> Layout:
        part = Part(about, (Piece(box, (0, 0)),))
        return {f"layer {number}": part for number in range(TENSORS)}

    sources = [layout(Box((rank, 0), (1, RANKS))) for rank in range(RANKS)]
    wanted = layout(Box((0, 7), (RANKS, 1)))
    began = time.perf_counter()
    plan(sources, wanted)
    return time.perf_counter() - began
