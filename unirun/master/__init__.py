"""The process that decides: a pure state machine (`step`) and the thin shell around it (`shell`).

The command makes the first state; only the master's process imports the rest.
"""

from unirun.master.state import JobPhase, JobState, RolePhase, RoleState, WorkerPhase, WorkerState, new_job

__all__ = [
    "JobPhase",
    "JobState",
    "RolePhase",
    "RoleState",
    "WorkerPhase",
    "WorkerState",
    "new_job",
]
