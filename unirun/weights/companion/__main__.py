"""``python -m unirun.weights.companion CHANNEL``: a worker that brings the versions of a channel into engines.

Its ranks are on different nodes and have nothing to do with each other. They form the generations of their role, as all
workers do that start again alone, by saying so.
"""

from __future__ import annotations

import argparse
import signal

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
    parser = argparse.ArgumentParser(prog="unirun.weights.companion", description="weights into engines")
    parser.add_argument("channel")
    parser.add_argument("--timeout", type=float, required=True, help="seconds for a request to an engine")
    parser.add_argument("--keep-cache", action="store_true", help="keep keys and values of the old weights")
    options = parser.parse_args()
    peers, channel = init().peers, WeightsChannel(options.channel)
    companion = Companion(channel, peers, timeout=options.timeout, clear_cache=not options.keep_cache)
    signal.signal(signal.SIGTERM, lambda *_: companion.stop())
    peers.when_changed(lambda: follow(peers))
    follow(peers)
    companion.run()
