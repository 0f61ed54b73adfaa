"""Likely mistakes in a command line and its environment: some are refused, of others the user is warned."""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Iterator, Mapping

from unirun.cli import SUBCOMMANDS
from unirun.cli.commandline import CommandLine
from unirun.cli.joboptions import rendezvous_settings, several_nodes
from unirun.errors import UsageError
from unirun.spec.job import JobSpec
from unirun.spec.yaml import is_override

_INSTEAD = {
    **dict.fromkeys(
        ("run", "start", "launch", "submit", "exec"), "write unirun SCRIPT, or unirun --config FILE"
    ),
    **dict.fromkeys(
        ("python", "python3"), "unirun starts Python itself; leave it out, or write --no-python before it"
    ),
    "help": "write unirun --help",
    "version": "write unirun --version",
}
_KEY = re.compile(r"\+?(config|roles|trainer|log|env)\.[\w.-]+")
_OURS = (
    "--roles",
    "--trainer",
    "--nproc-per-node",
    "--nproc_per_node",
    "--nnodes",
    "--max-restarts",
    "--max_restarts",
)
"""Options that are hardly a script's own."""

HEALTH = "TORCHELASTIC_HEALTH_CHECK_PORT"
SLEEP = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
"""Variables that torchrun reads besides the ``PET_*`` of its options, and that unirun does not honour.

The others are read where they count: ``TORCHELASTIC_ENABLE_FILE_TIMER`` and ``PYTHON_EXEC`` by the agent,
``TORCHELASTIC_ERROR_FILE`` and ``TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE`` by the command,
``TORCH_ELASTIC_SHUTDOWN_TIMEOUT`` with the options.
"""


def refuse_mistakes(line: CommandLine) -> None:
    """Raise `UsageError` for a script name that is none: a part of a list, an override, a command.

    A file of that name is run, whatever it looks like.
    """
    word = line.script
    if word is None or os.path.exists(word) or {"module", "no_python", "cwd"} & line.options.keys():
        return
    if "=" in word:
        _refuse_assignment(word, line)
    if "config" in line.options and _KEY.fullmatch(word):
        raise UsageError(f"{word} has no value", f"write {word}=VALUE, without blanks")
    if "." in word or "/" in word:
        return
    if word in SUBCOMMANDS:
        raise UsageError(f"{word} is a command, and stands before all options", f"write unirun {word} …")
    if word in _INSTEAD:
        raise UsageError(f"there is no command and no script {word!r}", _INSTEAD[word])
    if near := difflib.get_close_matches(word, SUBCOMMANDS, n=1):
        raise UsageError(f"there is no command and no script {word!r}", f"did you mean unirun {near[0]}?")


def _refuse_assignment(word: str, line: CommandLine) -> None:
    if "config" in line.options or not is_override(word):
        return
    given = line.options
    if "." not in word and "roles" in given:
        roles = ",".join((*given["roles"], word))
        raise UsageError(f"{word} stands where the script is expected", f"write --roles {roles}")
    if "." not in word and "env" in given:
        raise UsageError(f"{word} stands where the script is expected", f"write --env {word}")
    problem = f"{word} changes a value of a job file, and no job file is named"
    raise UsageError(problem, f"write --config FILE {word}")


def warnings(line: CommandLine, spec: JobSpec, environ: Mapping[str, str]) -> list[str]:
    """Warnings for the user. Raises `UsageError` for a variable of torchrun that asks for what unirun does not do."""
    elsewhere = "slurm" in line.options or several_nodes(line.options)
    unused = () if elsewhere else unused_allocation(environ)
    return [*environment_warnings(environ), *unused, *misplaced(line), *_quoted(line), *_endless(spec)]


def environment_warnings(environ: Mapping[str, str]) -> Iterator[str]:
    """Warnings about variables of torchrun. Raises `UsageError` for one that cannot be honoured."""
    if _seconds(environ.get(SLEEP, "")) > 0:
        raise UsageError(f"{SLEEP}: unirun does not watch for workers in uninterruptible sleep", "unset it")
    if HEALTH in environ:
        yield f"{HEALTH} has no effect: torch comes without a health check server, and unirun has none"


def unused_allocation(environ: Mapping[str, str]) -> Iterator[str]:
    """A warning for nodes of the Slurm allocation that the job does not use."""
    if "SLURM_JOB_NODELIST" in environ:
        from unirun.launcher.hostlist import compress
        from unirun.launcher.slurm.allocation import SRUN, unused_nodes

        if unused := unused_nodes(environ, socket.gethostname()):
            yield f"the allocation's nodes {compress(unused)} are not used; start the job with: {SRUN} unirun …"


def _seconds(text: str) -> float:
    """As torch reads it: a text that is no number counts as unset."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def misplaced(line: CommandLine) -> Iterator[str]:
    """A warning for an option of unirun after the script, where it is an argument of the script."""
    found = [word for word in line.args if word.partition("=")[0] in _OURS]
    if line.script is not None and found:
        yield (
            f"{found[0]} stands behind {line.script}, so it is an argument of that; "
            "unirun's options stand before it"
        )


def _quoted(line: CommandLine) -> Iterator[str]:
    """A warning for quotes that no shell has removed."""
    if ignored := rendezvous_settings(line.options)[1]:
        yield (
            f"--rdzv-conf: {' and '.join(ignored)} {'are' if len(ignored) > 1 else 'is'} ignored, as by torchrun: "
            "the quotes are part of it; write it without them"
        )


def _endless(spec: JobSpec) -> Iterator[str]:
    """A warning for a job that does not end by itself."""
    servers = [name for name in spec.primary if spec.role(name).entry.kind == "workload"]
    if servers:
        serve = "serves" if len(servers) == 1 else "serve"
        why = f"{' and '.join(servers)} {serve} calls and nothing ends that"
        yield f"this job runs until it is stopped (Ctrl-C, unirun stop): {why}; a --trainer would"
