"""``unirun stop [JOB]``: end a running job, workers first, and wait until it is over."""

from __future__ import annotations

import contextlib
import signal

from unirun.cli.commandline import Parser
from unirun.cli.stored import STORE_HELP, find_here, only_one, refuse_elsewhere
from unirun.errors import JobError, StoreError, UsageError
from unirun.launcher.foreground.terminal import say
from unirun.observe.batchjob import BatchJob, batch_state, read_batch
from unirun.observe.status import ENDED, read_summary
from unirun.rendezvous.masters import call_master, follow_to_end
from unirun.wire.messages import Stop

STOP_TIMEOUT = 600.0
"""Seconds to wait for the end of a job; longer than any grace period."""


def main(argv: list[str]) -> int:
    """Stop a job. Returns 0 when it has ended."""
    parser = Parser(prog="unirun stop", description="End a running job.")
    parser.add_argument(
        "job", nargs="?", help="the job's id, or the beginning of it (default: the one that runs)"
    )
    parser.add_argument(
        "--signal", default="SIGTERM", help="the first signal to the workers (default SIGTERM)", metavar="SIG"
    )
    parser.add_argument(
        "--grace", type=float, help="seconds until SIGKILL (default: the job's)", metavar="SECONDS"
    )
    parser.add_argument("--now", action="store_true", help="SIGKILL at once")
    parser.add_argument("--no-wait", action="store_true", help="return before the job has ended")
    parser.add_argument("--store", help=STORE_HELP, metavar="URL")
    options = parser.parse_args(argv)
    signum = signal.SIGKILL if options.now else _signal(options.signal)
    if options.job is not None and options.job.startswith("-"):
        raise UsageError(f"{options.job} is no option of unirun stop", "--now kills at once")
    job = find_here(options.store, options.job or only_one(options.store, "stop"), "stop")
    batch = read_batch(job)
    if batch is not None and batch_state(batch).active:
        return _cancel(job.run_id, batch, now=options.now, wait=not options.no_wait)
    phase = read_summary(job).phase
    if phase in ENDED:
        nothing = "" if options.job else "no job runs; the newest, "
        say(f"{nothing}job {job.run_id} has ended already: {phase}")
        return 0
    with contextlib.suppress(StoreError):
        # Without the store the leader is not known; following the job waits for it.
        refuse_elsewhere(job, "stop")
    stop = Stop(int(signum), "unirun stop", 0.0 if options.now else options.grace)
    if options.no_wait:
        with call_master(job) as master:
            master.send(stop)
        say(f"job {job.run_id} is stopping")
        return 0
    try:
        end = follow_to_end(job, stop, STOP_TIMEOUT)
    except TimeoutError as error:
        raise JobError("the job did not end within 10 minutes", "unirun stop --now kills it") from error
    code = "" if end.code is None else f", exit code {end.code}"
    say(f"job {job.run_id} {end.phase}{code}")
    return 0


def _cancel(run_id: str, batch: BatchJob, *, now: bool, wait: bool) -> int:
    """End the job of a batch job, from any host of the cluster. Returns 0."""
    from unirun.launcher.slurm.submit import cancel, wait_for_end

    cancel(batch, now=now)
    if not wait:
        say(f"job {run_id} is stopping, as Slurm job {batch.id}")
        return 0
    try:
        state = wait_for_end(batch, STOP_TIMEOUT)
    except TimeoutError as error:
        raise JobError("the job did not end within 10 minutes", "unirun stop --now kills it") from error
    code = "" if state.code is None else f", exit code {state.code}"
    say(f"job {run_id}: Slurm job {batch.id} {state.state}{code}")
    return 0


def _signal(text: str) -> signal.Signals:
    """``SIGTERM``, ``TERM``, ``term`` or ``15``. Raises `UsageError`."""
    try:
        if text.isascii() and text.isdigit():
            return signal.Signals(int(text))
        return signal.Signals[f"SIG{text.upper().removeprefix('SIG')}"]
    except (KeyError, ValueError):
        raise UsageError(f"{text!r} is no signal", "for example SIGTERM or SIGINT") from None
