"""`run_in_process`: workloads and a trainer as threads of this process, for notebooks and debuggers."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from unirun.roles.calls.caller import Caller
from unirun.roles.calls.dispatcher import Dispatcher
from unirun.roles.calls.group import RoleGroup, role_group
from unirun.roles.calls.policy import invocations
from unirun.roles.handle import Identity, MasterHandle
from unirun.roles.peers import Peers, RoleInfo
from unirun.roles.trainer import BaseTrainer, bind
from unirun.roles.transport.inproc import InprocTransport
from unirun.roles.transport.scheduler import await_end
from unirun.roles.workload import BaseWorkload
from unirun.values import WorkerId
from unirun.wire.messages import RoleView, View, WorkerView

CALL_TIMEOUT = 1800.0


def run_in_process(
    trainer: type[BaseTrainer],
    workloads: Mapping[str, tuple[type[BaseWorkload], int]],
    config: Mapping[str, Any] | None = None,
) -> Any:
    """Run a job in this process, for notebooks and debuggers, and return what the trainer's `fit` returns.

    `workloads` has a class and a number of ranks for each role:
    ``run_in_process(PPOTrainer, {"actor": (Actor, 2)}, {"steps": 3})``. Each worker is a thread, so breakpoints work.
    Arguments and results are copied as in a real job. There are no process groups (torch has one per process), no
    restarts, and no environment per role. Raises what `setup`, `init` or `fit` raises.
    """
    workers_here: list[_InprocWorker] = []
    infos = {role: RoleInfo(role, count, 0) for role, (_, count) in workloads.items()}
    infos["trainer"] = RoleInfo("trainer", 1, 0)
    settings = OmegaConf.create(dict(config or {}))
    transport = InprocTransport()
    peers = Peers("trainer", 0, infos, transport=transport.name)
    caller = Caller(WorkerId("trainer", 0, 0), peers, transport, call_timeout=CALL_TIMEOUT)
    try:
        views = []
        for role, (kind, count) in workloads.items():
            workers = []
            for rank in range(count):
                worker = _InprocWorker(
                    kind(_handle(role, rank, count, infos), settings), WorkerId(role, rank, 0)
                )
                workers_here.append(worker)
                workers.append(WorkerView(rank, 0, "serving", {transport.name: worker.start()}))
            views.append(RoleView(role, count, 0, "", "running", tuple(workers)))
        peers.update(View(tuple(views)))
        groups = {role: role_group(caller, role, count) for role, (_, count) in workloads.items()}
        made = trainer(_handles(groups), {role: kind for role, (kind, _) in workloads.items()}, settings)
        resources = {role: {"role": role, "total": count} for role, (_, count) in workloads.items()}
        bind(made, groups, _handle("trainer", 0, 1, infos), resources, {})
        made.init()
        return made.fit()
    finally:
        for worker in workers_here:
            worker.stop()
        caller.close()
        transport.close()


def _handles(groups: Mapping[str, RoleGroup]) -> dict[str, list[Any]]:
    return {role: list(group) for role, group in groups.items()}


def _handle(role: str, rank: int, size: int, infos: Mapping[str, RoleInfo]) -> MasterHandle:
    identity = Identity(role, rank, size, rank, size, 0, os.environ.get("MASTER_ADDR", "127.0.0.1"), 0)
    return MasterHandle(identity, Peers(role, rank, infos))


class _InprocWorker:
    """A workload and the thread that serves it."""

    def __init__(self, workload: BaseWorkload, me: WorkerId) -> None:
        self.me, self._workload = me, workload
        self._dispatcher = Dispatcher(workload, me, invocations(workload, BaseWorkload))
        self._transport = InprocTransport()
        self._thread = threading.Thread(target=self._dispatcher.serve, name=str(me), daemon=True)

    def start(self) -> str:
        """Run `setup` in this thread, then serve in the worker's own. Returns the endpoint."""
        self._workload.setup()
        self._workload.on_generation(0)
        self._thread.start()
        return self._transport.serve(self.me, self._dispatcher.handle)

    def stop(self) -> None:
        """Stop serving and run `teardown`. A call that still runs is not waited for."""
        self._dispatcher.stop()
        self._dispatcher.close()
        self._transport.close()
        if self._thread.ident is not None:
            await_end(self._thread)
            self._workload.teardown()
