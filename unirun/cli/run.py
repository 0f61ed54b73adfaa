"""``unirun script.py``: parse, plan, launch, and leave with the job's exit code."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from unirun.cli.commandline import CommandLine, parse
from unirun.cli.commands import call
from unirun.cli.compose import (
    defaults_of,
    job_spec,
    node_count,
    plan_job,
    rendezvous_settings,
    several_nodes,
    tell_mistakes,
)
from unirun.cli.options import HEAD_PORT
from unirun.collocation import Inventory, local_inventory
from unirun.collocation.host import told_topology
from unirun.errors import RendezvousError, UsageError
from unirun.launcher.foreground.terminal import may_read, say, warn
from unirun.launcher.hostlist import Host, parse_hosts, read_hostfile
from unirun.launcher.hosts.byhand import is_here, run_head, run_member, shared_secret, token_of_job
from unirun.launcher.launch import run
from unirun.launcher.planned import PlannedJob, plan
from unirun.launcher.slurm.allocation import SRUN, SlurmAllocation, read_allocation
from unirun.launcher.slurm.firstnode import address_here, find, outliving_the_script, published
from unirun.rendezvous.store.url import store_url
from unirun.spec.job import JobSpec
from unirun.spec.read import is_run_id
from unirun.spec.roles import NodeCount
from unirun.values import natural
from unirun.wire.address import TcpAddress
from unirun.wire.handshake import Token, new_token
from unirun.wire.messages import Invite


def main(argv: Sequence[str]) -> int:
    """Run the job that `argv` describes. Returns the exit code."""
    line = parse(argv)
    options = line.options
    if "print_completion" in options:
        return call("completion", [options["print_completion"]])
    if "SLURM_STEP_ID" in os.environ:
        from unirun.launcher.slurm.allocation import refuse_several_tasks

        refuse_several_tasks(os.environ)
    if "slurm" in options:
        from unirun.cli.batch import submit_job

        return submit_job(line)
    for name in ("slurm_extra", "slurm_setup"):
        if name in options:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for jobs that are submitted to Slurm", "add --slurm nodes=N,…")
    if "dry_run" in options:
        raise UsageError(
            "--dry-run prints the batch script of --slurm", "unirun plan shows what would run where"
        )
    detach = bool(options.get("detach"))
    if detach and "stdin" in options:
        raise UsageError("--stdin: a detached job has no stdin", "leave out one of --stdin and --detach")
    for name in ("sync", "pre_check"):
        if options.get(name) and "hosts" not in options and "hostfile" not in options:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for hosts that are reached by ssh", "name them: --hosts h1,h2")
    everything = {**defaults_of(line, os.environ), **options}
    if several_nodes(everything) or in_a_step(os.environ):
        # Imported here: jobs of one host need none of it.

        return run_on_hosts(line, everything)
    planned = plan_job(line)
    code = run(
        planned,
        store=store_url(options.get("store")),
        detach=detach,
        stdin=may_read(),
        quiet=bool(options.get("quiet")),
        verbose=bool(options.get("verbose")),
    )
    if detach and code == 0:
        tell_started(planned.spec.run_id)
    return code


def tell_started(run_id: str) -> None:
    """Say that a detached job runs: its id on stdout, and what to do with it."""
    say(run_id)
    warn(f"started; follow it with: unirun logs -f {run_id}")


def in_a_step(environ: Mapping[str, str]) -> bool:
    """Return True if srun may have started this command on several nodes, which `unirun.launcher.slurm` knows."""
    return environ.get("SLURM_STEP_NUM_NODES", "1") != "1"


# Jobs of several hosts, from the command line: which hosts, who is the head, where they meet.

LAST_CALL_TIMEOUT = 30.0
"""Seconds to wait for more nodes when the least number is there, as in torchrun."""


def run_on_hosts(line: CommandLine, options: Mapping[str, Any]) -> int:
    """Run the job over ssh, or as one of the commands on its nodes. Returns its exit code.

    `options` are those of `line` and of the environment. Raises `UsageError`, `RendezvousError`.
    """
    _refuse(options)
    detach = bool(options.get("detach"))
    if "hosts" in options or "hostfile" in options:
        # Imported here: asyncio's subprocesses are needed for nothing else.
        from unirun.launcher.hosts.ssh import run_over_ssh

        hosts = hosts_of(options)
        if options.get("pre_check"):
            hosts = _checked(hosts, options.get("interface"))
        count = len(hosts), len(hosts)
        spec = job_spec(line, local_inventory(), nodes=count)
        code = run_over_ssh(
            hosts,
            spec,
            lambda inventory: planned(line, inventory, count, spec.run_id),
            store=store_url(options.get("store")),
            interface=options.get("interface", ""),
            insecure=bool(options.get("insecure")),
            quiet=bool(options.get("quiet")),
            sync=bool(options.get("sync")),
            detach=detach,
        )
        return _left(code, spec.run_id) if detach else code
    step = None if several_nodes(options) else read_allocation(os.environ)
    if step is None and not several_nodes(options):
        raise UsageError("srun has not told which nodes this step has", f"start it with {SRUN}")
    count = node_count(options) if step is None else (len(step.nodes), len(step.nodes))
    # Mistakes are told before anything is waited for.
    spec = job_spec(line, local_inventory(), nodes=count)
    quiet = bool(options.get("quiet"))
    if detach and step is not None:
        raise UsageError(
            "--detach: Slurm ends what a step leaves behind", "leave it out; sbatch or --slurm detach"
        )

    def make_plan(inventory: Inventory) -> PlannedJob:
        found = planned(line, inventory, count, spec.run_id)
        return found if step else replace(found, spec=replace(found.spec, most_nodes=count[1]))

    store = store_url(options.get("store"))
    if step is not None and step.index > 0:
        with outliving_the_script(spec.run_id, os.environ):
            # srun shows the output of all nodes together, so that the head's notes are enough.
            return run_member(
                step_invite(options, spec, step),
                timeout=spec.join_timeout,
                quiet=True,
                complete=partial(with_head, step, spec),
            )
    if step is not None:
        invite = step_invite(options, spec, step)
        token = Token(bytes.fromhex(invite.token))

        def publish(address: TcpAddress) -> AbstractContextManager[None]:
            return published(step, address, token)

        return run_head(
            *(invite, count, make_plan),
            timeout=spec.join_timeout,
            store=store,
            quiet=quiet,
            names=step.nodes,
            publish=publish,
        )
    invite = invite_of(options, spec, count[1])
    complete = partial(with_token, options, spec)
    if not invite.leads:
        return run_member(invite, timeout=spec.join_timeout, quiet=quiet, complete=complete)
    code = run_head(
        *(complete(invite), count, make_plan),
        timeout=spec.join_timeout,
        store=store,
        quiet=quiet,
        last_call=last_call(options),
    )
    return _left(code, spec.run_id) if detach else code


def _left(code: int, run_id: str) -> int:
    if code == 0:
        tell_started(run_id)
    return code


def _refuse(options: Mapping[str, Any]) -> None:
    """Refuse what a job of several hosts cannot have. Raises `UsageError`."""
    if "stdin" in options:
        raise UsageError("--stdin: a worker on another host has no terminal", "leave it out")
    if "inventory" in options:
        raise UsageError("--inventory: the nodes of this job are real", "leave it out, or plan with it")


def planned(line: CommandLine, inventory: Inventory, nodes: NodeCount, run_id: str) -> PlannedJob:
    """The job with the inventory of all its nodes. Likely mistakes are written to stderr."""
    spec = replace(job_spec(line, inventory, nodes=nodes), run_id=run_id)
    tell_mistakes(line, spec, inventory)
    return plan(spec, inventory, told_topology)


def hosts_of(options: Mapping[str, Any]) -> tuple[Host, ...]:
    """The hosts that ``--hosts`` or ``--hostfile`` names. Raises `UsageError`."""
    if "hosts" in options and "hostfile" in options:
        raise UsageError("--hosts and --hostfile exclude each other", "leave out one of them")
    for option in ("nnodes", "node_rank", "rdzv_endpoint"):
        if option in options and not (option == "node_rank" and str(options[option]) == "0"):
            raise UsageError(
                f"--{option.replace('_', '-')} is for a command on each node, and --hosts starts those",
                "leave out one of them",
            )
    return parse_hosts(options["hosts"]) if "hosts" in options else read_hostfile(Path(options["hostfile"]))


def _checked(hosts: tuple[Host, ...], interface: str | None) -> tuple[Host, ...]:
    """The hosts that pass the doctor's short examination; the others are told with the reasons. Raises
    `RendezvousError` when none does."""
    from unirun.launcher.doctor.examine import pre_check

    good, bad = pre_check(hosts, interface)
    for name, why in bad.items():
        warn(f"{name} is left out: {why}")
    if not good:
        raise RendezvousError("no host has passed the check", f"see unirun doctor --hosts {','.join(bad)}")
    return good


def invite_of(options: Mapping[str, Any], spec: JobSpec, most: int) -> Invite:
    """The part of this command in a job of `most` nodes that have one each, by torchrun's options, without the token.
    Raises `UsageError`, `RendezvousError`."""
    host, port = _endpoint(options)
    backend = options.get("rdzv_backend", "static")
    if backend not in ("static", "c10d"):
        raise UsageError(f"--rdzv-backend {backend}: only static and c10d apply", "leave it out")
    rank = _node_rank(options, most)
    name = node_name(options.get("node_name"))
    leads = rank == 0 if rank >= 0 else is_here(host)
    return Invite(
        "",
        name,
        rank,
        spec,
        TcpAddress(host, port, ""),
        leads,
        interface=options.get("interface") or _bare(options.get("local_addr", "")),
        insecure=bool(options.get("insecure")),
        detach=bool(options.get("detach")),
    )


def with_token(options: Mapping[str, Any], spec: JobSpec, invite: Invite) -> Invite:
    """The `invite` with the token of the job, for whose secret a node that is not the head may have to wait. Raises
    `JobError`."""
    assert invite.head is not None
    secret = shared_secret(options.get("token_file"), make=invite.leads, timeout=spec.join_timeout)
    name = options.get("rdzv_id") or f"{invite.head.addr}:{invite.head.port}"
    return replace(invite, token=token_of_job(secret, name).hex())


def last_call(options: Mapping[str, Any]) -> float:
    """Seconds to wait for more nodes when the least number is there."""
    conf = dict(item.partition("=")[::2] for item in rendezvous_settings(options)[0])
    return float(conf.get("last_call_timeout", LAST_CALL_TIMEOUT))


def node_name(given: str | None) -> str:
    """The name of this host as a node, which may be `given` by the user. Raises `UsageError`."""
    name = socket.gethostname() if given is None else given
    if not is_run_id(name):
        raise UsageError(
            f"--node-name {name!r:.80} is no name of a node", "use letters, digits, '.', '-' and '_'"
        )
    return name


def step_invite(options: Mapping[str, Any], spec: JobSpec, step: SlurmAllocation) -> Invite:
    """The part of this command in the job of a job step; if it does not lead, without what only the head knows. Raises
    `RendezvousError`."""
    leads = step.index == 0
    return Invite(
        new_token().hex() if leads else "",
        step.node,
        step.index,
        spec,
        TcpAddress(address_here(step), 0, "") if leads else None,
        leads,
        interface=options.get("interface", ""),
        insecure=bool(options.get("insecure")),
    )


def with_head(step: SlurmAllocation, spec: JobSpec, invite: Invite) -> Invite:
    """The `invite` with the head's address and the token, which the head publishes. Raises `RendezvousError`."""
    host, port, token = find(step, spec.join_timeout)
    return replace(invite, token=token.hex(), head=TcpAddress(host, port, ""))


