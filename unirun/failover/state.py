"""The state of a job, as frozen values that check themselves."""

from __future__ import annotations

import json
import signal as signals
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import chain, compress, zip_longest
from operator import is_not
from typing import Any, Literal, NamedTuple, TypeVar, overload

from msgspec import field
from msgspec.structs import replace

from unirun.collocation import Inventory, Placement, Ties
from unirun.collocation.graph import RoleGraph, added, tight_parts, weights
from unirun.spec.job import EntryKind, JobSpec, Restart, RoleSpec
from unirun.values import RankAddress, Value, WorkerId
from unirun.wire.reports import CallCount, Health, Join

OWNER_LOST_GRACE_SECONDS = 0.4
"""Seconds between TERM and KILL when the CLI was killed: no worker may outlive it by more than a second."""

# The way in which a process ended, and the record of a failure.
#
# The job's context is written to a store after each failure, so it must stay small whatever a worker has printed: a
# failure has a limited part of each text. The worker's error file and log have all of it.

MESSAGE, TRACEBACK, TAIL, NOTE = 4096, 12288, 6144, 1024
"""Bytes of JSON that are kept of each."""

MARK = "…"
"""Stands where something was left out."""


class Exit(Value, omit_defaults=True):
    """The end of a process: an exit `code`, or the number of the `signal` that killed it. `early`: a service has ended
    though it was still needed, or a rank for which others wait to form a group; a failure whatever its code is."""

    code: int | None = None
    signal: int | None = None
    early: bool = False

    @property
    def ok(self) -> bool:
        """True if the process ended as it should."""
        return self.code == 0 and not self.early

    @property
    def status(self) -> int:
        """The exit code that a shell shows: the code, or 128 + the signal's number; 1 for a failure with code 0."""
        return 128 + self.signal if self.signal is not None else int(self.code or self.early)

    @property
    def predicate(self) -> str:
        """The predicate of a sentence whose subject is the name of the process."""
        return f"ended with {self}" if self.signal is None else f"was {self}"

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}{', too early' if self.early and not self.code else ''}"
        try:
            return f"killed by {signals.Signals(self.signal).name}"
        except ValueError:
            return f"killed by signal {self.signal}"


class Failure(Value, omit_defaults=True):
    """One worker that ended when it should not have.

    `time` is in seconds since the epoch: when the exception was raised, or, without one, when the exit was
    seen. `message` and `traceback` are empty when the worker reported no error. `tail` holds the last lines
    of its output then. `log` is its log directory, empty for a worker that never ran. `decision` is what followed
    from it, in words; empty when that was decided before, as in a role that restarts or stops already. An `inferred`
    one has not failed itself, but is taken for the cause of others; `note` says why.

    The `rule` is that by which it was noticed, at the time `noticed` (by the master's clock). `slots` are the worker's
    devices. `fault` is the id of the event that has injected a fault into it. `affected` are other ranks that wait for
    it or lose something by it, in words. `step` is the one to which it had come, -1 if it has reported none.
    """

    worker: WorkerId
    generation: int
    node: str
    time: float
    exit: Exit
    message: str = ""
    traceback: str = ""
    note: str = ""
    tail: str = ""
    log: str = ""
    decision: str = ""
    inferred: bool = False
    rule: Rule = "exit"
    noticed: float = 0.0
    slots: tuple[str, ...] = ()
    fault: str = ""
    affected: tuple[str, ...] = ()
    step: int = -1


Rule = Literal["exit", "node", "hang", "peers", "probe", "port", "store", "weights", "network"]
"""The rule by which a failure is noticed: the end of the process, the loss of its node, a wait that does not end, what
its peers report, its probe, a port that another process has, the end of its rendezvous store, weights that it could
not be given, or connections between two nodes that get no answer."""


def brief(failure: Failure) -> Failure:
    """`failure` with the beginnings of its message, note and decision, and the ends of its traceback and tail."""
    return replace(
        failure,
        message=beginning(failure.message, MESSAGE),
        traceback=ending(failure.traceback, TRACEBACK),
        note=beginning(failure.note, NOTE),
        decision=beginning(failure.decision, NOTE),
        tail=ending(failure.tail, TAIL),
    )


