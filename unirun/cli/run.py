"""``unirun script.py``: check, launch, show, pass signals on, and leave with the job's exit code."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping, Sequence

from unirun.cli.options import CommandLine, parse
from unirun.cli.planned import PlannedJob, plan_job
from unirun.cli.processes import Processes, masters_words
from unirun.cli.stored import anchored
from unirun.cli.terminal import drop_input, may_read, say, warn
from unirun.collocation import Inventory, Placement
from unirun.collocation.capacity import host_ceilings, refuse_impossible
from unirun.errors import EXIT_FAILURE, JobError, PlacementError, UsageError
from unirun.job.state import JobState, Owner, new_job
from unirun.launcher.agent import hold_endpoints
from unirun.launcher.local import launch
from unirun.launcher.process import adopt_orphans, spare_descriptors
from unirun.launcher.warm.borrowing import Choice
from unirun.launcher.warm.leaving import choices, leave_behind, leaves_behind, starts
from unirun.master.persistence.context import changes
from unirun.master.status_views import status_of
from unirun.observe import write_status
from unirun.rendezvous import JobDir, create_job, started_at
from unirun.rendezvous.store.url import store_url
from unirun.spec import JobSpec
from unirun.wire import new_token
from unirun.wire.aio import listen

MOST_NODES = 16
"""Each is an agent, and a process that has torch imported: 150 MB, and a second of a processor when it starts."""


def main(argv: Sequence[str]) -> int:
    """Run the job that `argv` describes. Returns the exit code."""
    line = parse(argv)
    return start(line, plan_job(line))


def start(line: CommandLine, planned: PlannedJob) -> int:
    """Launch a planned job; in the foreground follow it to its end.

    Nodes that are made up (``--inventory fake:…``) are parts of this host: each has an agent of its own.
    """
    spec, placement = planned.spec, planned.placement
    inventory = _wanted(planned)
    refuse_impossible(spec, ((each.role, each.node) for each in placement.assignments), host_ceilings())
    detach = bool(line.options.get("detach"))
    if detach and "stdin" in line.options:
        raise UsageError("--stdin: a detached job has no stdin", "leave out one of --stdin and --detach")
    store = store_url(line.options.get("store"))
    if store is not None:
        store = anchored(store)
    # The port that a user has chosen is that of the first role's rank 0, wherever it is.
    first = placement.of_role(spec.roles[0].name)[0].node
    nodes = {
        node.name: hold_endpoints(spec, spec.master_port if node.name == first else 0)
        for node in inventory.nodes
    }
    job, lock = create_job(spec.run_id, new_token(), spec.log.dir, store)
    path = job.master_socket(os.getpid())
    try:
        job.write_json("spec.json", spec.to_json())
        state = _first_state(job, spec, placement, inventory, detach)
        job.write_first_context(changes(None, state))
        write_status(job, status_of(state, {}, {}))
        listener = listen(path)
    except OSError as error:
        raise JobError(
            f"the job's directory {job.path} cannot be written: {error.strerror}",
            "free some space, or set UNIRUN_HOME to another directory",
        ) from error

    def run_master(agents: Mapping[str, int]) -> None:
        # In the master's process, while the agents start.
        from unirun.master.lead import lead

        lead(job, path, listener, agents=agents)

    if (verbose := line.options.get("verbose")) or leaves_behind():
        _look_for_warm(choices(job, spec), bool(verbose))
    reader = None
    if not detach:
        adopt_orphans()
        reader = _reading_node(spec, placement) if may_read() else None
    launched = launch(
        job,
        spec,
        nodes,
        run_master,
        listener=listener,
        lock=lock,
        detach=detach,
        reader=reader,
    )
    if detach:
        processes = Processes(launched)
        if not processes.taken_up(job):
            code = processes.end(led=False) or EXIT_FAILURE
            warn(masters_words(job) or "the job's processes are gone")
            return code
        say(spec.run_id)
        warn(f"started; follow it with: unirun logs -f {spec.run_id}")
        return 0
    # While agents and master start.
    from unirun.cli.console import Console
    from unirun.cli.session import Session

    drop_input()
    spare_descriptors()
    console = Console(quiet=bool(line.options.get("quiet")))
    return asyncio.run(Session(job, spec, console, launched).run())


def _look_for_warm(found: list[Choice], verbose: bool) -> None:
    """Tell how spawners start, and leave behind what is wanted. The job starts in any case."""
    if verbose:
        for choice in found:
            warn(starts(choice))
    try:
        leave_behind(found)
    except JobError as error:
        warn(str(error))


def _reading_node(spec: JobSpec, placement: Placement) -> str | None:
    """The node of the worker that has the command's stdin, when there is one."""
    if spec.reader is None:
        return None
    role, rank = spec.reader
    return next((each.node for each in placement.of_role(role) if each.rank == rank), None)


def _wanted(planned: PlannedJob) -> Inventory:
    """The nodes that get an agent: all that the job uses or may come to use. Raises `PlacementError` for more than a
    host can play."""
    nodes = [node for node in planned.inventory.nodes if node.name not in planned.placement.excluded]
    if len(nodes) > MOST_NODES:
        raise PlacementError(
            f"the job has {len(nodes)} nodes, and one host plays {MOST_NODES} at most",
            "see them with unirun plan",
            role=planned.spec.roles[0].name,
            needed=len(nodes),
            available=MOST_NODES,
        )
    return Inventory(tuple(nodes))


def _first_state(
    job: JobDir, spec: JobSpec, placement: Placement, inventory: Inventory, detach: bool
) -> JobState:
    pid = os.getpid()
    owner = None if detach else Owner(socket.gethostname(), pid, started_at(pid))
    logs = str(job.logs.resolve())
    return new_job(
        spec, placement, inventory=inventory, started=time.time(), logs=logs, uid=job.uid, owner=owner
    )
