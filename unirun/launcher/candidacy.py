"""Decide when an agent starts a candidate for master: the agents of a job take turns, so that few of them do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

from unirun.values import Value

STEP = 0.5
"""Seconds in which the number of agents that have had their turn doubles. A candidate leads after 0.4 s, by which time
one or two have started; of 1 000 agents the last has its turn after 5 s."""

DELAY = 1.0
MAX_DELAY = 4.0
"""Initial and maximum back-off in seconds between two candidates of one agent."""

SPREAD = 0.25
"""Minimum back-off in seconds for each node of the job, for masters that fail on every node."""

COMING_UP = 5.0
"""Seconds in which a live candidate should become leader. Until then its agent starts no other."""


class Attempts(Value):
    """The candidates that one agent has started since a master last led for long: their number, the time of the last
    one (``time.monotonic``), and whether it is still starting up."""

    number: int = 0
    started: float = -math.inf
    coming_up: bool = False


def turns(nodes: Sequence[str], epoch: int) -> dict[str, float]:
    """Seconds that the agent of each node waits before it starts a successor to the leader of term `epoch`.

    The order of `nodes` differs between terms and is the same for all agents; the first does not wait.
    """
    order = sorted(nodes, key=lambda node: _place(node, epoch))
    return {node: STEP * math.log2(place + 1) for place, node in enumerate(order)}


def start_at(vacant: float, wait: float, attempts: Attempts, nodes: int) -> float:
    """The time at which an agent starts a candidate, unless there is a leader by then.

    `vacant` is the time since which there is no leader, `wait` the agent's turn (`turns`), `nodes` the number of nodes.
    """
    if not attempts.number:
        return vacant + wait
    delay = max(min(DELAY * 2 ** (attempts.number - 1), MAX_DELAY), SPREAD * nodes)
    pause = COMING_UP if attempts.coming_up else delay
    return max(vacant + wait, attempts.started + pause)


def _place(node: str, epoch: int) -> bytes:
    return blake2b(f"{epoch} {node}".encode(), digest_size=8).digest()
