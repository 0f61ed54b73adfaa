"""A trial as a job: its files, the job file that the command runs, which trials there are, a trial as text."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec

from unirun import atomic
from unirun.collocation.graph import Edge, Role
from unirun.collocation.graph import RoleGraph as Picture
from unirun.collocation.graph.svg import svg
from unirun.errors import JobError, UsageError
from unirun.experiments.config import ExperimentScheduling, ExpStatus, Resolved, Scheduling, TasksGroup
from unirun.experiments.experiment import ExperimentConfig, Trial, check_names
from unirun.experiments.graph import ModelName, ProcessTopology
from unirun.launcher.hostlist import expand_nodelist
from unirun.observe.jobdir import job_at, unirun_home
from unirun.observe.ownership import exposure, make_private
from unirun.observe.status import ENDED, read_status
from unirun.wire.reporting import report

# An experiment as text: its configuration, where its models are, and its graph.


def show(config: ExperimentConfig) -> str:
    """The resolved configuration, in JSON, then the placement and the graph."""
    resolved = config.resolved
    assert resolved is not None
    rows = [
        f"{name!s:16} {topo!s:32} workers {', '.join(map(str, resolved.workers_of(name)))}"
        for name, topo in resolved.topologies.items()
    ]
    graph = [
        f"{number}. " + ", ".join(f"{name} ({resolved.graph.calls[name].model_name})" for name in level)
        for number, level in enumerate(resolved.graph.levels(), 1)
    ]
    edges = [f"{a} -> {b}: {', '.join(keys)}" for a, b, keys in resolved.graph.edges]
    return "\n".join(
        [
            json.dumps(plain(config), indent=1),
            "",
            "models:",
            *(f"  {row}" for row in rows),
            "calls, those of one line at the same time where their workers differ:",
            *(f"  {row}" for row in graph),
            "data:",
            *(f"  {row}" for row in edges),
            "parameters:",
            *(f"  {a} -> {b}" for a, b in resolved.sync_param_pairs),
            "",
        ]
    )


def picture(resolved: Resolved) -> str:
    """The graph as SVG: calls with their models, and the data between them."""
    graph = resolved.graph
    names = {name: f"{name} ({call.model_name})" for name, call in graph.calls.items()}
    roles = tuple(
        Role(names[name], resolved.topologies[call.model_name].world_size())
        for name, call in graph.calls.items()
    )
    edges = tuple(
        Edge(names[producer], names[consumer], invocation=", ".join(keys), kind="")
        for producer, consumer, keys in graph.edges
    )
    return svg(Picture(roles, edges))


def plain(value: Any) -> Any:
    """A value of a configuration as JSON has it."""
    if isinstance(value, ModelName):
        return str(value)
    if isinstance(value, ProcessTopology):
        return dict(zip(value.axes, value.dims, strict=True))
    if dataclasses.is_dataclass(value):
        shown = (field for field in dataclasses.fields(value) if field.name != "resolved")
        return {field.name: plain(getattr(value, field.name)) for field in shown}
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        # The order of a set differs between processes.
        return [plain(each) for each in sorted(value, key=repr)]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        # JSON has no such number, and null would mean None: this is a setting, not a figure.
        return str(value)
    return value if isinstance(value, bool | int | float) or value is None else str(value)


JOB = "job.json"
GRAPH = "graph.svg"
LOCK = "lock"
"""Held by the command of a trial, and by the agents and the master on its host."""

PRELOAD = (
    "transformers.models.llama.modeling_llama",
    "unirun.experiments.models.engine",
    "unirun.experiments.datasets",
    "unirun.experiments.experiment",
    "unirun.experiments.recovery",
)
"""The modules that are imported once, in the spawner, and not by each worker."""


def root_of(top: str, experiment: str, trial: str) -> Path:
    """The directory of a trial; `top` is that of all of them. Raises `UsageError` for names that no path can have."""
    check_names(experiment, trial)
    return _top(top) / experiment / trial


def _top(top: str) -> Path:
    return Path(top).absolute() if top else unirun_home() / "experiments"


def trials(top: str) -> list[Path]:
    """The directories of all trials that were started, by their names."""
    return [path.parent for path in sorted(_top(top).glob(f"*/*/{JOB}")) if job_of(path.parent)]


def job_of(root: Path) -> str:
    """The job of the latest start of the trial in this directory; empty without one."""
    try:
        found = json.loads((root / JOB).read_bytes())
    except (OSError, ValueError):
        return ""
    return str(found.get("run_id", "")) if isinstance(found, dict) else ""


def phase_of(job: str) -> str:
    """The phase of a trial: the phase of its job; ``gone`` when nothing is known of it any more."""
    try:
        return str(read_status(job_at(job)).phase)
    except (JobError, OSError):
        return "gone"


def trial_status(experiment: str, trial: str, root: str = "") -> ExpStatus:
    """The state of a trial whose directory is below `root` (see ``--root``). Raises `UsageError` for one that was never
    started."""
    job = job_of(root_of(root, experiment, trial))
    if not job:
        raise UsageError(
            f"{experiment}/{trial} was never started", "unirun experiment list shows those that were"
        )
    phase = phase_of(job)
    if phase == "succeeded":
        return ExpStatus.COMPLETE
    return ExpStatus.ABORTED if phase in (*ENDED, "gone") else ExpStatus.RUNNING


def end_of(root: Path, worker: str, since: float) -> tuple[str, str] | None:
    """The worker of the trial's job that has last ended `since` then, in seconds since the epoch, and the way
    in which it ended: ``model_worker:1`` and ``exit code 3``. It is `worker`, or any if that is empty. None
    when it has not ended, or when this host does not know the state of the job."""
    job = job_of(root)
    try:
        failures = read_status(job_at(job)).failures if job else ()
    except (JobError, OSError):
        return None
    ended = (each for each in reversed(failures) if worker in ("", each.who) and each.time >= since)
    return next(((each.who, each.exit) for each in ended), None)


def refuse_running(root: Path) -> None:
    """Raise `UsageError` while the trial runs."""
    job = job_of(root)
    if job and phase_of(job) not in (*ENDED, "gone"):
        raise _runs_already(root, f", as job {job}")


def _runs_already(root: Path, job: str) -> UsageError:
    experiment, trial = root.parts[-2:]
    return UsageError(
        f"trial {trial!r} of {experiment!r} runs already{job}",
        f"wait for its end, or: unirun experiment stop -e {quote(experiment)} -f {quote(trial)}",
    )


def make_root(root: Path) -> None:
    """Make the directory of a trial, for this user only. Raises `UsageError` when another user could replace
    its files, from which the trial goes on; OSError."""
    for _ in range(2):
        exposed = exposure(root)
        if exposed is not None:
            raise UsageError(
                f"the trial is not safe in {root}: {exposed.problem}",
                f"{exposed.remedy}; --root says where trials are",
            )
        # Checked again: another user may have made the directory meanwhile.
        make_private(root)


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold the lock of a trial, whose directory is made. Raises `UsageError` while another command holds it, or when
    the directory is not safe."""
    try:
        make_root(root)
        handle = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UsageError(f"the trial's directory {root} cannot be written: {why}", "see --root") from error
    try:
        _lock(handle, root)
        yield
    finally:
        # Processes that were forked meanwhile have the same lock, which would last as long as they do.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _lock(handle: int, root: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        job = job_of(root)
        raise _runs_already(root, f", its latest job is {job}" if job else "") from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        report(f"unirun: the file system of {root} has no locks: do not start a trial twice at one moment")


