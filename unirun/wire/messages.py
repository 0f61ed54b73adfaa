"""All messages between the processes of a job, as frozen values; `unirun.wire.frames` encodes them.

============  =======================================================================
agent→master  Join Heartbeat SpawnerReady StoreOpened StoreEnded Notice Sample Late Progress Stacks Knock
              ViewWanted Placed DebugOutput DebugEnded TracePart Profiled
              WorkerStarted WorkerRunning WorkerExited FromWorker (Serving Listening GroupFormed Resilient Boundary
              Metrics Calls MasterRequest CommitJob Health)
master→agent  Appointed Heartbeat OpenStore Reserve StartRole StopWorkers PassOn Inject ExitAck View MasterReply
              Shutdown AskProgress AskStacks EndHung FollowSteps Debug DebugInput Profile
worker→agent  Hello Serving Listening GroupMeets GroupFormed Resilient Boundary Stuck Metrics Calls MasterRequest
              CommitJob WorkerError ViewWanted EngineWeights ProgressPage; Debuggee DebugOutput DebugEnded
agent→worker  Welcome View MasterReply LocalEngines; Debug DebugInput
CLI→master    Attach Stop PassOn Drain Inject AskStacks Debug DebugInput Profile Heartbeat
master→CLI    Heartbeat WorkerOutput RoleChanged Notice Drained Injected StacksAsked Stacks DebugOutput DebugEnded
              TracePart Profiled Ended
visitor→master Visit ViewWanted Grow
master→visitor Welcome View Ended
agent→spawner Spawn OpenStore Kill (`unirun.wire.reports`)
spawner→agent SpawnerReady Forked Reaped SpawnFailed StoreOpened StoreEnded Notice
launcher→node AgentTask Ready Dismissed, before there is a master; over ssh also Invite Resume
node→launcher Offer Ready Dismissed; over ssh also Chunk Current
============  =======================================================================
"""

from __future__ import annotations

from typing import Literal, TypeVar

from msgspec import field
from msgspec.structs import replace

from unirun.errors import RendezvousError
from unirun.spec.job import JobSpec
from unirun.values import RankAddress, Value, WorkerId
from unirun.wire.address import TcpAddress
from unirun.wire.reports import Ending, Message

# Messages between the process that launches a job and the nodes that take part in it, before there is a master.
#
# A node makes an `Offer`, gets its `AgentTask`, binds its endpoints and says `Ready`. The launcher says so when all
# are; then the agents begin. Over ssh, an `Invite` comes first, and the node's files follow.


class Invite(Message):
    """Asks this host to take part in a job as `node`, with the node rank `rank` (-1: any).

    `token` is the job's, in hex; a stream on which it is sent must be one that nobody else reads, as that of ssh. The
    node makes its offer at the address `head` or, without one, to the sender. A node that `leads` is the head: masters
    listen on its host. `spec` is the job as far as it is known without the hosts, None when they join later.
    `interface` is the user's choice, empty for none. A job that is to `detach` does not end with the command. Over ssh,
    `cwd` and `env`, on top of what the host has, are the command's.
    """

    token: str
    node: str
    rank: int = -1
    spec: JobSpec | None = None
    head: TcpAddress | None = None
    leads: bool = False
    interface: str = ""
    insecure: bool = False
    detach: bool = False
    cwd: str = ""
    env: dict[str, str] = field(default_factory=dict)


class EtcdMember(Value):
    """A member of an etcd of the job's own: its node, and where it listens for clients and for other members."""

    node: str
    addr: str
    client: int
    peer: int


class Offer(Message):
    """A node offers to take part. `rank` is the position that it wants, -1 for any.

    `inventory` is its `collocation.Node` in JSON, `versions` those of Python, torch and unirun. `masters` is where
    masters will listen when this node is the head. `etcd` is the member of an etcd that it can be. `faults` are reasons
    why it cannot take part, each with a remedy.
    """

    node: str
    host: str
    rank: int
    inventory: str
    versions: dict[str, str]
    masters: TcpAddress | None = None
    faults: tuple[tuple[str, str], ...] = ()
    etcd: EtcdMember | None = None


