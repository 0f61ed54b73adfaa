"""Starts a planned job on this host: the one entry for the command, for programs that submit jobs, and for tests."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

from msgspec.structs import replace

from unirun.collocation import Inventory
from unirun.collocation.limits import host_ceilings, refuse_impossible
from unirun.errors import EXIT_FAILURE, JobError, PlacementError, RendezvousError
from unirun.failover.context import encode
from unirun.failover.offers import AgentTask
from unirun.failover.state import new_job
from unirun.failover.status_views import status_of
from unirun.launcher.foreground.terminal import drop_input, warn
from unirun.launcher.local import AgentProcess, RunningJob, output_of_first_master, start_processes
from unirun.launcher.orders import on_host
from unirun.launcher.planned import PlannedJob
from unirun.launcher.process import adopt_orphans, spare_descriptors
from unirun.launcher.warm.borrowing import choices, leave_behind, leaves_behind, starts
from unirun.observe.batchjob import is_active, own_batch
from unirun.observe.jobdir import JobDir, job_at, may_write
from unirun.observe.status import write_status
from unirun.rendezvous.creation import create_job, discard_job, wait_until_up
from unirun.rendezvous.store.url import anchored
from unirun.spec.job import JobSpec
from unirun.values import Value
from unirun.wire.address import TcpAddress
from unirun.wire.certificates import make_tls
from unirun.wire.handshake import Token, new_token
from unirun.wire.messages import EtcdMember

MOST_NODES = 16
"""Each is an agent, and a process that has torch imported: 150 MB, and a second of a processor when it starts."""


def run(
    planned: PlannedJob,
    *,
    store: str | None = None,
    detach: bool = False,
    stdin: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> int:
    """Launch a job and follow it to its end; with `detach`, until a master leads it. Returns the exit code.

    `verbose` tells how spawners start, `quiet` leaves out unirun's own notes. The rest is as for `launch`.
    """
    if verbose or leaves_behind():
        _look_for_warm(planned.spec, verbose)
    running = launch(planned, store=store, detach=detach, stdin=stdin)
    return leave(running) if detach else stay(running, quiet=quiet)


def stay(running: RunningJob, *, quiet: bool) -> int:
    """Follow a job that this process has started, or takes part in, to its end. Returns its exit code."""
    # Imported while agents and master start.
    from unirun.launcher.foreground.session import follow

    drop_input()
    spare_descriptors()
    return follow(running, quiet=quiet)


class Head(Value):
    """This host as the first one of a job on several: its name as a `node`, the job's token and uid, and where masters
    listen. Its `agent` waits for its task. `folder` is the node in whose name it keeps its files, when the command is
    elsewhere. `etcd` are the members of the job's own etcd."""

    node: str
    token: Token
    uid: str
    listener: socket.socket
    address: TcpAddress
    agent: AgentProcess
    insecure: bool = False
    folder: str = ""
    etcd: tuple[EtcdMember, ...] = ()


def launch(
    planned: PlannedJob,
    *,
    store: str | None = None,
    detach: bool = False,
    stdin: bool = False,
    head: Head | None = None,
) -> RunningJob:
    """Make the directory of the job and start its agents and its first master; they end with this process unless
    `detach` is given. Call it before any thread is started.

    `store` is the URL of the store with the job's context (default: a file in the job's directory). With `stdin`, the
    worker that is the job's reader gets this process's stdin. Nodes that are made up (``--inventory fake:…``) are parts
    of this host, with an agent each. Of a job on several hosts, only the agent of the `head` is started.

    Raises `PlacementError` for more than this host can take, `RendezvousError` when a port is taken, and `JobError`
    when a job of this id runs, its directory cannot be written, or this host lacks what a job needs.
    """
    spec, placement = planned.spec, planned.placement
    url = anchored(store) if store is not None else None
    inventory = _nodes_with_agents(planned, head)
    here = [each for each in placement.assignments if head is None or each.node == head.node]
    check_host(spec)
    refuse_impossible(spec, ((each.role, each.node) for each in here), host_ceilings())
    job, lock = _create(spec, url, head)
    try:
        tasks = _tasks(planned, inventory, head, alone=url is None)
    except RendezvousError:
        discard_job(job, lock)
        raise
    reader = _reading_node(planned) if stdin and not detach else None
    agents = (
        {task.node: AgentProcess(job.agent_log(task.node), stdin=task.node == reader) for task in tasks}
        if head is None
        else {head.node: head.agent}
    )
    try:
        _write_first_state(job, planned, inventory, _keepers(head, url), owned=not detach)
    except OSError as error:
        for agent in agents.values():
            agent.end()
        raise JobError(
            f"the job's directory {job.path} cannot be written: {error.strerror}",
            "free some space, or set UNIRUN_HOME to another directory",
        ) from error

    def run_master(agents: Mapping[str, int]) -> None:
        # Imported in the master's process, while the agents start.
        from unirun.launcher.master.lead import lead

        if head is not None and head.etcd:
            wait_until_up(job.store_url)
        lead(job, agents=agents, tcp=head.listener if head is not None else None)

    if not detach:
        adopt_orphans()
    try:
        processes = start_processes(
            job,
            agents,
            tasks,
            run_master,
            lock=lock,
            owner=None if detach or (head is not None and head.folder) else os.getpid(),
            tcp=head.listener if head is not None else None,
        )
    except RendezvousError:
        discard_job(job, lock)
        raise
    return RunningJob(job, spec, processes)


