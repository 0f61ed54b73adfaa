"""Builders with which a job of workloads and a trainer is described in Python, in DLRover's words.

::

    job = (
        RLJobBuilder()
        .node_num(1)
        .device_per_node(4)
        .config({"lr": 3e-4})
        .trainer("ppo", "PPOTrainer")
        .actor("ppo", "Actor").total(4).per_node(4).env({"K": "V"})
        .rollout("ppo", "Rollout").total(4).per_node(4)
        .with_collocation("actor", "rollout")
        .build()
    )

`build` checks everything, and raises all faults at once; the other methods check nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from msgspec.structs import replace

from unirun.collocation import parse_fake
from unirun.collocation.host import told_topology
from unirun.errors import Fault, PlacementError, SpecError
from unirun.launcher.planned import plan
from unirun.spec.builder import Draft, EntryDraft, WorkloadDraft, job_mapping
from unirun.spec.parse import parse_job
from unirun.train.job import Job, entry_of, importable, load


class DLJobBuilder:
    """Describes a job of any type. Methods may be called in any order; only `build` checks them.

    ::

        job = DLJobBuilder().dl_type("SFT").node_num(1).device_per_node(8).config({"lr": 3e-4})
        job = job.trainer("sft", "Trainer").workload("worker", "sft", "Worker").total(8).per_node(8).build()
        job.submit("sft")
    """

    def __init__(self) -> None:
        self._job: DLJobBuilder = self
        self._draft = Draft()

    def _say(self, **more: Any) -> DLJobBuilder:
        self._job._draft = replace(self._job._draft, **more)
        return self._job

    def dl_type(self, dl_type: str = "SFT") -> DLJobBuilder:
        """The type of learning: ``PRE``, ``SFT``, ``RL`` or ``MULTIMODAL``. Required."""
        return self._say(dl_type=dl_type)

    def node_num(self, num: int = 1) -> DLJobBuilder:
        """The number of nodes. Required."""
        return self._say(node_num=num)

    def device_per_node(self, num: int = 8) -> DLJobBuilder:
        """The number of devices per node; without accelerators, the number of CPU slots. Required."""
        return self._say(device_per_node=num)

    def config(self, config: Any) -> DLJobBuilder:
        """The value of ``self.config`` in workers: a dict or an OmegaConf ``DictConfig``, may be empty. Required."""
        return self._say(config=config)

    def global_env(self, env: Mapping[str, Any]) -> DLJobBuilder:
        """Environment variables of all workers. Those of a role take precedence. Several calls add up."""
        return self._say(env=_merged(self._job._draft.env, env))

    def trainer(self, module_name: str, class_name: str) -> DLJobBuilder:
        """The class that calls the workloads, a `BaseTrainer`. The job ends when it does. Required."""
        return self._say(trainer=EntryDraft(importable(module_name), class_name))

    def workload(self, role_name: str, module_name: str, class_name: str) -> WorkloadBuilder:
        """A role, and the class of its workers, a `BaseWorkload`. At least one is required."""
        return WorkloadBuilder(self._job, role_name, EntryDraft(importable(module_name), class_name))

    def actor(self, module_name: str, class_name: str) -> WorkloadBuilder:
        """The role ``actor``. Required in a job of type ``RL``."""
        return self.workload("actor", module_name, class_name)

    def rollout(self, module_name: str, class_name: str) -> WorkloadBuilder:
        """The role ``rollout``."""
        return self.workload("rollout", module_name, class_name)

    def reference(self, module_name: str, class_name: str) -> WorkloadBuilder:
        """The role ``reference``."""
        return self.workload("reference", module_name, class_name)

    def reward(self, module_name: str, class_name: str) -> WorkloadBuilder:
        """The role ``reward``."""
        return self.workload("reward", module_name, class_name)

    def critic(self, module_name: str, class_name: str) -> WorkloadBuilder:
        """The role ``critic``."""
        return self.workload("critic", module_name, class_name)

    def function(self, role_name: str, function: Callable[..., Any] | str) -> WorkloadBuilder:
        """A role whose workers call a function: ``def main(): …``, or ``def main(ctx): …`` with the worker's `Context`.

        `function` is the object or ``"pkg.mod:main"``. Workers import it, so it is defined at the top level of a
        module; `build` refuses a lambda and a local function. What it returns is ignored. Such a role restarts as a
        script does, and a job with functions only needs no trainer::

            job = DLJobBuilder().dl_type("PRE").node_num(1).device_per_node(8).config({})
            job = job.function("train", pretrain.main).total(8).per_node(8).build()
        """
        return WorkloadBuilder(self._job, role_name, entry_of(function), "function")

    def service(self, role_name: str, *command: str, **settings: Any) -> DLJobBuilder:
        """A program that the job needs until its end, such as a server. `settings` are those of a role in a job file:
        ``count``, ``slots``, ``ports``, ``ready``, ``after``, ``env``, ``python`` and so on.

        ::

            job.service("engine", kind="vllm", model=model, count=2, slots=2)
            job.service("reward", "python", "reward.py", "--port", "{port}")
        """
        runs = {"program": command[0], "args": [*command[1:]]} if command else {}
        role = {**runs, "service": True, **settings}
        return self._say(services={**self._job._draft.services, role_name: role})

    def with_collocation(self, *roles: str) -> DLJobBuilder:
        """These roles share devices: one rank of each on every device. Names in upper or lower case."""
        return self._group("collocations", roles)

    def with_collocation_all(self) -> DLJobBuilder:
        """All workloads share devices, also those that are added later."""
        return self._say(collocate_all=True)

    def with_host_collocation(self, *roles: str) -> DLJobBuilder:
        """These roles are on the same nodes, in proportion to their numbers of ranks, on devices of their own."""
        return self._group("host_collocations", roles)

    def with_separation(self, *roles: str) -> DLJobBuilder:
        """These roles are never on the same node."""
        return self._group("separations", roles)

    def with_isolation(self, *roles: str) -> DLJobBuilder:
        """These roles are never on the same NUMA node. They may share a host."""
        return self._group("isolations", roles)

    def _group(self, key: str, roles: tuple[str, ...]) -> DLJobBuilder:
        return self._say(groups=(*self._job._draft.groups, (key, roles)))

    def spares(self, num: int = 1) -> DLJobBuilder:
        """The number of nodes that are held back, to replace lost ones."""
        return self._say(spares=num)

    def exclude_nodes(self, *names: str) -> DLJobBuilder:
        """Nodes that the job does not use. Several calls add up."""
        return self._say(exclude_nodes=(*self._job._draft.exclude_nodes, *names))

    def edge(
        self,
        source: str,
        target: str,
        invocation: str = "",
        *,
        kind: str | None = None,
        asynchronous: bool = False,
        weight: str | float = 0,
    ) -> DLJobBuilder:
        """Role `source` calls role `target`, and `weight` bytes go there per step (a number, or ``"64MB"``).

        `invocation` names the method, for pictures. `kind` is ``one_to_one``, ``broadcast``, ``scatter``, ``gather`` or
        ``all_to_all``; by default it follows from the numbers of ranks. `asynchronous` says that the caller does not
        wait. Roles that exchange much are placed on few nodes.
        """
        edge: dict[str, Any] = {"from": source, "to": target, "async": asynchronous, "weight": weight}
        edge |= {"invocation": invocation} if invocation else {}
        edge |= {"kind": kind} if kind is not None else {}
        return self._say(edges=(*self._job._draft.edges, edge))

    def channel(self, name: str, *, publisher: str, receivers: Sequence[str]) -> DLJobBuilder:
        """Weights go from role `publisher` to the roles `receivers`: ``WeightsChannel(name)`` in their workers, and
        ``self.sync_weights(name)`` in the trainer."""
        channel = {"publisher": publisher, "receivers": [*receivers]}
        return self._say(channels={**self._job._draft.channels, name: channel})

    def transport(self, name: str) -> DLJobBuilder:
        """The transport of calls: ``socket`` (the default) or ``torch``, torch.distributed.rpc."""
        return self._say(transport=name)

    def call_timeout(self, seconds: float) -> DLJobBuilder:
        """The deadline, in seconds, of calls that have no `timeout` of their own. 1800 by default."""
        return self._say(call_timeout=seconds)

    def job_restarts(
        self, most: int, *, window: str | float | None = None, delay: str | float | None = None
    ) -> DLJobBuilder:
        """The number of restarts of all roles together, which come when those of one are used up (default 0).

        Only those of the last `window` count (seconds, or ``"1h"``). Before the second one there is a back-off of
        `delay`, before each further one twice as much. Roles that say nothing else have the same `window` and `delay`.
        """
        return self._say(
            restarts={"max_job_restarts": most, **_given(restart_window=window, restart_delay=delay)}
        )

    def build(self) -> Job:
        """Import the classes and functions, check everything, and return the job.

        Raises `SpecError` with all faults at once.
        """
        draft = self._job._draft
        drafts = [workload.entry for workload in draft.workloads]
        drafts += [draft.trainer] if draft.trainer is not None else []
        loaded = {entry.target: load(entry.module, entry.name) for entry in drafts}
        mapping = job_mapping(draft, loaded)
        _check_placement(mapping, draft.node_num, draft.device_per_node)
        return Job(mapping, draft.node_num)


class WorkloadBuilder(DLJobBuilder):
    """Describes one workload. The methods for the job change the job, and return its builder."""

    def __init__(
        self,
        job: DLJobBuilder,
        role: str,
        entry: EntryDraft,
        kind: Literal["workload", "function"] = "workload",
    ) -> None:
        self._job, self._number = job, len(job._draft.workloads)
        # `build` refuses a name that is not a text.
        name = role if isinstance(role, str) else f"{role!r} (no text)"
        self._say(workloads=(*job._draft.workloads, WorkloadDraft(name, entry, kind)))

    def _own(self, **more: Any) -> None:
        workloads = [*self._job._draft.workloads]
        workloads[self._number] = replace(workloads[self._number], **more)
        self._say(workloads=tuple(workloads))

    def total(self, num: int = 1) -> Self:
        """The number of ranks of the role. Required."""
        self._own(total=num)
        return self

    def per_node(self, num: int = 1) -> Self:
        """The number of its ranks per node. It divides the total. Required."""
        self._own(per_node=num)
        return self

    def _need(self, **more: Any) -> Self:
        self._own(needs={**self._job._draft.workloads[self._number].needs, **more})
        return self

    def slots(self, num: float = 1) -> Self:
        """The number of devices that each rank takes: a whole number, a share of one like 0.5, or 0 for none."""
        return self._need(slots=num)

    def device(self, kind: str) -> Self:
        """The type of its devices: ``cpu``, ``cuda``, or another that the nodes have."""
        return self._need(device=kind)

    def cpus(self, num: int | Literal["all"]) -> Self:
        """The processors of its node that each rank needs, ``all`` for all of them."""
        return self._need(cpus=num)

    def memory(self, size: int | str) -> Self:
        """The memory of its node that each rank needs: bytes, or a size like ``64GB``."""
        return self._need(memory=size)

    def devices(self, *indices: int | str) -> Self:
        """The indices of the only devices that its ranks may have on any node."""
        return self._need(devices=[*indices])

    def per_group(self, num: int) -> Self:
        """Every `num` consecutive ranks are on one node."""
        return self._need(per_group=num)

    def after(self, *roles: str) -> Self:
        """The ranks start when all ranks of these roles are ready."""
        return self._need(after=[*roles])

    def restarts(
        self,
        most: int | None = None,
        *,
        per_rank: int | None = None,
        window: str | float | None = None,
        delay: str | float | None = None,
        fatal_exit_codes: Sequence[int] | None = None,
    ) -> Self:
        """The number of restarts of the role, and of those that one of its ranks may cause (`per_rank`).

        Only those of the last `window` count (seconds, or ``"10m"``). Before the second one there is a back-off of
        `delay`, before each further one twice as much. No restart follows one of the `fatal_exit_codes`.
        """
        codes = None if fatal_exit_codes is None else [*fatal_exit_codes]
        return self._need(
            **_given(
                max_restarts=most,
                rank_restarts=per_rank,
                restart_window=window,
                restart_delay=delay,
                fatal_exit_codes=codes,
            )
        )

    def env(self, env: Mapping[str, Any]) -> Self:
        """Environment variables of the role's workers. Several calls add up."""
        self._own(env=_merged(self._job._draft.workloads[self._number].env, env))
        return self

    def auto_visible_device(self, enabled: bool = True) -> Self:
        """Let a worker see only the devices that it was given (the default), or all devices of its node."""
        self._own(auto_visible_device=enabled)
        return self

    def enable_ray_auto_visible_device(self) -> Self:
        """The same as ``auto_visible_device()``, under the name that it has in DLRover."""
        return self.auto_visible_device()


JobBuilder = DLJobBuilder


class RLJobBuilder(DLJobBuilder):
    """Describes a job of type ``RL``."""

    def __init__(self) -> None:
        super().__init__()
        self.dl_type("RL")


def _check_placement(mapping: Mapping[str, Any], nodes: int, devices: int) -> None:
    """Check that the ranks fit on so many nodes. Raises `SpecError`."""
    spec = parse_job(mapping, count_slots=lambda _: 1, run_id="draft")
    # The names of the nodes are not known here, so none is excluded, nor are their processors and memory.
    roles = tuple(replace(role, cpus=None, memory=None) for role in spec.roles)
    spec = replace(spec, exclude_nodes=(), roles=roles)
    try:
        plan(spec, parse_fake(f"fake:nodes={nodes},devices={devices}"), told_topology)
    except PlacementError as error:
        raise SpecError(error.faults or [Fault("placement", error.problem, error.remedy)]) from error


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _merged(old: Any, new: Any) -> Any:
    """Both together; a value that is not a mapping is kept, and refused by `build`."""
    return {**old, **new} if isinstance(old, Mapping) and isinstance(new, Mapping) else new
