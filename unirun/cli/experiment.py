"""``unirun experiment``: start, stop and list trials of registered experiments."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unirun.cli.commandline import Parser
from unirun.cli.output import print_table
from unirun.errors import EXIT_USAGE, Fault, SpecError, UsageError
from unirun.launcher.foreground.terminal import say, warn

FINAL = (EXIT_USAGE, 130, 143)
"""Exit codes after which a trial is not started again: a usage error, or a user's SIGINT or SIGTERM."""


def main(argv: Sequence[str]) -> int:
    """Run a subcommand. Returns the exit code."""
    parser = Parser(prog="unirun experiment", description="Trials of registered experiments.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="start|stop|list|find-config")
    start = commands.add_parser("start", help="start a trial, and follow it to its end")
    stop = commands.add_parser("stop", help="end a trial")
    for each in (start, stop):
        each.add_argument(
            *("-e", "--experiment_name", "--experiment-name"),
            required=True,
            metavar="NAME",
            help="a registered experiment: unirun experiment find-config shows their names",
        )
        each.add_argument(
            *("-f", "--trial_name", "--trial-name"),
            required=True,
            metavar="TRIAL",
            help="the name of the trial; you choose it",
        )
    _start_options(start)
    shown = commands.add_parser("list", help="show all trials and their states")
    for each in (start, stop, shown):
        each.add_argument(
            "--root",
            default="",
            metavar="DIR",
            help="the directory of all trials ($UNIRUN_HOME/experiments); all hosts must share it",
        )
    find = commands.add_parser("find-config", help="the names of registered experiments")
    find.add_argument("-r", "--regex", default="", help="show only names that match this regular expression")
    _module_option(find)
    options = parser.parse_args([*argv])
    return _COMMANDS[options.command](options)


def _module_option(parser: Any) -> None:
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        help="a module or a file that registers experiments, as seen from the working directory; by default all of "
        "./experiments",
    )


def _start_options(parser: Any) -> None:
    _module_option(parser)
    parser.add_argument(
        "--mode", choices=("local", "slurm", "ssh"), default="local", help="where it runs (local)"
    )
    parser.add_argument("--partition", help="with --mode slurm: the partition")
    parser.add_argument("--nodes", type=_count(1), help="with --mode slurm: nodes (1)")
    for name, what in (("extra", "another option of sbatch"), ("setup", "a line of bash before the job")):
        parser.add_argument(f"--slurm-{name}", action="append", help=f"with --mode slurm: {what}")
    parser.add_argument("--hosts", help="with --mode ssh: hosts, as for unirun --hosts")
    parser.add_argument(
        "--recover-mode",
        choices=("disabled", "auto", "resume", "fault"),
        default="disabled",
        help="disabled: begin anew; auto: continue from the last one, if any; "
        "resume: continue, fail without one; fault: begin anew, continue after a failure (disabled)",
    )
    parser.add_argument(
        "--accept-change",
        action="append",
        default=[],
        metavar="KEY",
        help="with --recover-mode auto or resume: continue although this setting has changed, such as "
        "models.actor@0.backend.lr; the error of a refused start lists the keys; may be repeated",
    )
    parser.add_argument("--recover-retries", type=_count(0), default=1, help="new starts after a failure (1)")
    parser.add_argument(
        "--recover-after", type=_seconds, default=10.0, help="seconds before each new start (10)"
    )
    parser.add_argument(
        "--ignore-worker-error",
        action="store_true",
        help="restart model workers and the master however often they end, and not ten times at most",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show the configuration and the graph; start nothing"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the experiment")


def _count(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number."""

    def read(text: str) -> int:
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r:.80} is no whole number from {least}")
        return int(text)

    return read


def _seconds(text: str) -> float:
    """The type of an option that is a time."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", text):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no number of seconds, 0 or more")
    return float(text)


def _start(options: Any) -> int:
    from unirun.experiments import experiment, starting
    from unirun.experiments.experiment import Trial
    from unirun.experiments.recovery import Recovery, Settings

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
    resume, only = options.recover_mode in ("auto", "resume"), options.recover_mode == "resume"
    recovery = Recovery(root)
    last = recovery.latest() if resume else None
    if only and last is None:
        raise UsageError(
            f"{name}/{trial} has no checkpoint in {root}", "use --recover-mode auto, or start without"
        )
    accept = (*options.accept_change,)
    if last is not None:
        recovery.check(last, Settings.of(config), accept)
    about = Trial(
        name, trial, str(root), (*options.module,), (*options.overrides,), folder, resume, only, accept
    )
    mapping = starting.job_mapping(about, config, scheduling, made.preload)
    if options.ignore_worker_error:
        mapping["roles"]["model_worker"]["max_restarts"] = mapping["trainer"]["max_restarts"] = 1_000_000
    where = _where(options, scheduling, evaluator=config.auto_eval)
    if options.dry_run:
        from unirun.experiments.starting import show

        sys.stdout.write(show(config))
        return 0
    retries = options.recover_retries if options.recover_mode in ("auto", "fault") else 0
    with starting.alone(root):
        while True:
            # A job may run without its command, too.
            starting.refuse_running(root)
            before = starting.started(root)
            path = starting.write_job(about, config, mapping, f"{mapping['name']}-{secrets.token_hex(3)}")
            warn(f"trial {name}/{trial}, files in {root}")
            try:
                code = _run(path, where)
            except BaseException:
                starting.take_back(root, before)
                raise
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


def _where(options: Any, scheduling: Any, *, evaluator: bool) -> list[str]:
    """The options of ``unirun --config`` that say where a trial runs. Raises `UsageError`, `SpecError`."""
    if options.mode == "slurm":
        from unirun.experiments.starting import options_of_slurm
        from unirun.launcher.slurm.options import parse_slurm

        needs = options_of_slurm(scheduling, options.partition or "", options.nodes or 1, evaluator=evaluator)
        extra, setup = options.slurm_extra or [], options.slurm_setup or []
        parse_slurm([needs], extra=extra, setup=setup)
        more = [f"--slurm-extra={each}" for each in extra] + [f"--slurm-setup={each}" for each in setup]
        return [f"--slurm={needs}", *more]
    if options.mode == "ssh":
        from unirun.launcher.hostlist import parse_hosts

        parse_hosts(options.hosts)
        return [f"--hosts={options.hosts}"]
    return []


def _run(path: Path, where: Sequence[str]) -> int:
    """Run the job file of a trial, as ``unirun --config`` does."""
    from unirun.cli.run import main as run

    return run([f"--config={path}", *where])


def _stop(options: Any) -> int:
    from unirun.cli.jobs import stop_job as stop
    from unirun.experiments import starting

    root = starting.root_of(options.root, options.experiment_name, options.trial_name)
    known = starting.started(root)
    if known is None:
        raise UsageError(
            f"there is no trial {options.trial_name!r} of {options.experiment_name!r}",
            "unirun experiment list shows all",
        )
    return stop([known.job])


def _list(options: Any) -> int:
    from unirun.experiments import starting

    rows = [
        (each.experiment, each.trial, starting.phase_of(each), each.job)
        for each in starting.trials(options.root)
    ]
    print_table(("EXPERIMENT", "TRIAL", "STATE", "JOB"), rows)
    return 0


def _find(options: Any) -> int:
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


_COMMANDS = {"start": _start, "stop": _stop, "list": _list, "find-config": _find}
