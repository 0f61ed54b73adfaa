"""``unirun inject`` for a rank on another host than the command and the master, and the record of its failure."""

from __future__ import annotations

import json

import pytest

from .cluster import LIVING, UnirunOnHosts, places, starts


@pytest.mark.timeout(300)
def test_a_rank_of_another_host_is_killed_and_its_failure_is_told(cluster: UnirunOnHosts) -> None:
    """
    1. Six ranks run on three hosts; the command is on none of them, and the master on the first.
    2. A rank of the last host is killed: all ranks start again, where they were.
    3. `unirun failures` says where it was, that the fault was injected, and how long the role was away.
    """
    job = cluster.over_ssh(LIVING, actor="count: 6")
    before = starts(job, 6)
    cluster.warmed_up()
    assert cluster("inject", "mine", "actor:5", "--fault", "sigkill").out == "sigkill → actor:5\n"
    assert places(starts(job, 6, 1)) == places(before)
    (row,) = [json.loads(line) for line in cluster("failures", "mine", "--json").out.splitlines()]
    record = row["record"]
    assert (record["rank"], record["node"], record["kind"]) == (5, "h3", "injected")
    assert record["exit"] == "killed by SIGKILL"
    cluster.enough()
    assert job.end().code == 0
    (row,) = [json.loads(line) for line in cluster("failures", "mine", "--json").out.splitlines()]
    assert row["durations"]["away"] > 0
