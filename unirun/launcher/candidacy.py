"""When an agent starts a candidate for the place of its job's master: few of many agents do, one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

from unirun.values import Value

STEP = 0.5
"""Seconds in which the number of agents that have had their turn doubles. A candidate leads after 0.4 s, so that one or
two have started by then; of 1 000 agents the last has its turn after 5 s."""

DELAY = 1.0
MAX_DELAY = 4.0
"""Seconds between two candidates of one agent, at first and at most, when the first has ended."""

SPREAD = 0.25
"""Seconds between two candidates of one agent for each node of the job, at least: masters may end everywhere."""

COMING_UP = 5.0
"""Seconds in which a candidate that lives should lead. Until then this agent starts no other."""


class Attempts(Value):
    """The candidates that one agent has started since a master last led for long: how many, when the last one
    (``time.monotonic``), and whether that is still coming up."""

    number: int = 0
    started: float = -math.inf
    coming_up: bool = False


def turns(nodes: Sequence[str], epoch: int) -> dict[str, float]:
    """Seconds for which the agent of each node waits before it takes the place of the leader of term `epoch`.

    The order of `nodes` is another for each term, and the same for all agents; the first does not wait.
    """
    order = sorted(nodes, key=lambda node: _place(node, epoch))
    return {node: STEP * math.log2(place + 1) for place, node in enumerate(order)}


def start_at(vacant: float, wait: float, attempts: Attempts, nodes: int) -> float:
    """The time at which an agent starts a candidate, unless somebody leads before.

    `vacant` is when the place became free and `wait` the agent's turn (`turns`), in a job of so many `nodes`.
    """
    if not attempts.number:
        return vacant + wait
    delay = max(min(DELAY * 2 ** (attempts.number - 1), MAX_DELAY), SPREAD * nodes)
    pause = COMING_UP if attempts.coming_up else delay
    return max(vacant + wait, attempts.started + pause)


def _place(node: str, epoch: int) -> bytes:
    return blake2b(f"{epoch} {node}".encode(), digest_size=8).digest()
