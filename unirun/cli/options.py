"""Every option of ``unirun``, as one table: the parser, the help and the completions are made from it.

An option that torchrun has means what it means there, under both spellings (``--rdzv-id``, ``--rdzv_id``), with
its ``PET_*`` variable.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unirun.errors import UsageError

Kind = Literal["value", "list", "flag"]


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``list``: may be given several times. `pet`: the environment may give it as ``PET_…``."""

    names: tuple[str, ...]
    kind: Kind
    group: str
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    pet: bool = True

    @property
    def dest(self) -> str:
        """The name under which the value is found."""
        return self.names[-1].removeprefix("--").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """All names, with the underscored form of each long one."""
        under = tuple(
            "--" + n[2:].replace("-", "_") for n in self.names if n.startswith("--") and "-" in n[2:]
        )
        return self.names + under


RUN = "what to run"
ROLES = "roles (ROLE=… forms may be given several times)"
NODES = "nodes and rendezvous"
LIFE = "restarts and the end"
OUTPUT = "output"
START = "how workers are started"

_OURS: tuple[Option, ...] = (
    Option(
        ("--roles",),
        "list",
        ROLES,
        "roles and how many ranks each has: actor=4,rollout=4 (a number, gpu, cpu or auto); "
        "critic=2@pkg.mod:Class names a workload",
        "ROLE=N[@CLASS],…",
        pet=False,
    ),
    Option(
        ("--trainer",),
        "value",
        ROLES,
        "the class that drives the workloads; the job ends with it",
        "pkg.mod:CLASS",
        pet=False,
    ),
    Option(("--script",), "list", ROLES, "a script for one role: rollout=serve.py", "ROLE=FILE", pet=False),
    Option(
        ("--env",),
        "list",
        ROLES,
        "an environment variable for all workers, or for one role: actor:K=V",
        "[ROLE:]K=V",
        pet=False,
    ),
    Option(
        ("--cwd",), "list", ROLES, "working directory of all workers, or of one role", "[ROLE=]DIR", pet=False
    ),
    Option(
        ("--primary",),
        "list",
        ROLES,
        "the job ends when these roles have ended well (default: the trainer, or all)",
        "ROLE,…",
        pet=False,
    ),
    Option(
        ("--config",),
        "value",
        RUN,
        "a job in YAML; key=value arguments that follow override single values",
        "FILE",
        pet=False,
    ),
    Option(("--name",), "value", RUN, "a name for the job (default: the script's)", "NAME", pet=False),
    Option(
        ("--preload",),
        "list",
        START,
        "modules that are imported once, before workers are forked",
        "MODULE,…",
        pet=False,
    ),
    Option(
        ("--call-timeout",),
        "value",
        LIFE,
        "seconds that a call between roles may take (default 1800)",
        "SECONDS",
        pet=False,
    ),
    Option(
        ("--transport",),
        "value",
        START,
        "what carries calls between roles: torch.distributed.rpc or unirun's own sockets (default torch)",
        "NAME",
        choices=("torch", "socket"),
        pet=False,
    ),
    Option(
        ("--store",),
        "value",
        NODES,
        "where the job's state is kept: sqlite:PATH or etcd://H:2379,…?prefix=/x (default: $UNIRUN_STORE, "
        "else a file of the job)",
        "URL",
        pet=False,
    ),
    Option(
        ("-d", "--detach"),
        "flag",
        OUTPUT,
        "start the job and return; see unirun status, logs, stop",
        pet=False,
    ),
    Option(("-q", "--quiet"), "flag", OUTPUT, "show what workers write and errors, nothing else", pet=False),
)

