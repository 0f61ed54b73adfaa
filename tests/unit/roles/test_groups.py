"""Groups across roles. `actor:0` is this process; `rollout:0` is a thread of it, with a group of its own making."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import GroupError
from unirun.roles.formation import GroupForge, _build, missing_for_good
from unirun.roles.gloo import GlooGroup
from unirun.roles.peers import Peers, RoleInfo
from unirun.roles.process_groups import process_groups
from unirun.roles.rank_sets import RankSet
from unirun.wire.messages import RoleView, WorkerView

pytestmark = pytest.mark.leaves

distributed: Any = dist
LONG = timedelta(minutes=30)
ROLES = ("actor", "rollout")


class Actor(Peers):
    """The knowledge of `actor:0`; both roles have one rank and meet in a real store."""

    def __init__(self) -> None:
        super().__init__("actor", 0, {name: RoleInfo(name, 1, 0) for name in ROLES})
        self.linked = True
        self.store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.role_has("actor", 0)
        self.role_has("rollout", 0)

    def role_has(self, role: str, generation: int, phase: str = "running", worker: str = "running") -> None:
        """The agent tells of a role."""
        endpoint = f"127.0.0.1:{self.store.port}"
        with self._changed:
            self._roles = {**self._roles, role: RoleInfo(role, 1, generation, endpoint)}
            self._views[role] = RoleView(
                role, 1, generation, endpoint, phase, (WorkerView(0, 0, worker, {}),)
            )
            self._changed.notify_all()
        for listener in self._listeners:
            listener()


class Rollout:
    """`rollout:0`, in threads."""

    def __init__(self, actor: Actor, pool: ThreadPoolExecutor) -> None:
        self._actor, self._pool = actor, pool

    def prefix(self, actor: int, rollout: int) -> str:
        """The prefix under which the members of the roles' generations meet."""
        return f"unirun/actor.{actor}+rollout.{rollout}/gloo"

    def comes(self, actor: int, rollout: int) -> Future[Any]:
        """It meets with the other in these generations, and has the group."""
        client = distributed.TCPStore("127.0.0.1", self._actor.store.port, is_master=False)
        store = distributed.PrefixStore(self.prefix(actor, rollout), client)
        store.set("here/1", "1")
        # As torch prefixes what it gives to a backend.
        place = distributed.PrefixStore(
            "cpu/", distributed.PrefixStore(self.prefix(actor, rollout)[7:] + "/", store)
        )
        return self._pool.submit(ProcessGroupGloo, place, 1, 2, timeout=LONG)

    def meets(self, actor: int, rollout: int) -> None:
        """Wait until the other is there."""
        self._actor.store.wait([f"{self.prefix(actor, rollout)}/here/0"], timedelta(seconds=WAIT_TIMEOUT))


@pytest.fixture
def actor() -> Iterator[Actor]:
    yield Actor()
    process_groups().end_all()
    for group in list(distributed.distributed_c10d._world.pg_map):
        distributed.distributed_c10d._abort_process_group(group)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def rollout(actor: Actor, pool: ThreadPoolExecutor) -> Rollout:
    return Rollout(actor, pool)


@pytest.fixture
def forge(actor: Actor) -> GroupForge:
    return GroupForge(actor)


def group_of(forge: GroupForge, timeout: timedelta = LONG) -> Any:
    return forge.group(tuple(map(RankSet.parse, ROLES)), "gloo", timeout)


def sum_of(group: Any, peer: Any) -> int:
    """Both members add up their ranks and one."""
    mine, theirs = torch.tensor([1]), torch.tensor([2])
    other = peer.allreduce([theirs])
    group.allreduce([mine]).wait()
    other.wait()
    assert torch.equal(mine, theirs)
    return int(mine)


def test_a_group_has_all_ranks_of_all_roles_in_order(rollout: Rollout, forge: GroupForge) -> None:
    peer = rollout.comes(0, 0)
    group = group_of(forge)
    assert (group.rank(), group.size()) == (0, 2)
    assert dist.get_process_group_ranks(group) == [0, 1]
    assert sum_of(group, peer.result(WAIT_TIMEOUT)) == 3


