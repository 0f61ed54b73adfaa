"""A job as a batch job of Slurm: its script, its submission, and the command that follows it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from unirun import atomic
from unirun.errors import EXIT_FAILURE, JobError, RendezvousError, UnirunError
from unirun.launcher.foreground.terminal import warn
from unirun.launcher.logs import LogFollower
from unirun.launcher.slurm.options import BatchOptions, Component
from unirun.observe.batchjob import (
    SLURM_OUTAGE_TIMEOUT,
    VARIABLE,
    BatchState,
    ask_slurm,
    batch_state,
    write_batch,
)
from unirun.observe.jobdir import JobDir, job_at
from unirun.observe.ownership import make_private
from unirun.observe.status import (
    PENDING,
    JobStatus,
    RoleStatus,
    WorkerStatus,
    is_alive,
    read_summary,
    write_status,
)
from unirun.rendezvous.creation import cannot_be_made, one_at_a_time
from unirun.spec.job import JobSpec
from unirun.values import Value

# The batch script of a job: what Slurm runs on the first node of the allocation.


class Batch(Value):
    """The work of a batch script: ``unirun`` with the arguments `words`, as the job `run_id`.

    A script that somebody else submits has no `run_id`, `cwd`, `home` (``$UNIRUN_HOME``) and `output`: the id of the
    job is made of its `name` and the number that Slurm gives it, and all else is as where it is submitted.
    `program` is how unirun is called on the nodes.
    """

    name: str
    words: tuple[str, ...]
    run_id: str | None = None
    cwd: Path | None = None
    home: Path | None = None
    output: str | None = None
    program: tuple[str, ...] = ("unirun",)


_TOGETHER = ("--export=ALL", "--kill-on-bad-exit=0", "--wait=0", "--no-kill")
"""Options of srun. The tasks have the script's variables also where sbatch was told to pass none on."""

_NO_HOME = "HOME is not set: set UNIRUN_HOME to a directory that the nodes share"

_DEFAULT_HOME = f'"${{UNIRUN_HOME:-${{XDG_STATE_HOME:-${{HOME:?{_NO_HOME}}}/.local/state}}/unirun}}"'

TASK_END_TIMEOUT = 10
"""Seconds after the job's end in which the tasks of all nodes end. srun waits for the task of a lost node until Slurm
has that node down, by default for five minutes, and would keep the other nodes as long."""

_BEFORE = r"""(umask 077; mkdir -p "$job/slurm")
told() { sed -n 's/.*"ended":[0-9.]*,"code":\([0-9]*\),.*/\1/p' "$job/summary.json" 2>/dev/null; }
"""

_WAIT = r"""step=$!
# The other nodes learn from the file that this script lives.
(trap '' TERM INT HUP USR1 USR2; n=0 over=0
while kill -0 "$$"; do
  n=$((n+1)); echo "$n" >"$job/slurm/beat"
  [ -z "$(told)" ] || over=$((over+1))
  # Slurm ends with this script what is left of the step.
  [ "$over" -lt "$rest" ] || kill -KILL "$step"
  sleep 1
done) >/dev/null 2>&1 &
beat=$!
# Slurm passes no signal on to a step that is about to begin, so it is sent again until one is sent to a job that runs.
tell() {
  while kill -0 "$step"; do
    began=$(sed -n '/"phase":"launching"/!s/.*"phase":.*/yes/p' "$job/summary.json")
    scancel --signal=TERM "$SLURM_JOB_ID"
    [ -z "$began" ] || break
    sleep 1
  done
}
# Not in the background: Slurm may requeue the job, and scancel would then tell the next run.
trap 'again=yes; tell 2>/dev/null' TERM
trap again=yes USR1 USR2
again=yes
while [ -n "$again" ]; do
  again=
  wait "$step" 2>/dev/null
  last=$?
  # 127: the shell has told its code before.
  [ "$last" -eq 127 ] || code=$last
done
told=$(told)
code=${told:-${code:-127}}"""

_REQUEUE = """\
if [ "$code" -ne 0 ] && scontrol show job "$SLURM_JOB_ID" 2>/dev/null | grep -q 'PreemptTime=[0-9]'; then
  # Of preempted jobs, Slurm requeues those that it had to kill. Then it ends this script.
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi"""


_FAILED = """\
failed() { code=$?; echo "unirun: --slurm-setup has failed with $code: $1" >&2; exit "$code"; }"""


