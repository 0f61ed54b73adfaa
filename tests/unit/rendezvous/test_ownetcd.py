from __future__ import annotations

from pathlib import Path

import pytest

from unirun.errors import UsageError
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.creation import choose_members, command_of, possible_member, store_for, url_of
from unirun.rendezvous.store.protocol import EtcdAddress, parse_address
from unirun.rendezvous.store.url import anchored
from unirun.wire.messages import EtcdMember, Offer

NODES = [EtcdMember(f"n{number}", f"10.0.0.{number}", 2379 + number, 2479 + number) for number in range(1, 6)]


def offers(*members: EtcdMember | None) -> list[Offer]:
    return [Offer(f"n{number}", "h", -1, "{}", {}, etcd=each) for number, each in enumerate(members)]


@pytest.mark.parametrize(("able", "chosen"), [(1, 1), (2, 1), (3, 3), (5, 3)])
def test_members_are_three_or_one_as_an_even_number_saves_nothing(able: int, chosen: int) -> None:
    assert choose_members(NODES[:able]) == tuple(NODES[:chosen])


def test_without_the_program_on_any_node_there_is_no_etcd_of_a_jobs_own() -> None:
    with pytest.raises(
        UsageError, match="no node has the program etcd; install etcd-server on three of them"
    ):
        store_for("etcd", offers(None, None), insecure=False)


def test_nodes_without_the_program_are_passed_over() -> None:
    url, members = store_for("etcd", offers(None, *NODES[:3]), insecure=True)
    assert members == tuple(NODES[:3])
    assert url == "etcd://10.0.0.1:2380,10.0.0.2:2381,10.0.0.3:2382"


def test_a_store_that_is_named_is_used_as_it_is() -> None:
    assert store_for("etcd://h:1", offers(*NODES), insecure=False) == ("etcd://h:1", ())
    assert store_for(None, offers(*NODES), insecure=False) == (None, ())


def test_the_url_is_the_same_on_all_hosts_and_each_finds_its_own_certificate(tmp_path: Path) -> None:
    url = url_of(NODES[:3], insecure=False)
    assert anchored(url) == url
    for name in ("jobs", "nodes"):
        job = JobDir(tmp_path / name / "run")
        job.path.mkdir(parents=True)
        (job.path / "store").write_text(url)
        address = parse_address(job.store_url)
        assert isinstance(address, EtcdAddress)
        assert address.cert == address.key == str(job.path / "tls" / "node.pem")
        assert address.cacert == str(job.path / "tls" / "ca.pem")


def test_a_member_lets_in_only_who_has_a_certificate_of_the_job(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    (tmp_path / "uid").write_text("uid")
    command = command_of(NODES[:3], NODES[1], job, insecure=False)
    assert {"--client-cert-auth", "--peer-client-cert-auth", "--name=n2"} <= {*command}
    assert "--listen-client-urls=https://10.0.0.2:2381" in command
    assert "--auto-compaction-retention=10m" in command, (
        "else a long job fills the quota with values that are replaced"
    )
    assert all("http://" not in word for word in command)
    insecure = command_of(NODES[:1], NODES[0], job, insecure=True)
    assert not any("cert" in word or "https" in word for word in insecure)


@pytest.mark.parametrize("insecure", [False, True])
def test_a_member_finds_the_others_at_the_addresses_that_they_listen_at(
    tmp_path: Path, insecure: bool
) -> None:
    job = JobDir(tmp_path)
    (tmp_path / "uid").write_text("uid")
    members = [EtcdMember("n1", "fe80::1", 2379, 2380), NODES[1]]
    program, *options = command_of(members, members[0], job, insecure=insecure)
    scheme, tls = "http" if insecure else "https", str(tmp_path / "tls")
    files = {"trusted-ca-file": "ca.pem", "cert-file": "node.pem", "key-file": "node.pem"}
    secure = {f"--{part}{name}={tls}/{file}" for part in ("", "peer-") for name, file in files.items()}
    assert program == "etcd"
    assert {*options} == {
        "--name=n1",
        f"--data-dir={tmp_path}/etcd",
        f"--listen-client-urls={scheme}://[fe80::1]:2379",
        f"--advertise-client-urls={scheme}://[fe80::1]:2379",
        f"--listen-peer-urls={scheme}://[fe80::1]:2380",
        f"--initial-advertise-peer-urls={scheme}://[fe80::1]:2380",
        f"--initial-cluster=n1={scheme}://[fe80::1]:2380,n2={scheme}://10.0.0.2:2481",
        "--initial-cluster-token=uid",
        "--auto-compaction-retention=10m",
        "--heartbeat-interval=50",
        "--election-timeout=500",
        *(() if insecure else (*secure, "--client-cert-auth", "--peer-client-cert-auth")),
    }
    assert url_of(members, insecure=True) == "etcd://[fe80::1]:2379,10.0.0.2:2381"


def test_ports_of_a_member_are_free_and_two() -> None:
    member = possible_member("n0", "127.0.0.1")
    assert member is not None
    assert len({member.client, member.peer, 0}) == 3
