"""The formation of a generation of a role: first its rendezvous store, then the missing workers, then the
view of all. And the step that all roles have committed, to which a restart of the job goes back.

For the first generation all orders are sent together: the listening socket exists before its store, so early
connections wait in its backlog. Later the socket may still belong to a store that is about to be killed; no worker may
connect to that one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from unirun.collocation import Assignment
from unirun.failover.draft import JobDraft, endpoint, leader
from unirun.failover.phases import PhaseEvent
from unirun.failover.state import (
    NEVER,
    ROLE_ENDS,
    Commits,
    JobPhase,
    JobState,
    PendingCommit,
    Ranks,
    RolePhase,
    RoleState,
    WorkerPhase,
    WorkerState,
    waiting,
)
from unirun.values import RankAddress, WorkerId
from unirun.wire.messages import StartRole, StartWorker
from unirun.wire.reports import CommitJob, MasterReply, OpenStore


def form_first(draft: JobDraft, names: Collection[str]) -> None:
    """Order every worker of these roles, as generation 0."""
    wave = 1 + max(role.wave for role in draft.state.roles.values())
    for role in map(draft.role, names):
        # While it waited, the role may have got other places.
        workers = Ranks(
            worker if worker.due == NEVER else worker.ordered(0, 0, worker.node, worker.own)
            for worker in waiting(draft.state.placement, role.name, role.workers)
        )
        started = replace(role, phase=RolePhase.STARTING, workers=workers, wave=wave)
        draft.put(started, PhaseEvent.TURN_COMES)
    draft.tell_now()
    for name in names:
        order_store(draft, name)
        _start(draft, name, [worker.rank for worker in draft.role(name).live])


def form_if_all_are_there(draft: JobDraft) -> None:
    """Start the job once every node with ranks has joined, and every node that had joined an earlier master. The roles
    that start then follow from `unirun.failover.readiness`."""
    state = draft.state
    # Ranks that are given up keep their places on lost nodes.
    lost, wanted = state.placement.lost, state.placement.nodes
    waits = bool(state.away) or len(state.agents) + len(lost) < len(wanted)
    if not waits and state.agents.keys() >= {*wanted} - {*lost}:
        draft.put(replace(state, phase=JobPhase.RUNNING), PhaseEvent.NODES_JOINED)
        nodes = ", ".join(state.placement.nodes) if len(state.placement.nodes) <= 4 else "all nodes"
        draft.record("start", f"the job starts, as {nodes} joined", *state.roles)


def form_next(draft: JobDraft, name: str) -> None:
    """Order the store of the next generation; `opened` continues when it is there, for programs when they are due."""
    role = draft.role(name)
    draft.put(replace(role, generation=role.generation + 1))
    order_store(draft, name)


def opened(draft: JobDraft, name: str) -> None:
    """The store of the current generation is there: start the missing workers and send the view."""
    role = draft.role(name)
    role = replace(role, opened=role.generation, due=0.0)
    if role.phase is RolePhase.RESTARTING:
        # The role may have shrunk; the surplus workers have ended by now.
        places = draft.state.placement.of_role(name)
        surplus = [w.incarnation for w in role.workers[len(places) :] if w.phase is not WorkerPhase.WAITING]
        role = replace(
            role,
            phase=RolePhase.STARTING,
            workers=Ranks(role.workers[: len(places)]),
            orderly=False,
            dropped=max(role.dropped, *surplus, -1),
        )
        draft.record("restart", f"role {name} starts as generation {role.generation}", name)
    draft.put(role, PhaseEvent.STORE_OPENED)
    # A rank that had succeeded is started again, because the others wait for it; except when it was in this generation
    # already: `GroupFormed` may arrive before `StoreOpened`.
    gone = [w for w in role.workers if not w.live and w.due != NEVER]
    missing = [w for w in gone if w.generation < role.generation or not w.ended_well]
    _complete(draft, name, missing)


def start_missing(draft: JobDraft, name: str) -> None:
    """Start the missing workers of the generation that is being formed, now or when its store is there.

    While nodes are away after a takeover, no view is sent and no worker is started (`takeover.all_back`).
    """
    role = draft.role(name)
    if role.opened == role.generation and not draft.state.away:
        draft.tell_now()
        complete(draft, name)


def complete(draft: JobDraft, name: str) -> None:
    """Start the missing workers of a generation whose store is there."""
    workers = draft.role(name).workers
    _complete(draft, name, [worker for worker in workers if not worker.live and not worker.ended_well])


def start_again(draft: JobDraft, name: str, workers: Sequence[WorkerState]) -> None:
    """Start these ranks of a role of programs."""
    names = [f"{name}:{worker.rank}" for worker in workers]
    draft.cause = draft.role(name).cause
    draft.record("restart", f"{', '.join(names)} starts again", *names)
    _complete(draft, name, workers)


def _complete(draft: JobDraft, name: str, newcomers: Sequence[WorkerState]) -> None:
    role = draft.role(name)
    if newcomers and role.phase is RolePhase.REFORMING:
        names = [f"{name}:{worker.rank}" for worker in newcomers]
        joins = f"joins generation {role.generation} of role {name}"
        draft.record("restart", f"{', '.join(names)} {joins}", *names)
    places = draft.state.placement.of_role(name)
    for worker in newcomers:
        # A rank that the role had before it became smaller has had workers.
        before = role.dropped if worker.phase is WorkerPhase.WAITING else worker.incarnation
        place = places[worker.rank]
        role = role.with_worker(worker.ordered(before + 1, role.generation, place.node, place.own))
    draft.put(role, PhaseEvent.ORDERED)
    draft.tell_now()
    _start(draft, name, [worker.rank for worker in newcomers])


def obstructed(state: JobState, role: RoleState) -> bool:
    """Return True if a worker that has to leave still runs: where ranks of `role` are to start, as both would
    use one device; or at a rank of `role` itself, which no other worker may hold meanwhile."""
    if any(state.has_to_leave(role, worker) for worker in role.live):
        return True
    places = state.placement.of_role(role.name)
    starts = [place for place, worker in zip(places, role.workers, strict=False) if not worker.live]
    slots = {(place.node, slot) for place in starts for slot in place.own}
    return any(
        not slots.isdisjoint((worker.node, slot) for slot in worker.own) and state.has_to_leave(other, worker)
        for other in state.roles.values()
        for worker in other.live
    )


def clear_the_way(draft: JobDraft) -> None:
    """A worker that had to leave has ended: order the stores of the roles that waited for its slot again."""
    for role in draft.state.roles.values():
        forms = role.phase in (RolePhase.RESTARTING, RolePhase.REFORMING)
        if forms and role.generation > role.opened and not obstructed(draft.state, role):
            order_store(draft, role.name)


def order_store(draft: JobDraft, name: str) -> None:
    """Order the store of the role's current generation, if it has stores and is not to wait for its start."""
    role = draft.role(name)
    if not role.is_program and not role.due:
        draft.order(leader(draft.state, name), OpenStore(name, role.generation))


