"""``python -m unirun.weights.companion CHANNEL``: a worker that brings the versions of a channel into engines.

Its ranks are on different nodes and have nothing to do with each other. They form the generations of their role, as all
workers do that start again alone, by saying so.
"""

from __future__ import annotations

import signal
import sys

from unirun.roles.context import init
from unirun.roles.peers import Peers
from unirun.weights.channel import WeightsChannel
from unirun.weights.companion.running import Companion
from unirun.wire.reports import GroupFormed


def follow(peers: Peers) -> None:
    """Be in the latest generation of the role."""
    generation = peers.known(peers.role).generation
    if generation > peers.generation:
        peers.generation = generation
        peers.tell(GroupFormed(generation))


if __name__ == "__main__":
    peers, channel = init().peers, WeightsChannel(sys.argv[1])
    companion = Companion(channel, peers)
    signal.signal(signal.SIGTERM, lambda *_: companion.stop())
    peers.when_changed(lambda: follow(peers))
    follow(peers)
    companion.run()
