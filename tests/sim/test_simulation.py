"""Thousands of things go wrong in hundreds of histories, and every job ends as it should.

A failing history is replayed with ``UNIRUN_SIM_SEED=<seed> pytest tests/sim``; ``UNIRUN_SIM_SEEDS=5000`` runs more.
"""

from __future__ import annotations

import os

import pytest

from tests.sim.simulation import Simulation
from tests.unit.failover.phase_rows import EVERY_ROW, HISTORIES, name_of, recorded
from unirun.errors import IllegalTransition

BLOCK = 200
SEEDS = int(os.environ.get("UNIRUN_SIM_SEEDS", "400"))
ONE = os.environ.get("UNIRUN_SIM_SEED")


def histories() -> list[range]:
    if ONE is not None:
        return [range(int(ONE), int(ONE) + 1)]
    return [range(first, min(first + BLOCK, SEEDS)) for first in range(0, SEEDS, BLOCK)]


@pytest.mark.parametrize("seeds", histories(), ids=lambda seeds: f"seeds {seeds.start} to {seeds.stop - 1}")
def test_every_history_ends_well_or_for_a_reason(seeds: range) -> None:
    """1. A seed makes a scenario (roles, nodes, budgets) and a history of accidents: processes that die or hang, ranks that
       straggle or are stuck, roles that grow, streams that are cut, a store that is away, clocks that jump, a bug in one
       branch of the master.
    2. The cores of the master and of the agents run against each other, with a model of spawners and workers; after each
       event the invariants are checked.
    3. The job ends, and its end is in the store and told to everybody.
    4. So many histories use every row of the tables of phases, but those for which there is a history of their own.
    """
    with recorded() as used:
        for seed in seeds:
            simulation = Simulation(seed)
            try:
                simulation.run()
            except (AssertionError, IllegalTransition, LookupError, TypeError) as error:
                last = "\n".join(simulation.log[-60:])
                pytest.fail(f"seed {seed}: {type(error).__name__}: {error}\n{last}")
    unused = EVERY_ROW - used.keys() - HISTORIES.keys()
    assert len(seeds) < BLOCK or not unused, [*map(name_of, unused)]


def test_a_seed_gives_the_same_history_twice() -> None:
    one, two = Simulation(7), Simulation(7)
    one.run()
    two.run()
    assert one.log == two.log


def test_a_time_in_which_each_master_is_killed_before_it_has_led_is_not_calm() -> None:
    """Also where nobody deposes it, so that the next one waits for the end of its term."""
    simulation = Simulation(7)
    simulation.scenario.crashes = 100.0
    simulation.clock.now += 200.0
    simulation.start_master(deposing=0)
    assert not simulation.masters[0].alive
    assert simulation.troubled == simulation.clock.now
