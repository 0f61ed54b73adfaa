"""``python -m unirun.weights.companion CHANNEL``: a worker that brings the versions of a channel into engines."""

from __future__ import annotations

import os
import sys

from unirun.roles.context import init
from unirun.spec.engines import API_KEY
from unirun.weights.channel import WeightsChannel
from unirun.weights.companion import AgentEngines, Companion

if __name__ == "__main__":
    channel = WeightsChannel(sys.argv[1])
    engines = AgentEngines(channel.name, init().peers)
    Companion(channel, engines, api_key=os.environ.get(API_KEY, "")).run()
