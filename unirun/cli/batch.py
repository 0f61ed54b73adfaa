"""``unirun --slurm …``: submit the job that a command line describes to Slurm, and follow it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from unirun.cli.commandline import CommandLine
from unirun.cli.compose import job_spec, warnings
from unirun.cli.options import OPTIONS
from unirun.collocation import Device, Inventory, Node
from unirun.errors import Fault, SpecError, UsageError
from unirun.launcher.foreground.terminal import say, warn
from unirun.launcher.slurm.options import BatchOptions, Component, parse_slurm
from unirun.launcher.slurm.submit import Follower, batch_of, batch_script, submit
from unirun.spec.job import JobSpec, RoleSpec
from unirun.spec.read import nearest

_HERE = ("slurm", "slurm_extra", "slurm_setup", "dry_run", "detach", "rdzv_id")
"""Options that are not passed on; the id of the job is, as the script has it."""


def submit_job(line: CommandLine) -> int:
    """Submit a job and follow it, or with ``--dry-run`` print its batch script. Returns the exit code.

    Raises `SpecError` and `UsageError` for what can be wrong before the nodes are known.
    """
    given = line.options
    _refuse(given)
    options = parse_slurm(
        given["slurm"], extra=given.get("slurm_extra", ()), setup=given.get("slurm_setup", ())
    )
    contained = any(component.container_image for component in options.components)
    # In a container, this interpreter and its modules need not be there, and a set-up may add modules.
    here = not contained and not given.get("slurm_setup")
    spec = job_spec(line, _inventory(options.components[0]), here=here)
    check_roles(spec, options)
    program = ("unirun",) if contained else (sys.executable, "-m", "unirun")
    words = (*component_words(spec, options), *words_of(line))
    batch = batch_of(spec, options, words, program)
    if given.get("dry_run"):
        sys.stdout.write(batch_script(options, batch))
        return 0
    for warning in warnings(line, spec, os.environ):
        warn(warning)
    quiet = bool(given.get("quiet"))
    job, submitted = submit(
        spec, options, batch, tell=lambda text: None if quiet else warn(f"sbatch: {text}")
    )
    if not quiet:
        warn(f"job {spec.run_id} is Slurm job {submitted}")
    if given.get("detach"):
        say(spec.run_id)
        warn(f"submitted; follow it with: unirun status {spec.run_id}, unirun logs -f {spec.run_id}")
        return 0
    return Follower(job, submitted, quiet=quiet).run()


_REFUSED = {
    "hosts": "the nodes are those that Slurm gives the job",
    "hostfile": "the nodes are those that Slurm gives the job",
    "inventory": "the nodes are those of the allocation",
    "node_name": "the nodes have Slurm's names",
    "node_rank": "the nodes are in Slurm's order",
    "nnodes": "--slurm nodes=N gives the number of nodes",
    "pre_check": "it is for hosts that are reached by ssh",
    "stdin": "a batch job has no stdin",
    "sync": "it is for hosts that are reached by ssh",
}


_HARMLESS = {"nnodes": "1", "node_rank": "0"}


def _refuse(given: Mapping[str, Any]) -> None:
    """Raise `UsageError` for an option that a batch job cannot have."""
    for dest, why in _REFUSED.items():
        if given.get(dest) not in (None, _HARMLESS.get(dest)):
            name = f"--{dest.replace('_', '-')}"
            raise UsageError(f"{name}: {why}", f"leave out one of {name} and --slurm")


def words_of(line: CommandLine) -> Iterator[str]:
    """The arguments of unirun that describe the same job, without the options of batch jobs; `parse` reads them."""
    options = {option.dest: option for option in OPTIONS}
    for dest, value in line.options.items():
        if dest in _HERE:
            continue
        for each in value if isinstance(value, list) else [value]:
            yield options[dest].name if each is True else f"{options[dest].name}={each}"
    yield from line.overrides
    # After ``--``, a script may begin with a dash; with a job file, only arguments stand there.
    script = () if line.script is None else (line.script,)
    yield from (*script, "--") if "config" in line.options or not script else ("--", *script)
    yield from line.args


def _inventory(component: Component) -> Inventory:
    """A node as the first component has it, as far as its options tell, for roles with ``gpu`` or ``cpu`` ranks."""
    options = component.options
    gpus = options.get("gpus_per_node") or next(iter(re.findall(r"gpu:[^,]+", options.get("gres", ""))), "")
    number = re.search(r"(?<![0-9])[0-9]{1,4}$", gpus)
    devices = tuple(Device(str(index), "GPU") for index in range(int(number[0]) if number else bool(gpus)))
    return Inventory((Node("node0", tuple(range(int(options.get("cpus_per_task", "1")))), devices),))


def component_words(spec: JobSpec, options: BatchOptions) -> Iterator[str]:
    """The component of each role, where there are several: that which names it, else that which names none. A role may
    have said its own; one `beside` another is on the nodes of that."""
    if len(options.components) == 1:
        return
    named = {role: number for number, each in enumerate(options.components) for role in each.roles}
    others = next((number for number, each in enumerate(options.components) if not each.roles), None)
    for role in _roles(spec):
        number = named.get(role.name, others if role.component is None else None)
        if number is not None and role.entry.kind != "trainer":
            yield f"--component={role.name}={number}"


def check_roles(spec: JobSpec, options: BatchOptions) -> None:
    """Raise `SpecError` for roles that the job does not have, and roles of which the component is not known."""
    names = [role.name for role in _roles(spec)]
    named = [role for component in options.components for role in component.roles]
    faults = [
        Fault("--slurm roles", f"the job has no role {role!r}", nearest(role, names))
        for role in named
        if role not in names
    ]
    if sum(not component.roles for component in options.components) > 1:
        unknown = [role.name for role in _roles(spec) if role.component is None and role.name not in named]
        problem = f"several components name no roles, and {', '.join(unknown)} may be on any of them"
        remedy = "write roles=actor+rollout in all but one, or component: in the job file"
        faults += [Fault("--slurm roles", problem, remedy)] if unknown else []
    if faults:
        raise SpecError(faults)


def _roles(spec: JobSpec) -> list[RoleSpec]:
    """The roles of which a component can be named: those that the job file has."""
    return [role for role in spec.roles if role.beside is None]
