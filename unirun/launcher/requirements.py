"""Requirements that every host of a job has to meet, checked before it starts a process."""

from __future__ import annotations

import os

from unirun.errors import JobError
from unirun.observe.jobdir import may_write
from unirun.spec.job import JobSpec

TEMPORARY = ("TMPDIR", "TEMP", "TMP")
"""Variables that name a temporary directory, as `tempfile` has them."""


def check_host(spec: JobSpec) -> None:
    """Raise `JobError` when this host lacks what the job's processes need.

    Processes are watched through ``/proc``. torch needs a temporary directory: `DistributedDataParallel`,
    `torch.compile` and torchrun fail without one, some only after the job has run for a while.
    """
    if not os.path.exists("/proc/self/stat"):
        raise no_proc()
    for role in spec.roles:
        env = {**os.environ, **spec.env, **role.env}
        named = [env[name] for name in TEMPORARY if env.get(name)]
        places = (*named, "/tmp", "/var/tmp", "/usr/tmp", role.cwd or os.getcwd())
        if role.entry.kind != "program" and not any(map(may_write, places)):
            raise JobError(
                f"role {role.name} has no temporary directory, which torch needs: {', '.join(places)}"
                " cannot be written",
                "set TMPDIR to a directory that you may write",
            )


def no_proc() -> JobError:
    """The error of a host on which the state of processes cannot be read."""
    return JobError(
        "/proc is not mounted, and unirun watches processes there", "mount it: mount -t proc proc /proc"
    )
