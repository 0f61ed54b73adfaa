"""The order in which the members of etcd are tried, and the words for one that does not answer."""

from __future__ import annotations

import pytest

from unirun.rendezvous.store._etcd_cluster import Cluster, said
from unirun.rendezvous.store.protocol import EtcdAddress


@pytest.mark.parametrize("own", ["127.0.0.1:2379", "[::1]:2379"])
def test_a_member_on_this_host_is_tried_first(own: str) -> None:
    others = ("192.0.2.1:2379", "member.invalid:2379")
    cluster = Cluster(EtcdAddress((*others, own)), None)
    assert cluster._order == [own, *others]
    cluster.close()


def test_the_reason_of_a_connection_is_told_without_its_steps() -> None:
    steps = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to"
    assert said(f"{steps} remote host: Connection refused") == "connection refused"
    assert said("etcdserver: request timed out") == "etcdserver: request timed out"