def job_mapping(
    trial: Trial, config: ExperimentConfig, scheduling: ExperimentScheduling, preload: Sequence[str] = ()
) -> dict[str, Any]:
    """The job file of a trial, whose workers find `preload` imported. Raises `UsageError` when there are other numbers
    of workers than it schedules."""
    groups, master = worker_groups(config, scheduling), master_needs(scheduling)
    roles = {}
    for kind, group in groups.items():
        if kind == "generation_server":
            roles[kind] = _server_role(config, group)
        else:
            asynchronous = kind == "model_worker" and config.gserver_manager
            roles[kind] = _role(group, ASYNC_WORKER if asynchronous else WORKLOADS[kind])
    return {
        "name": f"{trial.experiment}-{trial.trial}",
        # Each worker sees its own devices only.
        "virtual_local_rank": True,
        "roles": roles,
        "trainer": {
            "class": "unirun.experiments.master:MasterWorkerProcess",
            "env": dict(master.env_vars),
            "max_restarts": 10,
            **_needs(master),
        },
        "config": msgspec.to_builtins(trial),
        "preload": [*PRELOAD, *preload],
        "call_timeout": config.call_timeout,
        "channels": CHANNELS if config.generation_server else {},
    }


WORKLOADS = {
    "model_worker": "unirun.experiments.model_worker:ModelWorkerProcess",
    "evaluator": "unirun.experiments.model_worker:EvaluatorProcess",
    "rollout_worker": "unirun.experiments.rollout_worker:RolloutWorkerProcess",
}

ASYNC_WORKER = "unirun.experiments.async_worker:AsyncModelWorkerProcess"
"""The model worker of an asynchronous trial."""


