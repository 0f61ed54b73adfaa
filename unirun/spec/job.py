"""The spec of a job: what runs, how often, with which environment. Values only, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import convert, field, to_builtins

from unirun.spec.channels import Channel
from unirun.spec.edges import Edge
from unirun.spec.probes import READY_TIMEOUT, Probe
from unirun.values import Value

EntryKind = Literal["script", "module", "program", "function", "workload", "trainer"]
Restart = Literal["role", "process"]
Transport = Literal["torch", "socket"]
StartMethod = Literal["fork", "exec"]
Contract = Literal["torchrun", "none"]
EngineKind = Literal["vllm", "openai"]

GROUPS = ("collocations", "host_collocations", "separations", "isolations")
"""The keys of a job file whose value is a list of groups of roles."""


PORT_RANGE = (20000, 29999)
"""The default of `JobSpec.port_range`: below the ports that Linux gives to clients (32768 and up, ip(7)), so that no
connection has one of them by chance."""


class Entry(Value):
    """The entry of every process of a role.

    ``script``: a Python file. ``module``: as ``python -m``. ``program``: executed as it is.
    ``function``: ``pkg.mod:name``, which is called without an argument or with the worker's `Context`.
    ``workload``: a class ``pkg.mod:Class`` that serves calls; ``trainer``: one that makes them.
    """

    kind: EntryKind
    target: str
    args: tuple[str, ...] = ()


class RoleSpec(Value):
    """A named set of `count` identical processes.

    `restart` is what restarts after a worker failed: all workers of the ``role``, or that ``process`` alone, while the
    others keep their memory. `max_restarts` limits either. `cwd` is None for the directory where
    `unirun` was called. `env` comes on top of the job's. `per_node` is how many of the role a node shall have, None
    for whatever fits. `auto_visible_device`: whether a worker's device mask is set to the devices that it was given.

    A rank takes `slots` of `device` (``cpu``, ``cuda`` or another type; None: of what the nodes have), a fraction being
    a share of one; with 0 it needs no slot, only a node. With `least` there may be fewer ranks than `count` where there
    is no room for all; once it is placed, `count` is how many it has, and `most` how many it may have when nodes join.
    `per_group` cuts the ranks into groups of that many, each on one node; `devices` are the only ones, by index, that
    it may have. With `component`, its nodes are those of that component of a heterogeneous Slurm job. Each rank needs
    `cpus` of the processors of its node, or ``all``, and `memory` in bytes: what is needed has to be there, but no rank
    is bound to it.

    The number of `elastic` workloads may change while they run, for which all of them start again: it falls when a node
    is lost, and rises when a visitor asks for that.

    With the `contract` of ``torchrun`` its processes find torchrun's variables and a rendezvous store; programs have
    ``none``, unless they ask for it. `env_file` has more variables, which are read when they start. `python` is a
    virtual environment or an interpreter, None for that of unirun. `ports` are the names of the ports that each rank
    is given. A `service` is needed until the primary roles have ended; an `optional` one may fail. Its ranks are
    ready when `ready` says so, which may take `ready_timeout` seconds, and are stopped when `alive` says that they do
    not answer any more; `group` consecutive ranks are one server. The role starts when as many ranks of the roles in
    `after` are ready, all of them for 0. Of its restarts, those of the last `restart_window` seconds count (0: all);
    before the second of them there are `restart_delay` seconds, before each further one twice as many.

    `engine` is the kind of a ready-made service. A role `beside` another one has a rank on each node that has ranks of
    that one.
    """

    name: str
    count: int
    entry: Entry
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    max_restarts: int = 0
    start_method: StartMethod = "fork"
    restart: Restart = "role"
    per_node: int | None = None
    auto_visible_device: bool = True
    least: int | None = None
    most: int | None = None
    device: str | None = None
    slots: float = 1.0
    per_group: int | None = None
    devices: tuple[str, ...] | None = None
    component: int | None = None
    elastic: bool = False
    contract: Contract = "torchrun"
    cpus: int | Literal["all"] | None = None
    memory: int | None = None
    python: str | None = None
    ports: tuple[str, ...] = ()
    service: bool = False
    optional: bool = False
    ready: Probe | None = None
    ready_timeout: float = READY_TIMEOUT
    alive: Probe | None = None
    group: int | None = None
    after: Mapping[str, int] = field(default_factory=dict)
    restart_window: float = 0.0
    restart_delay: float = 0.0
    env_file: str | None = None
    engine: EngineKind | None = None
    beside: str | None = None

    def head(self, rank: int) -> int:
        """The first rank of the group of `rank`, which is probed and has the address of all; `rank` itself without
        groups."""
        return rank - rank % (self.group or 1)

    def members(self, rank: int) -> range:
        """The ranks of the group of `rank`."""
        return range(self.head(rank), self.head(rank) + (self.group or 1))

    @property
    def is_program(self) -> bool:
        """True if its processes find nothing of torchrun's, and have no rendezvous store."""
        return self.contract == "none"

    @property
    def takes_slots(self) -> bool:
        """True if its ranks need slots, and not only a node. A trainer needs none."""
        return self.slots > 0 and self.entry.kind != "trainer"


