"""The same job for those that start containers: a JobSet of Kubernetes, and a compose file.

Each container is a node and runs the command that one would call there by hand. The token is a secret that the user
makes, so that it is in none of these files.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import replace

from unirun.values import Value

PORT = 29400
"""Of the head, as torchrun's."""

_FOLDER = "/etc/unirun"
_INDEX = "UNIRUN_POD"
_SECRET = "/run/secrets/unirun"
"""Not ``/run/secrets``: what is below it belongs to Kubernetes."""


class Containers(Value):
    """A job of `nodes` containers of `image` with `gpus` each. `job_file` is the text of the job file, which is called
    `file` in a container, and `words` are further arguments of unirun."""

    name: str
    image: str
    job_file: str
    file: str = "job.yaml"
    words: tuple[str, ...] = ()
    nodes: int = 1
    gpus: int = 0

    @property
    def label(self) -> str:
        """The name as Kubernetes and compose allow it, and short enough for names of pods."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].strip("-") or "job"

    def command(self, rank: str, head: str, token: str) -> list[str]:
        """The command that the node `rank` runs when the first node can be reached as `head`."""
        command = ["unirun", "--config", f"{_FOLDER}/{self.file}", "--rdzv-id", self.label]
        if self.nodes > 1:
            command += ["--nnodes", str(self.nodes), "--node-rank", rank]
            command += ["--rdzv-endpoint", f"{head}:{PORT}", "--token-file", token]
        return [*command, *self.words]


def compose_file(job: Containers) -> dict[str, Any]:
    """A compose file (https://github.com/compose-spec) with a service for each node."""
    secrets = {"token": {"file": "./token"}} if job.nodes > 1 else {}
    service: dict[str, Any] = {
        "image": job.image,
        "configs": [{"source": "job", "target": f"{_FOLDER}/{job.file}"}],
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
            "data": {job.file: job.job_file},
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
