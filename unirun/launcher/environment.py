"""What a worker finds: torchrun's variables, so that an unchanged script works, and unirun's own.

RANK and WORLD_SIZE mean the role's group. Precedence: the environment of `unirun` < built in < job < role.
"""

from __future__ import annotations

from collections.abc import Mapping

from unirun.launcher.timers import ENABLE, PIPE
from unirun.rendezvous.endpoints import split_endpoint
from unirun.rendezvous.jobdir import JobDir
from unirun.rendezvous.store.address import PASSWORD_VARIABLE
from unirun.spec import JobSpec, RoleSpec
from unirun.values import WorkerId
from unirun.wire.messages import StartRole, StartWorker

# fmt: off
_AT_IMPORT = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "LD_", "PYTHON", "MALLOC_", "GLIBC_TUNABLES", "TORCH_",
    "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "ONEDNN_", "DNNL_", "MKLDNN_", "NPY_", "KINETO_", "OPENSSL_",
    "LC_", "LANG", "TZ", "TQDM_",
)
# fmt: on
_READ_LATER = ("TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_", "TORCH_ELASTIC_", "TORCH_GLOO_")
"""Of those, the ones that are read when a group is formed, or again by the worker's bootstrap."""

INTERPRETER = "PYTHON_EXEC"
"""torchrun's variable: the interpreter, or a program around it, that workers are started with."""

SpawnerKey = tuple[tuple[str, str], ...]
"""The variables that count only when libraries are loaded: workers that differ in them need other spawners."""

FRESH: SpawnerKey = (("", "fresh"),)
"""The key of the spawner that imports nothing and starts new interpreters and programs."""


def spawner_key(env: Mapping[str, str]) -> SpawnerKey:
    """The part of `env` that is read once, when Python, libgomp, MKL, the allocator, numpy or torch is loaded."""
    return tuple(sorted((name, value) for name, value in env.items() if counts_at_import(name)))


def spawner_env(key: SpawnerKey, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the spawner with this key is started with."""
    if key == FRESH:
        return dict(inherited)
    return {name: value for name, value in inherited.items() if not counts_at_import(name)} | dict(key)


def counts_at_import(name: str) -> bool:
    """Whether a variable is read once, when something is loaded."""
    early = name.startswith(_AT_IMPORT) or name.endswith("_ALLOC_CONF")
    return early and not name.startswith(_READ_LATER)


def for_workers(environ: Mapping[str, str]) -> dict[str, str]:
    """What of an agent's environment goes on to spawners and workers: all but the store's password.

    It must not reach spawners either: what a process was started with can be read in those it has forked.
    """
    return {name: value for name, value in environ.items() if name != PASSWORD_VARIABLE}


def is_loopback(addr: str) -> bool:
    """Whether `addr` is reached from this host only."""
    return addr in ("localhost", "::1") or addr.startswith("127.")


def base_env(spec: JobSpec, role: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """What all workers of `role` share: inherited, then built in, then the job's, then the role's."""
    workers = sum(each.count for each in spec.roles)
    env = for_workers(inherited)
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if workers > 1:
        # As torchrun does: many processes with a thread per core each would fight for the cores.
        env.setdefault("OMP_NUM_THREADS", str(threads_of(spec.role(role))))
    if spec.transport == "torch" and any(each.restart == "process" for each in spec.roles):
        # torch's RPC agent warns of every peer that ends, also when all is well.
        env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Without these, TensorPipe, gloo and NCCL listen where the host's name points to, which others may reach.
    # Calls stay on this host wherever the stores are.
    env.setdefault("TP_SOCKET_IFNAME", "lo")
    if is_loopback(spec.master_addr):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.setdefault(variable, "lo")
    env.update(spec.env)
    env.update(spec.role(role).env)
    return env


def is_fresh(spec: JobSpec, role: str, inherited: Mapping[str, str]) -> bool:
    """Whether workers of `role` are new interpreters: as the job says, or as torchrun's variable names another one."""
    return spec.role(role).start_method == "exec" or INTERPRETER in base_env(spec, role, inherited)


def threads_of(role: RoleSpec) -> int:
    """As many as the processors that its ranks were given, else one."""
    return int(role.slots) if role.device == "cpu" and role.slots > 1 else 1


def worker_env(
    spec: JobSpec, order: StartRole, member: StartWorker, job: JobDir, node: str, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The whole environment of one worker."""
    role = spec.role(order.role)
    addr, port = split_endpoint(order.endpoint)
    env = {
        **base_env(spec, order.role, inherited),
        "RANK": str(member.rank),
        "WORLD_SIZE": str(order.world_size),
        "LOCAL_RANK": "0" if spec.virtual_local_rank else str(member.local_rank),
        "LOCAL_WORLD_SIZE": str(order.local_world_size),
        "GROUP_RANK": str(order.group_rank),
        "GROUP_WORLD_SIZE": str(order.group_world_size),
        "ROLE_NAME": order.role,
        "ROLE_RANK": str(member.rank),
        "ROLE_WORLD_SIZE": str(order.world_size),
        "MASTER_ADDR": addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": spec.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(order.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(role.max_restarts),
        "TORCHELASTIC_ERROR_FILE": str(
            job.worker_logs(WorkerId(order.role, member.rank, member.incarnation)) / "error.json"
        ),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # As torchrun's --signals-to-handle sets it: a worker that starts processes with torch's own classes obeys it.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(spec.signals),
        "UNIRUN_JOB": spec.run_id,
        "UNIRUN_NODE": node,
        "UNIRUN_GENERATION": str(order.generation),
        "UNIRUN_INCARNATION": str(member.incarnation),
        "UNIRUN_SOCKET": str(job.agent_socket(node)),
    }
    if env.get(ENABLE) == "1":
        env[PIPE] = str(job.timer_pipe(node))
    own_mask = order.mask in {**spec.env, **role.env}
    if member.devices is not None and order.mask and role.auto_visible_device and not own_mask:
        env[order.mask] = ",".join(member.devices)
        if order.mask == "CUDA_VISIBLE_DEVICES":
            # The numbers are NVML's, which are in this order; CUDA's own puts the fastest first.
            env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if member.share < 1:
        env["UNIRUN_DEVICE_SHARE"] = f"{member.share:.6g}"
        if "CUDA_MPS_PIPE_DIRECTORY" in env:
            # Where MPS runs, it keeps a client to its part of the processors of a device.
            percentage = max(1, int(100 * member.share))
            env.setdefault("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(percentage))
    return env
