"""The spec of a job: what runs, how often, with which environment; how its edges and probes are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args
from urllib.parse import urlsplit

from msgspec import convert, field, to_builtins

from unirun.spec.read import Section, nearest, parse_size, shown
from unirun.values import Value

# Edges of the computation graph and channels of weights, as values and as people write them.
#
# ::
#
#     edges:
#       - {from: trainer, to: actor, invocation: update, kind: scatter, weight: 64MB}
#       - {from: actor, to: rollout, invocation: load, kind: broadcast, async: true, weight: 2GB}
#       - "trainer -> reward: score"

EdgeKind = Literal["one_to_one", "broadcast", "scatter", "gather", "all_to_all"]
Direction = Literal["forward", "back", "both"]

EDGE_KINDS: tuple[EdgeKind, ...] = get_args(EdgeKind)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

EDGE_KEYS = ("from", "to", "invocation", "kind", "direction", "async", "weight")
_ARROW = re.compile("->|→")
_SHORT = re.compile(r"\s*(?P<source>[^\s:]+)\s*(?:->|→)\s*(?P<target>[^\s:]+?)\s*(?::\s*(?P<call>\S+)\s*)?")


class Edge(Value):
    """Ranks of `source` call `invocation` of ranks of `target`.

    `kind` says which rank calls which, see `unirun.collocation.graph.RoleGraph`; empty in a spec that leaves it to the
    numbers of ranks. `direction` is the way that most of the bytes go: ``forward`` with the call (its arguments),
    ``back`` with the answer, or ``both``. An `asynchronous` call is one for whose end the source does not wait: its
    results count from some later step on. `weight` is in bytes per step, of all ranks and both ways together; 0 when
    not known.
    """

    source: str
    target: str
    invocation: str = ""
    kind: EdgeKind | Literal[""] = "all_to_all"
    direction: Direction = "forward"
    asynchronous: bool = False
    weight: float = 0.0

    def __str__(self) -> str:
        arrow = "⇢" if self.asynchronous else "→"
        call = f": {self.invocation}" if self.invocation else ""
        return f"{self.source} {arrow} {self.target}{call}"


def read_edges(job: Section) -> tuple[Edge, ...]:
    """The ``edges`` of a job file. The faults are added to those of `job`."""
    items = job.items("edges", "edges", 'write ["a -> b: method"]')
    return tuple(_edge(items, where) for where in items.fields)


def _edge(items: Section, where: str) -> Edge:
    item = items.fields[where]
    if isinstance(item, Mapping) and len(item) == 1 and _ARROW.search(str(next(iter(item)))):
        # YAML reads the short form without quotes as a mapping from "a -> b" to the method.
        ((ends_of_it, call),) = item.items()
        item = f"{ends_of_it}: {call}"
    if isinstance(item, str):
        match = _SHORT.fullmatch(item)
        if match is None:
            items.fault(where, f"{shown(item)} is no edge", 'write "source -> target: method"')
            return Edge("", "")
        edge = items.below(
            where, {"from": match["source"], "to": match["target"], "invocation": match["call"]}
        )
    elif isinstance(item, Mapping):
        edge = items.section(where)
    else:
        problem = f"expected an edge, found {shown(item)}"
        items.fault(where, problem, 'write {from: a, to: b} or "a -> b: method"')
        return Edge("", "")
    edge.known(EDGE_KEYS)
    for key in ("from", "to"):
        if edge.fields.get(key) in (None, ""):
            edge.fault(key, "it names no role", f"write {key}: ROLE")
    return Edge(
        edge.text("from"),
        edge.text("to"),
        edge.text("invocation"),
        cast(EdgeKind, edge.choice("kind", EDGE_KINDS, "")),
        cast(Direction, edge.choice("direction", DIRECTIONS, "forward")),
        edge.flag("async"),
        _weight(edge),
    )


def _weight(edge: Section) -> float:
    """Bytes per step: a number, or a size with its unit."""
    value = edge.fields.get("weight")
    if value is None:
        return 0.0
    try:
        if isinstance(value, str):
            return float(parse_size(value))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    except ValueError as error:
        edge.fault("weight", str(error))
        return 0.0
    except OverflowError:
        edge.fault("weight", "expected a number of bytes, found one of hundreds of digits")
        return 0.0
    edge.fault("weight", f"expected a number of bytes, found {shown(value)}", "write 64MB, or 64000000")
    return 0.0


# Channels of weights: from which role they go to which, as values and as people write them.
#
# ::
#
#     channels:
#       policy: {publisher: actor, receivers: [rollout, reference]}

CHANNEL_KEYS = ("publisher", "receivers")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class ChannelSpec(Value):
    """Weights go from the ranks of the role `publisher` to those of `receivers`."""

    name: str
    publisher: str
    receivers: tuple[str, ...]


def read_channels(job: Section, roles: Sequence[str]) -> tuple[ChannelSpec, ...]:
    """The ``channels`` of a job file with these roles. The faults are added to those of `job`."""
    channels = job.section("channels")
    found = []
    for name in channels.fields:
        if not _NAME.fullmatch(name):
            channels.fault(name, f"{name!r} is no name of a channel", "begin with a letter: policy")
        about = channels.section(name)
        about.known(CHANNEL_KEYS)
        channel = ChannelSpec(name, about.text("publisher"), about.texts("receivers"))
        for key, named in (("publisher", (channel.publisher,)), ("receivers", channel.receivers)):
            if not named or named == ("",):
                about.fault(
                    key, "it names no role", f"write {key}: {'ROLE' if key == 'publisher' else '[ROLE]'}"
                )
                continue
            for role in named:
                if role not in roles:
                    about.fault(key, f"no role is called {role!r}", nearest(role, [*roles]))
        if len({channel.publisher, *channel.receivers}) <= len(channel.receivers):
            about.fault("receivers", "a role is named twice", "name each role once")
        found.append(channel)
    return tuple(found)


# Probes: the questions that tell whether a program is ready, and whether it still answers.
#
# ::
#
#     ready: "http://{addr}/health"             # answered with a status of 2xx
#     ready: tcp                                # its first port is listened on; tcp://{host}:{ports.dist} names another
#     ready: {log: "startup complete"}          # a regular expression that a line of its output matches
#     ready: {file: /tmp/ready-{rank}}          # the file exists
#     ready: {command: [curl, -sf, "http://{addr}/"]}   # a command that ends with 0
#     alive: {http: "http://{addr}/health", every: 10, misses: 3, timeout: 5}

ProbeKind = Literal["http", "tcp", "log", "file", "command"]
KINDS: tuple[ProbeKind, ...] = ("http", "tcp", "log", "file", "command")
TIMING = ("every", "misses", "timeout")
_REMEDY = "write http://{addr}/health, tcp, {log: REGEX}, {file: PATH} or {command: [WORD, …]}"

_NAMES = re.compile(r"\{([\w.-]+)\}")

FIRST_STEP_TIMEOUT = 600.0
"""Default of ``first_step_timeout`` in seconds: a first step compiles, and fills caches."""

READY_TIMEOUT = 1800.0
"""Default of ``ready_timeout`` in seconds: large models take a quarter of an hour to load from a network."""

UPDATE_TIMEOUT = 300.0
"""Default of ``update_timeout`` in seconds."""


class Probe(Value):
    """One question to a program. `words` is the URL, the address (empty: the first port), the regular expression or the
    path, alone; or a command and its arguments. They may have templates (`unirun.spec.programs`).

    Once the program is ready, the question of `alive` comes `every` so many seconds; after `misses` without an answer
    in a row the program is stopped. One answer may take `timeout` seconds.
    """

    kind: ProbeKind
    words: tuple[str, ...] = ()
    every: float = 10.0
    misses: int = 3
    timeout: float = 5.0

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(self.words)}".rstrip()


def read_probe(role: Section, key: str) -> Probe | None:
    """The probe at `key`; None without one. The faults are added to those of `role`."""
    value = role.fields.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        return _from_text(role, key, value)
    if not isinstance(value, Mapping):
        role.fault(key, f"expected a probe, found {shown(value)}", _REMEDY)
        return None
    probe = role.section(key)
    probe.known((*KINDS, *(TIMING if key == "alive" else ())))
    given = [kind for kind in KINDS if probe.given(kind)]
    if len(given) != 1:
        problem = f"{' and '.join(given)} are given" if given else "it asks nothing"
        role.fault(key, problem, _REMEDY)
        return None
    return _timed(probe, _of_kind(probe, given[0]), key)


def _from_text(role: Section, key: str, text: str) -> Probe | None:
    if text == "tcp":
        return Probe("tcp")
    kind, _, rest = text.partition("://")
    if kind == "http" and rest:
        return _addressed(role, key, Probe("http", (text,)))
    if kind == "tcp" and rest:
        return _addressed(role, key, Probe("tcp", (rest,)))
    role.fault(key, f"{shown(text)} is no probe", _REMEDY)
    return None


def _addressed(section: Section, key: str, probe: Probe) -> Probe:
    """`probe`, of which the address has a host and, where it has a port, one that there is."""
    text = probe.words[0]
    # Any port, and any host with one, may stand where a name does.
    example = _NAMES.sub(
        lambda name: "h:1" if name[1].endswith("addr") or name[1] == "group.head" else "1", text
    )
    try:
        parts = urlsplit(example if probe.kind == "http" else f"//{example}")
        fits = bool(parts.hostname) and parts.port != 0 and (probe.kind == "http" or parts.port is not None)
    except ValueError:
        fits = False
    if not fits:
        remedy = "write http://{addr}/health, or http://{host}:8000/health"
        remedy = remedy if probe.kind == "http" else "write tcp, or tcp://{host}:{ports.NAME}"
        section.fault(key, f"{shown(text)} names no host and port", remedy)
    return probe


def _of_kind(probe: Section, kind: ProbeKind) -> Probe:
    words = () if probe.fields[kind] is True and kind == "tcp" else probe.texts(kind)
    if kind == "tcp":
        words = tuple(word.removeprefix("tcp://") for word in words if word not in ("true", ""))
    if kind != "command" and len(words) > 1:
        probe.fault(kind, f"expected one text, found {len(words)}")
    if kind != "tcp" and not any(words):
        probe.fault(kind, "it is empty")
    if kind == "http" and words and not words[0].startswith("http://"):
        remedy = "write http://{addr}/health; for other protocols name a command"
        probe.fault(kind, f"{shown(words[0])} is no URL of plain HTTP", remedy)
    elif kind in ("http", "tcp") and len(words) == 1 and words[0]:
        _addressed(probe, kind, Probe(kind, words))
    if kind == "log" and words:
        try:
            re.compile(words[0])
        except re.error as error:
            probe.fault(kind, f"{shown(words[0])} is no regular expression: {error}")
    return Probe(kind, words)


def _timed(probe: Section, found: Probe, key: str) -> Probe:
    if key != "alive":
        return found
    if found.kind == "log":
        probe.fault(
            "log", "a line of output does not say that a program still answers", "ask over http or tcp"
        )
    return Probe(
        found.kind,
        found.words,
        every=probe.seconds("every", found.every, 0.01),
        misses=probe.integer("misses", found.misses, 1),
        timeout=probe.seconds("timeout", found.timeout, 0.01),
    )


EntryKind = Literal["script", "module", "program", "function", "workload", "trainer"]
Restart = Literal["role", "process"]
Transport = Literal["torch", "socket"]
StartMethod = Literal["fork", "exec"]
Contract = Literal["torchrun", "none"]
Stragglers = Literal["tell", "replace"]
EngineKind = Literal["vllm", "builtin", "openai"]

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
    others keep their memory. `max_restarts` limits either, and `rank_restarts` those that one rank may
    cause. Nothing restarts after one of the `fatal_exit_codes`: the
    job ends with it. `cwd` is None for the directory where
    `unirun` was called. `env` comes on top of the job's. `per_node` is how many of the role a node shall have, None
    for whatever fits. `auto_visible_device`: whether a worker's device mask is set to the devices that it was given.

    A rank takes `slots` of `device` (``cpu``, ``cuda`` or another type; None: of what the nodes have), a fraction being
    a share of one; with 0 it needs no slot, only a node. With `least` there may be fewer ranks than `count` where there
    is no room for all; once it is placed, `count` is how many it has, and `most` how many it may have when nodes join.
    `per_group` cuts the ranks into groups of that many, each on one node; `devices` are the only ones, by index, that
    it may have. With `component`, its nodes are those of that component of a heterogeneous Slurm job. Each rank needs
    `cpus` of the processors of its node, or ``all``, and `memory` in bytes: what is needed has to be there, but no rank
    is bound to it.

    The number of `elastic` workloads may change while they run. It falls when a node is lost, for which all of them
    start again, and rises between two calls of the job's trainer, or when a visitor asks for that.

    With the `contract` of ``torchrun`` its processes find torchrun's variables and a rendezvous store; programs have
    ``none``, unless they ask for it. `env_file` has more variables, which are read when they start. `python` is a
    virtual environment or an interpreter, None for that of unirun. `ports` are the names of the ports that each rank
    is given. A `service` is needed until the primary roles have ended; an `optional` one may fail. Its ranks are
    ready when `ready` says so, which may take `ready_timeout` seconds, and are stopped when `alive` says that they do
    not answer any more; `group` consecutive ranks are one server. The role starts when as many ranks of the roles in
    `after` are ready, all of them for 0. Of its restarts, those of the last `restart_window` seconds count (0: all);
    before the second of them there are `restart_delay` seconds, before each further one twice as many.

    A rank that makes no progress for `hang_timeout` seconds (0: for ever) is looked at, and ended if it hangs; before
    its first step it has at least `first_step_timeout` seconds. `stragglers`: a rank for which the others wait is told,
    or moves to another node.

    `engine` is the kind of a ready-made service. New weights come into it with a pause, by requests of at most
    `update_timeout` seconds; with `clear_cache`, keys and values of the old ones are forgotten.

    A role `beside` another one has a rank on each node that has ranks of that one.
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
    fatal_exit_codes: tuple[int, ...] = ()
    rank_restarts: int | None = None
    hang_timeout: float = 0.0
    first_step_timeout: float = FIRST_STEP_TIMEOUT
    stragglers: Stragglers = "tell"
    env_file: str | None = None
    engine: EngineKind | None = None
    clear_cache: bool = True
    update_timeout: float = UPDATE_TIMEOUT
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

    `max_job_restarts` limits the restarts of all roles together, which come when those of one are used up.
    `restart_window` and `restart_delay` are as for a role.

    `primary` names the roles whose end is the job's end; the others are stopped then. A job of services alone has none:
    it goes on until it is stopped. `config` is the user's own, free-form part, which workers find as ``ctx.config``.
    `master_port` 0 lets each role have a free port; a number is taken by the first role. `sample_interval` is how often
    workers' memory and processor time are read; exits are seen at once, whatever it is. `collocations` are groups of
    roles that share devices, `host_collocations` of roles that are on one node, rank for rank, `separations` of roles
    that never are, and `isolations` of roles that never share a NUMA node. `spares` nodes are held back, and those
    called `exclude_nodes` are not used; `most_nodes` may take part, None for any number. `edges` say which role calls
    which (`unirun.collocation.graph`), and `channels` from which to which weights go. `call_timeout` is how long a call
    between roles may take, and `transport` what carries it. `stdin` names the worker, as ``actor:0``, that has the
    stdin of the command. `port_range` has the lowest and the highest number of the ports that ranks are given. The
    values of the variables in `env_file`, and of those called `secret`, are masked in what is told of the job.
    `notify_command` is run on failures, recoveries and the end.
    """

    name: str
    run_id: str
    roles: tuple[RoleSpec, ...]
    primary: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    max_job_restarts: int = 0
    restart_window: float = 0.0
    restart_delay: float = 0.0
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
    channels: tuple[ChannelSpec, ...] = ()
    call_timeout: float = 1800.0
    transport: Transport = "socket"
    stdin: str | None = None
    port_range: tuple[int, int] = PORT_RANGE
    env_file: str | None = None
    secret: tuple[str, ...] = ()
    notify_command: str = ""

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
