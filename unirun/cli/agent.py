"""``unirun agent join|drain``: nodes that come into a running job, and leave it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from unirun.cli.run import endpoint, node_name
from unirun.cli.stored import find_here, find_job, only_one, opened, refuse_elsewhere
from unirun.errors import JobError, RendezvousError, StoreError, UsageError, WireError
from unirun.failover.nodes import RETRY_REMEDY, has_left
from unirun.launcher.foreground.terminal import say
from unirun.launcher.hostlist import parse_hosts
from unirun.launcher.hosts.byhand import run_member
from unirun.launcher.interfaces import resolve
from unirun.launcher.launch import join_here
from unirun.observe.jobdir import JobDir
from unirun.observe.status import ENDED, read_summary
from unirun.rendezvous.election import job_prefix, leader_of
from unirun.rendezvous.masters import call_master
from unirun.rendezvous.store.url import store_url
from unirun.wire.address import Address, TcpAddress, UnixAddress
from unirun.wire.blocking import BlockingStream
from unirun.wire.credentials import load_credentials
from unirun.wire.handshake import Token, load_token
from unirun.wire.messages import Attach, Drain, Drained, Invite

AGENT_JOIN_TIMEOUT = 60.0
"""Seconds to reach the job's master."""

DRAIN_TIMEOUT = 600.0
"""Seconds to wait until a node has left; longer than any grace period."""

DRAIN_RETRY_INTERVAL = 0.3
"""Seconds between two attempts."""

DRAIN_ANSWER_TIMEOUT = 3.0
"""Seconds after which a master that says nothing is asked again."""


def join(options: Any) -> int:
    """Add a node to a running job. Returns the exit code."""
    if options.token_file is None and options.rdzv_endpoint is None and options.hosts is None:
        job = _job(options)
        if job.head is None and isinstance(_master(job.store_url, job.run_id), UnixAddress):
            node = join_here(job, node_name(options.node_name))
            say(f"{node} joined")
            return 0
    address, token, insecure = _place(options)
    if options.hosts is not None:
        # Imported here: asyncio's subprocesses are needed for nothing else.
        from unirun.launcher.hosts.copying import record_hosts, recorded_hosts
        from unirun.launcher.hosts.ssh import join_over_ssh

        if options.node_name is not None:
            raise UsageError("--node-name is for this host", "hosts that ssh reaches have their own names")
        hosts = parse_hosts(options.hosts)
        joined = join_over_ssh(hosts, address, token, interface=options.interface or "", insecure=insecure)
        if options.token_file is None and recorded_hosts(job := find_job(options.job)):
            # Whoever copies the files of the others copies theirs, too.
            record_hosts(job, joined)
        say(f"{', '.join(host.name for host in joined)} joined")
        return 0
    invite = Invite(
        token.hex(),
        node_name(options.node_name),
        head=address,
        interface=options.interface or "",
        insecure=insecure,
        detach=bool(options.detach),
    )
    return run_member(invite, timeout=AGENT_JOIN_TIMEOUT, quiet=options.quiet)


def _job(options: Any) -> JobDir:
    """The running job that a node is to join. Raises `JobError`."""
    job = find_here(options.store, options.job, "agent join")
    if read_summary(job).phase in ENDED:
        raise JobError(f"job {job.run_id} has ended", "no node can join it")
    return job


def _place(options: Any) -> tuple[TcpAddress, Token, bool]:
    """The address where masters of the job listen, its token, and whether it has no TLS."""
    if options.token_file is None:
        if options.rdzv_endpoint is not None:
            raise UsageError(
                "--rdzv-endpoint: the node has to prove the job's token",
                "--token-file names a copy of the file token in the job's directory",
            )
        job = _job(options)
        credentials = load_credentials(job.path)
        address = job.head or _leader(job.store_url, job.run_id)
        return address, credentials.token, credentials.insecure
    token = load_token(Path(options.token_file))
    if options.rdzv_endpoint is not None:
        host, port = endpoint(options.rdzv_endpoint)
        return TcpAddress(resolve(host), port, ""), token, options.insecure
    url = store_url(options.store)
    if url is None or options.job is None:
        raise UsageError(
            "nothing says where masters of the job listen",
            "--rdzv-endpoint HOST:PORT, or JOB and --store URL",
        )
    return _leader(url, options.job), token, options.insecure


def _leader(url: str, run_id: str) -> TcpAddress:
    """The address where the master of a job of several hosts listens. Raises `JobError`, `StoreError`."""
    address = _master(url, run_id)
    if not isinstance(address, TcpAddress):
        raise JobError(f"job {run_id} runs on one host", "start it with --hosts or --nnodes")
    return address


def _master(url: str, run_id: str) -> Address:
    """The address where the master of a job listens. Raises `JobError`, `StoreError`."""
    with opened(url) as store:
        leader = leader_of(store, job_prefix(run_id))
    if leader is None:
        raise JobError(f"job {run_id} has no master now", RETRY_REMEDY)
    return leader.address


def drain(options: Any) -> int:
    """Take a node out of a running job. Returns the exit code."""
    node, command = options.node, f"agent drain {options.node}"
    job = find_here(options.store, options.job or only_one(options.store, command), command)
    refuse_elsewhere(job, command)
    end, asked = time.monotonic() + DRAIN_TIMEOUT, False
    while time.monotonic() < end:
        if read_summary(job).phase in ENDED:
            raise JobError(f"job {job.run_id} has ended", "there is nothing to drain")
        try:
            with call_master(job) as master:
                master.send(Attach())
                master.send(Drain(node))
                answer = _answer(master, node)
        except (StoreError, WireError, RendezvousError):
            # This master is gone, or says nothing yet: who asks twice is answered as who asks once.
            asked = True
            time.sleep(DRAIN_RETRY_INTERVAL)
            continue
        if not answer.problem or (asked and answer.problem == has_left(node)):
            say(f"{node} has left job {job.run_id}")
            return 0
        if answer.remedy != RETRY_REMEDY:
            raise JobError(answer.problem, answer.remedy)
        time.sleep(DRAIN_RETRY_INTERVAL)
    raise JobError(f"{node} has not left within {DRAIN_TIMEOUT:g} s", "see unirun status")


def _answer(master: BlockingStream, node: str) -> Drained:
    """The master's answer about `node`. Raises `WireError`, and `RendezvousError` when it says nothing for a while."""
    while True:
        word = master.receive(DRAIN_ANSWER_TIMEOUT)
        if isinstance(word, Drained) and word.node == node:
            return word
