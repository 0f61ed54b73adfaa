"""A restart in the simulation of `tests.sim`: the real cores of a master and an agent, which decide, and models of
processes, streams and clocks.

    python -m benchmarks.simulated RESULT

One role has 4 ranks on one node, and rank 1 is killed three times. The third time is recorded, from SIGKILL until four
processes of a later generation live. RESULT gets the files as those of `benchmarks.journeys`.
"""

from __future__ import annotations

import os
import signal
import sys
from unittest.mock import patch

from benchmarks.entered import Entered
from benchmarks.figure import BenchmarkError
from benchmarks.journeys import write
from tests.sim import simulation
from tests.sim.processes import Process
from tests.sim.scenario import Behaviour, Scenario
from tests.sim.simulation import Simulation
from unirun.collocation import Device, Inventory, Node, place
from unirun.spec.job import Entry, JobSpec, RoleSpec

RANKS, VICTIM, KILLS = 4, 1, 3

CALM = 5.0
"""Simulated seconds between the beginning, or a restart, and the next SIGKILL."""

MAX_TURNS = 20_000
"""Maximum number of events of the simulation in one wait."""


def scenario(_: int) -> Scenario:
    """A job whose workers do not end, without injected failures."""
    role = RoleSpec("actor", RANKS, Entry("script", "train.py"), max_restarts=10 * KILLS)
    spec = JobSpec(name="sim", run_id="sim", roles=(role,), primary=(role.name,))
    devices = tuple(Device(str(number), "") for number in range(RANKS))
    inventory = Inventory((Node("n0", (0, 1), devices),))
    spec, placement = place(spec, inventory)
    calm = Behaviour(fails=0.0, finishes=0.0, lifetime=1e9, stubborn=0.0, follows=0.0, recovers=1.0)
    return Scenario(spec, placement, inventory, {role.name: calm}, slow=0.0005)


def main(result: str) -> None:
    """Run it."""
    with patch.object(simulation, "make_scenario", scenario):
        history = Simulation(0)
    for node in history.nodes.values():
        history.clock.after(0.0, node.join)
    history.start_master(0)
    entered = Entered.inherited()
    latest = whole(history, -1)
    for number in range(1, KILLS + 1):
        calm = history.clock.now + CALM
        while history.clock.now < calm:
            turn(history)
        # The simulation has failures of its own, a few in a hundred starts.
        latest = whole(history, latest - 1)
        if number == KILLS:
            entered.begin()
        kill(history)
        latest = whole(history, latest)
    entered.end()
    write(result, entered, {"cores": {os.getpid()}})


def whole(history: Simulation, before: int) -> int:
    """Advance time until all ranks run in one generation after `before`, and return it."""
    limit = history.clock.steps + MAX_TURNS
    while history.clock.steps < limit:
        found = generation(history)
        if found is not None and found > before:
            return found
        turn(history)
    raise BenchmarkError("\n".join(["the ranks do not live again", *history.log[-12:]]))


def turn(history: Simulation) -> None:
    """Process the next event."""
    if not history.clock.run_next():
        raise BenchmarkError("\n".join(["nothing happens any more", *history.log[-12:]]))


def generation(history: Simulation) -> int | None:
    """The generation of the processes if all ranks run in the same one."""
    alive = [process.generation for process in history.processes if process.alive]
    return alive[0] if len(alive) == RANKS and len({*alive}) == 1 else None


def kill(history: Simulation) -> None:
    """Send SIGKILL to the victim."""
    for node in history.nodes.values():
        for spawner in node.spawners.values():
            for number, process in spawner.processes.items():
                if is_victim(process):
                    spawner.end(number, None, signal.SIGKILL)


def is_victim(process: Process) -> bool:
    """Return True for the live process of the rank that is killed."""
    return process.alive and process.who[1] == VICTIM


if __name__ == "__main__":
    main(sys.argv[1])
