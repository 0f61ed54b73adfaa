"""The subcommands of ``unirun``: the module and function of each, and its arguments.

It imports none of them, as completions are made of all arguments.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unirun.cli.commandline import Parser, add_options
from unirun.cli.options import GRAPH_OPTIONS, PLAN_OPTIONS, SHELLS
from unirun.errors import UsageError
from unirun.values import Value, natural

Add = Callable[..., argparse.Action]
"""`argparse.ArgumentParser.add_argument`."""


class Command(Value, gc=True):
    """A subcommand: the ``module:function`` below `unirun.cli` that gets its parsed arguments, and a function that adds
    these to a parser.

    With `describes`, the words themselves are passed on, because all options of ``unirun`` may be among them.
    """

    run: str
    description: str
    arguments: Callable[[Add], None]
    describes: bool = False


COMMANDS: dict[str, Command] = {}
"""By name; ``agent join`` is a command of ``agent``."""

FAMILIES = {
    "agent": "Nodes that come into a running job, and leave it.",
    "experiment": "Trials of registered experiments.",
}
"""The descriptions of those that have commands."""


def call(name: str, argv: Sequence[str]) -> int:
    """Run a subcommand. Returns the exit code."""
    given: Any = argv
    if name in FAMILIES or not COMMANDS[name].describes:
        parser = parser_of(name)
        # Positional arguments may stand between options; argparse cannot do both.
        given = parser.parse_args(argv) if name in FAMILIES else parser.parse_intermixed_args(argv)
    run = COMMANDS[name].run if given is argv else given.run
    module, function = run.split(":")
    code: int = getattr(importlib.import_module(f"unirun.cli.{module}"), function)(given)
    return code


def parser_of(name: str) -> Parser:
    """The parser of a subcommand. `run` of its result is that of the `Command`."""
    description = FAMILIES.get(name) or COMMANDS[name].description
    return filled(Parser(prog=f"unirun {name}", description=description), name)


def filled(parser: Parser, name: str) -> Parser:
    """`parser` with the arguments of a subcommand."""
    if name in COMMANDS:
        COMMANDS[name].arguments(parser.add_argument)
        parser.set_defaults(run=COMMANDS[name].run)
        return parser
    words = {each.removeprefix(f"{name} "): each for each in COMMANDS if each.startswith(f"{name} ")}
    actions = parser.add_subparsers(dest="action", required=True, metavar="|".join(words))
    for word, each in words.items():
        filled(actions.add_parser(word, help=COMMANDS[each].description), each)
    return parser


def _command(
    name: str, run: str, description: str, *, describes: bool = False
) -> Callable[[Callable[[Add], None]], None]:
    def register(arguments: Callable[[Add], None]) -> None:
        COMMANDS[name] = Command(run, description, arguments, describes)

    return register


def _whole(least: int) -> Callable[[str], int]:
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


def _machines(text: str) -> int:
    """The type of an option that is a number of nodes or GPUs."""
    if not 0 < (found := natural(text) or 0) < 100_000:
        raise UsageError(f"{text!r:.80} is no number of nodes or GPUs", "use 1 or more")
    return found


FLAG = "store_true"
JOB_HELP = "the job's id, or the beginning of it (default: the newest that runs, or the newest)"
JOB: Mapping[str, Any] = {"nargs": "?", "help": JOB_HELP}
RUNNING_HELP = "the job's id, or the beginning of it (default: the one that runs)"
RUNNING: Mapping[str, Any] = {"nargs": "?", "help": RUNNING_HELP}
STORE_HELP = (
    "the store to look in: sqlite:PATH or etcd://… (default: this user's directories, then $UNIRUN_STORE)"
)
STORE: Mapping[str, Any] = {"metavar": "URL", "help": STORE_HELP}
JOBS_HELP = "the jobs of this store (default: those that are here, then $UNIRUN_STORE's)"
JOBS: Mapping[str, Any] = {"metavar": "URL", "help": JOBS_HELP}


@_command("plan", "plan:main", "What would run where, and why.", describes=True)
def _(add: Add) -> None:
    add_options(add, PLAN_OPTIONS)


@_command(
    "graph",
    "graph:main",
    "Who calls whom: in a job that runs or ran, or in one that is described.",
    describes=True,
)
def _(add: Add) -> None:
    add("job", **JOB)
    add("--store", **STORE)
    add_options(add, GRAPH_OPTIONS)


@_command(
    "weights", "status:show_weights", "Which version of the weights each rank has, in a job that runs or ran."
)
def _(add: Add) -> None:
    add("job", **JOB)
    add("--plan", action=FLAG, help="the bytes of the last version, by path and pair of ranks")
    add("--store", **STORE)


@_command("status", "status:show_status", "How a job stands.")
def _(add: Add) -> None:
    add("job", **JOB)
    add("--store", **STORE)
    add("--json", action=FLAG, help="everything, for programs")


@_command("logs", "logs:main", "What the workers of a job wrote.")
def _(add: Add) -> None:
    add("job", **JOB)
    add("who", nargs="?", help="a role or one rank: actor, actor:2")
    add("-f", "--follow", action=FLAG, help="go on until the job has ended")
    add("-n", "--lines", type=_whole(0), metavar="N", help="only the last N lines of each file")
    add("--stdout", action=FLAG, help="only stdout")
    add("--stderr", action=FLAG, help="only stderr")
    add("--all", action=FLAG, help="earlier incarnations too")
    text = "logs of an earlier run of a job that Slurm has requeued, counted from 0"
    add("--attempt", type=_whole(0), metavar="N", help=text)
    add("--store", **STORE)


@_command("events", "events:show_events", "What happened to a job, what was decided, and why.")
def _(add: Add) -> None:
    add("job", **JOB)
    add("-f", "--follow", action=FLAG, help="go on until the job has ended")
    add("--story", metavar="WHO", help="only events of a worker, a role or a node, and their causes")
    text = "only events of this kind, as decision or failure; may be repeated"
    add("--kind", action="append", default=[], metavar="KIND", help=text)
    text = "only events since then: 90s, 30m, 12h, 7d ago, or 2026-11-27T05:00 in local time"
    add("--since", metavar="TIME", help=text)
    add("--json", action=FLAG, help="one object a line, for programs")
    add("--store", **STORE)


@_command(
    "failures", "events:show_failures", "The failures of a job, their likely causes, and what was decided."
)
def _(add: Add) -> None:
    add("job", **JOB)
    text = "all about failure N: how it was noticed, what followed, its error"
    add("--why", type=_whole(1), metavar="N", help=text)
    add("--json", action=FLAG, help="one object a line, for programs")
    add("--store", **STORE)


@_command("trace", "events:write_trace", "What a job did, on one clock, for Perfetto and chrome://tracing.")
def _(add: Add) -> None:
    add("job", **JOB)
    add("-o", "--output", default="trace.json", metavar="FILE", help="the file to write (trace.json)")
    add("--store", **STORE)


@_command("top", "status:show_top", "A live view of jobs: ranks, rates, calls, decisions.")
def _(add: Add) -> None:
    add("jobs", nargs="*", metavar="JOB", help="ids, or their beginnings (default: those that run)")
    text = "the order of ranks (rank); the key s changes it"
    add("--sort", choices=("rank", "state", "cpu", "memory", "step"), default="rank", help=text)
    add("--filter", default="", metavar="TEXT", help="only ranks whose name, state or node has it")
    add("--interval", type=_seconds, default=1.0, metavar="SECONDS", help="between two frames (1)")
    add("--once", action=FLAG, help="print one frame and return; so without a terminal, too")
    add("--store", **STORE)


@_command("debug", "ranks:debug", "Debug a rank of a running job with pdb; the others go on.")
def _(add: Add) -> None:
    add("job", help="the job's id, or the beginning of it")
    add("who", help="the rank: actor:2")
    add("--store", **STORE)


@_command(
    "profile",
    "ranks:profile",
    "Profile a rank of a running job: a flame graph, and a trace of torch's profiler.",
)
def _(add: Add) -> None:
    add("job", help="the job's id, or the beginning of it")
    add("who", help="the rank: actor:0")
    add("--seconds", type=_seconds, default=5.0, metavar="N", help="for so long (5)")
    add("-o", "--output", metavar="DIR", help="the directory for the files (profile-ROLE-RANK)")
    add("--store", **STORE)


@_command(
    "stacks",
    "ranks:stacks",
    "Where the ranks of a running job are: equal stacks together, the odd one first.",
)
def _(add: Add) -> None:
    add("job", help="the job's id, or the beginning of it")
    add("who", nargs="?", help="a role or ranks of one: actor, actor:2, actor:0-3")
    add("--threads", action=FLAG, help="all threads, not only the main one")
    add("--json", action=FLAG, help="one rank a line, for programs")
    add("--store", **STORE)


def _port(text: str) -> int:
    """The type of an option that is a port; 0 is any free one."""
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no port")
    return int(text)


@_command("dashboard", "dashboard:main", "Jobs as a page in a browser, and as metrics for Prometheus.")
def _(add: Add) -> None:
    add("jobs", nargs="*", metavar="JOB", help="only these jobs (default: all of this user)")
    add("--port", type=_port, default=0, help="the port on 127.0.0.1 (default: a free one)")


@_command("report", "dashboard:report", "All about a job as one file, to be sent to somebody.")
def _(add: Add) -> None:
    add("job", **JOB)
    add("-o", "--output", metavar="FILE", help="the file (default: JOB.html)")


@_command("stop", "jobs:stop_job", "End a running job.")
def _(add: Add) -> None:
    add("job", **RUNNING)
    text = "the first signal to the workers (default SIGTERM)"
    add("--signal", default="SIGTERM", metavar="SIG", help=text)
    add("--grace", type=_seconds, metavar="SECONDS", help="seconds until SIGKILL (default: the job's)")
    add("--now", action=FLAG, help="SIGKILL at once")
    add("--no-wait", action=FLAG, help="return before the job has ended")
    add("--store", **STORE)


@_command("inject", "ranks:inject", "Inject faults into the workers of a job of your own, to see it recover.")
def _(add: Add) -> None:
    add("job", help="the job's id, or the beginning of it")
    add("who", help="a role or ranks of one: actor, actor:2, actor:0-3")
    text = (
        "sigkill, sigstop, segv, slow=2x, hang, hang-gil, exit=3 or oom; the last four in Python workers only"
    )
    add("--fault", required=True, metavar="FAULT", help=text)
    text = "again and again, each time into one of the ranks at random (default: once, into all of them)"
    add("--every", metavar="TIME", help=text)
    add(
        "--for",
        dest="lasting",
        metavar="TIME",
        help="with --every: for how long (default: until the job ends)",
    )
    text = "with --every: the choice of ranks, which is the same for the same seed"
    add("--seed", type=_whole(0), metavar="N", help=text)
    add("--store", **STORE)


@_command("agent join", "agent:join", "make this host, or hosts that ssh reaches, nodes of a job")
def _(add: Add) -> None:
    add("job", nargs="?", help="the job's id; its directory, or the store, says where the master is")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="where masters of the job listen")
    add("--token-file", metavar="FILE", help="the job's token, if its directory is not here")
    add("--hosts", metavar="HOST[,HOST]", help="hosts to add by ssh instead of this one")
    add("--node-name", metavar="NAME", help="the node's name (default: the host's)")
    add("--interface", metavar="NAME", help="the interface or address to use")
    add("--insecure", action=FLAG, help="the job has no TLS")
    add("--quiet", action=FLAG, help="leave out unirun's own notes")
    add("-d", "--detach", action=FLAG, help="return when the node has joined")
    add("--store", **STORE)


@_command("agent drain", "agent:drain", "move what runs on a node elsewhere, and let it go")
def _(add: Add) -> None:
    add("node", help="the node; unirun status shows them")
    add("job", **RUNNING)
    add("--store", **STORE)


@_command("ls", "jobs:list_jobs", "The jobs of this user, the newest last.")
def _(add: Add) -> None:
    add("--running", action=FLAG, help="only those that have not ended")
    add("-n", "--newest", type=_whole(0), metavar="N", help="only the newest N")
    add("--store", **JOBS)
    add("--json", action=FLAG, help="one object a line, for programs")


@_command("gc", "jobs:collect", "Remove what jobs have left that are over.")
def _(add: Add) -> None:
    add("jobs", nargs="*", metavar="JOB", help="only these, whatever their age: whole ids")
    text = "how long ago they ended: 90s, 30m, 12h, 7d (default), 2w"
    add("--older-than", default="7d", metavar="AGE", help=text)
    add("--store", **JOBS)
    add("--dry-run", action=FLAG, help="say what would be removed, and remove nothing")
    add("--json", action=FLAG, help="one object a line, for programs")


@_command(
    "warm", "warm:main", "Keep torch imported between jobs: those that fit start in a third of a second."
)
def _(add: Add) -> None:
    add("action", nargs="?", choices=("start", "status", "stop"), default="start")
    text = "modules besides torch, for jobs with the same --preload"
    add("--preload", action="append", default=[], metavar="MODULE[,MODULE]", help=text)
    add("--idle", default="30m", metavar="TIME", help="end after so long without a job (30m)")
    add("--until-logout", action=FLAG, help="end with this login session")


@_command(
    "doctor",
    "doctor:main",
    "Examine this host; those of --hosts or --hostfile, over ssh; or, in a Slurm allocation, its nodes. "
    "Exit codes: 0 nothing is wrong; 1 something is; 2 usage.",
)
def _(add: Add) -> None:
    add("--hosts", metavar="LIST", help="h1,h2,user@h3,n[01-16]")
    add("--hostfile", metavar="FILE", help="a file with a host on each line")
    add("--interface", metavar="NAME", help="the network interface that is examined")
    add("--json", action=FLAG, help="one object, for programs")


@_command("render", "batch:render", "The same job as others start it; starts nothing.")
def _(add: Add) -> None:
    text = "a batch script, a Kubernetes JobSet, or a compose file"
    add("form", choices=("slurm", "jobset", "compose"), help=text)
    add("job", metavar="JOBFILE", help="the job file")
    add("overrides", nargs="*", metavar="key=value", help="values of the job file")
    add("--nodes", type=_machines, default=1, metavar="N", help="number of nodes (default 1)")
    add("--gpus", type=_machines, default=0, metavar="N", help="GPUs of each node (default none)")
    add("--image", metavar="IMAGE", help="the containers' image, which has unirun in PATH")
    text = "what the batch script asks for, as for unirun --slurm"
    add("--slurm", action="append", metavar="K=V,…", help=text)
    add("--slurm-extra", action="append", default=[], metavar="OPTION", help="another option of sbatch")
    add("--slurm-setup", action="append", default=[], metavar="LINE", help="a line of bash before it")


def _trial(add: Add) -> None:
    text = "a registered experiment: unirun experiment find-config shows their names"
    names = ("-e", "--experiment_name", "--experiment-name")
    add(*names, required=True, metavar="NAME", help=text)
    names = ("-f", "--trial_name", "--trial-name")
    add(*names, required=True, metavar="TRIAL", help="the name of the trial; you choose it")
    _root(add)


def _root(add: Add) -> None:
    text = "the directory of all trials ($UNIRUN_HOME/experiments); all hosts must share it"
    add("--root", default="", metavar="DIR", help=text)


def _module(add: Add) -> None:
    text = (
        "a module or a file that registers experiments, as seen from the working directory; by default all of "
        "./experiments"
    )
    add("--module", action="append", default=[], help=text)


@_command("experiment start", "experiment:start", "start a trial, and follow it to its end")
def _(add: Add) -> None:
    _trial(add)
    _module(add)
    add("--mode", choices=("local", "slurm", "ssh"), default="local", help="where it runs (local)")
    add("--partition", help="with --mode slurm: the partition")
    add("--nodes", type=_whole(1), help="with --mode slurm: nodes (1)")
    add("--slurm-extra", action="append", help="with --mode slurm: another option of sbatch")
    add("--slurm-setup", action="append", help="with --mode slurm: a line of bash before the job")
    add("--hosts", help="with --mode ssh: hosts, as for unirun --hosts")
    text = (
        "disabled: begin anew; auto: continue from the last one, if any; "
        "resume: continue, fail without one; fault: begin anew, continue after a failure (disabled)"
    )
    add("--recover-mode", choices=("disabled", "auto", "resume", "fault"), default="disabled", help=text)
    text = (
        "with --recover-mode auto or resume: continue although this setting has changed, such as "
        "models.actor@0.backend.lr; the error of a refused start lists the keys; may be repeated"
    )
    add("--accept-change", action="append", default=[], metavar="KEY", help=text)
    add("--recover-retries", type=_whole(0), default=1, help="new starts after a failure (1)")
    add("--recover-after", type=_seconds, default=10.0, help="seconds before each new start (10)")
    text = "restart model workers and the master however often they end, and not ten times at most"
    add("--ignore-worker-error", action=FLAG, help=text)
    add("--dry-run", action=FLAG, help="show the configuration and the graph; start nothing")
    add("overrides", nargs="*", metavar="key=value", help="settings of the experiment")


@_command("experiment stop", "experiment:stop", "end a trial")
def _(add: Add) -> None:
    _trial(add)


@_command("experiment list", "experiment:show", "show all trials and their states")
def _(add: Add) -> None:
    _root(add)


@_command("experiment find-config", "experiment:find", "the names of registered experiments")
def _(add: Add) -> None:
    add("-r", "--regex", default="", help="show only names that match this regular expression")
    _module(add)


@_command("completion", "completion:main", "Print completions for a shell.")
def _(add: Add) -> None:
    add("shell", choices=SHELLS)


SUBCOMMANDS = tuple(dict.fromkeys(name.partition(" ")[0] for name in COMMANDS))
"""The first words of commands. Every other one is a job."""
