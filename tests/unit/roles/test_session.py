"""The addresses that a worker knows as those of its job's hosts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unirun.roles.context import CallSession, hosts_in
from unirun.roles.peers import Peers, RoleInfo
from unirun.roles.transport.socket_transport import CallAddress
from unirun.values import WorkerId
from unirun.wire.address import TcpAddress
from unirun.wire.messages import RoleBrief, RoleView, View, Welcome, WorkerView


def view(endpoint: str, *addresses: str) -> RoleView:
    """A role whose workers listen at `addresses`."""
    workers = tuple(WorkerView(rank, 0, "serving", {"socket": each}) for rank, each in enumerate(addresses))
    return RoleView("actor", len(addresses), 0, endpoint, "running", workers)


def test_hosts_are_those_of_stores_and_of_workers_that_others_can_reach() -> None:
    there = str(CallAddress("/calls/actor.0.0", TcpAddress("10.0.0.2", 5, "n2")))
    assert {
        *hosts_in([view("10.0.0.1:29400", there, "/calls/actor.1.0"), view("[fd00::1]:5"), view("")])
    } == {
        "10.0.0.1",
        "10.0.0.2",
        "fd00::1",
    }


HOSTS = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


@given(st.lists(st.sets(st.sampled_from(HOSTS), min_size=1), min_size=1, max_size=4))
def test_the_hosts_of_a_job_are_those_of_the_latest_view(updates: list[set[str]]) -> None:
    """A host may come later, and one that has left is a stranger."""
    peers = Peers("actor", 0, {"actor": RoleInfo("actor", 1, 0)})
    session = CallSession(peers, {})
    for hosts in updates:
        addresses = (str(CallAddress("/calls/a", TcpAddress(each, 5, "n"))) for each in sorted(hosts))
        peers.update(View((view("", *addresses),)))
        assert {each for each in HOSTS if session._is_host(each)} == hosts


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_what_is_no_address_is_left_out(endpoint: str, one: str, other: str) -> None:
    """A worker with the token may say anything; the listeners of the others go on."""
    assert len([*hosts_in([view(endpoint, one, "{" + other)])]) <= 1


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2)), min_size=1, max_size=4))
def test_all_processes_have_one_number_for_a_rank_however_large_its_role_is_when_they_come(
    sizes: list[tuple[int, int]],
) -> None:
    briefs = (RoleBrief("actor", "script", "a.py", 3, None), RoleBrief("rollout", "script", "r.py", 2, None))
    everybody = [WorkerId(brief.name, rank, 0) for brief in briefs for rank in range(brief.count)]
    for size in sizes:
        welcome = Welcome(View(()), "{}", "job", briefs, (), 60.0, "torch")
        infos = {b.name: RoleInfo(b.name, count, 0) for b, count in zip(briefs, size, strict=True)}
        agent = CallSession(Peers("actor", 0, infos, welcome=welcome), {})._rpc_agent()
        assert [agent._index(who) for who in everybody] == [*range(len(everybody))]