def worker_groups(config: ExperimentConfig, scheduling: ExperimentScheduling) -> dict[str, TasksGroup]:
    """The workers of a trial besides its master, by role. Raises `UsageError` when there are other numbers of them than
    it schedules."""
    workers = scheduling.model_worker
    groups = {"model_worker": _group("model worker", len(config.model_worker), workers, workers.scheduling)}
    if config.auto_eval:
        groups["evaluator"] = TasksGroup(1, scheduling.evaluator or workers.scheduling)
    if config.gserver_manager:
        usual, count = Scheduling.rollout_worker_default(), len(config.rollout_worker)
        groups["rollout_worker"] = _group("rollout worker", count, scheduling.rollout_worker, usual)
    if config.generation_server:
        usual, count = Scheduling.generation_server_default(), len(config.generation_server)
        group = _group("generation server", count, scheduling.generation_server, usual)
        if group.scheduling.gpu:
            needs = dataclasses.replace(group.scheduling, gpu=config.generation_server[0].tp_size)
            group = TasksGroup(count, needs)
        groups["generation_server"] = group
    return groups


def _group(what: str, count: int, given: TasksGroup | None, usual: Scheduling) -> TasksGroup:
    """`count` workers with what was `given`, or with what is `usual`."""
    if given is not None and given.count != count:
        raise UsageError(
            f"scheduling_setup() has {given.count} {what}s, initial_setup() has {count}",
            "let both follow from the same settings",
        )
    return given or TasksGroup(count, usual)


CHANNELS = {"policy": {"publisher": "model_worker", "receivers": ["generation_server"]}}
"""The versions of the policy, which companions bring into generation servers."""


def _server_role(config: ExperimentConfig, group: TasksGroup) -> dict[str, Any]:
    """The role of the generation servers, which are alike (`checks`)."""
    server, needs = config.generation_server[0], group.scheduling
    args = ["--seed", str(server.base_seed)]
    if server.backend_type == "vllm":
        # Those of the distribution that tokens are drawn from, as the built-in server has them.
        args += ["--logprobs-mode", "processed_logprobs"]
    more = dict(server.backend_args or {})
    loading = {"clear_cache": more.pop("clear_cache", True)}
    if python := more.pop("python", ""):
        loading["python"] = python
    for manager in config.gserver_manager:
        loading["update_timeout"] = manager.flush_request_timeout
    for name, value in more.items():
        # An option without a value; one that is False or None is left out.
        if value is not False and value is not None:
            args += [f"--{name.replace('_', '-')}", *(() if value is True else (str(value),))]
    role = {"kind": server.backend_type, "model": server.model_path, "count": group.count, "args": args}
    device = {"device": "cuda"} if needs.gpu else {"device": "cpu"}
    places = {**device, "slots": server.tp_size, **_needs(needs)}
    return {**role, **loading, **places, "env": dict(needs.env_vars)}


def _role(group: TasksGroup, workload: str) -> dict[str, Any]:
    needs = group.scheduling
    role = {"count": group.count, "workload": workload, "max_restarts": 10, **_needs(needs)}
    if not needs.gpu:
        # On a host with GPUs they see none. Each slot is a processor, to which the worker is bound.
        env = {"CUDA_VISIBLE_DEVICES": "", **needs.env_vars}
        return {**role, "device": "cpu", "slots": max(needs.cpu, 1), "env": env}
    # A type that is named is never replaced by CPU slots.
    return {**role, "device": "cuda", "slots": needs.gpu, "env": dict(needs.env_vars)}


def _needs(needs: Scheduling) -> dict[str, Any]:
    """The processors and the memory of each rank, as keys of a role."""
    cpus = {"cpus": needs.cpu} if needs.cpu > 1 else {}
    return {**cpus, "memory": f"{needs.mem}MiB"} if needs.mem else cpus


def master_needs(scheduling: ExperimentScheduling) -> Scheduling:
    """The needs of the master, which is also the manager of generation servers: the larger ones of both."""
    master, manager = scheduling.master_worker.scheduling, scheduling.gserver_manager
    if manager is None:
        return master
    also = manager.scheduling
    return dataclasses.replace(
        master,
        cpu=max(master.cpu, also.cpu),
        mem=max(master.mem, also.mem),
        env_vars={**also.env_vars, **master.env_vars},
    )


@contextlib.contextmanager
def job_file(root: Path, config: ExperimentConfig, mapping: dict[str, Any], run_id: str) -> Iterator[Path]:
    """The job file of a start in the directory of a trial, beside the picture of the graph. When the block raises and
    there is no job, the job file before is there again."""
    make_root(root)
    assert config.resolved is not None
    atomic.replace(root / GRAPH, picture(config.resolved))
    path = root / JOB
    before = path.read_bytes() if path.exists() else None
    atomic.replace(path, json.dumps({**mapping, "run_id": run_id}, indent=1), lasting=True)
    try:
        yield path
    except BaseException:
        if phase_of(run_id) == "gone":
            if before is None:
                path.unlink()
            else:
                atomic.replace(path, before, lasting=True)
        raise


