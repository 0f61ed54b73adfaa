"""The companion of the engines of a host: it receives each version once, and brings it into each of them.

``python -m unirun.weights.companion CHANNEL`` is a worker of the job beside the engines (`unirun.spec.engines`).
"""

from unirun.weights.companion.engines import Engines, EnginesHere, EnginesInMemory
from unirun.weights.companion.running import Companion
from unirun.wire.reports import Engine

__all__ = ["Companion", "Engine", "Engines", "EnginesHere", "EnginesInMemory"]
