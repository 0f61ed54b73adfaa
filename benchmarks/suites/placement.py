"""The cost of a placement on ten thousand nodes with eight GPUs, all of them in use.

NVLink joins the GPUs in pairs, of which a node has two near each of its two NUMA nodes. Five roles, of which two pairs
share slots and two are apart, with weights between them: 120 000 ranks on 80 000 slots. Everything is in one thread and
waits for nothing, so processor time is what it takes; that does not depend on what else the machine does. The memory is
that of a process which does nothing else.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
import time
from functools import partial
from statistics import median

from benchmarks.calibration import bar, in_units
from benchmarks.figure import Bar, BenchmarkError, Figure, measured, say
from unirun.collocation import Device, Inventory, Node, Placement, parse_fake, place
from unirun.collocation.graph import Edge, Role, RoleGraph, affected
from unirun.collocation.inventory import PlacementRequest, RoleRequest, Ties
from unirun.collocation.planning import plan, replan
from unirun.errors import PlacementError
from unirun.spec.job import Entry, JobSpec, RoleSpec

PLAN = bar("plan 10 000 nodes × 8 slots, 5 roles", 1.0)
SPARE = bar("re-plan after a node's loss, 10 000 nodes, a spare", 0.2)
ROOM = bar("re-plan after a node's loss, 10 000 nodes, room elsewhere", 0.2)
REFUSAL = bar("what does not fit on 10 000 nodes is told with what would", 2.0)
QUIET = bar("place 1 000 ranks on one host, as under torchrun", 0.1)
AFFECTED = bar("who is affected by a failure among 50 000 ranks", 2.0)
MEMORY = Bar("peak memory of inventory, plan and re-plan", "MB", 500)
GROWTH = Bar("plan: cost per node, 10 000 nodes ÷ 1 000", "ratio", 2.0)

NODES, SLOTS = 10_000, 8
SIZES = (100, 1_000, 10_000)
PER_NODE = {"actor": 2, "reference": 2, "critic": 2, "reward": 2, "rollout": 4}
"""Ranks per node of the job: pairs that share slots take four of them, the rollouts the other four."""


def figures(runs: int) -> list[Figure]:
    """All figures of this suite, each from `runs` runs."""
    timed = partial(in_units, clock=time.process_time)
    found = [timed(PLAN, runs, partial(plan_time, NODES))]
    found.append(timed(SPARE, runs, partial(replan_time, spares=1)))
    found.append(timed(ROOM, runs, partial(replan_time, spares=0)))
    found.append(timed(REFUSAL, runs, refusal_time))
    found.append(timed(QUIET, runs, quiet_time))
    found.append(timed(AFFECTED, runs, affected_time))
    found.append(measured(MEMORY, 1, peak_memory))
    found.append(measured(GROWTH, 1, growth))
    return found


def inventory(nodes: int) -> Inventory:
    """`nodes` hosts that share no value, as if each had told of its own."""
    return Inventory(
        tuple(
            Node(
                f"node-{number:05}",
                tuple(range(64)),
                tuple(
                    Device(str(slot), "GPU", numa=slot * 2 // SLOTS, links=links(slot))
                    for slot in range(SLOTS)
                ),
            )
            for number in range(nodes)
        )
    )


def links(slot: int) -> tuple[tuple[str, str], ...]:
    """The links from the device in `slot` to the other devices of a node."""
    return tuple(
        (str(peer), "nvlink" if peer // 2 == slot // 2 else "numa" if peer // 4 == slot // 4 else "system")
        for peer in range(SLOTS)
        if peer != slot
    )


def request(nodes: int, spares: int = 0) -> PlacementRequest:
    """A job that fills so many nodes."""
    return PlacementRequest(
        tuple(RoleRequest(name, nodes * each, nodes * each, "cuda") for name, each in PER_NODE.items()),
        collocated=(("actor", "reference"), ("critic", "reward")),
        apart=(("critic", "rollout"),),
        ties=Ties(
            {("actor", "rollout"): 9e9, ("actor", "critic"): 1e9, ("rollout", "reward"): 1e8},
            (("actor", "rollout"), ("critic", "reward")),
        ),
        spares=spares,
    )


def plan_time(nodes: int) -> float:
    """Seconds for one plan of a job that fills `nodes` nodes."""
    job, there = request(nodes), inventory(nodes)
    gc.collect()
    began = time.process_time()
    plan(job, there)
    return time.process_time() - began


def refusal_time() -> float:
    """Seconds until a job that needs one node more than there are is refused."""
    job, there = request(NODES), inventory(NODES - 1)
    began = time.process_time()
    try:
        plan(job, there)
    except PlacementError:
        return time.process_time() - began
    raise BenchmarkError("what does not fit was placed")


def quiet_time() -> float:
    """Seconds to place a job without placement options."""
    role = RoleSpec("actor", 1000, Entry("script", "train.py"))
    job, there = JobSpec("job", "job", (role,), ("actor",)), parse_fake("fake:cpus=64")
    began = time.process_time()
    place(job, there)
    return time.process_time() - began


def affected_time() -> float:
    """Seconds to find the ranks that the loss of a role of PPO affects, if all ranks call all others."""
    judges = ("reference", "reward", "critic")
    calls = [("rollout", judge) for judge in judges] + [(judge, "actor") for judge in judges]
    edges = [Edge(source, target, kind="all_to_all") for source, target in calls]
    edges.append(Edge("actor", "rollout", kind="all_to_all", asynchronous=True))
    graph = RoleGraph(tuple(Role(name, 10_000) for name in ("rollout", *judges, "actor")), tuple(edges))
    began = time.process_time()
    affected(graph, ["critic"])
    return time.process_time() - began


def replan_time(spares: int) -> float:
    """Seconds to place the ranks of one lost node: on a spare, or on an unused node."""
    job, there = request(NODES, spares), inventory(NODES + 1)
    before = plan(job, there)
    gc.collect()
    began = time.process_time()
    after = replan(job, there, before, frozenset({"node-00017"}))
    seconds = time.process_time() - began
    if moved(before, after) != ranks_on(before, "node-00017"):
        raise BenchmarkError("others than the ranks of the lost node have moved")
    return seconds


def ranks_on(placement: Placement, node: str) -> int:
    """The number of ranks on `node`."""
    return sum(each.node == node for each in placement.assignments)


def moved(before: Placement, after: Placement) -> int:
    """The number of ranks that have moved."""
    return sum(a != b for a, b in zip(before.assignments, after.assignments, strict=True))


def peak_memory() -> float:
    """Megabytes of a new process that makes the inventory, plans and plans again."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak)


def _peak() -> float:
    replan_time(spares=1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def growth() -> float:
    """The cost per node of the largest job, divided by that of a job of a tenth."""
    seconds = {nodes: median(plan_time(nodes) for _ in range(5)) for nodes in SIZES}
    say("  " + ", ".join(f"{nodes} nodes {taken:.4f} s" for nodes, taken in seconds.items()))
    small, large = SIZES[-2:]
    return (seconds[large] / large) / (seconds[small] / small)