def beginning(text: str, limit: int) -> str:
    """The beginning of `text` which, with a mark, has at most `limit` bytes (6 or more) in JSON."""
    return _cut(text, limit, lambda length: text[:length] + MARK)


def ending(text: str, limit: int) -> str:
    """The end of `text` which, with a mark, has at most `limit` bytes (6 or more) in JSON."""
    return _cut(text, limit, lambda length: MARK + text[len(text) - length :])


def _cut(text: str, limit: int, part: Callable[[int], str]) -> str:
    if _size(text) <= limit:
        return text
    # Every character has at least one byte.
    return part(bisect_right(range(limit), limit, key=lambda length: _size(part(length))) - 1)


def _size(text: str) -> int:
    return len(json.dumps(text)) - 2


# The workers of a role as a frozen sequence, of which a changed copy is cheap.
#
# A role may have ten thousand ranks, and each of them tells several things while the job starts. A tuple would be
# copied as a whole each time, and counted as a whole to see how far the role is.

T = TypeVar("T")

BLOCK = 100
"""Workers in one block: to replace one worker copies its block and the tuple of blocks."""


class Ranks(Sequence["WorkerState"]):
    """Workers in rank order. `counts` has how many of them have each `WorkerState.count_key`."""

    __slots__ = ("_blocks", "_size", "counts")

    def __init__(self, workers: Iterable[WorkerState] = ()) -> None:
        every = tuple(workers)
        self._size = len(every)
        self._blocks = tuple(every[at : at + BLOCK] for at in range(0, len(every), BLOCK))
        self.counts: Mapping[CountKey, int] = Counter(worker.count_key for worker in every)

    def with_one(self, rank: int, worker: WorkerState) -> Ranks:
        """A copy with another worker at `rank`."""
        at, within = divmod(rank, BLOCK)
        block = self._blocks[at]
        before, after = block[within].count_key, worker.count_key
        changed = Ranks.__new__(Ranks)
        changed._size = self._size
        changed._blocks = (
            *self._blocks[:at],
            (*block[:within], worker, *block[within + 1 :]),
            *self._blocks[at + 1 :],
        )
        changed.counts = self.counts
        if before != after:
            counts = dict(self.counts)
            counts[after] = counts.get(after, 0) + 1
            counts[before] -= 1
            if not counts[before]:
                del counts[before]
            changed.counts = counts
        return changed

    def since(self, before: Ranks) -> Iterator[tuple[WorkerState | None, WorkerState]]:
        """Each worker that differs from the one in `before`, with that one, None if there was none."""
        for old, new in _that_differ(before._blocks, self._blocks):
            yield from _that_differ(old or (), new)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[WorkerState]:
        return chain.from_iterable(self._blocks)

    @overload
    def __getitem__(self, rank: int) -> WorkerState: ...

    @overload
    def __getitem__(self, rank: slice) -> tuple[WorkerState, ...]: ...

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return tuple(self[at] for at in range(*rank.indices(self._size)))
        if not -self._size <= rank < self._size:
            raise IndexError(f"there is no rank {rank} among {self._size}")
        at, within = divmod(rank % self._size, BLOCK)
        return self._blocks[at][within]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranks) and self._blocks == other._blocks

    def __repr__(self) -> str:
        return f"Ranks({tuple(self)})"


def _that_differ(before: Sequence[T], after: Sequence[T]) -> Iterator[tuple[T | None, T]]:
    """Each item of `after` that is another object than the one in its place in `before`, with that one."""
    yield from compress(zip(before, after, strict=False), map(is_not, before, after))
    for more in after[len(before) :]:
        yield None, more


class JobPhase(StrEnum):
    """A job is launching until every node has joined; it ends in one of the last three."""

    LAUNCHING = "launching"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class RolePhase(StrEnum):
    """`RESTARTING`: the old generation is being stopped; a new one starts when the last of it is gone.

    `REFORMING`: some workers have a successor, or the store has; those that live on keep what they have, and all
    form the next generation. `RUNNING`: every rank is up and in the present generation.
    """

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    REFORMING = "reforming"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class WorkerPhase(StrEnum):
    """`STARTING`: ordered; `ALIVE`: has a process; `RUNNING`: in the user's code; `SERVING`: takes calls, or is ready,
    as its probe says."""

    WAITING = "waiting"
    STARTING = "starting"
    ALIVE = "alive"
    RUNNING = "running"
    SERVING = "serving"
    EXITED = "exited"


