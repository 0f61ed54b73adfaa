"""Nodes that join a running job: who is let in, and which roles grow.

A node that has come is a spare. When all roles run, those that have fewer ranks than they may have get more, and start
again as a whole: nodes that come within `GATHER` seconds are one such restart. Elastic workloads grow when a visitor
asks for it, as that knows when it loses least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from unirun.collocation import Inventory
from unirun.errors import PlacementError
from unirun.failover.draft import Arrived, JobDraft, ToGuest
from unirun.failover.moving import Cause, placed_again, relocate, relocation_to
from unirun.failover.offers import inventory_of, misfits
from unirun.failover.state import ROLE_ENDS, JobPhase, JobState, RolePhase
from unirun.wire.messages import Dismissed, Go, Offer


def trouble(state: JobState, offer: Offer, ours: Mapping[str, str]) -> Dismissed | None:
    """The reason why a node is not let in, None if it is. `ours` are the versions that it must have."""
    if state.phase not in (JobPhase.LAUNCHING, JobPhase.RUNNING):
        return Dismissed("the job is ending")
    if not state.inventory.nodes:
        return Dismissed("its ranks can be nowhere but where they are")
    if offer.node in state.nodes:
        had = "had" if state.given_up(offer.node) else "has"
        return Dismissed(f"the job {had} a node called {offer.node}", "give it another name: --node-name")
    most = state.spec.most_nodes
    if most is not None and len(set(state.nodes) - {*state.placement.lost}) >= most:
        return Dismissed(f"the job has {most} nodes, the most that it may have", "see --nnodes")
    for unfit in misfits([offer], ours):
        return Dismissed(unfit.problem, unfit.remedy)
    return None


def arrived(draft: JobDraft, event: Arrived) -> None:
    """A node has bound its endpoints: it is a part of the job, unless another one was faster."""
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
    draft.send(ToGuest(offer.node, Go()))


def grow(draft: JobDraft) -> None:
    """Give roles more ranks where nodes have come. Waits until every role runs, as one that starts again would have to
    start twice."""
    state = draft.state
    come = tuple(node for node in state.newcomers if node in state.agents)
    if not come or not _settled(state):
        return
    draft.put(replace(state, newcomers=tuple(node for node in state.newcomers if node not in come)))
    # Others call workloads by their number, which stays.
    names = [role.name for role in state.roles.values() if role.restart == "role"]
    _grow(
        draft,
        state,
        names,
        Cause(come, f"{', '.join(come)} joined", draft.now, asked=True, come=True),
    )


def grow_elastic(draft: JobDraft, name: str) -> None:
    """Give an elastic role more ranks, if there is room for some. Otherwise nothing changes; it may be asked again."""
    state = draft.state
    if name in state.roles and state.role_spec(name).elastic and _settled(state):
        cause = Cause((), "more ranks were asked for", draft.now, asked=True, come=True)
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
