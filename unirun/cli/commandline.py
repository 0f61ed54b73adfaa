"""The command line of ``unirun``, read once: options, overrides, the script and its arguments."""

from __future__ import annotations

import argparse
import difflib
import functools
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from unirun.cli.options import GROUPS, OPTIONS, TORCHRUN, WITHOUT_VARIABLE, Option
from unirun.errors import UsageError
from unirun.values import Value

_ELSEWHERE = {
    **dict.fromkeys(
        (
            *("gpus", "num-gpus", "num_gpus", "ngpus", "num-processes", "num_processes", "np", "n"),
            *("nprocs", "num-procs", "num_procs", "num-workers", "num_workers", "ntasks", "ntasks-per-node"),
        ),
        "nproc-per-node",
    ),
    **dict.fromkeys(("nodes", "num-nodes", "num_nodes", "num-machines", "num_machines"), "nnodes"),
    **dict.fromkeys(("working-dir", "working_dir", "workdir", "chdir"), "cwd"),
    **dict.fromkeys(("job-name", "job_name"), "name"),
}
"""The names of options in other launchers."""

_OF_JOB_FILES = ("cpu", "cpus", "num_cpus", "cpus_per_task", "mem", "memory")

USAGE = """unirun [options] [--] script.py [args]
       unirun --roles actor=4,rollout=4 [options] script.py [args]
       unirun --roles actor=4@ppo:Actor,… --trainer ppo:PPOTrainer [options]
       unirun --service 'engine=2: vllm serve MODEL --port {port}' \\
              --after engine [options] script.py [args]
       unirun --config job.yaml [key=value …] [script.py] [-- args]

before a job:
       unirun plan …                the place of each rank; starts nothing
       unirun graph …               the calls between roles
       unirun doctor                faults of this host, or of --hosts h1,h2,…
       unirun warm [stop]           keep torch imported between jobs
       unirun render …              the job for Slurm, Kubernetes or compose
       unirun experiment start|stop|list|find-config    trials of experiments

one job (without JOB mostly the newest):
       unirun status [JOB]          its roles, ranks and latest failures
       unirun logs [JOB] [WHO]      the output of its workers
       unirun failures [JOB]        its failures, with their likely causes
       unirun events [JOB]          all that happened, and the reasons
       unirun weights [JOB]         the version that each rank has
       unirun top [JOB]             a live view
       unirun stacks JOB [WHO]      its stacks, equal ones together
       unirun debug JOB WHO         pdb in a rank
       unirun profile JOB WHO       a flame graph of a rank
       unirun trace [JOB]           a file for Perfetto
       unirun report [JOB]          all about it in one file
       unirun inject JOB WHO --fault F    kill or stop workers, by schedule too
       unirun agent join|drain …    add a node, or empty one
       unirun stop [JOB]            end it

all jobs:
       unirun ls                    a line for each
       unirun dashboard [JOB …]     a web page, and metrics for Prometheus
       unirun gc                    remove those that ended days ago
       unirun completion SHELL      completions for bash, zsh, fish or tcsh"""


class Parser(argparse.ArgumentParser):
    """argparse, with one-line errors as `UsageError`."""

    def error(self, message: str) -> Any:
        """Raise instead of printing the usage and leaving."""
        raise UsageError(message, f"see {self.prog} --help")


class CommandLine(Value):
    """A parsed command line: the options that were given, overrides ``key=value``, the script and its arguments.

    `options` are by `Option.dest`: a text, a list of texts for an option that may be given several times, True for a
    flag.
    """

    options: Mapping[str, Any]
    overrides: tuple[str, ...]
    script: str | None
    args: tuple[str, ...]


class RoleItem(Value):
    """One item of ``--roles``, ``NAME=COUNT@TARGET``; or one ``--service``, ``NAME=COUNT: COMMAND``, with the words of
    its command. Count and target are None when they are left out."""

    name: str
    count: str | None
    target: str | None = None
    command: tuple[str, ...] = ()


