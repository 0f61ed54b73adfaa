"""The event log, the status and the index of jobs."""

from unirun.observe.events import EventLog, led_to, read_events
from unirun.observe.linelog import LineLog
from unirun.observe.status import (
    FAILURES,
    CallStatus,
    FailureStatus,
    JobStatus,
    RoleStatus,
    Summary,
    WorkerStatus,
    read_status,
    read_summary,
    shaped,
    write_status,
)
from unirun.rendezvous.index import read_index

__all__ = [
    "FAILURES",
    "CallStatus",
    "EventLog",
    "FailureStatus",
    "JobStatus",
    "LineLog",
    "RoleStatus",
    "Summary",
    "WorkerStatus",
    "led_to",
    "read_events",
    "read_index",
    "read_status",
    "read_summary",
    "shaped",
    "write_status",
]
