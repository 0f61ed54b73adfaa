"""From a command line to a planned job: options as the mapping of a job file, and likely mistakes.

Later layers win: defaults < ``PET_*`` < job file < ``key=value`` < options.
"""

from __future__ import annotations

import difflib
import os
import re
import secrets
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from unirun.cli.commandline import (
    CommandLine,
    RoleItem,
    from_environment,
    items,
    role_items,
    service_items,
)
from unirun.cli.commands import SUBCOMMANDS
from unirun.collocation import (
    Inventory,
    count_slots,
    is_fake,
    local_inventory,
    local_topology,
    parse_fake,
    unknown_nodes,
)
from unirun.collocation.host import told_topology
from unirun.collocation.placing import TopologyOf
from unirun.errors import Fault, SpecError, UsageError
from unirun.launcher.foreground.terminal import warn
from unirun.launcher.planned import PlannedJob, plan
from unirun.spec.entries import is_function
from unirun.spec.job import JobSpec
from unirun.spec.parse import parse_job
from unirun.spec.read import id_stem, nearest
from unirun.spec.roles import (
    ENTRY_KINDS,
    HANG_KEYS,
    NAME,
    ONE_NODE,
    RESTART_KEYS,
    TRAINER,
    NodeCount,
    python_path,
)
from unirun.spec.yaml import is_override, merge
from unirun.values import natural

# Options as the mapping of a job file.


def options_to_job(
    options: Mapping[str, Any],
    known: Sequence[str],
    *,
    trained: bool = False,
    alone: bool = True,
    script: bool = False,
    served: Collection[str] = (),
) -> dict[str, Any]:
    """Options as the mapping that a job file would be.

    `known`: the roles that the file already has, of which `served` are services; `trained`: whether there is a trainer,
    here or there; `alone`: whether the job has one host; `script`: whether there is one, so that a job of services has
    a role beside them.
    """
    job: dict[str, Any] = {}
    roles: dict[str, dict[str, Any]] = {}
    faults: list[Fault] = []
    named = role_items(options)
    if "roles" in options and not named:
        faults.append(Fault("--roles", "it names no role", "write --roles actor=4,rollout=4"))
    for item in named:
        _add_role(item, roles, faults)
    for service in service_items(options):
        _add_service(service, roles, faults)
    services = {*served, *(item.name for item in service_items(options))}
    if services and not named and not known and "role" not in options and script:
        roles["default"] = {}
    if "role" in options:
        if roles.keys() - services or known:
            raise UsageError("--role names the only role; there are several", "use --roles alone")
        roles[options["role"]] = {}
    if "trainer" in options:
        job["trainer"] = {"class": options["trainer"]}
    names = [*dict.fromkeys([*roles, *known])]
    scope = _Scope(job, roles, names, faults, trained=trained, services=services)
    scope.scoped("script", options.get("script", ()), needs_role=True)
    scope.folders(options.get("cwd", ()))
    for key in (*RESTART_KEYS, *HANG_KEYS):
        scope.scoped(key, options.get(key, ()))
    scope.scoped("count", options.get("nproc_per_node", ()), job_key="nproc_per_node")
    scope.scoped("component", options.get("component", ()), needs_role=True)
    scope.scoped("slots", options.get("slots", ()), needs_role=True)
    scope.scoped("ready", options.get("ready", ()), needs_role=True)
    scope.order(options.get("after", ()))
    scope.environment(options.get("env", ()))
    if roles:
        job["roles"] = roles
    for option, key in _VALUES.items():
        if option in options:
            job[key] = options[option]
    for option, key in _LISTS.items():
        if option in options:
            value = options[option]
            job[key] = items([value] if isinstance(value, str) else value)
    _nodes(options, job, alone=alone)
    _output(options, job)
    if faults:
        raise SpecError(faults)
    return job


def _add_role(item: RoleItem, roles: dict[str, dict[str, Any]], faults: list[Fault]) -> None:
    name, colon, count = item.name.partition(":")
    if colon and item.count is None:
        faults.append(Fault("--roles", f"{item.name!r} is no role", f"write {name}={count or 1}"))
    elif item.name in roles:
        problem = f"role {item.name!r} is there twice"
        faults.append(Fault("--roles", problem, "give each role one name and number"))
    else:
        roles[item.name] = {} if item.count is None else {"count": item.count}