def places_of(state: JobState) -> dict[str, tuple[RankAddress, ...]]:
    """The addresses of the ranks of roles that have ports, and know them all. A rank that the job goes on without may
    have got no ports: nobody listens at its port 0."""
    found: dict[str, tuple[RankAddress, ...]] = {}
    for spec in state.spec.roles:
        role = state.roles[spec.name]
        if spec.ports and (role.phase in ROLE_ENDS or not any(worker.portless for worker in role.workers)):
            nowhere = (0,) * len(spec.ports)
            found[spec.name] = tuple(each.place or RankAddress(each.node, nowhere) for each in role.workers)
    return found


def _start(draft: JobDraft, name: str, ranks: Collection[int]) -> None:
    role = draft.role(name)
    nodes: dict[str, list[Assignment]] = {}
    for place in draft.state.placement.of_role(name):
        nodes.setdefault(place.node, []).append(place)
    address, wanted = endpoint(draft.state, name), frozenset(ranks)
    addresses = places_of(draft.state)
    for group_rank, (node, here) in enumerate(nodes.items()):
        members = tuple(
            StartWorker(
                place.rank,
                place.local_rank,
                role.workers[place.rank].incarnation,
                place.devices,
                place.cpus,
                place.share,
            )
            for place in here
            if place.rank in wanted
        )
        if not members:
            continue
        order = StartRole(
            role=name,
            generation=role.opened,
            restarts=role.restarts + draft.state.restarts,
            world_size=len(role.workers),
            local_world_size=len(here),
            group_rank=group_rank,
            group_world_size=len(nodes),
            endpoint=address,
            members=members,
            mask=draft.state.placement.masks.get(name, ""),
            places=addresses,
            committed=draft.state.commits.step,
        )
        draft.order(node, order)


