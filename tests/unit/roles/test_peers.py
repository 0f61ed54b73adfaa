"""The places where callers find workers, also when a role has become smaller."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from queue import Queue
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.wire.endpoints import encoded
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import ConnectionLost, JobError, StoreAway, UsageError
from unirun.roles.peers import (
    Peer,
    Peers,
    RoleInfo,
    _agent_handle,
    _file_behind,
    _listen,
    linked_peers,
    lone_peers,
)
from unirun.values import Engine, WorkerId
from unirun.wire.blocking import BlockingStream
from unirun.wire.messages import RoleBrief, RoleView, View, Welcome, WorkerView
from unirun.wire.reports import CommitJob, LocalEngines, MasterReply, MasterRequest, Message, ViewWanted


def role(ranks: int, generation: int) -> RoleView:
    workers = tuple(WorkerView(n, generation, "serving", {"torch": f"at {n}"}) for n in range(ranks))
    return RoleView("actor", ranks, generation, "h:1", "running", workers)


@pytest.fixture
def peers() -> Peers:
    """Of a job whose three actors have become two."""
    briefs = (RoleBrief("actor", "script", "a.py", 3, None),)
    welcome = Welcome(View((role(3, 0),)), "{}", "job", briefs, (), 60.0, "torch")
    found = Peers("actor", 0, {"actor": RoleInfo("actor", 3, 0, "h:1")}, welcome=welcome)
    found.update(View((role(2, 1),)))
    return found


def test_a_rank_that_a_smaller_role_has_no_more_is_over(peers: Peers) -> None:
    assert peers.size("actor") == 2
    assert [peers.find("actor", rank).over for rank in range(3)] == [False, False, True]
    assert peers.find("actor", 1).endpoint == "at 1"


def test_a_rank_that_the_role_never_had_is_a_usage_error(peers: Peers) -> None:
    with pytest.raises(UsageError, match="role actor has no rank 3"):
        peers.find("actor", 3)


def test_a_rank_that_a_larger_role_has_got_is_found(peers: Peers) -> None:
    """More than it had when this process came into the job."""
    peers.update(View((role(5, 2),)))
    assert (peers.count("actor"), peers.size("actor")) == (5, 5)
    assert [peers.find("actor", rank).endpoint for rank in (3, 4)] == ["at 3", "at 4"]
    with pytest.raises(UsageError, match="role actor has no rank 5; it has ranks 0 to 4"):
        peers.find("actor", 5)


def test_a_rank_of_a_role_that_has_grown_and_become_smaller_again_is_over(peers: Peers) -> None:
    """Open calls to it are settled as lost. An error would keep them, and all that are looked at after them, open."""
    peers.update(View((role(6, 2),)))
    peers.update(View((role(5, 3),)))
    assert (peers.count("actor"), peers.size("actor")) == (6, 5)
    assert [peers.find("actor", rank).over for rank in range(6)] == [False] * 5 + [True]
    with pytest.raises(UsageError, match="role actor has no rank 6"):
        peers.find("actor", 6)


def test_the_former_size_of_a_role_is_known(peers: Peers) -> None:
    assert (peers.count("actor"), peers.known("actor").world_size) == (3, 2)


ROLES = ("actor", "critic")

WORKERS = st.builds(
    WorkerView,
    st.just(0),
    st.integers(0, 2),
    st.sampled_from(["starting", "running", "serving", "lost", "ended"]),
    st.sampled_from([{}, {"torch": "at 0", "sockets": "elsewhere"}, {"debugger": "h:1"}]),
)


@st.composite
def views(draw: st.DrawFn) -> View:
    roles = []
    for name in ROLES:
        some = draw(st.lists(WORKERS, min_size=1, max_size=3))
        ranked = tuple(replace(worker, rank=rank) for rank, worker in enumerate(some))
        roles.append(RoleView(name, len(ranked), draw(st.integers(0, 3)), "h:1", "running", ranked))
    return View(tuple(roles))


def found_in(view: View, role: str, rank: int) -> Peer:
    """The worker of a rank, as the latest view alone has it."""
    (there,) = (each for each in view.roles if each.name == role)
    if rank >= len(there.workers):
        return Peer(WorkerId(role, rank, 0), over=True)
    worker = there.workers[rank]
    return Peer(
        WorkerId(role, rank, worker.incarnation),
        worker.addresses.get("torch", "") if worker.phase == "serving" else "",
        there.generation,
        gone=worker.phase == "lost",
        over=worker.phase == "ended",
        whole="lost" not in [each.phase for each in there.workers],
        held="debugger" in worker.addresses,
    )


@given(st.lists(st.tuples(views(), st.sets(st.sampled_from(ROLES))), min_size=1, max_size=6))
def test_workers_are_those_of_the_latest_view_whatever_was_asked_before(
    updates: list[tuple[View, set[str]]],
) -> None:
    first = updates[0][0]
    peers = Peers("actor", 0, {}, welcome=Welcome(first, "{}", "job", (), (), 60.0, "torch"))
    most = dict.fromkeys(ROLES, 0)
    for view, asked in updates:
        peers.update(view)
        for role in view.roles:
            most[role.name] = max(most[role.name], role.world_size)
            assert (peers.size(role.name), peers.count(role.name)) == (role.world_size, most[role.name])
        for name in asked:
            for rank in range(most[name]):
                assert peers.find(name, rank) == found_in(view, name, rank)
            with pytest.raises(UsageError, match=f"role {name} has no rank {most[name]}"):
                peers.find(name, most[name])


class Interrupted(Peers):
    """The link's thread has an update while another thread looks a worker up."""

    news: View | None = None

    def count(self, role: str) -> int:
        """As always, and then the update comes."""
        found, news, self.news = super().count(role), self.news, None
        if news is not None:
            self.update(news)
        return found