JOB_ENDS = (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.STOPPED)
ROLE_ENDS = (RolePhase.SUCCEEDED, RolePhase.FAILED, RolePhase.STOPPED)
ROLE_WORKS = (RolePhase.STARTING, RolePhase.RUNNING, RolePhase.REFORMING)
"""The phases in which the workers of a role are meant to run: the end of one has to be handled."""


NEVER = -1.0
"""The `WorkerState.due` of a rank that is not started again."""

NOT_LIVE = (WorkerPhase.WAITING, WorkerPhase.EXITED)

CountKey = tuple[WorkerPhase, int, bool]
"""The facts that decide how far a role is: a worker's phase, its generation, and whether it has ended well."""


class Ports(NamedTuple):
    """The ports of a rank: the node whose agent was asked for them, and its answer."""

    node: str
    place: RankAddress | None = None


class WorkerState(Value, omit_defaults=True):
    """One rank and the worker that holds it.

    `node` is where its process is, or was last, and `own` are its slots there; where the next one will be is for the
    placement to say.
    `generation` is that of the process group which the worker was started for, or has formed since. `addresses`
    is where it takes calls, `recoverable` what it said of itself with them. `metrics` are the latest by name. `calls`
    is what this worker has called, `called` what those before it had. `left` is when it has ended with 0 by itself, in
    seconds since the epoch; 0 when it lives, has failed or was told to end. `ports` stay when the rank starts again on
    its node. `health` is what the probe of a program says. A program is not started again before `due`;
    `paid` are the times of the latest restarts of a rank that has a budget of its own. `new_ports`
    counts how often another process had its port. `fault` is the id of the event that has injected a fault into it.
    `resilient`: it is in a function that survives the loss of a peer, has left it, or (None) has not entered it.
    `step` is the one to which the worker before had come, until the role runs again; -1 if it is not known.
    `leaving`: it was told to end as its rank goes elsewhere; that may have come back to its place since.
    """

    rank: int
    node: str
    incarnation: int = 0
    phase: WorkerPhase = WorkerPhase.WAITING
    pid: int | None = None
    exit: Exit | None = None
    generation: int = 0
    addresses: Mapping[str, str] = field(default_factory=dict)
    recoverable: bool | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    calls: tuple[CallCount, ...] = ()
    called: tuple[CallCount, ...] = ()
    own: tuple[str, ...] = ()
    left: float = 0.0
    ports: Ports | None = None
    health: Health | None = None
    due: float = 0.0
    new_ports: int = 0
    paid: tuple[float, ...] = ()
    fault: str = ""
    resilient: bool | None = None
    step: int = -1
    leaving: bool = False

    @property
    def place(self) -> RankAddress | None:
        """Its address, if it was given one."""
        return self.ports.place if self.ports is not None else None

    @property
    def live(self) -> bool:
        """True if a process was ordered and has not ended."""
        return self.phase not in NOT_LIVE

    @property
    def count_key(self) -> CountKey:
        """The key under which it is counted."""
        return self.phase, self.generation, self.ended_well

    @property
    def portless(self) -> bool:
        """True if it has no ports yet. A rank that the job goes on without gets none."""
        return self.place is None and self.due != NEVER

    @property
    def ended_well(self) -> bool:
        """True if the process has left with code 0, or the job goes on without the rank."""
        return (self.exit is not None and self.exit.ok) or (self.due == NEVER and not self.live)

    def ended(self, end: Exit) -> WorkerState:
        """The worker after its process has ended."""
        return replace(self, phase=WorkerPhase.EXITED, exit=end, addresses={}, health=None)

    def ordered(self, incarnation: int, generation: int, node: str, own: tuple[str, ...]) -> WorkerState:
        """The next worker at this rank. It inherits the call counts of the one before, and its ports."""
        return WorkerState(
            self.rank,
            node,
            incarnation,
            phase=WorkerPhase.STARTING,
            generation=generation,
            called=added(self.called, self.calls),
            own=own,
            ports=self.ports,
            paid=self.paid,
            new_ports=self.new_ports,
            step=self.step,
        )


