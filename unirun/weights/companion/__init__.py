"""The companion of the engines of a host: it receives each version once, and brings it into each of them."""

from unirun.weights.companion.deciding import Engine
from unirun.weights.companion.engines import Engines, EnginesInMemory
from unirun.weights.companion.running import Companion

__all__ = ["Companion", "Engine", "Engines", "EnginesInMemory"]