def test_an_update_amid_a_look_leaves_nothing_of_the_view_before() -> None:
    lost = role(2, 0)
    lost = replace(lost, workers=(lost.workers[0], replace(lost.workers[1], phase="lost")))
    peers = Interrupted("actor", 0, {}, welcome=Welcome(View((lost,)), "{}", "job", (), (), 60.0, "torch"))
    peers.update(View((lost,)))
    peers.news = View((role(2, 1),))
    peers.find("actor", 0)
    assert [peers.find("actor", rank).whole for rank in range(2)] == [True, True]


def test_what_has_changed_is_taken_over_and_a_whole_view_is_asked_for_when_something_is_missing() -> None:
    ours, agents = socket.socketpair()
    with BlockingStream(ours) as link, BlockingStream(agents) as agent:
        welcome = Welcome(View((role(3, 0),), 4), "{}", "job", (), (), 60.0, "torch")
        peers = Peers("actor", 0, {"actor": RoleInfo("actor", 3, 0)}, welcome=welcome, send=link.send)
        lost = RoleView("actor", 3, 1, "h:1", "reforming", (WorkerView(1, 0, "lost", {}),))
        peers.update(View((lost,), 5, 4))
        view = peers.view("actor")
        assert view is not None
        assert [w.phase for w in view.workers] == ["serving", "lost", "serving"]
        assert peers.known("actor").generation == 1
        peers.update(View((), 7, 6))
        assert agent.receive(WAIT_TIMEOUT) == ViewWanted()
        peers.update(View((role(2, 2),), 7))
        view = peers.view("actor")
        assert view is not None
        assert len(view.workers) == peers.known("actor").generation == 2


def test_a_step_is_committed_by_the_master() -> None:
    sent: list[Message] = []

    def send(message: Message) -> None:
        sent.append(message)
        assert isinstance(message, CommitJob)
        rank.answered(MasterReply(WorkerId("actor", 0, 0), message.number, "20" if message.step else None))

    rank = Peers("actor", 0, {"actor": RoleInfo("actor", 1, 0)}, send=send)
    assert rank.commit(0, (), timeout=WAIT_TIMEOUT) is None
    assert rank.commit(30, ("actor",), timeout=WAIT_TIMEOUT) == 20
    assert sent == [CommitJob(1, 0), CommitJob(2, 30, ("actor",))]
    assert rank._asked == {}


def test_the_master_is_asked_with_all_that_was_said_and_each_question_has_its_answer() -> None:
    sent: list[MasterRequest] = []

    def send(message: Message) -> None:
        assert isinstance(message, MasterRequest)
        sent.append(message)
        problem = "there is none" if message.data == "bad" else ""
        for number in (message.number + 1, message.number):
            who = WorkerId("actor", 0, 0)
            rank.answered(MasterReply(who, number, f"{message.name} {message.number}", problem))

    rank = Peers("actor", 0, {"actor": RoleInfo("actor", 1, 0)}, send=send)
    assert rank.ask("save_state", "critic", "now", timeout=WAIT_TIMEOUT) == "critic 1"
    assert rank.ask("save_state", "reward", timeout=WAIT_TIMEOUT) == "reward 2"
    with pytest.raises(JobError, match="there is none"):
        rank.ask("save_state", "critic", "bad", timeout=WAIT_TIMEOUT)
    assert sent == [
        MasterRequest(1, "save_state", "critic", "now"),
        MasterRequest(2, "save_state", "reward", ""),
        MasterRequest(3, "save_state", "critic", "bad"),
    ]
    with pytest.raises(UsageError, match="save_state asks the job's master, and this process has none"):
        lone_peers({}).ask("save_state", timeout=0.0)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, ("default", 0, 1, 0)),
        ({"ROLE_NAME": "actor", "RANK": "3", "WORLD_SIZE": "8"}, ("actor", 3, 8, 0)),
        ({"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "5"}, ("default", 1, 2, 5)),
    ],
)
def test_without_unirun_the_variables_of_torchrun_say_which_rank_this_is(
    environ: dict[str, str], found: tuple[str, int, int, int]
) -> None:
    name, rank, size, generation = found
    peers = lone_peers(environ)
    assert (peers.role, peers.rank) == (name, rank)
    assert peers.roles() == {name: RoleInfo(name, size, generation)}
    assert peers.collocation(name) == ""
    assert not peers.linked