_TORCHRUN: tuple[Option, ...] = (
    Option(("--nnodes",), "value", NODES, "number of nodes; this version runs on one", "N"),
    Option(
        ("--nproc-per-node",),
        "list",
        ROLES,
        "ranks of each role that has no number, or of one role",
        "[ROLE=]N|auto|cpu|gpu",
    ),
    Option(("--rdzv-backend",), "value", NODES, "static or c10d; on one node they are the same", "NAME"),
    Option(("--rdzv-endpoint",), "value", NODES, "address and port of the first role's store", "HOST:PORT"),
    Option(("--rdzv-id",), "value", NODES, "the job's id (default: a new one)", "ID"),
    Option(("--rdzv-conf",), "value", NODES, "join_timeout=SECONDS or timeout=SECONDS", "K=V,…"),
    Option(("--standalone",), "flag", NODES, "one node, a free port, a new id: what unirun does anyway"),
    Option(
        ("--max-restarts",),
        "list",
        LIFE,
        "restarts after a worker failed (default: 0 of a role that runs scripts; 3 of workloads and trainer)",
        "[ROLE=]N",
    ),
    Option(
        ("--monitor-interval",),
        "value",
        LIFE,
        "how often memory and processor time are read for unirun status (default 5); exits are seen at once",
        "SECONDS",
    ),
    Option(
        ("--start-method",),
        "value",
        START,
        "fork (also forkserver): from a process that has imported torch; exec (also spawn): new interpreters",
        "METHOD",
        choices=("fork", "exec", "spawn", "forkserver"),
    ),
    Option(
        ("--event-log-handler",),
        "value",
        OUTPUT,
        "console: show the job's events",
        "NAME",
        choices=("null", "console"),
    ),
    Option(("--role",), "value", ROLES, "the name of the only role (default: default)", "NAME"),
    Option(("-m", "--module"), "flag", RUN, "the script is a module, as in python -m"),
    Option(("--no-python",), "flag", RUN, "the script is a program; run it as it is"),
    Option(
        ("--run-path",),
        "flag",
        RUN,
        "run the script with runpy in a process that is there already (as fork does)",
    ),
    Option(
        ("--log-dir",), "value", OUTPUT, "where logs go: DIR/<job id>/<role>/<rank>/<incarnation>/", "DIR"
    ),
    Option(
        ("-r", "--redirects"),
        "value",
        OUTPUT,
        "streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both, or RANK:N,…",
        "STD",
    ),
    Option(("-t", "--tee"), "value", OUTPUT, "streams that go to files and the console", "STD"),
    Option(("--local-ranks-filter",), "value", OUTPUT, "show only these local ranks on the console", "N,…"),
    Option(
        ("--duplicate-stdout-filters",),
        "value",
        OUTPUT,
        "copy lines with one of these words to filtered_stdout.log",
        "WORD,…",
    ),
    Option(("--duplicate-stderr-filters",), "value", OUTPUT, "the same for stderr", "WORD,…"),
    Option(("--node-rank",), "value", NODES, "rank of this node; 0 on one node", "N"),
    Option(("--master-addr",), "value", NODES, "address of this host on which stores listen", "ADDR"),
    Option(
        ("--master-port",), "value", NODES, "port of the first role's store (default: a free one)", "PORT"
    ),
    Option(("--local-addr",), "value", NODES, "the same as --master-addr on one node", "ADDR"),
    Option(("--logs-specs",), "value", OUTPUT, "refused: unirun keeps all output itself", "NAME", pet=False),
    Option(
        ("--numa-binding",),
        "value",
        START,
        "bind workers to the processors near their GPU",
        "MODE",
        choices=("node", "socket", "exclusive", "core-complex"),
        pet=False,
    ),
    Option(
        ("--signals-to-handle",),
        "value",
        LIFE,
        "signals that are passed on to the workers (default SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
        "SIG,…",
    ),
    Option(
        ("--shutdown-timeout",),
        "value",
        LIFE,
        "seconds between SIGTERM and SIGKILL (default $TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30)",
        "SECONDS",
    ),
    Option(
        ("--virtual-local-rank",),
        "flag",
        START,
        "LOCAL_RANK is 0 everywhere; each worker sees its device only",
    ),
)

OPTIONS = _OURS + _TORCHRUN
TORCHRUN_ONLY = frozenset(option.dest for option in _TORCHRUN)
GROUPS = (RUN, ROLES, NODES, LIFE, START, OUTPUT)

USAGE = """unirun [options] script.py [args]
       unirun --roles actor=4,rollout=4 [options] script.py [args]
       unirun --roles actor=4@ppo:Actor,… --trainer ppo:PPOTrainer [options]
       unirun --config job.yaml [key=value …] [script.py] [-- args]
       unirun plan …          show what would run where, start nothing
       unirun status [JOB]    how a job stands          unirun ls      all jobs
       unirun logs [JOB]      what its workers wrote    unirun stop    end a job
       unirun gc [JOB…]       clear jobs that are over
       unirun stubs CLASS …   role groups with the signatures of workloads, for editors
       unirun completion bash|zsh"""


class Parser(argparse.ArgumentParser):
    """argparse, with one-line errors as `UsageError`."""

    def error(self, message: str) -> Any:
        """Raise instead of printing the usage and leaving."""
        raise UsageError(message, f"see {self.prog} --help")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command line taken apart: options that were given, overrides ``key=value``, the script, its args."""

    options: Mapping[str, Any]
    overrides: tuple[str, ...]
    script: str | None
    args: tuple[str, ...]


def build_parser(prog: str, extra: Sequence[Option] = ()) -> Parser:
    """The parser of the options (not of the script and its arguments)."""
    parser = Parser(
        prog=prog,
        usage=USAGE,
        allow_abbrev=False,
        description="torchrun for many roles: each role becomes a torch process group of its own.",
        epilog="An unchanged torchrun script works; every torchrun option and PET_* variable is known. "
        "Exit codes: 0 success; the failing worker's own (128+signal); 2 usage; 3 placement; 4 rendezvous; "
        "5 restarts used up; 130/143 after SIGINT/SIGTERM.",
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


def parse(argv: Sequence[str], prog: str = "unirun", extra: Sequence[Option] = ()) -> CommandLine:
    """Take `argv` apart. Raises `UsageError`. ``--help`` prints and leaves."""
    own, rest = _split([*argv], (*OPTIONS, *extra))
    options = vars(build_parser(prog, extra).parse_args(own))
    overrides: list[str] = []
    if "config" in options:
        while rest and rest[0] != "--" and "=" in rest[0] and not rest[0].startswith("-"):
            overrides.append(rest.pop(0))
    script = rest.pop(0) if rest and rest[0] != "--" else None
    if rest and rest[0] == "--":
        rest.pop(0)
    return CommandLine(options, tuple(overrides), script, tuple(rest))


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
                raise UsageError(f"unknown option {word!r}", "see unirun --help")
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
    from unirun.spec.read import nearest

    raise UsageError(
        f"unknown option {name}", nearest(name, [n for n in spelled if n.startswith("--") and "_" not in n])
    )


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the ``PET_*`` variables say. Raises `UsageError` for a flag that is no number."""
    found: dict[str, Any] = {}
    for option in OPTIONS:
        variable = f"PET_{option.dest.upper()}"
        if not option.pet or variable not in environ:
            continue
        value = environ[variable]
        if option.kind == "flag":
            if not value.strip().lstrip("+-").isdigit():
                raise UsageError(f"{variable}={value!r} is no number", "use 0 or 1")
            if int(value):
                found[option.dest] = True
        else:
            found[option.dest] = [value] if option.kind == "list" else value
    return found
