"""Every option of ``unirun``, as one table: the parser, the help and the completions are made from it.

An option that torchrun has means what it means there, under both spellings (``--rdzv-id``, ``--rdzv_id``), with
its ``PET_*`` variable.
"""

from __future__ import annotations

import argparse
import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unirun.cli.optiontable import GROUPS, OPTIONS, Option
from unirun.errors import UsageError
from unirun.values import Value

_ELSEWHERE = {
    **dict.fromkeys(
        ("gpus", "num-gpus", "num_gpus", "num-processes", "num_processes", "np"), "nproc-per-node"
    ),
    **dict.fromkeys(("nodes", "num-nodes", "num_nodes", "num-machines", "num_machines"), "nnodes"),
    **dict.fromkeys(("working-dir", "working_dir", "workdir", "chdir"), "cwd"),
    **dict.fromkeys(("job-name", "job_name"), "name"),
}
"""What other launchers call an option."""

USAGE = """unirun [options] [--] script.py [args]
       unirun --roles actor=4,rollout=4 [options] script.py [args]
       unirun --roles actor=4@ppo:Actor,… --trainer ppo:PPOTrainer [options]
       unirun --config job.yaml [key=value …] [script.py] [-- args]
       unirun plan …          show what would run where, start nothing
       unirun graph …         show who calls whom, start nothing
       unirun status [JOB]    how a job stands          unirun ls      all jobs
       unirun logs [JOB]      what its workers wrote    unirun stop    end a job
       unirun events [JOB]    what happened, and why    unirun gc      clear jobs that are over
       unirun warm [stop]     keep torch imported between jobs
       unirun completion bash|zsh"""


class Parser(argparse.ArgumentParser):
    """argparse, with one-line errors as `UsageError`."""

    def error(self, message: str) -> Any:
        """Raise instead of printing the usage and leaving."""
        raise UsageError(message, f"see {self.prog} --help")


class CommandLine(Value):
    """A command line taken apart: options that were given, overrides ``key=value``, the script, its args."""

    options: Mapping[str, Any]
    overrides: tuple[str, ...]
    script: str | None
    args: tuple[str, ...]


@functools.cache
def build_parser(prog: str, extra: tuple[Option, ...] = ()) -> Parser:
    """The parser of the options (not of the script and its arguments)."""
    parser = Parser(
        prog=prog,
        usage=USAGE,
        allow_abbrev=False,
        description="torchrun for many roles: each role becomes a torch process group of its own.",
        epilog="An unchanged torchrun script works; every torchrun option and PET_* variable is known. "
        "Exit codes: 0 success; the failing worker's own (128+signal); 2 usage; 3 placement; 4 rendezvous; "
        "5 restarts used up; 130/143 after SIGINT/SIGTERM; 141 when nobody reads stdout any more.",
    )
    options = (*OPTIONS, *extra)
    for name in GROUPS:
        group = parser.add_argument_group(name)
        for option in options:
            if option.group == name:
                _add(group, option)
    return parser


def _add(group: Any, option: Option) -> None:
    names = [*option.names]
    settings: dict[str, Any] = {"dest": option.dest, "default": argparse.SUPPRESS}
    settings["help"] = option.help.replace("%", "%%")
    if option.kind == "flag":
        settings["action"] = "store_true"
    else:
        settings["metavar"] = option.metavar
        settings["action"] = "append" if option.kind == "list" else "store"
    if option.choices:
        settings["choices"] = option.choices
    group.add_argument(*names, **settings)


def parse(argv: Sequence[str], prog: str = "unirun", extra: tuple[Option, ...] = ()) -> CommandLine:
    """Take `argv` apart. Raises `UsageError`. ``--help`` prints and leaves."""
    own, rest = _split([*argv], (*OPTIONS, *extra))
    overrides: list[str] = []
    if any(word.startswith("--config=") for word in own):
        while rest and "=" in rest[0] and not rest[0].startswith("-"):
            overrides.append(rest.pop(0))
            # Options may stand behind overrides, too: what is the script's comes after the script, or after ``--``.
            more, rest = _split(rest, (*OPTIONS, *extra))
            own += more
    options = vars(build_parser(prog, extra).parse_args(own))
    script = None
    if _skip_dashes(rest):
        # As in torchrun, ``--`` ends the options. Its arguments follow at once where what runs has been named.
        if rest and not _names_what_runs(options):
            script = rest.pop(0)
    elif rest:
        script = rest.pop(0)
        _skip_dashes(rest)
    return CommandLine(options, tuple(overrides), script, tuple(rest))


