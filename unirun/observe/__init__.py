"""What happened and how things stand: the event log and the status of jobs."""

from unirun.observe.events import EventLog, read_events
from unirun.observe.status import JobStatus, RoleStatus, WorkerStatus, read_status

__all__ = ["EventLog", "JobStatus", "RoleStatus", "WorkerStatus", "read_events", "read_status"]