def parser_of_job(prog: str, extra: Sequence[Option] = ()) -> Parser:
    """A parser with every option in its group, and `extra` ones: for the help and for completions."""
    parser = Parser(
        prog=prog,
        usage=USAGE,
        description="torchrun for many roles: each role becomes a torch process group of its own.",
        epilog="An unchanged torchrun script works; every torchrun option and PET_* variable is known. "
        "Exit codes: 0 success; the failing worker's own (128+signal); 2 usage; 3 placement; 4 rendezvous; "
        "5 restarts used up; 130/143 after SIGINT/SIGTERM; 141 when nobody reads stdout any more.",
    )
    for name in GROUPS:
        group = parser.add_argument_group(name)
        add_options(group.add_argument, [each for each in (*OPTIONS, *extra) if each.group == name])
    return parser


def add_options(add: Callable[..., argparse.Action], options: Iterable[Option]) -> None:
    """Add `options` to a parser, of which `add` is the method `add_argument`."""
    for option in options:
        more = {"metavar": option.metavar, "choices": option.choices or None}
        add(
            *option.names,
            help=option.help.replace("%", "%%"),
            **more if option.metavar else {"action": "store_true"},
        )


def parse(argv: Sequence[str], prog: str = "unirun", extra: tuple[Option, ...] = ()) -> CommandLine:
    """Parse `argv`. ``--help`` prints the help and leaves. Raises `UsageError`."""
    options: dict[str, Any] = {}
    rest = _read_options([*argv], options, prog, extra)
    overrides: list[str] = []
    if "config" in options:
        while rest and "=" in rest[0] and not rest[0].startswith("-"):
            overrides.append(rest.pop(0))
            # Options may follow overrides, too. Everything after the script, or after ``--``, is the script's.
            rest = _read_options(rest, options, prog, extra)
    script = None
    if _skip_dashes(rest):
        # As in torchrun, ``--`` ends the options. When roles name what they run, only arguments follow it.
        if rest and not _names_what_runs(options):
            script = rest.pop(0)
    elif rest:
        script = rest.pop(0)
        _skip_dashes(rest)
    return CommandLine(options, tuple(overrides), script, tuple(rest))


def _read_options(words: list[str], options: dict[str, Any], prog: str, extra: Sequence[Option]) -> list[str]:
    """Add the options at the beginning of `words` to `options`. Returns the words from the first other one on."""
    known = _by_spelling(tuple(extra))
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        word = words.pop(0)
        if word in ("-h", "--help"):
            parser_of_job(prog, extra).print_help()
            raise SystemExit(0)
        option, value = _named_by(word, words, known)
        if not option.metavar:
            if value is not None:
                raise UsageError(f"{option.name} takes no value, found {value!r}", f"write {option.name}")
            options[option.dest] = True
            continue
        if value is None:
            if not words:
                raise UsageError(f"{word} needs a value", "see unirun --help")
            value = words.pop(0)
        if option.choices and value not in option.choices:
            problem = f"{option.name}: invalid choice: {value!r}"
            raise UsageError(problem, f"choose from {', '.join(option.choices)}")
        if option.many:
            options.setdefault(option.dest, []).append(value)
        else:
            options[option.dest] = value
    return words


def _named_by(word: str, words: list[str], known: Mapping[str, Option]) -> tuple[Option, str | None]:
    """The option that `word` names, and its value if `word` has one.

    As in argparse, ``-r3`` and ``-r=3`` have a value. ``-dq`` is ``-d -q``: the second one is put back before `words`.
    """
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return known.get(name) or _abbreviated(name, known), value if equals else None
    option, glued = known.get(word[:2]), word[2:]
    if option is None:
        raise UsageError(f"unknown option {word!r}", _likely(f"-{word}", known))
    if glued and not option.metavar and not glued.startswith("="):
        words.insert(0, f"-{glued}")
        return option, None
    return option, glued.removeprefix("=") if glued else None