def _add_service(item: RoleItem, roles: dict[str, dict[str, Any]], faults: list[Fault]) -> None:
    if item.name in roles:
        faults.append(Fault("--service", f"role {item.name!r} is there twice", "give each role one name"))
        return
    program, *args = item.command
    command = {"program": program, "args": args, "service": True}
    roles[item.name] = command if item.count is None else {"count": item.count, **command}


class _Scope:
    """Puts ``ROLE=value`` into the mapping of its role, and a bare ``value`` into that of the job."""

    def __init__(
        self,
        job: dict[str, Any],
        roles: dict[str, dict[str, Any]],
        names: list[str],
        faults: list[Fault],
        *,
        trained: bool,
        services: Collection[str],
    ) -> None:
        self._services = services
        self._job, self._roles, self._faults, self._trained = job, roles, faults, trained
        self._names = [*names, TRAINER] if trained else names

    def scoped(self, key: str, values: Any, *, needs_role: bool = False, job_key: str | None = None) -> None:
        option = f"--{(job_key or key).replace('_', '-')}"
        for value in values:
            role, equals, rest = value.partition("=")
            if not equals and not needs_role:
                self._job[job_key or key] = value
            elif not equals:
                self._faults.append(Fault(option, f"{value!r} names no role", f"write ROLE={value}"))
            elif self._known(role, option):
                self._of(role)[key] = rest

    def order(self, values: Any) -> None:
        """``train=engine,router``; without a role, for all that are no services."""
        for value in values:
            role, equals, rest = value.rpartition("=")
            waited = items([rest])
            every = [name for name in self._names if name not in self._services and name not in waited]
            if not equals and not every:
                remedy = f"name a service: --service 'engine: PROGRAM …', or write ROLE={rest}"
                self._faults.append(Fault("--after", f"no role is there that waits for {rest}", remedy))
            for name in [role] if equals else every:
                if self._known(name, "--after"):
                    self._of(name).setdefault("after", []).extend(waited)

    def folders(self, values: Any) -> None:
        """Working directories, whose names may hold an equals sign themselves."""
        for value in values:
            role, equals, rest = value.partition("=")
            if equals and (role in self._names or (NAME.fullmatch(role) and not os.path.isdir(value))):
                if self._known(role, "--cwd"):
                    self._of(role)["cwd"] = rest
            else:
                self._job["cwd"] = value

    def environment(self, values: Any) -> None:
        for value in values:
            name, equals, text = value.partition("=")
            if not equals:
                self._faults.append(Fault("--env", f"{value!r} has no value", "write K=V or ROLE:K=V"))
                continue
            role, colon, variable = name.rpartition(":")
            if not colon:
                self._job.setdefault("env", {})[name] = text
            elif self._known(role, "--env"):
                self._of(role).setdefault("env", {})[variable] = text

    def _of(self, role: str) -> dict[str, Any]:
        if self._trained and role == TRAINER:
            trainer: dict[str, Any] = self._job.setdefault("trainer", {})
            return trainer
        return self._roles.setdefault(role, {})

    def _known(self, role: str, option: str) -> bool:
        if role in self._names or (not self._names and role == "default"):
            return True
        remedy = nearest(role, self._names) if self._names else "there are no --roles"
        self._faults.append(Fault(option, f"no role is called {role!r}", remedy))
        return False


_SAME = (
    "name",
    "start_method",
    "shutdown_timeout",
    "virtual_local_rank",
    "numa_binding",
    "call_timeout",
    "transport",
    "max_job_restarts",
    "notify_command",
)
_VALUES = {
    **{option: option for option in (*_SAME, "stdin")},
    "rdzv_id": "run_id",
    "monitor_interval": "sample_interval",
    "event_log_handler": "event_log",
}
"""Options whose value is that of a key of the job."""

_LISTS = {
    "primary": "primary",
    "preload": "preload",
    "exclude": "exclude_nodes",
    "signals_to_handle": "signals",
}
"""Options with items between commas, and the keys of the job."""


def several_nodes(options: Mapping[str, Any]) -> bool:
    """Return True if the job is one of several hosts: they are named, or this command is one of as many. Raises
    `UsageError`."""
    if "hosts" in options or "hostfile" in options:
        return True
    least, most = node_count(options)
    named = "rdzv_endpoint" in options or "master_addr" in options
    return most > 1 and "inventory" not in options and not options.get("standalone") and (least > 1 or named)


