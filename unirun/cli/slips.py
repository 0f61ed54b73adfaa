"""What stands where a script's name is expected, and is meant as something else."""

from __future__ import annotations

import difflib
import os
import re

from unirun.cli import SUBCOMMANDS
from unirun.cli.options import CommandLine
from unirun.errors import UsageError
from unirun.spec.overrides import is_override

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


def refuse_slip(line: CommandLine) -> None:
    """Raise `UsageError` for the name of a script that is none: a part of a list, an override, a command.

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


def misplaced(line: CommandLine) -> list[str]:
    """A word on options of unirun that stand behind the script, and are its arguments therefore."""
    found = [word for word in line.args if word.partition("=")[0] in _OURS]
    if line.script is None or not found:
        return []
    return [
        f"{found[0]} stands behind {line.script}, so it is an argument of that; unirun's options stand before it"
    ]