@functools.cache
def _by_spelling(extra: tuple[Option, ...]) -> dict[str, Option]:
    return {spelling: option for option in (*OPTIONS, *extra) for spelling in option.spellings}


def _skip_dashes(words: list[str]) -> bool:
    """Drop a ``--`` at the beginning of `words`; whether there was one."""
    found = words[:1] == ["--"]
    del words[: int(found)]
    return found


def _names_what_runs(options: Mapping[str, Any]) -> bool:
    """Return True if a job file, or the options for each role, say what runs."""
    roles = role_items(options)
    scripts = {item.partition("=")[0] for item in options.get("script", ())}
    return "config" in options or (
        bool(roles) and all(role.target is not None or role.name in scripts for role in roles)
    )


def _abbreviated(name: str, known: Mapping[str, Option]) -> Option:
    """The option that starts with `name`, as argparse allows for torchrun."""
    matches = {option.dest: option for long, option in known.items() if long.startswith(name)}
    if len(matches) == 1:
        return next(iter(matches.values()))
    if matches:
        names = ", ".join(sorted(option.name for option in matches.values()))
        raise UsageError(f"{name} can mean {names}", "write it out")
    raise UsageError(f"unknown option {name}", _likely(name, known))


def _likely(name: str, known: Mapping[str, Option]) -> str:
    """The remedy for an unknown option: the one that was probably meant."""
    word, dot, _ = name.removeprefix("--").partition(".")
    if dot and word in ("config", "roles", "trainer"):
        return f"what changes a job file has no dashes: --config FILE {name.removeprefix('--')}=VALUE"
    if word.replace("-", "_") == "join_timeout":
        return "write --rdzv-conf join_timeout=SECONDS"
    if word.replace("-", "_") in _OF_JOB_FILES:
        return "a job file has it: roles: {NAME: {script: FILE, cpus: N, memory: 64GB}}, see docs/job-file.md"
    names = [n.removeprefix("--") for n in known if n.startswith("--") and "_" not in n]
    begun = [each for each in names if each.startswith(word)]
    near = begun or difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    near = [_ELSEWHERE[word]] if word in _ELSEWHERE else near
    return f"did you mean '--{near[0]}'?" if near else "see unirun --help"


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The options that ``PET_*`` variables give. Raises `UsageError` for a flag that is no number."""
    found: dict[str, Any] = {}
    for option in TORCHRUN:
        variable = f"PET_{option.dest.upper()}"
        if option.dest in WITHOUT_VARIABLE or variable not in environ:
            continue
        value = environ[variable]
        if option.metavar:
            found[option.dest] = [value] if option.many else value
            continue
        try:
            wanted = int(value)
        except ValueError as error:
            raise UsageError(f"{variable}={value!r:.80} is no number", "use 0 or 1") from error
        if wanted:
            found[option.dest] = True
    return found


def items(values: Iterable[str]) -> list[str]:
    """The items between the commas of all `values`."""
    return [item.strip() for value in values for item in value.split(",") if item.strip()]


def service_items(options: Mapping[str, Any]) -> list[RoleItem]:
    """The services of all ``--service``. Raises `UsageError`."""
    found = []
    for text in options.get("service", ()):
        head, colon, command = text.partition(":")
        name, equals, count = (part.strip() for part in head.partition("="))
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"--service {text!r}: {error}", "quote the command as for a shell") from error
        if not colon or not words or not name:
            raise UsageError(
                f"--service {text!r} names no command", "write 'engine=2: COMMAND --port {port}'"
            )
        found.append(RoleItem(name, count if equals else None, command=tuple(words)))
    return found


def role_items(options: Mapping[str, Any]) -> list[RoleItem]:
    """The items of all ``--roles``."""
    found = []
    for item in items(options.get("roles", ())):
        head, at, target = item.partition("@")
        name, equals, count = (part.strip() for part in head.partition("="))
        found.append(RoleItem(name, count if equals else None, target if at else None))
    return found
