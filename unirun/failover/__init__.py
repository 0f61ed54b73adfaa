"""What a failure means: exits, the restart policy, and which failure was the cause. Pure functions."""

from unirun.failover.brevity import brief
from unirun.failover.exits import Exit, Failure
from unirun.failover.lasting import is_lasting
from unirun.failover.policy import (
    Circumstances,
    Decision,
    decide,
    decide_to_make_room,
    decide_without_node,
    decide_without_store,
)
from unirun.failover.rootcause import Diagnosis, diagnose, episode

__all__ = [
    "Circumstances",
    "Decision",
    "Diagnosis",
    "Exit",
    "Failure",
    "brief",
    "decide",
    "decide_to_make_room",
    "decide_without_node",
    "decide_without_store",
    "diagnose",
    "episode",
    "is_lasting",
]
