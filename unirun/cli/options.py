"""The options of ``unirun``, as one table: the parser, the help and the completions are made of it.

An option that torchrun has means what it means there, under both spellings (``--rdzv-id``, ``--rdzv_id``), with its
``PET_*`` variable.
"""

from __future__ import annotations

from unirun.values import Value

HEAD_PORT = 29400
"""torchrun's default port of a rendezvous; of a static one it is 29500."""

SHELLS = ("bash", "zsh", "fish", "tcsh")
"""Those that have completions."""


class Option(Value):
    """One option; without `metavar` it is a flag. With `many` it may be given several times."""

    name: str
    group: str
    help: str
    metavar: str = ""
    many: bool = False
    choices: tuple[str, ...] = ()
    short: str = ""

    @property
    def dest(self) -> str:
        """The key of the value in `CommandLine.options`."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the help shows."""
        return (self.short, self.name) if self.short else (self.name,)

    @property
    def spellings(self) -> tuple[str, ...]:
        """All names, with the underscored form of the long one."""
        return tuple(dict.fromkeys((*self.names, f"--{self.dest}")))


RUN = "what to run"
ROLES = "roles (ROLE=… forms may be given several times)"
NODES = "nodes and rendezvous"
LIFE = "restarts and the end"
OUTPUT = "output"
START = "how workers are started"
GROUPS = (RUN, ROLES, NODES, LIFE, START, OUTPUT)

