"""Every option of ``unirun``, as one table: unirun's own, and torchrun's, which mean what they mean there."""

from __future__ import annotations

from typing import Literal

from unirun.values import Value

Kind = Literal["value", "list", "flag"]


class Option(Value):
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

OURS: tuple[Option, ...] = (
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
        "the job ends when these roles have ended well (default: the trainer, or all but workloads)",
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
        "what carries calls between roles: unirun's own sockets or torch.distributed.rpc (default socket)",
        "NAME",
        choices=("socket", "torch"),
        pet=False,
    ),
    Option(
        ("--stdin",),
        "value",
        START,
        "the worker that has the stdin of unirun (default: the only one of a job; of several, none)",
        "ROLE:RANK",
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
        ("--inventory",),
        "value",
        NODES,
        "nodes that are not there, for plans and tests: fake:nodes=4,devices=8,numa=2 (default: this host)",
        "fake:K=V,…",
        pet=False,
    ),
    Option(("--exclude",), "list", NODES, "nodes that are not used", "NODE[,NODE]", pet=False),
    Option(
        ("-d", "--detach"),
        "flag",
        OUTPUT,
        "start the job and return; see unirun status, logs, stop",
        pet=False,
    ),
    Option(("-q", "--quiet"), "flag", OUTPUT, "show what workers write and errors, nothing else", pet=False),
    Option(
        ("-v", "--verbose"), "flag", OUTPUT, "say too whether a warm process is used, else why not", pet=False
    ),
)

TORCHRUN: tuple[Option, ...] = (
    Option(
        ("--nnodes",),
        "value",
        NODES,
        "number of nodes, or MIN:MAX; this version runs on one: 1 or 1:MAX",
        "N",
    ),
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
    Option(
        ("--rdzv-conf",),
        "value",
        NODES,
        "join_timeout=SECONDS; what is between nodes does nothing on one",
        "K=V,…",
    ),
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

OPTIONS = OURS + TORCHRUN
TORCHRUN_ONLY = frozenset(option.dest for option in TORCHRUN)

GROUPS = (RUN, ROLES, NODES, LIFE, START, OUTPUT)

LOST_HELP = "what the plan would be after the loss of these nodes, and who would move"
PLAN_OPTIONS = (
    Option(("--json",), "flag", OUTPUT, "the plan for programs", pet=False),
    Option(("--svg",), "value", OUTPUT, "a file for a picture of nodes, slots and ranks", "FILE", pet=False),
    Option(("--lost",), "list", OUTPUT, LOST_HELP, "NODE[,NODE]", pet=False),
)
"""Of ``unirun plan``, besides all others."""

FORMAT_HELP = "how the graph is drawn; yaml is for a job file (default: by the file's name, or tree)"
FILE_HELP = "a file for the graph (default: print)"
FORMATS = ("tree", "mermaid", "dot", "svg", "yaml")
GRAPH_OPTIONS = (
    Option(("--format",), "value", OUTPUT, FORMAT_HELP, "FORM", FORMATS, pet=False),
    Option(("-o", "--output"), "value", OUTPUT, FILE_HELP, "FILE", pet=False),
)
"""Of ``unirun graph``, besides all others."""
