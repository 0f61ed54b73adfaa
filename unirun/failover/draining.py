"""The removal of a node from a running job: its ranks go elsewhere, nothing fails, then its agent leaves."""

from __future__ import annotations

from msgspec.structs import replace

from unirun.errors import PlacementError
from unirun.failover.draft import JobDraft, ToWatchers
from unirun.failover.moving import Cause, begin, decide_missing, placed_again, relocate, relocation_to
from unirun.failover.node_loss import without
from unirun.failover.state import ROLE_ENDS, JobPhase, JobState
from unirun.wire.messages import Drained, Shutdown

ON_ITS_WAY = (JobPhase.LAUNCHING, JobPhase.RUNNING)

AGAIN = "try again in a moment"


def has_left(node: str) -> str:
    """The answer to who wants a node drained that was."""
    return f"{node} has left the job already"


def drain(draft: JobDraft, node: str) -> None:
    """Move what runs on `node`. Where that cannot be, whoever has asked is told why, and nothing changes."""
    if node in draft.state.draining:
        return
    refusal = _why_not(draft.state, node) or _move(draft, node)
    if refusal is not None:
        draft.send(ToWatchers(refusal))


def leave_when_empty(draft: JobDraft) -> None:
    """Let the agents of draining nodes leave on which nothing runs any more."""
    state = draft.state
    if not state.draining or state.away or state.phase not in ON_ITS_WAY:
        return
    # Until its role meets elsewhere, a node may serve the store in which those that live on have met.
    if any(role.living and role.forming for role in state.roles.values()):
        return
    busy = {worker.node for role in state.roles.values() for worker in role.live}
    for node in state.draining:
        if node not in busy:
            draft.record("drain", f"{node} leaves, as nothing runs there any more", node)
            draft.order(node, Shutdown())
            draft.put(without(draft.state, {node}))
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
        return Drained(node, "the job is recovering from a loss", AGAIN)
    if any(role.forming for role in state.roles.values()):
        return Drained(node, "a role is being formed anew", AGAIN)
    if node not in state.agents:
        return Drained(node, f"{node} has not joined yet", AGAIN)
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
    if found.end is not None:
        return Drained(node, f"its ranks cannot move: {found.end.reason}")
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
