"""Requests to the engines of a job: which one gets each, and what becomes of those that a dead one had not finished."""

from unirun.rollout.choosing import Answer, Span
from unirun.rollout.client import AddressFile, EngineClient, EngineList, Engines
from unirun.rollout.completing import Completer, Completion, EngineCompleter
from unirun.values import Engine

__all__ = [
    "AddressFile",
    "Answer",
    "Completer",
    "Completion",
    "Engine",
    "EngineClient",
    "EngineCompleter",
    "EngineList",
    "Engines",
    "Span",
]