class AgentTask(Message):
    """The task of the agent of `node`, one of `nodes`; it may be on another host than the command.

    Workers start in the directory `cwd`. The roles' rendezvous stores listen at `addr`, an address of the agent's host;
    that of the first role has `port` (0: any free one). An empty `cwd` or `addr` is for the node to fill in.

    The rest is for nodes on several hosts. Masters are found at `head`, or by the store of the URL `store`; `etcd` are
    the members of the job's own etcd. The head gets the `planned` job in JSON, and starts the first master. A node that
    comes into a running job gets the environment of that (`env`).
    """

    spec: JobSpec
    node: str
    nodes: tuple[str, ...]
    cwd: str = ""
    addr: str = ""
    port: int = 0
    uid: str = ""
    head: TcpAddress | None = None
    store: str = ""
    etcd: tuple[EtcdMember, ...] = ()
    planned: str = ""
    env: dict[str, str] | None = None


class Chunk(Message):
    """A part of a file of a node's directory: `data` (base64 in JSON) at `offset`, or all of a file that was replaced
    (`whole`)."""

    path: str
    offset: int
    data: bytes
    whole: bool = False


class Resume(Message):
    """Asks for what the files of a node's directory have after these offsets. `env` is as in `Invite`."""

    run_id: str
    node: str
    offsets: dict[str, int]
    env: dict[str, str]


class Current(Message):
    """All that the files have was sent; it comes at regular intervals. `over`: also all that they will ever have, as
    the node's agent has ended."""

    over: bool = False


class Ready(Message):
    """The node has bound its endpoints or, from the launcher, all nodes have, and the agent begins.

    To a command that has let it come by ssh, a `node` tells its name in the job.
    """

    node: str = ""


class Dismissed(Message):
    """The sender does not want the receiver in the job, or cannot take part itself."""

    problem: str
    remedy: str = ""


W = TypeVar("W")


def expected(word: object, kind: type[W]) -> W:
    """Return `word` if it is a `kind`. Raises `RendezvousError` for any other message, with what a `Dismissed` says."""
    if isinstance(word, kind):
        return word
    if isinstance(word, Dismissed):
        raise RendezvousError(word.problem, word.remedy)
    raise RendezvousError(f"the other end said {type(word).__name__} instead of {kind.__name__}")


class StartWorker(Value):
    """One worker to start. `devices` are the indices for its device mask, None to leave the mask unchanged; `share` is
    the fraction of each device that it gets."""

    rank: int
    local_rank: int
    incarnation: int
    devices: tuple[str, ...] | None = None
    cpus: tuple[int, ...] | None = None
    share: float = 1.0


class Appointed(Message):
    """A master's first message on a stream: it leads in the term `epoch`. Agents ignore masters of earlier terms."""

    epoch: int


class Heartbeat(Message):
    """Says over a network, at regular intervals, that its sender is there (`unirun.failover.silence`).

    The master answers each of an agent in their order: no other master had a node `age` seconds before. `at` is the
    time of the answer, by the master's clock; the agent's next beat has it, too, and so tells what it has read.
    """

    at: float = 0.0
    age: float = 0.0


class ExitAck(Message):
    """Acknowledges `WorkerExited`: the exit is in the store, so the agent may forget it."""

    worker: WorkerId


class Reserve(Message):
    """Orders ports for these ranks of a role; the agent answers with `Placed`. The ports of a rank stay the same,
    except when a foreign process listens on one (`WorkerExited.taken`)."""

    role: str
    ranks: tuple[int, ...]


class StartRole(Message):
    """Orders the start of `members` of a role for a generation of its process group; its other workers keep running.

    `mask` is the environment variable of the device mask (``CUDA_VISIBLE_DEVICES``), empty for none. `places` are the
    addresses of the ranks that have ports, by role. `endpoint` is empty for programs, which have no rendezvous store.
    `committed` is the step that the roles of the job have committed together, -1 for none.
    """

    role: str
    generation: int
    restarts: int
    world_size: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    endpoint: str
    members: tuple[StartWorker, ...]
    mask: str = ""
    places: dict[str, tuple[RankAddress, ...]] = field(default_factory=dict)
    committed: int = -1


class StopWorkers(Message):
    """Stops these ranks: sends `signal` in `after` seconds, `grace` seconds later SIGKILL to their process groups."""

    role: str
    ranks: tuple[int, ...]
    signal: int
    grace: float
    after: float = 0.0


class AskProgress(Message):
    """Asks for the progress of the ranks of `role`; with `evidence` for their stacks, too, and what the flight recorder
    has, which go to their logs."""

    role: str
    evidence: bool


