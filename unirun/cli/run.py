"""``unirun script.py``: parse, plan, launch, and leave with the job's exit code."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from unirun.cli.commandline import parse
from unirun.cli.compose import defaults_of, plan_job
from unirun.cli.joboptions import several_nodes
from unirun.errors import UsageError
from unirun.launcher.foreground.terminal import may_read, say, warn
from unirun.launcher.launch import run
from unirun.rendezvous.store.url import store_url


def main(argv: Sequence[str]) -> int:
    """Run the job that `argv` describes. Returns the exit code."""
    line = parse(argv)
    options = line.options
    if "print_completion" in options:
        from unirun.cli import completion

        return completion.main([options["print_completion"]])
    if "SLURM_STEP_ID" in os.environ:
        from unirun.launcher.slurm.allocation import refuse_several_tasks

        refuse_several_tasks(os.environ)
    if "slurm" in options:
        from unirun.cli.batch import submit_job

        return submit_job(line)
    for name in ("slurm_extra", "slurm_setup"):
        if name in options:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for jobs that are submitted to Slurm", "add --slurm nodes=N,…")
    if "dry_run" in options:
        raise UsageError(
            "--dry-run prints the batch script of --slurm", "unirun plan shows what would run where"
        )
    detach = bool(options.get("detach"))
    if detach and "stdin" in options:
        raise UsageError("--stdin: a detached job has no stdin", "leave out one of --stdin and --detach")
    everything = {**defaults_of(line, os.environ), **options}
    if several_nodes(everything) or in_a_step(os.environ):
        # Imported here: jobs of one host need none of it.
        from unirun.cli.nodes import run_on_hosts

        return run_on_hosts(line, everything)
    planned = plan_job(line)
    code = run(
        planned,
        store=store_url(options.get("store")),
        detach=detach,
        stdin=may_read(),
        quiet=bool(options.get("quiet")),
        verbose=bool(options.get("verbose")),
    )
    if detach and code == 0:
        tell_started(planned.spec.run_id)
    return code


def tell_started(run_id: str) -> None:
    """Say that a detached job runs: its id on stdout, and what to do with it."""
    say(run_id)
    warn(f"started; follow it with: unirun logs -f {run_id}")


def in_a_step(environ: Mapping[str, str]) -> bool:
    """Return True if srun may have started this command on several nodes, which `unirun.launcher.slurm` knows."""
    return environ.get("SLURM_STEP_NUM_NODES", "1") != "1"