def _create(spec: JobSpec, store: str | None, head: Head | None) -> tuple[JobDir, int]:
    batch, restarts = own_batch(spec.run_id, os.environ)
    if not batch and is_active(job_at(spec.run_id)):
        raise JobError(f"job {spec.run_id} is Slurm's", f"stop it with: unirun stop {spec.run_id}")
    logs = spec.log.dir
    if head is None:
        return create_job(spec.run_id, new_token(), logs, store, batch=batch, restarts=restarts)
    made = create_job(
        *(spec.run_id, head.token, logs, store),
        uid=head.uid,
        node=head.folder,
        batch=batch and not head.folder,
        restarts=0 if head.folder else restarts,
    )
    addrs = {head.address.addr, *(each.addr for each in head.etcd if each.node == head.node)}
    make_tls(made[0].path, head.token, head.node, insecure=head.insecure, addrs=tuple(addrs))
    return made


def _tasks(planned: PlannedJob, inventory: Inventory, head: Head | None, *, alone: bool) -> list[AgentTask]:
    """The tasks of the agents of this host; `alone`: agents elsewhere cannot start masters."""
    spec, names = planned.spec, tuple(node.name for node in inventory.nodes)
    if head is not None:
        task = task_of(planned, names if not alone else (head.node,), head.node)
        return [replace(on_host(task, head.address.addr, os.getcwd()), etcd=head.etcd)]
    return [replace(task_of(planned, names, name), addr=spec.master_addr, cwd=os.getcwd()) for name in names]


def agents_of(planned: PlannedJob) -> tuple[str, ...]:
    """The names of all nodes that the job uses or may come to use."""
    names = (node.name for node in planned.inventory.nodes)
    return tuple(name for name in names if name not in planned.placement.excluded)


def task_of(planned: PlannedJob, names: tuple[str, ...], node: str) -> AgentTask:
    """The task of the agent of `node`, without the address and the directory, which depend on its host."""
    spec = planned.spec
    # The port that a user has chosen is that of the first role's rank 0, wherever it is.
    role = next((role for role in spec.roles if not role.is_program), spec.roles[0])
    first = planned.placement.of_role(role.name)[0].node
    return AgentTask(spec, node, names, "", "", spec.master_port if node == first else 0)


def leave(running: RunningJob) -> int:
    """Wait until a master has brought the job to its store, so that it needs this process no more. Returns 0, or the
    exit code when there is no master, having said why."""
    if running.processes.taken_up(running.job):
        return 0
    code = running.processes.end(led=False) or EXIT_FAILURE
    warn(output_of_first_master(running.job) or "the job's processes are gone")
    return code


def _look_for_warm(spec: JobSpec, verbose: bool) -> None:
    """Tell how spawners start, and leave behind what is wanted. The job starts in any case."""
    found = choices(job_at(spec.run_id), spec)
    if verbose:
        for choice in found:
            warn(starts(choice))
    try:
        leave_behind(found)
    except JobError as error:
        warn(str(error))


def _reading_node(planned: PlannedJob) -> str | None:
    """The node of the worker that reads stdin, if there is one."""
    if planned.spec.reader is None:
        return None
    role, rank = planned.spec.reader
    return next((each.node for each in planned.placement.of_role(role) if each.rank == rank), None)


def _nodes_with_agents(planned: PlannedJob, head: Head | None) -> Inventory:
    """All nodes that the job uses or may come to use. Raises `PlacementError` for more than a host can play."""
    nodes = [node for node in planned.inventory.nodes if node.name not in planned.placement.excluded]
    if head is None and len(nodes) > MOST_NODES:
        raise PlacementError(
            f"the job has {len(nodes)} nodes, and one host plays {MOST_NODES} at most",
            "see them with unirun plan",
            role=planned.spec.roles[0].name,
            needed=len(nodes),
            available=MOST_NODES,
        )
    return Inventory(tuple(nodes))


def _keepers(head: Head | None, store: str | None) -> tuple[str, ...]:
    """The nodes that keep the job's store, of which `store` is the URL if it is not a file on the head."""
    if head is None:
        return ()
    return (head.node,) if store is None else tuple(member.node for member in head.etcd)


def _write_first_state(
    job: JobDir, planned: PlannedJob, inventory: Inventory, keepers: tuple[str, ...], *, owned: bool
) -> None:
    """Leave the context for the first master, and the status for who asks before. Raises OSError."""
    state = new_job(
        planned.spec,
        planned.placement,
        inventory=inventory,
        started=time.time(),
        logs=str(job.logs.resolve()),
        uid=job.uid,
        owned=owned,
        keepers=keepers,
    )
    job.write_first_context(encode(state))
    write_status(job, status_of(state, {}, {}))


TEMPORARY = ("TMPDIR", "TEMP", "TMP")
"""Variables that name a temporary directory, as `tempfile` has them."""


def check_host(spec: JobSpec) -> None:
    """Raise `JobError` when this host lacks what the job's processes need.

    Processes are watched through ``/proc``. torch needs a temporary directory: `DistributedDataParallel`,
    `torch.compile` and torchrun fail without one, some only after the job has run for a while.
    """
    if not os.path.exists("/proc/self/stat"):
        raise no_proc()
    for role in spec.roles:
        env = {**os.environ, **spec.env, **role.env}
        named = [env[name] for name in TEMPORARY if env.get(name)]
        places = (*named, "/tmp", "/var/tmp", "/usr/tmp", role.cwd or os.getcwd())
        if role.entry.kind != "program" and not any(map(may_write, places)):
            raise JobError(
                f"role {role.name} has no temporary directory, which torch needs: {', '.join(places)}"
                " cannot be written",
                "set TMPDIR to a directory that you may write",
            )


def no_proc() -> JobError:
    """The error of a host on which the state of processes cannot be read."""
    return JobError(
        "/proc is not mounted, and unirun watches processes there", "mount it: mount -t proc proc /proc"
    )
