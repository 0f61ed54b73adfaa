"""What a job is: frozen values, checked once, built from flags, YAML or Python alike."""

from unirun.spec.job import Entry, EntryKind, JobSpec, LogSpec, Restart, RoleSpec, StartMethod, Transport
from unirun.spec.parse import parse_job
from unirun.spec.roles import SlotCounter

__all__ = [
    "Entry",
    "EntryKind",
    "JobSpec",
    "LogSpec",
    "Restart",
    "RoleSpec",
    "SlotCounter",
    "StartMethod",
    "Transport",
    "parse_job",
]
