"""``unirun --slurm …`` and ``unirun render``: a job as Slurm, Kubernetes and compose start it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from unirun.cli.commandline import CommandLine
from unirun.cli.compose import job_spec, warnings
from unirun.cli.options import HEAD_PORT, OPTIONS
from unirun.collocation import Device, Inventory, Node
from unirun.errors import Fault, SpecError, UsageError
from unirun.launcher.foreground.terminal import say, warn
from unirun.launcher.slurm.options import BatchOptions, Component, parse_slurm
from unirun.launcher.slurm.submit import Batch, Follower, batch_of, batch_script, submit
from unirun.spec.job import JobSpec, RoleSpec
from unirun.spec.read import id_stem, nearest
from unirun.spec.yaml import write_yaml
from unirun.values import Value

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


# The same job for those that start containers: a JobSet of Kubernetes, and a compose file.
#
# Each container is a node and runs the command that one would call there by hand. The token is a secret that the user
# makes, so that it is in none of these files.

_FOLDER, _FILE = "/etc/unirun", "job.yaml"
"""The directory and the name of the job file in a container."""
_INDEX = "UNIRUN_POD"
_SECRET = "/run/secrets/unirun"
"""Not ``/run/secrets``: what is below it belongs to Kubernetes."""


class Containers(Value):
    """A job of `nodes` containers of `image` with `gpus` each. `job_file` is the text of the job file, and `words` are
    further arguments of unirun."""

    name: str
    image: str
    job_file: str
    words: tuple[str, ...] = ()
    nodes: int = 1
    gpus: int = 0

    @property
    def label(self) -> str:
        """The name as Kubernetes and compose allow it, and short enough for names of pods."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].strip("-") or "job"

    def command(self, rank: str, head: str, token: str) -> list[str]:
        """The command that the node `rank` runs when the first node can be reached as `head`."""
        command = ["unirun", "--config", f"{_FOLDER}/{_FILE}", "--rdzv-id", self.label]
        if self.nodes > 1:
            command += ["--nnodes", str(self.nodes), "--node-rank", rank]
            command += ["--rdzv-endpoint", f"{head}:{HEAD_PORT}", "--token-file", token]
        return [*command, *self.words]


def compose_file(job: Containers) -> dict[str, Any]:
    """A compose file (https://github.com/compose-spec) with a service for each node."""
    secrets = {"token": {"file": "./token"}} if job.nodes > 1 else {}
    service: dict[str, Any] = {
        "image": job.image,
        "configs": [{"source": "job", "target": f"{_FOLDER}/{_FILE}"}],
        "secrets": [*secrets],
        # Workers of one node share tensors in /dev/shm, of which a container has 64 MB by default.
        "shm_size": "8gb",
    }
    if job.gpus:
        device = {"driver": "nvidia", "count": job.gpus, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    services = {}
    for rank in range(job.nodes):
        command = job.command(str(rank), "node0", "/run/secrets/token")
        services[f"node{rank}"] = {**service, "command": [_literal(word) for word in command]}
    configs = {"job": {"content": _literal(job.job_file)}}
    return {"name": job.label, "services": services, "secrets": secrets, "configs": configs}


def _literal(text: str) -> str:
    """`text` without variables of compose."""
    return text.replace("$", "$$")


def job_set(job: Containers) -> list[dict[str, Any]]:
    """A JobSet (https://jobset.sigs.k8s.io) whose pods are the nodes, and the ConfigMap with the job file.

    A pod that dies with its host is replaced. One that ends with an exit code of its own ends the job: what could be
    restarted, unirun has restarted.
    """
    label = job.label
    # A reference to a variable in an argument is written $(…).
    job = replace(job, words=tuple(word.replace("$(", "$$(") for word in job.words))
    head = f"{label}-node-0-0.{label}"
    container: dict[str, Any] = {
        "name": "unirun",
        "image": job.image,
        "command": job.command(f"$({_INDEX})", head, f"{_SECRET}/token"),
        "env": [{"name": _INDEX, "valueFrom": {"fieldRef": {"fieldPath": _COMPLETION_INDEX}}}],
        "volumeMounts": [
            {"name": "job", "mountPath": _FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    volumes: list[dict[str, Any]] = [
        {"name": "job", "configMap": {"name": label}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if job.nodes > 1:
        container["volumeMounts"].append({"name": "token", "mountPath": _SECRET, "readOnly": True})
        volumes.append({"name": "token", "secret": {"secretName": f"{label}-token", "defaultMode": 0o400}})
    if job.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(job.gpus)}}
    pods = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 6,
        "podFailurePolicy": {"rules": _FAILURES},
        "template": {"spec": {"restartPolicy": "Never", "containers": [container], "volumes": volumes}},
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": label},
            "data": {_FILE: job.job_file},
        },
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": label},
            "spec": {
                "network": {"enableDNSHostnames": True},
                "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": pods}}],
            },
        },
    ]


_COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

_FAILURES = [
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    # 137: SIGKILL, as when its host is lost.
    {"action": "FailJob", "onExitCodes": {"containerName": "unirun", "operator": "NotIn", "values": [137]}},
]


_TOKEN = "head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' >token"


def render(options: Any) -> int:
    """Print the files. Returns 0. Raises `SpecError` and `UsageError` for what is wrong with the job."""
    line = CommandLine({"config": options.job}, tuple(options.overrides), None, ())
    node = Node("node0", (0,), tuple(Device(str(index), "GPU") for index in range(options.gpus)))
    # The host or the image that runs it need not be like this host.
    spec = job_spec(line, Inventory((node,)), here=False)
    if options.form == "slurm":
        sys.stdout.write(_script(options, spec))
        return 0
    if options.slurm or options.slurm_extra or options.slurm_setup:
        raise UsageError(
            "--slurm: only a batch script asks Slurm", f"leave it out of unirun render {options.form}"
        )
    if options.image is None:
        raise UsageError(
            f"unirun render {options.form} needs --image", "name an image that has unirun in its PATH"
        )
    job = Containers(
        name=spec.name,
        image=options.image,
        job_file=Path(options.job).read_text(encoding="utf-8"),
        words=tuple(options.overrides),
        nodes=options.nodes,
        gpus=options.gpus,
    )
    sys.stdout.write(_jobset(job) if options.form == "jobset" else _compose(job))
    return 0


def _script(options: Any, spec: JobSpec) -> str:
    asked = {"nodes": options.nodes, "gres": f"gpu:{options.gpus}" if options.gpus else None}
    asked |= {"container_image": options.image}
    text = ",".join(f"{key}={value}" for key, value in asked.items() if value is not None)
    asked_of_slurm = parse_slurm(
        options.slurm or [text], extra=options.slurm_extra, setup=options.slurm_setup
    )
    check_roles(spec, asked_of_slurm)
    words = (*component_words(spec, asked_of_slurm), "--config", options.job, *options.overrides)
    return batch_script(asked_of_slurm, Batch(id_stem(spec.name), words))


def _jobset(job: Containers) -> str:
    how = f"{_TOKEN}\nkubectl create secret generic {job.label}-token --from-file=token"
    return _with_token(job, how, write_yaml(*job_set(job)))


def _compose(job: Containers) -> str:
    return _with_token(job, _TOKEN, write_yaml(compose_file(job)))


def _with_token(job: Containers, how: str, text: str) -> str:
    """`text` with a comment on how the secret is made, where there is one."""
    lines = f"The nodes prove to each other that they know this secret, one for each job:\n{how}".split("\n")
    return "".join(f"# {line}\n" for line in lines if job.nodes > 1) + text