def _endpoint(options: Mapping[str, Any]) -> tuple[str, int]:
    """The head's host and port."""
    if options.get("rdzv_endpoint"):
        return endpoint(options["rdzv_endpoint"])
    if "master_addr" in options:
        return endpoint(f"{options['master_addr']}:{options.get('master_port', 29500)}")
    raise UsageError(
        f"--nnodes {options.get('nnodes')}: nothing says where the nodes meet",
        "name the head on each of them: --rdzv-endpoint HOST:PORT; or let one command start all: --hosts h1,h2",
    )


def endpoint(text: str) -> tuple[str, int]:
    """``HOST[:PORT]``. Raises `UsageError`."""
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    host, port = (host, port) if colon else (text, str(HEAD_PORT))
    if not 0 < (number := natural(port) or 0) < 65536:
        raise UsageError(f"{port!r:.80} is no port", "write --rdzv-endpoint HOST:PORT")
    if not _bare(host) or (host.endswith(":") and not host.endswith("::")):
        remedy = "write --rdzv-endpoint HOST:PORT, an IPv6 address in brackets: [fd00::1]:29400"
        raise UsageError(f"{text!r:.80} names no host", remedy)
    return _bare(host), number


def _bare(host: str) -> str:
    """An IPv6 address without its brackets; any other name as it is."""
    return host.removeprefix("[").removesuffix("]")


def _node_rank(options: Mapping[str, Any], most: int) -> int:
    """The node rank, -1 when it is not given."""
    if "node_rank" not in options:
        return -1
    text = str(options["node_rank"])
    if (found := natural(text)) is None or found >= most:
        raise UsageError(
            f"--node-rank {text:.80}: expected 0 to {most - 1}", "each node has a rank of its own"
        )
    return found
