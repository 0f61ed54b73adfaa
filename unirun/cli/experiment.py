"""``unirun experiment``: start, stop and list trials of registered experiments."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unirun.cli.commands import call
from unirun.cli.output import print_table
from unirun.errors import EXIT_USAGE, Fault, SpecError, UsageError
from unirun.launcher.foreground.terminal import say, warn
from unirun.observe.status import NO_LIMIT
from unirun.spec.read import id_stem

FINAL = (EXIT_USAGE, 130, 143)
"""Exit codes after which a trial is not started again: a usage error, or a user's SIGINT or SIGTERM."""


def start(options: Any) -> int:
    """Start a trial and follow it to its end. Returns the exit code."""
    from unirun.experiments import experiment, starting
    from unirun.experiments.config import without_effect
    from unirun.experiments.experiment import Trial
    from unirun.experiments.recovery import Recovery, settings_of

    _refuse_options(options)
    name, trial = options.experiment_name, options.trial_name
    experiment.check_names(name, trial)
    root = starting.root_of(options.root, name, trial)
    folder = os.getcwd()
    _import(options.module, folder)
    config = experiment.resolve(name, options.overrides)
    _check_networks(config, options.mode)
    made = experiment.with_settings(name, options.overrides)
    scheduling = made.scheduling_setup()
    _check_files(config, options.mode)
    for line in without_effect(config, scheduling):
        warn(line)
    resume, only = options.recover_mode in ("auto", "resume"), options.recover_mode == "resume"
    recovery = Recovery(root)
    last = recovery.latest() if resume else None
    if only and last is None:
        raise UsageError(
            f"{name}/{trial} has no checkpoint in {root}", "use --recover-mode auto, or start without"
        )
    accept = (*options.accept_change,)
    if last is not None:
        recovery.check(last, settings_of(config), accept)
    about = Trial(
        name, trial, str(root), (*options.module,), (*options.overrides,), folder, resume, only, accept
    )
    mapping = starting.job_mapping(about, config, scheduling, made.preload)
    if options.ignore_worker_error:
        mapping["roles"]["model_worker"]["max_restarts"] = mapping["trainer"]["max_restarts"] = NO_LIMIT
    where = _where(options, starting.worker_groups(config, scheduling), starting.master_needs(scheduling))
    if options.dry_run:
        sys.stdout.write(starting.show(config))
        return 0
    retries = options.recover_retries if options.recover_mode in ("auto", "fault") else 0
    with starting.alone(root):
        while True:
            # A job may run without its command, too.
            starting.refuse_running(root)
            run_id = f"{id_stem(mapping['name'])}-{secrets.token_hex(3)}"
            with starting.job_file(root, config, mapping, run_id) as path:
                warn(f"trial {name}/{trial}, files in {root}")
                code = _run(path, where)
            if not code or code in FINAL or not retries:
                return code
            retries -= 1
            after = f"{options.recover_after:g} s"
            warn(f"{name}/{trial} has failed with {code}; it is started again in {after}")
            time.sleep(options.recover_after)
            mapping["config"]["resume"] = True


def _refuse_options(options: Any) -> None:
    """Raise `UsageError` for options that do not fit the mode."""
    of_slurm = ("partition", "nodes", "slurm-extra", "slurm-setup")
    for option, mode in (("hosts", "ssh"), *((name, "slurm") for name in of_slurm)):
        if getattr(options, option.replace("-", "_")) is not None and options.mode != mode:
            raise UsageError(
                f"--{option} is for --mode {mode}, and the mode is {options.mode}",
                f"add --mode {mode}, or leave out --{option}",
            )
    if options.accept_change and options.recover_mode not in ("auto", "resume"):
        raise UsageError(
            f"--accept-change needs a trial that continues, but --recover-mode is {options.recover_mode}",
            "add --recover-mode auto or resume, or leave it out",
        )
    if options.mode == "ssh" and not options.hosts:
        raise UsageError("--mode ssh needs hosts", "give --hosts h1:4,h2:4")