class RoleState(Value):
    """One role; `workers` is in rank order, and counts them.

    `generation` is what is decided, `opened` the last one whose store is there: workers learn of a generation only
    when they can meet in its store. `cause` is the id of the event that its phase and generation follow from.
    `orderly`: its workers are told to end because nodes leave or have come, not because of a failure. `dropped` is the
    greatest incarnation of the ranks that it had before it became smaller, -1 if there were none.
    A role of programs (`is_program`) has no rendezvous store: each of its ranks starts when it is due. With a `probed`
    role, ranks are up when they are ready. `wave` is its place in the order of the starts, from 1. `paid` are the times
    of its latest restarts that were not free. The store of its generation is ordered when it is `due`; 0 for at once.
    It `grows` as soon as one of its ranks is at a boundary.
    """

    name: str
    kind: EntryKind
    restart: Restart
    workers: Ranks
    phase: RolePhase = RolePhase.WAITING
    generation: int = 0
    opened: int = 0
    restarts: int = 0
    cause: str = ""
    orderly: bool = False
    dropped: int = -1
    is_program: bool = False
    probed: bool = False
    wave: int = 0
    paid: tuple[float, ...] = ()
    due: float = 0.0
    grows: bool = False

    @property
    def live(self) -> tuple[WorkerState, ...]:
        """The workers with a process."""
        return tuple(worker for worker in self.workers if worker.live) if self.living else ()

    @property
    def living(self) -> int:
        """The number of workers that have a process."""
        counts = self.workers.counts.items()
        return sum(count for (phase, _, _), count in counts if phase not in NOT_LIVE)

    @property
    def incomplete(self) -> bool:
        """True if a worker has no process, and has not ended well."""
        return any(phase in NOT_LIVE and not well for phase, _, well in self.workers.counts)

    @property
    def forming(self) -> bool:
        """True if a generation is decided whose store is not there yet."""
        return self.opened < self.generation and self.phase not in ROLE_ENDS

    @property
    def given_up(self) -> frozenset[int]:
        """The ranks that the job goes on without."""
        return frozenset(worker.rank for worker in self.workers if worker.due == NEVER)

    @property
    def serves(self) -> bool:
        """True if every worker with a process takes calls."""
        phases = {phase for phase, _, _ in self.workers.counts}
        return phases.isdisjoint((WorkerPhase.STARTING, WorkerPhase.ALIVE, WorkerPhase.RUNNING))

    @property
    def running(self) -> int:
        """The number of workers that are up or have succeeded."""
        counts = self.workers.counts.items()
        return sum(count for (phase, _, well), count in counts if well or self._is_up(phase))

    @property
    def settled(self) -> bool:
        """True if every rank is up and, where there are any, in the current generation; or has succeeded."""
        return self.opened == self.generation and all(
            well or (self._is_up(phase) and (self.is_program or generation == self.generation))
            for phase, generation, well in self.workers.counts
        )

    @property
    def has_done_its_work(self) -> bool:
        """True if every rank has succeeded."""
        return all(well for _, _, well in self.workers.counts)

    @property
    def in_place(self) -> bool:
        """True if lost ranks start again alone, and the others keep their memory: by the role's spec, or as the others
        are in a function that survives, which none of them has left."""
        inside = {worker.resilient for worker in self.workers if worker.live or worker.ended_well}
        return self.restart == "process" or (True in inside and False not in inside)

    @property
    def survives(self) -> bool:
        """True if it is a role of scripts whose ranks are in a function that survives."""
        return self.restart == "role" and self.in_place

    @property
    def grouped(self) -> bool:
        """True if its ranks have a process group, or restart together: they have one budget, not one each."""
        return not (self.is_program and self.restart == "process")

    def up(self, worker: WorkerState) -> bool:
        """Return True if `worker` is in the user's code and, if it is a workload, takes calls."""
        return self._is_up(worker.phase)

    def _is_up(self, phase: WorkerPhase) -> bool:
        runs = phase is WorkerPhase.RUNNING and not self.probed and self.kind != "workload"
        return phase is WorkerPhase.SERVING or runs

    def with_worker(self, worker: WorkerState) -> RoleState:
        """This role with the worker of one rank replaced."""
        return replace(self, workers=self.workers.with_one(worker.rank, worker))


