"""The spec of a job: frozen values, checked once, built from options, YAML or Python."""

from unirun.spec.job import Entry, EntryKind, JobSpec, LogSpec, Restart, RoleSpec
from unirun.spec.parse import parse_job

__all__ = [
    "Entry",
    "EntryKind",
    "JobSpec",
    "LogSpec",
    "Restart",
    "RoleSpec",
    "parse_job",
]
