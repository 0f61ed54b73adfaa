"""The start of a master: it is elected, and takes over the state that the master before has left."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial

from msgspec.structs import replace

from unirun.errors import EXIT_FAILURE, JobError
from unirun.failover.context import ContextStore, decode, load
from unirun.failover.crashes import (
    Crash,
    abort_step,
    begin_abort,
    fatal,
    read_crashes,
    reason_of,
    record_crash,
    report_of,
)
from unirun.failover.silence import LEASE_SECONDS, REJOIN_SECONDS
from unirun.failover.state import JOB_ENDS, JobPhase, Verdict
from unirun.failover.step import step
from unirun.failover.takeover import REJOIN_TIMEOUT, resume
from unirun.launcher.master.shell import Core, Master
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.election import campaign, job_prefix, leader_of
from unirun.rendezvous.store.protocol import Store
from unirun.rendezvous.store.url import open_store
from unirun.wire.address import Address, UnixAddress
from unirun.wire.credentials import load_credentials
from unirun.wire.sockets import listen, tcp_address

TERM_TTL = LEASE_SECONDS
"""Seconds after which a master that hangs is not the leader any more; one that is dead is deposed at once."""


def lead(
    job: JobDir,
    *,
    tcp: socket.socket | None = None,
    deposing: int = 0,
    agents: Mapping[str, int] | None = None,
) -> None:
    """Lead `job` to its end, from its beginning or from where another master has left it.

    Returns at once when somebody leads already; `deposing` is the term of a leader that is known to be dead. Agents and
    commands find the master at a socket in the job's directory; `tcp` is another, whose address is the master's for all
    hosts then. `agents` are the pids of the agents on this host that have not joined yet, by node. Raises `JobError`
    when another job of the same id runs, `StoreError`.
    """
    path = job.master_socket(os.getpid())
    path.unlink(missing_ok=True)
    try:
        with listen(path) as listener, closing(open_store(job.store_url)) as store:
            _lead(job, store, [listener] if tcp is None else [listener, tcp], deposing, agents or {})
    finally:
        path.unlink(missing_ok=True)


def _lead(
    job: JobDir,
    store: Store,
    listeners: Sequence[socket.socket],
    deposing: int,
    agents: Mapping[str, int],
) -> None:
    _, *tcp = listeners
    address: Address = UnixAddress.here(job.master_socket(os.getpid()))
    if tcp:
        address = tcp_address(tcp[0], load_credentials(job.path).node)
    first = job.first_context()
    if first is not None:
        _refuse_running(store, job)
    term = campaign(store, job_prefix(job.run_id), address, os.getpid(), ttl=TERM_TTL, deposing=deposing)
    if term is None:
        return
    contexts = ContextStore(store, job.run_id, term)
    before = load(store, job.run_id)
    requeued = before is not None and before.uid == job.uid_before
    state = before if before is not None and before.uid == job.uid else None
    if state is None and first is not None:
        state = decode(first)
        if requeued and before is not None:
            # Its roles go back to what they had committed together.
            state = replace(state, commits=replace(before.commits, pending=()))
        contexts.create(state, keep_saved=requeued)
    if state is None:
        term.resign()
        problem = f"the store has no context of this job {job.run_id}"
        raise JobError(problem, "it was removed, or another job has taken its id")
    job.forget_first_context()
    # Only agents with a store that all hosts read depend on beats alone.
    rejoin = REJOIN_SECONDS if tcp and job.shared_store else REJOIN_TIMEOUT
    core = _core(read_crashes(store, job.run_id), job, rejoin)
    master = Master(
        job, state, term, contexts, listeners, core, partial(record_crash, store, job.run_id, term)
    )
    asyncio.run(master.run(agents))


def _core(crashes: tuple[Crash, ...], job: JobDir, rejoin: float) -> Core:
    """The core that decides in this term; agents have `rejoin` seconds to join.

    A job is ended, and not led any more, when one error has ended too many of its masters.
    """
    crash = fatal(crashes)
    if crash is None:
        return Core(partial(resume, rejoin=rejoin), step)
    report = report_of(crash, str(job.master_log))
    verdict = Verdict(JobPhase.FAILED, EXIT_FAILURE, reason_of(crash), report=report)
    # What it does has been decided by those crashes, which are in the store; and the error may be one of writing.
    return Core(lambda state, now: begin_abort(state, verdict, now), abort_step, writes_first=False)


def _refuse_running(store: Store, job: JobDir) -> None:
    """Another job of this id may run elsewhere; one that has not ended may be without a master for a moment."""
    before = load(store, job.run_id)
    if before is None or before.phase in JOB_ENDS or before.uid == job.uid:
        return
    deadline = time.monotonic() + TERM_TTL
    while time.monotonic() < deadline:
        if leader_of(store, job_prefix(job.run_id)) is not None:
            raise JobError(
                f"job {job.run_id} is running", "stop it with unirun stop, or choose another --rdzv-id"
            )
        time.sleep(0.1)