class LogSpec(Value):
    """The destinations of output. All output is kept in files; these are settings of the console and of
    further files.

    `redirects` and `tee` are torchrun's ``-r`` and ``-t``: a bit set (1 stdout, 2 stderr) for all local
    ranks or by local rank; a redirected stream is not shown on the console unless it is also teed.
    `line_prefix_template` is the prefix of each line on the console, with ``${role_name}``, ``${rank}``,
    ``${local_rank}`` and ``${hostname}``.
    """

    dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: tuple[int, ...] | None = None
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    line_prefix_template: str | None = None


class JobSpec(Value):
    """One job. Durations are in seconds.

    `primary` names the roles whose end is the job's end; the others are stopped then. A job of services alone has none:
    it goes on until it is stopped. `config` is the
    user's own, free-form part, which workers find as ``ctx.config``. `master_port` 0 lets each role have a
    free port; a number is taken by the first role. `sample_interval` is how often workers' memory and
    processor time are read; exits are seen at once, whatever it is. `collocations` are groups of roles that share
    devices, `host_collocations` of roles that are on one node, rank for rank, `separations` of roles that never are,
    and `isolations` of roles that never share a NUMA node. `spares` nodes are held back, and those called
    `exclude_nodes` are not used; `most_nodes` may take part, None for any number. `edges` say which role calls which
    (`unirun.collocation.graph`), and `channels` from which to which weights go. `call_timeout` is how long a call between roles may
    take, and `transport` what carries it. `stdin` names the worker, as ``actor:0``, that has the stdin of the command.
    `port_range` has the lowest and the highest number of the ports that ranks are given. The values of the variables in
    `env_file`, and of those called `secret`, are masked in what is told of the job.
    """

    name: str
    run_id: str
    roles: tuple[RoleSpec, ...]
    primary: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    shutdown_timeout: float = 30.0
    join_timeout: float = 60.0
    sample_interval: float = 5.0
    virtual_local_rank: bool = False
    numa_binding: str | None = None
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    event_log: str = "null"
    log: LogSpec = field(default_factory=LogSpec)
    collocations: tuple[tuple[str, ...], ...] = ()
    host_collocations: tuple[tuple[str, ...], ...] = ()
    separations: tuple[tuple[str, ...], ...] = ()
    isolations: tuple[tuple[str, ...], ...] = ()
    spares: int = 0
    exclude_nodes: tuple[str, ...] = ()
    most_nodes: int | None = None
    edges: tuple[Edge, ...] = ()
    channels: tuple[Channel, ...] = ()
    call_timeout: float = 1800.0
    transport: Transport = "socket"
    stdin: str | None = None
    port_range: tuple[int, int] = PORT_RANGE
    env_file: str | None = None
    secret: tuple[str, ...] = ()

    def role(self, name: str) -> RoleSpec:
        """The role called `name`. Raises KeyError."""
        for role in self.roles:
            if role.name == name:
                return role
        raise KeyError(name)

    @property
    def reader(self) -> tuple[str, int] | None:
        """Role and rank of the worker that has the stdin of the command: the one that is named, else the only one."""
        if self.stdin is not None:
            role, _, rank = self.stdin.rpartition(":")
            return role, int(rank)
        alone = sum(role.count for role in self.roles) == 1 and not self.roles[0].is_program
        return (self.roles[0].name, 0) if alone else None

    @property
    def groups(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """The groups of roles, by the key of a job file."""
        return {key: getattr(self, key) for key in GROUPS}

    def to_json(self) -> dict[str, Any]:
        """Plain values, for files and streams; `from_json` gives an equal spec back."""
        plain: dict[str, Any] = to_builtins(self)
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobSpec:
        """The inverse of `to_json`. Raises ValueError for any other data."""
        return convert(data, cls)