def batch_script(options: BatchOptions, batch: Batch) -> str:
    """A script for sbatch, in the language of ``sh``, that runs the job and leaves with its exit code.

    Before the time limit, Slurm sends SIGTERM to the script, which passes it to unirun on all nodes. (srun, which would
    be nearer, kills the step when it gets SIGTERM.) A job that ends because it is preempted is requeued. When a node is
    lost, the others go on. srun's exit code is then that of the killed task, so the code is read from the job's
    directory.
    """
    quoted = shlex.quote
    run_id = f'{batch.name}-"$SLURM_JOB_ID"' if batch.run_id is None else batch.run_id
    home = _DEFAULT_HOME if batch.home is None else quoted(str(batch.home))
    lines = [
        # A login shell has what clusters define for users: the function `module`.
        "#!/bin/bash -l" if options.setup else "#!/bin/sh",
        *_directives(options, batch),
        "",
        *([] if batch.cwd is None else [f"cd {quoted(str(batch.cwd))} || exit"]),
        *([_FAILED] if options.setup else []),
        *(f"eval {quoted(line)} || failed {quoted(line)}" for line in options.setup),
        f"run_id={run_id}",
        f'export UNIRUN_HOME={home} {VARIABLE}="$run_id"',
        'job="$UNIRUN_HOME/jobs/$run_id"',
        *(f"export {name}={quoted(value)}" for name, value in options.env.items()),
        f"rest={TASK_END_TIMEOUT}",
        'rm -f "$job/summary.json"',
        "",
        _BEFORE,
        f"{_srun(options, batch)} &",
        _WAIT,
        *([_REQUEUE] if options.requeue else []),
        'kill -KILL "$beat" 2>/dev/null',
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _directives(options: BatchOptions, batch: Batch) -> Iterator[str]:
    """The options of sbatch. Of two with one name the last one counts, so those of the user come last."""
    left_out = tuple(f"#SBATCH --{name.replace('_', '-')}" for name in options.without)
    left_out += ("#SBATCH --no-requeue",) if "requeue" in options.without else ()
    of_user = {f"#SBATCH {option}" for option in options.extra}
    for line in _all_directives(options, batch):
        if line in of_user or line.partition("=")[0] not in left_out:
            yield line


def _all_directives(options: BatchOptions, batch: Batch) -> Iterator[str]:
    whole = {
        "job_name": batch.run_id or batch.name,
        **options.options,
        **({} if batch.output is None else {"output": batch.output}),
        "open_mode": "append",
        "signal": f"B:TERM@{options.grace}",
    }
    for key, value in whole.items():
        yield _directive(key, value)
    yield "#SBATCH --no-kill"
    yield "#SBATCH --requeue" if options.requeue else "#SBATCH --no-requeue"
    for number, component in enumerate(options.components):
        if number:
            yield "#SBATCH hetjob"
        yield from _of_component(component)
        yield from (f"#SBATCH {option}" for option in options.extra)


def _of_component(component: Component) -> Iterator[str]:
    for key, value in component.options.items():
        yield "#SBATCH --exclusive" if (key, value) == ("exclusive", "yes") else _directive(key, value)
    yield _directive("ntasks_per_node", "1")


def _directive(key: str, value: str) -> str:
    """sbatch reads double quotes in it; options have no quotes in their values."""
    quoted = value if re.fullmatch(r"[A-Za-z0-9_.+:/@%,=-]*", value) else f'"{value}"'
    return f"#SBATCH --{key.replace('_', '-')}={quoted}"


def _srun(options: BatchOptions, batch: Batch) -> str:
    """One task on each node. unirun decides what follows from the end of a task and from the loss of a node."""
    unirun = f'{shlex.join(batch.program)} --rdzv-id "$run_id" {shlex.join(batch.words)}'
    steps = []
    for number, component in enumerate(options.components):
        group = [f"--het-group={number}"] if len(options.components) > 1 else []
        cpus = component.options.get("cpus_per_task")
        # Since Slurm 22.05, srun does not take it from the allocation.
        share = [f"--cpus-per-task={cpus}"] if cpus else []
        words = ["--ntasks-per-node=1", *_TOGETHER, *group, *share, *_container(component)]
        steps.append(f"{shlex.join(words)} {unirun}")
    return f"srun {' : '.join(steps)}"


def _container(component: Component) -> list[str]:
    """Options of pyxis."""
    image, mounts = component.container_image, component.container_mounts
    return [
        *([f"--container-image={image}"] if image else []),
        *([f"--container-mounts={','.join(mounts)}"] if mounts else []),
    ]


SCRIPT, OUTPUT = "batch.sh", "output.log"
"""Files in the directory of the batch job."""


def batch_of(spec: JobSpec, options: BatchOptions, words: tuple[str, ...], program: tuple[str, ...]) -> Batch:
    """The batch that runs `spec`, described by the arguments `words` of unirun, in this directory."""
    job = job_at(spec.run_id)
    return Batch(
        name=spec.name,
        words=words,
        run_id=spec.run_id,
        cwd=Path.cwd(),
        home=job.path.parent.parent,
        output=options.output or str(job.batch / OUTPUT),
        program=program,
    )


CLIENT = ("SLURM_CLUSTERS", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Variables that say how Slurm's commands reach the cluster."""

_ONE_OF = (frozenset(("mem", "mem_per_cpu", "mem_per_gpu")), frozenset(("requeue", "no_requeue")))
_SHORT = {"A": "account", "C": "constraint", "G": "gpus", "J": "job_name", "a": "array", "e": "error"}
_SHORT |= {"i": "input", "k": "no_kill", "o": "output", "p": "partition", "q": "qos", "t": "time"}
"""Options of sbatch of which one replaces the others, and those that have a letter and a variable."""
_VARIABLES = {"array": "ARRAY_INX", "mem": "MEM_PER_NODE", "switches": "REQ_SWITCH", "time": "TIMELIMIT"}
"""Variables of sbatch whose names differ from those of its options."""


def environment_of(script: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The part of `environ` that sbatch gets for `script`, and with it the job.

    In an allocation, the variables of Slurm and of process managers describe that allocation: the new job would get its
    processors and memory. Elsewhere a variable of sbatch is the user's default. As sbatch prefers variables to lines of
    the script, those are left out that the script has lines for.
    """
    inside = "SLURM_JOB_ID" in environ
    names = re.findall(r"^#SBATCH --?([A-Za-z-]+)", script, re.MULTILINE)
    asked = {_SHORT.get(name, name).replace("-", "_") for name in names}
    asked |= {name for names in _ONE_OF if names & asked for name in names}
    said = {f"SBATCH_{_VARIABLES.get(key, key.upper())}" for key in asked}

    def stays(name: str) -> bool:
        if name in CLIENT:
            return True
        of_slurm = name.startswith(("SLURM", "SBATCH_"))
        return not (name.startswith("PMI") or name in said or (inside and of_slurm))

    return {name: value for name, value in environ.items() if stays(name)}


def submit(
    spec: JobSpec, options: BatchOptions, batch: Batch, tell: Callable[[str], None]
) -> tuple[JobDir, str]:
    """Make the directory of the job and give its batch script to sbatch, with this process's environment. `tell` is
    called with what sbatch says besides the job's id.

    Raises `JobError` when a job of this id runs or sbatch refuses the script, `RendezvousError` when Slurm does not
    answer, `UsageError` without Slurm, OSError when the batch job cannot be recorded, and is cancelled. Then the
    directory is removed.
    """
    job, script = job_at(spec.run_id), batch_script(options, batch)
    try:
        _make_directory(job, spec, script)
    except OSError as error:
        raise cannot_be_made(job, error) from error
    try:
        environ = environment_of(script, os.environ)
        told = ask_slurm("sbatch", "--parsable", str(job.batch / SCRIPT), environ=environ, tell=tell)
        # With a cluster's name: 12;cluster.
        submitted = told.strip().partition(";")[0]
        try:
            write_batch(job, submitted)
        except OSError:
            cancel(submitted)
            raise
    except (UnirunError, OSError):
        shutil.rmtree(job.path, ignore_errors=True)
        raise
    return job, submitted


def _make_directory(job: JobDir, spec: JobSpec, script: str) -> None:
    make_private(job.path.parent)
    with one_at_a_time(job.path.parent):
        if is_alive(job):
            raise JobError(f"job {job.run_id} is running", f"stop it with: unirun stop {job.run_id}")
        if os.path.lexists(job.path):
            shutil.rmtree(job.path)
        make_private(job.batch)
    atomic.replace(job.batch / SCRIPT, script)
    write_status(job, _pending(spec))


def _pending(spec: JobSpec) -> JobStatus:
    """The status until the job runs and writes its own."""
    roles = tuple(
        RoleStatus(
            name=role.name,
            phase=PENDING,
            generation=0,
            restarts=0,
            max_restarts=role.max_restarts,
            workers=tuple(WorkerStatus(rank, PENDING, "", 0, None, "") for rank in range(role.count)),
        )
        for role in spec.roles
    )
    return JobStatus(spec.run_id, spec.name, PENDING, "it waits for Slurm", time.time(), None, None, roles)


# Follows a batch job: shows its output and its state, and ends it when the user asks for that.

FIRST_LOOK, LAST_LOOK = 1.0, 5.0
"""Seconds between two looks at a batch job: the longer nothing has changed the longer, up to the second."""


def cancel(batch: str, *, now: bool = False) -> None:
    """End a batch job: SIGTERM to all its processes, and SIGKILL after the cluster's KillWait, or with `now` at once.

    Raises `JobError` when it has ended or is another user's, `RendezvousError` when Slurm does not answer.
    """
    ask_slurm("scancel", *(["--signal=KILL", "--full"] if now else []), batch)


def wait_for_end(batch: str, timeout: float) -> BatchState:
    """Wait until a batch job has ended. Raises `TimeoutError` after `timeout` seconds, `RendezvousError`."""
    deadline = time.monotonic() + timeout
    while (state := batch_state(batch)).active:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"Slurm job {batch} has not ended within {timeout:g} s")
        time.sleep(FIRST_LOOK)
    return state


class Follower:
    """Follows one batch job in the foreground."""

    def __init__(self, job: JobDir, batch: str, *, quiet: bool) -> None:
        self._job, self._batch, self._quiet = job, batch, quiet
        self._signals: list[signal.Signals] = []
        self._woken = threading.Event()
        self._shown: tuple[object, ...] = ()
        self._unwritten: OSError | None = None

    def run(self) -> int:
        """Follow the job until it has ended. Returns its exit code, or 128 + the signal that has ended it.

        Raises `RendezvousError` when Slurm has not answered for `SLURM_OUTAGE_TIMEOUT` seconds; the job goes on then.
        """
        with self._catching(), self._output() as logs:
            state = self._to_its_end(logs)
        if self._unwritten is not None:
            raise self._unwritten
        code = self._code(state)
        return 128 + self._signals[0] if self._signals and code else code

    def _to_its_end(self, logs: LogFollower) -> BatchState:
        followed = False
        pause, asked = FIRST_LOOK, 0
        answered = time.monotonic()
        while True:
            try:
                state = batch_state(self._batch)
                answered = time.monotonic()
            except RendezvousError as error:
                if time.monotonic() > answered + SLURM_OUTAGE_TIMEOUT:
                    raise
                self._note((str(error),), f"{error}; trying again")
            else:
                changed = self._tell(state)
                pause = FIRST_LOOK if changed else min(1.5 * pause, LAST_LOOK)
                if not followed and state.output and os.path.exists(state.output):
                    logs.follow(Path(state.output), self._show, parts=True)
                    followed = True
                if not state.active or self._unwritten is not None:
                    return state
            self._woken.wait(pause)
            self._woken.clear()
            if asked < len(self._signals):
                asked = len(self._signals)
                pause = FIRST_LOOK
                self._cancel(now=asked > 1)

    def _tell(self, state: BatchState) -> bool:
        """Tell a new state, and the first reason for which the job is pending; whether there was something to tell."""
        key = (state.state, state.nodes, state.restarts, bool(state.reason))
        return self._note(key, f"Slurm job {self._batch}: {state.words}")

    def _note(self, key: tuple[object, ...], text: str) -> bool:
        new = key != self._shown
        self._shown = key
        if new and not self._quiet:
            warn(text)
        return new

    def _cancel(self, *, now: bool) -> None:
        name = self._signals[-1].name
        warn(f"{name}: {'killing' if now else 'cancelling'} Slurm job {self._batch}")
        try:
            cancel(self._batch, now=now)
        except (JobError, RendezvousError) as error:
            # It has ended meanwhile, or the next signal asks again.
            warn(str(error))

    def _show(self, data: bytes) -> None:
        """Called in the thread of the log follower."""
        try:
            while data:
                data = data[os.write(1, data) :]
        except OSError as error:
            self._unwritten = error
            self._woken.set()

    def _code(self, state: BatchState) -> int:
        """The job's own exit code; where it has left none, that of Slurm."""
        with contextlib.suppress(JobError):
            if (told := read_summary(self._job).code) is not None:
                return told
        if state.code is not None:
            return state.code
        warn(f"Slurm does not tell how job {self._batch} has ended")
        return EXIT_FAILURE

    @contextlib.contextmanager
    def _output(self) -> Iterator[LogFollower]:
        logs = LogFollower(shared=True)
        try:
            yield logs
        finally:
            logs.finish()

    @contextlib.contextmanager
    def _catching(self) -> Iterator[None]:
        """Keep SIGINT and SIGTERM as requests to cancel the job. SIGHUP ends this process, and the job goes on.

        As for a job that runs here, SIGTERM that comes after a request does not hurry.
        """

        def keep(signum: int, _: FrameType | None) -> None:
            if signum == signal.SIGINT or not self._signals:
                self._signals.append(signal.Signals(signum))
                self._woken.set()

        before = {each: signal.signal(each, keep) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
