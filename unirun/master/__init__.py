"""The process that decides: a pure state machine (`step`) and the thin shell around it (`shell`)."""

from unirun.master.state import JobPhase, JobState, RolePhase, RoleState, WorkerPhase, WorkerState, new_job
from unirun.master.step import step

__all__ = [
    "JobPhase",
    "JobState",
    "RolePhase",
    "RoleState",
    "WorkerPhase",
    "WorkerState",
    "new_job",
    "step",
]