OURS: tuple[Option, ...] = (
    Option(
        "--roles",
        ROLES,
        "roles and how many ranks each has: actor=4,rollout=4 (a number, gpu, cpu or auto); "
        "critic=2@pkg.mod:Class names a workload, train=8@pkg.mod:func a function",
        "ROLE=N[@pkg.mod:NAME],…",
        many=True,
    ),
    Option(
        "--service",
        ROLES,
        "a program that the job needs until its end, such as a server: 'engine=2: vllm serve MODEL --port {port}'",
        "ROLE[=N]: COMMAND",
        many=True,
    ),
    Option(
        "--ready",
        ROLES,
        "a service is ready when this URL answers, tcp: when its port is open (default, if its command has {port})",
        "ROLE=URL|tcp",
        many=True,
    ),
    Option(
        "--after",
        ROLES,
        "roles start when these services are ready: engine for all roles, or train=engine",
        "[ROLE=]ROLE,…",
        many=True,
    ),
    Option("--slots", ROLES, "devices of each rank of a role; services have none", "ROLE=N", many=True),
    Option("--trainer", ROLES, "the class that drives the workloads; the job ends with it", "pkg.mod:CLASS"),
    Option("--script", ROLES, "a script for one role: rollout=serve.py", "ROLE=FILE", many=True),
    Option(
        "--env",
        ROLES,
        "an environment variable for all workers, or for one role: actor:K=V",
        "[ROLE:]K=V",
        many=True,
    ),
    Option("--cwd", ROLES, "working directory of all workers, or of one role", "[ROLE=]DIR", many=True),
    Option(
        "--primary",
        ROLES,
        "the job ends when these roles have succeeded (default: the trainer, or all but workloads and services)",
        "ROLE,…",
        many=True,
    ),
    Option("--config", RUN, "a job in YAML; key=value arguments that follow override single values", "FILE"),
    Option("--name", RUN, "a name for the job (default: the script's)", "NAME"),
    Option(
        "--preload", START, "modules that are imported once, before workers are forked", "MODULE,…", many=True
    ),
    Option(
        "--rank-restarts",
        LIFE,
        "restarts that one rank may cause; then its role restarts as a whole, or the job (default: no limit)",
        "[ROLE=]N",
        many=True,
    ),
    Option(
        "--max-job-restarts",
        LIFE,
        "restarts of all roles, when those of a role are used up or its failure needs it (default 0)",
        "N",
    ),
    Option(
        "--restart-window",
        LIFE,
        "only restarts within this time count, as 10m or 1h (default: all; of services 1h)",
        "[ROLE=]TIME",
        many=True,
    ),
    Option(
        "--restart-delay",
        LIFE,
        "time before the second restart that counts; each further one waits twice as long, up to 60 s (default 0)",
        "[ROLE=]TIME",
        many=True,
    ),
    Option(
        "--fatal-exit-codes",
        LIFE,
        "exit codes of workers that no restart follows: the job ends with them (a signal is 128 + its number)",
        "[ROLE=]N,…",
        many=True,
    ),
    Option("--call-timeout", LIFE, "seconds that a call between roles may take (default 1800)", "SECONDS"),
    Option(
        "--hang-timeout",
        LIFE,
        "seconds without progress after which a rank that hangs is found and killed (default: never; docs/hangs.md)",
        "[ROLE=]SECONDS",
        many=True,
    ),
    Option(
        "--first-step-timeout",
        LIFE,
        "with --hang-timeout: seconds that the first step of a rank may take at least (default 600)",
        "[ROLE=]SECONDS",
        many=True,
    ),
    Option(
        "--stragglers",
        LIFE,
        "with --hang-timeout: tell which rank the others wait for again and again, or replace it by one on another "
        "node (default tell)",
        "[ROLE=]tell|replace",
        many=True,
    ),
    Option(
        "--transport",
        START,
        "what carries calls between roles: unirun's own sockets or torch.distributed.rpc (default socket)",
        "NAME",
        choices=("socket", "torch"),
    ),
    Option(
        "--stdin",
        START,
        "the worker that has the stdin of unirun (default: the only one of a job; of several, none)",
        "ROLE:RANK",
    ),
    Option(
        "--store",
        NODES,
        "where the job's state is kept: sqlite:PATH, etcd://H:2379,…?prefix=/x, or etcd for one of its own (default: "
        "$UNIRUN_STORE, else a file of the job)",
        "URL",
    ),
    Option(
        "--inventory",
        NODES,
        "simulated nodes, for plans and tests: fake:nodes=4,devices=8,numa=2 (default: this host)",
        "fake:K=V,…",
    ),
    Option("--hosts", NODES, "run on these hosts, over ssh: h1,h2:4,user@h3,n[01-16]", "HOST,…"),
    Option("--hostfile", NODES, "the same from a file: h1, h1:4 or h1 slots=4 on each line", "FILE"),
    Option(
        "--pre-check", NODES, "examine the hosts first (unirun doctor), and leave out those that are not well"
    ),
    Option("--sync", NODES, "send the working tree to the hosts first, without what git ignores"),
    Option(
        "--interface",
        NODES,
        "the interface, address or network that the hosts of a job use between them (default: that of the route to "
        "the first)",
        "NAME",
    ),
    Option("--node-name", NODES, "the name of this node (default: its host's)", "NAME"),
    Option(
        "--token-file",
        NODES,
        "the secret of jobs of several hosts, the same file on each (default: $UNIRUN_HOME/token, made when missing)",
        "FILE",
    ),
    Option("--insecure", NODES, "no TLS between hosts: for a network that nobody else is on"),
    Option("--exclude", NODES, "nodes that are not used", "NODE[,NODE]", many=True),
    Option(
        "--slurm",
        NODES,
        "submit the job to Slurm and follow it: nodes=4,partition=P,time=1:00:00,gres=gpu:8,…; several times, or "
        "'… : …', for the components of a heterogeneous job",
        "K=V,…",
        many=True,
    ),
    Option(
        "--slurm-extra",
        NODES,
        "another option of sbatch, as it stands in a batch script: --slurm-extra=--account=x",
        "OPTION",
        many=True,
    ),
    Option(
        "--slurm-setup",
        NODES,
        "a line of bash that the batch script begins with: 'module load cuda', 'source env.sh'",
        "LINE",
        many=True,
    ),
    Option(
        "--component",
        NODES,
        "the role's ranks are on the nodes of this component of a heterogeneous Slurm job, counted from 0",
        "ROLE=N",
        many=True,
    ),
    Option("--dry-run", OUTPUT, "with --slurm: print the batch script, submit nothing"),
    Option(
        "--notify-command",
        OUTPUT,
        "run this with sh on a failure, a recovery and the end, with the event on stdin (docs/observe.md)",
        "COMMAND",
    ),
    Option("--detach", OUTPUT, "start the job and return; see unirun status, logs, stop", short="-d"),
    Option("--quiet", OUTPUT, "show what workers write and errors, nothing else", short="-q"),
    Option("--verbose", OUTPUT, "also show whether a warm process is used, and if not, why", short="-v"),
)

