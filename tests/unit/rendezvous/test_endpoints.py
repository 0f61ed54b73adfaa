"""A port is bound once and held; errors state a remedy."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import RendezvousError
from unirun.rendezvous.endpoints import Endpoint, hold_endpoint, hold_endpoints
from unirun.spec.job import Entry, JobSpec, RoleSpec


def test_port_0_binds_a_free_port_and_listens() -> None:
    endpoint = hold_endpoint("127.0.0.1")
    with socket.create_connection((endpoint.addr, endpoint.port), timeout=WAIT_TIMEOUT):
        assert str(endpoint) == f"127.0.0.1:{endpoint.port}"
        assert not endpoint.socket.get_inheritable()
    endpoint.close()


def test_a_chosen_port_is_bound_and_freed_by_close() -> None:
    first = hold_endpoint("127.0.0.1")
    port = first.port
    first.close()
    again = hold_endpoint("127.0.0.1", port)
    assert again.port == port
    again.close()


def test_a_port_number_out_of_range_is_an_error() -> None:
    with pytest.raises(RendezvousError, match="127.0.0.1:65536 cannot be listened on: there is no such port"):
        hold_endpoint("127.0.0.1", 65536)


def test_a_taken_port_is_an_error_with_a_remedy() -> None:
    first = hold_endpoint("127.0.0.1")
    with pytest.raises(RendezvousError, match="address already in use; leave out --master-port") as caught:
        hold_endpoint("127.0.0.1", first.port)
    assert caught.value.exit_code == 4
    first.close()


def test_an_endpoint_beyond_the_descriptor_limit_is_an_error_with_a_remedy() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[Endpoint] = []
    most = max(map(int, os.listdir("/proc/self/fd"))) + 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        with pytest.raises(RendezvousError, match="for a store: too many open files; .* ulimit -n NUMBER"):
            held.extend(hold_endpoint("127.0.0.1") for _ in range(most))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for endpoint in held:
            endpoint.close()


def test_each_roles_endpoint_has_its_own_port() -> None:
    held = [hold_endpoint("127.0.0.1") for _ in range(20)]
    assert len({endpoint.port for endpoint in held}) == 20
    for endpoint in held:
        endpoint.close()


def test_a_chosen_port_is_that_of_the_first_role_with_a_store_and_the_others_have_any(tmp_path: Path) -> None:
    free = hold_endpoint("127.0.0.1")
    free.close()
    roles = (
        RoleSpec("engine", 1, Entry("program", "true"), contract="none"),
        RoleSpec("actor", 1, Entry("script", "a.py")),
        RoleSpec("critic", 1, Entry("script", "a.py")),
    )
    held = hold_endpoints(JobSpec("job", "run-1", roles, ("actor",)), "127.0.0.1", free.port)
    ports = {name: endpoint.port for name, endpoint in held.items()}
    assert (list(ports), ports["actor"]) == (["actor", "critic"], free.port)
    assert ports["critic"] not in (0, free.port)
    for endpoint in held.values():
        endpoint.close()


def test_this_host_has_to_reach_itself_where_a_role_has_a_store_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program that asks for torchrun's variables has one too."""

    def refuse(*_: object) -> None:
        raise TimeoutError("no route")

    monkeypatch.setattr(socket, "create_connection", refuse)
    engine = RoleSpec("engine", 1, Entry("program", "true"), contract="none")
    assert hold_endpoints(JobSpec("job", "run-1", (engine,), ("engine",)), "127.0.0.1", 0) == {}
    before = {*os.listdir("/proc/self/fd")}
    for kind in ("program", "script"):
        role = RoleSpec("actor", 1, Entry(kind, "true"))
        with pytest.raises(RendezvousError, match="cannot be reached from this host, which has it: no route"):
            hold_endpoints(JobSpec("job", "run-1", (engine, role), ("actor",)), "127.0.0.1", 0)
    assert {*os.listdir("/proc/self/fd")} == before


def test_roles_of_which_one_gets_no_endpoint_hold_none() -> None:
    spec = JobSpec(
        "job", "run-1", tuple(RoleSpec(name, 1, Entry("script", "a.py")) for name in "abc"), ("a",)
    )
    before = {*os.listdir("/proc/self/fd")}
    with socket.create_server(("127.0.0.1", 0)) as bound:
        # It cannot be bound a second time.
        with pytest.raises(RendezvousError, match="cannot be listened on") as failed:
            hold_endpoints(spec, "127.0.0.1", 0, {"c": bound})
        assert {*os.listdir("/proc/self/fd")} == before
    # Its traceback holds what has not been closed.
    assert failed.tb is not None


@pytest.mark.parametrize("addr", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_of_another_host_is_an_error(addr: str) -> None:
    with pytest.raises(RendezvousError, match="see --master-addr"):
        hold_endpoint(addr)


def test_an_endpoint_may_have_an_ipv6_address() -> None:
    addresses = Path("/proc/net/if_inet6")
    if not addresses.exists() or f"{1:032}" not in addresses.read_text():
        pytest.skip("this host has no IPv6")
    endpoint = hold_endpoint("::1")
    with socket.create_connection((endpoint.addr, endpoint.port), timeout=WAIT_TIMEOUT):
        assert endpoint.socket.family == socket.AF_INET6
    endpoint.close()
