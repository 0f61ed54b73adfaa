"""Starts a planned job on this host: the one entry for the command, for programs that submit jobs, and for tests."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from unirun.collocation import Inventory
from unirun.collocation.limits import host_ceilings, refuse_impossible
from unirun.errors import EXIT_FAILURE, JobError, PlacementError
from unirun.failover.context import encode
from unirun.failover.offers import versions
from unirun.failover.state import new_job
from unirun.failover.status_views import status_of
from unirun.launcher.environment import joined
from unirun.launcher.foreground.terminal import drop_input, warn
from unirun.launcher.local import AgentProcess, RunningJob, begin, bind, end_unled
from unirun.launcher.planned import PlannedJob
from unirun.launcher.process import adopt_orphans, spare_descriptors
from unirun.launcher.warm.borrowing import choices, leave_behind, leaves_behind, starts
from unirun.observe.batchjob import is_active, own_batch
from unirun.observe.jobdir import JobDir, job_at, may_write
from unirun.observe.status import write_status
from unirun.rendezvous.creation import create_job, discard_job, wait_until_up
from unirun.rendezvous.endpoints import BIND_TIMEOUT
from unirun.rendezvous.masters import call_master
from unirun.rendezvous.store.url import anchored
from unirun.spec.job import JobSpec
from unirun.wire.address import TcpAddress
from unirun.wire.handshake import Token, new_token
from unirun.wire.messages import AgentTask, Offer, Ready, expected

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
    adopt_orphans()
    # Imported while agents and master start.
    from unirun.launcher.foreground.session import follow

    drop_input()
    spare_descriptors()
    return follow(running, quiet=quiet)


def launch(
    planned: PlannedJob, *, store: str | None = None, detach: bool = False, stdin: bool = False
) -> RunningJob:
    """Make the directory of a job on this host, and start its agents and its first master; they end with this process
    unless `detach` is given. Call it before any thread is started.

    `store` is the URL of the store with the job's context (default: a file in the job's directory). With `stdin`, the
    worker that is the job's reader gets this process's stdin. Nodes that are made up (``--inventory fake:…``) are parts
    of this host, with an agent each.

    Raises `PlacementError` for more than this host can take, `RendezvousError` when a port is taken, and `JobError`
    when a job of this id runs, its directory cannot be written, or this host lacks what a job needs.
    """
    spec, nodes = planned.spec, agents_of(planned)
    if len(nodes) > MOST_NODES:
        raise PlacementError(
            f"the job has {len(nodes)} nodes, and one host plays {MOST_NODES} at most",
            "see them with unirun plan",
            role=spec.roles[0].name,
            needed=len(nodes),
            available=MOST_NODES,
        )
    check_host(spec)
    refuse_excess(planned, nodes)
    job, lock = make_directory(spec, new_token(), anchored(store) if store is not None else None)
    tasks = [
        replace(task, addr=spec.master_addr, cwd=os.getcwd()) for task in tasks_of(planned, nodes).values()
    ]
    reader = _reading_node(planned) if stdin and not detach else None
    agents: dict[str, AgentProcess] = {}
    try:
        write_first_state(job, planned, owned=not detach)
        for node in nodes:
            agents[node] = AgentProcess(job.agent_log(node), stdin=node == reader)
        bind(job, agents, tasks, lock, None if detach else os.getpid())
    except BaseException:
        for agent in agents.values():
            agent.end()
        discard_job(job, lock)
        raise
    return RunningJob(job, spec, *begin(job, agents, lock, first_master(job)))


def join_here(job: JobDir, name: str) -> str:
    """Let another agent of this host join `job`, whose nodes are made up, as the node `name`. Returns the name that it
    has in the job. Call it before any thread is started. Raises `RendezvousError`, `StoreError`, `WireError`."""
    with (
        AgentProcess(job.path / f".agent.{secrets.token_hex(8)}.log") as agent,
        call_master(job) as master,
    ):
        master.send(Offer(name, socket.gethostname(), -1, "", versions()))
        task = expected(master.receive(BIND_TIMEOUT), AgentTask)
        env = joined(os.environ, task.env or {})
        os.environ.clear()
        os.environ.update(env)
        # The others inherit the lock. This one takes it when they are gone.
        lock = os.open(job.lock, os.O_RDWR | os.O_CLOEXEC)
        bind(job, {task.node: agent}, [task], lock, None)
        master.send(Ready())
        expected(master.receive(BIND_TIMEOUT), Ready)
        begin(job, {task.node: agent}, lock)
        return task.node


def first_master(
    job: JobDir, tcp: socket.socket | None = None, *, etcd: bool = False
) -> Callable[[Mapping[str, int]], None]:
    """The work of the first master of `job`, in a process of its own, as `begin` calls it: `tcp` is where masters
    listen for other hosts; `etcd` is whether the job has one of its own, which may not be up yet."""

    def run(agents: Mapping[str, int]) -> None:
        # Imported in the master's process, while the agents start.
        from unirun.launcher.master.lead import lead

        if etcd:
            wait_until_up(job.store_url)
        lead(job, agents=agents, tcp=tcp)

    return run


def refuse_excess(planned: PlannedJob, nodes: Sequence[str]) -> None:
    """Raise `PlacementError` when this host cannot hold the ranks that are placed on `nodes`."""
    here = ((each.role, each.node) for each in planned.placement.assignments if each.node in nodes)
    refuse_impossible(planned.spec, here, host_ceilings())


def make_directory(
    spec: JobSpec,
    token: Token,
    store: str | None,
    *,
    uid: str | None = None,
    node: str = "",
    head: TcpAddress | None = None,
) -> tuple[JobDir, int]:
    """Make the job's directory, or that of a `node` of a job which another host launches, as `create_job` does. Raises
    `JobError`."""
    batch, restarts = own_batch(spec.run_id, os.environ)
    if not (batch or node) and is_active(job_at(spec.run_id)):
        raise JobError(f"job {spec.run_id} is Slurm's", f"stop it with: unirun stop {spec.run_id}")
    return create_job(
        *(spec.run_id, token, spec.log.dir, store),
        batch=batch and not node,
        restarts=restarts,
        uid=uid,
        node=node,
        head=head,
    )


def agents_of(planned: PlannedJob) -> tuple[str, ...]:
    """The names of all nodes that the job uses or may come to use."""
    return tuple(node.name for node in _inventory_of(planned).nodes)


def _inventory_of(planned: PlannedJob) -> Inventory:
    excluded = planned.placement.excluded
    return Inventory(tuple(node for node in planned.inventory.nodes if node.name not in excluded))


def tasks_of(planned: PlannedJob, masters: tuple[str, ...]) -> dict[str, AgentTask]:
    """The tasks of the agents of all nodes, without what depends on their hosts; those of `masters` can start one."""
    spec = planned.spec
    # The port that a user has chosen is that of the first role's rank 0, wherever it is.
    role = next((role for role in spec.roles if not role.is_program), spec.roles[0])
    first = planned.placement.of_role(role.name)[0].node
    return {
        node: AgentTask(spec, node, masters, port=spec.master_port if node == first else 0)
        for node in agents_of(planned)
    }


def leave(running: RunningJob) -> int:
    """Wait until a master has brought the job to its store, so that it needs this process no more. Returns 0, or the
    exit code when there is no master, having said why."""
    if running.taken_up():
        return 0
    code = running.end(led=False) or EXIT_FAILURE
    warn(end_unled(running.job, code) or "the job's processes are gone")
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


def write_first_state(job: JobDir, planned: PlannedJob, *, keepers: Sequence[str] = (), owned: bool) -> None:
    """Leave the context for the first master, and the status for who asks before; `keepers` are the nodes that keep the
    job's store. Raises `JobError`."""
    state = new_job(
        planned.spec,
        planned.placement,
        inventory=_inventory_of(planned),
        started=time.time(),
        logs=str(job.logs.resolve()),
        uid=job.uid,
        owned=owned,
        keepers=tuple(keepers),
    )
    try:
        job.write_first_context(encode(state))
        write_status(job, status_of(state, {}, {}))
    except OSError as error:
        raise JobError(
            f"the job's directory {job.path} cannot be written: {error.strerror}",
            "free some space, or set UNIRUN_HOME to another directory",
        ) from error


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