class AskStacks(Message):
    """Asks for the stacks of `role`, of all roles if it is empty, or of its `rank` (-1: all). The master passes it on
    with a `number`, and the answers back."""

    role: str = ""
    rank: int = -1
    number: int = 0


class StacksAsked(Message):
    """The master's first answer to `AskStacks`: an answer of each of these `nodes` follows."""

    nodes: tuple[str, ...]


class Debug(Message):
    """Asks for a debugger in the worker of a rank of `role`. The master passes it on with a `number`."""

    role: str
    rank: int
    number: int = 0


class DebugInput(Message):
    """A line for the debugger with the request `number`; or it is to take hold of its worker again (``interrupt``), or
    to let it go (``detach``)."""

    line: str = ""
    control: Literal["line", "interrupt", "detach"] = "line"
    number: int = 0


class Profile(Message):
    """Asks for a profile of a rank of `role` for so many `seconds`. The master passes it on with a `number`."""

    role: str
    rank: int
    seconds: float
    number: int = 0


class EndHung(Message):
    """Orders SIGKILL for `worker`, which hangs, and `why`."""

    worker: WorkerId
    why: str


class FollowSteps(Message):
    """Asks for the steps of `role`, which runs again in `generation` after a failure `age` seconds ago: the first one
    since then, and when a rank has come past the `furthest` that was reached before (-1 if the master knows none)."""

    role: str
    generation: int
    furthest: int
    age: float


class WorkerView(Value):
    """The state of a worker that its peers see.

    `phase` is ``starting``; ``running`` (in the user's code, takes no calls); ``serving`` (takes calls, or is ready);
    ``ended`` (with code 0); or ``lost`` (with any other exit). `addresses` are where it listens: for calls by the name
    of the transport, and in any phase for what else others connect to. `place` has the ports that it was given.
    """

    rank: int
    incarnation: int
    phase: str
    addresses: dict[str, str]
    place: RankAddress | None = None


class RoleView(Value):
    """The state of a role that all workers see; `workers` in rank order, only the changed ones in a view of changes. It
    `grows` when one of its ranks is at a boundary (`Boundary`)."""

    name: str
    world_size: int
    generation: int
    endpoint: str
    phase: str
    workers: tuple[WorkerView, ...]
    grows: bool = False


class View(Message):
    """The state of all roles or, unless `since` is None, the changes since the view of that number.

    A master numbers its views consecutively.
    """

    roles: tuple[RoleView, ...]
    number: int = 0
    since: int | None = None


class Shutdown(Message):
    """The job ends or has ended: the agent stops its workers and exits.

    Workers that were not stopped before get SIGTERM and `grace` seconds; with None all are killed at once.
    `ending` is the decided end of the job when the master could not write it; the agent hands it to the next master.
    """

    grace: float | None = None
    ending: Ending | None = None


class Hello(Message):
    """A worker's first message: it is about to enter the user's code."""

    worker: WorkerId


class RoleBrief(Value):
    """The part of a role's spec that workers see. `kind` and `target` are its entry; a `group` has that many ranks.
    `most` is how many ranks it may have when nodes join, None when their number is fixed."""

    name: str
    kind: str
    target: str
    count: int
    per_node: int | None
    group: int = 1
    most: int | None = None


class Welcome(Message):
    """The answer to `Hello` and to `Visit`: a whole view, and the part of the spec that workers use.

    `config` is the user's configuration as JSON text, in which integers may have any size. `name` is the job's name.
    `collocations` are the groups of roles that share devices. `call_timeout` is in seconds. `channels` has the roles of
    each channel of weights, the publisher first.
    """

    view: View
    config: str
    name: str
    roles: tuple[RoleBrief, ...]
    collocations: tuple[tuple[str, ...], ...]
    call_timeout: float
    transport: str
    channels: dict[str, tuple[str, ...]] = field(default_factory=dict)


class Attach(Message):
    """A command subscribes to the job's progress. With `owner`, the job ends when this stream ends. `node` is its
    own, if there is a command on each."""

    owner: bool = False
    node: str = ""


class Visit(Message):
    """A process outside the job wants to call its workers. It is answered with `Welcome`, then with each `View`."""


class Grow(Message):
    """A visitor asks for more workers of an elastic `role`, if there is room."""

    role: str