def node_count(options: Mapping[str, Any]) -> NodeCount:
    """``--nnodes``: ``N`` or ``MIN:MAX``. Raises `UsageError`."""
    text = str(options.get("nnodes", "1"))
    low, colon, high = text.partition(":")
    try:
        least, most = int(low), int(high if colon else low)
    except ValueError as error:
        raise UsageError(f"--nnodes {text:.80}: expected N or MIN:MAX", "for example --nnodes 2") from error
    if not 0 < least <= most:
        raise UsageError(
            f"--nnodes {text}: expected at least 1, and no more than MAX", "for example --nnodes 2"
        )
    return least, most


def _nodes(options: Mapping[str, Any], job: dict[str, Any], *, alone: bool) -> None:
    for item in rendezvous_settings(options)[0]:
        _rendezvous_setting(item, job, alone=alone)
    if not alone:
        return
    node_count(options)
    if str(options.get("node_rank", "0")) != "0":
        raise UsageError("--node-rank: on one node the rank of the node is 0", "leave it out")
    backend = options.get("rdzv_backend", "static")
    if backend not in ("static", "c10d"):
        raise UsageError(
            f"--rdzv-backend {backend}: on one node only static and c10d apply",
            "leave it out; unirun holds the rendezvous itself",
        )
    if options.get("standalone"):
        for option in ("rdzv_backend", "rdzv_endpoint", "rdzv_id"):
            job.pop({"rdzv_id": "run_id"}.get(option, ""), None)
    elif options.get("rdzv_endpoint"):
        host, colon, port = options["rdzv_endpoint"].rpartition(":")
        job["master_addr"] = (host if colon else port).strip("[]")
        if colon:
            job["master_port"] = port
    for option in ("local_addr", "master_addr"):
        if option in options:
            # torchrun wants an IPv6 address in brackets.
            job["master_addr"] = options[option].removeprefix("[").removesuffix("]")
    if "master_port" in options:
        job["master_port"] = options["master_port"]


CAS_BACKOFF = "cas_backoff_max_seconds"
"""A setting of torch 2.15, the only one with a fraction."""

BETWEEN_NODES = (
    *("last_call_timeout", "close_timeout", "heartbeat_timeout", "read_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt", CAS_BACKOFF),
)
"""Settings of c10d between nodes: they have no effect on one node."""

ONE_NODE_OPTIONS = {"is_host": ("1", "true", "t", "yes", "y"), "store_type": ("tcp",), "rank": ("0",)}
"""Settings that must have these values on one node: it hosts the rendezvous in a TCPStore, and has rank 0."""


