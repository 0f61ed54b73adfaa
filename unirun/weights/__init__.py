"""Weights from the ranks of one role to those of others: layouts, plans, shared memory, versions."""

from unirun.weights.channel import WeightsChannel

__all__ = ["WeightsChannel"]
