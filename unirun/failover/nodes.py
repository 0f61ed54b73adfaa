"""Changes of the nodes of a job: they come, are drained, or are lost, and ranks are placed again."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count

from msgspec.json import encode as to_json
from msgspec.structs import replace

from unirun.collocation import Inventory
from unirun.errors import EXIT_PLACEMENT, PlacementError
from unirun.failover.draft import Absent, After, Arrived, Due, JobDraft, ToGuest, ToWatchers
from unirun.failover.moving import (
    Cause,
    Relocation,
    begin,
    decide_missing,
    end_of,
    named,
    place_without,
    placed_again,
    relocate,
    relocation_to,
    without_room,
)
from unirun.failover.offers import inventory_of, misfits, taken_or_full
from unirun.failover.phases import PhaseEvent
from unirun.failover.policy import Decision
from unirun.failover.restart_or_end import advance, end_job, give_up, unsettle
from unirun.failover.state import ROLE_ENDS, Exit, Failure, JobPhase, JobState, RolePhase
from unirun.failover.worker_failure import failure_of
from unirun.values import WorkerId, show_ranks
from unirun.wire.messages import Dismissed, Drained, Offer, Ready, Shutdown
from unirun.wire.reports import WorkerExited

LOSS_DELAY = 0.005
"""Seconds in which the losses of agents are gathered into one decision."""

KILLED = 128 + signal.SIGKILL
"""The exit code of a job whose nodes are gone."""


def agent_lost(draft: JobDraft, node: str, reason: str) -> None:
    """Note that the agent of `node` is gone. A rack that loses its power has many: one decision is made for all."""
    if not draft.state.losses:
        draft.send(After(LOSS_DELAY, Due.LOSSES))
    draft.put(replace(draft.state, losses={**draft.state.losses, node: reason}))


def nodes_lost(draft: JobDraft, nodes: Mapping[str, str]) -> None:
    """Handle the loss of `nodes` (node → reason). Workers never outlive their agent, so theirs are lost too."""
    nodes = {node: why for node, why in nodes.items() if not draft.state.given_up(node)}
    if not nodes:
        return
    for node, why in nodes.items():
        draft.record("agent_lost", f"{node}: {why}", node, *_workers_on(draft.state, node))
    before = draft.state
    cause = Cause(tuple(nodes), _reason(nodes), draft.now)
    failures = _fall(draft, nodes, cause.reason)
    draft.put(without(draft.state, nodes.keys()))
    draft.tell_now()
    if draft.state.phase is JobPhase.STOPPING:
        for name in draft.state.roles:
            advance(draft, name)
    elif draft.state.without(nodes):
        _go_on(draft, before, cause, failures)
    else:
        ending = [replace(each, decision="the job ends") for each in failures]
        draft.fail(*ending)
        end_job(draft, Decision("end_job", cause.reason), KILLED, by_failure=bool(failures))


def begin_without(draft: JobDraft, gone: Collection[str], reason: str) -> bool:
    """Start the job on the nodes that have joined, without `gone`. Returns False when the ranks do not fit there."""
    state = without(draft.state, gone)
    if not state.without(gone):
        return False
    cause = Cause(tuple(gone), reason, draft.now)
    before = draft.state
    draft.put(state)
    try:
        found = _relocation(draft, before, cause)
    except PlacementError:
        draft.put(before)
        return False
    begin(draft, found.placement, cause)
    return True


def without(state: JobState, gone: Collection[str]) -> JobState:
    """The state without the nodes `gone`: their agents are refused should they come back."""
    return replace(
        state,
        draining=tuple(node for node in state.draining if node not in gone),
        newcomers=tuple(node for node in state.newcomers if node not in gone),
        tainted=tuple(node for node in state.tainted if node not in gone),
        agents={node: agent for node, agent in state.agents.items() if node not in gone},
        away=state.away - {*gone},
        placement=replace(
            state.placement,
            lost=tuple(name for name in state.nodes if name in gone or name in state.placement.lost),
        ),
    )


def _reason(nodes: Mapping[str, str]) -> str:
    first = next(iter(nodes))
    if len(nodes) == 1:
        return f"the agent of node {first} is gone: {nodes[first]}"
    return f"the agents of {named(list(nodes))} are gone: {nodes[first]}"


def _fall(draft: JobDraft, nodes: Collection[str], reason: str) -> list[Failure]:
    """Mark the workers of `nodes` as killed. Returns their failures."""
    killed = Exit(signal=signal.SIGKILL)
    failures: list[Failure] = []
    for role in draft.state.roles.values():
        for worker in role.live:
            if worker.node in nodes:
                who = WorkerId(role.name, worker.rank, worker.incarnation)
                end = WorkerExited(who, draft.now, None, killed.signal, note=reason)
                failures.append(replace(failure_of(draft.state, worker, end, killed), rule="node"))
                draft.put_worker(role.name, worker.ended(killed), PhaseEvent.NODE_LOST)
        if role.is_program:
            unsettle(draft, role.name)
    return failures


def _go_on(draft: JobDraft, before: JobState, cause: Cause, failures: Sequence[Failure]) -> None:
    """Place what was on lost nodes elsewhere, or end the job."""
    missing, decisions = decide_missing(before, draft.state, cause)
    for name, decision in decisions.items():
        if decision.action == "end_job" and draft.state.role_spec(name).optional:
            give_up(draft, name, _ranks(missing, name), decision.reason)
    _, decisions = decide_missing(before, draft.state, cause)
    no_room: PlacementError | None = None
    if end_of(decisions) is None:
        try:
            found = _relocation(draft, before, cause)
            decisions = dict(found.decisions)
        except PlacementError as error:
            no_room = error
    reasons = {name: decision.reason for name, decision in decisions.items()}
    decided = [replace(each, decision=reasons.get(each.worker.role, cause.reason)) for each in failures]
    draft.fail(*decided)
    if (end := end_of(decisions)) is not None:
        end_job(draft, end, KILLED, by_failure=bool(failures))
        return
    if no_room is not None:
        end = Decision("end_job", f"{cause.reason}; its ranks fit nowhere else: {no_room}")
        end_job(draft, end, EXIT_PLACEMENT, by_failure=False)
        return
    if draft.state.phase is JobPhase.LAUNCHING:
        begin(draft, found.placement, cause)
    else:
        relocate(draft, before, cause, found)


def _relocation(draft: JobDraft, before: JobState, cause: Cause) -> Relocation:
    """The next placement, and what follows from it. Where optional services have no room, or others cannot restart to
    make room for them, these services are given up: as few as are enough.

    Raises `PlacementError` when other ranks have no room either.
    """
    error: PlacementError | None = None
    try:
        found = _relocated(draft.state, before, cause)
        if (end := end_of(found.decisions)) is None:
            return found
        reason = f"with a place for it the job would end: {end.reason}"
    except PlacementError as no_room:
        error, reason = no_room, f"{cause.reason}; it fits nowhere else: {no_room}"
    optional = without_room(draft.state, cause.gone)
    for chosen in _choices([*optional]):
        trial = JobDraft(draft.state, draft.now)
        for name in chosen:
            give_up(trial, name, optional[name], reason)
        with suppress(PlacementError):
            without_it = _relocated(trial.state, before, cause)
            if end_of(without_it.decisions) is None:
                for name in chosen:
                    give_up(draft, name, optional[name], reason)
                return without_it
    if error is not None:
        raise error
    return found


def _relocated(state: JobState, before: JobState, cause: Cause) -> Relocation:
    """The consequences of the next placement of `state`. Raises `PlacementError`."""
    missing, decisions = decide_missing(before, state, cause)
    return relocation_to(before, state, place_without(state, cause.gone), cause, missing, decisions)


def _choices(optional: Sequence[str]) -> Iterator[Sequence[str]]:
    """Roles to give up: each alone, the last first; then ever more of the last ones."""
    yield from ((name,) for name in reversed(optional))
    yield from (optional[-count:] for count in range(2, len(optional) + 1))


def _ranks(missing: Sequence[str], name: str) -> list[int]:
    """Those of the role `name`."""
    return [int(who.rpartition(":")[2]) for who in missing if who.rpartition(":")[0] == name]


def _workers_on(state: JobState, node: str) -> list[str]:
    """The workers that live on `node`: ``actor:0-3``."""
    here = {role.name: [w.rank for w in role.live if w.node == node] for role in state.roles.values()}
    return [f"{name}:{show_ranks(ranks)}" for name, ranks in here.items() if ranks]


# The removal of a node from a running job: its ranks go elsewhere, nothing fails, then its agent leaves.

ON_ITS_WAY = (JobPhase.LAUNCHING, JobPhase.RUNNING)

RETRY_REMEDY = "try again in a moment"


def has_left(node: str) -> str:
    """The answer to who wants a node drained that was."""
    return f"{node} has left the job already"


def drain(draft: JobDraft, node: str) -> None:
    """Move the ranks of `node`. If they fit nowhere, the command that asked gets the reason, and nothing changes."""
    if node in draft.state.draining:
        return
    refusal = _why_not(draft.state, node) or _move(draft, node)
    if refusal is not None:
        draft.send(ToWatchers(refusal))


def leave_when_empty(draft: JobDraft) -> None:
    """Let the agents of draining nodes leave on which nothing runs any more."""
    state = draft.state
    if state.away or state.phase not in ON_ITS_WAY:
        return
    # Until its role meets elsewhere, a node may serve the store in which those that live on have met.
    if any(role.living and role.forming for role in state.roles.values()):
        return
    busy = {worker.node for role in state.roles.values() for worker in role.live}
    for node in state.draining:
        if node not in busy:
            draft.record("drain", f"{node} leaves, as nothing runs there any more", node)
            draft.order(node, Shutdown())
            draft.put(replace(without(draft.state, {node}), left=(*draft.state.left, node)))
            draft.send(ToWatchers(Drained(node)))


def _why_not(state: JobState, node: str) -> Drained | None:
    if state.phase not in ON_ITS_WAY:
        return Drained(node, "the job is ending")
    if node not in state.nodes:
        return Drained(node, f"the job has no node {node}", f"its nodes are {', '.join(state.nodes)}")
    if state.given_up(node):
        return Drained(node, has_left(node))
    if node in state.keepers:
        return Drained(
            node,
            f"{node} keeps the job's store",
            "start jobs with a store elsewhere if every node may leave: --store etcd://…",
        )
    if state.away or state.losses:
        return Drained(node, "the job is recovering from a loss", RETRY_REMEDY)
    if any(role.forming for role in state.roles.values()):
        return Drained(node, "a role is being formed anew", RETRY_REMEDY)
    if node not in state.agents:
        return Drained(node, f"{node} has not joined yet", RETRY_REMEDY)
    if not state.without({node}):
        return Drained(node, f"{node} is the job's only node", "add one first: unirun agent join")
    return None


def _move(draft: JobDraft, node: str) -> Drained | None:
    """Move what runs on `node`. Returns why that is impossible, having changed nothing."""
    before = draft.state
    after = replace(before, draining=(*before.draining, node))
    cause = Cause((node,), f"node {node} is drained", draft.now, asked=True)
    missing, decisions = decide_missing(before, after, cause)
    try:
        placement = placed_again(after, ()) if _has_ranks(before, node) else before.placement
    except PlacementError as error:
        return Drained(node, f"its ranks fit nowhere else: {error.problem}", error.remedy)
    placement = replace(placement, spares=tuple(name for name in placement.spares if name != node))
    found = relocation_to(before, after, placement, cause, missing, decisions)
    if (end := end_of(found.decisions)) is not None:
        return Drained(node, f"its ranks cannot move: {end.reason}")
    draft.record("drain", f"{node} is to leave the job", node)
    draft.put(after)
    if before.phase is JobPhase.LAUNCHING:
        begin(draft, placement, cause)
    else:
        relocate(draft, before, cause, found)
    draft.tell_now()
    return None


def _has_ranks(state: JobState, node: str) -> bool:
    """Return True if ranks of roles that have not ended are, or shall be, on `node`."""
    return any(
        place.node == node and state.roles[place.role].phase not in ROLE_ENDS
        for place in state.placement.assignments
    )


# Nodes that join a running job: who is let in, and which roles grow.
#
# A node that has come is a spare. When all roles run, those that have fewer ranks than they may have get more, and
# start again as a whole: nodes that come within `GROWTH_DELAY` seconds are one such restart. Ranks in a function that
# survives keep their memory, and their role grows when one of them has saved it. So do elastic workloads, between two
# calls of the trainer. Without one a visitor asks for it, as that knows when it loses least; then all start again.


def next_life(state: JobState, node: str) -> str:
    """The name under which the host `node` comes into the job: its own or, when the job has lost it or let it go, with
    the number of its next life (``h2.2``). What was said of the life before, and what comes from it late, is not about
    this one."""
    lives = chain((node,), (f"{node}.{number}" for number in count(2)))
    return next(name for name in lives if name not in state.placement.lost)


def made_up(state: JobState, offer: Offer) -> Offer:
    """The offer of a made-up node, which says nothing of its resources: they are those of the node of its name or, if
    there was none, of the first one."""
    nodes = sorted(state.inventory.nodes, key=lambda node: node.name != offer.node)
    return replace(offer, inventory=to_json(nodes[0]).decode())


def trouble(
    state: JobState, offer: Offer, ours: Mapping[str, str], joining: Collection[str] = ()
) -> Dismissed | None:
    """The reason why a node is not let in, None if it is. `ours` are the versions that it must have, and `joining` the
    names of other nodes that are about to come in."""
    if state.phase not in (JobPhase.LAUNCHING, JobPhase.RUNNING):
        return Dismissed("the job is ending")
    if not state.inventory.nodes:
        return Dismissed("its ranks can be nowhere but where they are")
    for unfit in misfits([offer], ours):
        return Dismissed(unfit.problem, unfit.remedy)
    count = len(set(state.nodes) - {*state.placement.lost})
    return taken_or_full(offer, (*state.nodes, *joining), count, state.spec.most_nodes)


def arrived(draft: JobDraft, event: Arrived) -> None:
    """Let a node in that has bound its endpoints, unless another one was faster."""
    offer, state = event.offer, draft.state
    refusal = trouble(state, offer, offer.versions)
    if refusal is not None:
        draft.send(ToGuest(offer.node, refusal))
        return
    draft.put(
        replace(
            state,
            inventory=Inventory((*state.inventory.nodes, *inventory_of([offer]).nodes)),
            placement=replace(state.placement, spares=(*state.placement.spares, offer.node)),
            newcomers=(*state.newcomers, offer.node),
        )
    )
    draft.record("arrival", f"{offer.node} comes into the job, from host {offer.host}", offer.node)
    draft.send(ToGuest(offer.node, Ready()), After(state.spec.join_timeout, Absent(offer.node)))


def is_absent(draft: JobDraft, node: str) -> None:
    """Give up a node that has come into the running job and has not joined: no stream of it ends."""
    if node not in draft.state.agents:
        nodes_lost(draft, {node: f"it did not join within {draft.state.spec.join_timeout:g} s"})


def grow(draft: JobDraft) -> None:
    """Give roles more ranks where nodes have come. Waits until every role runs, as one that starts again would have to
    start twice. Ranks in a function that survives lose nothing at a boundary, which they are told to report."""
    state = draft.state
    come = tuple(node for node in state.newcomers if node in state.agents)
    if not (come or any(role.grows for role in state.roles.values())) or not _settled(state):
        return
    draft.put(replace(state, newcomers=tuple(node for node in state.newcomers if node not in come)))
    # Others call workloads by their number, which stays unless they are elastic.
    roles = [role for role in state.roles.values() if role.restart == "role"]
    trainer = any(role.kind == "trainer" and role.phase not in ROLE_ENDS for role in state.roles.values())
    for role in state.roles.values():
        spec = state.role_spec(role.name)
        may = role.phase is RolePhase.RUNNING and (role.survives or (trainer and spec.elastic))
        grows = may and (spec.most or 0) > len(role.workers)
        if grows != role.grows:
            draft.put(replace(role, grows=grows))
            draft.tell_soon()
    names = [role.name for role in roles if not role.survives]
    cause = Cause(come, f"{', '.join(come) or 'a node'} joined", draft.now, come=True)
    _grow(draft, draft.state, names, cause)


def grow_at_boundary(draft: JobDraft, name: str) -> None:
    """Give a role that is at a boundary more ranks, if it is to grow. Its other ranks keep their memory."""
    role = draft.role(name)
    if role.grows and role.in_place and _settled(draft.state):
        draft.put(replace(role, grows=False))
        cause = Cause((), "nodes have joined", draft.now, come=True, boundary=True)
        _grow(draft, draft.state, [name], cause)
        draft.tell_now()


def grow_elastic(draft: JobDraft, name: str) -> None:
    """Give an elastic role more ranks, if there is room for some. Otherwise nothing changes; it may be asked again."""
    state = draft.state
    if name in state.roles and state.role_spec(name).elastic and _settled(state):
        cause = Cause((), "more ranks were asked for", draft.now, come=True)
        _grow(draft, state, [name], cause)


def _settled(state: JobState) -> bool:
    """Return True if every role runs or has ended, and no worker is waited for."""
    phases = {role.phase for role in state.roles.values()}
    whole = phases <= {RolePhase.RUNNING, *ROLE_ENDS}
    return whole and state.phase is JobPhase.RUNNING and not state.away and not state.losses


def _grow(draft: JobDraft, before: JobState, names: Sequence[str], cause: Cause) -> None:
    state = draft.state
    most = {
        name: most
        for name in names
        if state.roles[name].phase is RolePhase.RUNNING
        and (most := state.role_spec(name).most or 0) > len(state.roles[name].workers)
    }
    if not most:
        return
    busy = {place.node for place in state.placement.assignments}
    idle = [node for node in state.without(()) if node not in busy]
    try:
        placement = placed_again(state, (), aside=idle[max(len(idle) - state.spec.spares, 0) :], most=most)
    except PlacementError:
        return
    if all(len(placement.of_role(name)) == len(state.roles[name].workers) for name in most):
        return
    relocate(draft, before, cause, relocation_to(before, state, placement, cause, (), {}))
    draft.tell_now()
