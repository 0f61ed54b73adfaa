"""What stands where a script's name is expected, and is meant as something else."""

from __future__ import annotations

import difflib
import os

from unirun.cli import SUBCOMMANDS
from unirun.errors import UsageError
from unirun.spec.overrides import is_override

_STARTERS = ("run", "start", "launch", "submit", "exec")
_PYTHONS = ("python", "python3")


def refuse_slip(word: str, *, job_file: bool) -> None:
    """Raise `UsageError` for the name of a script that is none: an override without a `job_file`, a command.

    A file of that name is run, whatever it looks like.
    """
    if os.path.exists(word):
        return
    if not job_file and is_override(word):
        problem = f"{word} changes a value of a job file, and no job file is named"
        raise UsageError(problem, f"write --config FILE {word}")
    if "." in word or "/" in word:
        return
    if word in SUBCOMMANDS:
        raise UsageError(f"{word} is a command, and stands before all options", f"write unirun {word} …")
    if word in _PYTHONS:
        raise UsageError("unirun starts Python itself", f"leave out {word!r}, or write --no-python before it")
    if word in _STARTERS:
        raise UsageError(f"there is no command {word!r}", "write unirun SCRIPT, or unirun --config FILE")
    if near := difflib.get_close_matches(word, SUBCOMMANDS, n=1):
        problem = f"there is no command and no script {word!r}"
        raise UsageError(problem, f"did you mean unirun {near[0]}?")
