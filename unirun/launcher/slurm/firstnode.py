"""A batch job that has lost its first node, and with it its script.

With ``--no-kill`` Slurm keeps the other nodes for the job, and nothing on them ends it. The script writes to a file as
long as it lives. So each node, when its part of the job is over, looks at that file; when it does not change, the node
requeues or ends the batch job. A job that has ended is no exception: its first node may be lost, or shut down, before
the script has ended too.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from unirun import atomic
from unirun.errors import EXIT_RENDEZVOUS, JobError, RendezvousError, UnirunError
from unirun.launcher.foreground.terminal import warn
from unirun.launcher.interfaces import is_own, reachable_address, resolve
from unirun.launcher.slurm.allocation import SlurmAllocation
from unirun.observe.batchjob import (
    SLURM_OUTAGE_TIMEOUT,
    SLURM_RETRY_INTERVAL,
    ask_slurm,
    batch_state,
    own_batch,
)
from unirun.observe.jobdir import JobDir, directories_of_nodes, job_at, unirun_home
from unirun.observe.ownership import exposure, make_private
from unirun.observe.status import ENDED, PENDING, JobStatus, read_status, write_status
from unirun.wire.address import TcpAddress
from unirun.wire.handshake import Token

SCRIPT_POLL_INTERVAL = 1.0
"""Seconds between two looks at the file. Looks are counted, so that a file system that hangs costs nothing."""

SCRIPT_POLLS = 30
"""Looks without a change after which the script is gone; it writes once in a second."""


@contextmanager
def outliving_the_script(
    run_id: str, environ: Mapping[str, str], look: float = SCRIPT_POLL_INTERVAL
) -> Iterator[None]:
    """A context in which a node other than the first does its part of the job `run_id`. At the end of the context, if
    the script of this batch job is gone, the batch job is requeued; it is ended instead where it may not be requeued,
    or when the job has ended. Takes a second while the script lives."""
    try:
        yield
    finally:
        if own_batch(run_id, environ)[0] and script_is_gone(job := job_at(run_id), look):
            _end(job, _batch_id(environ))


def script_is_gone(job: JobDir, look: float = SCRIPT_POLL_INTERVAL) -> bool:
    """Return True if the batch script of `job` is gone."""
    before = _beat(job)
    if before is None:
        return False
    for _ in range(SCRIPT_POLLS):
        time.sleep(look)
        if (now := _beat(job)) != before and now is not None:
            return False
    return True


def _beat(job: JobDir) -> str | None:
    """None where it cannot be read. It is empty when the script was killed while it wrote."""
    try:
        return (job.batch / "beat").read_text()
    except OSError:
        return None


def _batch_id(environ: Mapping[str, str]) -> str:
    """The id of the batch job; of a heterogeneous one, that of its first component."""
    names = ("SLURM_HET_JOB_ID", "SLURM_PACK_JOB_ID", "SLURM_JOB_ID")
    return next(environ[name] for name in names if environ.get(name))


def _end(job: JobDir, number: str) -> None:
    """Requeue the batch job `number` or end it, unless another node has done so."""
    deadline = time.monotonic() + SLURM_OUTAGE_TIMEOUT
    while True:
        try:
            state = batch_state(number)
            if state.state != "RUNNING":
                return
            ended = _end_of(job)
            again = ended is None and state.requeues
            try:
                write_status(job, ended or _lost(read_status(job), again=again))
            except (JobError, OSError) as error:
                warn(str(error))
            ask_slurm(*(("scontrol", "requeue") if again else ("scancel",)), number)
            return
        except RendezvousError as error:
            if time.monotonic() > deadline:
                warn(f"{error}; end it with: scancel {number}")
                return
            time.sleep(SLURM_RETRY_INTERVAL)
        except UnirunError as error:
            # Another node may have been quicker.
            warn(f"{error}; if Slurm job {number} still runs, end it with: scancel {number}")
            return


def _end_of(job: JobDir) -> JobStatus | None:
    """The status of a job that has ended, on its first node or, with a store on several hosts, on another."""
    for directory in (job, *directories_of_nodes(job)):
        try:
            if (status := JobStatus.from_json(directory.read_json(job.state.name))).phase in ENDED:
                return status
        except (JobError, ValueError):
            continue
    return None


def _lost(status: JobStatus, *, again: bool) -> JobStatus:
    reason = "its first node is lost, and with it the batch script and the state of the job"
    if again:
        return replace(status, phase=PENDING, reason=reason)
    return replace(status, phase="failed", reason=reason, ended=time.time(), code=EXIT_RENDEZVOUS)


# The search for the head by the commands of one job step: a file, mode 0600, in a directory that nodes share.

HEAD_FILE_POLL_INTERVAL = 0.05
"""Seconds between two looks for the file."""


def address_here(step: SlurmAllocation) -> str:
    """The address of this node that the others of the step reach: that of its name, unless it is loopback.

    Raises `RendezvousError`.
    """
    with contextlib.suppress(RendezvousError):
        found = resolve(step.node)
        if is_own(found) and not found.startswith("127.") and found != "::1":
            return found
    return reachable_address()


@contextmanager
def published(step: SlurmAllocation, head: TcpAddress, token: Token) -> Iterator[None]:
    """Let the other commands of the step find this one, the `head`, as long as the context lasts. Raises
    `JobError`."""
    file = _file(step)
    try:
        make_private(file.parent)
        if (found := exposure(file.parent)) is not None:
            raise JobError(f"a secret is not safe in {file.parent}: {found.problem}", found.remedy)
        atomic.replace(file, json.dumps([head.addr, head.port, token.hex()]))
    except OSError as error:
        raise JobError(
            f"{file} cannot be written: {error.strerror}",
            "set UNIRUN_HOME to a directory that all nodes share",
        ) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def find(step: SlurmAllocation, timeout: float) -> tuple[str, int, Token]:
    """Wait until the head of the step is published. Returns its address and port, and the token of the job. Raises
    `RendezvousError` after `timeout` seconds."""
    file, end = _file(step), time.monotonic() + timeout
    while time.monotonic() < end:
        # Listing the directory makes a network file system look again.
        with contextlib.suppress(OSError):
            if file.name in os.listdir(file.parent):
                addr, port, token = json.loads(file.read_text())
                return addr, port, Token(bytes.fromhex(token))
        time.sleep(HEAD_FILE_POLL_INTERVAL)
    raise RendezvousError(
        f"node {step.head} has not said within {timeout:g} s where it is: {socket.gethostname()} has no {file}",
        "set UNIRUN_HOME to a directory that all nodes share, or name the head: --nnodes N --rdzv-endpoint HOST:PORT",
    )


def _file(step: SlurmAllocation) -> Path:
    return unirun_home() / "slurm" / f"{step.job}.{step.step}.{step.restarts}.json"
