"""The batch job of a job that was submitted to Slurm: what is recorded of it, and how it stands now.

Slurm is asked by its own commands, as its protocol differs between versions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from unirun.errors import JobError, RendezvousError, UnirunError, UsageError
from unirun.observe.jobdir import JobDir
from unirun.values import Value, natural

SLURM_COMMAND_TIMEOUT = 30.0
"""Seconds in which a command of Slurm must answer; a busy controller takes its time."""

SLURM_OUTAGE_TIMEOUT = 900.0
"""Seconds without an answer of Slurm after which it is not asked any more, and between two questions until then:"""
SLURM_RETRY_INTERVAL = 5.0

VARIABLE = "UNIRUN_BATCH"
"""Tells a process the job whose batch job it is in."""

_RECORD = "job.json"
_ACTIVE = frozenset(
    (
        *(
            "PENDING",
            "CONFIGURING",
            "RUNNING",
            "SUSPENDED",
            "STOPPED",
            "COMPLETING",
            "STAGE_OUT",
            "SIGNALING",
        ),
        *("RESIZING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
    )
)
_FIELD = re.compile(
    r"(?:^|\s)(JobState|Reason|ExitCode|NodeList|Requeue|Restarts|StdOut)=(.*?)(?=\s+[A-Z][A-Za-z:/_]*=|$)"
)
_CODE = re.compile(r"([0-9]{1,3}):([0-9]{1,3})")


class BatchState(Value):
    """The state of a batch job: Slurm's word for its `state`, the `reason` why it is pending, its nodes, how
    often it was requeued and whether it may be, and the file with its output. `code` is its exit code once it
    has ended; None where Slurm tells none."""

    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    output: str = ""
    code: int | None = None
    requeues: bool = False

    @property
    def active(self) -> bool:
        """True if it waits or runs."""
        return self.state in _ACTIVE

    @property
    def words(self) -> str:
        """``PENDING (Resources)``, ``RUNNING on n[1-3], requeued 2 times``."""
        reason = f" ({self.reason})" if self.reason and self.state == "PENDING" else ""
        nodes = f" on {self.nodes}" if self.nodes else ""
        times = "once" if self.restarts == 1 else f"{self.restarts} times"
        return f"{self.state}{reason}{nodes}{f', requeued {times}' if self.restarts else ''}"


def read_batch(job: JobDir) -> str | None:
    """The id of the Slurm job that was submitted for `job`; None when there is none. Raises `JobError`."""
    if not (job.batch / _RECORD).exists():
        return None
    return str(job.read_json(f"{job.batch.name}/{_RECORD}").get("id", ""))


def write_batch(job: JobDir, batch: str) -> None:
    """Record the id of the Slurm job of `job`. Raises OSError."""
    job.write_json(f"{job.batch.name}/{_RECORD}", {"id": batch})


def own_batch(run_id: str, environ: Mapping[str, str]) -> tuple[bool, int]:
    """True if this process is in the batch job of the job `run_id`, and the number of that batch job's requeues."""
    batch = environ.get(VARIABLE) == run_id
    return batch, (natural(environ.get("SLURM_RESTART_COUNT", "")) or 0) if batch else 0


def batch_state(batch: str) -> BatchState:
    """Ask Slurm how its job `batch` stands. Raises `RendezvousError` if it does not answer, `UsageError` without Slurm.

    The controller forgets a job some minutes after its end (``MinJobAge``); accounting, where there is any, does not.
    """
    try:
        return parse_scontrol(ask_slurm("scontrol", "show", "job", "--oneliner", batch))
    except JobError:
        pass
    try:
        return parse_sacct(ask_slurm("sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", batch))
    except JobError:
        return BatchState("UNKNOWN")


def is_active(job: JobDir) -> bool:
    """Return True if `job` has a batch job that waits or runs, or of which Slurm says nothing now.

    Raises `JobError`.
    """
    batch = read_batch(job)
    if batch is None:
        return False
    try:
        return batch_state(batch).active
    except (RendezvousError, UsageError):
        return True