class Verdict(Value):
    """The end that the job will have once every worker is gone. `by_failure`: there is a root cause, and a `code` of 0
    means that of the root cause, which is known at the end.

    `report` is for people, and `error_file` the root cause's, if it left one; both are there at the end. Workers are
    told to end with `signal`, and have `grace` seconds then.
    """

    phase: JobPhase
    code: int
    reason: str
    by_failure: bool = False
    report: str = ""
    error_file: str = ""
    signal: int = 15
    grace: float = 30.0


class SentView(Value):
    """The last view that agents were sent: its `number`, the `roles` then, and the `endpoints` of their stores."""

    number: int
    roles: Mapping[str, RoleState]
    endpoints: Mapping[str, str]


class Looked(Value):
    """The `workers` of a role as they were when it was last looked at which are due to start, and the `placement` then.

    It counts, so that the next look is at what has changed only: the ranks that have no ports (`portless`), the groups
    that are `ready`, and the ranks that are `missing`: without a process, and not ended well.
    """

    placement: Placement
    workers: Ranks
    portless: int = 0
    ready: int = 0
    missing: frozenset[int] = frozenset()


class Strike(Value):
    """A failure of a rank at `time` that may be the fault of its `node`: no consequence of another one."""

    role: str
    rank: int
    node: str
    time: float


class PendingCommit(Value):
    """A `step` that these `ranks` have committed, by role, and others have not."""

    step: int
    ranks: Mapping[str, tuple[int, ...]]


class Commits(Value):
    """The `step` that the job goes back to when it restarts, -1 for none: the last one that all ranks of `roles` have
    committed. `pending` are later ones."""

    roles: tuple[str, ...] = ()
    step: int = -1
    pending: tuple[PendingCommit, ...] = ()


class Cut(Value):
    """Two `nodes`, in the order of their names, that did not hear each other at `time`."""

    nodes: tuple[str, str]
    time: float


CUT_SECONDS = 60.0
"""Seconds for which it counts that two nodes did not hear each other; while they do not, agents say so again."""


NOTHING = Inventory(())

KEPT_FAILURES = 256
"""The number of failures that are kept in the state; the event log has all of them."""


