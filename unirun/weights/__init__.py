"""Weights from the ranks of one role to those of others: layouts, plans, versions. And queues of items."""

from unirun.weights.admitting import Admission
from unirun.weights.channel import WeightsChannel
from unirun.weights.queue import Item, Queue
from unirun.weights.tensors import LocalShard

__all__ = ["Admission", "Item", "LocalShard", "Queue", "WeightsChannel"]