def test_the_process_at_the_other_end_of_the_link_is_the_agent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handle = _agent_handle(ours)
        assert handle is not None
        with open(f"/proc/self/fdinfo/{handle}") as file:
            fields = dict(line.split(":", 1) for line in file.read().splitlines())
        os.close(handle)
    assert int(fields["Pid"]) == os.getpid()


def test_an_answer_may_come_while_it_is_waited_for_and_others_get_theirs_meanwhile() -> None:
    sent: Queue[MasterRequest] = Queue()
    rank = Peers("actor", 0, {"actor": RoleInfo("actor", 1, 0)}, send=cast(Any, sent.put))
    with ThreadPoolExecutor(2) as pool:
        asked = {name: pool.submit(rank.ask, "save_state", name, timeout=WAIT_TIMEOUT) for name in ("a", "b")}
        for request in [sent.get(timeout=WAIT_TIMEOUT) for _ in asked][::-1]:
            rank.answered(MasterReply(WorkerId("actor", 0, 0), request.number, request.name))
            assert asked[request.name].result(WAIT_TIMEOUT / 2) == request.name


def test_an_answer_that_comes_too_late_is_not_kept() -> None:
    rank = Peers("actor", 0, {"actor": RoleInfo("actor", 1, 0)}, send=lambda _: None)
    with pytest.raises(StoreAway, match="commit_job was not answered within 0 s"):
        rank.commit(30, (), timeout=0.0)
    rank.answered(MasterReply(WorkerId("actor", 0, 0), 1, "20"))
    assert rank._asked == {}


def test_an_update_that_came_before_the_wait_for_it_is_not_waited_for(peers: Peers) -> None:
    before = peers.updates
    peers.update(View((role(2, 2),)))
    peers.wait(before, timeout=600.0)
    assert not peers.wait_for(lambda: peers.updates > before + 1, timeout=0.0)


def test_who_waits_for_a_condition_looks_again_after_each_update(peers: Peers) -> None:
    looks = iter([1, 2, 3, 4])

    def condition() -> bool:
        generation = next(looks)
        threading.Thread(target=peers.update, args=[View((role(2, generation),))]).start()
        return generation == 4

    assert peers.wait_for(condition, timeout=600.0)


class Link(BlockingStream):
    """A link to an agent, whose end is noted."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.over = threading.Event()

    def drain(self) -> Iterator[Message]:
        """As that of a stream."""
        try:
            yield from super().drain()
        except ConnectionLost:
            self.over.set()
            raise


def test_what_comes_with_the_welcome_is_taken_over_and_what_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent sends what it has; it comes in one read, or in several."""
    ended, (mine, its), (watched, agent) = threading.Event(), socket.socketpair(), os.pipe()
    link, engines = BlockingStream(mine), (Engine(0, 0, "http://127.0.0.1:1", ready=True),)
    monkeypatch.setattr("unirun.roles.peers._end", ended.set)
    monkeypatch.setattr("unirun.roles.peers._agent_handle", lambda sock: watched)
    monkeypatch.setattr("unirun.roles.peers.open_link", lambda environ: link)
    welcome = Welcome(View((role(3, 0),), 4), "{}", "job", (), (), 60.0, "torch")
    told = (View((role(3, 0),), 3), welcome, View((role(2, 1),), 5, 4), LocalEngines(engines))
    its.sendall(b"".join(map(encoded, told)))
    peers = linked_peers({"UNIRUN_ROLE": "actor", "UNIRUN_RANK": "0"})
    assert (peers.known("actor").generation, peers.size("actor"), peers.engines) == (1, 2, engines)
    its.sendall(encoded(View((role(3, 2),), 6, 5)))
    assert peers.wait_for(lambda: peers.known("actor").generation == 2, WAIT_TIMEOUT)
    os.close(agent)
    assert ended.wait(WAIT_TIMEOUT)
    link.close()
    its.close()
    os.close(watched)


def test_a_worker_ends_with_its_agent_also_when_its_link_has_ended_before(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr("unirun.roles.peers._end", ended.set)
    # As a pidfd, the one end is readable when the other one is gone.
    watched, agent = os.pipe()
    mine, its = socket.socketpair()
    with closing(mine), open(watched, "rb"):
        link = Link(mine)
        files = {number: _file_behind(number) for number in (watched, mine.fileno())}
        listening = threading.Thread(target=_listen, args=(link, peers, watched, files), daemon=True)
        listening.start()
        its.close()
        assert link.over.wait(WAIT_TIMEOUT)
        os.close(agent)
        assert ended.wait(WAIT_TIMEOUT)
        listening.join(WAIT_TIMEOUT)