# The hosts of a trial, and the options of sbatch, in the `Scheduling` of each type of workers.

_OF_SLURM = ("container_image", "time_limit", "begin", "deadline")
"""Fields that only Slurm has the means for."""


def _said(groups: Mapping[str, Scheduling], name: str) -> tuple[str, str]:
    """The value of the field `name` that all types with a value have, and the first type that has it. Raises
    `UsageError` when they differ."""
    given = {kind: value for kind, needs in groups.items() if (value := getattr(needs, name))}
    kind, value = next(iter(given.items()), ("", ""))
    for other, differs in given.items():
        if differs != value:
            raise UsageError(
                f"Scheduling.{name} of {kind} is {value!r}, that of {other} is {differs!r}",
                f"the workers of a trial have the same hosts and times: give one {name}, or the same",
            )
    return value, kind


def excluded_hosts(groups: Mapping[str, Scheduling], hosts: Sequence[str], place: str) -> list[str]:
    """The `hosts`, those of `place`, which no worker may use by the lists of `groups`. Raises `UsageError` for a
    value that only Slurm can honour, and for lists that leave no host."""
    for name in _OF_SLURM:
        value, kind = _said(groups, name)
        if value:
            raise UsageError(
                f"Scheduling.{name} of {kind} is {value!r}, which needs --mode slurm", "leave it out here"
            )
    listed, kind = _said(groups, "nodelist")
    wanted = expand_nodelist(listed) if listed else hosts
    if missing := [name for name in wanted if not any(_is_host(name, host) for host in hosts)]:
        raise UsageError(
            f"Scheduling.nodelist of {kind} names {', '.join(missing)}, and {place} has {', '.join(hosts)}",
            "name the same hosts in both, or leave the nodelist out",
        )
    lists = [needs.exclude for needs in groups.values() if needs.exclude]
    unwanted = {name for each in lists for name in expand_nodelist(each)}
    found = [
        host
        for host in hosts
        if not any(_is_host(name, host) for name in wanted) or any(_is_host(name, host) for name in unwanted)
    ]
    if len(found) == len(hosts):
        raise UsageError(f"Scheduling.exclude leaves no host of {place}", "name more hosts, or exclude fewer")
    return found


def _is_host(name: str, host: str) -> bool:
    """Return True if a list's `name` is that of `host`. Either may lack the domain, as hosts call themselves and Slurm
    calls them by different forms of one name."""
    (name, _, domain), (host, _, other) = name.lower().partition("."), host.lower().partition(".")
    return name == host and (not domain or not other or domain == other)


def options_of_slurm(groups: Mapping[str, TasksGroup], master: Scheduling, partition: str, nodes: int) -> str:
    """The ``--slurm`` of a trial with these `groups`: what each of so many nodes needs, so that the workers of each
    group are spread over all nodes, and smaller ones take places that larger ones leave. Any node may have the
    `master`."""
    cpu, gpu, mem = master.cpu, 0, 0
    # Needs of a worker, and the nodes that have a place for one more of these.
    free: list[tuple[Scheduling, int]] = []
    for group in sorted(groups.values(), key=lambda group: _size(group.scheduling), reverse=True):
        needs, left = group.scheduling, group.count
        for number, (place, many) in enumerate(free):
            if all(one <= room for one, room in zip(_size(needs), _size(place), strict=True)):
                taken = min(left, many)
                free[number], left = (place, many - taken), left - taken
        each = -(-left // nodes)
        free.append((needs, each * nodes - left))
        gpu, mem, cpu = gpu + each * needs.gpu, mem + each * needs.mem, cpu + each * needs.cpu
    every = {**{kind: group.scheduling for kind, group in groups.items()}, "master_worker": master}
    unwanted = dict.fromkeys(each.exclude for each in every.values() if each.exclude)
    words = [
        ("nodes", str(nodes)),
        ("partition", partition),
        ("cpus_per_task", str(cpu)),
        ("gpus_per_node", str(gpu) if gpu else ""),
        # Without it, workers have all that there is.
        ("mem", f"{mem + master.mem}M" if mem else ""),
        ("nodelist", _said(every, "nodelist")[0]),
        ("exclude", ",".join(unwanted)),
        ("container_image", _said(every, "container_image")[0]),
        ("time", _said(every, "time_limit")[0]),
        ("begin", _said(every, "begin")[0]),
        ("deadline", _said(every, "deadline")[0]),
    ]
    return ",".join(f"{name}={value}" for name, value in words if value)


def _size(needs: Scheduling) -> tuple[int, int, int]:
    return needs.gpu, needs.mem, needs.cpu