def _skip_dashes(words: list[str]) -> bool:
    """Drop a ``--`` at the beginning of `words`; whether there was one."""
    found = words[:1] == ["--"]
    del words[: int(found)]
    return found


def _names_what_runs(options: Mapping[str, Any]) -> bool:
    """Whether a job file, or the options for each role, say what runs."""
    if "config" in options:
        return True
    roles = items(options.get("roles", ()))
    scripts = {item.partition("=")[0] for item in options.get("script", ())}
    return bool(roles) and all("@" in item or item.partition("=")[0] in scripts for item in roles)


def _split(argv: list[str], options: Sequence[Option]) -> tuple[list[str], list[str]]:
    """Our own options (spelled with dashes) and, from the first argument that is none, the rest."""
    spelled = {spelling: option for option in options for spelling in option.spellings}
    own: list[str] = []
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--" or not word.startswith("-") or word == "-":
            break
        index += 1
        if word in ("-h", "--help"):
            own.append("--help")
            continue
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            option = spelled.get(name) or _abbreviated(name, spelled)
            own.append(option.names[-1] + equals + value)
            takes_value = option.kind != "flag" and not equals
        else:
            found = spelled.get(word[:2])
            if found is None:
                raise UsageError(f"unknown option {word!r}", _likely(f"-{word}", spelled))
            own.append(word)
            takes_value = found.kind != "flag" and len(word) == 2
        if takes_value:
            if index >= len(argv):
                raise UsageError(f"{word} needs a value", "see unirun --help")
            # Joined to its option, a value may begin with a dash.
            own[-1] = own[-1] + ("=" if word.startswith("--") else "") + argv[index]
            index += 1
    return own, argv[index:]


def _abbreviated(name: str, spelled: Mapping[str, Option]) -> Option:
    """The option that `name` is the beginning of, as argparse allows for torchrun."""
    matches = {option.dest: option for long, option in spelled.items() if long.startswith(name)}
    if len(matches) == 1:
        return next(iter(matches.values()))
    if matches:
        names = ", ".join(sorted(option.names[-1] for option in matches.values()))
        raise UsageError(f"{name} can mean {names}", "write it out")
    raise UsageError(f"unknown option {name}", _likely(name, spelled))


def _likely(name: str, spelled: Mapping[str, Option]) -> str:
    """What may be meant by an option that there is not."""
    word, dot, _ = name.removeprefix("--").partition(".")
    if dot and word in ("config", "roles", "trainer"):
        return f"what changes a job file has no dashes: --config FILE {name.removeprefix('--')}=VALUE"
    known = [n.removeprefix("--") for n in spelled if n.startswith("--") and "_" not in n]
    begun = [each for each in known if each.startswith(word)]
    near = begun or difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    near = near or [_ELSEWHERE[word]] if word in _ELSEWHERE else near
    return f"did you mean '--{near[0]}'?" if near else "see unirun --help"


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the ``PET_*`` variables say. Raises `UsageError` for a flag that is no number."""
    found: dict[str, Any] = {}
    for option in OPTIONS:
        variable = f"PET_{option.dest.upper()}"
        if not option.pet or variable not in environ:
            continue
        value = environ[variable]
        if option.kind == "flag":
            try:
                wanted = int(value)
            except ValueError as error:
                raise UsageError(f"{variable}={value!r:.80} is no number", "use 0 or 1") from error
            if wanted:
                found[option.dest] = True
        else:
            found[option.dest] = [value] if option.kind == "list" else value
    return found


def items(values: Iterable[str]) -> list[str]:
    """What stands between the commas of all `values`."""
    return [item.strip() for value in values for item in value.split(",") if item.strip()]
