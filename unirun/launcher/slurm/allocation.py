"""The allocation in which ``srun`` has started this process, from the environment of a task.

What it may use of its node (processors, memory, GPUs) is read by `unirun.collocation.limits`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from unirun.errors import UsageError
from unirun.launcher.hostlist import compress, expand_nodelist
from unirun.values import Value

SRUN = "srun --ntasks-per-node=1"
"""unirun wants one task on each node, which starts the node's workers."""

_INTERACTIVE = "4294967290"
"""The step of salloc's shell with ``use_interactive_step`` (SLURM_INTERACTIVE_STEP of slurm.h)."""

_TASKS = re.compile(r"([0-9]{1,9})(?:\(x[0-9]+\))?")
_NUMBER = re.compile(r"[0-9]{1,9}")


class SlurmAllocation(Value):
    """The nodes of one job step, in Slurm's order, and the one of this task.

    `job` is the id of the Slurm job, `step` that of the step in it. `components` has for each node the component of a
    heterogeneous job that it belongs to; 0 in other jobs. `restarts` is how often Slurm has requeued the job.
    """

    job: str
    step: str
    nodes: tuple[str, ...]
    node: str
    components: tuple[int, ...]
    restarts: int = 0

    @property
    def head(self) -> str:
        """The first node."""
        return self.nodes[0]

    @property
    def index(self) -> int:
        """The place of this task's node among `nodes`."""
        return self.nodes.index(self.node)


def read_allocation(environ: Mapping[str, str]) -> SlurmAllocation | None:
    """The step of several nodes that this process is a task of; None when there is none.

    A step on a part of the allocation's nodes counts as it is. Raises `UsageError` when a node has more than one task,
    and for variables that are not as Slurm sets them.
    """
    if not {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURMD_NODENAME"} <= environ.keys():
        return None
    refuse_several_tasks(environ)
    nodes, node = expand_nodelist(environ["SLURM_STEP_NODELIST"]), environ["SLURMD_NODENAME"]
    if len(nodes) < 2:
        return None
    if node not in nodes or len(set(nodes)) < len(nodes):
        raise UsageError(
            f"this is node {node!r:.80}, and the step runs on {compress(nodes):.200}",
            f"are SLURM_STEP_NODELIST and SLURMD_NODENAME changed? start it with {SRUN}",
        )
    return SlurmAllocation(
        job=environ["SLURM_JOB_ID"],
        step=environ["SLURM_STEP_ID"],
        nodes=nodes,
        node=node,
        components=_components(nodes, environ),
        restarts=_number(environ.get("SLURM_RESTART_COUNT")),
    )


def refuse_several_tasks(environ: Mapping[str, str]) -> None:
    """Raise `UsageError` in a task of a step that has several on a node, each of which would start a job.

    In a shell of ``srun --pty`` there is the first task alone: the others have no terminal, and have ended.
    """
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1") if "SLURM_STEP_ID" in environ else "1"
    shell = "SLURM_PTY_PORT" in environ and environ.get("SLURM_PROCID") == "0"
    if not shell and any(int(count) > 1 for count in _TASKS.findall(tasks)):
        raise UsageError(
            f"the step has more than one task on a node ({tasks}), and each would start a job",
            f"unirun starts the processes of a node itself: {SRUN} unirun …",
        )


def component_here(environ: Mapping[str, str]) -> int:
    """The component of a heterogeneous job that this node belongs to; 0 in another job and outside of any."""
    found = read_allocation(environ)
    return 0 if found is None else found.components[found.index]


def unused_nodes(environ: Mapping[str, str], host: str) -> tuple[str, ...]:
    """The nodes of an allocation that a job started by this process on `host` does not use: outside of a step
    of srun, as in a shell or a batch script of the allocation, all but this one. The shell of salloc may be
    on another host."""
    if "SLURM_JOB_NODELIST" not in environ or environ.get("SLURM_STEP_ID", _INTERACTIVE) != _INTERACTIVE:
        return ()
    here = environ.get("SLURMD_NODENAME") or host
    nodes = component_lists(environ) or [expand_nodelist(environ["SLURM_JOB_NODELIST"])]
    return tuple(node for part in nodes for node in part if node.partition(".")[0] != here.partition(".")[0])


def _components(nodes: tuple[str, ...], environ: Mapping[str, str]) -> tuple[int, ...]:
    """The component of each of `nodes`. Raises `UsageError` for a node that is in none."""
    parts = component_lists(environ)
    if not parts:
        return (0,) * len(nodes)
    found = {node: number for number, part in enumerate(parts) for node in part}
    if unknown := [node for node in nodes if node not in found]:
        problem = f"{compress(unknown):.200} is in no component of the heterogeneous job"
        raise UsageError(problem, "are variables SLURM_JOB_NODELIST_HET_GROUP_n changed?")
    return tuple(found[node] for node in nodes)


def component_lists(environ: Mapping[str, str]) -> list[tuple[str, ...]]:
    """The nodes of each component of a heterogeneous job; none of another job."""
    lists = []
    for number in range(_number(environ.get("SLURM_HET_SIZE"))):
        # srun without a batch script sets the names of Slurm 19 only, up to 22.05.
        names = (f"SLURM_JOB_NODELIST_{word}_GROUP_{number}" for word in ("HET", "PACK"))
        text = next((environ[name] for name in names if name in environ), None)
        if text is not None:
            lists.append(expand_nodelist(text))
    return lists


def _number(text: str | None) -> int:
    return int(text) if text and _NUMBER.fullmatch(text) else 0
