"""The order in which roles start and end, and the readiness of programs.

Nothing waits for a particular event: after each one, whatever is due then is started or told to end. A role begins
when all ranks have their ports, and enough ranks of the roles in its `after` are ready. A program that has ended starts
again when its back-off is over. At the end of the job, services end after all other roles, the last started first.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from unirun.errors import EXIT_PLACEMENT, Refused
from unirun.failover.draft import After, Due, JobDraft, ToWatchers, output_of
from unirun.failover.generations import form_first, obstructed, opened, order_store, start_again
from unirun.failover.phases import PhaseEvent
from unirun.failover.policy import LONGEST_DELAY, Decision
from unirun.failover.restart_or_end import (
    end_job,
    give_up,
    settle,
    stop_groups,
    stop_role,
    unsettle,
)
from unirun.failover.state import (
    NEVER,
    ROLE_ENDS,
    ROLE_WORKS,
    JobPhase,
    JobState,
    Looked,
    Ports,
    Ranks,
    RolePhase,
    RoleState,
    WorkerPhase,
    WorkerState,
)
from unirun.spec.job import RoleSpec
from unirun.values import WorkerId, show_ranks
from unirun.wire.messages import Reserve
from unirun.wire.reports import Health, Placed


def start_due(draft: JobDraft) -> None:
    """Start the roles and programs that are due. While nodes are away after a takeover, none is."""
    state = draft.state
    if state.phase is not JobPhase.RUNNING or state.away or not any(map(_has_to_start, state.roles.values())):
        return
    for name in state.roles:
        _end_wait(draft, name)
    _look(draft)
    state = draft.state
    if any(state.looked[role.name].portless for role in _with_ports(state)):
        return
    names = [name for name, role in state.roles.items() if _may_begin(state, role)]
    if names:
        form_first(draft, names)
    for name, role in state.roles.items():
        if role.is_program and role.phase is not RolePhase.WAITING:
            _start_programs(draft, name, state.looked[name].missing)


def _has_to_start(role: RoleState) -> bool:
    """Return True if a role waits, or has programs that do not run. It counts; no worker is looked at."""
    starts_again = role.is_program and (role.phase is RolePhase.RESTARTING or role.incomplete)
    return role.phase is RolePhase.WAITING or starts_again or role.due > 0


def _end_wait(draft: JobDraft, name: str) -> None:
    """Order the store of a role that forms its next generation, once its back-off is over and its turn comes.

    In a restart of the job no new process meets an old one, and none has to share a device with it.
    """
    state, role = draft.state, draft.role(name)
    if not (role.due and role.forming and _is_over(draft, role.due)):
        return
    ends = any(other.phase is RolePhase.RESTARTING and other.living for other in state.roles.values())
    if not ends and _is_its_turn(state, role):
        draft.put(replace(role, due=0.0))
        order_store(draft, name)


def _look(draft: JobDraft) -> None:
    """Count what decides about starts, and ask agents for the ports of ranks that have none there, once."""
    state = draft.state
    looked = {
        spec.name: _look_at(draft, spec)
        for spec in state.spec.roles
        if spec.is_program or spec.ports or spec.group
    }
    draft.put(replace(draft.state, looked=looked))


def _look_at(draft: JobDraft, spec: RoleSpec) -> Looked:
    role, placement = draft.role(spec.name), draft.state.placement
    before = draft.state.looked.get(role.name)
    if before is None or before.placement is not placement or len(before.workers) != len(role.workers):
        before = Looked(placement, Ranks())
    if before.workers is role.workers:
        return before
    portless, ready, missing = before.portless, before.ready, set(before.missing)
    asked: dict[str, list[int]] = {}
    needs_ports = bool(spec.ports) and role.phase not in ROLE_ENDS
    places = placement.of_role(role.name) if needs_ports else ()
    for old, worker in role.workers.since(before.workers):
        rank = worker.rank
        if rank < len(places) and _needs_ports(worker, node := places[rank].node):
            worker = replace(worker, ports=Ports(node))
            role = role.with_worker(worker)
            asked.setdefault(node, []).append(rank)
        portless += worker.portless - (old is not None and old.portless)
        if spec.group is not None and rank % spec.group == 0:
            ready += _is_ready(role, worker) - (old is not None and _is_ready(role, old))
        if worker.live or worker.ended_well:
            missing.discard(rank)
        else:
            missing.add(rank)
    if asked:
        draft.put(role)
        for node, ranks in asked.items():
            draft.order(node, Reserve(role.name, tuple(ranks)))
    return Looked(placement, draft.role(spec.name).workers, portless, ready, frozenset(missing))


def _needs_ports(worker: WorkerState, node: str) -> bool:
    """Return True if the next worker of a rank starts on `node`, of which it has no ports."""
    starts = not worker.live and worker.due != NEVER
    return starts and (worker.ports is None or worker.ports.node != node)


def _may_begin(state: JobState, role: RoleState) -> bool:
    turn = role.phase is RolePhase.WAITING and _is_its_turn(state, role)
    return turn and not obstructed(state, role)


def _is_its_turn(state: JobState, role: RoleState) -> bool:
    """Return True if the roles that `role` starts after are ready."""
    after = state.role_spec(role.name).after
    return all(_enough(state, name, count) for name, count in after.items())


def _enough(state: JobState, name: str, count: int) -> bool:
    """Return True if `count` ranks of a role, or groups, are ready (0: all). Those that an optional service has lost
    for good do not count as missing."""
    role, spec = state.roles[name], state.role_spec(name)
    if spec.optional and role.phase in ROLE_ENDS:
        return True
    if role.phase is RolePhase.RESTARTING:
        return False
    return _ready(state, name) >= (count or len(role.workers) // (spec.group or 1))


def _ready(state: JobState, name: str) -> int:
    """The number of ranks, or groups, of a role that are ready."""
    role, spec = state.roles[name], state.role_spec(name)
    if spec.group is None:
        return role.running
    looked = state.looked.get(name)
    if looked is not None and looked.workers is role.workers:
        return looked.ready
    return sum(_is_ready(role, role.workers[rank]) for rank in range(0, len(role.workers), spec.group))


def _is_ready(role: RoleState, worker: WorkerState) -> bool:
    return worker.ended_well or role.up(worker)


def waiting_to_start(state: JobState) -> tuple[str, ...]:
    """The roles that have not begun, and what they wait for, in words."""
    found = []
    for role in state.roles.values():
        waits = role.phase is RolePhase.WAITING or role.due
        after = state.role_spec(role.name).after if waits else {}
        for name, count in after.items():
            other = state.roles[name]
            if not _enough(state, name, count):
                ready = "ready" if other.probed else "up"
                whys = dict.fromkeys(w.health.why for w in other.workers if w.health and not w.health.ready)
                why = f" ({'; '.join([*whys][:3])})" if whys else ""
                spec = state.role_spec(name)
                number = f"{_ready(state, name)} of {count or len(other.workers) // (spec.group or 1)}"
                found.append(f"{role.name} starts after {name}, of which {number} are {ready}{why}")
    return tuple(found)


def _start_programs(draft: JobDraft, name: str, missing: Collection[int]) -> None:
    role = draft.role(name)
    if role.phase is RolePhase.RESTARTING:
        whole = not role.living and role.forming and not role.due and not obstructed(draft.state, role)
        if whole and all(worker.due == NEVER or _is_due(draft, worker) for worker in role.workers):
            opened(draft, name)
            settle(draft, name)
        return
    spec = draft.state.role_spec(name)
    due = [
        role.workers[rank]
        for rank in sorted(missing)
        if all(_may_start(draft, role.workers[member]) for member in spec.members(rank))
    ]
    if due and role.phase in ROLE_WORKS and not obstructed(draft.state, role):
        start_again(draft, name, due)


def _may_start(draft: JobDraft, worker: WorkerState) -> bool:
    return not worker.live and _is_due(draft, worker)


def _is_due(draft: JobDraft, worker: WorkerState) -> bool:
    return worker.due != NEVER and _is_over(draft, worker.due)


def _is_over(draft: JobDraft, due: float) -> bool:
    """Return True if a back-off is over; also when the clock was set back."""
    return not draft.now < due <= draft.now + LONGEST_DELAY


def _with_ports(state: JobState) -> list[RoleState]:
    """The roles that have ports, and have not ended."""
    roles = [state.roles[spec.name] for spec in state.spec.roles if spec.ports]
    return [role for role in roles if role.phase not in ROLE_ENDS]


def reserve_again(draft: JobDraft, node: str) -> None:
    """Repeat the orders for ports that the agent of `node` has not answered: it may have got none of them."""
    for role in _with_ports(draft.state):
        asked = [w.rank for w in role.workers if w.ports == Ports(node)]
        if asked:
            draft.order(node, Reserve(role.name, tuple(asked)))


def placed(draft: JobDraft, event: Placed) -> None:
    """Give ranks the ports that an agent has chosen. Without any the job ends, or goes on without an optional service.
    Ranks that have moved since wait for those of another node."""
    role = draft.role(event.role)
    if role.phase in ROLE_ENDS:
        return
    if event.problem:
        asked, ranks = Ports(event.node), {*event.ranks}
        waiting = [w.rank for w in role.workers if w.ports == asked and w.rank in ranks and w.portless]
        if not waiting:
            return
        reason = f"{role.name}:{show_ranks(waiting)} cannot start on {event.node}: {event.problem}"
        if draft.state.role_spec(role.name).optional:
            give_up(draft, event.role, waiting, reason)
            draft.tell_soon()
            return
        end_job(draft, Decision("end_job", reason), EXIT_PLACEMENT, by_failure=False)
        return
    count = len(draft.state.role_spec(event.role).ports)
    for rank, place in zip(event.ranks, event.places, strict=False):
        if not 0 <= rank < len(role.workers) or len(place.ports) != count:
            raise Refused(f"{event.node} has other ports than {event.role}:{rank} has asked for")
        worker = role.workers[rank]
        if worker.ports == Ports(event.node):
            role = role.with_worker(replace(worker, ports=Ports(event.node, place)))
    draft.put(role)
    draft.tell_soon()


def health_changed(draft: JobDraft, who: WorkerId, health: Health) -> None:
    """Handle a program that has become ready, or is not ready any more."""
    worker, name = draft.find(who), who.role
    if worker is None or not draft.role(name).probed:
        return
    phase = WorkerPhase.SERVING if health.ready else WorkerPhase.RUNNING
    reason = PhaseEvent.READY if health.ready else PhaseEvent.UNREADY
    draft.put_worker(name, replace(worker, phase=phase, health=health), reason)
    unsettle(draft, name)
    settle(draft, name)
    if phase is not worker.phase:
        text = "is ready" if health.ready else f"is not ready: {health.why}"
        draft.record("ready" if health.ready else "unready", f"{who} {text}", str(who))
        draft.send(ToWatchers(output_of(draft.state, name, worker.rank)))
        if draft.role(name).serves:
            draft.tell_now()
        else:
            draft.tell_soon()


def wait_again(draft: JobDraft) -> None:
    """Wait for the back-offs that an earlier master has begun, and end the groups that it wanted to end."""
    for role in draft.state.roles.values():
        if role.phase in ROLE_WORKS:
            stop_groups(draft, role.name)
    workers = (worker for role in draft.state.roles.values() if role.is_program for worker in role.workers)
    dues = {worker.due for worker in workers if not worker.live and worker.due > draft.now}
    dues |= {role.due for role in draft.state.roles.values() if role.due > draft.now}
    for due in dues:
        draft.send(After(min(due - draft.now, LONGEST_DELAY), Due.START))


def stop_due(draft: JobDraft) -> None:
    """Tell the services to end that are next: those of the latest start, once all that ended before are gone."""
    state = draft.state
    if state.phase is not JobPhase.STOPPING or state.verdict is None:
        return
    live = [role for role in state.roles.values() if role.living]
    waiting = [role for role in live if role.phase is not RolePhase.STOPPING]
    if not waiting or len(waiting) < len(live):
        return
    latest = max(role.wave for role in waiting)
    for role in waiting:
        if role.wave == latest:
            stop_role(draft, role.name, state.verdict)
