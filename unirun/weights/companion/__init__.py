"""The companion of the engines of a host: it receives each version once, and brings it into each of them.

``python -m unirun.weights.companion CHANNEL`` is a worker of the job beside the engines (`unirun.spec.engines`).
"""
