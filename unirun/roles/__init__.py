"""The code that runs inside a worker: its identity, its peers, groups with them, and calls to them."""

from unirun.roles.calls.call import InvocationRef, wait
from unirun.roles.calls.group import RemoteMethod, RoleGroup, WorkerHandle, trainer_invocation
from unirun.roles.calls.policy import replicate, shard
from unirun.roles.context import Context, Member, commit_job, init, rpc_name, serve
from unirun.roles.inprocess import run_in_process
from unirun.roles.stopping import should_stop
from unirun.roles.surviving import ResilientState, resilient
from unirun.roles.workload import BaseTrainer, BaseWorkload, MasterHandle, Workload

__all__ = [
    "BaseTrainer",
    "BaseWorkload",
    "Context",
    "InvocationRef",
    "MasterHandle",
    "Member",
    "RemoteMethod",
    "ResilientState",
    "RoleGroup",
    "WorkerHandle",
    "Workload",
    "commit_job",
    "init",
    "replicate",
    "resilient",
    "rpc_name",
    "run_in_process",
    "serve",
    "shard",
    "should_stop",
    "trainer_invocation",
    "wait",
]
