"""The environment of workers: torchrun's variables, so that an unchanged script works, and unirun's own.

RANK and WORLD_SIZE are those of the role's group. Precedence: the environment of `unirun` < built in < job < role.
Programs get none of torchrun's variables, as those that start ranks themselves would take them for their own.
"""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from unirun.errors import RendezvousError
from unirun.launcher.interfaces import interface_of
from unirun.launcher.sampler import HANG_TIMEOUT
from unirun.launcher.timers import ENABLE, PIPE
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.store.protocol import PASSWORD_VARIABLE
from unirun.spec.job import JobSpec, RoleSpec
from unirun.spec.programs import variables_of
from unirun.spec.read import RESERVED_ENV
from unirun.spec.secrets import masking, read_env_file, secret_names
from unirun.values import WorkerId, split_endpoint
from unirun.wire.messages import StartRole, StartWorker

# fmt: off
_AT_IMPORT = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "LD_", "PYTHON", "MALLOC_", "GLIBC_TUNABLES", "TORCH_",
    "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "ONEDNN_", "DNNL_", "MKLDNN_", "NPY_", "KINETO_", "OPENSSL_",
    "LC_", "LANG", "TZ", "TQDM_",
)
# fmt: on
_READ_LATER = ("TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_", "TORCH_ELASTIC_", "TORCH_GLOO_")
"""Exceptions to `_AT_IMPORT`: read when a group is formed, or read again by the worker's bootstrap."""

ERROR_FILE = "error.json"
"""The error of a worker, in the directory of its logs."""

_COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"

INTERPRETER = "PYTHON_EXEC"
"""torchrun's variable: the interpreter, or a wrapper of it, that runs the workers."""

LONGEST_VARIABLE = 1 << 16
"""Characters of the addresses of a role in a variable: Linux refuses to execute programs with 128 KiB in one. The file
of addresses has all."""

SpawnerKey = tuple[tuple[str, str], ...]
"""The variables that are read only when libraries are loaded: workers that differ in them need different spawners."""

FRESH: SpawnerKey = (("", "fresh"),)
"""The key of the spawner that imports nothing and starts new interpreters and programs."""


def spawner_key(env: Mapping[str, str]) -> SpawnerKey:
    """The part of `env` that Python, libgomp, MKL, the allocator, numpy and torch read only when they are loaded."""
    return tuple(sorted((name, value) for name, value in env.items() if counts_at_import(name)))


