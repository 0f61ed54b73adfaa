"""Requests to the engines of a job: which one gets each, and what becomes of those that a dead one had not finished."""

from unirun.rollout.choosing import AddressFile, Answer, Engine, EngineList, Engines, Span
from unirun.rollout.client import EngineClient

__all__ = ["AddressFile", "Answer", "Engine", "EngineClient", "EngineList", "Engines", "Span"]
