"""From options, the environment and YAML to one mapping, and from that to a `JobSpec`.

Later layers win: defaults < ``PET_*`` < YAML < ``key=value`` < flags.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from unirun.cli.options import CommandLine, from_environment, items
from unirun.cli.slips import refuse_slip
from unirun.collocation import Inventory, count_slots
from unirun.errors import Fault, SpecError, UsageError
from unirun.names import id_stem
from unirun.spec import JobSpec, parse_job
from unirun.spec.read import nearest
from unirun.spec.roles import ENTRY_KINDS, NAME, TRAINER


def job_spec(line: CommandLine, inventory: Inventory, environ: Mapping[str, str] = os.environ) -> JobSpec:
    """The spec that a command line describes. Raises `SpecError` or `UsageError`."""
    file: dict[str, Any] = {}
    refuse_slip(line)
    if "config" in line.options:
        from unirun.spec.yaml import load_job_file

        file = load_job_file(line.options["config"], line.overrides)
    data: dict[str, Any] = {}
    trained = "trainer" in line.options or "trainer" in file
    _merge(data, options_to_job(_defaults(line, environ), _names(line, file), trained=trained))
    _merge(data, file)
    known = data["roles"] if isinstance(data.get("roles"), dict) else {}
    _merge(data, options_to_job(line.options, known, trained=trained))
    if "trainer" in line.options and not data.get("roles"):
        raise UsageError("--trainer has nobody to call without roles", "add --roles actor=4@pkg.mod:Class")
    _set_entry(data, line)
    if "shutdown_timeout" not in data and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in environ:
        data["shutdown_timeout"] = environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    spec = parse_job(
        data, count_slots=lambda kind: count_slots(kind, inventory), run_id=_new_id(data, line.script)
    )
    if spec.numa_binding and not any(node.devices for node in inventory.nodes):
        raise UsageError(
            "--numa-binding follows the workers' GPUs, and there are none",
            "leave it out, or bind with numactl",
        )
    return spec


def _defaults(line: CommandLine, environ: Mapping[str, str]) -> dict[str, Any]:
    """What ``PET_*`` says where the command line says nothing: a flag replaces its variable, right or wrong.

    Options that may be given several times add up, as each may be about another role.
    """
    replaced = {name for name in line.options if name not in ("nproc_per_node", "max_restarts")}
    if line.options.get("standalone"):
        replaced |= {"rdzv_backend", "rdzv_endpoint", "rdzv_id"}
    return {name: value for name, value in from_environment(environ).items() if name not in replaced}


def _names(line: CommandLine, file: Mapping[str, Any]) -> dict[str, Any]:
    """The roles that flags and file name, to tell whether there is a place for ``PET_ROLE``."""
    roles = file.get("roles")
    given = items(line.options.get("roles", ()))
    flags = [item.partition("@")[0].partition("=")[0] for item in given]
    return dict.fromkeys([*flags, *(roles if isinstance(roles, Mapping) else ())])


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, Mapping):
            if not isinstance(base.get(key), dict):
                base[key] = {}
            _merge(base[key], value)
        else:
            base[key] = value


def _new_id(data: Mapping[str, Any], script: str | None) -> str:
    trainer = data.get("trainer")
    driver = str(trainer.get("class") or "").partition(":")[0] if isinstance(trainer, Mapping) else ""
    stem = str(data.get("name") or os.path.basename(script or "") or driver).removesuffix(".py")
    return f"{id_stem(stem)}-{secrets.token_hex(3)}"


def _set_entry(data: dict[str, Any], line: CommandLine) -> None:
    """The positional script, as the kind that -m and --no-python make of it."""
    kinds = [kind for kind in ("module", "program") if data.pop(f"_{kind}", False)]
    if len(kinds) == 2:
        raise UsageError("-m and --no-python exclude each other", "a program is not a module")
    if data.pop("_run_path", False):
        if kinds == ["module"]:
            raise UsageError("--run-path runs a file, not a module", "leave out -m")
        kinds = []
        data.setdefault("start_method", "fork")
    if line.script is not None:
        for kind in ENTRY_KINDS:
            data.pop(kind, None)
        data[kinds[0] if kinds else "script"] = line.script
        if not _somebody_runs_it(data):
            raise UsageError(
                f"no role runs {line.script}: each has an entry of its own",
                "arguments for all of them follow --",
            )
    elif kinds and "script" in data:
        data[kinds[0]] = data.pop("script")
    elif kinds and kinds[0] not in data:
        option = "-m" if kinds == ["module"] else "--no-python"
        raise UsageError(
            f"{option} says what the script is, and no script for all roles is named",
            f"in a job file, a role may have a {kinds[0]} of its own",
        )
    if line.args or line.script is not None:
        data["args"] = list(line.args)
    if line.args and line.script is None and not _anything_to_run(data):
        raise UsageError("there are arguments but no script", "name the script before them")


def _anything_to_run(data: Mapping[str, Any]) -> bool:
    return any(place.get(k) for place in (data, *_role_mappings(data)) for k in ENTRY_KINDS)


def _somebody_runs_it(data: Mapping[str, Any]) -> bool:
    """Whether there is a role without an entry of its own; without roles there is one that is made."""
    own = [any(role.get(kind) for kind in ENTRY_KINDS) for role in _role_mappings(data)]
    return not data.get("roles") or not all(own)


def _role_mappings(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    roles = data.get("roles")
    values = roles.values() if isinstance(roles, Mapping) else ()
    return [role if isinstance(role, Mapping) else {} for role in values]


def options_to_job(
    options: Mapping[str, Any], known: Mapping[str, Any], *, trained: bool = False
) -> dict[str, Any]:
    """Options as the mapping that a job file would be.

    `known`: the roles that the file already has; `trained`: whether there is a trainer, here or there.
    """
    job: dict[str, Any] = {}
    roles: dict[str, dict[str, Any]] = {}
    faults: list[Fault] = []
    if "roles" in options and not items(options["roles"]):
        faults.append(Fault("--roles", "it names no role", "write --roles actor=4,rollout=4"))
    for item in items(options.get("roles", ())):
        _add_role(item, roles, faults)
    if "role" in options:
        if roles or known:
            raise UsageError("--role names the only role; there are several", "use --roles alone")
        roles[options["role"]] = {}
    if "trainer" in options:
        job["trainer"] = {"class": options["trainer"]}
    scope = _Scope(job, roles, [*dict.fromkeys([*roles, *known])], faults, trained=trained)
    scope.scoped("script", options.get("script", ()), needs_role=True)
    scope.folders(options.get("cwd", ()))
    scope.scoped("max_restarts", options.get("max_restarts", ()))
    scope.scoped("count", options.get("nproc_per_node", ()), job_key="nproc_per_node")
    scope.environment(options.get("env", ()))
    if "primary" in options:
        job["primary"] = list(items(options["primary"]))
    if "preload" in options:
        job["preload"] = list(items(options["preload"]))
    if "exclude" in options:
        job["exclude_nodes"] = items(options["exclude"])
    if roles:
        job["roles"] = roles
    _plain(options, job)
    _nodes(options, job)
    _output(options, job)
    if faults:
        raise SpecError(faults)
    return job


def _add_role(item: str, roles: dict[str, dict[str, Any]], faults: list[Fault]) -> None:
    head, at, workload = item.partition("@")
    name, equals, count = (part.strip() for part in head.partition("="))
    if ":" in name and not equals:
        name, _, count = name.partition(":")
        faults.append(Fault("--roles", f"{item!r} is no role", f"write {name}={count or 1}"))
        return
    if name in roles:
        faults.append(Fault("--roles", f"role {name!r} is there twice", "give each role one name and number"))
        return
    roles[name] = {"count": count} if equals else {}
    if at:
        roles[name]["workload"] = workload


class _Scope:
    """Puts ``ROLE=value`` under its role and a bare ``value`` at the job."""

    def __init__(
        self,
        job: dict[str, Any],
        roles: dict[str, dict[str, Any]],
        names: list[str],
        faults: list[Fault],
        *,
        trained: bool,
    ) -> None:
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


_PLAIN = {
    "name": "name",
    "rdzv_id": "run_id",
    "start_method": "start_method",
    "monitor_interval": "sample_interval",
    "shutdown_timeout": "shutdown_timeout",
    "virtual_local_rank": "virtual_local_rank",
    "numa_binding": "numa_binding",
    "event_log_handler": "event_log",
    "call_timeout": "call_timeout",
    "transport": "transport",
    "stdin": "stdin",
    "module": "_module",
    "no_python": "_program",
    "run_path": "_run_path",
}


def _plain(options: Mapping[str, Any], job: dict[str, Any]) -> None:
    for option, key in _PLAIN.items():
        if option in options:
            job[key] = options[option]
    if "signals_to_handle" in options:
        job["signals"] = items([options["signals_to_handle"]])


def _nodes(options: Mapping[str, Any], job: dict[str, Any]) -> None:
    _one_node(str(options.get("nnodes", "1")))
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
    for item in items([options.get("rdzv_conf", "")]):
        _rendezvous_setting(item, job)


def _one_node(nnodes: str) -> None:
    """``1``, or ``MIN:MAX`` with one node as the least: then the job starts with the one that is there."""
    least, colon, most = nnodes.partition(":")
    try:
        low, high = int(least), int(most if colon else least)
    except ValueError as error:
        raise UsageError(f"--nnodes {nnodes:.80}: expected N or MIN:MAX", "use --nnodes 1") from error
    if not 0 < low <= high:
        raise UsageError(f"--nnodes {nnodes}: expected at least 1, and no more than MAX", "use --nnodes 1")
    if low > 1:
        raise UsageError(
            f"--nnodes {nnodes}: this version of unirun runs on one node, and the job wants {low}",
            "use --nnodes 1, or 1:MAX when one is enough",
        )


BETWEEN_NODES = (
    *("last_call_timeout", "close_timeout", "heartbeat_timeout", "read_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt"),
)
"""Settings of c10d for what nodes do with each other: one node satisfies them, whatever their number is."""

ONE_NODE = {"is_host": ("1", "true", "t", "yes", "y"), "store_type": ("tcp",), "rank": ("0",)}
"""Settings that one node satisfies with these values: it holds the rendezvous, in a TCPStore, and has rank 0."""


def _rendezvous_setting(item: str, job: dict[str, Any]) -> None:
    """One ``key=value`` of ``--rdzv-conf``."""
    key, equals, value = (part.strip() for part in item.partition("="))
    known = ("join_timeout", "timeout", *BETWEEN_NODES, *ONE_NODE)
    if not equals or not value or key not in known:
        remedy = nearest(key, known) if value else "write key=value"
        raise UsageError(f"--rdzv-conf {item}: no setting that a rendezvous of one node has", remedy)
    if key in ONE_NODE:
        if value.lower() not in ONE_NODE[key]:
            raise UsageError(
                f"--rdzv-conf {item}: on one node only {ONE_NODE[key][0]} applies", "leave it out"
            )
    elif key in BETWEEN_NODES:
        if not value.isascii() or not value.isdecimal():
            raise UsageError(
                f"--rdzv-conf {item}: expected a whole number", "leave it out: on one node it does nothing"
            )
    else:
        job["join_timeout"] = value


def _output(options: Mapping[str, Any], job: dict[str, Any]) -> None:
    if "logs_specs" in options:
        raise UsageError(
            "--logs-specs: unirun keeps all output in <job>/logs, a LogsSpecs class has nothing to decide",
            "use --log-dir, --redirects, --tee or the filters",
        )
    names = {"log_dir": "dir", "redirects": "redirects", "tee": "tee"}
    log: dict[str, Any] = {key: options[option] for option, key in names.items() if option in options}
    if options.get("local_ranks_filter"):
        log["local_ranks_filter"] = options["local_ranks_filter"]
    for option in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
        if option in options:
            text = options[option].replace(",,", "\0")
            log[option] = [word.replace("\0", ",") for word in text.split(",")]
    if log:
        job["log"] = log