def rendezvous_settings(options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The items ``key=value`` of ``--rdzv-conf``, and the ignored ones. A shell removes quotes, but a list of
    arguments keeps them. Then they are part of the first key and of the last value; torchrun does not know
    such a key, and ignores it.
    """
    text = str(options.get("rdzv_conf", "")).strip()
    found = items([text])
    if text[:1] not in ("'", '"') or text[-1:] != text[:1]:
        return found, []
    return found[1:-1], [*found[:1], *found[1:][-1:]]


def _rendezvous_setting(item: str, job: dict[str, Any], *, alone: bool) -> None:
    """One ``key=value`` of ``--rdzv-conf``."""
    key, equals, value = (part.strip() for part in item.partition("="))
    known = ("join_timeout", "timeout", *BETWEEN_NODES, *ONE_NODE_OPTIONS)
    if not equals or not value or key not in known:
        remedy = nearest(key, known) if value else "write key=value"
        raise UsageError(f"--rdzv-conf {item}: no setting of a rendezvous", remedy)
    if key in ONE_NODE_OPTIONS and alone:
        if value.lower() not in ONE_NODE_OPTIONS[key]:
            raise UsageError(
                f"--rdzv-conf {item}: on one node only {ONE_NODE_OPTIONS[key][0]} applies", "leave it out"
            )
    elif key in (*BETWEEN_NODES, *ONE_NODE_OPTIONS):
        whole = value.replace(".", "", 1) if key == CAS_BACKOFF else value
        if key in BETWEEN_NODES and natural(whole) is None:
            raise UsageError(f"--rdzv-conf {item}: expected a whole number", "leave it out")
    else:
        job["join_timeout"] = value


def _output(options: Mapping[str, Any], job: dict[str, Any]) -> None:
    if options.get("logs_specs", "default") != "default":
        raise UsageError(
            "--logs-specs: unirun keeps all output in <job>/logs, a LogsSpecs class has nothing to decide",
            "use --log-dir, --redirects, --tee or the filters",
        )
    names = {"log_dir": "dir", "redirects": "redirects", "tee": "tee"}
    log: dict[str, Any] = {key: options[option] for option, key in names.items() if option in options}
    for option, key in (
        ("local_ranks_filter", "local_ranks_filter"),
        ("log_line_prefix_template", "line_prefix_template"),
    ):
        if options.get(option):
            log[key] = options[option]
    for option in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
        if option in options:
            text = options[option].replace(",,", "\0")
            log[option] = [word.replace("\0", ",") for word in text.split(",")]
    if log:
        job["log"] = log


# Likely mistakes in a command line and its environment: some are refused, of others the user is warned.

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
    if "=" in (named := line.options.get("role") or ""):
        raise UsageError(f"--role has a name, and {named!r} is none", f"write --roles {named}")
    if word is None or os.path.exists(word) or {"module", "no_python", "cwd"} & line.options.keys():
        return
    if "=" in word:
        _refuse_assignment(word, line)
    if natural(word) is not None and "roles" in line.options:
        roles = ",".join(line.options["roles"])
        raise UsageError(f"{word} stands where the script is expected", f"write --roles {roles}={word}")
    if "config" in line.options and _KEY.fullmatch(word):
        raise UsageError(f"{word} has no value", f"write {word}=VALUE, without blanks")
    if "." in word or "/" in word:
        return
    if word in SUBCOMMANDS:
        raise UsageError(f"{word} is a command, and stands before all options", f"write unirun {word} …")
    if word in _INSTEAD:
        raise UsageError(f"there is no command and no script {word!r}", _INSTEAD[word])
    if os.path.exists(f"{word}.py"):
        # The script whose ending was left out; the error about it says so.
        return
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
    """The number in `text`; 0 for any other text, which torch takes for a variable that is not set."""
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


def plan_job(line: CommandLine) -> PlannedJob:
    """The job that a command line describes, with its placement. Likely mistakes are written to stderr.

    Raises `SpecError`, `UsageError`, `PlacementError`.
    """
    # Workers are started in it.
    os.getcwd()
    if several_nodes({**defaults_of(line, os.environ), **line.options}):
        raise UsageError(
            "what hosts have is known when they are asked", "plan with --inventory fake:nodes=2,…"
        )
    inventory = inventory_of(line)
    spec = job_spec(
        line, inventory, nodes=node_count(line.options) if "inventory" in line.options else ONE_NODE
    )
    tell_mistakes(line, spec, inventory)
    return plan(spec, inventory, topology_of(line))


def tell_mistakes(line: CommandLine, spec: JobSpec, inventory: Inventory) -> None:
    """Write what is probably a mistake to stderr."""
    if "quiet" not in line.options:
        for warning in (*warnings(line, spec, os.environ), *unknown_nodes(spec, inventory)):
            warn(warning)


def inventory_of(line: CommandLine) -> Inventory:
    """The nodes that ``--inventory`` describes; without it, this host. Raises `SpecError` or `UsageError`."""
    text = line.options.get("inventory")
    if text is None:
        return local_inventory()
    if not is_fake(text):
        raise UsageError(f"--inventory {text!r} is none that is known", "write fake:nodes=4,devices=8,numa=2")
    return parse_fake(text)


def topology_of(line: CommandLine) -> TopologyOf:
    """The function that finds the topology of a node: that of simulated nodes is in the inventory."""
    return told_topology if "inventory" in line.options else local_topology


def job_spec(
    line: CommandLine,
    inventory: Inventory,
    environ: Mapping[str, str] = os.environ,
    *,
    nodes: NodeCount = ONE_NODE,
    here: bool = True,
) -> JobSpec:
    """The spec that a command line describes, for a job of as many `nodes`; for `here` see `parse_job`.

    Raises `SpecError` or `UsageError`.
    """
    refuse_mistakes(line)
    file: dict[str, Any] = {}
    if "config" in line.options:
        from unirun.spec.yaml import load_job_file

        file = load_job_file(line.options["config"], line.overrides)
    named = role_items(line.options)
    in_file = file["roles"] if isinstance(file.get("roles"), Mapping) else {}
    trained = "trainer" in line.options or "trainer" in file
    # PET_ROLE names the only role of a job, so the roles of all layers are known to the first one.
    known = [*(item.name for item in named), *in_file]
    defaults = defaults_of(line, environ)
    alone = nodes == ONE_NODE
    data = options_to_job(defaults, known, trained=trained, alone=alone)
    merge(data, file)
    known = [*data["roles"]] if isinstance(data.get("roles"), dict) else []
    script = line.script is not None or any(data.get(kind) for kind in ENTRY_KINDS)
    served = [name for name in known if _is_service(data["roles"][name])]
    ours = options_to_job(line.options, known, trained=trained, alone=alone, script=script, served=served)
    merge(data, ours)
    for item in named:
        if item.target is not None:
            _set_target(data, item.name, item.target)
    if "trainer" in line.options and not data.get("roles"):
        raise UsageError("--trainer has nobody to call without roles", "add --roles actor=4@pkg.mod:Class")
    _set_entry(data, line, {**defaults, **line.options})
    if "shutdown_timeout" not in data and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in environ:
        data["shutdown_timeout"] = environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    spec = parse_job(
        data,
        count_slots=lambda kind: count_slots(kind, inventory),
        run_id=_new_id(data, line.script),
        nodes=nodes,
        here=here,
    )
    if spec.numa_binding and not any(node.devices for node in inventory.nodes):
        raise UsageError(
            "--numa-binding follows the workers' GPUs, and there are none",
            "leave it out, or bind with numactl",
        )
    return spec


def _is_service(role: Any) -> bool:
    """Return True for a role that says so, and for a ready-made one (``kind``)."""
    return isinstance(role, Mapping) and bool(role.get("service", role.get("kind")))


def defaults_of(line: CommandLine, environ: Mapping[str, str]) -> dict[str, Any]:
    """The options of ``PET_*`` that the command line does not replace.

    Options that may be given several times add up, because each may be about another role.
    """
    replaced = {name for name in line.options if name not in ("nproc_per_node", "max_restarts")}
    if line.options.get("standalone"):
        replaced |= {"rdzv_backend", "rdzv_endpoint", "rdzv_id"}
    return {name: value for name, value in from_environment(environ).items() if name not in replaced}


def _set_target(data: Mapping[str, Any], name: str, target: str) -> None:
    """Set what ``--roles NAME=N@TARGET`` runs: a function if the source of its module shows one, else a workload."""
    role = data["roles"][name]
    folders = [str(role.get("cwd") or data.get("cwd") or "."), *python_path(role.get("env"), data.get("env"))]
    role["function" if is_function(target, folders) else "workload"] = target


def _new_id(data: Mapping[str, Any], script: str | None) -> str:
    trainer = data.get("trainer")
    driver = str(trainer.get("class") or "").partition(":")[0] if isinstance(trainer, Mapping) else ""
    stem = str(data.get("name") or os.path.basename(script or "") or driver).removesuffix(".py")
    return f"{id_stem(stem)}-{secrets.token_hex(3)}"


def _set_entry(data: dict[str, Any], line: CommandLine, options: Mapping[str, Any]) -> None:
    """Set what the positional script is: a file, or what -m and --no-python in `options` make of it.

    With --no-python it has torchrun's variables, as under torchrun; programs of roles in a job file do not.
    """
    kinds = [kind for kind, name in (("module", "module"), ("program", "no_python")) if options.get(name)]
    if len(kinds) == 2:
        raise UsageError("-m and --no-python exclude each other", "a program is not a module")
    if options.get("run_path"):
        if kinds == ["module"]:
            raise UsageError("--run-path runs a file, not a module", "leave out -m")
        kinds = []
        data.setdefault("start_method", "fork")
    roles = data["roles"].values() if isinstance(data.get("roles"), Mapping) else ()
    # By role: whether it has an entry of its own. Without roles there is one that has none.
    own = [
        isinstance(role, Mapping) and any(role.get(key) for key in (*ENTRY_KINDS, "kind")) for role in roles
    ]
    if line.script is not None:
        for kind in ENTRY_KINDS:
            data.pop(kind, None)
        data[kinds[0] if kinds else "script"] = line.script
        if own and all(own):
            problem = f"no role runs {line.script}: each has an entry of its own"
            raise UsageError(problem, "arguments for all of them follow --")
    elif kinds and "script" in data:
        data[kinds[0]] = data.pop("script")
    elif kinds and kinds[0] not in data:
        option = "-m" if kinds == ["module"] else "--no-python"
        raise UsageError(
            f"{option} says what the script is, and no script for all roles is named",
            f"in a job file, a role may have a {kinds[0]} of its own",
        )
    if kinds == ["program"] and "contract" not in data:
        for role in roles:
            if isinstance(role, dict) and (role.get("program") or role.get("kind")):
                role.setdefault("contract", "none")
        data["contract"] = "torchrun"
    if line.args or line.script is not None:
        data["args"] = list(line.args)
    if line.args and line.script is None and not any((*own, *map(data.get, ENTRY_KINDS))):
        raise UsageError("there are arguments but no script", "name the script before them")
