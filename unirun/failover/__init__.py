"""What a failure means: exits, the restart policy, and which failure was the cause. Pure functions."""

from unirun.failover.exits import Exit, Failure
from unirun.failover.policy import Decision, decide
from unirun.failover.rootcause import Diagnosis, diagnose, episode

__all__ = ["Decision", "Diagnosis", "Exit", "Failure", "decide", "diagnose", "episode"]