def parse_scontrol(text: str) -> BatchState:
    """The state in the output of ``scontrol show job --oneliner``; of a heterogeneous job, that of the first component,
    which has the batch script. Raises `JobError` for another text."""
    # Of two fields of one name the second is part of a comment.
    fields = dict(reversed(_FIELD.findall(text.partition("\n")[0])))
    if "JobState" not in fields:
        raise JobError(f"scontrol says {text[:80]!r}", "is it a Slurm that unirun knows, 21.08 or later?")
    return BatchState(
        state=fields["JobState"],
        reason=_said(fields.get("Reason")),
        nodes=_said(fields.get("NodeList")),
        restarts=natural(fields.get("Restarts", "")) or 0,
        output=_said(fields.get("StdOut")),
        code=_exit_code(fields["JobState"], fields.get("ExitCode", "")),
        requeues=fields.get("Requeue") == "1",
    )


def parse_sacct(text: str) -> BatchState:
    """The state in the first line ``CANCELLED by 0|0:15`` of sacct. Raises `JobError` for another text."""
    state, _, code = text.partition("\n")[0].partition("|")
    # CANCELLED by whom.
    state = state.partition(" ")[0]
    if not state:
        raise JobError("Slurm does not know the job any more")
    return BatchState(state, code=_exit_code(state, code))


def _said(text: str | None) -> str:
    return "" if text in (None, "None", "(null)") else str(text).strip()


def _exit_code(state: str, text: str) -> int | None:
    """The exit code, as a shell has it, of Slurm's ``code:signal``; None for a job that has not ended."""
    match = _CODE.fullmatch(text)
    if state in _ACTIVE or match is None:
        return None
    code, signum = int(match[1]), int(match[2])
    if code or signum or state == "COMPLETED":
        return code or (128 + signum if signum else 0)
    # One that was cancelled while it was pending has no code.
    return 143 if state == "CANCELLED" else 1


def ask_slurm(
    *command: str,
    environ: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> str:
    """Run a command of Slurm, with the environment `environ` if given, and return its stdout. If it succeeds, `tell` is
    called with its stderr: the notes of a cluster's submit filter.

    Raises `JobError` when it fails, `RendezvousError` when the controller does not answer, `UsageError` when there is
    no such command or no cluster.
    """
    # Imported here: most commands ask nobody.
    import subprocess

    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            # A name of a job or a file need not be text.
            errors="replace",
            timeout=SLURM_COMMAND_TIMEOUT,
            check=False,
            env=environ,
        )
    except FileNotFoundError as error:
        raise UsageError(f"{command[0]} is not found", _WHERE) from error
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")
        if any(sign in said for sign in _NOWHERE):
            raise failure(command[0], said) from error
        raise RendezvousError(
            f"{command[0]} has not answered within {SLURM_COMMAND_TIMEOUT:g} s", "see sinfo"
        ) from error
    if done.returncode != 0:
        raise failure(command[0], done.stderr)
    if done.stderr.strip():
        tell(message(command[0], done.stderr))
    return done.stdout


_WHERE = "is this a host of a Slurm cluster? call unirun where sbatch works"
_AWAY = ("Unable to contact", "Connection refused", "timed out", "Communication connection failure")
_NOWHERE = (
    "Could not establish a configuration source",
    "Unable to process configuration file",
    "unable to status file",
)


def failure(command: str, said: str) -> UnirunError:
    """The error for a `command` of Slurm that has failed, and has `said` something on stderr."""
    text = message(command, said) or "it failed without a word"
    if any(sign in said for sign in _NOWHERE):
        return UsageError(f"this host is in no Slurm cluster: {command}: {text}", _WHERE)
    if any(sign in said for sign in _AWAY):
        return RendezvousError(f"Slurm does not answer: {text}", "see sinfo")
    return JobError(f"{command}: {text}", "see sinfo, and the options in docs/slurm.md")


def message(command: str, said: str) -> str:
    """All that a `command` of Slurm has `said`, in one line and without its name before each part."""
    lines = (line.strip().removeprefix(f"{command}: ").removeprefix("error: ") for line in said.splitlines())
    return "; ".join(line.strip() for line in lines if line.strip())
