"""Options as the mapping of a job file."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from unirun.cli.commandline import RoleItem, ServiceItem, items, role_items, service_items
from unirun.errors import Fault, SpecError, UsageError
from unirun.spec.read import nearest
from unirun.spec.roles import NAME, TRAINER, NodeCount


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
    scope.scoped("max_restarts", options.get("max_restarts", ()))
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


def _add_service(item: ServiceItem, roles: dict[str, dict[str, Any]], faults: list[Fault]) -> None:
    if item.name in roles:
        faults.append(Fault("--service", f"role {item.name!r} is there twice", "give each role one name"))
        return
    command = {"program": item.words[0], "args": [*item.words[1:]], "service": True}
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

ONE_NODE = {"is_host": ("1", "true", "t", "yes", "y"), "store_type": ("tcp",), "rank": ("0",)}
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
    known = ("join_timeout", "timeout", *BETWEEN_NODES, *ONE_NODE)
    if not equals or not value or key not in known:
        remedy = nearest(key, known) if value else "write key=value"
        raise UsageError(f"--rdzv-conf {item}: no setting of a rendezvous", remedy)
    if key in ONE_NODE and alone:
        if value.lower() not in ONE_NODE[key]:
            raise UsageError(
                f"--rdzv-conf {item}: on one node only {ONE_NODE[key][0]} applies", "leave it out"
            )
    elif key in (*BETWEEN_NODES, *ONE_NODE):
        whole = value.replace(".", "", 1) if key == CAS_BACKOFF else value
        if key in BETWEEN_NODES and not (whole.isascii() and whole.isdecimal()):
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
