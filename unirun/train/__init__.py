"""Jobs from Python: described with a builder, checked at once, submitted as a process of its own."""

from unirun.train.attach import attach
from unirun.train.builder import DLJobBuilder, RLJobBuilder
from unirun.train.handle import JobHandle
from unirun.train.job import Job

JobBuilder = DLJobBuilder

__all__ = ["DLJobBuilder", "Job", "JobBuilder", "JobHandle", "RLJobBuilder", "attach"]