def spawner_env(key: SpawnerKey, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the spawner with this key."""
    if key == FRESH:
        return dict(inherited)
    return {name: value for name, value in inherited.items() if not counts_at_import(name)} | dict(key)


def counts_at_import(name: str) -> bool:
    """Return True if a variable is read only when a library is loaded."""
    early = name.startswith(_AT_IMPORT) or name.endswith("_ALLOC_CONF")
    return early and not name.startswith(_READ_LATER)


def for_workers(environ: Mapping[str, str]) -> dict[str, str]:
    """The agent's environment for spawners and workers, without the store's password (`without_default_cache`).

    Spawners must not have the password either: a process's initial environment can be read in its forks.
    """
    return {
        name: value for name, value in without_default_cache(environ).items() if name != PASSWORD_VARIABLE
    }


def without_default_cache(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the cache directory of torch's compiler, if it is torch's default for this host and user.

    A process that imports torch's compiler, as transformers does, has it in its environment from then on. Workers
    choose their own: on another host, or for another user, it is another directory.
    """
    chosen = _COMPILER_CACHE in environ and environ[_COMPILER_CACHE] == _default_cache()
    return {name: value for name, value in environ.items() if not (chosen and name == _COMPILER_CACHE)}


def _default_cache() -> str:
    """torch's value for `_COMPILER_CACHE` when it is not set (torch._inductor.runtime.cache_dir_utils)."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


_OF_THE_HOST = re.compile(
    r"HOME|USER|LOGNAME|SHELL|HOSTNAME|PWD|OLDPWD|TERM|TERM_.*|TMPDIR|MAIL|DISPLAY|XDG_.*|SSH_.*|SLURM.*|SHLVL|_"
    r"|CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES"
)


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that a host gets: not those that describe this host, its terminal or its devices."""
    there = without_default_cache(environ)
    return {name: value for name, value in there.items() if not _OF_THE_HOST.fullmatch(name)}


_OF_THE_NODE = ("UNIRUN_HOME", "UNIRUN_RUN_DIR", PASSWORD_VARIABLE)
"""Variables of a node that comes into a running job which stay, if it has them: its own files, and its way to the
store."""


def joined(environ: Mapping[str, str], job: Mapping[str, str]) -> dict[str, str]:
    """The environment of a node that comes into a running job: the `job`'s, and of its own `environ` what describes
    the host. Nothing else of the shell in which it was told to come gets into ranks."""
    own = {name: value for name, value in environ.items() if _OF_THE_HOST.fullmatch(name)}
    return {**job, **own, **{name: environ[name] for name in _OF_THE_NODE if name in environ}}


def is_loopback(addr: str) -> bool:
    """Return True if `addr` is a loopback address."""
    return addr in ("localhost", "::1") or addr.startswith("127.")


def base_env(spec: JobSpec, role: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment common to all workers of `role`: inherited, built in, the job's, the role's."""
    env = for_workers(inherited)
    if spec.role(role).is_program:
        # unirun itself may run under a launcher.
        env = {name: value for name, value in env.items() if name not in RESERVED_ENV}
    else:
        _set_defaults(env, spec, role)
    # Without these, TensorPipe, gloo and NCCL listen at the address of the host's name, which others may reach.
    # In a job of several hosts the job's environment has others (`bound_to`). On one host TensorPipe, for calls, stays
    # there wherever the rendezvous stores are.
    env.setdefault("TP_SOCKET_IFNAME", "lo")
    if is_loopback(spec.master_addr):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.setdefault(variable, "lo")
    env.update(spec.env)
    env.update(spec.role(role).env)
    return _with_interpreter(env, spec.role(role))


def _set_defaults(env: dict[str, str], spec: JobSpec, role: str) -> None:
    """Set the defaults of torchrun, and of unirun for calls over torch."""
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if sum(each.count for each in spec.roles) > 1:
        # As torchrun does: many processes with one thread per core each would oversubscribe the cores.
        env.setdefault("OMP_NUM_THREADS", str(threads_of(spec.role(role))))
    if spec.transport == "torch" and any(each.restart == "process" for each in spec.roles):
        # torch's RPC agent warns of every peer that ends, also normally.
        env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _with_interpreter(env: dict[str, str], role: RoleSpec) -> dict[str, str]:
    """`env` for the role's own interpreter, as the ``activate`` of its virtual environment changes it."""
    if role.python is None:
        return env
    for name, value in variables_of(role.python).items():
        if value is None:
            env.pop(name, None)
        elif name == "PATH":
            env[name] = os.pathsep.join(filter(None, (value, env.get(name))))
        else:
            env[name] = value
    if role.entry.kind != "program":
        env[INTERPRETER] = role.python
    return env


def with_env_files(spec: JobSpec) -> JobSpec:
    """The spec with the variables of its env files in its environments, for the process that starts workers. It is
    read once: later, a file may be gone, or have others. Raises `RendezvousError`."""
    try:
        roles = tuple(
            replace(role, env=read_env_file(role.env_file) | dict(role.env), env_file=None)
            if role.env_file
            else role
            for role in spec.roles
        )
        if spec.env_file is not None:
            spec = replace(spec, env=read_env_file(spec.env_file) | dict(spec.env), env_file=None)
    except (OSError, ValueError) as error:
        raise RendezvousError(f"an env_file cannot be read on this host: {error}", "is it there?") from error
    return replace(spec, roles=roles)


def mask_of(spec: JobSpec, inherited: Mapping[str, str]) -> Callable[[str], str]:
    """The mask of the secrets that the workers of a node have. Raises `RendezvousError`."""
    names, whole = secret_names(spec), with_env_files(spec)
    envs = [base_env(whole, role.name, inherited) for role in spec.roles] if names else []
    return masking(env[name] for env in envs for name in names if name in env)


def bound_to(addr: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables with which workers listen for other hosts at `addr` of this host, and torch's libraries at its
    interface; what is `inherited` for these stays. Raises `RendezvousError` when no interface has the address."""
    interface = "lo" if is_loopback(addr) else interface_of(addr)
    # NCCL takes a name without the sign for the beginning of one.
    names = {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "TP_SOCKET_IFNAME": interface,
    }
    return {"UNIRUN_ADDR": addr} | {name: value for name, value in names.items() if name not in inherited}


def is_fresh(spec: JobSpec, role: str, inherited: Mapping[str, str]) -> bool:
    """Return True if workers of `role` are new interpreters, by the spec or because torchrun's variable names one."""
    return spec.role(role).start_method == "exec" or INTERPRETER in base_env(spec, role, inherited)


def threads_of(role: RoleSpec) -> int:
    """Number of OpenMP threads of a worker: its CPU slots, else 1."""
    return int(role.slots) if role.device == "cpu" and role.slots > 1 else 1


def addresses_variable(role: str) -> str:
    """The variable that has the addresses of `role`: ``UNIRUN_ADDRS_ENGINE``."""
    return f"UNIRUN_ADDRS_{role.upper().replace('-', '_')}"


def _of_torchrun(spec: JobSpec, order: StartRole, member: StartWorker, job: JobDir) -> dict[str, str]:
    """torchrun's variables of one worker."""
    addr, port = split_endpoint(order.endpoint)
    logs = job.worker_logs(WorkerId(order.role, member.rank, member.incarnation))
    return {
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
        "TORCHELASTIC_MAX_RESTARTS": str(spec.role(order.role).max_restarts),
        "TORCHELASTIC_ERROR_FILE": str(logs / ERROR_FILE),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # As torchrun's --signals-to-handle sets it, for workers that start processes with torch's own classes.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(spec.signals),
    }


def worker_env(
    spec: JobSpec, order: StartRole, member: StartWorker, job: JobDir, node: str, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The complete environment of one worker."""
    role = spec.role(order.role)
    env = base_env(spec, order.role, inherited)
    if not role.is_program:
        env |= _of_torchrun(spec, order, member, job)
    env |= {
        "UNIRUN_JOB": spec.run_id,
        "UNIRUN_NODE": node,
        "UNIRUN_ROLE": order.role,
        "UNIRUN_RANK": str(member.rank),
        "UNIRUN_GENERATION": str(order.generation),
        "UNIRUN_INCARNATION": str(member.incarnation),
        "UNIRUN_SOCKET": str(job.agent_socket(node)),
    }
    if any(each.ports for each in spec.roles):
        env["UNIRUN_ADDRS_FILE"] = str(job.addresses(node))
    for name, places in order.places.items():
        heads = places[:: spec.role(name).group or 1]
        addresses = ",".join(place.addr() for place in heads)
        if len(addresses) <= LONGEST_VARIABLE:
            env[addresses_variable(name)] = addresses
    if order.committed >= 0:
        env["UNIRUN_COMMITTED_STEP"] = str(order.committed)
    if role.hang_timeout:
        env[HANG_TIMEOUT] = f"{role.hang_timeout:g}"
    if env.get(ENABLE) == "1":
        env[PIPE] = str(job.timer_pipe(node))
    own_mask = order.mask in {**spec.env, **role.env}
    if member.devices is not None and order.mask and role.auto_visible_device and not own_mask:
        env[order.mask] = ",".join(member.devices)
        if order.mask == "CUDA_VISIBLE_DEVICES":
            # Device indices are NVML's, in this order; CUDA's default order puts the fastest device first.
            env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if member.share < 1:
        env["UNIRUN_DEVICE_SHARE"] = f"{member.share:.6g}"
        if "CUDA_MPS_PIPE_DIRECTORY" in env:
            # MPS limits a client to this percentage of a device's processors.
            percentage = max(1, int(100 * member.share))
            env.setdefault("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(percentage))
    return env