class Stop(Message):
    """Requests the end of the job: workers get `signal`, and SIGKILL after `grace` seconds (None: the job's setting).

    `code` is the exit code of the job, None for 128 + `signal`; with 0 it has succeeded, as it has done all that it was
    for. `urgent`: the workers are killed now; None leaves that to the master, for which a second request is urgent.
    Several commands may pass on one signal, as under srun.
    """

    signal: int
    reason: str
    grace: float | None = None
    code: int | None = None
    urgent: bool | None = None

    @property
    def exit_code(self) -> int:
        """Exit code of the job."""
        return 128 + self.signal if self.code is None else self.code

    def hurries(self, asked: bool) -> bool:
        """Return True if the workers are killed now; `asked`: there was a request before."""
        return asked if self.urgent is None else self.urgent


class PassOn(Message):
    """Asks that the workers of `node`, or all if it is empty, get `signal`, which ends nothing by itself."""

    signal: int
    node: str = ""


class Drain(Message):
    """Asks that `node` leaves the job."""

    node: str


class Drained(Message):
    """The answer: `node` has left, or why it cannot."""

    node: str
    problem: str = ""
    remedy: str = ""


Fault = Literal["sigkill", "sigstop", "segv", "slow", "hang", "hang-gil", "exit", "oom"]
"""A fault that can be injected into a worker. The first four are signals from outside, for any process; the others need
unirun's code in a Python worker."""


class Inject(Message):
    """Asks for a `fault` in the worker of a rank of `role`; `amount` is the code of ``exit`` or factor of ``slow``.

    The master passes it on with the `incarnation` of the present worker, so that no successor gets it.
    """

    role: str
    rank: int
    fault: Fault
    amount: float = 0.0
    incarnation: int = -1

    def __str__(self) -> str:
        match self.fault:
            case "exit":
                return f"exit={self.amount:.0f}"
            case "slow":
                return f"slow={self.amount:g}x"
        return self.fault


class Injected(Message):
    """The answer to all commands that follow: the agent of the rank was told, or why it was not."""

    role: str
    rank: int
    problem: str = ""


class RoleChanged(Message):
    """The progress of a role: `running` of `total` workers are in the user's code."""

    role: str
    phase: str
    generation: int
    running: int
    total: int


class WorkerOutput(Message):
    """A worker's process was started on `node`, so its output can be followed there. `quiet`: it is a service that is
    ready, of which the output is for the log only."""

    worker: WorkerId
    local_rank: int
    node: str
    quiet: bool = False


class Ended(Message):
    """The job has ended with `code`. `report` is text for users; `error_file` is the root cause's, empty for none."""

    code: int
    phase: str
    report: str
    error_file: str = ""


KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__subclasses__()}
"""All messages, by their names."""


# Views, by which workers know the state of their peers, are kept up to date by differences.
#
# The master numbers its views. An agent first gets a whole view, then only the changes since the previous view. It
# forwards views to its workers unchanged. A receiver that sees a gap in the numbers requests a whole view. A whole view
# omits workers that are still in their initial state.

FIRST: tuple[int, str, dict[str, str], None] = (0, "starting", {}, None)
"""The initial state of a worker: incarnation, phase, addresses, no place."""


def updated(view: View | None, news: View) -> View | None:
    """Apply `news` to `view`. Returns the view with all workers, None when there is a gap between the two."""
    if news.since is None:
        return View(tuple(_updated((), role) for role in news.roles), news.number)
    if view is None or view.number != news.since:
        return None
    changed = {role.name: role for role in news.roles}
    roles = (
        _updated(role.workers, changed[role.name]) if role.name in changed else role for role in view.roles
    )
    return View(tuple(roles), news.number)


def _updated(before: tuple[WorkerView, ...], news: RoleView) -> RoleView:
    if len(before) == news.world_size and not news.workers:
        return replace(news, workers=before)
    workers = list(before[: news.world_size])
    workers += (WorkerView(rank, *FIRST) for rank in range(len(workers), news.world_size))
    for worker in news.workers:
        workers[worker.rank] = worker
    return replace(news, workers=tuple(workers))


def whole(view: View) -> View:
    """Return `view`, which has all workers, without those in their initial state."""
    return replace(view, roles=tuple(_brief(role) for role in view.roles))


def _brief(role: RoleView) -> RoleView:
    changed = (w for w in role.workers if (w.incarnation, w.phase, w.addresses, w.place) != FIRST)
    return replace(role, workers=tuple(changed))