def _check_networks(config: Any, mode: str) -> None:
    """Raise `SpecError` for networks that cannot have their layout, or cannot be read."""
    from unirun.experiments.checks import network_faults

    faults, absent = network_faults(config)
    if faults:
        raise SpecError(faults + absent)
    _refuse_or_tell(absent, mode)


def _check_files(config: Any, mode: str) -> None:
    """Raise `SpecError` for missing files; print a warning for sequences that may be too long."""
    from unirun.experiments.checks import file_faults, length_warnings

    _refuse_or_tell(file_faults(config), mode)
    for each in length_warnings(config):
        warn(str(each))


def _refuse_or_tell(faults: list[Fault], mode: str) -> None:
    """Raise `SpecError` for files missing on this host; if other hosts may have them, print the faults only."""
    if faults and mode == "local":
        raise SpecError(faults)
    for fault in faults:
        warn(f"on this host: {fault}")


def _import(modules: Sequence[str], folder: str) -> None:
    """Import the modules of the experiments; show the traceback of an error in one of them."""
    from unirun.experiments.experiment import import_modules

    try:
        import_modules(modules, folder)
    except UsageError as error:
        if error.__cause__ is not None:
            warn("".join(traceback.format_exception(error.__cause__)))
        raise


def _where(options: Any, groups: Mapping[str, Any], master: Any) -> list[str]:
    """The options of ``unirun --config`` that say where a trial runs. Raises `UsageError`, `SpecError`."""
    from unirun.experiments.starting import excluded_hosts, options_of_slurm
    from unirun.launcher.hostlist import parse_hosts

    if options.mode == "slurm":
        from unirun.launcher.slurm.options import parse_slurm

        needs = options_of_slurm(groups, master, options.partition or "", options.nodes or 1)
        extra, setup = options.slurm_extra or [], options.slurm_setup or []
        parse_slurm([needs], extra=extra, setup=setup)
        more = [f"--slurm-extra={each}" for each in extra] + [f"--slurm-setup={each}" for each in setup]
        return [f"--slurm={needs}", *more]
    every = {**{kind: group.scheduling for kind, group in groups.items()}, "master_worker": master}
    if options.mode == "local":
        excluded_hosts(every, [socket.gethostname()], "--mode local")
        return []
    hosts = [host.name for host in parse_hosts(options.hosts)]
    excluded = excluded_hosts(every, hosts, "--hosts")
    return [f"--hosts={options.hosts}", *([f"--exclude={','.join(excluded)}"] if excluded else [])]


def _run(path: Path, where: Sequence[str]) -> int:
    """Run the job file of a trial, as ``unirun --config`` does."""
    from unirun.cli.run import main as run

    return run([f"--config={path}", *where])


def stop(options: Any) -> int:
    """End a trial. Returns 0."""
    from unirun.experiments import starting

    root = starting.root_of(options.root, options.experiment_name, options.trial_name)
    job = starting.job_of(root)
    if not job:
        raise UsageError(
            f"there is no trial {options.trial_name!r} of {options.experiment_name!r}",
            "unirun experiment list shows all",
        )
    return call("stop", [job])


def show(options: Any) -> int:
    """List all trials and their states. Returns 0."""
    from unirun.experiments import starting

    rows = [
        (*root.parts[-2:], starting.phase_of(job := starting.job_of(root)), job)
        for root in starting.trials(options.root)
    ]
    print_table(("EXPERIMENT", "TRIAL", "STATE", "JOB"), rows)
    return 0


def find(options: Any) -> int:
    """List the names of registered experiments. Returns 0."""
    from unirun.experiments import experiment

    _import(options.module, os.getcwd())
    try:
        wanted = re.compile(options.regex)
    except re.error as error:
        raise UsageError(f"{options.regex!r} is no regular expression: {error}") from error
    for name in experiment.EXPERIMENTS.names():
        if wanted.search(name):
            say(name)
    return 0
