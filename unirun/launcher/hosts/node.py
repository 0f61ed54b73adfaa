"""``python -m unirun.launcher.hosts.node``: this host as a node of a job that a command elsewhere launches over ssh.

It takes part in the job, starts the agent, and on the head the first master. Then it sends the command what the files
of the node's directory get. The agent does not depend on this process: when ssh is lost, another one is started, which
sends the rest (`Resume`).
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack, suppress

from unirun.errors import RendezvousError, UnirunError, WireError
from unirun.failover.offers import AgentTask
from unirun.launcher.hosts.feed import feed, over_stdio
from unirun.launcher.hosts.lobby import (
    LAUNCHER_ANSWER_TIMEOUT,
    await_go,
    early_agent,
    missing,
    needs,
    offer,
    take_part,
)
from unirun.launcher.interfaces import choose, reachable_address
from unirun.launcher.local import AgentProcess, output_of_first_master
from unirun.launcher.planned import PlannedJob
from unirun.launcher.process import ignore_signals
from unirun.observe.jobdir import JobDir, job_at
from unirun.spec.job import JobSpec
from unirun.wire.address import TcpAddress
from unirun.wire.blocking import BlockingStream
from unirun.wire.certificates import temporary
from unirun.wire.frames import from_json
from unirun.wire.handshake import Token
from unirun.wire.messages import Assigned, Dismissed, Invite, Ready, Resume, expected
from unirun.wire.sockets import listen_tcp

LOST_GO = 128 + signal.SIGHUP
"""The exit code when the command is gone before the job has started."""


def main() -> int:
    """Take part in the job that stdin tells of. Returns the exit code."""
    ignore_signals()
    stream = over_stdio()
    try:
        first = stream.receive(LAUNCHER_ANSWER_TIMEOUT)
        match first:
            case Resume():
                os.environ.update(first.env)
                feed(_resumed(first), stream, dict(first.offsets))
            case Invite():
                feed(_take_part(first, stream), stream, {})
            case _:
                raise RendezvousError(f"the command said {type(first).__name__} at first")
    except WireError:
        return LOST_GO
    except UnirunError as error:
        with suppress(WireError):
            stream.send(Dismissed(error.problem, error.remedy))
        return error.exit_code
    return 0


def _resumed(resume: Resume) -> JobDir:
    job = job_at(resume.run_id, resume.node)
    if not job.path.is_dir():
        raise RendezvousError(f"its files are gone: {job.path}")
    return job


def _take_part(invite: Invite, stream: BlockingStream) -> JobDir:
    """Take part in a job. Returns its directory here, with the agent running."""
    os.environ.update(invite.env)
    with suppress(OSError):
        # Told with all that is missing.
        os.chdir(invite.cwd)
    addr = _own_address(invite)
    spec = from_json(JobSpec, invite.spec) if invite.spec else None
    early = AgentTask(spec, invite.node, (), invite.cwd, addr) if spec is not None else None
    with early_agent(early) as agent:
        token = Token(bytes.fromhex(invite.token))
        faults = missing([invite.cwd] if spec is None else needs(spec, invite.cwd))
        if invite.head:
            return _lead(invite, stream, agent, token, addr, faults)
        offered = offer(invite.node, faults=faults, addr=addr)
        with ExitStack() as stack:
            asked = stream
            if invite.masters is not None:
                credentials = stack.enter_context(temporary(token, invite.node, insecure=invite.insecure))
                asked = stack.enter_context(BlockingStream.connect(invite.masters, credentials))
            running = take_part(
                asked, offered, agent, token, insecure=invite.insecure, interface=invite.interface
            )
    if invite.masters is not None:
        stream.send(Ready(running.node))
    return running.job


def _lead(
    invite: Invite,
    stream: BlockingStream,
    agent: AgentProcess,
    token: Token,
    addr: str,
    faults: tuple[tuple[str, str], ...],
) -> JobDir:
    """Take part as the head, which starts the first master."""
    listener = listen_tcp(addr)
    address = TcpAddress(addr, listener.getsockname()[1], invite.node)
    stream.send(offer(invite.node, masters=address, faults=faults, addr=addr))
    assigned = expected(stream.receive(LAUNCHER_ANSWER_TIMEOUT), Assigned)
    # Imported here: only the head needs the master.
    from unirun.launcher.launch import Head, launch

    planned = PlannedJob.from_json(assigned.planned)
    head = Head(
        *(invite.node, token, assigned.uid, listener, address, agent),
        insecure=invite.insecure,
        folder=invite.node,
        etcd=assigned.etcd,
    )
    running = launch(planned, store=assigned.store or None, head=head, detach=invite.detach)
    listener.close()
    stream.send(Ready())
    try:
        await_go(stream)
    except BaseException:
        running.processes.kill_agents()
        running.processes.end(led=False)
        raise
    if invite.detach and not running.processes.taken_up(running.job):
        raise RendezvousError(output_of_first_master(running.job) or "the job's processes are gone")
    return running.job


def _own_address(invite: Invite) -> str:
    """The address by which others most likely reach this host."""
    return choose(invite.interface) if invite.interface else _seen_by_ssh() or reachable_address()


def _seen_by_ssh() -> str:
    """The address by which the command has reached this host; empty without ssh, or when it is loopback."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    addr = words[2].partition("%")[0] if len(words) == 4 else ""
    return "" if addr.startswith("127.") or addr == "::1" else addr


if __name__ == "__main__":
    sys.exit(main())