# The common restart point of a job: the last step that all ranks of the roles that take part have committed.
#
# A rank commits a step when it has saved what it needs to go on from there. The step counts once all ranks have, in one
# decision over all roles. A restart of the job goes back to it: no role can have a later state than another one.

MAX_PENDING = 64
"""Steps that some ranks have committed and others have not. A role that is further ahead loses the oldest ones."""


def commit(draft: JobDraft, who: WorkerId, ask: CommitJob) -> None:
    """Note that a rank has committed a step, and answer it. A request that comes again changes nothing."""
    worker = draft.find(who)
    if worker is None:
        return
    before = draft.state.commits
    roles = (*dict.fromkeys(ask.roles),) or before.roles or taking_part(draft.state)
    problem = _why_not(draft.state, who, ask.step, roles)
    # What a role that starts again has saved may be written anew by its next ranks.
    if not problem and draft.role(who.role).phase is not RolePhase.RESTARTING:
        draft.put(replace(draft.state, commits=with_commit(draft.state, who, ask.step, roles)))
    step = draft.state.commits.step
    if step > before.step:
        text = f"the job can go back to step {step}, which every rank of {', '.join(roles)} has committed"
        draft.record("commit", text, *roles)
    data = None if problem or step < 0 else str(step)
    draft.order(worker.node, MasterReply(who, ask.number, data, problem))


def taking_part(state: JobState) -> tuple[str, ...]:
    """The roles that take part unless ranks name others: all but services and programs."""
    return tuple(role.name for role in state.spec.roles if not (role.service or role.is_program))


def _why_not(state: JobState, who: WorkerId, step: int, roles: Sequence[str]) -> str:
    """The reason why a rank cannot commit a step; empty if it can."""
    if step < 0:
        return f"step {step} is negative: count from 0"
    if unknown := [name for name in roles if name not in state.roles]:
        return f"this job has no role {', '.join(unknown)}: it has {', '.join(state.roles)}"
    if who.role not in roles:
        return f"{who.role} is not one of the roles that commit together: {', '.join(roles)}"
    before = state.commits.roles
    if before and {*before} != {*roles}:
        return f"ranks have committed with the roles {', '.join(before)}, and {who} with {', '.join(roles)}"
    return ""


def with_commit(state: JobState, who: WorkerId, step: int, roles: Sequence[str]) -> Commits:
    """The commits of a job after one of a rank."""
    before = replace(state.commits, roles=state.commits.roles or (*roles,))
    if step <= before.step:
        return before
    steps = {each.step: dict(each.ranks) for each in before.pending}
    ranks = steps.setdefault(step, {})
    committed = ranks.get(who.role, ())
    ranks[who.role] = committed if who.rank in committed else (*committed, who.rank)
    if all(len(ranks.get(name, ())) == len(state.roles[name].workers) for name in before.roles):
        before = replace(before, step=step)
    later = (PendingCommit(each, steps[each]) for each in sorted(steps) if each > before.step)
    return replace(before, pending=(*later,)[-MAX_PENDING:])


def without_pending(commits: Commits, role: str) -> Commits:
    """The commits without what ranks of `role`, which starts again, have committed and others have not."""
    left = (
        replace(each, ranks={name: ranks for name, ranks in each.ranks.items() if name != role})
        for each in commits.pending
    )
    return replace(commits, pending=tuple(each for each in left if each.ranks))