class JobState(Value):
    """Everything that the master knows. `failures` are those that were not asked for, in order of arrival.

    `forgotten` counts failures that are not remembered any more. `asked_to_stop`: somebody has asked; a job also
    stops by itself. `view_due`: something has changed that the workers will be told in a moment. `away` are the nodes
    that had joined an earlier master and have not joined this one. `uid` tells this job from others of its run id.
    `owned`: it must not outlive the command that has started it, which attaches as its owner.
    `inventory` has the nodes that have an agent, or had one; without it, ranks can be nowhere but where they are.
    `keepers` are the nodes that keep the job's store, and so cannot leave: the head where it is a file, those with a
    member of the job's own etcd; none where it is elsewhere. Nodes that are `draining` leave as soon as nothing runs
    there, and have `left` then. `newcomers` have joined the running job; roles that may grow have not been offered
    them.
    `told` is the latest view; the agents of the `uninformed` nodes have none that it follows on. `losses` are the nodes
    of which the agents are gone since a moment, and why; what follows is decided for all of them at once.
    `commits` are the steps that roles have committed together.
    `epoch` is the term of the master, `recorded` the number of events that it has written, `cause` the id of the one
    that the end of the job follows from. `looked` is by role. `restarts` are those of the whole job, and `paid` the
    times of the latest ones. `strikes` are recent failures, and `tainted` the nodes that get no more ranks because of
    them, or because they are `sick`: the first sign of each. `cuts` are the nodes that do not hear each other.
    """

    spec: JobSpec
    placement: Placement
    roles: Mapping[str, RoleState]
    started: float
    logs: str
    phase: JobPhase = JobPhase.LAUNCHING
    agents: Mapping[str, Join] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    verdict: Verdict | None = None
    ended: float | None = None
    view_due: bool = False
    asked_to_stop: bool = False
    forgotten: int = 0
    away: frozenset[str] = frozenset()
    uid: str = ""
    owned: bool = False
    inventory: Inventory = NOTHING
    told: SentView | None = None
    uninformed: frozenset[str] = frozenset()
    losses: Mapping[str, str] = field(default_factory=dict)
    epoch: int = 0
    recorded: int = 0
    cause: str = ""
    keepers: tuple[str, ...] = ()
    draining: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    newcomers: tuple[str, ...] = ()
    looked: Mapping[str, Looked] = field(default_factory=dict)
    restarts: int = 0
    paid: tuple[float, ...] = ()
    strikes: tuple[Strike, ...] = ()
    tainted: tuple[str, ...] = ()
    commits: Commits = Commits()
    sick: Mapping[str, str] = field(default_factory=dict)
    cuts: tuple[Cut, ...] = ()

    def with_role(self, role: RoleState) -> JobState:
        """This state with one role replaced."""
        return replace(self, roles={**self.roles, role.name: role})

    def with_failures(self, *failures: Failure) -> JobState:
        """This state with more failures, whose texts are cut to a limit (`brief`)."""
        every = (*self.failures, *failures)
        return replace(
            self,
            failures=every[-KEPT_FAILURES:],
            forgotten=self.forgotten + max(0, len(every) - KEPT_FAILURES),
        )

    def role_spec(self, name: str) -> RoleSpec:
        """The spec of a role."""
        return self.spec.role(name)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that have an agent, had one, or are expected to have one."""
        return self.inventory.names or self.placement.nodes

    def given_up(self, node: str) -> bool:
        """Return True if `node` is lost, or was never a part of the job."""
        return node in self.placement.lost or node not in self.nodes

    def without(self, gone: Collection[str]) -> tuple[str, ...]:
        """The nodes that can have ranks without `gone`: with an agent, or expected while the job launches."""
        coming = self.phase is JobPhase.LAUNCHING
        out = {*gone, *self.placement.lost, *self.draining}
        return tuple(
            node for node in self.inventory.names if node not in out and (coming or node in self.agents)
        )

    def has_to_leave(self, role: RoleState, worker: WorkerState) -> bool:
        """Return True if a worker runs where its rank is no more: it is misplaced, or the job goes on without it."""
        given_up = role.phase is RolePhase.STOPPING or worker.due == NEVER
        return self.misplaced(role, worker) or (worker.live and given_up)

    def misplaced(self, role: RoleState, worker: WorkerState) -> bool:
        """Return True if a worker runs at another node or slot than the placement has for its rank, or had when the
        worker was told to end."""
        places = self.placement.of_role(role.name)
        if not worker.live:
            return False
        if worker.leaving or worker.rank >= len(places):
            return True
        return (worker.node, worker.own) != (places[worker.rank].node, places[worker.rank].own)

    @property
    def code(self) -> int | None:
        """The exit code of a job that has ended; None before."""
        return self.verdict.code if self.verdict and self.phase in JOB_ENDS else None

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks of every role."""
        return {role.name: len(role.workers) for role in self.roles.values()}

    @property
    def live(self) -> bool:
        """True if any worker has a process."""
        return any(role.living for role in self.roles.values())


def new_job(
    spec: JobSpec,
    placement: Placement,
    *,
    started: float,
    logs: str,
    uid: str = "",
    owned: bool = False,
    inventory: Inventory = NOTHING,
    keepers: tuple[str, ...] = (),
) -> JobState:
    """The state of a job before its first event."""
    roles = {
        role.name: RoleState(
            role.name,
            role.entry.kind,
            role.restart,
            waiting(placement, role.name),
            is_program=role.is_program,
            probed=role.ready is not None,
        )
        for role in spec.roles
    }
    return JobState(
        spec, placement, roles, started, logs, uid=uid, owned=owned, inventory=inventory, keepers=keepers
    )


def waiting(placement: Placement, role: str, before: Sequence[WorkerState] = ()) -> Ranks:
    """The ranks of a role before any of them was started. Those `before` had other places, perhaps; the job still goes
    on without those that are given up."""
    ranks = (WorkerState(place.rank, place.node, own=place.own) for place in placement.of_role(role))
    return Ranks(
        rank if old is None else replace(rank, ports=old.ports, due=old.due)
        for rank, old in zip_longest(ranks, before)
        if rank is not None
    )


# The ties between the roles of a job when their ranks are placed.


def ties_of(graph: RoleGraph) -> Ties:
    """The bytes between roles, and the roles that wait for each other, by the edges of `graph`."""
    return Ties(weights(graph), tight_parts(graph))