TORCHRUN: tuple[Option, ...] = (
    Option("--nnodes", NODES, "number of nodes, or MIN:MAX: start this command on each", "N"),
    Option(
        "--nproc-per-node",
        ROLES,
        "ranks of each role that has no number, or of one role",
        "[ROLE=]N|auto|cpu|gpu",
        many=True,
    ),
    Option("--rdzv-backend", NODES, "static or c10d, which are the same", "NAME"),
    Option(
        "--rdzv-endpoint",
        NODES,
        "address and port of the head, the first of the nodes; on one, of the first role's store",
        "HOST:PORT",
    ),
    Option("--rdzv-id", NODES, "the job's id (default: a new one)", "ID"),
    Option(
        "--rdzv-conf",
        NODES,
        "join_timeout=SECONDS, and last_call_timeout=SECONDS with --nnodes MIN:MAX",
        "K=V,…",
    ),
    Option("--standalone", NODES, "one node, a free port, a new id, as is the default"),
    Option(
        "--max-restarts",
        LIFE,
        "restarts after a worker failed (default: 0 of a role that runs scripts; 3 of workloads and trainer)",
        "[ROLE=]N",
        many=True,
    ),
    Option(
        "--monitor-interval",
        LIFE,
        "how often memory and processor time are read for unirun status (default 5); exits are seen at once",
        "SECONDS",
    ),
    Option(
        "--start-method",
        START,
        "fork (also forkserver): from a process that has imported torch; exec (also spawn): new interpreters",
        "METHOD",
        choices=("fork", "exec", "spawn", "forkserver"),
    ),
    Option(
        "--event-log-handler", OUTPUT, "console: show the job's events", "NAME", choices=("null", "console")
    ),
    Option("--role", ROLES, "the name of the only role (default: default)", "NAME"),
    Option("--module", RUN, "the script is a module, as in python -m", short="-m"),
    Option("--no-python", RUN, "the script is a program; run it as it is"),
    Option("--run-path", RUN, "run the script with runpy in an existing process (as fork does)"),
    Option("--log-dir", OUTPUT, "where logs go: DIR/<job id>/<role>/<rank>/<incarnation>/", "DIR"),
    Option(
        "--redirects",
        OUTPUT,
        "streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both, or RANK:N,…",
        "STD",
        short="-r",
    ),
    Option("--tee", OUTPUT, "streams that go to files and the console", "STD", short="-t"),
    Option(
        "--log-line-prefix-template",
        OUTPUT,
        "the prefix of the lines on the console, of ${role_name}, ${rank}, ${local_rank} and ${hostname} (default: "
        "$TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else '[ROLE:RANK] ')",
        "TEXT",
    ),
    Option("--local-ranks-filter", OUTPUT, "show only these local ranks on the console", "N,…"),
    Option(
        "--duplicate-stdout-filters",
        OUTPUT,
        "copy lines with one of these words to filtered_stdout.log",
        "WORD,…",
    ),
    Option("--duplicate-stderr-filters", OUTPUT, "the same for stderr", "WORD,…"),
    Option("--node-rank", NODES, "rank of this node; the head has 0", "N"),
    Option(
        "--master-addr",
        NODES,
        "address on which stores listen here; of several nodes, the head's",
        "ADDR",
    ),
    Option(
        "--master-port",
        NODES,
        "port of the first role's store (default: a free one); of several nodes, the head's",
        "PORT",
    ),
    Option("--local-addr", NODES, "the same as --master-addr on one node", "ADDR"),
    Option("--logs-specs", OUTPUT, "only default is accepted, as unirun keeps all output itself", "NAME"),
    Option(
        "--numa-binding",
        START,
        "bind workers to the processors near their GPU",
        "MODE",
        choices=("node", "socket", "exclusive", "core-complex"),
    ),
    Option(
        "--signals-to-handle",
        LIFE,
        "signals passed on to the workers (default SIGTERM,SIGINT,SIGHUP,SIGQUIT); any other does not stop the job",
        "SIG,…",
    ),
    Option(
        "--shutdown-timeout",
        LIFE,
        "seconds between SIGTERM and SIGKILL (default $TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30)",
        "SECONDS",
    ),
    Option("--virtual-local-rank", START, "LOCAL_RANK is 0 everywhere; each worker sees its device only"),
    Option(
        "--print-completion",
        OUTPUT,
        "the same as unirun completion: print completions for a shell",
        "SHELL",
        choices=SHELLS,
    ),
)

OPTIONS = OURS + TORCHRUN
WITHOUT_VARIABLE = ("logs_specs", "numa_binding", "print_completion")
"""Options of torchrun that have no ``PET_*`` variable, there as here."""

PLAN_OPTIONS = (
    Option("--json", OUTPUT, "the plan for programs"),
    Option("--svg", OUTPUT, "a file for a picture of nodes, slots and ranks", "FILE"),
    Option(
        "--lost",
        OUTPUT,
        "what the plan would be after the loss of these nodes, and who would move",
        "NODE[,NODE]",
        many=True,
    ),
)
"""Of ``unirun plan``, besides all others."""

FORMATS = ("tree", "mermaid", "dot", "svg", "yaml")
GRAPH_OPTIONS = (
    Option(
        "--format",
        OUTPUT,
        "how the graph is drawn; yaml is for a job file (default: by the file's name, or tree)",
        "|".join(FORMATS),
        choices=FORMATS,
    ),
    Option("--output", OUTPUT, "a file for the graph (default: print)", "FILE", short="-o"),
)
"""Of ``unirun graph``, besides all others."""