def test_members_meet_though_the_store_cannot_be_reached_at_first(
    rollout: Rollout, forge: GroupForge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is being replaced."""
    reach, failures = forge._store, [distributed.DistNetworkError("connection refused") for _ in range(3)]

    def store(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return reach(*args)

    monkeypatch.setattr(forge, "_store", store)
    peer = rollout.comes(0, 0)
    assert sum_of(group_of(forge), peer.result(WAIT_TIMEOUT)) == 3
    assert failures == []


def test_a_group_is_kept_as_long_as_its_generations(
    actor: Actor, rollout: Rollout, forge: GroupForge
) -> None:
    peer = rollout.comes(0, 0)
    group = group_of(forge)
    assert group_of(forge) is group
    peer.result(WAIT_TIMEOUT)
    actor.role_has("rollout", 1)
    with pytest.raises(RuntimeError):
        group.allreduce([torch.tensor([1])]).wait()
    peer = rollout.comes(0, 1)
    again = group_of(forge)
    assert again is not group
    assert sum_of(again, peer.result(WAIT_TIMEOUT)) == 3


class OverNccl:
    """A group over NCCL."""

    def __init__(self) -> None:
        self.aborted: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def abort(self) -> None:
        """End its connections."""
        self.aborted.put(threading.current_thread())


def test_a_group_over_nccl_whose_generations_are_over_is_aborted_once(
    actor: Actor, forge: GroupForge
) -> None:
    """It is kept until its members meet again, and more views may come before."""
    sets, group = tuple(map(RankSet.parse, ROLES)), OverNccl()
    kept: Any = group
    forge._groups[sets, "cpu:gloo,cuda:nccl"] = forge._infos(sets), kept, []
    actor.role_has("actor", 0, "reforming")
    assert group.aborted.empty()
    for generation in (1, 2, 3):
        actor.role_has("rollout", generation)
    group.aborted.get(timeout=WAIT_TIMEOUT).join(WAIT_TIMEOUT)
    assert not [each for each in threading.enumerate() if each.name == "unirun-abort"]
    assert group.aborted.empty()


def test_the_others_of_a_broken_group_learn_of_it_before_its_next_generation(
    actor: Actor,
    rollout: Rollout,
    forge: GroupForge,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They wait in it for this rank, which has left it."""
    peer = rollout.comes(0, 0)
    kept = group_of(forge)
    theirs = peer.result(WAIT_TIMEOUT)
    waiting = pool.submit(lambda: theirs.allreduce([torch.tensor([2])]).wait())
    monkeypatch.setattr(GlooGroup, "intact", lambda _: False)
    again = pool.submit(group_of, forge)
    try:
        with pytest.raises(RuntimeError):
            waiting.result(10.0)
    finally:
        process_groups().end_all()
        actor.role_has("rollout", 1)
        peer = rollout.comes(0, 1)
    assert again.result(WAIT_TIMEOUT) is not kept
    peer.result(WAIT_TIMEOUT)


@pytest.mark.usefixtures("actor")
@pytest.mark.parametrize("fails", [False, True])
def test_the_default_group_has_its_device_afterwards(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """It has none meanwhile, as NCCL would split the new group off it."""
    device, c10d = torch.device("cuda", 0), distributed.distributed_c10d
    default = SimpleNamespace(bound_device_id=device)
    helper, during = c10d._new_process_group_helper, list[object]()

    def makes(*args: Any, **kwargs: Any) -> Any:
        during.append(default.bound_device_id)
        if fails:
            raise RuntimeError("a member has died")
        return helper(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(c10d, "_get_default_group", lambda: default)
        patch.setattr(c10d, "_new_process_group_helper", makes)
        with pytest.raises(GroupError, match="has died") if fails else nullcontext():
            _build(0, 1, "alone", distributed.HashStore(), "gloo", LONG)
    assert (during, default.bound_device_id) == ([None], device)


def test_a_restart_while_it_is_waited_for_moves_the_meeting(
    actor: Actor, rollout: Rollout, forge: GroupForge, pool: ThreadPoolExecutor
) -> None:
    def agent() -> Any:
        rollout.meets(0, 0)
        actor.role_has("rollout", 1)
        rollout.meets(0, 1)
        return rollout.comes(0, 1)

    news = pool.submit(agent)
    group = group_of(forge)
    assert sum_of(group, news.result(WAIT_TIMEOUT).result(WAIT_TIMEOUT)) == 3


def test_a_restart_while_it_is_being_formed_ends_that(
    actor: Actor, rollout: Rollout, forge: GroupForge, pool: ThreadPoolExecutor
) -> None:
    def agent() -> Any:
        # It has come, and dies before it has connected.
        store = distributed.PrefixStore(rollout.prefix(0, 0), actor.store)
        store.set("here/1", "1")
        store.wait(["actor.0+rollout.0/gloo//cpu//0/0"], timedelta(seconds=WAIT_TIMEOUT))
        actor.role_has("rollout", 1)
        return rollout.comes(0, 1)

    news = pool.submit(agent)
    group = group_of(forge)
    assert sum_of(group, news.result(WAIT_TIMEOUT).result(WAIT_TIMEOUT)) == 3


def test_a_broken_group_is_not_formed_again_in_the_same_generations(
    rollout: Rollout, forge: GroupForge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has their keys, and the member that is gone does not come under these."""
    peer = rollout.comes(0, 0)
    group_of(forge)
    peer.result(WAIT_TIMEOUT)
    monkeypatch.setattr(GlooGroup, "intact", lambda _: False)
    says = r"a member of group actor\+rollout is gone and its role was not started again"
    with pytest.raises(GroupError, match=says):
        group_of(forge, timedelta(seconds=0.2))


def test_a_member_that_does_not_come_is_named(forge: GroupForge) -> None:
    began = time.monotonic()
    with pytest.raises(GroupError, match="group rank 1 did not come in time"):
        group_of(forge, timedelta(seconds=1))
    assert time.monotonic() - began < WAIT_TIMEOUT


def test_a_role_that_has_ended_is_not_waited_for(actor: Actor, rollout: Rollout, forge: GroupForge) -> None:
    def agent() -> None:
        rollout.meets(0, 0)
        actor.role_has("rollout", 0, "succeeded", "ended")

    thread = threading.Thread(target=agent)
    thread.start()
    with pytest.raises(GroupError, match="rollout has ended with exit code 0, and is waited for"):
        group_of(forge)
    thread.join()


def test_a_member_whose_connection_breaks_is_waited_for(
    actor: Actor, rollout: Rollout, forge: GroupForge, pool: ThreadPoolExecutor
) -> None:
    peer = rollout.comes(0, 0)
    group_of(forge)
    # It dies, and its role is started again.
    del peer
    broken = threading.Event()

    def agent() -> Any:
        assert broken.wait(WAIT_TIMEOUT)
        actor.role_has("rollout", 1)
        return rollout.comes(0, 1)

    news = pool.submit(agent)
    ((_, _, parts),) = forge._groups.values()
    for each in parts:
        each.end()
    assert not any(each.intact() for each in parts)
    broken.set()
    assert sum_of(group_of(forge), news.result(WAIT_TIMEOUT).result(WAIT_TIMEOUT)) == 3


def view(name: str, phase: str, *workers: str) -> RoleView:
    ranks = tuple(WorkerView(rank, 0, each, {}) for rank, each in enumerate(workers))
    return RoleView(name, len(workers), 0, "h:1", phase, ranks)


ACTOR = view("actor", "running", "running", "running")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (view("rollout", "running", "running", "running"), ""),
        (view("rollout", "starting", "starting", "running"), ""),
        (view("rollout", "succeeded", "ended", "ended"), "role rollout has ended with exit code 0"),
        (view("rollout", "running", "running", "ended"), "rollout:1 has ended with exit code 0"),
        (view("rollout", "starting", "ended", "starting"), "rollout:0 has ended with exit code 0"),
        (view("rollout", "running", "lost", "running"), ""),
        (view("rollout", "restarting", "ended", "lost"), ""),
        (view("rollout", "reforming", "ended", "starting"), ""),
        (view("rollout", "stopping", "ended", "running"), ""),
        (view("rollout", "failed", "lost", "lost"), "role rollout has failed"),
        (view("rollout", "stopped", "ended", "lost"), "role rollout has stopped"),
    ],
)
def test_a_role_whose_ranks_have_ended_well_does_not_come_again(other: RoleView, says: str) -> None:
    assert missing_for_good([ACTOR, other], lambda role, rank: True) == says


def test_a_role_that_recovers_hides_no_other_one_that_has_ended() -> None:
    roles = [view("actor", "reforming", "lost"), view("rollout", "succeeded", "ended")]
    for order in (roles, roles[::-1]):
        assert missing_for_good(order, lambda role, rank: True) == "role rollout has ended with exit code 0"


def test_a_rank_that_was_there_before_it_ended_has_come() -> None:
    other = view("rollout", "running", "ended", "running")
    assert missing_for_good([ACTOR, other], lambda role, rank: (role, rank) != ("rollout", 0)) == ""
